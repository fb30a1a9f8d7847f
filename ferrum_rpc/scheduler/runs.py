"""What is in flight at an executor: single steps, runs (several tokens with one round trip), and the runs that were
sent behind them before their answers.

Blocks are counted as the executor reserves them: a run has all its blocks from its first step on. The free blocks of
the last answer may include them already, so the count is too high rather than too low while runs are in flight.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from ferrum_rpc.client import BatchResults, Item, RunPace, Sequence
from ferrum_rpc.scheduler.counts import RunCounts
from ferrum_rpc.scheduler.policy import Others, PlannedFeed, Pool
from ferrum_rpc.scheduler.port import ExecutorPort
from ferrum_rpc.scheduler.request import Request

SHORT: Final = 4
"""Tokens of a run before the time of a step is known, in a step with drafts, and while requests wait for its end."""

MAX_STOPS: Final = 256
"""Maximum number of stop ids of a run."""


MARGIN_S: Final = 0.005
"""How much sooner than necessary the next run is sent, because the event loop may be busy then."""


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
    """One call: what it sent, and when. ``number``: in the order of the calls."""

    number: int
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
        """The pool without the blocks and the slots that items in flight may still take."""
        taken = sum(pool.growth(each.held, each.end - each.held) for each in self._sequences.values())
        begun = sum(each.handle is None for each in self._sequences)
        return Pool(max(0, pool.free - taken), pool.total, pool.block_size, max(0, pool.slots - begun))

    def others(self, pool: Pool, requests: Iterable[Request], headroom: int, tokens: int) -> Others:
        """The running ``requests`` for a plan of the rest. ``tokens``: those of their prompts in flight."""
        ends = {each: self.end(each) for each in requests}
        promised = sum(pool.growth(end, headroom) for end in ends.values())
        places, slots = sum(each.places for each in ends), sum(len(each.branches) for each in ends)
        return Others(places, len(ends) + tokens, promised, frozenset(each.tenant for each in ends), slots)


class Flights:
    """The calls of one driver in flight, over its ``port``; ``changed`` is set whenever one of them ends. False: there
    are none. ``unfollowed``: by request, its last item in flight, if the next one may follow that. ``since``: when the
    last answers came, or the first of these calls was sent."""

    def __init__(self, port: ExecutorPort, run: RunCounts, in_flight: InFlight, changed: asyncio.Event) -> None:
        self._port, self._run, self._in_flight, self._changed = port, run, in_flight, changed
        self._flights: dict[int, Flight] = {}  # by number
        self._items: set[Item] = set()  # of all of them
        self._ended: list[int] = []
        self._numbers = itertools.count()
        self._last: dict[Request, SentFeed] = {}  # the last item of each request in flight
        self.unfollowed: dict[Request, SentFeed] = {}
        self.since = 0.0

    def __bool__(self) -> bool:
        return bool(self._flights)

    @property
    def prompt_tokens(self) -> int:
        """The tokens of prompts among the items in flight."""
        return sum(each.feed.count for flight in self._flights.values() for each in flight.sent if not each.decodes)

    def sent(self, feed: PlannedFeed, item: Item, tokens: int, known: int) -> SentFeed:
        """Note an item that is about to be sent, and gives ``tokens`` behind ``known`` ones."""
        request, in_flight = feed.request, self._in_flight
        assert request.sequence is not None  # noqa: S101 - the item was made on it
        end = in_flight.end(request) + feed.count + feed.drafted + tokens - 1
        in_flight.sent(request.sequence, request.cached, end)
        follows = item.follows is not None
        decodes, completes = follows or request.decodes, follows or feed.completes
        self._last[request] = sent = SentFeed(feed, item, request.sequence, decodes, completes, known)
        return sent

    def call(self, sent: list[SentFeed]) -> None:
        """Send items in one call."""
        number, now = next(self._numbers), time.monotonic()
        if not self._flights:
            self.since = now
        items = [each.item for each in sent]
        self._items.update(items)
        call = asyncio.ensure_future(self._port.send(items, self._run))
        call.add_done_callback(lambda _: self._end(number))
        self._flights[number] = Flight(number, sent, call, now)

    def _end(self, number: int) -> None:
        self._ended.append(number)
        self._changed.set()

    def land(self) -> list[Flight]:
        """Remove the calls that have ended. The answer of a follower may overtake that of the item before it, and waits
        for it here."""
        ended, self._ended = sorted(self._ended), []
        landed = list[Flight]()
        for number in ended:
            flight = self._flights[number]
            if flight.sent[0].item.follows in self._items:
                self._ended.append(number)
                continue
            del self._flights[number]
            self._items.difference_update([each.item for each in flight.sent])
            landed.append(flight)
        self._note_landed(landed)
        return landed

    def take_ahead(self, request: Request) -> None:
        """Have a request take the tokens of its last run in flight that came before the answer in front of it."""
        sent = self._last.get(request)
        if sent is not None and sent.item.on_tokens is not None:
            sent.item.on_tokens(0, [])

    def interrupt(self, request: Request) -> None:
        """Cancel its runs in flight. What makes its sequence is awaited, so that it can be released."""
        for flight in self._flights.values():
            sent = flight.sent[0]
            alone = len(flight.sent) == 1 and sent.feed.request is request
            if alone and sent.item.run is not None and sent.item.handle is not None:
                flight.call.cancel()

    async def abandon(self) -> None:
        """Cancel all calls, and wait for their end."""
        flights = list(self._flights.values())
        self._flights.clear()
        self._items.clear()
        for flight in flights:
            flight.call.cancel()
        await asyncio.gather(*(flight.call for flight in flights), return_exceptions=True)
        self._ended.clear()
        self._note_landed(flights)

    def _note_landed(self, flights: Iterable[Flight]) -> None:
        """Items are not in flight any more. If another follows one of them, that one may be followed now."""
        for sent in [sent for flight in flights for sent in flight.sent]:
            self._in_flight.landed(sent.sequence)
            request = sent.feed.request
            last = self._last.get(request)
            if last is sent:
                del self._last[request]
                self.unfollowed.pop(request, None)
            elif last is not None and last.sequence is sent.sequence:
                self.unfollowed[request] = last


def next_due(sent: SentFeed, pace: RunPace) -> float:
    """When the run behind an item in flight is to be sent, on `time.monotonic`: while half of that item is left, and
    two round trips. Until then it may wait for others, to share their frame. 0: at once, because the item in front is
    no run that follows another one, or nothing is known of the executor yet."""
    run = sent.item.run
    if sent.item.follows is None or run is None or pace.trip_s is None or pace.step_s is None:
        return 0.0
    return sent.feed.request.answered + run.max_tokens / 2 * pace.step_s - 2 * pace.trip_s - MARGIN_S


def in_step(step: int, most: int) -> int:
    """Tokens of a run, of ``most`` at most and half of them at least, that begins behind the executor's ``step``. It
    ends with those of other requests, so that their answers share a frame, and what follows them shares the next."""
    return most - (step + most) % max(1, most // 2)


def lengths(wanted: dict[Request, int], ends: dict[Request, int], most: int, pool: Pool) -> dict[Request, int]:
    """Tokens of the next run of each request, of ``most`` at most and those that it has ``wanted``. ``ends``: the
    length from which it grows by them. Shorter runs for all if blocks are few, none if not one token each has room."""
    while most:
        counts = {each: min(count, most) for each, count in wanted.items()}
        if sum(pool.growth(ends[each], count) for each, count in counts.items()) <= pool.free:
            return counts
        most //= 2
    return {}
