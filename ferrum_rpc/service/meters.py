"""Distributions recorded while calls and steps run, cheap enough to be always on.

`prometheus_client`'s own histogram takes locks and 0.75 µs per observation. Here only the event loop writes, and a
scrape reads snapshots: an observation is a bisection and two additions, 0.11 µs. The names are in `metrics.py`.
"""

from __future__ import annotations

import enum
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final

from ferrum_rpc.core import StepTiming

SECONDS: Final = (
    *(mantissa * 10.0**exponent for exponent in range(-5, 1) for mantissa in (1.0, 2.5, 5.0)),
    *(10.0, 25.0, 60.0),
)
"""Bounds of durations: three per decade from 10 µs, the fastest step of the identity model, to a minute."""

POWERS: Final = tuple(float(2**exponent) for exponent in range(15))
"""Bounds of sizes: 1 to 16384 tokens or sequences of a step."""


class Histogram:
    """Counts of values up to each bound, and their sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def observe_all(self, value: float, count: int) -> None:
        """``count`` observations of the same value."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count

    def snapshot(self) -> tuple[list[tuple[str, float]], float]:
        """Cumulative counts by upper bound in Prometheus' format, and the sum. A scrape in the middle of an observation
        has its count and not yet its value."""
        counts, total = self.counts.copy(), self.total
        labels = [*(f"{bound:g}" for bound in self.bounds), "+Inf"]
        return list(zip(labels, accumulate(counts), strict=True)), total


class Direction(enum.Enum):
    """Directions of transfers. The value is the label in the metrics."""

    EXPORT = "export"
    IMPORT = "import"
    PARK = "park"
    UNPARK = "unpark"


@dataclass(slots=True, eq=False)
class TransferMeter:
    """Transfers in one direction: how many ``now``, their ``bytes`` of K and V, how many ended early (``failures``),
    and the seconds of those that moved data."""

    now: int = 0
    bytes: int = 0
    failures: int = 0
    seconds: Histogram = field(default_factory=lambda: Histogram(SECONDS))

    @contextmanager
    def transfer(self, moved: Callable[[], int], intended: type[Exception]) -> Iterator[None]:
        """Record a transfer; ``moved()`` gives its bytes. If it ends with an error of the class ``intended``, its
        caller ended it and it is not a failure."""
        began, before = time.perf_counter(), moved()
        self.now += 1
        try:
            yield
        except BaseException as error:
            self.failures += not isinstance(error, intended)
            raise
        finally:
            self.now -= 1
            if moved() > before:
                self.seconds.observe(time.perf_counter() - began)


class StepMeter:
    """Statistics of steps: duration, size, and waiting time of their submissions."""

    def __init__(self) -> None:
        self.seconds = Histogram(SECONDS)
        self.tokens = Histogram(POWERS)
        self.sequences = Histogram(POWERS)
        self.queue_seconds = Histogram(SECONDS)

    def observe(self, step: StepTiming, waits: Sequence[float]) -> None:
        """Record a step; ``waits``: the seconds that each submission in it waited."""
        _, sequences, tokens, _, forward_s = step
        for histogram, value in ((self.seconds, forward_s), (self.tokens, tokens), (self.sequences, sequences)):
            histogram.counts[bisect_left(histogram.bounds, value)] += 1
            histogram.total += value
        queued = self.queue_seconds
        for each in waits:
            queued.counts[bisect_left(queued.bounds, each)] += 1
            queued.total += each
