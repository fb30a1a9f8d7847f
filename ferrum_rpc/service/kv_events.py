"""Events of the prefix cache for routers: `WatchKvEvents`.

The engine records changes while there is a watcher. One task collects them between steps, after something has run;
watchers wait for that task, so idle ones cost nothing. Changes are numbered and kept for a while for slow and returning
readers, together with their sum, for new ones.

A hash may have a block that is visible to everyone and one for each caller that imported it. A watcher sees the first
and its own as one: an event reports that what it can find under the hash has changed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Collection
from itertools import islice
from typing import Final, NamedTuple

from ferrum_rpc.core import BlockChange
from ferrum_rpc.engine.commands import Command, Operations
from ferrum_rpc.errors import Draining, ExecutorError, SequencesExhausted
from ferrum_rpc.executor.v1 import kv_transfer_pb2 as pb
from ferrum_rpc.service.asking import between_steps
from ferrum_rpc.service.guard.auth import CALLER
from ferrum_rpc.service.records import Resource
from ferrum_rpc.service.state import ServerState
from ferrum_rpc.service.supervisor import BackgroundTask

LOOK_EVERY_S: Final = 0.02
"""Maximum time for which an event is known to the engine alone."""

KEPT: Final = 1 << 16
BATCH: Final = 512
"""Events per message: 25 KB."""

RETRY_AFTER_S: Final = 1.0


class News(asyncio.Event):
    """Set when the waiting watchers must act; ``error`` ends them, if set."""

    error: ExecutorError | None = None


class _Event(NamedTuple):
    """A change as the caller ``only`` sees it, or as all see it except those in ``hidden``."""

    change: BlockChange
    only: bytes | None = None
    hidden: Collection[bytes] = ()

    def visible(self, caller: bytes) -> bool:
        return caller not in self.hidden if self.only is None else self.only == caller


class KvEvents:
    """The events of one server for its watchers. ``last`` is the number of the newest; the first is 1."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._there: dict[bytes, BlockChange] | None = None  # by hash, of what is for everybody; as of `last`
        self._own: dict[bytes, dict[bytes, BlockChange]] = {}  # by hash and caller: of what is for one
        self._kept: deque[_Event] = deque(maxlen=KEPT)
        self.last = 0
        self._seen = -1  # `CacheState.prefix_changes`, when the engine was asked last
        self._asking: asyncio.Task[None] | None = None
        self._polling: asyncio.Task[None] | None = None
        self._news = News()
        self._closed = False

    def close(self) -> None:
        """End every stream, because the server stops."""
        self._closed = True
        self._wake()
        if self._polling is not None:
            self._polling.cancel()

    async def watch(self, after: int, instance_id: str) -> AsyncIterator[pb.WatchKvEventsResponse]:
        """The events after the event ``after`` of the process ``instance_id``, then new ones; or a snapshot first, if
        those are not known. Raises `SequencesExhausted` and `QuotaExceeded` for too many watchers, and `Draining` at
        the server's end."""
        _ = self._state.model  # raises while there is none
        account, limit = self._state.quotas.account(CALLER.get()), self._state.limits.max_watchers
        if self._state.watchers >= limit:
            message = f"{self._state.watchers} of at most {limit} streams of cache events are open; end some"
            raise SequencesExhausted(message, metadata={"max_watchers": limit}, retry_after_s=RETRY_AFTER_S)
        account.allocate(Resource.WATCHERS)
        self._state.watchers += 1
        if self._polling is None or self._polling.done():
            self._polling = self._state.supervisor.start(BackgroundTask.EVENTS, self._poll)
        try:
            async for each in self._answers(after, instance_id, account.digest):
                yield each
        finally:
            self._state.watchers -= 1
            account.free(Resource.WATCHERS)

    async def _answers(self, after: int, instance_id: str, caller: bytes) -> AsyncIterator[pb.WatchKvEventsResponse]:
        own = self._state.handles.instance_id
        await self._look()
        at: int | None = None
        gap = False
        if after and instance_id in ("", own):
            at, gap = (after, False) if self._knows(after) else (None, True)
        while not self._closed:
            if at is None:
                there, at = self._all(caller), self.last
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
                kept = list(islice(self._kept, at - oldest, at - oldest + BATCH))
                at += len(kept)
                if events := [_event(each.change) for each in kept if each.visible(caller)]:
                    yield pb.WatchKvEventsResponse(event=at, events=events, instance_id=own)
            else:
                news = self._news
                await news.wait()
                if news.error is not None:
                    raise news.error
        raise Draining("the executor stops", retry_after_s=RETRY_AFTER_S)

    def _knows(self, event: int) -> bool:
        """Whether the events after ``event`` are kept."""
        return self.last - len(self._kept) <= event <= self.last

    def _wake(self, error: ExecutorError | None = None) -> None:
        """Wake the waiting watchers, or end them with ``error``."""
        news, self._news = self._news, News()
        news.error = error
        news.set()

    async def _poll(self) -> None:
        """Collect changes while there is a watcher."""
        while self._state.watchers:
            await asyncio.sleep(LOOK_EVERY_S)
            try:
                await self._look()
            except ExecutorError as error:
                self._wake(error)

    async def _look(self) -> None:
        """Collect the changes so far. All who ask meanwhile get one answer."""
        if self._asking is None or self._asking.done():
            done = self._state.engine.cache.prefix_changes
            if self._there is not None and done == self._seen:
                return
            self._asking = asyncio.create_task(self._ask(done))
        await asyncio.shield(self._asking)

    async def _ask(self, done: int) -> None:
        submit = self._state.engine.submit
        if self._there is not None:
            changes = await between_steps(submit, Command(Operations.prefix_changes))
            if changes is not None:
                for each in changes:
                    self._note(each)
                self._seen = done
                if changes:
                    self._wake()
                return
        there = await between_steps(submit, Command(Operations.watch_prefixes))
        if self._there is not None:  # some changes are lost: watchers before them begin anew
            self._kept.clear()
            self.last += 1
            self._wake()
        self._there, self._own, self._seen = {each.hash: each for each in there if not each.caller}, {}, done
        for each in there:
            if each.caller:
                self._own.setdefault(each.hash, {})[each.caller] = each

    def _note(self, change: BlockChange) -> None:
        assert self._there is not None  # noqa: S101 - it has been looked
        hashed, caller = change.hash, change.caller
        if not hashed:
            self._there.clear()
            self._own.clear()
            self._keep(_Event(change))
            return
        owners = {caller} if caller else {*self._own.get(hashed, ())}  # who may see it otherwise than all others
        before = {each: self._visible(hashed, each) for each in owners}
        blocks, key = (self._own.setdefault(hashed, {}), caller) if caller else (self._there, hashed)
        if change.parent is None and not change.parked:  # it is gone
            blocks.pop(key, None)
        else:
            blocks[key] = change
        if not self._own.get(hashed, True):
            del self._own[hashed]
        if not caller:
            self._keep(_Event(change, hidden=owners))
        for owner in owners:
            seen = self._visible(hashed, owner)
            if _rank(seen) != _rank(before[owner]):
                self._keep(_Event(seen or BlockChange(hashed, None), only=owner))

    def _keep(self, event: _Event) -> None:
        self._kept.append(event)
        self.last += 1

    def _visible(self, hashed: bytes, caller: bytes) -> BlockChange | None:
        """What a caller may find under a hash: the better of two blocks."""
        assert self._there is not None  # noqa: S101 - it has been looked
        return max(self._there.get(hashed), self._own.get(hashed, {}).get(caller), key=_rank)

    def _all(self, caller: bytes) -> list[BlockChange]:
        """Everything that a caller may find."""
        assert self._there is not None  # noqa: S101 - it has been looked
        own = [hashed for hashed, blocks in self._own.items() if caller in blocks]
        if not own:
            return list(self._there.values())
        seen = self._there | {hashed: self._visible(hashed, caller) for hashed in own}
        return [each for each in seen.values() if each is not None]


def _rank(change: BlockChange | None) -> int:
    """How useful a block is: not found, in the second tier, in memory."""
    return 0 if change is None else 1 if change.parked else 2


def _event(change: BlockChange) -> pb.KvEvent:
    hashed, parent, parked, adapter, _ = change
    if not hashed:
        return pb.KvEvent(cleared=pb.KvCacheCleared())
    if parked:
        return pb.KvEvent(parked=pb.KvBlockParked(hash=hashed))
    if parent is None:
        return pb.KvEvent(removed=pb.KvBlockRemoved(hash=hashed))
    return pb.KvEvent(stored=pb.KvBlockStored(hash=hashed, parent_hash=parent, adapter=adapter))
