"""The lengths of runs: several tokens per round trip, and the next run sent before the answer of the one before.

Blocks are planned as the executor reserves them: a run has all its blocks from its first step on. Runs are short while
requests wait to be admitted, because none is admitted during a run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from ferrum_rpc.client import BatchResults, Item
from ferrum_rpc.scheduler.policy import PlannedFeed, Pool
from ferrum_rpc.scheduler.request import Request

SHORT: Final = 4
"""Tokens of a run while a request waits, or in a step with drafts."""

MAX_STOPS: Final = 256
"""Maximum number of stop ids of a run."""


@dataclass(frozen=True, slots=True)
class Flight:
    """Runs of one call: their feeds with their items."""

    items: list[tuple[PlannedFeed, Item]]
    call: asyncio.Task[BatchResults]


@dataclass(slots=True)
class Chain:
    """Successive runs of some requests. ``limit``: tokens per request in total; None: no limit. ``began`` and ``ends``:
    the length of each request's sequence before its first run, and the expected length after its last. ``broken``:
    blocks were short, or a run ended other than expected."""

    pool: Pool
    most: int
    max_context: int
    limit: int | None = None
    began: dict[Request, int] = field(default_factory=dict)
    ends: dict[Request, int] = field(default_factory=dict)
    broken: bool = False

    def fed(self, feeds: Iterable[PlannedFeed]) -> None:
        """Feeds in the same step take their blocks first."""
        for feed in feeds:
            length = feed.request.cached
            self.began[feed.request], self.ends[feed.request] = length, length + feed.count + feed.drafted

    def extend(self, requests: Iterable[Request]) -> dict[Request, int]:
        """Tokens of the next run of each request that needs more. Runs are shorter if blocks are few. If the blocks do
        not cover one token each there are none, and nothing changes."""
        for request in (requests := list(requests)):
            self.began.setdefault(request, request.cached)
        most = self.most
        while most:
            counts = {each: count for each in requests if (count := self._wanted(each, most)) > 0}
            ends = {each: self.ends.get(each, each.cached) + count for each, count in counts.items()}
            ends = {**self.ends, **ends}
            grown = (self.pool.growth(began, ends.get(each, began) - began) for each, began in self.began.items())
            if sum(grown) <= self.pool.free:
                self.ends = ends
                return counts
            most //= 2
        self.broken = bool(requests)
        return {}

    def _wanted(self, request: Request, most: int) -> int:
        end = self.ends.get(request, request.cached)
        planned = end - request.cached
        wanted = min(most, request.max_new_tokens - len(request.generated) - planned, self.max_context - end)
        return wanted if self.limit is None else min(wanted, self.limit - (end - self.began[request]))
