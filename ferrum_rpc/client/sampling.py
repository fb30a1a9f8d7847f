"""From a row of candidates to a token: temperature, top-k, top-p, with noise of each request's own.

The noise is a function of (seed, request, position) and of nothing else, so a request's text does not depend on which
others ran beside it, nor on whether it was preempted and computed again.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ferrum_rpc.client.answer import Answer
from ferrum_rpc.client.info import Capability, ExecutorInfo
from ferrum_rpc.core import FullLogits, Greedy, OutputSpec, Positions, TopTokens

Candidates = tuple[npt.NDArray[np.integer], npt.NDArray[np.floating]]
"""Token ids [k] and their logits [k], by falling logit and rising id."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen. ``temperature`` 0 is greedy; ``top_k`` 0 keeps all; ``top_p`` 1 keeps all."""

    temperature: float = 0.6
    top_k: int = 40
    top_p: float = 0.95
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0 or self.top_k < 0 or not 0 < self.top_p <= 1 or self.seed < 0:
            raise ValueError("temperature >= 0, top-k >= 0, 0 < top-p <= 1 and seed >= 0 are needed")

    @property
    def greedy(self) -> bool:
        """Whether no noise is needed: then the executor picks the token and ships four bytes."""
        return self.temperature == 0 or self.top_k == 1


class Sampler:
    """The ``output`` to request of an executor, and the choice of a token from it. ``rows_per_answer``: how many such
    rows one answer of the executor can carry."""

    def __init__(self, sampling: Sampling, info: ExecutorInfo) -> None:
        self._sampling = sampling
        self.output = OutputSpec(Positions.LAST, _kind(sampling, info))
        self.rows_per_answer = max(1, info.limits.max_response_bytes // _answer_bytes(self.output.kind, info))

    def pick(self, answer: Answer, *, request: int, position: int) -> int:
        """The token for ``position`` of a request, from an answer of one row."""
        if isinstance(self.output.kind, Greedy):
            return answer.token
        if isinstance(self.output.kind, TopTokens):
            top = answer.top_tokens
            candidates: Candidates = (top.token_ids[0], top.logits[0])
        else:
            candidates = best(answer.logits[0], self._sampling.top_k)
        return choose(candidates, self._sampling, uniform(self._sampling.seed, request, position))


def _kind(sampling: Sampling, info: ExecutorInfo) -> Greedy | TopTokens | FullLogits:
    """The smallest answer that the sampling can be done from: candidates rather than whole rows where they suffice."""
    if sampling.greedy:
        return Greedy()
    most = min(info.limits.max_top_tokens, info.model.vocab_size)
    if 0 < sampling.top_k <= most or Capability.OUTPUT_FULL_LOGITS not in info.capabilities:
        return TopTokens(min(sampling.top_k or most, most))
    return FullLogits()


def _answer_bytes(kind: object, info: ExecutorInfo) -> int:
    """Bytes of one item's answer, its row included, generously."""
    if isinstance(kind, FullLogits):
        return 512 + info.model.vocab_size * kind.dtype.itemsize
    return 512 + (8 * kind.k if isinstance(kind, TopTokens) else 8)


def uniform(seed: int, request: int, position: int) -> float:
    """A number in [0, 1): Philox, a counter-based generator (Salmon et al., 2011), at this place of its sequence."""
    return float(np.random.Generator(np.random.Philox(key=[seed, request], counter=[position, 0, 0, 0])).random())


def best(logits: npt.NDArray[np.floating], k: int) -> Candidates:
    """The ``k`` largest of a whole row (0: all), by falling logit and rising id."""
    if 0 < k < len(logits):
        kth = np.partition(logits, len(logits) - k)[len(logits) - k]
        ids = np.flatnonzero(logits >= kth)
    else:
        ids, k = np.arange(len(logits)), len(logits)
    order = np.lexsort((ids, -logits[ids]))[:k]
    return ids[order], logits[ids[order]]


def choose(candidates: Candidates, sampling: Sampling, noise: float) -> int:
    """Scale by the temperature, keep the k best, then the smallest set that reaches top-p, and draw."""
    ids, logits = candidates
    if sampling.top_k:
        ids, logits = ids[: sampling.top_k], logits[: sampling.top_k]
    scaled = logits.astype(np.float64) / sampling.temperature
    weights = np.exp(scaled - scaled[0])
    mass = np.cumsum(weights)
    if sampling.top_p < 1:
        keep = int(np.searchsorted(mass, sampling.top_p * mass[-1])) + 1
        mass = mass[:keep]
    return int(ids[min(int(np.searchsorted(mass, noise * mass[-1], side="right")), len(mass) - 1)])
