"""The next step as a pure function of the requests and the executor's free blocks and slots. No IO, no clock, no
randomness.

A step is made in three passes over a ledger of free blocks:

1. *decodes first*: every running request that owes one token gets it, in the order of `Request.order`. If no block is
   left for it, the last running request is preempted, be it that request itself.
2. *chunks*: running prompts continue, in that order, with what is left of the token budget.
3. *admission*: waiting requests join in order, while the free blocks cover all their known tokens and some headroom for
   every running request, a slot is free, and no request was preempted in this step. The last places are for tenants
   that have no request running: they need not wait until a text of another tenant ends.

Drafts are added to decodes while tokens and blocks are left over.

Preemption is by recomputation: the sequence of the request is released, and the request is admitted again as a longer
prompt. The first running request is never preempted while there is another, so a request always finishes. Block
arithmetic is the executor's (`ceil(length / block_size)`), without shared prefixes, which only make the true number
smaller. A sequence of a model with recurrent states also has a slot, from its first tokens to its end; a running
request without a sequence waits for one.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from ferrum_rpc.scheduler.request import Request

PLACES_A_RESERVED_ONE = 16
"""One place in so many is for tenants that have no request running."""

NO_STATES: Final = sys.maxsize
"""The slots of a model without recurrent states: no sequence needs one."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of a step: ``tokens`` and ``items`` in it, requests ``running`` at a time, and the ``headroom`` tokens
    that every running request should be able to grow by before another is admitted. ``exact``: the executor's
    ``exact_span_tokens``; tokens are computed again in the same longer spans as before, and in spans of at most that
    many between them. 0: in any spans."""

    tokens: int
    items: int
    running: int
    headroom: int = 32
    exact: int = 0

    def __post_init__(self) -> None:
        if min(self.tokens, self.items, self.running) < 1 or self.headroom < 0:
            raise ValueError(f"tokens, items and running must be at least 1, headroom at least 0: {self}")

    @property
    def at_once(self) -> int:
        """Maximum number of running requests: each needs a place in every step for its one token."""
        return min(self.running, self.tokens, self.items)

    def is_full(self, request: Request, in_use: int, tenants: Collection[str]) -> bool:
        """Whether there is no place for a request while ``in_use`` places are taken by requests of ``tenants``. One
        without a tenant may have any place; one that branches needs a place for each branch, or runs alone."""
        reserved = self.at_once // PLACES_A_RESERVED_ONE if request.tenant and request.tenant in tenants else 0
        return in_use > 0 and in_use + request.places > self.at_once - reserved


@dataclass(frozen=True, slots=True)
class Pool:
    """The executor's blocks, as of its last answer, and its free ``slots``."""

    free: int
    total: int
    block_size: int
    slots: int = NO_STATES

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
        """Whether nothing is owed afterwards, so that the answer holds the next token."""
        return self.count == self.request.owed


@dataclass(frozen=True, slots=True)
class StepPlan:
    """First release the requests to ``preempt``, then run ``feeds`` in one forward pass. ``admitted``: the requests
    among the feeds that were waiting. ``unservable``: requests whose tokens exceed the whole pool."""

    preempt: tuple[Request, ...] = ()
    feeds: tuple[PlannedFeed, ...] = ()
    admitted: tuple[Request, ...] = ()
    unservable: tuple[Request, ...] = ()

    def of_those_left(self) -> StepPlan:
        """Without the requests that have ended since it was made."""
        feeds = tuple([each for each in self.feeds if each.request.ending is None])
        return replace(self, feeds=feeds, admitted=tuple([each for each in self.admitted if each.ending is None]))


@dataclass(frozen=True, slots=True)
class Others:
    """The requests that run meanwhile, because they have items in flight: the places that they take (``count``), the
    ``tokens`` that they take of a step's, the blocks ``promised`` to their growth, their ``tenants``, and the ``slots``
    that their branches will need."""

    count: int = 0
    tokens: int = 0
    promised: int = 0
    tenants: frozenset[str] = frozenset()
    slots: int = 0


NO_OTHERS = Others()


def plan(
    running: Iterable[Request],
    waiting: Sequence[Request],
    pool: Pool,
    budget: Budget,
    others: Others = NO_OTHERS,
) -> StepPlan:
    """The next step. ``running`` in any order, ``waiting`` in the order of admission. With ``others``, a plan that
    preempts is only a sign that blocks are short: wait for them, and plan again."""
    step = _Planner(pool, budget, sorted(running, key=lambda each: each.order), others)
    step.decodes()
    step.chunks()
    if not others.count:
        step.unblock()
    if waiting and not step.victims:
        step.admit(waiting)
    step.drafts()
    return StepPlan(tuple(step.victims), tuple(step.feeds), tuple(step.admitted), tuple(step.unservable))


def arrivals(
    ready: Iterable[Request], running: Sequence[Request], coming: Sequence[Request], pool: Pool, budget: Budget
) -> list[Request]:
    """Which of the ``ready`` requests, computed at another executor, may be moved here now: in order, while the free
    blocks cover them, those that are ``coming`` already, and the headroom of all, and each has a slot."""
    slots = pool.slots - sum(len(each.branches) for each in running) - sum(each.slots for each in coming)
    free = pool.free - sum(pool.growth(each.cached, each.owed + budget.headroom) for each in running)
    free -= sum(pool.blocks(each.known + budget.headroom) for each in coming)
    found: list[Request] = []
    tenants = {each.tenant for each in (*running, *coming)}
    in_use = sum(each.places for each in (*running, *coming))
    for request in ready:
        free -= pool.blocks(request.known + (budget.headroom if in_use else 0))  # the only request needs none
        slots -= request.slots if in_use else 1
        if min(free, slots) < 0 or budget.is_full(request, in_use, tenants):
            break
        found.append(request)
        tenants.add(request.tenant)
        in_use += request.places
    return found


@dataclass(slots=True)
class _Planner:
    """The ledger of a step that is being planned. ``kept``: the running requests, in order."""

    pool: Pool
    budget: Budget
    kept: list[Request]
    others: Others = NO_OTHERS
    free: int = field(init=False)
    slots: int = field(init=False)
    tokens: int = field(init=False)
    feeds: list[PlannedFeed] = field(default_factory=list)
    victims: list[Request] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    unservable: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.free, self.slots = self.pool.free, self.pool.slots
        self.tokens = max(0, self.budget.tokens - self.others.tokens)

    def decodes(self) -> None:
        for request in [each for each in self.kept if each.owed == 1]:
            if request not in self.kept or not self._has_room() or self._lacks_slot(request):
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
        """If prompts hold all blocks and none can continue, preempt the last one for the first one."""
        while self.kept and not self.feeds:
            first = self.kept[0]
            if self._feed_some(first):
                return
            if self.kept[-1] is not first:
                self._preempt(self.kept[-1])
            elif (count := self._most(first)) > 0 and not self._lacks_slot(first):
                self._feed(first, min(count, first.owed))  # not bit-exact, but it runs
            else:
                self._step_aside(first)

    def admit(self, waiting: Sequence[Request]) -> None:
        tenants = {*self.others.tenants, *(each.tenant for each in self.kept)}
        in_use = sum(each.places for each in self.kept) + self.others.count
        for request in waiting:
            if self.pool.blocks(request.known) > self.pool.total:
                self.unservable.append(request)
                continue
            if self.budget.is_full(request, in_use, tenants) or not self._has_room():
                return
            headroom = self.budget.headroom if in_use else 0  # the only request needs none
            blocks, slots = self._promised()
            if blocks + self.pool.blocks(request.known + headroom) > self.free:
                return
            if slots + (request.slots if in_use else 1) > self.slots:
                return
            if in_use and request.span(self._most(request), self.budget.exact) == 0:
                return
            self.kept.append(request)
            self.admitted.append(request)
            tenants.add(request.tenant)
            in_use += request.places
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

    def _promised(self) -> tuple[int, int]:
        """Blocks that running requests still need for the tokens that they owe, and for their headroom; and the slots
        of those that have none, and of their branches."""
        fed = {feed.request.index: feed.count for feed in self.feeds}
        promised, slots = self.others.promised, self.others.slots
        for each in self.kept:
            done = fed.get(each.index, 0)
            promised += self.pool.growth(each.cached + done, each.owed - done + self.budget.headroom)
            slots += len(each.branches) + (not done and each.begins)
        return promised, slots

    def _lacks_slot(self, request: Request) -> bool:
        return self.slots < 1 and request.begins

    def _has_room(self) -> bool:
        return self.tokens > 0 and len(self.feeds) < self.budget.items

    def _most(self, request: Request) -> int:
        return min(self.tokens, self.pool.room(request.cached, self.free))

    def _feed_some(self, request: Request) -> bool:
        count = 0 if self._lacks_slot(request) else request.span(self._most(request), self.budget.exact)
        if count > 0:
            self._feed(request, count)
        return count > 0

    def _feed(self, request: Request, count: int) -> None:
        self.free -= self.pool.growth(request.cached, count)
        self.tokens -= count
        self.slots -= request.begins
        self.feeds.append(PlannedFeed(request, count))

    def _preempt(self, request: Request) -> None:
        self._leave(request)
        self.victims.append(request)

    def _leave(self, request: Request) -> None:
        self.kept.remove(request)
        self.free += self.pool.blocks(request.cached)
        self.slots += not request.begins

    def _step_aside(self, request: Request) -> None:
        """Preempt the last request, which cannot grow. If the whole pool could not hold it, it is unservable."""
        if self.pool.blocks(request.cached + 1) > self.pool.total:
            self._leave(request)
            self.unservable.append(request)
        else:
            self._preempt(request)
