"""Letting go of sequences: shielded from cancellation, bounded in time, and blind to what is gone already."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING

from ferrum_rpc.client.policy import SEQUENCE_GONE, Deadline
from ferrum_rpc.client.state import SequenceState, new_request_id
from ferrum_rpc.core import HandleRef
from ferrum_rpc.errors import ExecutorError, SequenceBusy

if TYPE_CHECKING:
    from ferrum_rpc.client.link import Link

AT_ONCE = 64
"""Releases that `Releases.all` sends before it waits."""

log = logging.getLogger("ferrum_rpc.client")


class Releases:
    """The sequences of one client that the executor holds, or may hold, and the releases that are under way."""

    def __init__(self, link: Link, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.live: set[SequenceState] = set()
        self._link = link
        self._under_way: set[asyncio.Task[None]] = set()

    async def release(self, state: SequenceState) -> None:
        """Free a sequence and whatever a doubtful call of it may have created. Runs to its end, within ``timeout_s``,
        even when the caller is cancelled."""
        state.released = True
        self.live.discard(state)
        if state.handle is None and state.creation is None and state.fork is None:
            return
        task = asyncio.get_running_loop().create_task(self._release(state))
        self._under_way.add(task)
        task.add_done_callback(self._over)
        await asyncio.shield(task)

    def _over(self, task: asyncio.Task[None]) -> None:
        self._under_way.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.debug("a sequence was not released: %s", error)

    async def _release(self, state: SequenceState) -> None:
        deadline = Deadline.after(self.timeout_s)
        handles = [] if state.handle is None else [state.handle]
        for doubt in (state.creation, state.fork):
            if doubt is not None and doubt.repeat is not None:
                with suppress(ExecutorError):
                    handles += await doubt.repeat(deadline)
        for handle in handles:
            await self.handle(handle, deadline)

    async def handle(self, handle: HandleRef, deadline: Deadline) -> None:
        """Release at whatever version. What is gone already counts as released."""
        link = self._link
        request_id = new_request_id()
        pause = 0.005
        while True:
            try:
                transport = await link.transport(deadline)
                link.saw(await transport.release(handle, request_id, deadline))
                return
            except SEQUENCE_GONE as error:
                link.noticed(error)
                return
            except SequenceBusy:
                if deadline.passed:
                    raise
            await asyncio.sleep(deadline.remaining(pause) or 0.0)
            pause = min(2 * pause, 0.25)

    async def settled(self, deadline: Deadline) -> None:
        """Wait for what is under way."""
        if self._under_way:
            await asyncio.wait(set(self._under_way), timeout=deadline.remaining())

    async def all(self, deadline: Deadline, *, but_of_lease: str = "") -> None:
        """Release what is still live, apart from the sequences of a lease that is about to be revoked. Does not
        raise."""
        waiting = []
        for state in self.live:
            if but_of_lease and state.lease_id == but_of_lease:
                state.released = True
            else:
                waiting.append(state)
        self.live.clear()
        while waiting and not deadline.passed:
            batch, waiting = waiting[:AT_ONCE], waiting[AT_ONCE:]
            await asyncio.gather(*(self.release(state) for state in batch), return_exceptions=True)
