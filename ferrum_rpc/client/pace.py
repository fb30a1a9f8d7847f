"""How much goes at a time: tokens in a run, so many that trips cost nothing and so few that tokens keep coming, and
shared frames of a session in flight."""

from __future__ import annotations

import math
from typing import Final

from ferrum_rpc.core import StepTiming

FIRST_RUN: Final = 4
"""Tokens of a run while it is not known how long a step takes."""

LEAST_RUN_S: Final = 0.02
"""Shorter runs would cost more messages, and nobody reads faster."""

SMOOTHING: Final = 0.25
"""The weight of the latest answer."""

_TRIPS_OF_A_RUN: Final = 1.5
"""A run takes so many trips, to be under way until the next one has arrived, and four times that without followers."""


class RunPace:
    """How long a trip to the executor and back takes, and one step of a run there, in seconds."""

    def __init__(self) -> None:
        self.trip_s: float | None = None
        self.step_s: float | None = None

    def note(self, elapsed_s: float | None, timing: StepTiming | None, tokens: int) -> None:
        """A run of ``tokens`` was answered; a prefill: 0. ``elapsed_s``: since it was sent, None where it waited."""
        if timing is None:
            return
        if elapsed_s is not None:
            trip_s = max(0.0, elapsed_s - timing.queue_s - timing.forward_s)
            if self.trip_s is None or trip_s < self.trip_s:  # what comes between only adds to it: a lease, a new stream
                self.trip_s = trip_s
            self.trip_s += (trip_s - self.trip_s) * SMOOTHING
        if tokens:
            step_s = timing.forward_s / tokens
            self.step_s = step_s if self.step_s is None else self.step_s + (step_s - self.step_s) * SMOOTHING

    def tokens(self, most: int, *, chains: bool) -> int:
        """Of the next run, ``most`` at most. ``chains``: another one will follow it."""
        if self.step_s is None or self.trip_s is None:
            return min(FIRST_RUN, most)
        wanted_s = max(LEAST_RUN_S, self.trip_s * _TRIPS_OF_A_RUN * (1 if chains else 4))
        return most if wanted_s >= most * self.step_s else max(1, math.ceil(wanted_s / self.step_s))


class FramePace:
    """How many shared frames of one stream may be in flight: ``most``, enough to keep the executor busy.

    What waits meanwhile shares the next one. A step takes about as long for many sequences as for a few, so
    one more in flight than need be splits the sequences into groups that wait for each other's steps, each half as
    fast.
    """

    def __init__(self) -> None:
        self.most = 1
        self._step_s = self._around_s = 0.0

    def answered(self, elapsed_s: float, timing: StepTiming | None) -> None:
        """A shared frame was answered after ``elapsed_s`` seconds. What was neither its step nor its wait for it is
        time in which the executor could have computed for another."""
        if timing is None:
            return
        around = max(0.0, elapsed_s - timing.queue_s - timing.forward_s)
        weight = SMOOTHING if self._step_s else 1.0
        self._step_s += (timing.forward_s - self._step_s) * weight
        self._around_s += (around - self._around_s) * weight
        self.most = 1 + int(self._around_s / self._step_s) if self._step_s > 0 else 1
