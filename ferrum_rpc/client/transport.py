"""How a client's requests travel: what every way has to offer, and the plain one, a unary call each.

The other is a session (`client.session`). Both take the same messages and give the same answers and errors, so that
nothing above the dispatcher depends on which one it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

from ferrum_rpc.client.calls import Calls
from ferrum_rpc.client.info import timing_from_proto
from ferrum_rpc.client.policy import Deadline
from ferrum_rpc.client.state import Item
from ferrum_rpc.core import HandleRef, RowBlock, StepTiming
from ferrum_rpc.errors import ExecutorError, TransportError
from ferrum_rpc.executor.v1 import forward_pb2, model_executor_pb2, model_executor_pb2_grpc, types_pb2
from ferrum_rpc.wire.items import handle_from_proto
from ferrum_rpc.wire.rows import rows_from_proto
from ferrum_rpc.wire.status import error_from_status


@dataclass(frozen=True, slots=True)
class FeedRpc:
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


class Operated(NamedTuple):
    """The answer to an operation: for each of its sequences the handles that it left, or the refusal of this one alone.
    ``pressure``: how full the executor is, if it said so."""

    outcomes: Sequence[list[HandleRef] | ExecutorError]
    pressure: types_pb2.KvPressure | None


AT_ONCE: Final = 64
"""Unary calls of one operation that are in flight at a time."""


Operation = model_executor_pb2.TruncateKvRequest | model_executor_pb2.ForkKvRequest | model_executor_pb2.ReleaseRequest
"""What is done to one sequence that exists. A session makes one frame of many of a kind, which share a request id."""


class Transport(Protocol):
    """A way to the executor. It sends again what is lost, as the client's policy says, and raises the `ExecutorError`
    of the answer."""

    def forward(
        self, feed: FeedRpc, items: Sequence[Item], deadline: Deadline, *, all_or_nothing: bool
    ) -> Awaitable[Forwarded]:
        """Items in one forward pass. The refusal of a single feed's item is raised."""

    async def operate(self, operations: Sequence[Operation], deadline: Deadline) -> Operated:
        """Operations of one kind. The refusal of an only one is raised or returned."""


class UnaryTransport:
    """A unary call for each request."""

    def __init__(self, executor: model_executor_pb2_grpc.ModelExecutorAsyncStub, calls: Calls) -> None:
        self._methods: dict[type[Operation], Any] = {
            model_executor_pb2.TruncateKvRequest: executor.TruncateKv,
            model_executor_pb2.ForkKvRequest: executor.ForkKv,
            model_executor_pb2.ReleaseRequest: executor.Release,
        }
        self._calls = calls

    async def forward(
        self, feed: FeedRpc, items: Sequence[Item], deadline: Deadline, *, all_or_nothing: bool
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

    async def operate(self, operations: Sequence[Operation], deadline: Deadline) -> Operated:
        """A call for each, `AT_ONCE` at a time."""
        slots, pressure = asyncio.Semaphore(AT_ONCE), None

        async def outcome(request: Operation) -> list[HandleRef] | ExecutorError:
            nonlocal pressure
            async with slots:
                try:
                    answer = await self._calls.call(self._methods[type(request)], request, deadline)
                except ExecutorError as error:
                    return error
            pressure = answer.pressure
            if isinstance(answer, model_executor_pb2.ForkKvResponse):
                return list(map(handle_from_proto, answer.handles))
            return (
                [handle_from_proto(answer.handle)] if isinstance(request, model_executor_pb2.TruncateKvRequest) else []
            )

        return Operated(await asyncio.gather(*map(outcome, operations)), pressure)


def timing_of(answer: Any) -> StepTiming | None:
    """The timing that an answer carries; None where no step ran for it."""
    return timing_from_proto(answer.timing) if answer.HasField("timing") else None
