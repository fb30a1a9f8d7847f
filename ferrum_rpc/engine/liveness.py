"""Detects whether an engine makes progress, from outside and without waiting for it.

An engine that waits for work is not checked. One that works uses CPU time: it computes, or waits for a device (CUDA's
waits spin). A hang on a lock or in a sleep does not. So the CPU clock distinguishes a hang from a long step, and a step
need not report anything. An endless spin is caught by a bound on the length of a step.
"""

from __future__ import annotations

import threading
import time
from typing import Final

STALL_TIMEOUT_S: Final = 1.5
"""Seconds of work without CPU time after which an engine counts as hung."""

MAX_STEP_S: Final = 600.0
"""Maximum seconds of a step, whatever it computes."""

CPU_PROGRESS_S: Final = 0.001
"""Minimum CPU seconds that count as computing; waking up from a wait and sleeping again takes far less."""


class Liveness:
    """Liveness of one engine. ``cpu_clock``: the number, for `time.clock_gettime`, of the clock of the working thread
    or process; None if unknown, and then only the length of a step is checked."""

    def __init__(self, stall_timeout_s: float = STALL_TIMEOUT_S, max_step_s: float = MAX_STEP_S) -> None:
        self.cpu_clock: int | None = None
        self._stall_timeout_s = stall_timeout_s
        self._max_step_s = max_step_s
        self._looked = 0.0
        self._alive_at = 0.0
        self._cpu_s = 0.0

    def hang_reason(self, now: float, busy_since: float) -> str | None:
        """The reason why it makes no progress, or None. ``busy_since``: when the current step began (0: it waits for
        work); both on `time.monotonic`. Call this a few times per ``stall_timeout_s``.

        Time without calls proves nothing, because the whole process may have been stopped: the count of silent seconds
        restarts after a gap between two calls.
        """
        gap, self._looked = now - self._looked, now
        cpu_s = self._read_clock()
        if cpu_s is None or cpu_s - self._cpu_s >= CPU_PROGRESS_S or gap > self._stall_timeout_s / 2:
            self._alive_at = now
            self._cpu_s = cpu_s or 0.0
        if not busy_since:
            return None
        silent_s = now - max(busy_since, self._alive_at)
        if silent_s > self._stall_timeout_s:
            return f"it has neither moved on nor computed for {silent_s:.1f} s"
        if now - busy_since > self._max_step_s:
            return f"its step has taken {now - busy_since:.0f} s"
        return None

    def _read_clock(self) -> float | None:
        if self.cpu_clock is None:
            return None
        try:
            return time.clock_gettime(self.cpu_clock)
        except OSError:  # the thread has ended
            return self._cpu_s


def own_clock() -> int | None:
    """The CPU clock of the calling thread, if the platform has one that others may read."""
    find = getattr(time, "pthread_getcpuclockid", None)
    return None if find is None else find(threading.get_ident())


def process_clock(pid: int) -> int:
    """The CPU clock of a process. Linux derives its number from the process's, as the C library's
    ``clock_getcpuclockid`` does; the clock of a single thread of another process cannot be read."""
    return (~pid << 3) | 2
