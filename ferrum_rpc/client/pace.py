"""How many tokens a run should have: enough that trips cost nothing, and few enough that tokens keep coming."""

from __future__ import annotations

import math
from typing import Final

from ferrum_rpc.core import StepTiming

FIRST_RUN: Final = 4
"""Tokens of a run while it is not known how long a step takes."""

LEAST_RUN_S: Final = 0.02
"""Shorter runs would cost more messages, and nobody reads faster."""

_SMOOTHING: Final = 0.25
_TRIPS_OF_A_RUN: Final = 1.5
"""A run takes so many trips, to be under way until the next one has arrived, and four times that without followers."""


class Pace:
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
            self.trip_s += (trip_s - self.trip_s) * _SMOOTHING
        if tokens:
            step_s = timing.forward_s / tokens
            self.step_s = step_s if self.step_s is None else self.step_s + (step_s - self.step_s) * _SMOOTHING

    def tokens(self, most: int, *, chains: bool) -> int:
        """Of the next run, ``most`` at most. ``chains``: another one will follow it."""
        if self.step_s is None or self.trip_s is None:
            return min(FIRST_RUN, most)
        wanted_s = max(LEAST_RUN_S, self.trip_s * _TRIPS_OF_A_RUN * (1 if chains else 4))
        return most if wanted_s >= most * self.step_s else max(1, math.ceil(wanted_s / self.step_s))
