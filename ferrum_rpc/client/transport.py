"""How a client's requests travel: what every way has to offer, and the plain one, a unary call each.

The other is a session (`client.session`). Both take the same messages and give the same answers and errors, so that
nothing above the link knows which one it is.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from ferrum_rpc.client.calls import Calls
from ferrum_rpc.client.facts import timing_from_proto
from ferrum_rpc.client.policy import Deadline
from ferrum_rpc.client.state import Item
from ferrum_rpc.core import HandleRef, RowBlock, StepTiming
from ferrum_rpc.executor.v1 import forward_pb2, model_executor_pb2, model_executor_pb2_grpc, types_pb2
from ferrum_rpc.wire.items import handle_from_proto, handle_to_proto
from ferrum_rpc.wire.rows import rows_from_proto


@dataclass(frozen=True, slots=True)
class Feed:
    """An RPC that feeds tokens: its name, its method and the constructor of its request. In a session they are all one:
    what their names constrain, the client's own methods do."""

    name: str
    method: Any
    request: Callable[..., Any]


class Fed(NamedTuple):
    """The answer to one item: its output, and the answer's rows."""

    output: forward_pb2.ForwardOutput
    blocks: list[RowBlock]
    pressure: types_pb2.KvPressure
    timing: StepTiming | None


@dataclass(frozen=True, slots=True, eq=False)
class Forwarded:
    """The answer to a batch: ``results[i]`` for ``items[i]``."""

    results: Sequence[forward_pb2.ItemResult]
    blocks: list[RowBlock]
    pressure: types_pb2.KvPressure
    timing: StepTiming | None


Handles = tuple[list[HandleRef], types_pb2.KvPressure]
"""What an operation left: the sequence, or its children; and how full the executor is."""


class Transport(Protocol):
    """A way to the executor. Every method sends again what is lost, as the client's policy says, and raises the
    `ExecutorError` of the answer."""

    def feed(self, feed: Feed, item: Item, deadline: Deadline) -> Awaitable[Fed]:
        """One item; its refusal is raised."""

    async def forward(
        self, feed: Feed, items: Sequence[forward_pb2.ForwardItem], deadline: Deadline, *, all_or_nothing: bool
    ) -> Forwarded:
        """A batch, in one forward pass."""

    async def truncate(self, handle: HandleRef, length: int, request_id: str, deadline: Deadline) -> Handles:
        """Roll back."""

    async def fork(self, request: model_executor_pb2.ForkKvRequest, deadline: Deadline) -> Handles:
        """Make children."""

    async def release(self, handle: HandleRef, request_id: str, deadline: Deadline) -> types_pb2.KvPressure:
        """Free, at whatever version."""


class UnaryTransport:
    """A unary call for each request."""

    def __init__(self, executor: model_executor_pb2_grpc.ModelExecutorAsyncStub, calls: Calls) -> None:
        self._executor = executor
        self._calls = calls

    async def feed(self, feed: Feed, item: Item, deadline: Deadline) -> Fed:
        """One item through Prefill, Decode or ForwardVerify."""
        answer = await self._calls.mutate(feed.method, feed.request(item=item.proto), deadline)
        return Fed(answer.output, rows_from_proto(answer.row_blocks), answer.pressure, timing_of(answer))

    async def forward(
        self, feed: Feed, items: Sequence[forward_pb2.ForwardItem], deadline: Deadline, *, all_or_nothing: bool
    ) -> Forwarded:
        """A batch through UnifiedForward, BatchPrefill or BatchDecode."""
        request = feed.request(items=items, all_or_nothing=all_or_nothing)
        answer = await self._calls.mutate(feed.method, request, deadline)
        return Forwarded(answer.results, rows_from_proto(answer.row_blocks), answer.pressure, timing_of(answer))

    async def truncate(self, handle: HandleRef, length: int, request_id: str, deadline: Deadline) -> Handles:
        """Through TruncateKv."""
        request = model_executor_pb2.TruncateKvRequest(
            handle=handle_to_proto(handle), length=length, request_id=request_id
        )
        answer = await self._calls.mutate(self._executor.TruncateKv, request, deadline)
        return [handle_from_proto(answer.handle)], answer.pressure

    async def fork(self, request: model_executor_pb2.ForkKvRequest, deadline: Deadline) -> Handles:
        """Through ForkKv."""
        answer = await self._calls.mutate(self._executor.ForkKv, request, deadline)
        return [handle_from_proto(each) for each in answer.handles], answer.pressure

    async def release(self, handle: HandleRef, request_id: str, deadline: Deadline) -> types_pb2.KvPressure:
        """Through Release."""
        request = model_executor_pb2.ReleaseRequest(
            handle=handle_to_proto(handle), any_version=True, request_id=request_id
        )
        return (await self._calls.mutate(self._executor.Release, request, deadline)).pressure


def timing_of(answer: Any) -> StepTiming | None:
    """The timing that an answer carries; None where no step ran for it."""
    return timing_from_proto(answer.timing) if answer.HasField("timing") else None
