"""Tokens of sequences that are fed again, because something has gone back further than their lengths.

The pieces are forward passes of their own, between steps, so a long way back delays others by a pass at a time. What
they compute differs:

- Recurrent states: keys and values are in the cache, and stay; only the states advance (`StateFeeding`).
- Blocks behind a window (`kv.windows`): keys and values are computed again, into blocks of the sequence
  (`WindowFeeding`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Final

import numpy as np
import numpy.typing as npt

from ferrum_rpc.attention.geometry import BatchGeometry
from ferrum_rpc.attention.recurrent import STEP_TOKENS
from ferrum_rpc.core import OutputSpec, Positions, Span
from ferrum_rpc.engine.compute import Compute
from ferrum_rpc.engine.states import StatePiece, States
from ferrum_rpc.errors import ExecutorError, KvBlocksExhausted
from ferrum_rpc.kv.manager import KvManager
from ferrum_rpc.kv.sequence import Reservation

NO_ROWS: Final = OutputSpec(Positions.NONE)

PIECE_TOKENS: Final = STEP_TOKENS
"""Tokens of a sequence that are fed again in one forward pass. So few have the bits of single tokens."""

PASS_TOKENS: Final = {"cpu": PIECE_TOKENS, "cuda": 8 * PIECE_TOKENS}
"""Tokens that a forward pass feeds again on a device: others wait for it. More gain nothing on a CPU, where products
of 32 rows take longer than reading the weights: 136 ms for 32 tokens of Qwen3.5-0.8B, 266 for 64, 1,069 for 256 (two
cores, AVX-512 BF16). On a GPU both take as long at some 300 rows (arithmetic, not measured)."""


class StateFeeding:
    """What brings the ``states`` of sequences to where a span starts. ``stage`` is called before each forward pass;
    ``failed`` turns the error of one into that of its callers. ``max_tokens``: of a step, and so of a pass."""

    def __init__(
        self,
        states: States,
        kv: KvManager,
        compute: Compute,
        stage: Callable[[], object],
        failed: Callable[[Exception], ExecutorError],
        *,
        max_tokens: int,
    ) -> None:
        self._states, self._kv, self._compute = states, kv, compute
        self._stage, self._failed = stage, failed
        self._pass_tokens = min(max_tokens, PASS_TOKENS[compute.model.device.type])

    def missing(self, span: Span) -> int:
        """How many tokens must be fed again before ``span`` can run."""
        sequence = _whose(span)
        missing = 0 if sequence is None else self._states.missing(sequence, span.start)
        # a span that starts behind the end is refused when it is reserved
        return missing if sequence is None or not missing or span.start <= self._kv.length(sequence) else 0

    def feed(self, spans: Sequence[Span]) -> bool:
        """Feed, in one forward pass, pieces of what is missing before ``spans`` can run together. False: nothing is
        missing now, or there is no slot for it; then a span will be refused. Raises `StepFailed` and `DeviceLost`; then
        more may be missing, and nothing else changed."""
        whose = [(_whose(span), span.start) for span in spans]
        self._states.keep_for([(sequence, start) for sequence, start in whose if sequence is not None])
        missing = [span for span in spans if self.missing(span)]
        return bool(missing) and self._feed(missing) and any(map(self.missing, missing))

    def _feed(self, missing: Sequence[Span]) -> bool:
        """Feed the next pieces of the first sequences, one of each. False: there is no slot for any.

        Passes come to an end, because each of them feeds a token or more. They take spans in the same order, so each
        goes on with what the one before has fed, which is not dropped for other pieces (see `States.keep_for`). What
        may be dropped was there before the first pass, so that happens no more often than there are slots."""
        pieces, left, complete = dict[int, tuple[StatePiece, int]](), self._pass_tokens, False
        try:
            for span in missing:
                sequence, fork = _whose(span), span.parent is not None
                assert sequence is not None  # noqa: S101 - something is missing
                if sequence in pieces:
                    continue
                tokens = min(self.missing(span), PIECE_TOKENS, self._pass_tokens)
                if tokens > left:  # smaller pieces would be more: each goes through the tokens of the one before again
                    break
                try:
                    pieces[sequence] = self._states.next_piece(sequence, span.start, tokens, fork=fork), span.adapter
                except KvBlocksExhausted:
                    continue
                left -= tokens
            if pieces:
                self._stage()
                self._run(pieces.values())
            complete = True
        except Exception as error:
            raise self._failed(error) from error
        finally:
            for piece, _ in pieces.values():
                self._states.end_piece(piece, complete=complete)
        return bool(pieces)

    def _run(self, pieces: Collection[tuple[StatePiece, int]]) -> None:
        """A pass of these pieces, each with the number of its adapter."""
        kv, spans = self._kv, list[Span]()
        for (sequence, (_, _, first, count, _), _, _), adapter in pieces:
            tokens = kv.tokens(sequence)[first : first + count].copy()
            spans.append(Span(sequence, tokens, first, NO_ROWS, adapter=adapter))
        starts, counts = [span.start for span in spans], [len(span.tokens) for span in spans]
        geometry = BatchGeometry.build(kv.block_size, starts, counts, [kv.table(span.sequence) for span in spans])
        to_null_block = np.arange(sum(counts), dtype=np.int64) % kv.block_size
        step = self._states.store.begin([piece.span for piece, _ in pieces])
        self._compute.forward(spans, geometry._replace(slots=to_null_block), states=step)
        step.commit()


class WindowFeeding:
    """What brings the blocks of sequences in ``kv`` to where a span starts. ``stage`` is called before each forward
    pass, and ``make_way`` before blocks are reserved for those of a step; ``save_leaving``, then ``copy_blocks`` of
    `Reservation`, before any block is written.
    ``failed`` undoes the reservations of a pass, and turns its error into that of its callers. ``max_tokens``: of a
    step, and so of a pass."""

    def __init__(
        self,
        kv: KvManager,
        compute: Compute,
        *,
        stage: Callable[[], object],
        make_way: Callable[[], object],
        save_leaving: Callable[[], object],
        copy_blocks: Callable[[npt.NDArray[np.int64]], object],
        failed: Callable[[Exception, Sequence[Reservation]], ExecutorError],
        max_tokens: int,
    ) -> None:
        self._kv, self._compute = kv, compute
        self._stage, self._make_way, self._failed = stage, make_way, failed
        self._save_leaving, self._copy_blocks = save_leaving, copy_blocks
        self._pass_tokens = min(max_tokens, PASS_TOKENS[compute.model.device.type])

    def missing(self, span: Span) -> int:
        """How many tokens must be fed again before ``span`` can run, at most."""
        kv, parent = self._kv, span.parent
        return kv.missing(span.sequence if parent is None or kv.has_begun(span.sequence) else parent, span.start)

    def feed(self, spans: Sequence[Span]) -> bool:
        """Feed, in one forward pass, pieces of what is missing before ``spans`` can run. False: nothing is missing now,
        or no block is free for it; then a span will be refused. Raises `StepFailed` and `DeviceLost`; then more may be
        missing, and nothing else changed.

        What a sequence owes is fed for its forks before they begin, and only then what it needs for its own span. What
        a fork needs behind the window of its parent is fed for it alone (`KvManager.begin_fork`); `KvManager.end_begun`
        must follow where it is not reserved."""
        kv, starts, parents = self._kv, dict[int, tuple[int, int]](), set[int]()
        if not any(map(self.missing, spans)):
            return False
        self._make_way()
        for span in spans:
            if span.parent is not None and not kv.has_begun(span.sequence):
                if kv.missing(span.parent, span.start, fork=True):
                    starts.setdefault(span.parent, (span.start, span.adapter))
                else:
                    with suppress(KvBlocksExhausted):  # it is refused when it is reserved
                        kv.begin_fork(span.parent, span.sequence, span.start)
                        continue
                parents.add(span.parent)
        for span in spans:
            if span.sequence not in parents and kv.missing(span.sequence, span.start):
                starts[span.sequence] = span.start, span.adapter
        fed = self.feed_to(starts)
        done = any(not kv.missing(sequence, start) for sequence, (start, _) in starts.items())
        return (fed or done) and any(map(self.missing, spans))

    def feed_to(self, starts: dict[int, tuple[int, int]]) -> bool:
        """Feed pieces in one forward pass, up to a length of each sequence, with the number of its adapter. False:
        nothing was to be fed, or no block is free for it. Raises as `feed`. No step is under way."""
        kv, left, fed = self._kv, self._pass_tokens, list[tuple[Span, Reservation]]()
        try:
            for sequence, (start, adapter) in starts.items():
                first = kv.take_up(sequence, start)
                count = min(start - first, PIECE_TOKENS, left)
                if count < 1:
                    continue
                tokens = kv.tokens(sequence)[first : first + count].copy()
                try:
                    reserved = kv.reserve(sequence, first, count)
                except KvBlocksExhausted:
                    continue
                fed.append((Span(sequence, tokens, first, NO_ROWS, adapter=adapter), reserved))
                left -= count
            if fed:
                self._run(fed)
        except Exception as error:
            raise self._failed(error, [reserved for _, reserved in fed]) from error
        for span, reserved in fed:
            kv.commit(reserved, span.tokens, again=True)
        kv.trim_spares()
        return bool(fed)

    def _run(self, fed: Sequence[tuple[Span, Reservation]]) -> None:
        """A pass of these pieces, whose blocks are reserved."""
        self._save_leaving()
        copies = [pair for _, reserved in fed for pair in reserved.copies]
        if copies:
            self._copy_blocks(np.array(copies, dtype=np.int64))
        spans = [span for span, _ in fed]
        starts, counts = [span.start for span in spans], [len(span.tokens) for span in spans]
        tables = [reserved.table for _, reserved in fed]
        self._stage()
        self._compute.forward(spans, BatchGeometry.build(self._kv.block_size, starts, counts, tables))


def _whose(span: Span) -> int | None:
    """The sequence whose states a span starts from; None: it begins anew."""
    if span.parent is not None:
        return span.parent
    return None if span.create else span.sequence
