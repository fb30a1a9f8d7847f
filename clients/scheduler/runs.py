"""How long runs are: several tokens with one trip, and the next run sent before the answer of the one before.

Blocks are planned as the executor holds them: a run has all of its own from its first step on. Runs are short while
somebody waits to be admitted, because nothing is admitted while they last.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from clients.scheduler.policy import PlannedFeed, Pool
from clients.scheduler.request import Request
from ferrum_rpc.client import BatchResults, Item

SHORT: Final = 4
"""Tokens of a run while a request waits, or beside drafts."""

MAX_STOPS: Final = 256
"""Stop ids of a run."""


@dataclass(frozen=True, slots=True)
class Flight:
    """Runs that are answered together: what each feeds, and its item."""

    items: list[tuple[PlannedFeed, Item]]
    call: asyncio.Task[BatchResults]


@dataclass(slots=True)
class Chain:
    """Runs of some requests, one behind the other. ``limit``: tokens of each request in all, None without a bound.
    ``ends``: the length that each request's sequence has when all its runs have ended, as foreseen; ``began``: the one
    it had before the first. ``broken``: blocks were short, or a run ended otherwise than foreseen."""

    pool: Pool
    most: int
    max_context: int
    limit: int | None = None
    began: dict[Request, int] = field(default_factory=dict)
    ends: dict[Request, int] = field(default_factory=dict)
    broken: bool = False

    def fed(self, feeds: Iterable[PlannedFeed]) -> None:
        """What is fed beside the runs takes its blocks first."""
        for feed in feeds:
            length = feed.request.cached
            self.began[feed.request], self.ends[feed.request] = length, length + feed.count + feed.drafted

    def extend(self, requests: Iterable[Request]) -> dict[Request, int]:
        """Tokens of the next run of each request that wants more. Shorter ones where the blocks are few, none where
        they do not cover a token each; then nothing changes."""
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
