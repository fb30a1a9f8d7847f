"""The slowest calls of the last minute, for an operator who asks what is slow now.

Histograms say how many calls are slow, and not which. A call that is faster than all those kept costs one comparison.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

MAX_CALLS: Final = 16
WINDOW_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class EndedCall:
    """A call that ended at ``ended``, in seconds of the clock. ``method``: full name; ``identity``: of its caller;
    ``code``: name of its gRPC status code."""

    method: str
    identity: str
    elapsed_s: float
    code: str
    ended: float


class SlowestCalls:
    """At most `MAX_CALLS` calls that ended within `WINDOW_S` seconds. ``clock``: as `time.monotonic`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._calls: list[EndedCall] = []
        self._floor_s = 0.0  # a call must be slower, until the first of those that are kept is too old
        self._floor_until = 0.0

    def note(self, method: str, identity: str, elapsed_s: float, code: str) -> None:
        """A call has ended."""
        now = self._clock()
        if elapsed_s <= self._floor_s and now < self._floor_until:
            return
        calls = [EndedCall(method, identity, elapsed_s, code, now), *self._recent(now)]
        self._calls = sorted(calls, key=lambda each: -each.elapsed_s)[:MAX_CALLS]
        if len(self._calls) == MAX_CALLS:
            self._floor_s = self._calls[-1].elapsed_s
            self._floor_until = WINDOW_S + min(each.ended for each in self._calls)
        else:
            self._floor_s = 0.0

    def slowest(self) -> list[tuple[EndedCall, float]]:
        """The calls, slowest first, each with the seconds since its end."""
        now = self._clock()
        return [(each, now - each.ended) for each in self._recent(now)]

    def _recent(self, now: float) -> list[EndedCall]:
        return [each for each in self._calls if now - each.ended < WINDOW_S]
