"""The samplers of rows that have all tokens: in C, and in torch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ferrum_rpc.native import library
from ferrum_rpc.sampling import masks as token_masks
from ferrum_rpc.sampling.draw import (
    Best,
    FloatArray,
    IntArray,
    Sampler,
    SamplingParams,
    filtered,
    passed,
    picked,
    uniforms,
    weights_of,
)
from ferrum_rpc.sampling.masks import RowMask
from ferrum_rpc.sampling.penalties import Penalty
from ferrum_rpc.sampling.top import top_tokens
from ferrum_rpc.sampling.transfer import to_device

LIMITS: Final = np.dtype(library.LimitsStruct)
"""What is left of a part of a row once the filters are known (``struct limits`` of sample.h): the logits that are not
below ``least``, of those that equal it the first ``ties``, and of these what weighs ``least_weight`` at least. Weights
are those of ``largest``. What is left passes ``target``, added up
by rising id, at the token to find; below 0: none is looked for."""

ROW_MASKS: Final = np.dtype(library.RowMaskStruct)
"""``struct row_mask`` of sample.h: the address of words, and the row that they are for."""

Limits = npt.NDArray[Any]
"""`LIMITS` [R]."""

ALL_TIES: Final = np.iinfo(np.int64).max


class ShardSampler(Sampler, Protocol):
    """What knows parts of rows too."""

    def weigh(self, logits: Tensor, limits: Limits) -> Tensor:
        """The weights that are left of ``logits`` [R, v], float32 [R, v], the others being 0."""

    def masses(self, logits: Tensor, limits: Limits) -> Tensor:
        """What these come to, float64 [R]."""

    def find(self, logits: Tensor, limits: Limits) -> Tensor:
        """The tokens of rows that have a target, int64 [R]; of others anything."""


class WholeRows:
    """What is the same for both."""

    def bias(self, logits: Tensor, rows: IntArray, tokens: IntArray, values: FloatArray) -> None:
        where = tuple(to_device(torch.from_numpy(each), logits.device) for each in (rows, tokens))
        logits.index_put_(where, to_device(torch.from_numpy(values), logits.device), accumulate=True)

    def argmax(self, logits: Tensor) -> Tensor:
        return logits.argmax(dim=-1)

    def at(self, rows: Tensor, tokens: Tensor) -> Tensor:
        return rows.gather(-1, tokens)

    def whole(self, logits: Tensor) -> Tensor:
        return logits

    def filtered(self, logits: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor, Tensor]:
        weights, plain = filtered(logits, params)
        return weights, plain, weights.sum(-1, dtype=torch.float64)

    def add(self, weights: Tensor, tokens: Tensor, values: Tensor) -> None:
        weights.scatter_add_(-1, tokens, values)

    def picked(self, weights: Tensor, chances: Tensor, otherwise: Tensor) -> Tensor:
        return picked(weights, chances).where(weights.amax(-1) > 0, otherwise)


class TorchSampler(WholeRows):
    """A `Sampler` that runs everywhere. It sorts the rows where a filter asks for it."""

    def draw(self, logits: Tensor, params: SamplingParams) -> Tensor:
        chances = to_device(torch.from_numpy(uniforms(params["seed"], params["position"])), logits.device)
        weights, plain = filtered(logits, params)
        return picked(weights, chances).where(plain, logits.argmax(dim=-1))

    def penalise(self, logits: Tensor, penalties: Sequence[Penalty]) -> None:
        def sent(array: npt.NDArray[Any]) -> Tensor:
            return to_device(torch.from_numpy(array), logits.device)

        of_row = sent(np.repeat(np.arange(len(penalties)), [len(each.counts) for each in penalties]))
        tokens, counts = sent(np.concatenate([each.counts for each in penalties]).astype(np.int64)).unbind(-1)
        rows = sent(np.array([each.row for each in penalties]))[of_row]
        given = np.array([each[2:] for each in penalties], np.float32)
        repetition, presence, frequency = sent(given)[of_row].unbind(-1)
        values = logits[rows, tokens]
        values = torch.where(values > 0, values / repetition, values * repetition)
        lowered = values - counts.to(torch.float32) * frequency - presence
        logits[rows, tokens] = torch.where(counts > 0, lowered, values)

    def forbid(self, logits: Tensor, masks: Sequence[RowMask]) -> None:
        token_masks.forbid(logits, masks)

    def best(self, logits: Tensor, k: int) -> Best:
        if k:
            values, ids = top_tokens(logits, k)
        else:
            values = logits.new_empty(len(logits), 0)
            ids = values.to(torch.int64)
        return Best(ids, values, logits.logsumexp(dim=-1))

    def weigh(self, logits: Tensor, limits: Limits) -> Tensor:
        def column(name: str) -> Tensor:
            return to_device(torch.from_numpy(np.ascontiguousarray(limits[name])), logits.device)[:, None]

        weights = weights_of(logits, column("largest"), column("temperature"))
        kept, ties = logits >= column("least"), column("ties")
        if (limits["ties"] < logits.shape[-1]).any():
            equal = logits == column("least")
            kept &= ~equal | (equal.cumsum(-1) <= ties)
        kept &= weights >= column("least_weight")
        return weights.where(kept, torch.zeros_like(weights))

    def masses(self, logits: Tensor, limits: Limits) -> Tensor:
        return self.weigh(logits, limits).sum(-1, dtype=torch.float64)

    def find(self, logits: Tensor, limits: Limits) -> Tensor:
        targets = to_device(torch.from_numpy(np.ascontiguousarray(limits["target"])), logits.device)
        return passed(self.weigh(logits, limits).to(torch.float64).cumsum(-1), targets)


class NativeSampler(WholeRows):
    """A `Sampler` in C (sample.c), which reads a row two to four times and sorts nothing."""

    def __init__(self) -> None:
        self._library = library.load()
        self._handle = self._library.ferrum_sampler_new()

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._library.ferrum_sampler_free(self._handle)

    def draw(self, logits: Tensor, params: SamplingParams) -> Tensor:
        rows, vocabulary = logits.shape
        logits = logits.contiguous()
        tokens = torch.empty(rows, dtype=torch.int32)
        if not self._library.ferrum_sample(
            self._handle,
            logits.data_ptr(),
            rows,
            vocabulary,
            params.ctypes.data,
            tokens.data_ptr(),
            torch.get_num_threads(),
        ):
            raise MemoryError("no memory to sample tokens")
        return tokens.to(torch.int64)

    def penalise(self, logits: Tensor, penalties: Sequence[Penalty]) -> None:
        array = (library.PenaltyStruct * len(penalties))(
            *(library.PenaltyStruct(counts.ctypes.data, row, len(counts), *rest) for row, counts, *rest in penalties)
        )
        if not logits.is_contiguous():
            raise ValueError("rows must be contiguous for penalties")
        vocabulary, threads = logits.shape[-1], torch.get_num_threads()
        self._library.ferrum_penalise(logits.data_ptr(), vocabulary, ctypes.addressof(array), len(penalties), threads)

    def forbid(self, logits: Tensor, masks: Sequence[RowMask]) -> None:
        each: list[tuple[int, int]] = []
        for first, words in masks:
            address, size = words.data_ptr(), words.stride(0) * words.element_size()
            each += [(address + at * size, first + at) for at in range(len(words))]
        array = np.array(each, ROW_MASKS)
        if not logits.is_contiguous():
            raise ValueError("rows must be contiguous for masks")
        vocabulary, threads = logits.shape[-1], torch.get_num_threads()
        self._library.ferrum_mask(self._handle, logits.data_ptr(), vocabulary, array.ctypes.data, len(array), threads)

    def best(self, logits: Tensor, k: int) -> Best:
        rows, vocabulary = logits.shape
        logits = logits.contiguous()
        ids, logsumexp = torch.empty(rows, k, dtype=torch.int32), torch.empty(rows)
        done = self._library.ferrum_best(
            self._handle,
            logits.data_ptr(),
            rows,
            vocabulary,
            k,
            ids.data_ptr(),
            logsumexp.data_ptr(),
            torch.get_num_threads(),
        )
        if not done:
            raise MemoryError("no memory for the best tokens")
        if done < 0:
            return TorchSampler().best(logits, k)
        tokens = ids.to(torch.int64)
        return Best(tokens, logits.gather(-1, tokens), logsumexp)

    def weigh(self, logits: Tensor, limits: Limits) -> Tensor:
        weights = torch.empty(logits.shape)
        self._weigh(logits, limits, weights=weights)
        return weights

    def masses(self, logits: Tensor, limits: Limits) -> Tensor:
        sums = torch.empty(len(logits), dtype=torch.float64)
        self._weigh(logits, limits, sums=sums)
        return sums

    def find(self, logits: Tensor, limits: Limits) -> Tensor:
        tokens = torch.zeros(len(logits), dtype=torch.int32)
        self._weigh(logits, limits, tokens=tokens)
        return tokens.to(torch.int64)

    def _weigh(
        self,
        logits: Tensor,
        limits: Limits,
        *,
        weights: Tensor | None = None,
        sums: Tensor | None = None,
        tokens: Tensor | None = None,
    ) -> None:
        logits = logits.contiguous()
        answers = [None if each is None else each.data_ptr() for each in (weights, sums, tokens)]
        sizes = (*logits.shape, limits.ctypes.data, *answers, torch.get_num_threads())
        if not self._library.ferrum_weigh(self._handle, logits.data_ptr(), *sizes):
            raise MemoryError("no memory to weigh tokens")
