"""What enters and leaves the prefix cache, for routers: `WatchKvEvents`.

The engine keeps changes while somebody watches. One task asks for them, between steps, when something has run; the
watchers wait for what it learns, so those that wait cost nothing. Here the changes are numbered and kept for a while,
for readers that are slow or come again, together with what they add up to, for those that begin.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from itertools import islice
from typing import Final

from ferrum_rpc.core import BlockChange
from ferrum_rpc.engine.api import Command
from ferrum_rpc.errors import Draining, ExecutorError, SequencesExhausted
from ferrum_rpc.executor.v1 import kv_transfer_pb2 as pb
from ferrum_rpc.service.auth import CALLER
from ferrum_rpc.service.control import between_steps
from ferrum_rpc.service.records import Resource
from ferrum_rpc.service.state import ServerState
from ferrum_rpc.service.supervisor import BackgroundTask

LOOK_EVERY_S: Final = 0.02
"""How long an event may be known to the engine alone."""

KEPT: Final = 1 << 16
BATCH: Final = 512
"""Events of a message: 25 KB."""

RETRY_AFTER_S: Final = 1.0


class News(asyncio.Event):
    """Set when the watchers that wait for it have something to do; ``error`` is what ends them, if anything does."""

    error: ExecutorError | None = None


class KvEvents:
    """The events of one server, to its watchers. ``last`` is the number of the newest; the first is 1."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._there: dict[bytes, BlockChange] | None = None  # by hash; as of `last`
        self._kept: deque[BlockChange] = deque(maxlen=KEPT)
        self.last = 0
        self._seen: object = None  # what the engine had done when it was asked last
        self._asking: asyncio.Task[None] | None = None
        self._polling: asyncio.Task[None] | None = None
        self._news = News()
        self._closed = False

    def close(self) -> None:
        """End every stream: the server stops."""
        self._closed = True
        self._wake()
        if self._polling is not None:
            self._polling.cancel()

    async def watch(self, after: int, instance_id: str) -> AsyncIterator[pb.WatchKvEventsResponse]:
        """What has happened after the event ``after`` of the process ``instance_id``, and then what happens; or, where
        that is not known, what is there first. Raises `SequencesExhausted` and `QuotaExceeded` for too many watchers,
        and `Draining` at the server's end."""
        _ = self._state.model  # raises while there is none
        account, most = self._state.quotas.account(CALLER.get()), self._state.limits.max_watchers
        if self._state.watchers >= most:
            message = f"{self._state.watchers} callers watch events and {most} may; end some"
            raise SequencesExhausted(message, metadata={"max_watchers": most}, retry_after_s=RETRY_AFTER_S)
        account.take(Resource.WATCHERS)
        self._state.watchers += 1
        if self._polling is None or self._polling.done():
            self._polling = self._state.supervisor.start(BackgroundTask.EVENTS, self._poll)
        try:
            async for each in self._answers(after, instance_id):
                yield each
        finally:
            self._state.watchers -= 1
            account.give(Resource.WATCHERS)

    async def _answers(self, after: int, instance_id: str) -> AsyncIterator[pb.WatchKvEventsResponse]:
        own = self._state.handles.instance_id
        await self._look()
        at: int | None = None
        gap = False
        if after and instance_id in ("", own):
            at, gap = (after, False) if self._knows(after) else (None, True)
        while not self._closed:
            if at is None:
                assert self._there is not None  # noqa: S101 - it has been looked
                there, at = list(self._there.values()), self.last
                for first in range(0, len(there) or 1, BATCH):
                    part = there[first : first + BATCH]
                    events = list(map(_event, part))
                    more = first + BATCH < len(there)
                    yield pb.WatchKvEventsResponse(
                        event=at, events=events, instance_id=own, snapshot=True, more=more, gap=gap and not first
                    )
                gap = False
            elif not self._knows(at):
                at, gap = None, True
            elif at < self.last:
                oldest = self.last - len(self._kept)
                events = [_event(each) for each in islice(self._kept, at - oldest, at - oldest + BATCH)]
                at += len(events)
                yield pb.WatchKvEventsResponse(event=at, events=events, instance_id=own)
            else:
                news = self._news
                await news.wait()
                if news.error is not None:
                    raise news.error
        raise Draining("the executor stops", retry_after_s=RETRY_AFTER_S)

    def _knows(self, event: int) -> bool:
        """Whether what came after ``event`` is kept."""
        return self.last - len(self._kept) <= event <= self.last

    def _wake(self, error: ExecutorError | None = None) -> None:
        """Have those that wait go on, or end with ``error``."""
        news, self._news = self._news, News()
        news.error = error
        news.set()

    async def _poll(self) -> None:
        """Learn what changes while somebody watches."""
        while self._state.watchers:
            await asyncio.sleep(LOOK_EVERY_S)
            try:
                await self._look()
            except ExecutorError as error:
                self._wake(error)

    async def _look(self) -> None:
        """Learn what has changed. All who ask meanwhile get one answer."""
        if self._asking is None or self._asking.done():
            engine = self._state.engine
            done = engine.cache, engine.counters.tokens, self._state.counters.tokens_truncated
            if self._there is not None and done == self._seen:
                return
            self._asking = asyncio.create_task(self._ask(done))
        await asyncio.shield(self._asking)

    async def _ask(self, done: object) -> None:
        engine = self._state.engine
        if self._there is not None:
            changes = await between_steps(engine, Command("prefix_changes", ()))
            if changes is not None:
                for each in changes:
                    self._note(each)
                self._seen = done
                if changes:
                    self._wake()
                return
        there = await between_steps(engine, Command("watch_prefixes", ()))
        if self._there is not None:  # some changes are lost: whoever stands before them begins anew
            self._kept.clear()
            self.last += 1
            self._wake()
        self._there, self._seen = {each.hash: each for each in there}, done

    def _note(self, change: BlockChange) -> None:
        assert self._there is not None  # noqa: S101 - it has been looked
        if not change.hash:
            self._there.clear()
        elif change.parent is None and not change.parked:
            self._there.pop(change.hash, None)
        else:
            self._there[change.hash] = change
        self._kept.append(change)
        self.last += 1


def _event(change: BlockChange) -> pb.KvEvent:
    hashed, parent, parked, adapter = change
    if not hashed:
        return pb.KvEvent(cleared=pb.KvCacheCleared())
    if parked:
        return pb.KvEvent(parked=pb.KvBlockParked(hash=hashed))
    if parent is None:
        return pb.KvEvent(removed=pb.KvBlockRemoved(hash=hashed))
    return pb.KvEvent(stored=pb.KvBlockStored(hash=hashed, parent_hash=parent, adapter=adapter))
