"""Submissions that wait for the masks of their grammars, before they wait for a step.

Others overtake them, also those of the same caller: a grammar that is expensive delays nothing but its own items.
"""

from __future__ import annotations

from collections.abc import Callable

from ferrum_rpc.engine.api import Constraining, Submission


class Aside:
    """The waiting submissions. ``add`` is called with each when its masks are there. True if any waits."""

    def __init__(self, add: Callable[[Submission], object]) -> None:
        self._add = add
        self._waiting: list[Submission] = []

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def waits(self, work: Submission, constraints: Constraining) -> bool:
        """Whether a submission that has arrived has to wait; then it does."""
        if not constraints.ask(work.spans):
            return False
        self._waiting.append(work)
        return True

    def pass_on(self, constraints: Constraining) -> None:
        """Pass on what has waited long enough."""
        constraints.wait(0.0)
        left = []
        for work in self._waiting:
            if constraints.ready(work.spans):
                self._add(work)
            else:
                left.append(work)
        self._waiting = left

    def pop(self) -> Submission:
        """Remove any, which will not begin."""
        return self._waiting.pop()
