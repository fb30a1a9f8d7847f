"""A stream of a cache that is answered before its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from ferrum_rpc.client import transfer
from ferrum_rpc.executor.v1 import kv_transfer_pb2 as pb


async def test_frames_are_closed_once_nobody_reads_them_however_often_the_sender_is_cancelled() -> None:
    answered, reads, ends, closed = asyncio.Event(), asyncio.Event(), asyncio.Event(), []

    class Call:
        async def write(self, frame: bytes) -> None:
            pass

        async def initial_metadata(self) -> None:
            await answered.wait()

    async def frames() -> AsyncGenerator[bytes, None]:
        try:
            reads.set()
            await asyncio.Event().wait()
            yield b""
        finally:
            await ends.wait()  # a stream of gRPC takes a few turns to end
            closed.append(True)

    call: Any = Call()
    sending = asyncio.create_task(transfer.send(call, pb.ImportKvHeader(), frames()))
    await reads.wait()
    answered.set()  # the importer refuses: the frames that are coming are not wanted any more
    for _ in range(5):
        await asyncio.sleep(0)
    sending.cancel()  # and its call ends
    for _ in range(5):
        await asyncio.sleep(0)
    ends.set()
    with pytest.raises(asyncio.CancelledError):
        await sending
    assert closed == [True]
