"""Durations and their percentiles, in bounded memory. Knows nothing of what was timed.

Every duration is kept up to `LIMIT`, so percentiles are exact; from then on each later one replaces a random kept one
with the probability that leaves all equally likely to be kept (Vitter's algorithm R). Count, mean and maximum are
always those of all.
"""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Sequence
from typing import Final

LIMIT: Final = 1 << 20
"""Samples that are kept: 8 MiB; a p99.9 of them stands on a thousand."""

QUANTILES: Final = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p99_9", 0.999))


class Samples:
    """Durations in seconds."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._kept = array("d")
        self._random = random.Random(0)  # noqa: S311 - which samples are kept is no secret
        self._sum = 0.0
        self.count = 0
        self.max = 0.0

    def add(self, seconds: float) -> None:
        """One more."""
        self.count += 1
        self._sum += seconds
        self.max = max(self.max, seconds)
        if len(self._kept) < self._limit:
            self._kept.append(seconds)
        elif (at := self._random.randrange(self.count)) < self._limit:
            self._kept[at] = seconds

    @property
    def thinned(self) -> bool:
        """Whether percentiles are of a part only."""
        return self.count > len(self._kept)

    def milliseconds(self) -> dict[str, float]:
        """``p50 p90 p99 p99_9 max mean`` in milliseconds; nothing where there are no samples."""
        if not self.count:
            return {}
        kept = sorted(self._kept)
        figures = {name: quantile(kept, q) for name, q in QUANTILES} | {
            "max": self.max,
            "mean": self._sum / self.count,
        }
        return {name: 1e3 * seconds for name, seconds in figures.items()}


def quantile(ordered: Sequence[float], q: float) -> float:
    """The least sample that at least a share of ``q`` of them does not exceed (nearest rank): one that was measured,
    never one in between."""
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)]
