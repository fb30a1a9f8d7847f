"""The answer to one committed work item, with its rows as numpy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from ferrum_rpc.core import (
    HandleRef,
    LogitRows,
    Pressure,
    RowBlock,
    Rows,
    SelectedRows,
    StepTiming,
    TokenRows,
    TopTokenRows,
)
from ferrum_rpc.wire.rows import float_rows

Kind = TypeVar("Kind", TokenRows, TopTokenRows, SelectedRows, LogitRows)

_ASKED_FOR = {
    TokenRows: "Greedy",
    TopTokenRows: "TopTokens",
    SelectedRows: "SelectedTokens",
    LogitRows: "FullLogits",
}


class NoSuchRowsError(LookupError):
    """The answer holds no rows of the kind, or not the number of rows, that was read: ask for them in the output."""


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """A committed work item.

    ``handle`` and `length` tell where the sequence stands now; ``rows`` is the raw row range (None: none were asked
    for). ``cached_tokens`` of the prompt came from the prefix cache. ``replayed``: the executor's recorded answer to an
    earlier call with the same request id. ``pressure`` says how full the executor is; ``timing`` where the time went
    (None where no step ran for this answer).

    The row accessors raise `NoSuchRowsError` where other rows were asked for. R is the number of rows: 1 for LAST, the
    item's tokens for ALL. Arrays are read-only views of the answer's bytes.
    """

    handle: HandleRef
    rows: Rows | None
    pressure: Pressure
    timing: StepTiming | None = None
    cached_tokens: int = 0
    replayed: bool = False

    @property
    def length(self) -> int:
        """Tokens in the cache after the step."""
        return self.handle.seq_len

    @property
    def token(self) -> int:
        """The one greedy token of a one-row answer."""
        tokens = self.tokens
        if len(tokens) != 1:
            raise NoSuchRowsError(f"the answer has {len(tokens)} rows: read `tokens`")
        return int(tokens[0])

    @property
    def tokens(self) -> npt.NDArray[np.uint32]:
        """Greedy tokens, uint32 [R]."""
        block, rows = self._block(TokenRows)
        return block.token_ids[rows]

    @property
    def logprobs(self) -> npt.NDArray[np.float32]:
        """Log-probabilities of `tokens`, float32 [R]; asked for with ``Greedy(logprob=True)``."""
        block, rows = self._block(TokenRows)
        if block.logprobs is None:
            raise NoSuchRowsError("the answer has no log-probabilities: ask with Greedy(logprob=True)")
        return block.logprobs[rows]

    @property
    def top_tokens(self) -> TopTokenRows:
        """The best candidates: ``token_ids`` uint32 [R, k] and ``logits`` float32 [R, k] by falling logit, and
        ``logsumexp`` float32 [R] over the whole vocabulary (a log-probability is ``logit - logsumexp``)."""
        block, rows = self._block(TopTokenRows)
        return TopTokenRows(block.token_ids[rows], block.logits[rows], block.logsumexp[rows])

    @property
    def selected(self) -> SelectedRows:
        """``logits`` float32 [R, n] of the tokens asked for, in their order, and ``logsumexp`` float32 [R]."""
        block, rows = self._block(SelectedRows)
        return SelectedRows(block.logits[rows], block.logsumexp[rows])

    @property
    def logits(self) -> npt.NDArray[np.float32]:
        """Whole rows, float32 [R, V], whatever type they travelled as."""
        block, rows = self._block(LogitRows)
        return float_rows(LogitRows(block.dtype, block.logits[rows]))

    def _block(self, kind: type[Kind]) -> tuple[Kind, slice]:
        if self.rows is None:
            gone = "a replayed answer whose rows are gone" if self.replayed else "an answer without rows"
            raise NoSuchRowsError(f"this is {gone}")
        if not isinstance(self.rows.block, kind):
            raise NoSuchRowsError(
                f"the answer holds {_ASKED_FOR[type(self.rows.block)]} rows: ask with {_ASKED_FOR[kind]}"
            )
        return self.rows.block, slice(self.rows.first, self.rows.first + self.rows.count)


def joined_rows(parts: Sequence[Rows]) -> Rows:
    """The rows of consecutive chunks as one range. All parts answer the same output."""
    if len(parts) == 1:
        return parts[0]
    block = _concatenate([_cut(part) for part in parts])
    return Rows(block, 0, sum(part.count for part in parts))


def _cut(rows: Rows) -> RowBlock:
    span = slice(rows.first, rows.first + rows.count)
    match rows.block:
        case TokenRows(token_ids, logprobs):
            return TokenRows(token_ids[span], None if logprobs is None else logprobs[span])
        case TopTokenRows(token_ids, logits, logsumexp):
            return TopTokenRows(token_ids[span], logits[span], logsumexp[span])
        case SelectedRows(logits, logsumexp):
            return SelectedRows(logits[span], logsumexp[span])
        case LogitRows(dtype, raw):
            return LogitRows(dtype, raw[span])


def _concatenate(blocks: Sequence[RowBlock]) -> RowBlock:
    def joined(name: str) -> npt.NDArray[np.generic]:
        return np.concatenate([getattr(block, name) for block in blocks])

    match blocks[0]:
        case TokenRows(_, logprobs):
            tokens = joined("token_ids").astype(np.uint32, copy=False)
            if logprobs is None:
                return TokenRows(tokens)
            return TokenRows(tokens, joined("logprobs").astype(np.float32, copy=False))
        case TopTokenRows():
            return TopTokenRows(
                joined("token_ids").astype(np.uint32, copy=False),
                joined("logits").astype(np.float32, copy=False),
                joined("logsumexp").astype(np.float32, copy=False),
            )
        case SelectedRows():
            return SelectedRows(
                joined("logits").astype(np.float32, copy=False), joined("logsumexp").astype(np.float32, copy=False)
            )
        case LogitRows(dtype, _):
            return LogitRows(dtype, joined("logits"))
