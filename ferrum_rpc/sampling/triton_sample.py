"""Sampling on a CUDA device in one launch, a program for each row, which selects and does not sort.

Torch's way (`draw.filtered`) sorts each row for top-k and top-p: rows of 152 thousand logits one after the other, some
80 us each, so 64 rows take as long as the layers of an 8B model. Here a program reads its row from the L2 cache some 10
to 25 times: the logit at which a filter cuts is searched between two borders, and each pass moves them to one of four
parts, by the number or the weight of what is above three logits between them. As in C (`sample.c`), the chosen token is
found in the order of the ids. The tokens are those of torch and of C, except where a number falls on the border of two
tokens within the rounding of float32.

Logits are compared as integers that have their order, so rows of any values end after the same number of passes.

This file imports triton; `vocab_parallel.select_sampler` says whether it can be imported.
"""

# triton has no types, and its language is not Python's
# mypy: disable-error-code="untyped-decorator"
# ruff: noqa: PLR0917

from typing import Final

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ferrum_rpc.sampling.draw import FINITE, STEEPEST, SamplingParams
from ferrum_rpc.sampling.samplers import TorchSampler
from ferrum_rpc.sampling.transfer import to_device

AT_ONCE: Final = 2048
"""Logits of a row that a program reads at once."""

TOGETHER: Final = 4
"""How many of these are added in float32 before the sum is added in float64, which some GPUs compute at 1/64 of the
rate."""

WARPS: Final = 16
"""Of a program: a step has fewer rows than a GPU has multiprocessors."""

COLUMNS: Final = 7
"""Of the numbers that the kernel gets of a row."""


class TritonSampler(TorchSampler):
    """A `Sampler` for rows on a CUDA device."""

    def draw(self, logits: Tensor, params: SamplingParams) -> Tensor:
        return self._run(logits, params, None)

    def filtered(self, logits: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor, Tensor]:
        weights = torch.empty_like(logits, memory_format=torch.contiguous_format)
        plain = self._run(logits, params, weights)
        return weights, plain > 0, weights.sum(-1, dtype=torch.float64)

    @staticmethod
    def _run(logits: Tensor, params: SamplingParams, weights: Tensor | None) -> Tensor:
        """Launch the kernel: the tokens; or its ``weights``, and 1 for each row that is sampled."""
        logits, vocabulary = logits.contiguous(), logits.shape[-1]
        numbers = np.empty((len(params), COLUMNS))
        with np.errstate(divide="ignore"):
            inverse = np.minimum(np.float32(1) / params["temperature"], np.float32(STEEPEST))
        numbers[:, 0] = np.where(params["temperature"] > 0, inverse, -1)
        numbers[:, 1] = np.where((params["top_k"] > 0) & (params["top_k"] < vocabulary), params["top_k"], 0)
        numbers[:, 2], numbers[:, 3], numbers[:, 4] = params["top_p"], params["min_p"], weights is not None
        words = numbers.view(np.uint64)
        words[:, 5], words[:, 6] = params["seed"], params["position"]
        found = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        if len(logits):
            sample_kernel[(len(logits),)](
                logits,
                to_device(torch.from_numpy(numbers), logits.device),
                found,
                logits if weights is None else weights,
                vocabulary,
                AT_ONCE=AT_ONCE,
                TOGETHER=TOGETHER,
                LIMIT=FINITE,
                num_warps=WARPS,
            )
        return found


@triton.jit
def ordered(x: tl.tensor) -> tl.tensor:
    """int32 in the order of float32, both zeros being one."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def left_of(
    row: tl.tensor,
    at: tl.tensor,
    vocabulary: tl.tensor,
    largest: tl.tensor,
    inverse: tl.tensor,
    least: tl.tensor,
    last: tl.tensor,
    least_weight: tl.tensor,
) -> tl.tensor:
    """The weights of some logits, 0 of those that are not kept: below ``least``, equal to it with an id behind
    ``last``, or lighter than ``least_weight``."""
    x = tl.load(row + at, mask=at < vocabulary, other=float("-inf"))
    order = ordered(x)
    weight = tl.exp((x - largest) * inverse)
    kept = (order > least) | ((order == least) & (at <= last))
    return tl.where(kept & (weight >= least_weight), weight, 0.0)


@triton.jit
def mass_of(
    row: tl.tensor,
    vocabulary: tl.tensor,
    largest: tl.tensor,
    inverse: tl.tensor,
    least: tl.tensor,
    last: tl.tensor,
    least_weight: tl.tensor,
    AT_ONCE: tl.constexpr,
) -> tl.tensor:
    """The sum of what `left_of` leaves of a row, in the order in which the token is searched."""
    mass = tl.full((), 0.0, tl.float64)
    for start in range(0, vocabulary, AT_ONCE):
        at = start + tl.arange(0, AT_ONCE)
        weight = left_of(row, at, vocabulary, largest, inverse, least, last, least_weight)
        mass += tl.sum(weight.to(tl.float64), 0)
    return mass


@triton.jit
def cut_at(
    row: tl.tensor,
    vocabulary: tl.tensor,
    lowest: tl.tensor,
    highest: tl.tensor,
    need: tl.tensor,
    largest: tl.tensor,
    inverse: tl.tensor,
    BY_COUNT: tl.constexpr,
    AT_ONCE: tl.constexpr,
    TOGETHER: tl.constexpr,
) -> tl.tensor:
    """The largest logit of ``lowest .. highest`` (as integers) such that those from it on come to ``need``, in number
    or in weight; ``lowest`` if none does. Each pass leaves a quarter of the interval, and nothing of it beyond the
    logits that are there."""
    low, high = lowest.to(tl.int64), highest.to(tl.int64)
    while low < high:
        span = high - low
        first = (low + (span + 3) // 4).to(tl.int32)
        second = (low + (2 * span + 3) // 4).to(tl.int32)
        third = (low + (3 * span + 3) // 4).to(tl.int32)
        from_first = tl.zeros([AT_ONCE], tl.float64)
        from_second = tl.zeros([AT_ONCE], tl.float64)
        from_third = tl.zeros([AT_ONCE], tl.float64)
        smallest = tl.full([AT_ONCE], 0x7FFFFFFF, tl.int32)
        greatest = tl.full([AT_ONCE], -0x80000000, tl.int32)
        inside_from, inside_to = low.to(tl.int32), high.to(tl.int32)
        for start in range(0, vocabulary, AT_ONCE * TOGETHER):
            part_first = tl.zeros([AT_ONCE], tl.float32)
            part_second = tl.zeros([AT_ONCE], tl.float32)
            part_third = tl.zeros([AT_ONCE], tl.float32)
            for each in tl.static_range(TOGETHER):
                at = start + each * AT_ONCE + tl.arange(0, AT_ONCE)
                x = tl.load(row + at, mask=at < vocabulary, other=float("-inf"))
                order = ordered(x)
                weight = (at < vocabulary).to(tl.float32) if BY_COUNT else tl.exp((x - largest) * inverse)
                part_first += tl.where(order >= first, weight, 0.0)
                part_second += tl.where(order >= second, weight, 0.0)
                part_third += tl.where(order >= third, weight, 0.0)
                inside = (at < vocabulary) & (order >= inside_from) & (order <= inside_to)
                smallest = tl.where(inside & (order < smallest), order, smallest)
                greatest = tl.where(inside & (order > greatest), order, greatest)
            from_first += part_first.to(tl.float64)
            from_second += part_second.to(tl.float64)
            from_third += part_third.to(tl.float64)
        bottom, top = tl.min(smallest, 0).to(tl.int64), tl.max(greatest, 0).to(tl.int64)
        if tl.sum(from_third, 0) >= need:
            low = third.to(tl.int64)
        elif tl.sum(from_second, 0) >= need:
            low = second.to(tl.int64)
            high = third.to(tl.int64) - 1
        elif tl.sum(from_first, 0) >= need:
            low = first.to(tl.int64)
            high = second.to(tl.int64) - 1
        else:
            high = first.to(tl.int64) - 1
        low = tl.maximum(low, bottom)
        high = tl.maximum(low, tl.minimum(high, top))
    return low.to(tl.int32)


@triton.jit
def float_of(order: tl.tensor) -> tl.tensor:
    """The number that `ordered` gave ``order`` for."""
    return tl.where(order < 0, order ^ 0x7FFFFFFF, order).to(tl.float32, bitcast=True)


@triton.jit
def argmax_of(row: tl.tensor, vocabulary: tl.tensor, AT_ONCE: tl.constexpr) -> tl.tensor:
    """The largest logit of a row, as an integer; its first id; and the first id of a NaN, or a larger one."""
    lanes = tl.arange(0, AT_ONCE)
    greatest = tl.full([AT_ONCE], -0x80000000, tl.int32)
    places, odd = lanes, tl.full([AT_ONCE], 0x7FFFFFFF, tl.int32)
    for start in range(0, vocabulary, AT_ONCE):
        at = start + lanes
        x = tl.load(row + at, mask=at < vocabulary, other=float("-inf"))
        order = tl.where(at < vocabulary, ordered(x), -0x80000000)
        places = tl.where(order > greatest, at, places)
        greatest = tl.where(order > greatest, order, greatest)
        odd = tl.where((x != x) & (at < odd), at, odd)  # noqa: PLR0124 - a NaN
    top = tl.max(greatest, 0)
    return top, tl.min(tl.where(greatest == top, places, 0x7FFFFFFF), 0), tl.min(odd, 0)


@triton.jit
def last_of_border(
    row: tl.tensor,
    vocabulary: tl.tensor,
    least: tl.tensor,
    weight: tl.tensor,
    above: tl.tensor,
    need: tl.tensor,
    AT_ONCE: tl.constexpr,
) -> tl.tensor:
    """The last id that is kept of the logits that equal ``least``, which have the ``weight`` each: the first of them,
    and others by rising id until they come to ``need`` with the mass that is ``above``."""
    last = tl.full((), -1, tl.int32)
    for start in range(0, vocabulary, AT_ONCE):
        at = start + tl.arange(0, AT_ONCE)
        x = tl.load(row + at, mask=at < vocabulary, other=float("-inf"))
        equal = (ordered(x) == least) & (at < vocabulary)
        before = tl.cumsum(equal.to(tl.int32), 0) - 1
        kept = equal & ((above + before.to(tl.float64) * weight < need) | ((last < 0) & (before == 0)))
        last = tl.maximum(last, tl.max(tl.where(kept, at, -1), 0))
        above += tl.sum(equal.to(tl.int32), 0).to(tl.float64) * weight
    return last


@triton.jit
def passed_at(
    row: tl.tensor,
    vocabulary: tl.tensor,
    largest: tl.tensor,
    inverse: tl.tensor,
    least: tl.tensor,
    last: tl.tensor,
    least_weight: tl.tensor,
    target: tl.tensor,
    AT_ONCE: tl.constexpr,
) -> tl.tensor:
    """The id at which what `left_of` leaves passes ``target``, added up by rising id as in `mass_of`."""
    passed = tl.full((), 0.0, tl.float64)
    token, end, start = tl.full((), -1, tl.int32), tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    while (start < vocabulary) & (token < 0):
        at = start + tl.arange(0, AT_ONCE)
        kept = left_of(row, at, vocabulary, largest, inverse, least, last, least_weight)
        mass = tl.sum(kept.to(tl.float64), 0)
        end = tl.maximum(end, tl.max(tl.where(kept > 0.0, at, -1), 0))
        if passed + mass > target:
            masses = passed + tl.cumsum(kept.to(tl.float64), 0)
            hit = tl.min(tl.where((masses > target) & (kept > 0.0), at, 0x7FFFFFFF), 0)
            token = tl.minimum(hit, end)  # the sum may have been rounded up
        passed += mass
        start += AT_ONCE
    return tl.where(token < 0, end, token)


@triton.jit
def uniform_of(seed: tl.tensor, position: tl.tensor) -> tl.tensor:
    """As `draw.uniforms`, of the stream of tokens. All in uint64; words have 32 bits."""
    low = tl.full((), 0xFFFFFFFF, tl.uint64)
    first, second = position & low, position >> 32
    third, fourth = low - low, low - low
    key, other = seed & low, seed >> 32
    for _ in tl.static_range(10):
        left = tl.full((), 0xD2511F53, tl.uint64) * first
        right = tl.full((), 0xCD9E8D57, tl.uint64) * third
        first, second = (right >> 32) ^ second ^ key, right & low
        third, fourth = (left >> 32) ^ fourth ^ other, left & low
        key = (key + tl.full((), 0x9E3779B9, tl.uint64)) & low
        other = (other + tl.full((), 0xBB67AE85, tl.uint64)) & low
    high, rest = (first >> 5).to(tl.int64).to(tl.float64), (second >> 6).to(tl.int64).to(tl.float64)
    return (high * 67108864.0 + rest) / 9007199254740992.0


@triton.jit(do_not_specialize=["vocabulary"], do_not_specialize_on_alignment=["logits", "draws", "found", "weights"])
def sample_kernel(
    logits: tl.tensor,  # float32 [R, vocabulary], dense, as all here
    draws: tl.tensor,  # float64 [R, 7]: 1 / temperature, or negative; top-k or 0; top-p; min-p; whether weights are
    # wanted; and as uint64 seed and position
    found: tl.tensor,  # int64 [R]: the token; or where weights are wanted whether the row is sampled
    weights: tl.tensor,  # float32 [R, vocabulary], where they are wanted
    vocabulary: tl.tensor,
    AT_ONCE: tl.constexpr,
    TOGETHER: tl.constexpr,
    LIMIT: tl.constexpr,
) -> None:
    """One program per row."""
    index = tl.program_id(0).to(tl.int64)
    row, own = logits + index * vocabulary, draws + index * 7
    inverse, top_k, top_p = tl.load(own).to(tl.float32), tl.load(own + 1), tl.load(own + 2)
    least_weight, weighing = tl.load(own + 3).to(tl.float32), tl.load(own + 4) > 0.0
    top, best, no_number = argmax_of(row, vocabulary, AT_ONCE)
    largest = float_of(top)
    plain = (inverse >= 0.0) & (no_number >= vocabulary) & (tl.abs(largest) < LIMIT)
    token = tl.where(no_number < vocabulary, no_number, best)  # as an arg-max: a NaN is larger than any number
    least, last = tl.full((), -0x7F800001, tl.int32), vocabulary - 1  # from -inf on
    if plain:
        if top_k > 0:
            least = cut_at(row, vocabulary, least, top, top_k, largest, inverse, True, AT_ONCE, TOGETHER)
        if top_p < 1.0:
            need = top_p * mass_of(row, vocabulary, largest, inverse, least, last, 0.0, AT_ONCE)
            least = cut_at(row, vocabulary, least, top, need, largest, inverse, False, AT_ONCE, TOGETHER)
            above = mass_of(row, vocabulary, largest, inverse, least, -1, 0.0, AT_ONCE)
            weight = tl.exp((float_of(least) - largest) * inverse).to(tl.float64)
            last = last_of_border(row, vocabulary, least, weight, above, need, AT_ONCE)
        if not weighing:
            seed, position = tl.load(own + 5), tl.load(own + 6)
            seed, position = seed.to(tl.uint64, bitcast=True), position.to(tl.uint64, bitcast=True)
            target = uniform_of(seed, position) * mass_of(
                row, vocabulary, largest, inverse, least, last, least_weight, AT_ONCE
            )
            token = passed_at(row, vocabulary, largest, inverse, least, last, least_weight, target, AT_ONCE)
    if weighing:
        for start in range(0, vocabulary, AT_ONCE):
            at = start + tl.arange(0, AT_ONCE)
            kept = left_of(row, at, vocabulary, largest, inverse, least, last, least_weight)
            kept = tl.where(plain, kept, (at == token).to(tl.float32))
            tl.store(weights + index * vocabulary + at, kept, mask=at < vocabulary)
    tl.store(found + index, tl.where(weighing, plain.to(tl.int32), token).to(tl.int64))
