"""The handlers of `KvTransfer`: sequences that move between executors, and what a cache holds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, closing, contextmanager
from functools import partial
from hashlib import blake2b
from typing import Any, Final, cast

import grpc

from ferrum_rpc.core import Caller, HandleRef
from ferrum_rpc.errors import Cancelled, InvalidRequest, QueueFull, SequenceBusy
from ferrum_rpc.executor.v1 import kv_transfer_pb2 as pb
from ferrum_rpc.executor.v1 import kv_transfer_pb2_grpc
from ferrum_rpc.service.fingerprints import digest
from ferrum_rpc.service.guard.auth import CALLER
from ferrum_rpc.service.kv_events import KvEvents
from ferrum_rpc.service.kv_stream import CHUNK_BYTES, layout_of
from ferrum_rpc.service.nixl import ChunkReader
from ferrum_rpc.service.parking import park
from ferrum_rpc.service.peers import PeerSilent, announce, read_on
from ferrum_rpc.service.records import RETRY_AFTER_S, Account, Resource
from ferrum_rpc.service.replay import scope_of
from ferrum_rpc.service.state import ServerState
from ferrum_rpc.service.trace_context import Context
from ferrum_rpc.service.transfers import Export, Import
from ferrum_rpc.wire.items import handle_from_proto, handle_to_proto, pressure_to_proto, request_id_from_proto
from ferrum_rpc.wire.kv_stream import CacheLayout, import_options, tokens_from_proto

IMPORT: Final = "import"


class KvTransferServicer(kv_transfer_pb2_grpc.KvTransferServicer):
    """Sequences that move, and events."""

    service = "ferrum_rpc.executor.v1.KvTransfer"

    def __init__(self, state: ServerState, events: KvEvents) -> None:
        self._state = state
        self._events = events
        self._under_way = 0
        self._imports: dict[tuple[str, str], Import] = {}

    async def ExportKv(  # type: ignore[override] # no generator: it waits for its peer itself
        self, request: pb.ExportKvRequest, context: Context
    ) -> None:
        state, caller = self._state, CALLER.get()
        account, layout = state.quotas.account(caller), layout_of(state)
        unread = state.unread.allocate(context.peer(), account, min(2 * CHUNK_BYTES, state.unread.limit // 8))
        try:
            await self._export(request, context, account, layout)
        except PeerSilent:  # until it reads, or goes, gRPC has what was written, and the status
            task = asyncio.current_task()
            assert task is not None  # noqa: S101 - a coroutine runs in one
            task.add_done_callback(lambda _: unread())
            raise
        except BaseException:
            unread()
            raise
        unread()

    async def _export(
        self, request: pb.ExportKvRequest, context: Context, account: Account, layout: CacheLayout
    ) -> None:
        state = self._state
        with self._room(account):
            export = Export(state, account, layout)
            try:
                with export.metered():
                    async with aclosing(export.frames(request)) as frames:
                        async for frame in frames:
                            await state.peers.owed("nothing of the export was read", context.write(frame))
            finally:
                export.close()

    async def ImportKv(self, requests: Any, context: Context) -> pb.ImportKvResponse:
        try:
            answer, whole = await self._import(context)
        except PeerSilent:
            raise
        except Exception:
            await read_on(context)
            raise
        if not whole:
            await read_on(context)
        return answer

    async def _import(self, context: Context) -> tuple[pb.ImportKvResponse, bool]:
        """One stream of an import. Returns its answer, and whether all of the stream was read."""
        state, caller = self._state, CALLER.get()
        account = state.quotas.account(caller)
        _ = layout_of(state)  # raises where nothing can be moved

        async def read() -> Any:
            return await state.peers.owed("nothing of the import came", context.read())

        with self._room(account):
            frame = await read()
            if frame is grpc.aio.EOF or frame.WhichOneof("frame") != "header":
                raise InvalidRequest("an import must begin with its header", field="header")
            answer, header = pb.ImportKvResponse(), frame.header
            found = await self._abandon(caller, header) if header.abandon else self._find(caller, header)
            handle, streamed = None, isinstance(found, Import)
            if isinstance(found, Import):
                with found.stream(), closing(ChunkReader(state.nixl)) as reader:
                    await found.begin()
                    if await found.receive(read, reader):
                        handle = await found.commit()
                    elif not await announce(context):
                        raise Cancelled("the stream broke")
                answer.next_token = found.next_token
            elif found:
                (handle,), answer.replayed = found, True
                answer.next_token = handle.seq_len
            if handle is not None:
                answer.handle.CopyFrom(handle_to_proto(handle))
            answer.pressure.CopyFrom(pressure_to_proto(state.pressure()))
            return answer, streamed

    async def ParkKv(self, request: pb.ParkKvRequest, context: Context) -> pb.ParkKvResponse:
        handle, freed = await park(self._state, handle_from_proto(request.handle), CALLER.get())
        self._state.failpoints.reach("before_reply")
        pressure = pressure_to_proto(self._state.pressure())
        return pb.ParkKvResponse(handle=handle_to_proto(handle), freed_blocks=freed, pressure=pressure)

    async def WatchKvEvents(
        self, request: pb.WatchKvEventsRequest, context: Context
    ) -> AsyncIterator[pb.WatchKvEventsResponse]:
        async for each in self._events.watch(request.after_event, request.instance_id):
            yield each

    @contextmanager
    def _room(self, account: Account) -> Iterator[None]:
        """One more transfer is under way. Raises `QueueFull` and `QuotaExceeded`."""
        limit = self._state.limits.max_transfers
        if self._under_way >= limit:
            raise QueueFull(
                f"{self._under_way} of at most {limit} exports and imports are in progress; nothing was started",
                metadata={"max_transfers": limit},
                retry_after_s=RETRY_AFTER_S,
            )
        account.allocate(Resource.TRANSFERS)
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1
            account.free(Resource.TRANSFERS)

    async def _abandon(self, caller: Caller, header: pb.ImportKvHeader) -> tuple[HandleRef, ...]:
        """Give up the import that a header names. Returns the handle of what it has become, if it has."""
        request_id = request_id_from_proto(header.request_id)
        if not request_id:
            raise InvalidRequest("an import needs a request id", field="header.request_id")
        found = self._imports.get((caller.name, request_id))
        if found is not None:
            await found.abandon()
            return ()
        known = self._state.replay.scope(scope_of(caller.name, b"", request_id)).get(request_id)
        made = known is not None and isinstance(known.fingerprint, tuple) and known.fingerprint[:1] == (IMPORT,)
        return cast(tuple[HandleRef, ...], known.answer) if known is not None and made and known.answer else ()

    def _find(self, caller: Caller, header: pb.ImportKvHeader) -> Import | tuple[HandleRef, ...]:
        """The import that a header begins or goes on with, or the recorded answer."""
        state, name = self._state, header.layout.adapter
        needs = name and state.adapters.offered  # else its layout says that it is another
        adapter = state.adapters.find(name, "header.layout.adapter") if needs else None
        layout = layout_of(state, adapter)
        layout.check(header.layout)
        tokens, options = tokens_from_proto(header.layout, state.model), import_options(header)
        request_id = request_id_from_proto(header.request_id)
        if not request_id:
            raise InvalidRequest("an import needs a request id", field="header.request_id")
        content = blake2b(tokens.tobytes(), digest_size=16).digest()
        # a stream of a caller that is not trusted must not go on with what a trusted one began
        fingerprint = (IMPORT, content, digest(options), caller.trusted)
        scope = state.replay.scope(scope_of(caller.name, b"", request_id))
        known = scope.get(request_id)
        if known is None:
            key = caller.name, request_id
            made = Import(state, layout, caller, tokens, options, adapter, partial(self._imports.pop, key, None))
            made.entry = state.replay.begin(scope, request_id, fingerprint)
            made.sent_from = header.layout.first_token
            self._imports[key] = made
            return made
        if (answer := known.repeated(fingerprint).answer) is not None:
            return cast(tuple[HandleRef, ...], state.replay.repeat(answer))
        found: Import = self._imports[caller.name, request_id]
        if found.busy:
            raise SequenceBusy("another stream brings this import")
        return found
