"""One client's connection to its executor: work items out, answers back, and every sequence's state in step with them.

A creation that is refused because the client's lease is gone goes out again with another, and rows that a replayed
answer has lost are computed again. A program sees neither.
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
from ferrum_rpc.client.state import Item
from ferrum_rpc.client.transport import FORWARD, Feed, Forwarded, Transport
from ferrum_rpc.core import HandleRef, Positions, Pressure, Rows
from ferrum_rpc.errors import ExecutorError
from ferrum_rpc.executor.v1 import forward_pb2
from ferrum_rpc.wire.items import handle_from_proto

log = logging.getLogger("ferrum_rpc.client")


class Connection:
    """What `ExecutorClient` and `Sequence` speak through: the parts of a client, and its forwards."""

    def __init__(self, context: Context, leases: Leases, transport: Transport, release_timeout_s: float) -> None:
        self.context = context
        self.leases = leases
        self.transport = transport
        self.operations = Operations(transport, release_timeout_s)

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
                    await self.leases.assign(item, deadline)
            if not self.transport.ready:
                await self.transport.prepare(deadline)
            try:
                forwarded = await self.transport.forward(feed, items, deadline, all_or_nothing=all_or_nothing)
                break
            except BaseException as error:
                for item in items:
                    self._failed(feed, item, error)
                if reassigned or not isinstance(error, LEASE_GONE):
                    raise
                if len(items) > 1 and error.field != LEASE_FIELD:  # one item's refusal refused them all
                    raise
                reassigned = any([self.leases.unassign(item, error) for item in items])  # noqa: C419 - each of them
                if not reassigned:
                    raise
        pressure = self.context.note_pressure(forwarded.pressure)
        results: list[Answer | ExecutorError] = []
        again: dict[int, Item] = {}
        replayed = False
        for item, outcome in zip(items, forwarded.outcomes, strict=True):
            if isinstance(outcome, ExecutorError):
                self._failed(feed, item, self.context.note_error(outcome))
                if not reassigned and isinstance(outcome, LEASE_GONE) and self.leases.unassign(item, outcome):
                    again[len(results)] = item
                results.append(outcome)
            else:
                results.append(self._answer(item, outcome, forwarded, pressure))
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
        self, item: Item, output: forward_pb2.ForwardOutput, forwarded: Forwarded, pressure: Pressure
    ) -> Answer:
        handle, info = handle_from_proto(output.handle), self.context.known_info
        exact_span_tokens = 1 if info is None else info.limits.exact_span_tokens  # 1 decides nothing
        item.state.committed(item, handle, exact_span_tokens)
        if item.handle is None:
            self.operations.live.add(item.state)
            self.context.draining = False  # it takes new sequences: another process stands there now
        where = output.rows
        rows = Rows(forwarded.blocks[where.block], where.first, where.count) if output.HasField("rows") else None
        return Answer(handle, rows, pressure, forwarded.timing, output.cached_tokens, output.replayed)

    async def _with_rows(
        self, items: Sequence[Item], results: list[Answer | ExecutorError], deadline: Deadline
    ) -> list[Answer | ExecutorError]:
        """The results. A replayed answer may come without its rows: feed its last tokens once more to see them. Where
        that fails the answers stay as they are, for the sequences did advance."""
        gone: dict[int, Answer] = {}
        fed: list[Item] = []
        for index, (item, answer) in enumerate(zip(items, results, strict=True)):
            if not isinstance(answer, Answer) or not answer.replayed or answer.rows is not None:
                continue
            if item.output.positions is not Positions.NONE:
                tokens = item.tokens if item.output.positions is Positions.ALL else item.tokens[-1:]
                number, truncate_to = next(self.context.item_ids), answer.length - len(tokens)
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
            await self.transport.prepare(later)
            outcomes = (await self.transport.forward(feed, [item], later)).outcomes
            return [handle_from_proto(each.handle) for each in outcomes if not isinstance(each, ExecutorError)]

        item.state.failed(item, error, repeat)
        if item.state.in_doubt:
            self.operations.live.add(item.state)

    async def close(self) -> None:
        """Release what is still live, and end the session and the lease, within the time of a release; then close the
        channel."""
        timeout_s = self.operations.release_timeout_s
        deadline = Deadline.after(timeout_s)
        try:
            await self.operations.finish_releases(deadline)
            # A step that hangs delays the end of the session: there must be time left to revoke the lease.
            await self.transport.close(Deadline.after(timeout_s / 2))
            await self.operations.release_all(deadline, but_of_lease=self.leases.lease_id)
            await self.leases.close(deadline)
        finally:
            self.leases.stop()
            await self.context.channel.close()
