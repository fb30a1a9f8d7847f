"""The transport of a client's requests: unary calls here, frames of a session in `client.session`.

Both take the same messages and return the same answers and errors, so callers do not depend on which one is used.
"""

from __future__ import annotations

import asyncio
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from ferrum_rpc.client.context import Context
from ferrum_rpc.client.retry import Deadline
from ferrum_rpc.client.state import Item
from ferrum_rpc.core import HandleRef, RowBlock, StepTiming
from ferrum_rpc.errors import ExecutorError, NotSupported, TransportError
from ferrum_rpc.executor.v1 import forward_pb2, model_executor_pb2, types_pb2
from ferrum_rpc.wire.items import handle_from_proto, timing_from_proto
from ferrum_rpc.wire.rows import rows_from_proto
from ferrum_rpc.wire.status import error_from_status


class Feed(NamedTuple):
    """An RPC that feeds tokens: the client's method, the RPC's name, and its request, which has one ``item`` if it is
    ``single``, or else ``items``. In a session all are one frame; the client's methods check the differences.
    """

    name: str
    rpc: str
    request: Callable[..., Any]
    single: bool = False


PREFILL: Final = Feed("prefill", "Prefill", model_executor_pb2.PrefillRequest, single=True)
DECODE: Final = Feed("decode", "Decode", model_executor_pb2.DecodeRequest, single=True)
VERIFY: Final = Feed("verify", "ForwardVerify", model_executor_pb2.ForwardVerifyRequest, single=True)
FORWARD: Final = Feed("forward", "UnifiedForward", model_executor_pb2.UnifiedForwardRequest)
BATCH_PREFILL: Final = Feed("batch_prefill", "BatchPrefill", model_executor_pb2.BatchPrefillRequest)
BATCH_DECODE: Final = Feed("batch_decode", "BatchDecode", model_executor_pb2.BatchDecodeRequest)


class Forwarded(NamedTuple):
    """The answer to work items: the output of each, or its own refusal; and the blocks of their rows."""

    outcomes: Sequence[forward_pb2.ForwardOutput | ExecutorError]
    blocks: list[RowBlock]
    pressure: types_pb2.KvPressure
    timing: StepTiming | None


Operation = model_executor_pb2.TruncateKvRequest | model_executor_pb2.ForkKvRequest | model_executor_pb2.ReleaseRequest
"""An operation on one existing sequence. A session sends many of a kind in one frame, with one request id."""

Operated = list[HandleRef] | ExecutorError
"""The handles after an operation, or its refusal."""

CONCURRENT_CALLS: Final = 64
"""Unary calls of one `Transport.operate` that are in flight at a time."""


class Transport:
    """Unary calls, with resends by the client's policy. Raises the `ExecutorError` of an answer."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._methods: dict[type[Operation], Any] = {
            model_executor_pb2.TruncateKvRequest: context.executor.TruncateKv,
            model_executor_pb2.ForkKvRequest: context.executor.ForkKv,
            model_executor_pb2.ReleaseRequest: context.executor.Release,
        }

    @property
    def ready(self) -> bool:
        """Whether requests may be sent without `prepare`."""
        return True

    @property
    def chains(self) -> bool:
        """Whether an item may follow one in flight."""
        return False

    async def prepare(self, deadline: Deadline) -> None:
        """Choose the transport. No request is sent if this raises."""

    async def forward(
        self, feed: Feed, items: Sequence[Item], deadline: Deadline, *, all_or_nothing: bool = False
    ) -> Forwarded:
        """Items in one forward pass. The refusal of a single feed's item is raised."""
        context, method = self._context, getattr(self._context.executor, feed.rpc)
        if any([item.follows for item in items]):  # noqa: C419 - half the time
            raise NotSupported("items follow each other in sessions only: ExecutorClient(session=True)", field="follow")
        if feed.single:
            answer = await context.call(method, feed.request(item=items[0].proto), deadline)
            outcomes = [answer.output]
        else:
            request = feed.request(items=[item.proto for item in items], all_or_nothing=all_or_nothing)
            answer = await context.call(method, request, deadline)
            outcomes = outcomes_of(answer.results, items)
        return Forwarded(outcomes, rows_from_proto(answer.row_blocks), answer.pressure, timing_from_proto(answer))

    async def operate(self, operations: Sequence[Operation], deadline: Deadline) -> list[Operated]:
        """The outcome of each operation, all of one kind, sent in messages of as many as the executor allows. The
        refusal of a whole message is that of each operation in it."""

        async def sent(part: Sequence[Operation]) -> Sequence[Operated]:
            try:
                await self.prepare(deadline)
                return await self._operate(part, deadline)
            except ExecutorError as error:
                return [error] * len(part)

        info = self._context.known_info
        most = max(1, len(operations))
        if info is not None:
            most = info.limits.max_operations or info.limits.max_batch_items
        parts = [sent(operations[first : first + most]) for first in range(0, len(operations), most)]
        outcomes = [await parts[0]] if len(parts) == 1 else await asyncio.gather(*parts)  # a task for each
        return list(itertools.chain(*outcomes))

    async def _operate(self, operations: Sequence[Operation], deadline: Deadline) -> Sequence[Operated]:
        slots = asyncio.Semaphore(CONCURRENT_CALLS)

        async def outcome(request: Operation) -> Operated:
            async with slots:
                try:
                    answer = await self._context.call(self._methods[type(request)], request, deadline)
                except ExecutorError as error:
                    return error
            self._context.note_pressure(answer.pressure)
            if isinstance(answer, model_executor_pb2.ForkKvResponse):
                return list(map(handle_from_proto, answer.handles))
            if isinstance(answer, model_executor_pb2.TruncateKvResponse):
                return [handle_from_proto(answer.handle)]
            return []

        return await asyncio.gather(*map(outcome, operations))

    async def close(self, deadline: Deadline) -> None:
        """Close the session; further requests are unary calls. Does not raise."""


def in_order(results: Sequence[forward_pb2.ItemResult]) -> Sequence[forward_pb2.ItemResult]:
    """The results in the order of their items. Executors before revision 6 send an item's place only in the answer of a
    frame of independent items, and keep the order in all others."""
    places = [each.item_index for each in results]
    return results if places == sorted(places) else sorted(results, key=_place)


_place: Final = operator.attrgetter("item_index")


def outcomes_of(
    results: Sequence[forward_pb2.ItemResult], items: Sequence[Item]
) -> list[forward_pb2.ForwardOutput | ExecutorError]:
    """The outcome of each item, whatever order the results have. Raises `TransportError` for the results of other
    items."""
    results = in_order(list(results))  # a list: reading a message's field makes its elements each time
    if [each.item_id for each in results] != [item.number for item in items]:
        raise TransportError(
            f"the executor answered {len(results)} other items than the {len(items)} that it was sent",
            metadata={"grpc_code": "INTERNAL"},
        )
    return [each.output if each.HasField("output") else error_from_status(each.error) for each in results]
