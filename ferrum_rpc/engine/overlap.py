"""When to begin the next step while the device still computes one: as late as its host work stays hidden.

Whatever arrives before a step is begun is part of it (natural batching), so one that is begun at the first chance takes
the first caller only, and those that come a moment later wait for a whole step more. Begun as the device finishes, it
takes them all, and the device does not idle. When that will be is not known; how long the last step took is.
"""

from __future__ import annotations

from typing import Final

LOOK_S: Final = 50e-6
"""Seconds between two looks at a step under way, until the next is due."""

MARGIN: Final = 2.0
"""How much longer than the last time beginning a step may take, and the device still finds it when it wants it."""


class Overlap:
    """Of one loop. All times in seconds on one monotonic clock."""

    def __init__(self) -> None:
        self.turn = 0.0
        """When the device was free for the oldest step under way: when it was begun, or the one before it had ended."""
        self._begin_s = 0.0
        self._step_s = 0.0

    def begun(self, began: float, now: float, *, idle: bool) -> None:
        """A step was begun between ``began`` and ``now``; ``idle``: none was under way."""
        self._begin_s = now - began
        if idle:
            self.turn = began

    def finished(self, now: float) -> None:
        """The oldest step has ended."""
        self._step_s, self.turn = now - self.turn, now

    def due(self, now: float) -> bool:
        """Whether a step that is begun now is there when the device wants it, and no sooner than need be."""
        return now >= self.turn + self._step_s - MARGIN * self._begin_s - LOOK_S
