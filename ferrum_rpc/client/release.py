"""Releasing sequences: shielded from cancellation, bounded in time; what is gone already counts as released."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress

from ferrum_rpc.client.retry import SEQUENCE_GONE, Backoff, Deadline
from ferrum_rpc.client.state import SequenceState, new_request_id
from ferrum_rpc.client.transport import Transport
from ferrum_rpc.core import HandleRef
from ferrum_rpc.errors import ExecutorError, SequenceBusy
from ferrum_rpc.executor.v1.model_executor_pb2 import ReleaseRequest
from ferrum_rpc.wire.items import handle_to_proto

log = logging.getLogger("ferrum_rpc.client")


class Releases:
    """The sequences of one client that the executor holds, or may hold, and the releases that are under way."""

    def __init__(self, transport: Transport, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.live: set[SequenceState] = set()
        self._transport = transport
        self._under_way: set[asyncio.Task[list[ExecutorError | None]]] = set()

    async def release(self, *states: SequenceState) -> list[ExecutorError | None]:
        """Free sequences and whatever a doubtful call of theirs may have created. None: it is free. Runs to its end,
        within ``timeout_s``, even when the caller is cancelled."""
        for state in states:
            state.released = True
            self.live.discard(state)
        if all(state.handle is None and state.creation is None and state.fork is None for state in states):
            return [None] * len(states)
        task = asyncio.get_running_loop().create_task(self._release(states))
        self._under_way.add(task)
        task.add_done_callback(self._over)
        return await asyncio.shield(task)

    def _over(self, task: asyncio.Task[list[ExecutorError | None]]) -> None:
        self._under_way.discard(task)
        if not task.cancelled() and task.exception() is None:
            for refusal in filter(None, task.result()):
                log.debug("a sequence was not released: %s", refusal)

    async def _release(self, states: Sequence[SequenceState]) -> list[ExecutorError | None]:
        deadline = Deadline.after(self.timeout_s)
        held = [(at, state.handle) for at, state in enumerate(states) if state.handle is not None]
        for at, state in enumerate(states):
            for doubt in (state.creation, state.fork):
                if doubt is not None and doubt.repeat is not None:
                    with suppress(ExecutorError):  # it was refused: there is nothing to release
                        held += [(at, handle) for handle in await doubt.repeat(deadline)]
        refusals: list[ExecutorError | None] = [None] * len(states)
        for (at, _), refusal in zip(held, await self.handles([each for _, each in held], deadline), strict=True):
            refusals[at] = refusals[at] or refusal
        return refusals

    async def handles(self, handles: Sequence[HandleRef], deadline: Deadline) -> list[ExecutorError | None]:
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
                refusals[at] = outcome if isinstance(outcome, ExecutorError) else None
                if isinstance(outcome, SEQUENCE_GONE):
                    refusals[at] = None
            left = [at for at in left if isinstance(refusals[at], SequenceBusy)]
            if not left or not await backoff.wait():
                return refusals

    async def settled(self, deadline: Deadline) -> None:
        """Wait for what is under way."""
        if self._under_way:
            await asyncio.wait(set(self._under_way), timeout=deadline.remaining())

    async def all(self, deadline: Deadline, *, but_of_lease: str = "") -> None:
        """Release what is still live, apart from the sequences of a lease that is about to be revoked. Does not
        raise."""
        covered = {state for state in self.live if but_of_lease and state.lease_id == but_of_lease}
        for state in covered:
            state.released = True
        waiting = self.live - covered
        self.live.clear()
        if waiting and not deadline.passed:
            await self.release(*waiting)
