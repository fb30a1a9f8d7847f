"""The places of runs in progress, and the queue of runs that wait for one.

If there are several callers, each may have a share of the places (`Submission.max_running`). A caller's further
submissions wait, in order, and do not block other callers. A submission is never split: one with more runs than its
caller's share begins when its caller has none in progress, and counts as no more than that share for others. Only then
are more runs in progress than there are places.

The next one to begin is of the caller with the fewest places; among those, of the caller whose last turn is longest
ago. If the free places do not suffice for it, no other begins before it, so none waits for ever. It begins with its
caller's next turn in the backlog.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from ferrum_rpc.engine.api import Submission


class Places:
    """``capacity`` places. ``count``: the runs in progress or being begun. ``tokens``: those of waiting submissions.
    True if any waits."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._held: dict[int, int] = {}  # runs, by caller that has any
        self._parts: dict[int, int] = {}  # the places that such a caller may have
        self._turns: dict[int, int] = {}  # when it had its last one, by caller that holds or waits
        self._waiting: dict[int, deque[Submission]] = {}  # by caller, in the order in which they began to wait
        self._turn = 0
        self.count = 0
        self.tokens = 0

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def may_begin(self, work: Submission) -> bool:
        """Whether a new submission may begin at once."""
        return not self._waiting and self._within_part(work) and self._fits(work)

    def add(self, work: Submission) -> None:
        """Add it to the queue."""
        self.tokens += work.tokens
        self._waiting.setdefault(work.caller, deque()).append(work)

    def first(self, is_over: Callable[[Submission], bool]) -> Submission | None:
        """The next one to begin, if there are places for it. Submissions that are over, by ``is_over``, are dropped
        when they come first."""
        best, stands = None, (0, 0)
        for caller in list(self._waiting):
            while (works := self._waiting.get(caller)) and is_over(works[0]):
                self.take(works[0])
            if works and self._within_part(works[0]):
                held = self._held.get(caller, 0), self._turns.get(caller, 0)
                if best is None or held < stands:
                    best, stands = works[0], held
        return best if best is not None and self._fits(best) else None

    def take(self, work: Submission) -> Submission:
        """Remove it from the queue. It must be the first of its caller."""
        works = self._waiting[work.caller]
        works.popleft()
        self.tokens -= work.tokens
        if not works:
            del self._waiting[work.caller]
            self._forget(work.caller)
        return work

    def pop(self) -> Submission:
        """Remove any waiting submission, which will not begin."""
        return self.take(next(iter(self._waiting.values()))[0])

    def hold(self, work: Submission) -> None:
        """Allocate places for its runs."""
        self.count += work.runs
        self._turn += 1
        self._turns[work.caller] = self._turn
        self._parts[work.caller] = work.max_running
        self._held[work.caller] = self._held.get(work.caller, 0) + work.runs

    def free(self, work: Submission, runs: int) -> None:
        """Free the places of so many of its runs."""
        self.count -= runs
        left = self._held.get(work.caller, 0) - runs
        if left:
            self._held[work.caller] = left
        else:
            self._held.pop(work.caller, None)
            self._parts.pop(work.caller, None)
            self._forget(work.caller)

    def _forget(self, caller: int) -> None:
        if caller not in self._held and caller not in self._waiting:
            self._turns.pop(caller, None)

    def _fits(self, work: Submission) -> bool:
        """Whether there are places for all its runs. A submission without others always fits."""
        taken = sum([min(held, self._parts[caller]) for caller, held in self._held.items()])
        return not taken or taken + min(work.runs, work.max_running) <= self._capacity

    def _within_part(self, work: Submission) -> bool:
        held = self._held.get(work.caller, 0)
        return not held or held + work.runs <= work.max_running
