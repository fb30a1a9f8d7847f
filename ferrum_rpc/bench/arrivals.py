"""When the next step begins: a closed loop sends it when the last one was answered, an open loop when it is due.

The due times of an open loop wait for nothing. A step without a free caller is late, and its latency counts from when
it was due: a stall then shows in every step that it delayed, not only in one (coordinated omission; Tene, wrk2).
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Iterator
from typing import Final

import numpy as np

from ferrum_rpc.bench.options import Workload

FINE_S: Final = 0.002
"""The last part of a wait sleeps in a thread: timers of an event loop fire up to a millisecond late (epoll), which
would be most of the latency of an empty step."""


class Arrivals:
    """Assigns the steps of a workload, whose measurement begins at ``began``, to free callers. ``unsent``: steps that
    were due and got no caller before the end."""

    def __init__(self, workload: Workload, began: float) -> None:
        self._open = workload.rate is not None
        self._end = math.inf if workload.seconds is None else began + workload.seconds
        due = itertools.islice(due_times(workload, began), workload.steps)
        self._due = itertools.takewhile(lambda at: at < self._end, due)
        self.unsent = 0

    async def next(self) -> float | None:
        """When the next step to send was due, on `time.perf_counter`; None if there is none any more."""
        now = time.perf_counter()
        if now >= self._end:
            if self._open:
                self.unsent += sum(1 for _ in self._due)
            return None
        due = next(self._due, None)
        if due is None or not self._open:
            return None if due is None else now
        await _until(due)
        return due


def due_times(workload: Workload, began: float) -> Iterator[float]:
    """Without end. Where no rate is asked for, every step is due at once."""
    if workload.rate is None:
        yield from itertools.repeat(began)
    elif workload.arrivals == "fixed":
        for step in itertools.count():
            yield began + step / workload.rate
    else:
        random, at = np.random.default_rng([workload.seed, 1]), began
        while True:
            at += float(random.exponential(1 / workload.rate))
            yield at


async def _until(due: float) -> None:
    left = due - time.perf_counter()
    if left > FINE_S:
        await asyncio.sleep(left - FINE_S)
    if due > time.perf_counter():
        await asyncio.to_thread(lambda: time.sleep(max(0.0, due - time.perf_counter())))
