"""What runs next: a pure function of the requests and of how full the executor is. No IO, no clock, no randomness.

A step is made in three passes over a ledger of free blocks:

1. *decodes first*: every running request that owes one token gets it, oldest first. A request that needs a block when
   none is left takes it from the youngest running one, which is preempted; the youngest itself steps aside.
2. *chunks*: running prompts go on, oldest first, with what is left of the token budget.
3. *admission*: waiting requests join in order, while the free blocks cover all their known tokens plus some headroom
   for everybody, and nobody was preempted in this step.

Drafts go with the decodes while there are tokens and blocks that nothing else takes.

Preemption is by recompute: the victim's sequence is released and it comes back as a longer prompt. The oldest running
request is never a victim while another is there, so something always finishes. Block arithmetic is the executor's own
(`ceil(length / block_size)`), without shared prefixes: those only make the true number smaller.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from clients.scheduler.request import Request


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of a step: ``tokens`` and ``items`` in it, requests ``running`` at a time, and the ``headroom`` tokens
    that every running request should be able to grow by before another is admitted. ``exact``: what was computed before
    is computed again in the spans that it was, above so many tokens, and in spans of so many; 0: in any."""

    tokens: int
    items: int
    running: int
    headroom: int = 32
    exact: int = 0

    def __post_init__(self) -> None:
        if min(self.tokens, self.items, self.running) < 1 or self.headroom < 0:
            raise ValueError(f"a step needs room for something: {self}")

    @property
    def at_once(self) -> int:
        """Requests that may run: each must fit in a step with its one token, or it would starve."""
        return min(self.running, self.tokens, self.items)


@dataclass(frozen=True, slots=True)
class Pool:
    """The executor's blocks, as its last answer told."""

    free: int
    total: int
    block_size: int

    def blocks(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-tokens // self.block_size)

    def growth(self, length: int, more: int) -> int:
        """Blocks to go from ``length`` to ``length + more`` tokens."""
        return self.blocks(length + more) - self.blocks(length)

    def room(self, length: int, free: int) -> int:
        """Tokens that a sequence of ``length`` can grow by with ``free`` more blocks."""
        return (self.blocks(length) + free) * self.block_size - length


@dataclass(frozen=True, slots=True)
class PlannedFeed:
    """The next ``count`` owed tokens of a request, and the first ``drafted`` tokens of its draft."""

    request: Request
    count: int
    drafted: int = 0

    @property
    def completes(self) -> bool:
        """Whether nothing is owed afterwards: then the answer holds the row to sample from."""
        return self.count == self.request.owed


@dataclass(frozen=True, slots=True)
class StepPlan:
    """``preempt`` first (release, to be waited for again), then ``feeds`` in one forward pass. ``admitted`` are those
    of the feeds that were waiting. ``unservable`` can never run: their tokens exceed the whole pool."""

    preempt: tuple[Request, ...] = ()
    feeds: tuple[PlannedFeed, ...] = ()
    admitted: tuple[Request, ...] = ()
    unservable: tuple[Request, ...] = ()


def plan(running: Iterable[Request], waiting: Sequence[Request], pool: Pool, budget: Budget) -> StepPlan:
    """The next step. ``running`` in any order, ``waiting`` in the order of admission."""
    step = _Planner(pool, budget, sorted(running, key=lambda each: each.index))
    step.decodes()
    step.chunks()
    step.unblock()
    if not step.victims:
        step.admit(waiting)
    step.drafts()
    return StepPlan(tuple(step.victims), tuple(step.feeds), tuple(step.admitted), tuple(step.unservable))


def arrivals(
    ready: Iterable[Request], running: Sequence[Request], coming: Sequence[Request], pool: Pool, budget: Budget
) -> list[Request]:
    """Which sequences that were computed elsewhere may come now: in order, while the free blocks cover them, those that
    are ``coming`` already, and headroom for everybody."""
    free = pool.free - sum(pool.growth(each.cached, each.owed + budget.headroom) for each in running)
    free -= sum(pool.blocks(each.known + budget.headroom) for each in coming)
    found: list[Request] = []
    for request in ready:
        beside = len(running) + len(coming) + len(found)
        free -= pool.blocks(request.known + (budget.headroom if beside else 0))  # alone, it may as well try
        if free < 0 or beside >= budget.at_once:
            break
        found.append(request)
    return found


@dataclass(slots=True)
class _Planner:
    """The ledger of one step in the making. ``kept`` are the running requests, oldest first."""

    pool: Pool
    budget: Budget
    kept: list[Request]
    free: int = field(init=False)
    tokens: int = field(init=False)
    feeds: list[PlannedFeed] = field(default_factory=list)
    victims: list[Request] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    unservable: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.free = self.pool.free
        self.tokens = self.budget.tokens

    def decodes(self) -> None:
        for request in [each for each in self.kept if each.owed == 1]:
            if request not in self.kept or not self._has_room():
                continue
            need = self.pool.growth(request.cached, 1)
            while need > self.free and self.kept[-1] is not request:
                self._preempt(self.kept[-1])
            if need > self.free:
                self._step_aside(request)
            else:
                self._feed(request, 1)

    def chunks(self) -> None:
        for request in self.kept:
            if request.owed > 1 and self._has_room():
                self._feed_some(request)

    def unblock(self) -> None:
        """Prompts can hold all blocks between them and none go on: the youngest make way for the oldest."""
        while self.kept and not self.feeds:
            oldest = self.kept[0]
            if self._feed_some(oldest):
                return
            if self.kept[-1] is not oldest:
                self._preempt(self.kept[-1])
            elif (count := self._most(oldest)) > 0:
                self._feed(oldest, min(count, oldest.owed))  # better not to the last bit than never
            else:
                self._step_aside(oldest)

    def admit(self, waiting: Sequence[Request]) -> None:
        for request in waiting:
            if self.pool.blocks(request.known) > self.pool.total:
                self.unservable.append(request)
                continue
            if len(self.kept) >= self.budget.at_once or not self._has_room():
                return
            headroom = self.budget.headroom if self.kept else 0  # alone, it may as well try
            if self._promised() + self.pool.blocks(request.known + headroom) > self.free:
                return
            if self.kept and request.span(self._most(request), self.budget.exact) == 0:
                return
            self.kept.append(request)
            self.admitted.append(request)
            self._feed_some(request)

    def drafts(self) -> None:
        for at, feed in enumerate(self.feeds):
            request = feed.request
            if not request.draft or not feed.completes or not request.generated or not request.cached:
                continue  # a sequence that is made anew takes no draft
            room = self.pool.room(request.cached + feed.count, self.free)
            if (drafted := min(len(request.draft), self.tokens, room)) > 0:
                self.free -= self.pool.growth(request.cached + feed.count, drafted)
                self.tokens -= drafted
                self.feeds[at] = replace(feed, drafted=drafted)

    def _promised(self) -> int:
        """Blocks that running requests still need for what they owe, and to grow a little."""
        fed = {feed.request.index: feed.count for feed in self.feeds}
        promised = 0
        for each in self.kept:
            done = fed.get(each.index, 0)
            promised += self.pool.growth(each.cached + done, each.owed - done + self.budget.headroom)
        return promised

    def _has_room(self) -> bool:
        return self.tokens > 0 and len(self.feeds) < self.budget.items

    def _most(self, request: Request) -> int:
        return min(self.tokens, self.pool.room(request.cached, self.free))

    def _feed_some(self, request: Request) -> bool:
        count = request.span(self._most(request), self.budget.exact)
        if count > 0:
            self._feed(request, count)
        return count > 0

    def _feed(self, request: Request, count: int) -> None:
        self.free -= self.pool.growth(request.cached, count)
        self.tokens -= count
        self.feeds.append(PlannedFeed(request, count))

    def _preempt(self, request: Request) -> None:
        self.kept.remove(request)
        self.victims.append(request)
        self.free += self.pool.blocks(request.cached)

    def _step_aside(self, request: Request) -> None:
        """The youngest cannot grow. If the whole pool could not hold it, waiting is no use."""
        if self.pool.blocks(request.cached + 1) > self.pool.total:
            self.kept.remove(request)
            self.free += self.pool.blocks(request.cached)
            self.unservable.append(request)
        else:
            self._preempt(request)
