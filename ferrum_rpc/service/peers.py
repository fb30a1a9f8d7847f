"""Timeouts for peers of transfers, which owe the next frame of an import, or must read the last one of an export.

A transfer holds one of a few slots. A peer that is silent for `PEER_S` seconds loses its slot; what arrived of an
import stays, as when its stream breaks. These waits are swept together with expiring leases: time in which this process
did not run does not count.

A peer that is answered while it still sends loses the status in grpc.aio: a write that fails because the call has ended
overtakes it (INTERNAL, "Internal error from Core"). So the executor continues to read and drop what the peer sends
until the peer has noticed the end: `read_on`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from contextlib import suppress
from typing import Any, Final, TypeVar

import grpc

from ferrum_rpc.errors import ExecutorError, QueueFull, Reason
from ferrum_rpc.service.records import RETRY_AFTER_S
from ferrum_rpc.service.trace_context import Context

T = TypeVar("T")

PEER_S: Final = 30.0
"""Maximum silence of a peer that owes something."""

READ_ON_BYTES: Final = 256 << 20
READ_ON_S: Final = 10.0
SILENT_S: Final = 1.0
"""Bounds for reading an answered stream: bytes, seconds, and seconds without a frame."""


class PeerSilent(QueueFull):
    """The peer owed something and was silent; the slot is free."""

    reason = Reason.QUEUE_FULL


class Peers:
    """Transfers that wait for their peers: ``since`` when each, on `time.monotonic`."""

    def __init__(self) -> None:
        self.since: dict[asyncio.Task[Any], float] = {}
        self._late: set[asyncio.Task[Any]] = set()

    async def owed(self, what: str, awaited: Awaitable[T]) -> T:
        """Wait for what the peer owes. Raises `PeerSilent`."""
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - a coroutine runs in one
        self.since[task] = time.monotonic()
        try:
            return await awaited
        except asyncio.CancelledError:
            if task not in self._late or task.uncancel():  # it is also cancelled by its peer, or by the server's end
                raise
            raise PeerSilent(
                f"{what} for {PEER_S:.0f} s; the transfer's slot is free, and what came of an import was kept",
                metadata={"peer_s": round(PEER_S)},
                retry_after_s=RETRY_AFTER_S,
            ) from None
        finally:
            self._late.discard(task)
            del self.since[task]

    def extend(self, seconds: float) -> None:
        """Extend all waits by the time in which this process received nothing."""
        for task in self.since:
            self.since[task] += seconds

    def sweep(self, now: float) -> None:
        """End the waits that have expired at ``now`` (monotonic seconds)."""
        for task, since in self.since.items():
            if since <= now - PEER_S and task not in self._late:
                self._late.add(task)
                task.cancel()


async def announce(context: Context) -> bool:
    """Announce the answer to the peer by initial metadata, whatever else it sends. False if it has disconnected."""
    try:
        await context.send_initial_metadata(())
    except Exception:  # a batch of gRPC's core that failed, whose class is private to grpcio
        return False
    return True


async def read_on(context: Context) -> None:
    """Continue to read an answered stream of requests until its peer has stopped, as the initial metadata request, or
    the bounds are reached."""
    left = READ_ON_BYTES if await announce(context) else 0
    with suppress(TimeoutError):
        async with asyncio.timeout(READ_ON_S):
            while left > 0:
                async with asyncio.timeout(SILENT_S):
                    try:
                        frame = await context.read()
                    except ExecutorError:  # not even a message
                        continue
                if frame is grpc.aio.EOF:
                    return
                left -= frame.ByteSize()
