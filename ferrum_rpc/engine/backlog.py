"""What waits for a step, and whose turn it is: first come first served of one caller, fair between callers.

The next to go is of the caller that had least of the steps since it began to wait (start-time fair queueing). What a
submission takes of a step is the larger of its parts of the step's items and tokens, so many short calls and few long
ones weigh what they keep others from. A caller that comes anew starts where the one stands whose turn it was last: time
without work earns nothing. What does not fit into a step has the next turn, so nothing waits for ever.

With one caller it is a queue. What waits costs 1.5 µs a submission, and 4 µs where there are several callers.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush, heapreplace

from ferrum_rpc.engine.api import Submission


class Backlog:
    """The submissions that wait for a step."""

    def __init__(self, max_step_items: int, max_step_tokens: int) -> None:
        self._item, self._token = max_step_tokens, max_step_items  # what one takes; a whole step is their product
        self._waiting: dict[int, deque[Submission]] = {}  # by caller
        self._turns: list[tuple[int, int, int]] = []  # a heap: what a caller had, its place among equals, the caller
        self._level = 0  # where the one stood whose turn it was last
        self._came = 0
        self.tokens = 0
        """What all of it feeds."""

    def __bool__(self) -> bool:
        return bool(self._turns)

    def add(self, work: Submission) -> None:
        """It waits. One that is ``placed`` has waited before, and goes before its caller's others."""
        self.tokens += work.tokens
        works = self._waiting.get(work.caller)
        if works is not None:
            if work.placed:
                works.insert(next((at for at, each in enumerate(works) if not each.placed), len(works)), work)
            else:
                works.append(work)
            return
        self._waiting[work.caller] = deque((work,))
        self._came += 1
        heappush(self._turns, (self._level, self._came, work.caller))

    def first(self) -> Submission | None:
        """The next to go."""
        return self._waiting[self._turns[0][2]][0] if self._turns else None

    def take(self, *, counted: bool = True) -> Submission:
        """`first`, which goes now. Not ``counted``: its caller has nothing of a step, because it was cancelled, or
        waits for a place."""
        had, place, caller = self._turns[0]
        works = self._waiting[caller]
        work = works.popleft()
        self.tokens -= work.tokens
        if counted:
            self._level = had
            had += max(len(work.spans) * self._item, work.tokens * self._token)
            self._came += 1
            place = self._came
        if works:
            heapreplace(self._turns, (had, place, caller))
        else:
            heappop(self._turns)
            del self._waiting[caller]
        return work
