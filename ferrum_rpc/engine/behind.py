"""Submissions whose turn it was, but tokens of whose sequences must be fed again first.

A piece is fed between two steps, so the steps of others go on. Submissions are fed in the order in which they came.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from ferrum_rpc.engine.api import Feeding, Submission


class Behind:
    """The waiting submissions. True if any waits."""

    def __init__(self) -> None:
        self._waiting: deque[Submission] = deque()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def waits(self, work: Submission, feeding: Feeding) -> bool:
        """Whether a submission has to wait."""
        work.fed = not any(feeding.missing(span) for span in work.spans)
        return not work.fed

    def add(self, work: Submission) -> None:
        """It waits."""
        self._waiting.append(work)

    def first(self, is_over: Callable[[Submission], bool]) -> Submission | None:
        """The next to be fed. Those that are over, by ``is_over``, are dropped."""
        while self._waiting and is_over(self._waiting[0]):
            self._waiting.popleft()
        return self._waiting[0] if self._waiting else None

    def feed(self, feeding: Feeding) -> bool:
        """Feed a piece of the first; True if it needs no more, or there is no slot for it. Raises as `Feeding.feed`
        does."""
        work = self._waiting[0]
        work.fed = not feeding.feed(work.spans)
        return work.fed

    def pop(self) -> Submission:
        """Remove the first."""
        return self._waiting.popleft()
