"""R7: what the client repeats by itself is safe, and bounded. Counted at the far end of the wire."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from ferrum_rpc.client import NEVER_RESEND, ExecutorClient
from ferrum_rpc.errors import ExecutorError
from tests.faults.figures import Figures, at_least, at_most, exactly
from tests.faults.sizes import Size
from tests.serving import serve_identity

MOST_ATTEMPTS = 4


class FailingServer(grpc.GenericRpcHandler):
    """Passes calls on to an executor, but those of ``method``: they fail with ``code``, and are counted."""

    def __init__(self, upstream: str) -> None:
        self.method = ""
        self.code = grpc.StatusCode.UNAVAILABLE
        self.attempts = 0
        self._channel = grpc.aio.insecure_channel(upstream)

    async def close(self) -> None:
        await self._channel.close()

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        async def answer(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
            if details.method.endswith(f"/{self.method}"):
                self.attempts += 1
                await context.abort(self.code, "the network is not what it was")
            return await self._channel.unary_unary(details.method)(request)

        return grpc.unary_unary_rpc_method_handler(answer)


@asynccontextmanager
async def failing(upstream: str) -> AsyncIterator[tuple[FailingServer, str]]:
    handler, server = FailingServer(upstream), grpc.aio.server()
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield handler, f"127.0.0.1:{port}"
    finally:
        await server.stop(None)
        await handler.close()


async def r7_retries_are_safe(size: Size) -> Figures:
    """Let every code fail every attempt, count the attempts of one call; then fail a whole burst of calls."""
    attempts: Counter[str] = Counter()
    burst = 10 * size.retried_calls
    async with serve_identity() as served, failing(served.target) as (far_end, target):
        for code in grpc.StatusCode:
            if code is grpc.StatusCode.OK:
                continue
            for _ in range(size.retried_calls):
                # A client of its own for each call: the throttle of an earlier failure must not flatter the count.
                async with ExecutorClient(target, resend=NEVER_RESEND, release_timeout_s=0.1) as client:
                    await client.info()
                    sequence = client.sequence()
                    far_end.code, far_end.method, far_end.attempts = code, "Prefill", 0
                    try:
                        await sequence.prefill([1, 2, 3])
                        attempts["answered"] += 1
                    except ExecutorError:
                        attempts[code.name] = max(attempts[code.name], far_end.attempts)
                    far_end.method = ""
        async with ExecutorClient(target, resend=NEVER_RESEND) as client:
            await client.info()
            far_end.code, far_end.method, far_end.attempts = grpc.StatusCode.UNAVAILABLE, "GetStatus", 0
            for _ in range(burst):
                try:
                    await client.status()
                    attempts["answered"] += 1
                except ExecutorError:
                    pass
            throttled = far_end.attempts
    others = max(count for name, count in attempts.items() if name != "UNAVAILABLE")
    return Figures(
        "R7",
        "Retries are safe by default",
        (
            at_most("attempts of a call that fails UNAVAILABLE", attempts["UNAVAILABLE"], MOST_ATTEMPTS),
            at_least("attempts of it, so that there is a retry at all", attempts["UNAVAILABLE"], 2),
            exactly("attempts of a call that fails with another code", others, 1),
            exactly("calls answered by a server that answers none", attempts["answered"], 0),
            at_most("attempts per call in a long outage", throttled / burst, 2.0),
        ),
        {"attempts": dict(attempts), "calls in the outage": burst},
    )
