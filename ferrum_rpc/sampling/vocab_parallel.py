"""A sampler of rows that ranks share: each has the logits of its own tokens, and rows are never put together.

What ranks tell each other of a row is small: the largest logit, what the weights of a part come to, candidates for a
filter, the logits of tokens that were named. All of them decide from the same gathered numbers, so tokens are those
that one rank would draw from whole rows, but for the rounding of a sum of float64 numbers. And all of them make the
same calls in the same order: it follows from the draws and from what was gathered, never from a rank's own part.

Logits may lie on a GPU, and so does what is returned. What ranks tell each other passes through the host.

Only where a filter leaves more than the best `SORTED` tokens of some rank can tell is a row put together after all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from ferrum_rpc.distributed.group import Group
from ferrum_rpc.sampling.draw import FINITE, SORTED, Best, Draws, FloatArray, IntArray, Penalty, passed, uniforms
from ferrum_rpc.sampling.draw import filtered as filtered_whole
from ferrum_rpc.sampling.masks import WORD, RowMask
from ferrum_rpc.sampling.samplers import ALL_TIES, LIMITS, Limits, NativeSampler, PartSampler, TorchSampler
from ferrum_rpc.selection import BackendCandidate, Choice, Unsuited, select

FEW: Final = 128
"""Candidates of a rank for top-p at first: mostly they are enough, and a third of the time that `SORTED` take."""

_TORCH: Final = TorchSampler()


class VocabShard(NamedTuple):
    """Of a ``vocabulary`` of so many tokens those that this rank of the ``group`` (on the CPU) has: a row is cut every
    ``width`` tokens, a multiple of `WORD`."""

    group: Group
    width: int
    vocabulary: int

    @property
    def first(self) -> int:
        """The first of them."""
        return self.group.rank * self.width

    @property
    def end(self) -> int:
        """Behind the last."""
        return min(self.vocabulary, self.first + self.width)


class RowFilters(NamedTuple):
    """How rows are cut, on the host: the ``limits`` of this rank's part; which are drawn from at all (``plain``, bool
    [R]), and the rank that has the arg-max, ``best`` (int64 [R]). ``doubt``, float64 [R], is added to what a part comes
    to, so that every rank hears of it: 0, NaN where more candidates may tell the limits, infinity where only the row
    does."""

    limits: Limits
    doubt: Tensor
    plain: Tensor
    best: Tensor


class VocabParallelSampler:
    """A `Sampler` of this rank's ``part``, for which ``own`` computes."""

    def __init__(self, own: PartSampler, part: VocabShard) -> None:
        self._own, self._part, self._group = own, part, part.group

    # --- a token for each row ---------------------------------------------------------------------------------------

    def draw(self, logits: Tensor, draws: Draws) -> Tensor:
        deep = (draws["top_k"] > FEW) & (draws["top_k"] <= SORTED)
        return self._draw(logits, draws, SORTED if deep.any() else FEW)

    def _draw(self, logits: Tensor, draws: Draws, candidates: int) -> Tensor:
        cut = self._cut(logits, draws, candidates, self._own)
        chances = torch.from_numpy(uniforms(draws["seed"], draws["position"]))
        owner, targets, total = self._found(self._own.masses(logits, cut.limits).cpu() + cut.doubt, chances)
        owner = owner.where(cut.plain, cut.best)
        mine, known = owner == self._group.rank, total.isfinite()
        cut.limits["target"] = targets.where(mine & cut.plain & known, torch.full_like(targets, -1)).numpy()
        tokens = self._own.find(logits, cut.limits).cpu()
        if len(rows := (mine & ~cut.plain).nonzero().squeeze(-1)):
            tokens[rows] = logits[rows.to(logits.device)].argmax(-1).cpu()
        found = self._of_owner(tokens + self._part.first, owner).to(logits.device)
        if len(rows := (cut.plain & total.isnan()).nonzero().squeeze(-1)):
            there = rows.to(logits.device)
            found[there] = self._draw(logits[there], draws[rows.numpy()], SORTED)
        if len(rows := (cut.plain & total.isinf()).nonzero().squeeze(-1)):
            there = rows.to(logits.device)
            found[there] = self._own.draw(self.whole(logits[there]), draws[rows.numpy()])
        return found

    def _cut(self, logits: Tensor, draws: Draws, candidates: int, own: PartSampler) -> RowFilters:
        """What the filters leave, where so many ``candidates`` of each rank tell."""
        vocabulary, width = self._part.vocabulary, self._part.width
        warm = draws["temperature"] > 0
        top_k = np.where(warm & (draws["top_k"] > 0) & (draws["top_k"] < vocabulary), draws["top_k"], vocabulary)
        by_k, by_p = top_k < vocabulary, warm & (draws["top_p"] < 1)
        most = min(width, candidates)
        count = most if by_p.any() else min(most, int(top_k[by_k].max(initial=0)))
        gathered = self._gather(self._candidates(logits, count) if count else logits.amax(-1, keepdim=True))
        largest = gathered[:, :, 0].amax(0)
        limits, doubt = np.zeros(len(draws), LIMITS), np.zeros(len(draws))
        limits["largest"], limits["temperature"] = largest.numpy(), draws["temperature"]
        limits["least"], limits["ties"], limits["target"] = -np.inf, ALL_TIES, -1
        if count:
            ordered, order = gathered.transpose(0, 1).reshape(len(draws), -1).sort(stable=True, dim=-1, descending=True)
            kth = torch.from_numpy(np.minimum(top_k, ordered.shape[-1]).astype(np.int64) - 1)
            limits["least"][by_k] = ordered.gather(-1, kth[:, None]).squeeze(-1).numpy()[by_k]
            if by_p.any():
                doubt[by_p] = self._cut_nuclei(logits, draws, limits, (ordered, order), own)[by_p]
            if count < width:
                doubt[by_k & (top_k > count)] = np.nan
                doubt[by_k & (top_k > SORTED)] = np.inf
        limits["least_weight"] = draws["min_p"]
        plain = torch.from_numpy(warm) & (largest.abs() < FINITE)
        return RowFilters(limits, torch.from_numpy(doubt), plain, gathered[:, :, 0].argmax(0))

    def _cut_nuclei(
        self, logits: Tensor, draws: Draws, limits: Limits, candidates: tuple[Tensor, Tensor], own: PartSampler
    ) -> npt.NDArray[np.float64]:
        """Make the ``limits``, which top-k has set, those of top-p where that is asked for. Returns doubts."""
        ordered, order = candidates
        count, by_p = ordered.shape[-1] // self._group.size, draws["top_p"] < 1
        total = self._gather(own.masses(logits, limits)).sum(0)
        weights = own.weigh(ordered, limits)
        masses = weights.to(torch.float64).cumsum(-1)
        needed = torch.from_numpy(draws["top_p"].astype(np.float64)) * total
        kept = masses - weights < needed[:, None]
        kept[:, 0] = True
        least = ordered.gather(-1, kept.sum(-1, keepdim=True) - 1)
        ties = (kept & (ordered == least) & (order // count == self._group.rank)).sum(-1)
        limits["least"][by_p], limits["ties"][by_p] = least.squeeze(-1).numpy()[by_p], ties.numpy()[by_p]
        if count == self._part.width:
            return np.zeros(len(draws))
        # behind the last candidate of a rank another of its tokens may stand before those of others
        ends = order % count == count - 1
        short = masses.gather(-1, ends.to(torch.uint8).argmax(-1, keepdim=True)).squeeze(-1) < needed
        more = (weights * ends).sum(-1, dtype=torch.float64) * max(0, SORTED - count)  # at most
        hopeless = short & ((masses[:, -1] + more < needed) | (count >= SORTED))
        return np.where(short.numpy(), np.where(hopeless.numpy(), np.inf, np.nan), 0.0)

    def _candidates(self, logits: Tensor, count: int) -> Tensor:
        """The largest logits of this rank, [R, count] by falling logit; -inf behind the last of all tokens."""
        values = self._own.best(logits, min(count, logits.shape[-1])).logits
        return F.pad(values, (0, count - values.shape[-1]), value=-torch.inf)

    def _found(self, masses: Tensor, chances: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of rows whose parts come to ``masses`` (float64 [R]) here: the rank on which the ``chances`` fall, int64 [R];
        what is passed there, float64 [R]; and what the whole rows come to. All on the host."""
        edges = self._gather(masses).cumsum(0)
        total = edges[-1]
        targets = total * chances
        owner = torch.minimum((edges <= targets).sum(0), (edges < total).sum(0))
        before = F.pad(edges, (0, 0, 1, 0)).gather(0, owner[None])[0]
        return owner, targets - before, total

    def _of_owner(self, values: Tensor, owner: Tensor) -> Tensor:
        """Those ``values`` [R, ...] that the rank in ``owner``, of the same shape, has; on the host."""
        return self._gather(values).gather(0, owner[None])[0]

    def _gather(self, part: Tensor) -> Tensor:
        """The parts of all ranks, on the host."""
        return self._group.all_gather(part.cpu().contiguous())

    # --- rows before they are drawn from ----------------------------------------------------------------------------

    def bias(self, logits: Tensor, rows: IntArray, tokens: IntArray, values: FloatArray) -> None:
        mine = (tokens >= self._part.first) & (tokens < self._part.end)
        self._own.bias(logits, rows[mine], tokens[mine] - self._part.first, values[mine])

    def penalise(self, logits: Tensor, penalties: Sequence[Penalty]) -> None:
        own = []
        for each in penalties:
            mine = (each.tokens >= self._part.first) & (each.tokens < self._part.end)
            counted_from = int(np.count_nonzero(mine[: each.counted_from]))
            own.append(each._replace(tokens=each.tokens[mine] - self._part.first, counted_from=counted_from))
        self._own.penalise(logits, own)

    def forbid(self, logits: Tensor, masks: Sequence[RowMask]) -> None:
        words = slice(self._part.first // WORD, -(-self._part.end // WORD))
        self._own.forbid(logits, [RowMask(each.row, each.words[words]) for each in masks])

    # --- what is told of rows ---------------------------------------------------------------------------------------

    def best(self, logits: Tensor, k: int) -> Best:
        rows, count = len(logits), min(k, self._part.width)
        own = self._own.best(logits, min(count, logits.shape[-1]))
        beyond = (0, count - own.logits.shape[-1])
        values = F.pad(own.logits, beyond, value=-torch.inf)
        ids = F.pad(own.token_ids + self._part.first, beyond).to(torch.int32)
        told = self._gather(torch.cat([values.view(torch.int32), ids, own.logsumexp[:, None].view(torch.int32)], -1))
        values, ids = (told[:, :, first : first + count].transpose(0, 1).reshape(rows, -1) for first in (0, count))
        values, order = values.view(torch.float32).sort(stable=True, dim=-1, descending=True)
        logsumexp = told[:, :, -1].contiguous().view(torch.float32).double().logsumexp(0).float()
        found = ids.gather(-1, order[:, :k]).to(torch.int64), values[:, :k].contiguous(), logsumexp
        return Best(*(each.to(logits.device) for each in found))

    def largest(self, logits: Tensor) -> Tensor:
        values, tokens = logits.max(-1)
        told = self._gather(torch.stack([values.double(), (tokens + self._part.first).double()]))
        best = told[:, 0].argmax(0, keepdim=True)  # of several the first: ranks are in their order
        return told[:, 1].gather(0, best)[0].to(logits.device, torch.int64)

    def at(self, rows: Tensor, tokens: Tensor) -> Tensor:
        here = (tokens - self._part.first).clamp(0, rows.shape[-1] - 1)
        return self._of_owner(rows.gather(-1, here), tokens.cpu() // self._part.width).to(rows.device)

    def whole(self, logits: Tensor) -> Tensor:
        rows, width = len(logits), self._part.width
        told = self._gather(F.pad(logits, (0, width - logits.shape[-1])))
        return told.transpose(0, 1).reshape(rows, -1)[:, : self._part.vocabulary].contiguous().to(logits.device)

    # --- weights ----------------------------------------------------------------------------------------------------

    def filtered(self, logits: Tensor, draws: Draws) -> tuple[Tensor, Tensor, Tensor]:
        cut = self._cut(logits, draws, SORTED, _TORCH)
        weights = _TORCH.weigh(logits, cut.limits)
        total = self._gather(weights.sum(-1, dtype=torch.float64).cpu() + cut.doubt).sum(0)
        if len(rows := (cut.plain & ~total.isfinite()).nonzero().squeeze(-1)):
            there = rows.to(logits.device)
            whole, _ = filtered_whole(self.whole(logits[there]), draws[rows.numpy()])
            weights[there] = whole[:, self._part.first : self._part.end]
            total[rows] = whole.sum(-1, dtype=torch.float64).cpu()
        return weights, cut.plain.to(logits.device), total.to(logits.device)

    def add(self, weights: Tensor, tokens: Tensor, values: Tensor) -> None:
        own = tokens - self._part.first
        here = (own >= 0) & (own < weights.shape[-1])
        self._own.add(weights, own.where(here, torch.zeros_like(own)), values.where(here, torch.zeros_like(values)))

    def picked(self, weights: Tensor, chances: Tensor, otherwise: Tensor) -> Tensor:
        masses = weights.to(torch.float64).cumsum(-1)
        owner, targets, total = self._found(masses[:, -1], chances.cpu())
        tokens = passed(masses, targets.to(masses.device)).clamp(max=weights.shape[-1] - 1) + self._part.first
        return self._of_owner(tokens, owner).where(total > 0, otherwise.cpu()).to(weights.device)


def select_sampler(device: torch.device, part: VocabShard | None = None) -> Choice:
    """The sampler for ``device``, of whole rows or of a ``part`` of them."""

    def native() -> PartSampler:
        if device.type != "cpu":
            raise Unsuited(f"it runs on a CPU, not on {device.type}")
        return NativeSampler()

    choice = select(
        BackendCandidate("native", native, "a row is read a few times and not sorted"),
        BackendCandidate("torch", TorchSampler),
        what="sampler",
        field="sampling",
    )
    return choice if part is None else choice._replace(made=VocabParallelSampler(choice.made, part))
