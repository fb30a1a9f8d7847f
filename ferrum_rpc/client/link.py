"""The client's end of the wire: sends work items, reads answers, keeps every sequence's state in step with them.

`ExecutorClient` and `Sequence` are the faces that a program sees; both speak through one `Link` per client.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import grpc

from ferrum_rpc.client.answer import Answer
from ferrum_rpc.client.calls import Calls
from ferrum_rpc.client.facts import ExecutorInfo, info_from_proto, pressure_from_proto, timing_from_proto
from ferrum_rpc.client.policy import Deadline
from ferrum_rpc.client.releases import Releases
from ferrum_rpc.client.state import Item, SequenceState
from ferrum_rpc.core import (
    HandleRef,
    OutputSpec,
    Positions,
    Pressure,
    RowBlock,
    Rows,
    StepTiming,
)
from ferrum_rpc.errors import ExecutorError, InstanceMismatch, NotSupported, SequenceBusy, TransportError
from ferrum_rpc.executor.v1 import forward_pb2, model_executor_pb2, model_executor_pb2_grpc, types_pb2
from ferrum_rpc.wire.items import handle_from_proto
from ferrum_rpc.wire.revision import SCHEMA_REVISION
from ferrum_rpc.wire.rows import rows_from_proto
from ferrum_rpc.wire.status import error_from_status

Result = TypeVar("Result")

_BUSY_PATIENCE_S = 5.0

log = logging.getLogger("ferrum_rpc.client")


class _FeedResponse(Protocol):
    """What the answers of Prefill, Decode and ForwardVerify have in common."""

    output: forward_pb2.ForwardOutput
    row_blocks: Any
    pressure: types_pb2.KvPressure
    timing: types_pb2.StepTiming


@dataclass(frozen=True, slots=True)
class Feed:
    """An RPC that feeds tokens: its name, its method and the constructor of its request."""

    name: str
    method: Any
    request: Callable[..., Any]


class Link:
    """One channel, one caller."""

    def __init__(
        self, channel: grpc.aio.Channel, calls: Calls, *, timeout_s: float | None, release_timeout_s: float
    ) -> None:
        stub = model_executor_pb2_grpc.ModelExecutorStub(channel)
        messages = model_executor_pb2
        self.executor = stub
        self.calls = calls
        self.prefill = Feed("prefill", stub.Prefill, messages.PrefillRequest)
        self.decode = Feed("decode", stub.Decode, messages.DecodeRequest)
        self.verify = Feed("verify", stub.ForwardVerify, messages.ForwardVerifyRequest)
        self.forward = Feed("forward", stub.UnifiedForward, messages.UnifiedForwardRequest)
        self.batch_prefill = Feed("batch_prefill", stub.BatchPrefill, messages.BatchPrefillRequest)
        self.batch_decode = Feed("batch_decode", stub.BatchDecode, messages.BatchDecodeRequest)
        self.pressure: Pressure | None = None
        self._timeout_s = timeout_s
        self._info: ExecutorInfo | None = None
        self._item_ids = itertools.count(1)
        self.releases = Releases(self, release_timeout_s)

    def deadline(self, timeout_s: float | None) -> Deadline:
        """``timeout_s`` from now, or the client's default."""
        return Deadline.after(self._timeout_s if timeout_s is None else timeout_s)

    def saw(self, pressure: types_pb2.KvPressure) -> Pressure:
        """Note the pressure that an answer carries."""
        self.pressure = pressure_from_proto(pressure)
        return self.pressure

    def item(self, state: SequenceState, tokens: list[int], output: OutputSpec, truncate_to: int | None = None) -> Item:
        """An item with an id of its own."""
        return state.item(next(self._item_ids), tokens, output, truncate_to)

    async def info(self, deadline: Deadline) -> ExecutorInfo:
        """What the executor is, asked once per process lifetime of it."""
        if self._info is None:
            request = model_executor_pb2.GetInfoRequest(client_revision=SCHEMA_REVISION)
            info = info_from_proto(await self.calls.mutate(self.executor.GetInfo, request, deadline))
            if info.minimum_client_revision > SCHEMA_REVISION:
                raise NotSupported(
                    f"the executor ({info.server_version}) needs clients of schema revision "
                    f"{info.minimum_client_revision}; this one has {SCHEMA_REVISION}"
                )
            self._info = info
        return self._info

    # --- forwards ---------------------------------------------------------------------------------------------------

    async def feed(self, feed: Feed, item: Item, deadline: Deadline) -> Answer:
        """One item through Prefill, Decode or ForwardVerify. The caller has claimed the sequence."""
        response = await self.patiently(item.state, lambda: self._feed(feed, item, deadline), deadline)
        blocks = rows_from_proto(response.row_blocks)
        answer = self._answer(item, response.output, blocks, self.saw(response.pressure), _timing(response))
        if _rows_are_gone(item, answer):
            answer = (await self._rows_again({0: (item, answer)}, deadline))[0]
        return answer

    async def _feed(self, feed: Feed, item: Item, deadline: Deadline) -> _FeedResponse:
        try:
            response: _FeedResponse = await self.calls.mutate(feed.method, feed.request(item=item.proto), deadline)
        except BaseException as error:
            self._failed(item, error, lambda later: self._repeat(feed, item, later))
            raise
        return response

    async def batch(
        self, feed: Feed, items: Sequence[Item], deadline: Deadline, *, all_or_nothing: bool
    ) -> list[Answer | ExecutorError]:
        """Items in one forward pass; ``results[i]`` answers ``items[i]``."""
        claimed: list[SequenceState] = []
        try:
            for item in items:
                item.state.claim(feed.name)
                claimed.append(item.state)
                item.state.check(item)
            return await self._batch(feed, items, deadline, all_or_nothing=all_or_nothing) if items else []
        finally:
            for state in claimed:
                state.unclaim()

    async def _batch(
        self, feed: Feed, items: Sequence[Item], deadline: Deadline, *, all_or_nothing: bool
    ) -> list[Answer | ExecutorError]:
        request = feed.request(items=[item.proto for item in items], all_or_nothing=all_or_nothing)
        try:
            response = await self.calls.mutate(feed.method, request, deadline)
            if [each.item_id for each in response.results] != [item.proto.item_id for item in items]:
                raise TransportError(
                    f"the executor answered {len(response.results)} other items than the {len(items)} that it was sent",
                    metadata={"grpc_code": "INTERNAL"},
                )
        except BaseException as error:
            for item in items:
                self._failed(item, error, self._repeater(item))
            raise
        blocks = rows_from_proto(response.row_blocks)
        pressure = self.saw(response.pressure)
        timing = _timing(response)
        results: list[Answer | ExecutorError] = []
        gone: dict[int, tuple[Item, Answer]] = {}
        for item, result in zip(items, response.results, strict=True):
            if result.HasField("output"):
                answer = self._answer(item, result.output, blocks, pressure, timing)
                if _rows_are_gone(item, answer):
                    gone[len(results)] = (item, answer)
                results.append(answer)
            else:
                refusal = error_from_status(result.error)
                self._failed(item, refusal, self._repeater(item))
                results.append(refusal)
        for index, again in (await self._rows_again(gone, deadline)).items():
            results[index] = again
        return results

    def _answer(
        self,
        item: Item,
        output: forward_pb2.ForwardOutput,
        blocks: list[RowBlock],
        pressure: Pressure,
        timing: StepTiming | None,
    ) -> Answer:
        handle = handle_from_proto(output.handle)
        item.state.committed(item, handle)
        if item.handle is None:
            self.releases.live.add(item.state)
        where = output.rows
        rows = Rows(blocks[where.block], where.first, where.count) if output.HasField("rows") else None
        return Answer(handle, rows, pressure, timing, output.cached_tokens, output.replayed)

    async def _rows_again(self, gone: dict[int, tuple[Item, Answer]], deadline: Deadline) -> dict[int, Answer]:
        """A replayed answer may come without its rows: feed its last tokens once more to see them. Where that fails the
        answers stay as they are, for the sequences did advance."""
        if not gone:
            return {}
        items = []
        for item, answer in gone.values():
            tokens = item.tokens if item.output.positions is Positions.ALL else item.tokens[-1:]
            items.append(self.item(item.state, tokens, item.output, answer.length - len(tokens)))
        try:
            fresh = await self._batch(self.forward, items, deadline, all_or_nothing=False)
        except ExecutorError as error:
            log.warning("the rows of a replayed answer could not be recomputed: %s", error)
            fresh = [error] * len(items)
        return {
            index: answer
            if isinstance(again, ExecutorError)
            else replace(again, replayed=True, cached_tokens=answer.cached_tokens)
            for (index, (_, answer)), again in zip(gone.items(), fresh, strict=True)
        }

    def _failed(self, item: Item, error: BaseException, repeat: Callable[[Deadline], Any]) -> None:
        item.state.failed(item, error, repeat)
        if item.state.in_doubt:
            self.releases.live.add(item.state)
        self.noticed(error)

    def noticed(self, error: BaseException) -> None:
        """Note what a refusal tells about the executor: another process lifetime has other facts."""
        if isinstance(error, InstanceMismatch):
            self._info = None

    def _repeater(self, item: Item) -> Callable[[Deadline], Any]:
        return lambda later: self._repeat(self.forward, item, later)

    async def _repeat(self, feed: Feed, item: Item, deadline: Deadline) -> list[HandleRef]:
        """Send a doubtful creation again, to learn what it created."""
        if feed is self.forward:
            response = await self.calls.mutate(feed.method, feed.request(items=[item.proto]), deadline)
            return [handle_from_proto(each.output.handle) for each in response.results if each.HasField("output")]
        response = await self.calls.mutate(feed.method, feed.request(item=item.proto), deadline)
        return [handle_from_proto(response.output.handle)]

    async def patiently(
        self, state: SequenceState, send: Callable[[], Awaitable[Result]], deadline: Deadline
    ) -> Result:
        """After a call was given up, the executor may still be at it: its SEQUENCE_BUSY is then no mistake of the
        program, and passes."""
        doubtful = state.doubt is not None and state.doubt.unknown
        patience = Deadline.after(deadline.remaining(_BUSY_PATIENCE_S))
        pause = 0.005
        while True:
            try:
                return await send()
            except SequenceBusy:
                if not doubtful or patience.passed:
                    raise
            await asyncio.sleep(patience.remaining(pause) or 0.0)
            pause = min(2 * pause, 0.25)


def _timing(response: Any) -> StepTiming | None:
    return timing_from_proto(response.timing) if response.HasField("timing") else None


def _rows_are_gone(item: Item, answer: Answer) -> bool:
    return answer.replayed and answer.rows is None and item.wants_rows
