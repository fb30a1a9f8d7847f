"""The length of runs, long enough to hide round trips and short enough for a steady stream, and the number of shared
frames in flight."""

from __future__ import annotations

import math
from typing import Final

from ferrum_rpc.core import StepTiming

FIRST_RUN: Final = 4
"""Tokens of a run before the time of a step is known."""

LEAST_RUN_S: Final = 0.02
"""Minimum time of a run: shorter ones cost more messages than a reader gains."""

SMOOTHING: Final = 0.25
"""The weight of the latest answer."""

_TRIPS_OF_A_RUN: Final = 1.5
"""Length of a run in round trips, so that it lasts until the next one arrives; four times that without followers."""


class RunPace:
    """The time of a round trip to the executor, and of one step of a run there, in seconds."""

    def __init__(self) -> None:
        self.trip_s: float | None = None
        self.step_s: float | None = None

    def note(self, elapsed_s: float | None, timing: StepTiming | None, tokens: int) -> None:
        """Note an answered run of ``tokens`` (0: a prefill). ``elapsed_s``: since it was sent, None if it waited."""
        if timing is None:
            return
        if elapsed_s is not None:
            trip_s = max(0.0, elapsed_s - timing.queue_s - timing.forward_s)
            if self.trip_s is None or trip_s < self.trip_s:  # the minimum: a lease or a new stream only adds time
                self.trip_s = trip_s
            self.trip_s += (trip_s - self.trip_s) * SMOOTHING
        if tokens:
            step_s = timing.forward_s / tokens
            self.step_s = step_s if self.step_s is None else self.step_s + (step_s - self.step_s) * SMOOTHING

    def tokens(self, most: int, *, chains: bool) -> int:
        """Tokens of the next run, at most ``most``. ``chains``: another one will follow it."""
        if self.step_s is None or self.trip_s is None:
            return min(FIRST_RUN, most)
        wanted_s = max(LEAST_RUN_S, self.trip_s * _TRIPS_OF_A_RUN * (1 if chains else 4))
        return most if wanted_s >= most * self.step_s else max(1, math.ceil(wanted_s / self.step_s))


class FramePace:
    """The maximum number of shared frames of one stream in flight, ``most``: enough to keep the executor busy.

    Requests that wait meanwhile share the next frame. A step takes about as long for many sequences as for a few, so
    one frame too many splits the sequences into groups that wait for each other's steps, each at half the speed.
    """

    def __init__(self) -> None:
        self.most = 1
        self._step_s = self._around_s = 0.0

    def answered(self, elapsed_s: float, timing: StepTiming | None) -> None:
        """Note a shared frame answered after ``elapsed_s`` seconds. During the time outside its step and queue the
        executor could have computed another frame."""
        if timing is None:
            return
        around = max(0.0, elapsed_s - timing.queue_s - timing.forward_s)
        weight = SMOOTHING if self._step_s else 1.0
        self._step_s += (timing.forward_s - self._step_s) * weight
        self._around_s += (around - self._around_s) * weight
        self.most = 1 + int(self._around_s / self._step_s) if self._step_s > 0 else 1
