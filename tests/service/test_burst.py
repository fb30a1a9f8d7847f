"""More calls at once than gRPC lets wait by its own defaults: none is reset, which a caller would read as CANCELLED.

Beyond 1,000 calls that wait to be accepted gRPC resets some at random. Server and client share an event loop here, and
the client starts all of its calls in one turn of it: nearly all of them wait.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable
from typing import Any

import grpc

from ferrum_rpc.executor.v1 import session_pb2
from ferrum_rpc.wire.info import SCHEMA_REVISION
from tests.serving import serve_identity
from tests.wiring import pb

CALLS = 1500
"""Of so many some sixty were reset, with gRPC's defaults."""


async def ended(*calls: Awaitable[Any]) -> Counter[object]:
    async with asyncio.timeout(60):
        answers = await asyncio.gather(*calls, return_exceptions=True)
    return Counter(each.code() if isinstance(each, grpc.aio.AioRpcError) else type(each) for each in answers)


async def test_calls_that_begin_at_once_are_all_answered() -> None:
    async with serve_identity() as served:
        calls = [served.executor.GetStatus(pb.GetStatusRequest()) for _ in range(CALLS)]
        assert await ended(*calls) == {pb.GetStatusResponse: CALLS}


async def test_sessions_that_begin_at_once_are_all_welcome() -> None:
    async with serve_identity(max_leases=CALLS) as served:
        hello = session_pb2.SessionRequest(step_id=1, hello=session_pb2.SessionHello(client_revision=SCHEMA_REVISION))

        async def begin(call: Any) -> str:
            await call.write(hello)
            return (await call.read()).WhichOneof("frame")

        calls = [served.executor.Session() for _ in range(CALLS)]
        assert await ended(*map(begin, calls)) == {str: CALLS}

        async def end(call: Any) -> str:
            """Wholly: gRPC hands what is left of a call to whatever loop there is, the next test's too."""
            await call.done_writing()
            while await call.read() is not grpc.aio.EOF:
                pass
            return (await call.code()).name

        assert await ended(*map(end, calls)) == {str: CALLS}
