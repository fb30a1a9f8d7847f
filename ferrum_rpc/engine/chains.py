"""Submissions that follow another one: each waits for its end, and takes its place in the next step.

A follower could as well be submitted when the answer of the run before it has reached the event loop. By then the next
step has begun without it, so every boundary between two runs would cost its sequence a step.

A follower begins here only if all is as it was foreseen: the run before it has ended with all its tokens and has left
the foreseen length, and a place for its own run is free with no other submission waiting for one. Else it is handed
back, and is submitted again like any other.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ferrum_rpc.core import RunEnd, SpanOutcome, SpanResult
from ferrum_rpc.engine.api import Submission
from ferrum_rpc.engine.places import Places


class Chains:
    """The followers of a loop. ``next``: those that begin with the next step, in addition to its budget, as runs that
    go on do. True if others wait."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._behind: dict[Submission, list[Submission]] = {}  # by what they follow
        self.next: list[Submission] = []

    def __bool__(self) -> bool:
        return bool(self._behind)

    def add(self, work: Submission) -> bool:
        """Have a follower wait. False: what it follows is over."""
        before, _ = work.behind or (None, 0)
        if before is None or before.over:
            return False
        self._behind.setdefault(before, []).append(work)
        return True

    def waits_for(self, work: Submission) -> bool:
        """Whether any follows a submission."""
        return work in self._behind

    def take(self, work: Submission) -> list[Submission]:
        """Remove the followers of a submission: one of a span, and any that were cancelled."""
        return self._behind.pop(work, [])

    def pop(self) -> Submission:
        """Remove any, which will not begin."""
        before, behind = next(iter(self._behind.items()))
        work = behind.pop()
        if not behind:
            del self._behind[before]
        return work

    def take_next(self) -> list[Submission]:
        """Remove those of the next step."""
        begun, self.next = self.next, []
        return begun

    def begin(self, work: Submission, outcomes: Sequence[SpanOutcome], now: float) -> bool:
        """Add a follower to the next step, if it can begin behind what it follows, which ended with these outcomes.
        ``now``: on `time.monotonic`."""
        [span], (_, index) = work.spans, work.behind or (None, 0)
        outcome = outcomes[index]
        late = work.deadline is not None and now >= work.deadline
        if late or work.interrupts or not isinstance(outcome, SpanResult) or outcome.length != span.start:
            return False
        rows, ended = outcome.rows, outcome.ended
        if rows is None or (ended is not None and ended.end is not RunEnd.MAX_TOKENS):
            return False
        if not self._places.may_begin(work):
            return False
        token = rows.block["token_ids"][rows.first + rows.count - 1]
        work.spans = (span._replace(tokens=np.array((token,), np.int32)),)
        work.arrived = now  # it has not waited for a step
        self._places.hold(work)
        self.next.append(work)
        return True
