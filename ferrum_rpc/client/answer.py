"""The answer to one committed work item, with its rows as numpy arrays, and the results of a batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple, TypeVar, get_args

import numpy as np
import numpy.typing as npt

from ferrum_rpc.core import HandleRef, OutputKind, Pressure, RowBlock, RowKind, Rows, RunEnd, StepTiming
from ferrum_rpc.errors import ExecutorError
from ferrum_rpc.wire.rows import float_rows

Thing = TypeVar("Thing")

_SHOWN_TOKENS: Final = 4
_TOKENS: Final = RowKind.TOKENS  # a member costs 0.1 µs to look up, and every token is read through it

_OUTPUT_NAMES: Final = {
    rows: " or ".join(", ".join(each.__name__ for each in get_args(OutputKind) if each.rows is rows).rsplit(", ", 1))
    for rows in RowKind
}
"""The outputs that are answered with rows of a kind, in words."""


class TopLogprobs(NamedTuple):
    """The k best tokens of each row by falling log-probability, then rising id: ``token_ids`` uint32 [R, k],
    ``logprobs`` float32 [R, k]."""

    token_ids: npt.NDArray[np.uint32]
    logprobs: npt.NDArray[np.float32]


class TopTokenRows(NamedTuple):
    """The k largest logits of each row by falling logit, then rising id: ``token_ids`` uint32 [R, k], ``logits``
    float32 [R, k], ``logsumexp`` float32 [R]."""

    token_ids: npt.NDArray[np.uint32]
    logits: npt.NDArray[np.float32]
    logsumexp: npt.NDArray[np.float32]


class SelectedRows(NamedTuple):
    """The logits of the chosen tokens: ``logits`` float32 [R, n], ``logsumexp`` float32 [R]."""

    logits: npt.NDArray[np.float32]
    logsumexp: npt.NDArray[np.float32]


class NoSuchRowsError(LookupError):
    """The answer has no rows of the kind that was read, or another number of rows: request them in the output."""


class Answer(NamedTuple):
    """A committed work item. Two answers are equal only if they are the same object.

    ``handle`` and `length`: the sequence after the step. ``rows``: the raw row range (None: none were requested).
    ``cached_tokens`` of the prompt came from the prefix cache. ``replayed``: the executor's recorded answer to an
    earlier call with the same request id. ``pressure``: how full the executor is. ``timing``: the time by stage (None
    if no step ran for this answer).
    ``run_end``: why the item's run ended (None: it was not a run), and ``run_cause`` the reason of an interrupted run,
    whose tokens so far are the answer; the sequence can continue from there.
    ``recomputed_tokens`` that the sequence already had were fed again before the item's, because it was truncated by
    more than ``limits.free_truncation_tokens``.

    The row accessors raise `NoSuchRowsError` if other rows were requested. R is the number of rows: 1 for LAST, the
    item's tokens for ALL, the scored tokens for `NextToken`, the emitted ones for `Accept`, the chosen ones for a run.
    Arrays are read-only views of the answer's bytes.
    """

    handle: HandleRef
    rows: Rows | None
    pressure: Pressure
    timing: StepTiming | None = None
    cached_tokens: int = 0
    replayed: bool = False
    run_end: RunEnd | None = None
    run_cause: ExecutorError | None = None
    recomputed_tokens: int = 0

    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        return self is not other

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        facts = [f"length={self.length}", self._rows_in_words()]
        facts += [f"cached_tokens={self.cached_tokens}"] if self.cached_tokens else []
        facts += [f"recomputed_tokens={self.recomputed_tokens}"] if self.recomputed_tokens else []
        facts += ["replayed"] if self.replayed else []
        facts += [f"run_end={self.run_end.name}"] if self.run_end is not None else []
        facts += [f"run_cause={type(self.run_cause).__name__}"] if self.run_cause is not None else []
        return f"<Answer {' '.join(facts)}>"

    @property
    def length(self) -> int:
        """Tokens in the cache after the step."""
        return self.handle.seq_len

    @property
    def token(self) -> int:
        """The one greedy token of a one-row answer."""
        block, first, count = self._rows_of(_TOKENS)
        if count != 1:
            raise NoSuchRowsError(f"the answer has {count} rows: read `tokens`")
        found: int = block.columns["token_ids"].item(first)
        return found

    @property
    def tokens(self) -> npt.NDArray[np.uint32]:
        """The chosen tokens (`Greedy`, `Sample`), emitted tokens (`Accept`) or scored tokens (`NextToken`), uint32
        [R]."""
        return self._column(_TOKENS, "token_ids")

    @property
    def logprobs(self) -> npt.NDArray[np.float32]:
        """Log-probabilities of `tokens`, float32 [R]; requested with ``logprob=True``, or with `NextToken`."""
        return self._beside_token("logprobs", "logprob=True")

    @property
    def top_logprobs(self) -> TopLogprobs:
        """The best tokens of the rows of `tokens`, with their log-probabilities; requested with
        ``logprobs=RowLogprobs(k)``. They are of the model's row, before masks and sampling."""
        ids = self._beside_token("top_token_ids", "logprobs=RowLogprobs(k)")
        return TopLogprobs(ids, self._beside_token("top_logprobs", "logprobs=RowLogprobs(k)"))

    @property
    def selected_logprobs(self) -> npt.NDArray[np.float32]:
        """Log-probabilities float32 [R, n] of ``logprobs=RowLogprobs(token_ids=(id, ...))``, in their order."""
        return self._beside_token("selected_logprobs", "logprobs=RowLogprobs(token_ids=(id, ...))")

    @property
    def top_tokens(self) -> TopTokenRows:
        """The best candidates: ``token_ids`` uint32 [R, k] and ``logits`` float32 [R, k] by falling logit, and
        ``logsumexp`` float32 [R] over the whole vocabulary (a log-probability is ``logit - logsumexp``)."""
        return TopTokenRows(*[self._column(RowKind.TOP_TOKENS, name) for name in TopTokenRows._fields])

    @property
    def selected(self) -> SelectedRows:
        """``logits`` float32 [R, n] of the requested tokens, in their order, and ``logsumexp`` float32 [R]."""
        return SelectedRows(*[self._column(RowKind.SELECTED_TOKENS, name) for name in SelectedRows._fields])

    @property
    def logits(self) -> npt.NDArray[np.float32]:
        """Whole rows, float32 [R, V], converted from the transmitted type."""
        return float_rows(self._column(RowKind.LOGITS, "logits"))

    @property
    def hidden_states(self) -> npt.NDArray[np.float32]:
        """The input of the output head, float32 [R, hidden size], converted from the transmitted type."""
        return float_rows(self._column(RowKind.HIDDEN_STATES, "hidden_states"))

    def _rows_in_words(self) -> str:
        if self.rows is None:
            return "no rows"
        if self.rows.block.kind is not RowKind.TOKENS:
            return f"{self.rows.count} x {_OUTPUT_NAMES[self.rows.block.kind]}"
        shown = ", ".join(map(str, self.tokens[:_SHOWN_TOKENS].tolist()))
        return f"tokens=[{shown}]" if self.rows.count <= _SHOWN_TOKENS else f"tokens=[{shown}, ... {self.rows.count}]"

    def _beside_token(self, name: str, ask_with: str) -> npt.NDArray[Any]:
        try:
            return self._column(_TOKENS, name)
        except KeyError:
            raise NoSuchRowsError(f"the answer has no such log-probabilities: ask with {ask_with}") from None

    def _column(self, kind: RowKind, name: str) -> npt.NDArray[Any]:
        """The answer's rows of a column. Raises `KeyError` if the block lacks it."""
        block, first, count = self._rows_of(kind)
        return block.columns[name][first : first + count]

    def _rows_of(self, kind: RowKind) -> Rows:
        if self.rows is None:
            gone = "a replayed answer whose rows are gone" if self.replayed else "an answer without rows"
            raise NoSuchRowsError(f"this is {gone}")
        found = self.rows.block.kind
        if found is not kind:
            raise NoSuchRowsError(f"the answer holds {_OUTPUT_NAMES[found]} rows: ask with {_OUTPUT_NAMES[kind]}")
        return self.rows


class BatchResults(list[Answer | ExecutorError]):
    """The results of a batch call: ``results[i]`` is the `Answer` of ``items[i]``, or the `ExecutorError` that refused
    it. A list, with methods for schedulers:

        for answer in results.all_answers():                   # or raise the first refusal
            ...
        answered, refused = results.split(requests)            # one request for each item, in their order
        for request, answer in answered:
            request.tokens.append(answer.token)
        for request, error in refused:
            log.warning("%s: %s", request, error)
    """

    __slots__ = ()

    def answers(self) -> list[Answer]:
        """The answers of items that were not refused, in the order of the items."""
        return [each for each in self if isinstance(each, Answer)]

    def errors(self) -> list[ExecutorError]:
        """The errors of refused items, in the order of the items."""
        return [each for each in self if isinstance(each, ExecutorError)]

    def all_answers(self) -> list[Answer]:
        """The answers of all items. Raises the first refusal if there is one; the other items are committed
        nevertheless."""
        if errors := self.errors():
            raise errors[0]
        return self.answers()

    def split(self, things: Iterable[Thing]) -> tuple[list[tuple[Thing, Answer]], list[tuple[Thing, ExecutorError]]]:
        """The answers and the refusals, each paired with the element of ``things`` of its item. Raises ValueError
        unless ``things`` has one element for each item."""
        answered: list[tuple[Thing, Answer]] = []
        refused: list[tuple[Thing, ExecutorError]] = []
        for thing, result in zip(things, self, strict=True):
            if isinstance(result, Answer):
                answered.append((thing, result))
            else:
                refused.append((thing, result))
        return answered, refused


def joined(answers: Sequence[Answer]) -> Answer:
    """One answer for consecutive chunks: the last, with the rows (all of one kind), and the cached and the recomputed
    tokens, of all."""
    last, parts = answers[-1], [each.rows for each in answers if each.rows is not None]
    if len(answers) == 1:
        return last
    rows = parts[0] if parts else None
    if len(parts) > 1:
        blocks = [part.block.between(part.first, part.first + part.count) for part in parts]
        columns = {name: np.concatenate([block.columns[name] for block in blocks]) for name in blocks[0].columns}
        rows = Rows(RowBlock(blocks[0].kind, columns), 0, sum(part.count for part in parts))
    return last._replace(
        rows=rows,
        cached_tokens=sum(each.cached_tokens for each in answers),
        recomputed_tokens=sum(each.recomputed_tokens for each in answers),
    )
