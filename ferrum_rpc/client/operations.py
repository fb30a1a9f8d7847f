"""What is done to sequences without feeding them: truncate, fork and release.

A release is shielded from cancellation and bounded in time; what is gone already counts as released.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress

from ferrum_rpc.client.retry import SEQUENCE_GONE, Backoff, Deadline
from ferrum_rpc.client.state import SequenceState, new_request_id, settled
from ferrum_rpc.client.transport import Transport
from ferrum_rpc.core import HandleRef
from ferrum_rpc.errors import ExecutorError, SequenceBusy
from ferrum_rpc.executor.v1.model_executor_pb2 import ForkKvRequest, ReleaseRequest, TruncateKvRequest
from ferrum_rpc.wire.items import handle_to_proto

log = logging.getLogger("ferrum_rpc.client")


class Operations:
    """The sequences of one client that the executor holds, or may hold (``live``), and the releases that are under way.
    ``release_timeout_s`` bounds each."""

    def __init__(self, transport: Transport, release_timeout_s: float) -> None:
        self.release_timeout_s = release_timeout_s
        self.live: set[SequenceState] = set()
        self._transport = transport
        self._releasing: set[asyncio.Task[list[ExecutorError | None]]] = set()

    async def truncate(
        self, rollbacks: Sequence[tuple[SequenceState, HandleRef, int]], deadline: Deadline
    ) -> list[ExecutorError | None]:
        """Roll back claimed sequences, each to its length; the states follow. None: done. All have one request id, but
        for those whose doubtful call for the same thing has one already."""
        fresh = new_request_id()
        calls: dict[str, list[int]] = {}
        for at, (state, handle, length) in enumerate(rollbacks):
            calls.setdefault(state.request_id(("truncate", handle, length), fresh), []).append(at)
        refusals: list[ExecutorError | None] = [None] * len(rollbacks)

        def over(at: int, request_id: str, outcome: list[HandleRef] | BaseException) -> None:
            state, handle, length = rollbacks[at]
            if isinstance(outcome, BaseException):
                state.doubt = settled(state.doubt, outcome, ("truncate", handle, length), request_id)
                refusals[at] = outcome if isinstance(outcome, ExecutorError) else None
            else:
                state.moved(*outcome)

        for request_id, group in calls.items():
            requests = [
                TruncateKvRequest(handle=handle_to_proto(handle), length=length, request_id=request_id)
                for _, handle, length in (rollbacks[at] for at in group)
            ]
            try:
                outcomes = await self._transport.operate(requests, deadline)
            except BaseException as error:
                for at in group:
                    over(at, request_id, error)
                raise
            for at, outcome in zip(group, outcomes, strict=True):
                over(at, request_id, outcome)
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
            [outcome] = await self._transport.operate([request], until)
            if isinstance(outcome, ExecutorError):
                raise outcome
            return outcome

        try:
            handles = await children(deadline)
        except BaseException as error:
            state.fork = settled(state.fork, error, content, request.request_id, children)
            raise
        state.fork = None
        return [self._child(state, each) for each in handles]

    def _child(self, parent: SequenceState, handle: HandleRef) -> SequenceState:
        length = handle.seq_len
        tokens = None if parent.tokens is None else parent.tokens[:length]
        pieces = parent.pieces.upto(length)
        child = SequenceState(parent.create, handle, tokens, lease_id=parent.lease_id, pieces=pieces)
        self.live.add(child)
        return child

    async def release(self, *states: SequenceState) -> list[ExecutorError | None]:
        """Free sequences and whatever a doubtful call of theirs may have created. None: it is free. Runs to its end,
        within ``release_timeout_s``, even when the caller is cancelled."""
        for state in states:
            state.released = True
            self.live.discard(state)
        if all(state.handle is None and state.creation is None and state.fork is None for state in states):
            return [None] * len(states)
        task = asyncio.get_running_loop().create_task(self._release(states))
        self._releasing.add(task)
        task.add_done_callback(self._released)
        return await asyncio.shield(task)

    def _released(self, task: asyncio.Task[list[ExecutorError | None]]) -> None:
        self._releasing.discard(task)
        if not task.cancelled() and task.exception() is None:
            for refusal in filter(None, task.result()):
                log.debug("a sequence was not released: %s", refusal)

    async def _release(self, states: Sequence[SequenceState]) -> list[ExecutorError | None]:
        deadline = Deadline.after(self.release_timeout_s)
        held = [(at, state.handle) for at, state in enumerate(states) if state.handle is not None]
        for at, state in enumerate(states):
            for doubt in (state.creation, state.fork):
                if doubt is not None and doubt.repeat is not None:
                    with suppress(ExecutorError):  # it was refused: there is nothing to release
                        held += [(at, handle) for handle in await doubt.repeat(deadline)]
        refusals: list[ExecutorError | None] = [None] * len(states)
        outcomes = await self.release_handles([handle for _, handle in held], deadline)
        for (at, _), refusal in zip(held, outcomes, strict=True):
            refusals[at] = refusals[at] or refusal
        return refusals

    async def release_handles(self, handles: Sequence[HandleRef], deadline: Deadline) -> list[ExecutorError | None]:
        """Release at whatever version. None: it is free; what is gone already counts as released."""
        request_id = new_request_id()
        refusals: list[ExecutorError | None] = [None] * len(handles)
        left, backoff = list(range(len(handles))), Backoff.while_busy(deadline, None)
        while True:
            requests = [
                ReleaseRequest(handle=handle_to_proto(handles[at]), any_version=True, request_id=request_id)
                for at in left
            ]
            for at, outcome in zip(left, await self._transport.operate(requests, deadline), strict=True):
                refusals[at] = None if isinstance(outcome, (list, *SEQUENCE_GONE)) else outcome
            left = [at for at in left if isinstance(refusals[at], SequenceBusy)]
            if not left or not await backoff.wait():
                return refusals

    async def finish_releases(self, deadline: Deadline) -> None:
        """Wait for those that are under way."""
        if self._releasing:
            await asyncio.wait(set(self._releasing), timeout=deadline.remaining())

    async def release_all(self, deadline: Deadline, *, but_of_lease: str = "") -> None:
        """Release what is still live, apart from the sequences of a lease that is about to be revoked. Does not
        raise."""
        covered = {state for state in self.live if but_of_lease and state.lease_id == but_of_lease}
        for state in covered:
            state.released = True
        waiting = self.live - covered
        self.live.clear()
        if waiting and not deadline.passed:
            await self.release(*waiting)
