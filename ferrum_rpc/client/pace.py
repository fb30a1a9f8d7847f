"""The length of runs, long enough to hide round trips and short enough for a steady stream, and the number of shared
frames in flight."""

from __future__ import annotations

import math
from typing import Final

from ferrum_rpc.core import StepTiming

FIRST_RUN: Final = 4
"""Tokens of a run before the time of a step is known, and of the run that begins with a prompt and is followed."""

RUN_S: Final = 0.06
"""Time of a run if nothing calls for a longer one: a reader gets tokens sixteen times a second."""

RUN_S_OF_A_SEQUENCE: Final = 0.01
"""Time of a run for each sequence that shares its steps. The messages of a run cost the two processes about 0.5 ms in
all, so those of all runs take a twentieth of the time."""

LONGEST_RUN_S: Final = 0.25
"""Time of a run at most, unless a round trip takes that long."""

SMOOTHING: Final = 0.25
"""The weight of the latest answer."""

_TRIPS_OF_A_RUN: Final = 1.5
"""Length of a run in round trips, so that it lasts until the next one arrives; four times that without followers."""


class RunPace:
    """How many tokens the next run should have: the policy of `Sequence.stream`, for schedulers that send runs
    themselves.

        pace = RunPace()
        while more:
            sent = time.monotonic()
            [answer] = await client.forward([sequence.item([token], run=Run(pace.tokens(limits.max_run_tokens)))])
            pace.note(time.monotonic() - sent, answer.timing, len(answer.tokens))

    Keep one for each executor, because it measures that executor: ``trip_s``, the time of a round trip to it,
    ``step_s``, that of one step of a run there, in seconds, both None until the first answer, and ``sequences``, how
    many share such a step. They follow the load.

    A run lasts 60 ms, or 10 ms for each of the sequences that share its steps (up to 250 ms), because each run costs
    the messages of one request. It lasts longer if that hides the trip: 1.5 trips if the next run follows this one at
    the executor (``chains``), 6 trips if that is sent only after the answer. ``max_delay_s`` bounds all of this.
    """

    def __init__(self) -> None:
        self.trip_s: float | None = None
        self.step_s: float | None = None
        self.sequences = 1.0

    def note(self, elapsed_s: float | None, timing: StepTiming | None, tokens: int) -> None:
        """Note an answered run that chose ``tokens`` (0: an item without a run, or one that fed a prompt first).
        ``elapsed_s``: from its sending to its answer; None if it waited at the executor for another item. ``timing``:
        that of its `Answer`; None is ignored."""
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
            self.sequences += (timing.sequences - self.sequences) * SMOOTHING

    def tokens(self, most: int, *, chains: bool = False, max_delay_s: float | None = None) -> int:
        """Tokens of the next run, 1 to ``most``. ``chains``: another run will follow it before it is answered.
        ``max_delay_s``: the longest time that the first token of a run may wait for its last one; less than the trip
        needs costs throughput. Before the first answer it is a few tokens, or one if a delay is given."""
        if self.step_s is None or self.trip_s is None:
            return min(FIRST_RUN if max_delay_s is None else 1, most)
        steady_s = max(RUN_S, min(LONGEST_RUN_S, RUN_S_OF_A_SEQUENCE * self.sequences))
        wanted_s = max(steady_s, self.trip_s * _TRIPS_OF_A_RUN * (1 if chains else 4))
        if max_delay_s is not None and max_delay_s < wanted_s:
            return most if max_delay_s >= (most - 1) * self.step_s else 1 + int(max_delay_s / self.step_s)
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
