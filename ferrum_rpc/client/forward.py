"""Work items out, answers back, and every sequence's state in step with them.

A creation that is refused because the client's lease is gone goes out again
with another, and rows that a replayed answer has lost are computed again. A program sees neither.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from ferrum_rpc.client.answer import Answer
from ferrum_rpc.client.context import Context
from ferrum_rpc.client.lease import LEASE_FIELD, Leases
from ferrum_rpc.client.operations import Operations
from ferrum_rpc.client.retry import LEASE_GONE, Deadline
from ferrum_rpc.client.state import Item, SequenceState
from ferrum_rpc.client.transport import FORWARD, Feed, Transport
from ferrum_rpc.core import HandleRef, Positions, Pressure, RowBlock, Rows, StepTiming
from ferrum_rpc.errors import ExecutorError
from ferrum_rpc.executor.v1 import forward_pb2
from ferrum_rpc.wire.items import handle_from_proto

log = logging.getLogger("ferrum_rpc.client")


class Forwards:
    """The forwards of one client."""

    def __init__(self, context: Context, transport: Transport, leases: Leases, operations: Operations) -> None:
        self._context = context
        self._transport = transport
        self._leases = leases
        self._operations = operations

    async def batch(
        self, feed: Feed, items: Sequence[Item], deadline: Deadline, *, all_or_nothing: bool
    ) -> list[Answer | ExecutorError]:
        """As `forward`, with a claim on the sequences."""
        claimed: list[SequenceState] = []
        try:
            for item in items:
                claimed.append(item.state.claim(feed.name))
                item.state.check(item)
            return await self.forward(feed, items, deadline, all_or_nothing=all_or_nothing) if items else []
        finally:
            for state in claimed:
                state.busy = ""

    async def forward(
        self,
        feed: Feed,
        items: Sequence[Item],
        deadline: Deadline,
        *,
        all_or_nothing: bool = False,
        reassigned: bool = False,
    ) -> list[Answer | ExecutorError]:
        """Items in one forward pass; ``results[i]`` answers ``items[i]``. The caller has claimed the sequences. Items
        whose lease is gone go out again with another, once."""
        while True:
            for item in items:
                if item.handle is None:
                    await self._leases.assign(item, deadline)
            if not self._transport.ready:
                await self._transport.prepare(deadline)
            try:
                forwarded = await self._transport.forward(feed, items, deadline, all_or_nothing=all_or_nothing)
                break
            except BaseException as error:
                for item in items:
                    self._failed(feed, item, error)
                if reassigned or not isinstance(error, LEASE_GONE):
                    raise
                if len(items) > 1 and error.field != LEASE_FIELD:  # one item's refusal refused them all
                    raise
                reassigned = any([self._leases.unassign(item, error) for item in items])  # noqa: C419 - each of them
                if not reassigned:
                    raise
        pressure = self._context.note_pressure(forwarded.pressure)
        results: list[Answer | ExecutorError] = []
        again: dict[int, Item] = {}
        replayed = False
        for item, outcome in zip(items, forwarded.outcomes, strict=True):
            if isinstance(outcome, ExecutorError):
                self._failed(feed, item, self._context.note_error(outcome))
                if not reassigned and isinstance(outcome, LEASE_GONE) and self._leases.unassign(item, outcome):
                    again[len(results)] = item
                results.append(outcome)
            else:
                results.append(self._answer(item, outcome, forwarded.blocks, pressure, forwarded.timing))
                replayed = replayed or outcome.replayed
        if again:
            try:
                fresh = await self.forward(feed, list(again.values()), deadline, reassigned=True)
            except ExecutorError as error:  # the others' answers stand
                fresh = [error] * len(again)
            for index, result in zip(again, fresh, strict=True):
                results[index] = result
        return await self._with_rows(items, results, deadline) if replayed else results

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
            self._operations.live.add(item.state)
            self._context.draining = False  # it takes new sequences: another process stands there now
        where = output.rows
        rows = Rows(blocks[where.block], where.first, where.count) if output.HasField("rows") else None
        return Answer(handle, rows, pressure, timing, output.cached_tokens, output.replayed)

    async def _with_rows(
        self, items: Sequence[Item], results: list[Answer | ExecutorError], deadline: Deadline
    ) -> list[Answer | ExecutorError]:
        """The results. A replayed answer may come without its rows: feed its last tokens once more to see them. Where
        that fails the answers stay as they are, for the sequences did advance."""
        gone: dict[int, Answer] = {}
        fed: list[Item] = []
        for index, (item, answer) in enumerate(zip(items, results, strict=True)):
            if isinstance(answer, Answer) and answer.replayed and answer.rows is None and item.wants_rows:
                tokens = item.tokens if item.output.positions is Positions.ALL else item.tokens[-1:]
                number, truncate_to = next(self._context.item_ids), answer.length - len(tokens)
                fed.append(item.state.item(number, tokens, item.output, truncate_to))
                gone[index] = answer
        if not gone:
            return results
        try:
            fresh = await self.forward(FORWARD, fed, deadline)
        except ExecutorError as error:
            log.warning("the rows of a replayed answer could not be recomputed: %s", error)
            return results
        for (index, answer), again in zip(gone.items(), fresh, strict=True):
            if isinstance(again, Answer):
                results[index] = replace(again, replayed=True, cached_tokens=answer.cached_tokens)
        return results

    def _failed(self, feed: Feed, item: Item, error: BaseException) -> None:
        async def repeat(later: Deadline) -> list[HandleRef]:
            """Send a doubtful creation again, for the handles of what it created."""
            await self._transport.prepare(later)
            outcomes = (await self._transport.forward(feed, [item], later)).outcomes
            return [handle_from_proto(each.handle) for each in outcomes if not isinstance(each, ExecutorError)]

        item.state.failed(item, error, repeat)
        if item.state.in_doubt:
            self._operations.live.add(item.state)
