"""Sampling of tokens from rows of logits: reproducible for a seed, and independent of the rest of the batch.

A row uses one random number from [0, 1), a function of its seed and position (`uniforms`). The number selects, by
weight and in the order of the ids, from the tokens that the filters keep. Each filter applies to the result of the
previous one:

masks        keep only the tokens that they allow: other logits are -inf, whatever is added to them
bias         is added to the logits of its tokens
penalties    repetition, then frequency, then presence (`Penalty`)
temperature  divides the logits; 0 selects the largest, with ties the lowest id, and ends here
top-k        keeps the k largest, and those that equal the last of them
top-p        keeps the smallest set of the largest whose probability reaches p, with ties the lower ids
min-p        keeps tokens with at least this fraction of the largest probability

This is the order of `transformers` and of vLLM, except that vLLM applies min-p before top-k. A row with a NaN logit, or
whose largest logit is infinite, takes the argmax.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ferrum_rpc.native import library
from ferrum_rpc.sampling.masks import RowMask
from ferrum_rpc.sampling.penalties import Penalty
from ferrum_rpc.sampling.top import top_tokens
from ferrum_rpc.sampling.transfer import to_device

PARAMS_DTYPE: Final = np.dtype(library.Draw)
"""Seed, position and filters of one row. Inactive filters: top_k 0, top_p 1, min_p 0."""

MAX_TOP_K: Final = int(np.iinfo(np.int32).max)
"""Of `PARAMS_DTYPE`. Larger numbers of the contract keep the whole vocabulary too."""

SamplingParams = npt.NDArray[Any]
"""`PARAMS_DTYPE` [R]."""

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]


class Best(NamedTuple):
    """The best tokens of each row by descending logit, then ascending id: their ids, int64 [R, k], their logits,
    float32 [R, k]; and the logsumexp of the whole row, float32 [R]."""

    token_ids: Tensor
    logits: Tensor
    logsumexp: Tensor


class Sampler(Protocol):
    """Samples tokens from logits, float32 [R, V], on one kind of device. With vocabulary-parallel ranks it gets the
    logits of this rank's tokens (`vocab_parallel`); token ids always refer to the whole vocabulary."""

    def draw(self, logits: Tensor, params: SamplingParams) -> Tensor:
        """A token for each row of ``logits``, int64 [R], on their device."""

    def bias(self, logits: Tensor, rows: IntArray, tokens: IntArray, values: FloatArray) -> None:
        """Add ``values`` (float32 [n]) to the logits of ``tokens`` in ``rows`` (both int64 [n]), in place."""

    def penalise(self, logits: Tensor, penalties: Sequence[Penalty]) -> None:
        """Change rows of ``logits`` in place, each at most once."""

    def forbid(self, logits: Tensor, masks: Sequence[RowMask]) -> None:
        """As `masks.forbid`; each row at most once."""

    def best(self, logits: Tensor, k: int) -> Best:
        """The k ≥ 0 best tokens of each row."""

    def argmax(self, logits: Tensor) -> Tensor:
        """The argmax of each row, int64 [R]: with ties the first; NaN counts as largest."""

    def at(self, rows: Tensor, tokens: Tensor) -> Tensor:
        """The values of ``rows`` [R, V] at ``tokens`` (int64 [R, n]), [R, n]."""

    def whole(self, logits: Tensor) -> Tensor:
        """The complete rows, of all tokens."""

    def filtered(self, logits: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor, Tensor]:
        """As the function `filtered`, and the sum of the weights of each row, float64 [R]."""

    def add(self, weights: Tensor, tokens: Tensor, values: Tensor) -> None:
        """Add ``values`` [R, n] to the ``weights`` [R, V] of ``tokens`` (int64 [R, n]), in place."""

    def picked(self, weights: Tensor, chances: Tensor, otherwise: Tensor) -> Tensor:
        """As the function `picked`; ``otherwise`` (int64 [R]) of rows whose weights are all 0."""


TOKEN, ACCEPT = 0, 1
"""The streams of `uniforms`: one for choosing a token, one for accepting a draft."""

_ROUNDS: Final = 10
_MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS: Final = (0x9E3779B9, 0xBB67AE85)
_LOW: Final = np.uint64(0xFFFFFFFF)
STEEPEST: Final = 1e30
FINITE: Final = 3.4e38
"""Bound of a row's largest logit. A larger one, and `masks.MIN_LOGIT`, cannot be divided by a temperature."""

SORTED: Final = 1024
"""Number of largest logits that are sorted first: 2 ms, and usually enough. Sorting all 152 thousand takes 25 ms."""


def philox(key: npt.NDArray[np.uint64], counter: tuple[npt.NDArray[np.uint64], ...]) -> list[npt.NDArray[np.uint64]]:
    """Philox4x32-10 (Salmon et al., 2011): four random words of 32 bits from a key of 64 bits and four counter words,
    all of them uint64 arrays [n]."""
    half = np.uint64(32)
    words = list(counter)
    keys = [key & _LOW, key >> half]
    for _ in range(_ROUNDS):
        first, second = (np.uint64(m) * word for m, word in zip(_MULTIPLIERS, (words[0], words[2]), strict=True))
        words = [
            (second >> half) ^ words[1] ^ keys[0],
            second & _LOW,
            (first >> half) ^ words[3] ^ keys[1],
            first & _LOW,
        ]
        keys = [(each + np.uint64(step)) & _LOW for each, step in zip(keys, _KEY_STEPS, strict=True)]
    return words


def uniforms(
    seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64], stream: int = TOKEN
) -> npt.NDArray[np.float64]:
    """Numbers from [0, 1), float64 [n], for seeds and positions uint64 [n]: the same for the same three."""
    half = np.uint64(32)
    nothing = np.zeros_like(positions)
    words = philox(seeds, (positions & _LOW, positions >> half, nothing + np.uint64(stream), nothing))
    high, low = words[0] >> np.uint64(5), words[1] >> np.uint64(6)
    return (high * float(1 << 26) + low) / float(1 << 53)


def weights_of(logits: Tensor, largest: Tensor, temperature: Tensor) -> Tensor:
    """Weights of float32 ``logits`` [R, V] relative to the ``largest`` (float32 [R, 1]), at a ``temperature`` [R,
    1]."""
    return ((logits - largest) * temperature.reciprocal().clamp(max=STEEPEST)).exp()


def filtered(logits: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """What the filters keep of each row, as weights relative to its largest, float32 [R, V]; and bool [R], whether the
    row is sampled at all: otherwise the argmax is taken."""
    vocabulary = logits.shape[-1]

    def column(name: str, dtype: torch.dtype) -> Tensor:
        return to_device(torch.from_numpy(np.ascontiguousarray(params[name])).to(dtype), logits.device)[:, None]

    temperature, top_p = column("temperature", torch.float32), column("top_p", torch.float64)
    largest = logits.max(dim=-1, keepdim=True).values
    weights = weights_of(logits, largest, temperature)
    cut = (params["top_p"] < 1) | ((params["top_k"] > 0) & (params["top_k"] < vocabulary))
    if cut.any():
        top_k = column("top_k", torch.int64)
        top_k = top_k.where((top_k > 0) & (top_k < vocabulary), torch.full_like(top_k, vocabulary))
        part = None
        if logits.device.type == "cpu" and vocabulary > 4 * SORTED:  # a GPU must not wait for the answer
            part = _cut(logits, weights, (top_k, top_p), top_tokens(logits, SORTED))
        if part is None:
            ordered, ids = logits.sort(dim=-1, descending=True, stable=True)
            part = _cut(logits, weights, (top_k, top_p), (ordered, ids))
        assert part is not None  # noqa: S101 - all of a row is enough
        weights = part
    weights = weights.where(weights >= column("min_p", torch.float32), torch.zeros_like(weights))
    return weights, ((temperature > 0) & (largest.abs() < FINITE)).squeeze(-1)


def _cut(
    logits: Tensor, weights: Tensor, filters: tuple[Tensor, Tensor], largest: tuple[Tensor, Tensor]
) -> Tensor | None:
    """What the ``filters`` top-k (int64 [R, 1], 1 to V, which means none) and top-p ([R, 1]) keep of ``weights`` [R,
    V]. ``largest``: the largest logits, sorted [R, n], and their ids. None if these do not determine the result."""
    (top_k, top_p), (ordered, ids) = filters, largest
    vocabulary, count = logits.shape[-1], ordered.shape[-1]
    nothing = torch.zeros_like(weights)
    threshold = ordered.gather(-1, (top_k - 1).clamp(max=count - 1))
    weights = weights.where((logits >= threshold) | (top_k == vocabulary), nothing)
    sorted_weights = weights.gather(-1, ids)
    masses, total = sorted_weights.to(torch.float64).cumsum(-1), weights.sum(-1, dtype=torch.float64, keepdim=True)
    if count < vocabulary:
        known = ((top_k <= count) | (top_k == vocabulary)) & ((top_p >= 1) | (masses[:, -1:] >= top_p * total))
        if not known.all():
            return None
    kept = masses - sorted_weights < top_p * total
    kept[:, 0] = True
    nucleus = nothing.scatter(-1, ids, sorted_weights.where(kept, torch.zeros_like(sorted_weights)))
    return weights.where(top_p >= 1, nucleus)


def picked(weights: Tensor, chances: Tensor) -> Tensor:
    """The token of each row of ``weights`` [R, V] that the number from [0, 1) in ``chances`` (float64 [R]) falls on,
    int64 [R]."""
    masses = weights.to(torch.float64).cumsum(-1)
    return passed(masses, masses[:, -1] * chances)


def passed(masses: Tensor, targets: Tensor) -> Tensor:
    """Where rising ``masses`` [R, V] pass the ``targets`` [R], both float64: int64 [R]."""
    found = torch.searchsorted(masses, targets[:, None], right=True)
    total = masses[:, -1:].contiguous()
    return torch.minimum(found, torch.searchsorted(masses, total)).squeeze(-1)  # where rounding went beyond the last
