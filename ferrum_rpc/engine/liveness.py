"""Detects whether an engine makes progress, from outside and without waiting for it.

An engine that waits for work is not checked. One that works is checked in three ways, and a step need not report
anything:

- It uses CPU time: it computes, or waits for a device (CUDA's waits spin). A thread that hangs on a lock or in a sleep,
  and a process that is stopped, do not. A compiler that it started and waits for counts as its own work.
- A device that hangs uses CPU time too, because the thread that waits for it spins. So the wait for the oldest step on
  a device has a limit of its own.
- An endless spin is caught by a limit on the length of a step.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Final

STALL_TIMEOUT_S: Final = 1.5
"""Seconds of work without CPU time after which an engine counts as hung."""

DEVICE_TIMEOUT_S: Final = 30.0
"""Seconds for which a device may compute one step: the longest take a few (8,192 tokens of an 8B model: about one)."""

COMPILE_TIMEOUT_S: Final = 60.0
"""Seconds of work without CPU time while a compiler runs. The largest kernels take 10 on a busy machine (estimated)."""

MAX_STEP_S: Final = 600.0
"""Maximum seconds of a step, whatever it computes."""

CPU_PROGRESS_S: Final = 0.001
"""Minimum CPU seconds that count as computing; waking up from a wait and sleeping again takes far less."""

COMPILERS: Final = frozenset(
    {
        *("ptxas", "ptxas-blackwell", "nvcc", "cicc", "nvlink", "fatbinary"),
        *("gcc", "g++", "cc", "c++", "clang", "clang++", "cc1", "cc1plus", "x86_64-linux-gn", "aarch64-linux-g"),
        *("as", "collect2", "ld", "ld.bfd", "ld.gold", "ld.lld", "lld", "lto1", "lto-wrapper"),
    }
)
"""Names of the processes that Triton and C extensions start, as Linux reports them: their first 15 characters."""

PROC: Final = Path("/proc")


class Liveness:
    """Liveness of one engine. ``cpu_clock``: the number, for `time.clock_gettime`, of the clock of the working thread
    or process; None if unknown, and then silence proves nothing. ``process``: the process among whose descendants a
    compiler counts, or None."""

    def __init__(
        self,
        stall_timeout_s: float = STALL_TIMEOUT_S,
        max_step_s: float = MAX_STEP_S,
        device_timeout_s: float = DEVICE_TIMEOUT_S,
    ) -> None:
        self.cpu_clock: int | None = None
        self.process: int | None = None
        self._stall_timeout_s = stall_timeout_s
        self._max_step_s = max_step_s
        self._device_timeout_s = device_timeout_s
        self._looked = 0.0
        self._watched_since = 0.0
        self._alive_at = 0.0
        self._cpu_s = 0.0

    def hang_reason(self, now: float, busy_since: float, waiting_since: float = 0.0) -> str | None:
        """The reason why it makes no progress, or None. ``busy_since``: when the current step began (0: it waits for
        work); ``waiting_since``: when a device began the oldest step in flight (0: no device has one); all on
        `time.monotonic`. Call this a few times per ``stall_timeout_s``.

        Time without calls proves nothing, because the whole process may have been stopped: the counts of silent seconds
        and of a device's restart after a gap between two calls.
        """
        gap, self._looked = now - self._looked, now
        if gap > self._stall_timeout_s / 2:
            self._watched_since = self._alive_at = now
        cpu_s = self._read_clock()
        if cpu_s is None or cpu_s - self._cpu_s >= CPU_PROGRESS_S:
            self._alive_at = now
            self._cpu_s = cpu_s or 0.0
        if not busy_since:
            return None
        silent_s = now - max(busy_since, self._alive_at)
        if silent_s > self._stall_timeout_s and not (silent_s <= COMPILE_TIMEOUT_S and self._compiles()):
            return f"it has neither moved on nor computed for {silent_s:.1f} s"
        if waiting_since and (waited_s := now - max(waiting_since, self._watched_since)) > self._device_timeout_s:
            return f"the device has not finished its step for {waited_s:.0f} s"
        if now - busy_since > self._max_step_s:
            return f"its step has taken {now - busy_since:.0f} s"
        return None

    def _compiles(self) -> bool:
        return self.process is not None and runs_compiler(self.process)

    def _read_clock(self) -> float | None:
        if self.cpu_clock is None:
            return None
        try:
            return time.clock_gettime(self.cpu_clock)
        except OSError:  # the thread has ended
            return self._cpu_s


def runs_compiler(process: int) -> bool:
    """Whether a descendant of ``process`` is a compiler that runs. False if the kernel does not list children. Other
    descendants, which may live as long as the process, prove nothing."""
    try:
        lists = [each.read_text() for each in PROC.glob(f"{process}/task/*/children")]
        for child in " ".join(lists).split():
            head, _, rest = (PROC / child / "stat").read_text().rpartition(")")
            if head.partition("(")[2] in COMPILERS and rest.split()[0] != "Z":
                return True
            if runs_compiler(int(child)):
                return True
    except OSError:  # one has ended meanwhile
        pass
    return False


def own_clock() -> int | None:
    """The CPU clock of the calling thread, if the platform has one that others may read."""
    find = getattr(time, "pthread_getcpuclockid", None)
    return None if find is None else find(threading.get_ident())


def process_clock(pid: int) -> int:
    """The CPU clock of a process. Linux derives its number from the process's, as the C library's
    ``clock_getcpuclockid`` does; the clock of a single thread of another process cannot be read."""
    return (~pid << 3) | 2
