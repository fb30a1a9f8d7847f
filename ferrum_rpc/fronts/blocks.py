"""Events of the executors' prefix caches in the form of the router, which routes by them.

An executor reports the hashes of blocks, and the router needs their token ids. Those of the texts that this worker has
sent are known here: a block is reported once an executor has it and its tokens and its parent are known. Of several
executors a block is reported when the first one has it, and removed when the last one has lost it.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, Final, NamedTuple

import numpy as np
import structlog
from smg_grpc_proto.generated import common_pb2

from ferrum_rpc.client import ExecutorClient, ExecutorError, NotSupported, PrefixEvents, PrefixIndex, QueueFull
from ferrum_rpc.client.fleet import Member, Members

KNOWN_BLOCKS: Final = 1 << 16
"""Blocks whose tokens are kept, the last ones that were used."""

UNREAD_BATCHES: Final = 1024
"""A subscriber that reads more slowly is ended; it subscribes again and begins anew."""

MOST_SUBSCRIBERS: Final = 64
"""A router is one."""

SNAPSHOT_BLOCKS: Final = 512
"""Blocks of one message of a snapshot."""

log = structlog.get_logger("ferrum_rpc.fronts")


class KnownBlock(NamedTuple):
    """A block of a text: the hash of the one before it (None: it is the first), and its tokens, uint32 each."""

    parent: bytes | None
    tokens: bytes


class Stored(Sequence[Any]):
    """The events of blocks that are there, made when they are read: a snapshot waits for its subscriber."""

    def __init__(self, blocks: Sequence[tuple[bytes, KnownBlock]]) -> None:
        self._blocks = blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def __getitem__(self, index: Any) -> Any:
        return stored_event(*self._blocks[index])


class SlowSubscriber(Exception):
    """It has not read `UNREAD_BATCHES`."""


class BlockReport:
    """The blocks that subscribers know, and the events that they get. ``reported``: in the order of the reports, so
    that parents come first."""

    def __init__(self) -> None:
        self.reported: OrderedDict[bytes, KnownBlock] = OrderedDict()
        self._known: OrderedDict[bytes, KnownBlock] = OrderedDict()
        self._children: dict[bytes, set[bytes]] = {}
        self._holders: dict[bytes, set[object]] = {}
        self._subscribers: set[asyncio.Queue[Sequence[Any] | None]] = set()

    # --- what is known ----------------------------------------------------------------------------------------------

    def learn(self, index: PrefixIndex, tokens: Sequence[int]) -> None:
        """The tokens of a text whose sequence the executors may keep."""
        parent, events, size = None, list[Any](), index.block_size
        words = np.array(tokens, np.uint32)
        for number, hashed in enumerate(index.hashes(tokens)):
            if hashed in self._known:
                self._known.move_to_end(hashed)
            else:
                self._keep(hashed, KnownBlock(parent, words[number * size : (number + 1) * size].tobytes()))
            if hashed in self._holders:
                self._report(hashed, events)
            parent = hashed
        self._send(events)

    def _keep(self, hashed: bytes, block: KnownBlock) -> None:
        self._known[hashed] = block
        if block.parent is not None:
            self._children.setdefault(block.parent, set()).add(hashed)
        if len(self._known) > KNOWN_BLOCKS:
            oldest, gone = self._known.popitem(last=False)
            if gone.parent is not None and (siblings := self._children.get(gone.parent)) is not None:
                siblings.discard(oldest)
                if not siblings:
                    del self._children[gone.parent]

    # --- what the executors have ------------------------------------------------------------------------------------

    def apply(self, holder: object, events: PrefixEvents) -> None:
        """Changes of an executor's cache."""
        found = list[Any]()
        if events.anew:
            self._drop(holder, found)
        for hashed, there in events.changes:
            if there:
                self._holders.setdefault(hashed, set()).add(holder)
                self._report(hashed, found)
            else:
                self._lost(hashed, holder, found)
        self._send(found)

    def forget(self, holder: object) -> None:
        """An executor is gone."""
        found = list[Any]()
        self._drop(holder, found)
        self._send(found)

    def _drop(self, holder: object, events: list[Any]) -> None:
        for hashed in [each for each, holders in self._holders.items() if holder in holders]:
            self._lost(hashed, holder, events)

    def _lost(self, hashed: bytes, holder: object, events: list[Any]) -> None:
        holders = self._holders.get(hashed, set())
        holders.discard(holder)
        if not holders:
            self._holders.pop(hashed, None)
            if self.reported.pop(hashed, None) is not None:
                removed = common_pb2.KvBlocksRemoved(block_hashes=[number_of(hashed)])
                events.append(common_pb2.KvCacheEvent(removed=removed))

    def _report(self, hashed: bytes, events: list[Any]) -> None:
        """Report a block that an executor has, and the blocks behind it that waited for it."""
        waiting = [hashed]
        while waiting:
            each = waiting.pop()
            block = self._known.get(each)
            if block is None or each in self.reported or each not in self._holders:
                continue
            if block.parent is not None and block.parent not in self.reported:
                continue
            self.reported[each] = block
            events.append(stored_event(each, block))
            waiting += self._children.get(each, ())

    # --- subscribers ------------------------------------------------------------------------------------------------

    @contextmanager
    def subscribed(self) -> Iterator[asyncio.Queue[Sequence[Any] | None]]:
        """A queue of events from now on, behind those of what is there. None in it: the subscriber was too slow. Raises
        `QueueFull` if there are too many."""
        if len(self._subscribers) >= MOST_SUBSCRIBERS:
            raise QueueFull(f"there are {MOST_SUBSCRIBERS} subscribers already")
        queue: asyncio.Queue[Sequence[Any] | None] = asyncio.Queue()
        queue.put_nowait([common_pb2.KvCacheEvent(cleared=common_pb2.KvCacheCleared())])
        there = tuple(self.reported.items())
        for at in range(0, len(there), SNAPSHOT_BLOCKS):
            queue.put_nowait(Stored(there[at : at + SNAPSHOT_BLOCKS]))
        self._subscribers.add(queue)
        try:
            yield queue
        finally:
            self._subscribers.discard(queue)

    def _send(self, events: list[Any]) -> None:
        for queue in list(self._subscribers) if events else ():
            if queue.qsize() < UNREAD_BATCHES + len(self.reported) // SNAPSHOT_BLOCKS:
                queue.put_nowait(events)
            else:
                queue.put_nowait(None)
                self._subscribers.discard(queue)

    async def batches(self) -> AsyncGenerator[Any, None]:
        """The messages of one subscription, which are numbered from 1 on. Raises `SlowSubscriber`."""
        number = event_id = 0
        with self.subscribed() as queue:
            while (events := await queue.get()) is not None:
                number += 1
                batch = common_pb2.KvEventBatch(sequence_number=number, timestamp=time.time())
                for each in events:
                    event_id += 1
                    batch.events.add(event_id=event_id).MergeFrom(each)
                yield batch
        raise SlowSubscriber("the subscriber reads too slowly; subscribe again")


def number_of(hashed: bytes) -> int:
    """A hash as the protocol's: its first eight bytes as a signed number."""
    return int.from_bytes(hashed[:8], "big", signed=True)


def stored_event(hashed: bytes, block: KnownBlock) -> Any:
    """The event of a block that is there."""
    parent = None if block.parent is None else number_of(block.parent)
    stored = common_pb2.KvBlocksStored(parent_block_hash=parent)
    tokens = np.frombuffer(block.tokens, np.uint32).tolist()
    stored.blocks.add(block_hash=number_of(hashed), token_ids=tokens, block_size=len(tokens))
    return common_pb2.KvCacheEvent(stored=stored)


class BlockWatcher:
    """Applies the events of every executor to a report, and gives it the tokens of texts."""

    def __init__(self, members: Members, report: BlockReport) -> None:
        self._members = members
        self._report = report

    def learn(self, tokens: Sequence[int]) -> None:
        """The tokens of a text: those that were fed, and the last one, which may not have been."""
        for index in {each.info.block_size: PrefixIndex.of(each.info) for each in self._members.there}.values():
            self._report.learn(index, tokens)

    async def watch(self) -> None:
        """Watch the executors, until it is cancelled."""
        watching: dict[Member, asyncio.Task[None]] = {}
        try:
            while True:
                since, there = self._members.changes, self._members.there
                for member in there:
                    if member not in watching:
                        watching[member] = asyncio.create_task(self._follow(member))
                for member in watching.keys() - set(there):
                    watching.pop(member).cancel()
                    self._report.forget(member)
                await self._members.changed(since)
        finally:
            for task in watching.values():
                task.cancel()
            await asyncio.gather(*watching.values(), return_exceptions=True)

    async def _follow(self, member: Member) -> None:
        client: ExecutorClient = member.client
        while True:
            try:
                async with aclosing(client.watch_prefixes()) as stream:
                    async for events in stream:
                        self._report.apply(member, events)
            except NotSupported as error:
                log.info("cache_events_missing", target=member.target, reason=error.message)
                return
            except ExecutorError as error:
                log.warning("cache_events_ended", target=member.target, reason=error.message)
                await asyncio.sleep(1.0)
