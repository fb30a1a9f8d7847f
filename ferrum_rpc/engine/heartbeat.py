"""Whether the model thread lives: told from outside, without waiting for it.

The thread beats when it is idle, around every step and within one (at every layer, or every tenth of a second of
layers). That alone cannot tell a hung thread from a long honest operation, so whoever asks also looks at the thread's
CPU clock: a thread that computes uses it, one that waits for a lock or a dead device does not. A device wait that spins
uses it for ever; a bound on the length of a step catches that.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final, Protocol

STALL_TIMEOUT_S: Final = 1.5
"""Seconds without a sign of life that mean a hang."""

MAX_STEP_S: Final = 600.0
"""Seconds that a step may take whatever it computes."""

IDLE_BEAT_S: Final = 0.5
"""Seconds between the beats of an idle thread."""

CPU_PROGRESS_S: Final = 0.001
"""CPU seconds between two looks that count as computing; waking up from a wait and sleeping again takes far less."""


class Signs(Protocol):
    """[0]: the last sign of life, [1]: when the step began; seconds of the clock, 0: there is none."""

    def __getitem__(self, index: int, /) -> float:
        """As it was set."""

    def __setitem__(self, index: int, value: float, /) -> None:
        """Set it, in one indivisible move."""


class Heartbeat:
    """Signs of life of one thread: it calls `begin` and `beat`; another one asks for `trouble`.

    ``clock`` is in seconds, like ``now`` of `trouble`. Where the thread is another process's, each side has a heartbeat
    over the same ``signs``, and the one that asks is told whose CPU clock to look at (`watch`).
    """

    def __init__(
        self,
        stall_timeout_s: float = STALL_TIMEOUT_S,
        max_step_s: float = MAX_STEP_S,
        clock: Callable[[], float] = time.monotonic,
        signs: Signs | None = None,
    ) -> None:
        self._stall_timeout_s = stall_timeout_s
        self._max_step_s = max_step_s
        self._clock = clock
        self._cpu_clock: int | None = None
        self._signs: Signs = [0.0, 0.0] if signs is None else signs
        self._looked = 0.0
        self._alive_at = 0.0
        self._cpu_s = 0.0

    # --- the thread's side ------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Called in the thread, once it takes work; before that it is not judged."""
        find = getattr(time, "pthread_getcpuclockid", None)  # not on every platform; then beats alone must do
        self._cpu_clock = None if find is None else find(threading.get_ident())
        self.beat()

    def beat(self) -> None:
        """A sign of life."""
        self._signs[0] = self._clock()

    def step_begins(self) -> None:
        """A step begins: a sign of life, and from here on its length counts."""
        self._signs[0] = self._signs[1] = self._clock()

    def step_ends(self) -> None:
        """The step is over."""
        self._signs[1] = 0.0
        self.beat()

    # --- the other side ---------------------------------------------------------------------------------------------

    def watch(self, signs: Signs, cpu_clock: int) -> None:
        """From now on ask about a thread of another process."""
        self._signs, self._cpu_clock = signs, cpu_clock

    def trouble(self, now: float) -> str | None:
        """Why the thread does not live, or None. To be asked a few times per `STALL_TIMEOUT_S`.

        Time in which nobody asked proves nothing: the whole process may have been stopped, so the count of silent
        seconds begins anew after a gap between two looks.
        """
        beat, step = self._signs[0], self._signs[1]
        if not beat:
            return None
        gap, self._looked = now - self._looked, now
        cpu_s = self._cpu()
        computing = cpu_s - self._cpu_s >= CPU_PROGRESS_S
        if computing:
            self._cpu_s = cpu_s
        if computing or gap > self._stall_timeout_s / 2:
            self._alive_at = now
        silent_s = now - max(beat, self._alive_at)
        if silent_s > self._stall_timeout_s:
            return f"it has neither moved on nor computed for {silent_s:.1f} s"
        if step and now - step > self._max_step_s:
            return f"its step has taken {now - step:.0f} s"
        return None

    def _cpu(self) -> float:
        if self._cpu_clock is None:
            return 0.0
        try:
            return time.clock_gettime(self._cpu_clock)
        except OSError:  # the thread has ended
            return self._cpu_s


def process_clock(pid: int) -> int:
    """The CPU clock of a process, for `time.clock_gettime`. Linux makes its number of the process's, as the C library's
    ``clock_getcpuclockid`` does; a single thread of another process has none that may be read."""
    return (~pid << 3) | 2
