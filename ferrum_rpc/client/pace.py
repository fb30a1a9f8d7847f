"""How many shared frames may be in flight: as many as keep the executor busy, and no more.

What waits meanwhile goes together in the next one. A step takes about as long for many sequences as for a few, so one
more in flight than need be splits the sequences into groups that wait for each other's steps, each half as fast.
"""

from __future__ import annotations

from typing import Final

from ferrum_rpc.core import StepTiming

SMOOTHING: Final = 0.25
"""The weight of the latest answer."""


class Pace:
    """Of one stream. ``most``: shared frames in flight."""

    def __init__(self) -> None:
        self.most = 1
        self._step_s = self._around_s = 0.0

    def answered(self, elapsed_s: float, timing: StepTiming | None) -> None:
        """A shared frame was answered after ``elapsed_s`` seconds. What was neither its step nor its wait for it is
        time in which the executor could have computed for another."""
        if timing is None:
            return
        around = max(0.0, elapsed_s - timing.queue_s - timing.forward_s)
        first = self._step_s == 0.0
        self._step_s += (timing.forward_s - self._step_s) * (1.0 if first else SMOOTHING)
        self._around_s += (around - self._around_s) * (1.0 if first else SMOOTHING)
        self.most = 1 + int(self._around_s / self._step_s) if self._step_s > 0 else 1
