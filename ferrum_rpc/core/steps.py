"""The primitive: a step, a list of spans that run in one forward pass, and the outcome of each.

What is created for every sequence of every step is a named tuple: as immutable as a frozen dataclass, and created in a
quarter of the time, which would be 6 µs more per sequence and step.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ferrum_rpc.core.outputs import NextToken, OutputSpec
from ferrum_rpc.core.rows import Rows
from ferrum_rpc.errors import ExecutorError

TokenArray = npt.NDArray[np.int32]
"""Token ids of one span, int32 [n]."""

TokenCounts = npt.NDArray[np.int32]
"""How often tokens occur, [n, 2]: each of them once, in any order, and how often it counts for presence and frequency,
which may be 0."""

named: Final = tuple.__new__
"""``named(HandleRef, (id, seq_len, version))`` is ``HandleRef(id, seq_len, version)`` in half of its 0.3 µs: a named
tuple's own ``__new__`` is a function in Python. All fields, in their order: no default fills in."""


@dataclass(frozen=True, slots=True)
class Run:
    """Feed each chosen token to the next step, until ``max_tokens`` are chosen or one of ``stop_token_ids`` is.
    ``at_context``: no more fit into the model's context."""

    max_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    at_context: bool = False


class RunEnd(enum.Enum):
    """Why a run ended; the contract's names."""

    MAX_TOKENS = "max_tokens"
    STOP_ID = "stop_id"
    CONTEXT = "context"
    CUT = "cut"


class RunEnded(NamedTuple):
    """The end of a run, and what cut it."""

    end: RunEnd
    cause: ExecutorError | None = None


class PrefixUse(NamedTuple):
    """How a sequence uses the prefix cache: it finds blocks of sequences with the same ``salt`` and ``adapter``, and
    ``publishes`` its own for them. ``fingerprint``: of the model with the adapter, where there is one. ``caller``: the
    digest of its caller's name (`prefix_hash.caller_digest`), whose imported content it finds as well; empty: of none.
    ``imported_from``: the position from which on the content of a new sequence is imported; None: it is computed."""

    salt: bytes = b""
    publishes: bool = True
    adapter: str = ""
    fingerprint: bytes = b""
    caller: bytes = b""
    imported_from: int | None = None


PREFIX: Final = PrefixUse()
"""Without a salt."""


class Span(NamedTuple):
    """``tokens`` of one sequence, to be written at positions ``start ..`` and attended causally.

    ``start`` is the sequence's length, or less: then the sequence is first rolled back to ``start`` in the same
    transaction. ``create`` marks a sequence that does not exist yet (``start`` is 0); ``reserve_tokens`` are tokens
    beyond the span for which blocks are held as well, or the span is refused. ``run``: the steps that follow by
    themselves, for which blocks are held too. ``parent``: a sequence of whose first ``start`` tokens the new one is
    made, as they were before the step. ``prefix``: how a new sequence uses the prefix cache; None: not at all.
    ``adapter``: the number of the adapter that the sequence is computed with; 0: none.
    """

    sequence: int
    tokens: TokenArray
    start: int
    output: OutputSpec
    create: bool = False
    reserve_tokens: int = 0
    run: Run | None = None
    parent: int | None = None
    prefix: PrefixUse | None = None
    adapter: int = 0

    @property
    def end(self) -> int:
        """The sequence's length once the span is committed."""
        return self.start + len(self.tokens)

    @property
    def prompt(self) -> TokenArray | None:
        """The tokens from the first on of which no row is needed, so that they need not be computed; None: there are
        none. A row of scores needs the one before it."""
        rows = self.row_count + isinstance(self.output.kind, NextToken)
        count = len(self.tokens) - max(1, rows)
        return self.tokens[:count] if count > 0 else None

    @property
    def row_count(self) -> int:
        """Rows that the span yields."""
        return self.output.row_count(len(self.tokens), self.start)


class Step(NamedTuple):
    """Spans that run in one forward pass, at most one per sequence.

    ``atomic`` lists index ranges of ``spans`` that succeed or fail together (the wire's ``all_or_nothing``). A span
    outside of them fails by itself.

    The first ``len(stops)`` spans continue runs of the step before this one, whose tokens need not be known yet: each
    has an array of one token of its own, into which the token is written when it is known. If it is one of the span's
    ``stops``, or the span's run ended otherwise, the span is left out (`LATE`).
    """

    spans: tuple[Span, ...]
    atomic: tuple[range, ...] = ()
    stops: tuple[tuple[int, ...], ...] = ()


class StepTiming(NamedTuple):
    """Statistics of one step for one of its submissions. Times in seconds on the executor's monotonic clock."""

    step: int
    sequences: int
    tokens: int
    queue_s: float
    forward_s: float


class SpanResult(NamedTuple):
    """A committed span: the sequence's new length and the requested rows; of a run those of all its steps.
    ``cached_tokens`` were found in the prefix cache. ``recomputed_tokens`` that the sequence already had were fed again
    before them, because it had gone back further than its recurrent states, or than the blocks of its window."""

    length: int
    rows: Rows | None
    ended: RunEnded | None = None
    cached_tokens: int = 0
    recomputed_tokens: int = 0


LATE: Final = SpanResult(-1, None)
"""In place of the result of a run's step that was left out: nothing changed. If a mask was not there in time, the run
goes on with the same step. If the step was to continue a run whose last token was not known (`Step.stops`), the run has
ended."""

SpanOutcome = SpanResult | ExecutorError
"""Per span: a result, or why this span did not run (its sequence is as before)."""


class StepResult(NamedTuple):
    """``outcomes[i]`` answers ``spans[i]``. ``blocks_copied`` counts copies on write, ``tokens_searched`` the tokens
    that were looked for in the prefix cache."""

    outcomes: tuple[SpanOutcome, ...]
    forward_s: float
    blocks_copied: int = 0
    tokens_searched: int = 0
