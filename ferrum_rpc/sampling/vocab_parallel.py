"""A vocabulary-parallel sampler: each rank has the logits of its own tokens, and complete rows are not gathered.

Ranks exchange little of a row: the largest logit, the sum of a shard's weights, candidates for a filter, and the logits
of named tokens. All ranks decide from the same gathered numbers, so a token is the one that a single rank would sample
from the complete row, except for the rounding of a sum of float64 numbers. All ranks make the same calls in the same
order, because that follows from the parameters and the gathered numbers alone, never from a rank's own shard.

Logits and results may be on a GPU. The exchange passes through the host.

A complete row is gathered only if a filter keeps more tokens than the best `SORTED` of some rank determine.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from ferrum_rpc.distributed.group import Group
from ferrum_rpc.sampling.draw import (
    FINITE,
    PARAMS_DTYPE,
    SORTED,
    Best,
    FloatArray,
    IntArray,
    Sampler,
    SamplingParams,
    passed,
    uniforms,
)
from ferrum_rpc.sampling.draw import filtered as filtered_whole
from ferrum_rpc.sampling.masks import WORD, RowMask
from ferrum_rpc.sampling.penalties import Penalty
from ferrum_rpc.sampling.samplers import ALL_TIES, LIMITS, Limits, NativeSampler, ShardSampler, TorchSampler
from ferrum_rpc.selection import BackendCandidate, Choice, Unsuited, select

FEW: Final = 128
"""Candidates of a rank for top-p in the first round. They usually suffice and take a third of the time of `SORTED`."""

PROBED_TOKENS: Final = 2500
"""Of the small step of a sampler: more than the CUDA kernel reads at once, and no multiple of it."""

PROBED: Final = (
    (1.0, 0, 1.0, 0.0),
    (0.7, 40, 1.0, 0.0),
    (0.7, 0, 0.9, 0.0),
    (1.3, 40, 0.5, 0.0),
    (1.0, 1, 0.01, 0.0),
    (1.0, 0, 1.0, 0.1),
    (0.0, 40, 0.5, 0.1),
)
"""Temperature, top-k, top-p and min-p of its rows."""

PROBED_TOLERANCE: Final = 2e-5
"""Relative, of weights: a GPU's exponential is good to some units in float32's last place, times its argument."""

_TORCH: Final = TorchSampler()


class VocabShard(NamedTuple):
    """The tokens of this rank of the ``group`` (on the CPU), of a ``vocabulary`` of so many tokens. Shards have
    ``width`` tokens each, a multiple of `WORD`."""

    group: Group
    width: int
    vocabulary: int

    @property
    def first(self) -> int:
        """The first token of the shard."""
        return self.group.rank * self.width

    @property
    def end(self) -> int:
        """One beyond the last token of the shard."""
        return min(self.vocabulary, self.first + self.width)


class RowFilters(NamedTuple):
    """What the filters keep, on the host: the ``limits`` of this rank's shard; which rows are sampled at all
    (``plain``, bool [R]), and the rank that has the argmax, ``best`` (int64 [R]). ``uncertain``, float64 [R], is added
    to the sum of a shard's weights, so that every rank receives it: 0, NaN if more candidates may determine the limits,
    infinity if only the complete row does."""

    limits: Limits
    uncertain: Tensor
    plain: Tensor
    best: Tensor


class VocabParallelSampler:
    """A `Sampler` of this rank's shard (``part``); ``own`` computes on the shard."""

    def __init__(self, own: ShardSampler, part: VocabShard) -> None:
        self._own, self._shard, self._group = own, part, part.group

    # --- a token for each row ---------------------------------------------------------------------------------------

    def draw(self, logits: Tensor, params: SamplingParams) -> Tensor:
        deep = (params["top_k"] > FEW) & (params["top_k"] <= SORTED)
        return self._draw(logits, params, SORTED if deep.any() else FEW)

    def _draw(self, logits: Tensor, params: SamplingParams, candidates: int) -> Tensor:
        cut = self._cut(logits, params, candidates, self._own)
        chances = torch.from_numpy(uniforms(params["seed"], params["position"]))
        owner, targets, total = self._found(self._own.masses(logits, cut.limits).cpu() + cut.uncertain, chances)
        owner = owner.where(cut.plain, cut.best)
        mine, known = owner == self._group.rank, total.isfinite()
        cut.limits["target"] = targets.where(mine & cut.plain & known, torch.full_like(targets, -1)).numpy()
        tokens = self._own.find(logits, cut.limits).cpu()
        if len(rows := (mine & ~cut.plain).nonzero().squeeze(-1)):
            tokens[rows] = logits[rows.to(logits.device)].argmax(-1).cpu()
        found = self._of_owner(tokens + self._shard.first, owner).to(logits.device)
        if len(rows := (cut.plain & total.isnan()).nonzero().squeeze(-1)):
            there = rows.to(logits.device)
            found[there] = self._draw(logits[there], params[rows.numpy()], SORTED)
        if len(rows := (cut.plain & total.isinf()).nonzero().squeeze(-1)):
            there = rows.to(logits.device)
            found[there] = self._own.draw(self.whole(logits[there]), params[rows.numpy()])
        return found

    def _cut(self, logits: Tensor, params: SamplingParams, candidates: int, own: ShardSampler) -> RowFilters:
        """What the filters keep, determined from so many ``candidates`` of each rank."""
        vocabulary, width = self._shard.vocabulary, self._shard.width
        warm = params["temperature"] > 0
        top_k = np.where(warm & (params["top_k"] > 0) & (params["top_k"] < vocabulary), params["top_k"], vocabulary)
        by_k, by_p = top_k < vocabulary, warm & (params["top_p"] < 1)
        max_count = min(width, candidates)
        count = max_count if by_p.any() else min(max_count, int(top_k[by_k].max(initial=0)))
        gathered = self._gather(self._candidates(logits, count) if count else logits.amax(-1, keepdim=True))
        largest = gathered[:, :, 0].amax(0)
        limits, uncertain = np.zeros(len(params), LIMITS), np.zeros(len(params))
        limits["largest"], limits["temperature"] = largest.numpy(), params["temperature"]
        limits["least"], limits["ties"], limits["target"] = -np.inf, ALL_TIES, -1
        if count:
            ordered, order = (
                gathered.transpose(0, 1).reshape(len(params), -1).sort(stable=True, dim=-1, descending=True)
            )
            kth = torch.from_numpy(np.minimum(top_k, ordered.shape[-1]).astype(np.int64) - 1)
            limits["least"][by_k] = ordered.gather(-1, kth[:, None]).squeeze(-1).numpy()[by_k]
            if by_p.any():
                uncertain[by_p] = self._cut_nuclei(logits, params, limits, (ordered, order), own)[by_p]
            if count < width:
                uncertain[by_k & (top_k > count)] = np.nan
                uncertain[by_k & (top_k > SORTED)] = np.inf
        limits["least_weight"] = params["min_p"]
        plain = torch.from_numpy(warm) & (largest.abs() < FINITE)
        return RowFilters(limits, torch.from_numpy(uncertain), plain, gathered[:, :, 0].argmax(0))

    def _cut_nuclei(
        self,
        logits: Tensor,
        params: SamplingParams,
        limits: Limits,
        candidates: tuple[Tensor, Tensor],
        own: ShardSampler,
    ) -> npt.NDArray[np.float64]:
        """Apply top-p to the ``limits`` that top-k has set. Returns what is added to `RowFilters.uncertain`."""
        ordered, order = candidates
        count, by_p = ordered.shape[-1] // self._group.size, params["top_p"] < 1
        total = self._gather(own.masses(logits, limits)).sum(0)
        weights = own.weigh(ordered, limits)
        masses = weights.to(torch.float64).cumsum(-1)
        needed = torch.from_numpy(params["top_p"].astype(np.float64)) * total
        kept = masses - weights < needed[:, None]
        kept[:, 0] = True
        threshold = ordered.gather(-1, kept.sum(-1, keepdim=True) - 1)
        ties = (kept & (ordered == threshold) & (order // count == self._group.rank)).sum(-1)
        limits["least"][by_p], limits["ties"][by_p] = threshold.squeeze(-1).numpy()[by_p], ties.numpy()[by_p]
        if count == self._shard.width:
            return np.zeros(len(params))
        # a token of a rank beyond its last candidate may precede candidates of other ranks
        ends = order % count == count - 1
        short = masses.gather(-1, ends.to(torch.uint8).argmax(-1, keepdim=True)).squeeze(-1) < needed
        more = (weights * ends).sum(-1, dtype=torch.float64) * max(0, SORTED - count)  # at most
        hopeless = short & ((masses[:, -1] + more < needed) | (count >= SORTED))
        return np.where(short.numpy(), np.where(hopeless.numpy(), np.inf, np.nan), 0.0)

    def _candidates(self, logits: Tensor, count: int) -> Tensor:
        """The largest logits of this rank, [R, count] in descending order, padded with -inf."""
        values = self._own.best(logits, min(count, logits.shape[-1])).logits
        return F.pad(values, (0, count - values.shape[-1]), value=-torch.inf)

    def _found(self, masses: Tensor, chances: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """For rows whose shard here has the weight ``masses`` (float64 [R]): the rank on which the ``chances`` fall,
        int64 [R]; the target within that shard, float64 [R]; and the weight of the complete rows. All on the host."""
        edges = self._gather(masses).cumsum(0)
        total = edges[-1]
        targets = total * chances
        owner = torch.minimum((edges <= targets).sum(0), (edges < total).sum(0))
        before = F.pad(edges, (0, 0, 1, 0)).gather(0, owner[None])[0]
        return owner, targets - before, total

    def _of_owner(self, values: Tensor, owner: Tensor) -> Tensor:
        """The ``values`` [R, ...] of the rank in ``owner``, of the same shape; on the host."""
        return self._gather(values).gather(0, owner[None])[0]

    def _gather(self, part: Tensor) -> Tensor:
        """The parts of all ranks, on the host."""
        return self._group.all_gather(part.cpu().contiguous())

    # --- rows before they are sampled --------------------------------------------------------------------------------

    def bias(self, logits: Tensor, rows: IntArray, tokens: IntArray, values: FloatArray) -> None:
        mine = (tokens >= self._shard.first) & (tokens < self._shard.end)
        self._own.bias(logits, rows[mine], tokens[mine] - self._shard.first, values[mine])

    def penalise(self, logits: Tensor, penalties: Sequence[Penalty]) -> None:
        first, end, own = self._shard.first, self._shard.end, []
        for each in penalties:
            tokens = each.counts[:, 0]
            counts = each.counts[(tokens >= first) & (tokens < end)]
            counts[:, 0] -= first
            own.append(each._replace(counts=counts))
        self._own.penalise(logits, own)

    def forbid(self, logits: Tensor, masks: Sequence[RowMask]) -> None:
        words = slice(self._shard.first // WORD, -(-self._shard.end // WORD))
        self._own.forbid(logits, [RowMask(each.row, each.words[:, words]) for each in masks])

    # --- what is returned of rows ------------------------------------------------------------------------------------

    def best(self, logits: Tensor, k: int) -> Best:
        rows, count = len(logits), min(k, self._shard.width)
        own = self._own.best(logits, min(count, logits.shape[-1]))
        beyond = (0, count - own.logits.shape[-1])
        values = F.pad(own.logits, beyond, value=-torch.inf)
        ids = F.pad(own.token_ids + self._shard.first, beyond).to(torch.int32)
        gathered = self._gather(
            torch.cat([values.view(torch.int32), ids, own.logsumexp[:, None].view(torch.int32)], -1)
        )
        values, ids = (gathered[:, :, first : first + count].transpose(0, 1).reshape(rows, -1) for first in (0, count))
        values, order = values.view(torch.float32).sort(stable=True, dim=-1, descending=True)
        logsumexp = gathered[:, :, -1].contiguous().view(torch.float32).double().logsumexp(0).float()
        found = ids.gather(-1, order[:, :k]).to(torch.int64), values[:, :k].contiguous(), logsumexp
        return Best(*(each.to(logits.device) for each in found))

    def argmax(self, logits: Tensor) -> Tensor:
        values, tokens = logits.max(-1)
        gathered = self._gather(torch.stack([values.double(), (tokens + self._shard.first).double()]))
        best = gathered[:, 0].argmax(0, keepdim=True)  # of several the first: ranks are in their order
        return gathered[:, 1].gather(0, best)[0].to(logits.device, torch.int64)

    def at(self, rows: Tensor, tokens: Tensor) -> Tensor:
        here = (tokens - self._shard.first).clamp(0, rows.shape[-1] - 1)
        return self._of_owner(rows.gather(-1, here), tokens.cpu() // self._shard.width).to(rows.device)

    def whole(self, logits: Tensor) -> Tensor:
        rows, width = len(logits), self._shard.width
        gathered = self._gather(F.pad(logits, (0, width - logits.shape[-1])))
        return gathered.transpose(0, 1).reshape(rows, -1)[:, : self._shard.vocabulary].contiguous().to(logits.device)

    # --- weights ----------------------------------------------------------------------------------------------------

    def filtered(self, logits: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor, Tensor]:
        cut = self._cut(logits, params, SORTED, _TORCH)
        weights = _TORCH.weigh(logits, cut.limits)
        total = self._gather(weights.sum(-1, dtype=torch.float64).cpu() + cut.uncertain).sum(0)
        if len(rows := (cut.plain & ~total.isfinite()).nonzero().squeeze(-1)):
            there = rows.to(logits.device)
            whole, _ = filtered_whole(self.whole(logits[there]), params[rows.numpy()])
            weights[there] = whole[:, self._shard.first : self._shard.end]
            total[rows] = whole.sum(-1, dtype=torch.float64).cpu()
        return weights, cut.plain.to(logits.device), total.to(logits.device)

    def add(self, weights: Tensor, tokens: Tensor, values: Tensor) -> None:
        own = tokens - self._shard.first
        here = (own >= 0) & (own < weights.shape[-1])
        self._own.add(weights, own.where(here, torch.zeros_like(own)), values.where(here, torch.zeros_like(values)))

    def picked(self, weights: Tensor, chances: Tensor, otherwise: Tensor) -> Tensor:
        masses = weights.to(torch.float64).cumsum(-1)
        owner, targets, total = self._found(masses[:, -1], chances.cpu())
        tokens = passed(masses, targets.to(masses.device)).clamp(max=weights.shape[-1] - 1) + self._shard.first
        return self._of_owner(tokens, owner).where(total > 0, otherwise.cpu()).to(weights.device)


def select_sampler(device: torch.device, part: VocabShard | None = None, *, interpreted: bool = False) -> Choice:
    """The sampler for ``device``, of whole rows or of a ``part`` of them. ``interpreted``: the CUDA kernel on a CPU,
    through Triton's interpreter."""

    def native() -> ShardSampler:
        if device.type != "cpu":
            raise Unsuited(f"it runs on a CPU, not on {device.type}")
        return NativeSampler()

    def triton() -> ShardSampler:
        if part is not None:
            raise Unsuited("ranks share rows")
        if find_spec("triton") is None:
            raise Unsuited("it is not installed")
        if torch.version.hip is not None:
            raise Unsuited("the kernel supports CUDA, not ROCm")
        from ferrum_rpc.sampling.triton_sample import TritonSampler

        check_small_draws(TritonSampler(), device)
        return TritonSampler()

    candidates = [
        BackendCandidate("native", native, "a row is read a few times and not sorted"),
        BackendCandidate("torch", TorchSampler),
    ]
    if device.type == "cuda" or interpreted:
        candidates[0] = BackendCandidate("triton", triton, "one launch, and rows are not sorted")
    choice = select(*candidates, what="sampler", field="sampling")
    return choice if part is None else choice._replace(made=VocabParallelSampler(choice.made, part))


def check_small_draws(sampler: Sampler, device: torch.device) -> None:
    """Raise Unsuited if ``sampler`` draws other tokens than torch, or keeps other ones, of small rows with ties."""
    logits = torch.randn(len(PROBED), PROBED_TOKENS, generator=torch.Generator().manual_seed(0))
    logits = (logits * 8).round().div(4).to(device)
    params = np.zeros(len(PROBED), PARAMS_DTYPE)
    params["seed"], params["position"] = 1, np.arange(len(PROBED))
    for name, values in zip(("temperature", "top_k", "top_p", "min_p"), zip(*PROBED, strict=True), strict=True):
        params[name] = values
    expected = _TORCH.draw(logits, params)
    if not torch.equal(sampler.draw(logits, params), expected):
        raise Unsuited("tokens of a small step differ from torch's")
    (weights, plain, _), (exact, also_plain, _) = (each.filtered(logits, params) for each in (sampler, _TORCH))
    same = torch.equal(plain, also_plain) and torch.equal(weights[plain] > 0, exact[plain] > 0)
    if not (same and torch.allclose(weights[plain], exact[plain], rtol=PROBED_TOLERANCE, atol=0)):
        raise Unsuited("weights of a small step differ from torch's")
