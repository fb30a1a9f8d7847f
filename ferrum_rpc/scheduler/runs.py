"""What is in flight at an executor: single steps, runs (several tokens with one round trip), and the runs that were
sent behind them before their answers.

Blocks are counted as the executor reserves them: a run has all its blocks from its first step on. The free blocks of
the last answer may include them already, so the count is too high rather than too low while runs are in flight.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from ferrum_rpc.client import BatchResults, Item, Sequence
from ferrum_rpc.scheduler.policy import Others, PlannedFeed, Pool
from ferrum_rpc.scheduler.request import Request

SHORT: Final = 4
"""Tokens of a run before the time of a step is known, in a step with drafts, and while requests wait for its end."""

MAX_STOPS: Final = 256
"""Maximum number of stop ids of a run."""


@dataclass(frozen=True, slots=True, eq=False)
class SentFeed:
    """A feed that was sent as ``item`` on ``sequence``, which the request may have lost since. ``decodes``: it fed one
    generated token. ``completes``: it chooses tokens, behind ``known`` ones."""

    feed: PlannedFeed
    item: Item
    sequence: Sequence
    decodes: bool
    completes: bool
    known: int


@dataclass(frozen=True, slots=True, eq=False)
class Flight:
    """One call: what it sent, and when."""

    sent: list[SentFeed]
    call: asyncio.Task[BatchResults]
    began: float

    @property
    def follows(self) -> bool:
        """Whether it waits at the executor behind another."""
        return self.sent[0].item.follows is not None


@dataclass(slots=True)
class _Sequence:
    """A sequence with ``items`` in flight, of ``held`` tokens when the first one was sent, and ``end`` behind the
    last."""

    items: int
    held: int
    end: int


class InFlight:
    """The sequences that have items in flight."""

    def __init__(self) -> None:
        self._sequences: dict[Sequence, _Sequence] = {}

    def __contains__(self, sequence: Sequence | None) -> bool:
        return sequence in self._sequences

    def sent(self, sequence: Sequence, held: int, end: int) -> None:
        """An item was sent. ``held``: tokens in the cache before the first one; ``end``: behind this one."""
        known = self._sequences.setdefault(sequence, _Sequence(0, held, end))
        known.items, known.end = known.items + 1, end

    def landed(self, sequence: Sequence) -> None:
        """An item was answered, refused or cancelled."""
        known = self._sequences[sequence]
        known.items -= 1
        if not known.items:
            del self._sequences[sequence]

    def end(self, request: Request) -> int:
        """The length of a request's sequence behind its last item in flight."""
        known = self._sequences.get(request.sequence) if request.sequence is not None else None
        return request.cached if known is None else known.end

    def free(self, pool: Pool) -> Pool:
        """The pool without the blocks that items in flight may still take."""
        taken = sum(pool.growth(each.held, each.end - each.held) for each in self._sequences.values())
        return Pool(max(0, pool.free - taken), pool.total, pool.block_size)

    def others(self, pool: Pool, requests: Iterable[Request], headroom: int, tokens: int) -> Others:
        """The running ``requests`` for a plan of the rest. ``tokens``: those of their prompts in flight."""
        ends = [self.end(each) for each in requests]
        return Others(len(ends), len(ends) + tokens, sum(pool.growth(end, headroom) for end in ends))


def lengths(wanted: dict[Request, int], ends: dict[Request, int], most: int, pool: Pool) -> dict[Request, int]:
    """Tokens of the next run of each request, of ``most`` at most and those that it has ``wanted``. ``ends``: the
    length from which it grows by them. Shorter runs for all if blocks are few, none if not one token each has room."""
    while most:
        counts = {each: min(count, most) for each, count in wanted.items()}
        if sum(pool.growth(ends[each], count) for each, count in counts.items()) <= pool.free:
            return counts
        most //= 2
    return {}
