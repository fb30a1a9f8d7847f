"""Work items out, answers back, and every sequence's state in step with them.

Through whatever transport the client has. A creation that is refused because the client's lease is gone goes out again
with another, and rows that a replayed answer has lost are computed again. A program sees neither.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ferrum_rpc.client.answer import Answer
from ferrum_rpc.client.context import Context
from ferrum_rpc.client.dispatch import Dispatcher
from ferrum_rpc.client.lending import LEASE_FIELD, Lending
from ferrum_rpc.client.policy import LEASE_GONE, Deadline
from ferrum_rpc.client.release import Releases
from ferrum_rpc.client.state import Item, SequenceState
from ferrum_rpc.client.transport import Feed
from ferrum_rpc.core import HandleRef, Positions, Pressure, RowBlock, Rows, StepTiming
from ferrum_rpc.errors import ExecutorError, TransportError
from ferrum_rpc.executor.v1 import forward_pb2
from ferrum_rpc.wire.items import handle_from_proto
from ferrum_rpc.wire.status import error_from_status

log = logging.getLogger("ferrum_rpc.client")


class Forwards:
    """The forwards of one client."""

    def __init__(self, context: Context, dispatcher: Dispatcher, lending: Lending, releases: Releases) -> None:
        self._context = context
        self._dispatcher = dispatcher
        self._lending = lending
        self._releases = releases

    async def feed(self, feed: Feed, item: Item, deadline: Deadline) -> Answer:
        """One item through Prefill, Decode or ForwardVerify. The caller has claimed the sequence."""
        returned = False
        while True:
            if item.handle is None:
                await self._lending.lend((item,), deadline)
            transport = self._dispatcher.ready or await self._dispatcher.transport(deadline)
            try:
                fed = await transport.feed(feed, item, deadline)
                break
            except BaseException as error:
                self._failed(item, error, lambda later: self._repeat(feed, item, later))
                if returned or not isinstance(error, LEASE_GONE) or not self._lending.returned((item,), error):
                    raise
                returned = True
        answer = self._answer(item, fed.output, fed.blocks, self._context.note_pressure(fed.pressure), fed.timing)
        if answer.replayed and _rows_are_gone(item, answer):
            answer = (await self._rows_again({0: (item, answer)}, deadline))[0]
        return answer

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
        try:
            results = await self._batch_once(feed, items, deadline, all_or_nothing=all_or_nothing)
        except LEASE_GONE as error:  # one item's refusal refused them all
            if error.field != LEASE_FIELD or not self._lending.returned(items, error):
                raise
            return await self._batch_once(feed, items, deadline, all_or_nothing=all_or_nothing)
        again = {
            index: item
            for index, (item, result) in enumerate(zip(items, results, strict=True))
            if isinstance(result, LEASE_GONE) and self._lending.returned((item,), result)
        }
        if again:
            try:
                fresh = await self._batch_once(feed, list(again.values()), deadline, all_or_nothing=False)
            except ExecutorError as error:  # the others' answers stand
                fresh = [error] * len(again)
            for index, result in zip(again, fresh, strict=True):
                results[index] = result
        return results

    async def _batch_once(
        self, feed: Feed, items: Sequence[Item], deadline: Deadline, *, all_or_nothing: bool
    ) -> list[Answer | ExecutorError]:
        await self._lending.lend(items, deadline)
        transport = await self._dispatcher.transport(deadline)
        try:
            protos = [item.proto for item in items]
            forwarded = await transport.forward(feed, protos, deadline, all_or_nothing=all_or_nothing)
            if [each.item_id for each in forwarded.results] != [each.item_id for each in protos]:
                raise TransportError(
                    f"the executor answered {len(forwarded.results)} other items than the {len(items)} that it was "
                    "sent",
                    metadata={"grpc_code": "INTERNAL"},
                )
        except BaseException as error:
            for item in items:
                self._failed(item, error, self._repeater(item))
            raise
        pressure = self._context.note_pressure(forwarded.pressure)
        results: list[Answer | ExecutorError] = []
        gone: dict[int, tuple[Item, Answer]] = {}
        for item, result in zip(items, forwarded.results, strict=True):
            if result.HasField("output"):
                answer = self._answer(item, result.output, forwarded.blocks, pressure, forwarded.timing)
                if answer.replayed and _rows_are_gone(item, answer):
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
        item.state.committed(item, handle, self._context.exact_span_tokens)
        if item.handle is None:
            self._releases.live.add(item.state)
            self._context.calls.draining = False  # it takes new sequences: another process stands there now
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
            items.append(
                item.state.item(next(self._context.item_ids), tokens, item.output, answer.length - len(tokens))
            )
        try:
            fresh = await self._batch(self._context.forward, items, deadline, all_or_nothing=False)
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
            self._releases.live.add(item.state)
        self._context.note_error(error)

    def _repeater(self, item: Item) -> Callable[[Deadline], Any]:
        return lambda later: self._repeat(self._context.forward, item, later)

    async def _repeat(self, feed: Feed, item: Item, deadline: Deadline) -> list[HandleRef]:
        """Send a doubtful creation again, to learn what it created."""
        transport = await self._dispatcher.transport(deadline)
        if feed is self._context.forward:
            batch = await transport.forward(feed, [item.proto], deadline, all_or_nothing=False)
            return [handle_from_proto(each.output.handle) for each in batch.results if each.HasField("output")]
        return [handle_from_proto((await transport.feed(feed, item, deadline)).output.handle)]


def _rows_are_gone(item: Item, answer: Answer) -> bool:
    return answer.rows is None and item.wants_rows
