"""How a client's requests travel: what every way has to offer, and the plain one, a unary call each.

The other is a session (`client.session`). Both take the same messages and give the same answers and errors, so that
nothing above the dispatcher knows which one it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from ferrum_rpc.client.calls import Calls
from ferrum_rpc.client.facts import timing_from_proto
from ferrum_rpc.client.policy import Deadline
from ferrum_rpc.client.state import Item
from ferrum_rpc.core import HandleRef, RowBlock, StepTiming
from ferrum_rpc.errors import ExecutorError, TransportError
from ferrum_rpc.executor.v1 import forward_pb2, model_executor_pb2, model_executor_pb2_grpc, types_pb2
from ferrum_rpc.wire.items import handle_from_proto, handle_to_proto
from ferrum_rpc.wire.rows import rows_from_proto
from ferrum_rpc.wire.status import error_from_status


@dataclass(frozen=True, slots=True)
class Feed:
    """An RPC that feeds tokens: its name, its method and the constructor of its request, which takes one ``item`` where
    it is ``single``, or else ``items``. In a session they are all one: what their names constrain, the client's own
    methods do."""

    name: str
    method: Any
    request: Callable[..., Any]
    single: bool = False


class Forwarded(NamedTuple):
    """The answer to work items: the output of each, or the refusal of this one alone; and the blocks of their rows."""

    outcomes: Sequence[forward_pb2.ForwardOutput | ExecutorError]
    blocks: list[RowBlock]
    pressure: types_pb2.KvPressure
    timing: StepTiming | None


def outcomes_of(
    results: Sequence[forward_pb2.ItemResult], items: Sequence[Item]
) -> list[forward_pb2.ForwardOutput | ExecutorError]:
    """The outcome of each item. Raises `TransportError` for the results of other items."""
    if [each.item_id for each in results] != [item.proto.item_id for item in items]:
        raise TransportError(
            f"the executor answered {len(results)} other items than the {len(items)} that it was sent",
            metadata={"grpc_code": "INTERNAL"},
        )
    return [each.output if each.HasField("output") else error_from_status(each.error) for each in results]


Handles = tuple[list[HandleRef], types_pb2.KvPressure]
"""What an operation left: the sequence, or its children; and how full the executor is."""


Rollback = tuple[HandleRef, int]
"""A sequence, and the length to roll it back to."""

Outcomes = tuple[Sequence[HandleRef | ExecutorError], types_pb2.KvPressure | None]
"""What an operation on many left, one outcome for each; and how full the executor is, if it said so."""

AT_ONCE: Final = 64
"""Unary calls of one operation that are in flight at a time."""


class Transport(Protocol):
    """A way to the executor. Every method sends again what is lost, as the client's policy says, and raises the
    `ExecutorError` of the answer."""

    def forward(
        self, feed: Feed, items: Sequence[Item], deadline: Deadline, *, all_or_nothing: bool
    ) -> Awaitable[Forwarded]:
        """Items in one forward pass. The refusal of a single feed's item is raised."""

    async def truncate(self, rollbacks: Sequence[Rollback], request_id: str, deadline: Deadline) -> Outcomes:
        """Roll back, each to a length of its own. With one handle, its refusal is raised or returned."""

    async def fork(self, request: model_executor_pb2.ForkKvRequest, deadline: Deadline) -> Handles:
        """Make children."""

    async def release(self, handles: Sequence[HandleRef], request_id: str, deadline: Deadline) -> Outcomes:
        """Free, at whatever version. With one handle, its refusal is raised or returned."""


class UnaryTransport:
    """A unary call for each request."""

    def __init__(self, executor: model_executor_pb2_grpc.ModelExecutorAsyncStub, calls: Calls) -> None:
        self._executor = executor
        self._calls = calls

    async def forward(
        self, feed: Feed, items: Sequence[Item], deadline: Deadline, *, all_or_nothing: bool
    ) -> Forwarded:
        """Through the feed's own method."""
        if feed.single:
            answer = await self._calls.call(feed.method, feed.request(item=items[0].proto), deadline)
            outcomes = [answer.output]
        else:
            request = feed.request(items=[item.proto for item in items], all_or_nothing=all_or_nothing)
            answer = await self._calls.call(feed.method, request, deadline)
            outcomes = outcomes_of(answer.results, items)
        return Forwarded(outcomes, rows_from_proto(answer.row_blocks), answer.pressure, timing_of(answer))

    async def truncate(self, rollbacks: Sequence[Rollback], request_id: str, deadline: Deadline) -> Outcomes:
        """Through TruncateKv, a call each."""

        async def one(rollback: Rollback) -> tuple[HandleRef, types_pb2.KvPressure]:
            handle, length = rollback
            request = model_executor_pb2.TruncateKvRequest(
                handle=handle_to_proto(handle), length=length, request_id=request_id
            )
            answer = await self._calls.call(self._executor.TruncateKv, request, deadline)
            return handle_from_proto(answer.handle), answer.pressure

        return await _each(one, rollbacks)

    async def fork(self, request: model_executor_pb2.ForkKvRequest, deadline: Deadline) -> Handles:
        """Through ForkKv."""
        answer = await self._calls.call(self._executor.ForkKv, request, deadline)
        return [handle_from_proto(each) for each in answer.handles], answer.pressure

    async def release(self, handles: Sequence[HandleRef], request_id: str, deadline: Deadline) -> Outcomes:
        """Through Release, a call each."""

        async def one(handle: HandleRef) -> tuple[HandleRef, types_pb2.KvPressure]:
            request = model_executor_pb2.ReleaseRequest(
                handle=handle_to_proto(handle), any_version=True, request_id=request_id
            )
            return handle, (await self._calls.call(self._executor.Release, request, deadline)).pressure

        return await _each(one, handles)


Each = TypeVar("Each")


async def _each(
    call: Callable[[Each], Awaitable[tuple[HandleRef, types_pb2.KvPressure]]], values: Sequence[Each]
) -> Outcomes:
    """The outcome of a call for each value."""
    slots = asyncio.Semaphore(AT_ONCE)

    async def settled(value: Each) -> tuple[HandleRef | ExecutorError, types_pb2.KvPressure | None]:
        async with slots:
            try:
                return await call(value)
            except ExecutorError as error:
                return error, None

    answers = await asyncio.gather(*map(settled, values))
    pressures = [pressure for _, pressure in answers if pressure is not None]
    return [outcome for outcome, _ in answers], pressures[-1] if pressures else None


def timing_of(answer: Any) -> StepTiming | None:
    """The timing that an answer carries; None where no step ran for it."""
    return timing_from_proto(answer.timing) if answer.HasField("timing") else None
