"""The handlers of `KvTransfer`: what a cache holds, for others than the sequence's own scheduler."""

from __future__ import annotations

from collections.abc import AsyncIterator

from ferrum_rpc.executor.v1 import kv_transfer_pb2 as pb
from ferrum_rpc.executor.v1 import kv_transfer_pb2_grpc
from ferrum_rpc.service.control import not_offered
from ferrum_rpc.service.kv_events import KvEvents
from ferrum_rpc.service.trace_context import Context


class KvTransferServicer(kv_transfer_pb2_grpc.KvTransferServicer):
    """Events; the rest of the contract is not offered by this version."""

    service = "ferrum_rpc.executor.v1.KvTransfer"

    def __init__(self, events: KvEvents) -> None:
        self._events = events

    async def WatchKvEvents(  # noqa: N802
        self, request: pb.WatchKvEventsRequest, context: Context
    ) -> AsyncIterator[pb.WatchKvEventsResponse]:
        async for each in self._events.watch(request.after_event, request.instance_id):
            yield each

    ExportKv = not_offered("ExportKv", "KV_TRANSFER")
    ImportKv = not_offered("ImportKv", "KV_TRANSFER")
    ParkKv = not_offered("ParkKv", "PARK")
