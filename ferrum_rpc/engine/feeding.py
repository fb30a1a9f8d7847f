"""Tokens of a sequence that are fed again, because its recurrent states have gone back further than its length.

Their keys and values are in the cache, and stay: only the states advance. The pieces are forward passes of their own,
between steps, so a long way back delays others by a piece at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from ferrum_rpc.attention.geometry import BatchGeometry
from ferrum_rpc.attention.recurrent_steps import RecurrentSpan
from ferrum_rpc.core import OutputSpec, Positions, Span
from ferrum_rpc.engine.compute import Compute
from ferrum_rpc.engine.states import States
from ferrum_rpc.errors import ExecutorError, KvBlocksExhausted
from ferrum_rpc.kv.manager import KvManager

NO_ROWS: Final = OutputSpec(Positions.NONE)


class StateFeeding:
    """What brings the ``states`` of sequences to where a span starts. ``stage`` is called before each forward pass;
    ``failed`` turns the error of one into that of its callers."""

    def __init__(
        self,
        states: States,
        kv: KvManager,
        compute: Compute,
        stage: Callable[[], object],
        failed: Callable[[Exception], ExecutorError],
    ) -> None:
        self._states, self._kv, self._compute = states, kv, compute
        self._stage, self._failed = stage, failed

    def missing(self, span: Span) -> int:
        """How many tokens must be fed again before ``span`` can run."""
        sequence = _whose(span)
        missing = 0 if sequence is None else self._states.missing(sequence, span.start)
        # a span that starts behind the end is refused when it is reserved
        return missing if sequence is None or not missing or span.start <= self._kv.length(sequence) else 0

    def feed(self, spans: Sequence[Span]) -> bool:
        """Feed a piece of what is missing before ``spans`` can run together. False: nothing is missing now, or there is
        no slot for it; then a span will be refused. Raises `StepFailed` and `DeviceLost`; then more may be missing, and
        nothing else changed."""
        missing = [span for span in spans if self.missing(span)]
        whose = [(_whose(span), span.start) for span in spans]
        self._states.keep_for([(sequence, start) for sequence, start in whose if sequence is not None])
        return any(map(self._feed, missing)) and any(map(self.missing, missing))

    def _feed(self, span: Span) -> bool:
        """Feed a piece, unless there is no slot for it."""
        sequence, fork = _whose(span), span.parent is not None
        assert sequence is not None  # noqa: S101 - something is missing
        try:
            piece = self._states.next_piece(sequence, span.start, fork=fork)
        except KvBlocksExhausted:
            return False
        complete = False
        try:
            self._stage()
            self._run(sequence, piece, span.adapter)
            complete = True
        except Exception as error:
            raise self._failed(error) from error
        finally:
            self._states.end_piece(sequence, piece, complete=complete)
        return True

    def _run(self, sequence: int, piece: RecurrentSpan, adapter: int) -> None:
        first, count, size = piece.start, piece.tokens, self._kv.block_size
        tokens = self._kv.tokens(sequence)[first : first + count].copy()
        geometry = BatchGeometry.build(size, [first], [count], [self._kv.table(sequence)])
        to_null_block = np.arange(count, dtype=np.int64) % size
        step = self._states.store.begin([piece])
        span = Span(sequence, tokens, first, NO_ROWS, adapter=adapter)
        self._compute.forward([span], geometry._replace(slots=to_null_block), states=step)
        step.commit()


def _whose(span: Span) -> int | None:
    """The sequence whose states a span starts from; None: it begins anew."""
    if span.parent is not None:
        return span.parent
    return None if span.create else span.sequence
