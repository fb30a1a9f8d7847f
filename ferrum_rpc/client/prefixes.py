"""Which executor has a prompt: what a router keeps of the events of each.

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
"""What a watcher waits out: another executor may answer there soon."""


@dataclass(frozen=True, slots=True)
class PrefixEvents:
    """What has happened in an executor's prefix cache up to the event number ``last`` of the process ``instance_id``:
    in their order, hashes of blocks that are there now (True) or no more (False). They follow on what was there
    before; with ``anew`` they are all that is there. ``gap``: some events were lost before, which changes nothing for
    who applies these."""

    last: int
    instance_id: str
    changes: tuple[tuple[bytes, bool], ...]
    anew: bool
    gap: bool


class PrefixIndex:
    """The blocks that one executor has, by hash, of a model with the ``fingerprint`` in blocks of ``block_size``
    tokens. Of more than ``most`` those are forgotten that entered first: 100 bytes or so each."""

    def __init__(self, fingerprint: bytes, block_size: int, most: int = 1 << 20) -> None:
        self._fingerprint = fingerprint
        self.block_size = block_size
        self._most = most
        self._there: OrderedDict[bytes, None] = OrderedDict()

    @classmethod
    def of(cls, info: ExecutorInfo, most: int = 1 << 20) -> PrefixIndex:
        """An empty one for an executor."""
        return cls(info.model.fingerprint, info.block_size, most)

    def __len__(self) -> int:
        """Blocks that are there."""
        return len(self._there)

    def apply(self, events: PrefixEvents) -> None:
        """Note what has happened."""
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
        """How many tokens of a prompt need not be computed there: those of its first blocks that are there. The last
        token is computed always. ``adapter``: as the executor lists it."""
        return self.found(self.hashes(tokens, salt=salt, adapter=adapter))

    def found(self, hashes: Iterable[bytes]) -> int:
        """As `match`, of the ``hashes`` of a prompt."""
        return self.block_size * sum(1 for _ in takewhile(self._there.__contains__, hashes))

    def hashes(self, tokens: Tokens, *, salt: bytes = b"", adapter: AdapterInfo | None = None) -> Iterator[bytes]:
        """The hashes of the blocks of a prompt that may be found, in their order."""
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
            case "parked":  # it is read, which takes less than computing it
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
        context.known_info = None  # whoever answers next may be another
        pauses = pauses or Backoff(context.deadline(patience_s), FIRST_PAUSE_S, LONGEST_PAUSE_S)
        if not await pauses.wait():
            raise error
