"""A gRPC proxy that loses what it is asked to lose.

Every call goes on as raw bytes: the executor is the real one, and its answer is what goes missing.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from ferrum_rpc.executor.v1 import model_executor_pb2

LEASE_CALLS = ("AcquireLease", "KeepAlive", "RevokeLease")


class Proxy(grpc.GenericRpcHandler):
    """Forwards unary calls to ``upstream``. ``faults`` are taken one per call, in order:

    ``""`` forward; ``lose`` forward and lose the answer; ``refuse`` do not forward, fail as a dead connection does;
    ``garble`` forward and drop the answer's last result.
    With ``only`` set, calls of other methods pass untouched; without, those of the lease do, which come when they will.
    """

    def __init__(self, upstream: str) -> None:
        self.faults: deque[str] = deque()
        self.only: str | None = None
        self.code = grpc.StatusCode.INTERNAL  # gRPC's own retries leave it alone: the client's policy is on trial
        self.calls: Counter[str] = Counter()
        self.lost = 0
        self._channel = grpc.aio.insecure_channel(upstream)

    async def close(self) -> None:
        await self._channel.close()

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        async def answer(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
            return await self._answer(details.method, request, context)

        return grpc.unary_unary_rpc_method_handler(answer)

    async def _answer(self, method: str, request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        name = method.rpartition("/")[2]
        self.calls[name] += 1
        on_trial = name == self.only or (self.only is None and name not in LEASE_CALLS)
        fault = self.faults.popleft() if self.faults and on_trial else ""
        if fault == "refuse":
            self.lost += 1
            await context.abort(self.code, "connection reset")
        try:
            reply = await self._channel.unary_unary(method)(request, timeout=context.time_remaining())
        except grpc.aio.AioRpcError as error:
            trailing = tuple(error.trailing_metadata() or ())
            await context.abort(error.code(), error.details() or "", trailing)
            raise
        if fault == "lose":
            self.lost += 1
            await context.abort(self.code, "connection reset")
        if fault == "garble":
            response = model_executor_pb2.UnifiedForwardResponse.FromString(reply)
            del response.results[-1]
            return response.SerializeToString()
        return bytes(reply)


@asynccontextmanager
async def proxied(upstream: str) -> AsyncIterator[tuple[Proxy, str]]:
    """A proxy before an executor, and where it listens."""
    proxy = Proxy(upstream)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((proxy,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield proxy, f"127.0.0.1:{port}"
    finally:
        await server.stop(None)
        await proxy.close()
