"""When the next step begins: a closed loop sends it when the last one was answered, an open loop when it is due.

An open loop's due times do not wait for anything. A step that finds no free caller is late, and its latency counts from
when it was due: a stall then shows in every step that it delayed, and not in one (coordinated omission; Tene, wrk2).
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
"""The last part of a wait is slept in a thread: an event loop's timers go off up to a millisecond late (epoll), which
would be most of the latency of an empty step."""


class Arrivals:
    """Hands out the steps of a workload whose measurement begins at ``began`` to callers that are free. ``unsent``:
    steps that were due and got no caller before the end."""

    def __init__(self, workload: Workload, began: float) -> None:
        self._open = workload.rate is not None
        self._end = math.inf if workload.seconds is None else began + workload.seconds
        due = itertools.islice(due_times(workload, began), workload.steps)
        self._due = itertools.takewhile(lambda at: at < self._end, due)
        self.unsent = 0

    async def next(self) -> float | None:
        """When the step was due that is to be sent now, on `time.perf_counter`; None: there is none any more."""
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
