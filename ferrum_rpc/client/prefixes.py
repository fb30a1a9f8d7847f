"""An index of the prefixes that an executor has cached, for routers, built from its cache events.

async with ExecutorClient(target) as client:
    index = PrefixIndex.of(await client.info())
    async for events in client.watch_prefixes():
        index.apply(events)  # and elsewhere: index.match(prompt)
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Iterable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import Final

import grpc
import numpy as np

from ferrum_rpc.client.arguments import Tokens, as_tokens
from ferrum_rpc.client.context import Context
from ferrum_rpc.client.info import AdapterInfo, Capability, ExecutorInfo
from ferrum_rpc.client.retry import LONGEST_PAUSE_S, Backoff
from ferrum_rpc.errors import DeviceLost, Draining, ExecutorError, NotSupported, Starting, TransportError
from ferrum_rpc.executor.v1 import kv_transfer_pb2
from ferrum_rpc.prefix_hash import chained, root_of

FIRST_PAUSE_S: Final = 0.05

PASSING: Final = (TransportError, Draining, Starting, DeviceLost)
"""Errors after which a watcher reconnects: another executor may answer there soon."""


@dataclass(frozen=True, slots=True)
class PrefixEvents:
    """Changes of an executor's prefix cache up to the event number ``last`` of the process ``instance_id``: in order,
    hashes of blocks that were added (True) or removed (False). They apply to the earlier contents; with ``anew`` they
    are the whole contents. ``gap``: earlier events were lost, which does not matter once these are applied."""

    last: int
    instance_id: str
    changes: tuple[tuple[bytes, bool], ...]
    anew: bool
    gap: bool


class PrefixIndex:
    """The cached blocks of one executor, by hash, for a model with the ``fingerprint`` and blocks of ``block_size``
    tokens. Beyond ``most`` blocks (about 100 bytes each) the oldest are dropped."""

    def __init__(self, fingerprint: bytes, block_size: int, most: int = 1 << 20) -> None:
        self._fingerprint = fingerprint
        self.block_size = block_size
        self._most = most
        self._there: OrderedDict[bytes, None] = OrderedDict()

    @classmethod
    def of(cls, info: ExecutorInfo, most: int = 1 << 20) -> PrefixIndex:
        """An empty index for an executor."""
        return cls(info.model.fingerprint, info.block_size, most)

    def __len__(self) -> int:
        """The number of blocks."""
        return len(self._there)

    def apply(self, events: PrefixEvents) -> None:
        """Apply the changes."""
        if events.anew:
            self._there.clear()
        for hashed, there in events.changes:
            if there:
                self._there[hashed] = None
            else:
                self._there.pop(hashed, None)
        while len(self._there) > self._most:
            self._there.popitem(last=False)

    def match(self, tokens: Tokens, *, salt: bytes = b"", adapter: AdapterInfo | None = None) -> int:
        """The number of a prompt's tokens that are cached there: those of its first blocks. The last token is always
        computed. ``adapter``: as the executor lists it."""
        return self.found(self.hashes(tokens, salt=salt, adapter=adapter))

    def found(self, hashes: Iterable[bytes]) -> int:
        """As `match`, for the ``hashes`` of a prompt."""
        return self.block_size * sum(1 for _ in takewhile(self._there.__contains__, hashes))

    def hashes(self, tokens: Tokens, *, salt: bytes = b"", adapter: AdapterInfo | None = None) -> Iterator[bytes]:
        """The hashes of a prompt's cacheable blocks, in their order."""
        ids = np.array(as_tokens(tokens)[:-1], np.int64).astype(np.uint32).view(np.int32)
        root = root_of(self._fingerprint, salt)
        if adapter is not None:
            root = root_of(adapter.fingerprint, salt, adapter.name)
        return chained(root, ids, self.block_size)


def _events(batches: list[kv_transfer_pb2.WatchKvEventsResponse]) -> PrefixEvents:
    """One batch, or all of a snapshot."""
    changes: list[tuple[bytes, bool]] = []
    anew = batches[0].snapshot
    for each in (event for batch in batches for event in batch.events):
        match each.WhichOneof("kind"):
            case "stored":
                changes.append((each.stored.hash, True))
            case "parked":  # reading it takes less time than computing it
                changes.append((each.parked.hash, True))
            case "removed":
                changes.append((each.removed.hash, False))
            case "cleared":
                changes.clear()
                anew = True
    last = batches[-1]
    return PrefixEvents(last.event, last.instance_id, tuple(changes), anew, batches[0].gap)


async def watch_prefixes(context: Context, patience_s: float) -> AsyncGenerator[PrefixEvents, None]:
    """See `ExecutorClient.watch_prefixes`."""
    request = kv_transfer_pb2.WatchKvEventsRequest()
    pauses: Backoff | None = None
    while True:
        pauses = pauses or Backoff(context.deadline(patience_s), FIRST_PAUSE_S, LONGEST_PAUSE_S)
        call, parts = None, list[kv_transfer_pb2.WatchKvEventsResponse]()
        try:
            if Capability.KV_EVENTS not in (await context.info(context.deadline(patience_s))).capabilities:
                raise NotSupported("this executor does not offer cache events (capability KV_EVENTS)")
            call = context.transfer.WatchKvEvents(request, metadata=context.metadata)
            async for part in call:
                parts.append(part)
                if not part.more:
                    request.after_event, request.instance_id = part.event, part.instance_id
                    pauses = None
                    yield _events(parts)
                    parts.clear()
            raise TransportError("the stream of events ended", metadata={"grpc_code": "OK"})
        except (ExecutorError, grpc.aio.AioRpcError, asyncio.CancelledError) as failure:
            error = context.error_of(failure)
        finally:
            if call is not None:
                call.cancel()
        if not isinstance(error, PASSING) or error.metadata.get("grpc_code") == "CANCELLED":
            raise error
        context.known_info = None  # another process may answer next
        pauses = pauses or Backoff(context.deadline(patience_s), FIRST_PAUSE_S, LONGEST_PAUSE_S)
        if not await pauses.wait():
            raise error
