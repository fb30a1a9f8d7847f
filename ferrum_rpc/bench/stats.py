"""The measurements of a run so far. They are complete at any moment: an interrupted run reports them."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from ferrum_rpc.core import StepTiming
from ferrum_rpc.errors import ExecutorError

LIMIT: Final = 1 << 20
"""Number of samples that are kept: 8 MiB; a p99.9 of them is based on a thousand."""

QUANTILES: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99_9": 0.999}


class Samples:
    """Durations in seconds. Count, mean and maximum are those of all, and percentiles are exact up to ``limit``; from
    then on each later duration replaces a random kept one with the probability that leaves all equally likely to be
    ``kept`` (Vitter's algorithm R)."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self.kept = array("d")
        self._random = random.Random(0)  # noqa: S311 - which samples are kept is no secret
        self.sum = 0.0
        self.count = 0
        self.max = 0.0

    def add(self, seconds: float) -> None:
        """One more."""
        self.count += 1
        self.sum += seconds
        self.max = max(self.max, seconds)
        if len(self.kept) < self._limit:
            self.kept.append(seconds)
        elif (at := self._random.randrange(self.count)) < self._limit:
            self.kept[at] = seconds

    @property
    def thinned(self) -> bool:
        """Whether percentiles are based on a sample only."""
        return self.count > len(self.kept)

    def milliseconds(self) -> dict[str, float]:
        """``p50 p90 p99 p99_9 max mean`` in milliseconds; nothing where there are no samples. A percentile is by
        nearest rank: a duration that was measured, never one in between."""
        if not self.count:
            return {}
        found = np.quantile(self.kept, list(QUANTILES.values()), method="inverted_cdf").tolist()
        figures = dict(zip((*QUANTILES, "max", "mean"), (*found, self.max, self.sum / self.count), strict=True))
        return {name: 1e3 * seconds for name, seconds in figures.items()}


@dataclass(slots=True)
class Stats:
    """Times on `time.perf_counter`.

    ``prompt``: of each prefill; ``prefill_s`` is from before the first to after the last.

    ``step``: from when it was due (open loop) or sent (closed loop) to its answer; ``late``: from due to sent.
    ``queue`` and ``forward`` are the executor's own; ``rest`` is what they leave of the time from sent to answered:
    wire, protocol and this client. ``forwards``: forward passes, by the share that these tokens had in each.
    ``attempts`` counts refused steps too. ``gave_up``: callers that could not go on, and ``reason`` the last one's.
    ``unsent``: steps that were due before the end and had no free caller.
    """

    phase: str = "connecting"
    prompt: Samples = field(default_factory=Samples)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefill_s: float = 0.0
    began: float = 0.0
    ended: float = 0.0
    attempts: int = 0
    tokens: int = 0
    forwards: float = 0.0
    step: Samples = field(default_factory=Samples)
    queue: Samples = field(default_factory=Samples)
    forward: Samples = field(default_factory=Samples)
    rest: Samples = field(default_factory=Samples)
    late: Samples = field(default_factory=Samples)
    errors: Counter[str] = field(default_factory=Counter)
    unsent: int = 0
    gave_up: int = 0
    reason: ExecutorError | None = None

    @property
    def wall_s(self) -> float:
        """Seconds from the begin of the measurement to the last answer."""
        return max(0.0, self.ended - self.began)

    def refused(self, errors: Iterable[ExecutorError]) -> None:
        """Refused steps, or single sequences of them."""
        self.errors.update(str(each.reason) for each in errors)

    def answered(self, due: float, sent: float, tokens: int, timing: StepTiming | None) -> None:
        """A step that gave ``tokens``, at `ended`."""
        self.tokens += tokens
        self.step.add(self.ended - due)
        self.late.add(sent - due)
        if timing is not None:
            self.queue.add(timing.queue_s)
            self.forward.add(timing.forward_s)
            self.rest.add(max(0.0, self.ended - sent - timing.queue_s - timing.forward_s))
            self.forwards += tokens / max(1, timing.sequences)
