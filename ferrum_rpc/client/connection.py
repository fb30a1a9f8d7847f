"""One client's connection to its executor: sends requests, and updates every sequence's state from the answers.

Some refusals are handled here, unseen by the program: a creation whose lease is gone is sent again with another lease,
an item whose token mask or grammar is gone once that is registered again, and rows that a replayed answer has lost are
recomputed.
A release is shielded from cancellation and bounded in time; a lost sequence counts as released.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Final

from ferrum_rpc.client.answer import Answer
from ferrum_rpc.client.context import Context
from ferrum_rpc.client.executor_view import SoleExecutor
from ferrum_rpc.client.grammars import Grammars
from ferrum_rpc.client.info import Capability
from ferrum_rpc.client.lease import LEASE_FIELD, Leases
from ferrum_rpc.client.masks import TokenMasks
from ferrum_rpc.client.outcomes import UnknownOutcome, new_request_id, settled
from ferrum_rpc.client.pace import RunPace
from ferrum_rpc.client.retry import LEASE_GONE, SEQUENCE_GONE, Backoff, Deadline, fate_unknown
from ferrum_rpc.client.state import Item, SequenceState
from ferrum_rpc.client.transport import FORWARD, Feed, Forwarded, Operated, Transport
from ferrum_rpc.core import HandleRef, Positions, Pressure, RowKind, Rows, named
from ferrum_rpc.core.check import check_limit
from ferrum_rpc.errors import (
    ExecutorError,
    GrammarUnknown,
    NotSupported,
    SequenceBusy,
    TokenMaskUnknown,
)
from ferrum_rpc.executor.v1 import forward_pb2
from ferrum_rpc.executor.v1.model_executor_pb2 import ForkKvRequest, ReleaseRequest, TruncateKvRequest
from ferrum_rpc.wire.items import RUN_END_FROM_PROTO, handle_from_proto, handle_to_proto
from ferrum_rpc.wire.status import error_from_status

log = logging.getLogger("ferrum_rpc.client")

_FIELDS: Final = {Capability.RUN: "run", Capability.FOLLOW: "follow", Capability.STEP_FORK: "create.fork"}
"""The feature of a capability, for error messages; for the others it is the output."""


class Connection:
    """The connection of `ExecutorClient` and `Sequence`. ``live``: the sequences that the executor has, or may have.
    ``pace``: how fast runs are answered. ``release_timeout_s`` bounds each release; ``unreleased``: sequences whose
    release failed, which the next release tries again. ``gone``: the executor has ended, with its sequences.
    """

    def __init__(self, context: Context, leases: Leases, transport: Transport, release_timeout_s: float) -> None:
        self.context = context
        self.leases = leases
        self.masks = TokenMasks(context)
        self.grammars = Grammars(context)
        self.transport = transport
        self.release_timeout_s = release_timeout_s
        self.live: set[SequenceState] = set()
        self.pace = RunPace()
        self.gone = False
        self.unreleased: list[SequenceState] = []
        self._releasing: set[asyncio.Task[list[ExecutorError | None]]] = set()
        self._executor: SoleExecutor | None = None

    @property
    def executor(self) -> SoleExecutor | None:
        """The executor as known; still the last one if another answers there that is not known yet."""
        known = self.context.known_info
        if known is not None and (self._executor is None or self._executor.gone):
            self._executor = SoleExecutor(self.context, known)
        return self._executor

    # --- forwards ---------------------------------------------------------------------------------------------------

    async def forward(
        self,
        feed: Feed,
        items: Sequence[Item],
        deadline: Deadline,
        *,
        all_or_nothing: bool = False,
        reassigned: bool = False,
        registered: bool = False,
    ) -> list[Answer | ExecutorError]:
        """Items in one forward pass; ``results[i]`` answers ``items[i]``. The caller has claimed the sequences. Items
        are sent again once with another lease, and once after their masks and grammars are registered again."""
        while True:
            for item in items:
                if item.handle is None and item.parent is None:
                    await self.leases.assign(item, deadline)
                if item.needs:  # each time: the lease may be gone with its executor, and another one may offer less
                    await self._check_offered(item, deadline)
            if not self.transport.ready:
                await self.transport.prepare(deadline)
            try:
                forwarded = await self.transport.forward(feed, items, deadline, all_or_nothing=all_or_nothing)
                break
            except BaseException as error:
                for item in items:
                    self._failed(feed, item, error)
                if isinstance(error, TokenMaskUnknown | GrammarUnknown) and not registered:
                    registered = await self._register_again(items, deadline)
                    if registered:
                        continue
                if reassigned or not isinstance(error, LEASE_GONE):
                    raise
                if len(items) > 1 and error.field != LEASE_FIELD:  # one item's refusal refused them all
                    raise
                if not any([self.leases.unassign(item, error) for item in items]):  # noqa: C419 - each of them
                    raise
                reassigned = True
        pressure = self.context.note_pressure(forwarded.pressure)
        results: list[Answer | ExecutorError] = []
        again: dict[int, Item] = {}
        unmasked: list[Item] = []
        replayed = False
        for item, outcome in zip(items, forwarded.outcomes, strict=True):
            if isinstance(outcome, ExecutorError):
                self._failed(feed, item, self.context.note_error(outcome))
                if not reassigned and isinstance(outcome, LEASE_GONE) and self.leases.unassign(item, outcome):
                    again[len(results)] = item
                elif isinstance(outcome, TokenMaskUnknown | GrammarUnknown) and not registered:
                    again[len(results)] = item
                    unmasked.append(item)
                results.append(outcome)
            else:
                answer = self._answer(item, outcome, forwarded, pressure)
                results.append(answer)
                replayed = replayed or answer.replayed
        if again:
            for index, result in zip(again, await self._again(feed, again, unmasked, deadline), strict=True):
                results[index] = result
        return await self._with_rows(items, results, deadline) if replayed else results

    async def _again(
        self, feed: Feed, items: Mapping[int, Item], unmasked: Sequence[Item], deadline: Deadline
    ) -> list[Answer | ExecutorError]:
        """The outcomes of items that were refused for their lease or, if ``unmasked``, for their masks or grammars,
        and are sent once more. If that fails, the others' answers stay valid."""
        try:
            if unmasked:
                await self._register_again(unmasked, deadline)
            return await self.forward(feed, list(items.values()), deadline, reassigned=True, registered=True)
        except ExecutorError as error:
            return [error] * len(items)

    async def _register_again(self, items: Sequence[Item], deadline: Deadline) -> bool:
        """Register the masks and the grammars of items that this client has kept. False: it has none of them."""
        outputs = [item.output for item in items]
        masks = await self.masks.register_again(outputs, deadline)
        return await self.grammars.register_again(outputs, deadline) or masks

    async def _check_offered(self, item: Item, deadline: Deadline) -> None:
        """Raise `NotSupported` if a capability is missing. An executor of an older revision would not refuse, because
        it ignores the field. Raises `InvalidRequest` for a run with more stop ids than the executor allows."""
        info = await self.context.info(deadline)
        if item.run is not None:
            stops = len(item.run.stop_token_ids)
            check_limit(info.limits, "max_stop_tokens", stops, "stop ids", "run.stop_token_ids")
        for need in map(Capability, item.needs):
            if need not in info.capabilities:
                field = _FIELDS.get(need, "output")
                raise NotSupported(f"the executor does not offer this {field} (capability {need.name})", field=field)

    def _answer(
        self, item: Item, output: forward_pb2.ForwardOutput, forwarded: Forwarded, pressure: Pressure
    ) -> Answer:
        handle, info = handle_from_proto(output.handle), self.context.known_info
        exact_span_tokens = 1 if info is None else info.limits.exact_span_tokens  # 1: no effect
        rows, end, cause, chosen = None, None, None, ()
        if output.HasField("rows"):
            where = output.rows
            rows = named(Rows, (forwarded.blocks[where.block], where.first, where.count))
        if item.run is not None:
            end = RUN_END_FROM_PROTO.get(output.run_end)
            cause = error_from_status(output.run_cause) if output.HasField("run_cause") else None
        cached, replayed, recomputed = output.cached_tokens, output.replayed, output.recomputed_tokens
        answer = named(Answer, (handle, rows, pressure, forwarded.timing, cached, replayed, end, cause, recomputed))
        if item.run is not None:
            chosen = () if rows is None else answer.tokens.tolist()
        elif item.followed and rows is not None and rows.block.kind is RowKind.TOKENS:
            chosen = answer.tokens[-1:].tolist()
        item.state.committed(item, handle, exact_span_tokens, chosen)
        if item.handle is None:
            self.live.add(item.state)
            self.context.draining = False  # it accepts new sequences: another process runs there now
        return answer

    async def _with_rows(
        self, items: Sequence[Item], results: list[Answer | ExecutorError], deadline: Deadline
    ) -> list[Answer | ExecutorError]:
        """The results. A replayed answer may have lost its rows: its last tokens are fed once more to recompute them.
        If that fails, the answers stay as they are, because the sequences did advance."""
        gone: dict[int, Answer] = {}
        fed: list[Item] = []
        for index, (item, answer) in enumerate(zip(items, results, strict=True)):
            if not isinstance(answer, Answer) or not answer.replayed or answer.rows is not None:
                continue
            if item.output.row_count(len(item.tokens), item.start):
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
                results[index] = again._replace(
                    replayed=True, cached_tokens=answer.cached_tokens, recomputed_tokens=answer.recomputed_tokens
                )
        return results

    def _failed(self, feed: Feed, item: Item, error: BaseException) -> None:
        async def repeat(later: Deadline) -> list[HandleRef]:
            """Send a creation of unknown outcome again, for the handles of the new sequences."""
            await self.transport.prepare(later)
            outcomes = (await self.transport.forward(feed, [item], later)).outcomes
            return [handle_from_proto(each.handle) for each in outcomes if not isinstance(each, ExecutorError)]

        item.state.failed(item, error, repeat)
        if item.state.in_doubt and not item.state.released:
            self.live.add(item.state)

    # --- operations without tokens ----------------------------------------------------------------------------------

    async def truncate(
        self, rollbacks: Sequence[tuple[SequenceState, HandleRef, int]], deadline: Deadline
    ) -> list[ExecutorError | None]:
        """Roll back claimed sequences, each to its length, and their states. None on success. All have one request id,
        except those that repeat a call of unknown outcome under its id."""
        fresh = new_request_id()
        calls: dict[str, list[int]] = {}
        for at, (state, handle, length) in enumerate(rollbacks):
            calls.setdefault(state.request_id(("truncate", handle, length), fresh), []).append(at)
        refusals: list[ExecutorError | None] = [None] * len(rollbacks)
        for request_id, group in calls.items():
            requests = [
                TruncateKvRequest(handle=handle_to_proto(handle), length=length, request_id=request_id)
                for _, handle, length in (rollbacks[at] for at in group)
            ]
            outcomes: Sequence[Operated | BaseException]
            try:
                outcomes, failure = await self.transport.operate(requests, deadline), None
            except BaseException as error:
                outcomes, failure = [error] * len(group), error
            for at, outcome in zip(group, outcomes, strict=True):
                state, handle, length = rollbacks[at]
                if isinstance(outcome, list):
                    state.rolled_back(*outcome)
                else:
                    call = UnknownOutcome(("truncate", handle, length), request_id)
                    state.doubt = settled(state.doubt, call, outcome)
                    refusals[at] = outcome if isinstance(outcome, ExecutorError) else None
            if failure is not None:
                raise failure
        return refusals

    async def fork(
        self, state: SequenceState, handle: HandleRef, deadline: Deadline, *, count: int, at: int | None
    ) -> list[SequenceState]:
        """Children of the first ``at`` tokens of a claimed sequence, as live states."""
        content = ("fork", handle, count, at)
        request = ForkKvRequest(
            handle=handle_to_proto(handle),
            count=count,
            at_length=at,
            request_id=state.request_id(content),
            lease_id=state.create.lease_id,
        )

        async def children(until: Deadline) -> list[HandleRef]:
            [outcome] = await self.transport.operate([request], until)
            if isinstance(outcome, ExecutorError):
                raise outcome
            return outcome

        try:
            handles = await children(deadline)
        except BaseException as error:
            state.fork = settled(state.fork, UnknownOutcome(content, request.request_id, children), error)
            raise
        state.fork = None
        return [self._child(state, each) for each in handles]

    def _child(self, parent: SequenceState, handle: HandleRef) -> SequenceState:
        child = parent.child(handle.seq_len)
        child.handle = handle
        self.live.add(child)
        return child

    async def release(
        self, states: Sequence[SequenceState], ending: Sequence[asyncio.Task[Answer]] = ()
    ) -> list[ExecutorError | None]:
        """Free sequences, and those that a call of unknown outcome may have created. None for each that is free.
        Completes within ``release_timeout_s`` even if the caller is cancelled. ``ending``: their cancelled calls.
        No caller waits for those of earlier releases that failed."""
        for state in states:
            state.released = True
            self.live.discard(state)
        again, self.unreleased = [each for each in self.unreleased if each not in states], []
        if again and not self.gone:
            self._start_release(again, ())
        held = [state for state in states if state.handle or state.creation or state.fork]
        if self.gone or (not held and not ending):
            return [None] * len(states)
        return await asyncio.shield(self._start_release(states, ending))

    def _start_release(
        self, states: Sequence[SequenceState], ending: Sequence[asyncio.Task[Answer]]
    ) -> asyncio.Task[list[ExecutorError | None]]:
        task = asyncio.get_running_loop().create_task(self._release(states, ending))
        self._releasing.add(task)
        task.add_done_callback(self._released)
        return task

    def _released(self, task: asyncio.Task[list[ExecutorError | None]]) -> None:
        self._releasing.discard(task)
        if not task.cancelled() and task.exception() is None:
            for refusal in filter(None, task.result()):
                log.debug("a sequence was not released: %s", refusal)

    async def _release(
        self, states: Sequence[SequenceState], ending: Sequence[asyncio.Task[Answer]]
    ) -> list[ExecutorError | None]:
        deadline = Deadline.after(self.release_timeout_s)
        if ending:  # their creations are known once they have ended
            await asyncio.wait(ending, timeout=deadline.remaining())
        held = [(at, state.handle) for at, state in enumerate(states) if state.handle is not None]
        unanswered = set[int]()
        for at, state in enumerate(states):
            for doubt in (state.creation, state.fork):
                if doubt is not None and doubt.repeat is not None:
                    try:
                        held += [(at, handle) for handle in await doubt.repeat(deadline)]
                    except ExecutorError as error:  # refused: there is nothing to release
                        if fate_unknown(error):
                            unanswered.add(at)
        refusals: list[ExecutorError | None] = [None] * len(states)
        outcomes = await self.release_handles([handle for _, handle in held], deadline)
        for (at, _), refusal in zip(held, outcomes, strict=True):
            refusals[at] = refusals[at] or refusal
        for at, refusal in enumerate(refusals):
            if at in unanswered or refusal is not None:
                self.unreleased.append(states[at])
        return refusals

    async def release_handles(self, handles: Sequence[HandleRef], deadline: Deadline) -> list[ExecutorError | None]:
        """Release at any version. None for each that is free; a lost sequence counts as released."""
        request_id = new_request_id()
        refusals: list[ExecutorError | None] = [None] * len(handles)
        if self.gone:
            return refusals
        left, backoff = list(range(len(handles))), Backoff.while_busy(deadline, None)
        while True:
            requests = [
                ReleaseRequest(handle=handle_to_proto(handles[at]), any_version=True, request_id=request_id)
                for at in left
            ]
            for at, outcome in zip(left, await self.transport.operate(requests, deadline), strict=True):
                refusals[at] = None if isinstance(outcome, (list, *SEQUENCE_GONE)) else outcome
            if self.gone:  # meanwhile
                return [None] * len(handles)
            left = [at for at in left if isinstance(refusals[at], SequenceBusy)]
            if not left or not await backoff.wait():
                return refusals

    # --- the end ----------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Release live sequences, end the session and the lease, all within a release's time; then close the
        channel."""
        deadline = Deadline.after(self.release_timeout_s)
        try:
            if self._releasing:
                await asyncio.wait(set(self._releasing), timeout=deadline.remaining())
            # A step that hangs delays the end of the session: there must be time left to revoke the lease.
            await self.transport.close(Deadline.after(self.release_timeout_s / 2))
            await self._release_live(deadline)
            await self.leases.close(deadline)
        finally:
            self.leases.stop()
            await self.context.channel.close()

    async def abandon(self) -> None:
        """Close the channel of an executor that is gone, which ends every call. If it still runs, the lease expires
        there."""
        self.gone = True
        self.live.clear()
        self.leases.stop()
        await self.context.channel.close()

    async def _release_live(self, deadline: Deadline) -> None:
        """Release live sequences, except those of the lease, which is about to be revoked."""
        lease_id = self.leases.lease_id
        held = {*self.live, *self.unreleased}
        covered = {state for state in held if lease_id and state.lease_id == lease_id}
        for state in covered:
            state.released = True
        waiting = held - covered
        self.live.clear()
        if waiting and not deadline.passed:
            await self.release(list(waiting))
