"""From hidden rows to packed answers: applies the head to the requested rows, then each request's reduction.

Rows of one kind are contiguous, so that the head runs once over all rows of a step (reading the head's weights is most
of its cost), and each kind leaves the device as one packed block. The head runs over slices of `HEAD_ROWS` rows: a
prompt that requests all of 8,192 rows of a 152k vocabulary must not allocate 5 GB of logits. Each slice is reduced and
copied to its place in the answer on the host before the next one is computed.

On a GPU all of this is queued without waiting: an answer's arrays are undefined until the copies are complete.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ferrum_rpc.core import (
    Accept,
    FullLogits,
    Greedy,
    HiddenStates,
    MaskRows,
    NextToken,
    OutputKind,
    RowBlock,
    RowDType,
    RowKind,
    RowLogprobs,
    Rows,
    Sample,
    SelectedTokens,
    TokenArray,
    TopTokens,
    named,
)
from ferrum_rpc.sampling.accept import Draft, Proposal, verify
from ferrum_rpc.sampling.draw import MAX_TOP_K, PARAMS_DTYPE, Sampler
from ferrum_rpc.sampling.masks import Masks, RowMask
from ferrum_rpc.sampling.penalties import CountedTokens, Penalty
from ferrum_rpc.sampling.samplers import TorchSampler
from ferrum_rpc.sampling.scores import Columns, Scored, select_tokens, token_columns
from ferrum_rpc.sampling.transfer import host_rows, to_device, to_host

HEAD_ROWS: Final = 256
"""Rows of one head product: 156 MB of float32 logits at a 152k vocabulary."""


class RowRequest(NamedTuple):
    """Rows ``first .. first + rows`` of the step's packed tokens, and what is wanted of them. ``position``: tokens of
    the sequence before the one that the first row chooses. ``counted``: these tokens, if there are penalties.
    ``scored``: the rows' tokens, where these are given. ``draft``: what a draft was drawn from. ``words``: the masks of
    the rows by their grammar, None for a row without one.
    """

    first: int
    rows: int
    kind: OutputKind
    position: int = 0
    counted: CountedTokens | None = None
    scored: TokenArray | None = None
    draft: Draft | None = None
    words: MaskRows | None = None


Chosen = list[tuple[RowBlock, Tensor]]
"""Blocks of a step's rows with their token ids on the device, int64 [R]. Those of more than `HEAD_ROWS` rows are on the
host only."""

_GREEDY: Final = Greedy()

_TORCH: Final = TorchSampler()
_NO_MASKS: Final = Masks(torch.device("cpu"))
_TORCH_DTYPE: Final = {RowDType.F32: torch.float32, RowDType.BF16: torch.bfloat16, RowDType.F16: torch.float16}


def select_rows(
    hidden: Tensor,
    requests: Sequence[RowRequest],
    head: Callable[[Tensor], Tensor],
    argmax: Callable[[Tensor], Tensor] | None = None,
    sampler: Sampler = _TORCH,
    *,
    masks: Masks = _NO_MASKS,
    chosen: Chosen | None = None,
) -> list[Rows]:
    """Answer every request.

    ``hidden`` [T, hidden] on the device; ``head`` maps [R, hidden] to float32 logits [R, V], ``argmax`` to the int64
    arg-max [R] of them, which may spare writing them; ``sampler`` draws, and knows which tokens' logits ``head`` gives;
    ``masks`` has those that requests name; to ``chosen`` the chosen tokens are added that are on the device.
    Returns host rows, one per request; requests of the same kind share a block, in the order of the requests. From a
    GPU their contents are on their way, and there when a `sampling.transfer.Marker` that is made afterwards is passed.
    """
    single = len(requests) == 1 and requests[0].rows == hidden.shape[0] <= HEAD_ROWS
    if single and argmax is not None and requests[0].kind == _GREEDY:  # a decode: 14 µs instead of 25
        columns = {"token_ids": argmax(hidden)}
        block = _to_host(RowKind.TOKENS, columns)
        if chosen is not None:
            chosen.append((block, columns["token_ids"]))
        return [Rows(block, 0, requests[0].rows)]
    groups: dict[OutputKind, list[int]] = {}
    members: list[int] = []
    previous: OutputKind | None = None
    for index, request in enumerate(requests):
        kind = request.kind
        if kind is not previous:  # spares most rows of a step a hash of 0.5 µs
            members, previous = groups.setdefault(_group_of(kind), []), kind
        members.append(index)
    parts: dict[OutputKind, Columns] = {}
    of_head = groups
    if states := [kind for kind in groups if isinstance(kind, HiddenStates)]:
        of_head = {kind: members for kind, members in groups.items() if kind not in states}
        for kind in states:
            rows = hidden.index_select(0, to_device(_packed(groups[kind], requests), hidden.device))
            parts[kind] = {"hidden_states": rows.to(_TORCH_DTYPE[kind.dtype])}
    if of_head:
        parts |= _reduced(hidden, requests, of_head, head=head, argmax=argmax, sampler=sampler, masks=masks)
    answers: list[Any] = [None] * len(requests)  # of `Rows`
    for kind, members in groups.items():
        block = _to_host(kind.rows, parts[kind])
        if chosen is not None and kind.rows is RowKind.TOKENS and parts[kind]["token_ids"].device == hidden.device:
            chosen.append((block, parts[kind]["token_ids"]))
        first = 0
        for index in members:
            count = requests[index].rows
            answers[index] = named(Rows, (block, first, count))
            first += count
    return answers


def _group_of(kind: OutputKind) -> OutputKind:
    """What stands for all of a step that share a block with ``kind``, whatever their seeds, filters and tokens."""
    if isinstance(kind, Sample):
        return _any_sample(kind.logprob, kind.logprobs)
    return NextToken(logprobs=kind.logprobs) if isinstance(kind, NextToken) else kind


@lru_cache(maxsize=256)
def _any_sample(logprob: bool, logprobs: RowLogprobs | None) -> Sample:
    return Sample(logprob=logprob, logprobs=logprobs)


def _reduced(
    hidden: Tensor,
    requests: Sequence[RowRequest],
    groups: dict[OutputKind, list[int]],
    *,
    head: Callable[[Tensor], Tensor],
    argmax: Callable[[Tensor], Tensor] | None,
    sampler: Sampler,
    masks: Masks,
) -> dict[OutputKind, Columns]:
    """What each kind requests of its rows' logits; ``groups``: the requests of each kind."""
    order = [index for members in groups.values() for index in members]
    extents, total = _extents(groups, requests)
    packed = None if _is_all(hidden, order, requests) else to_device(_packed(order, requests), hidden.device)
    if argmax is not None and list(groups) == [_GREEDY]:
        rows = hidden if packed is None else hidden.index_select(0, packed)
        if total <= HEAD_ROWS:
            return {_GREEDY: {"token_ids": argmax(rows)}}
        greedy: Columns = {}
        for low in range(0, total, HEAD_ROWS):
            _put(greedy, {"token_ids": argmax(rows[low : low + HEAD_ROWS])}, low, total)
        return {_GREEDY: greedy}
    chosen: dict[OutputKind, SampledRows | Scored] = {}
    for kind, members in groups.items():
        if isinstance(kind, Sample):
            keep = kind.logprob or kind.logprobs is not None
            chosen[kind] = SampledRows([requests[each] for each in members], sampler, masks, keep=keep)
        elif isinstance(kind, NextToken):
            scored = [each for each in (requests[index].scored for index in members) if each is not None]
            chosen[kind] = Scored.of(scored, hidden.device)
    parts: dict[OutputKind, Columns] = {kind: {} for kind in groups}
    for low in range(0, total, HEAD_ROWS):
        high = min(low + HEAD_ROWS, total)
        if packed is None:
            logits = head(hidden if high - low == total else hidden[low:high])
        else:
            logits = head(hidden.index_select(0, packed[low:high]))
        for kind, (first, last) in extents.items():
            if first < high and last > low:
                start, stop = max(first, low), min(last, high)
                mine = logits if stop - start == high - low else logits[start - low : stop - low]
                tokens = None
                if kind in chosen:
                    rows_of_kind = chosen[kind]
                    if stop - start < last - first:
                        rows_of_kind = rows_of_kind.between(start - first, stop - first)
                    tokens = rows_of_kind.tokens(mine)
                columns = _select(mine, kind, tokens, sampler)
                if total <= HEAD_ROWS:
                    parts[kind] = columns
                else:
                    _put(parts[kind], columns, start - first, last - first)
                del mine, columns
        del logits  # before the next slice is computed
    return parts


def _put(result: Columns, columns: Columns, first: int, total: int) -> None:
    """Copy the ``columns`` of the rows from ``first`` on to their place in the ``result`` of ``total`` rows, on the
    host."""
    for name, column in columns.items():
        leaving = column if column.device.type == "cpu" else _leaving(column)
        if name not in result:
            result[name] = host_rows(total, leaving)
        result[name][first : first + len(column)].copy_(leaving, non_blocking=True)


def _is_all(hidden: Tensor, order: Sequence[int], requests: Sequence[RowRequest]) -> bool:
    """Whether the rows are all that there are, in their order: those of decode steps of one kind."""
    end = 0
    for index in order:
        request = requests[index]
        if request.first != end:
            return False
        end += request.rows
    return end == hidden.shape[0]


def _packed(order: Sequence[int], requests: Sequence[RowRequest]) -> Tensor:
    """The rows' indices, kind by kind."""
    ranges = [np.arange(first, first + count) for first, count, *_ in (requests[index] for index in order)]
    return torch.from_numpy(np.concatenate(ranges))


def _extents(
    groups: dict[OutputKind, list[int]], requests: Sequence[RowRequest]
) -> tuple[dict[OutputKind, tuple[int, int]], int]:
    """Where each kind's rows stand, and how many there are of all kinds."""
    extents, first = {}, 0
    for kind, members in groups.items():
        last = first + sum([requests[index][1] for index in members])
        extents[kind] = (first, last)
        first = last
    return extents, first


class SampledRows:
    """Samples the rows of some requests, in order. It changes the logits unless it must ``keep`` them."""

    __slots__ = ("_bias", "_keep", "_masks", "_params", "_penalties", "_proposals", "_sampler")

    def __init__(
        self, requests: Iterable[RowRequest], sampler: Sampler, masks: Masks = _NO_MASKS, *, keep: bool
    ) -> None:
        rows: list[tuple[int | float, ...]] = []
        self._bias: list[tuple[int, int, float]] = []  # row, token, what is added
        self._penalties: list[tuple[int, range, CountedTokens, Sample, int]] = []  # with the first of their rows
        self._proposals: list[tuple[int, Proposal]] = []  # with their rows
        self._masks: list[RowMask] = []
        constrained: list[tuple[int, MaskRows]] = []  # with the first of their rows
        for _, count, kind, position, counted, _, draft, words in requests:
            assert isinstance(kind, Sample)  # noqa: S101 - the callers looked
            seed = random.getrandbits(64) if kind.seed is None else kind.seed
            if draft is not None:
                self._proposals += enumerate(draft.proposals(), len(rows))
            if kind.mask or kind.row_masks:
                self._masks += masks.of(kind, len(rows), count)
            if words is not None:
                constrained.append((len(rows), words))
            if counted is not None:
                self._penalties.append((len(rows), range(count), counted, kind, position))
            for row in range(count):
                if kind.bias:
                    self._bias += [(len(rows), token, value) for token, value in kind.bias]
                rows.append(
                    (seed, position + row, kind.temperature, kind.top_p, kind.min_p, min(kind.top_k, MAX_TOP_K))
                )
        if constrained:
            self._masks += masks.on_device(constrained)
        self._params = np.array(rows, PARAMS_DTYPE)
        self._sampler = sampler
        self._keep = keep

    def between(self, first: int, last: int) -> SampledRows:
        """Those of the rows ``first .. last``."""
        part = SampledRows((), self._sampler, keep=self._keep)
        part._params = self._params[first:last]
        part._bias = [(row - first, token, value) for row, token, value in self._bias if first <= row < last]
        for start, rows, counted, kind, position in self._penalties:
            own = rows[max(0, first - start) : max(0, last - start)]
            if own:
                part._penalties.append((max(0, start - first), own, counted, kind, position))
        part._proposals = [(row - first, each) for row, each in self._proposals if first <= row < last]
        for row, words in self._masks:
            if row < last and row + len(words) > first:
                part._masks.append(RowMask(max(0, row - first), words[max(0, first - row) : last - row]))
        return part

    def tokens(self, logits: Tensor) -> Tensor:
        """One for each row of float32 ``logits`` [r, V], int64 [r]."""
        if self._keep and (self._bias or self._penalties or self._masks):
            logits = logits.clone()
        if self._bias:
            rows, tokens, values = map(np.array, zip(*self._bias, strict=True))
            self._sampler.bias(logits, rows, tokens, values.astype(np.float32))
        if self._penalties:
            self._sampler.penalise(logits, self._each_penalty())
        if self._masks:  # what is forbidden is so before the others and after them: last, it is -inf for certain
            self._sampler.forbid(logits, self._masks)
        chosen = self._sampler.draw(logits, self._params)
        if self._proposals:
            verify(logits, self._params, self._proposals, chosen, self._sampler)
        return chosen

    def _each_penalty(self) -> list[Penalty]:
        return [
            penalty
            for first, rows, counted, kind, position in self._penalties
            for penalty in counted.penalties(kind, position, rows, first)
        ]


def _select(logits: Tensor, kind: OutputKind, tokens: Tensor | None, sampler: Sampler) -> Columns:
    """What ``kind`` wants of float32 ``logits`` [r, V], still on the device. ``tokens`` int64 [r]: of rows that are
    drawn or scored."""
    match kind:
        case Greedy(logprob, logprobs) | Sample(logprob=logprob, logprobs=logprobs):
            return token_columns(logits, tokens, logprob, logprobs, sampler)
        case NextToken(logprobs=logprobs):
            return token_columns(logits, tokens, True, logprobs, sampler)
        case TopTokens(k):
            return sampler.best(logits, k)._asdict()
        case SelectedTokens(token_ids):
            found = select_tokens(logits, token_ids, sampler)
            return {"logits": found, "logsumexp": sampler.best(logits, 0).logsumexp}
        case FullLogits(dtype):
            return {"logits": sampler.whole(logits).to(_TORCH_DTYPE[dtype])}
        case HiddenStates() | Accept():
            raise AssertionError("rows of this kind do not reach the head")


def _to_host(kind: RowKind, columns: Columns) -> RowBlock:
    """Views of the copies, which need not be there yet."""
    tensors = list(columns.values())
    if tensors[0].device.type != "cpu":
        tensors = [*map(_leaving, tensors)]
    return RowBlock(kind, dict(zip(columns, map(_array, to_host(tensors)), strict=True)))


def _leaving(column: Tensor) -> Tensor:
    """A GPU's column in the dtype in which it is copied to the host: ids as int32."""
    return column.to(torch.int32) if column.dtype is torch.int64 else column


def _array(column: Tensor) -> npt.NDArray[Any]:
    """As it goes to the wire: ids as uint32, bfloat16 as raw uint16."""
    if column.dtype is torch.int64:  # ids on a CPU, where numpy is the faster to convert them
        return column.numpy().astype(np.uint32)
    if column.dtype is torch.int32:
        return column.numpy().view(np.uint32)
    return column.view(torch.uint16).numpy() if column.dtype is torch.bfloat16 else column.numpy()
