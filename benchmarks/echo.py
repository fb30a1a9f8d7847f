"""The wire alone: a bare grpc.aio server in another process that answers a fixed number of bytes, and its caller.

It carries the bytes of a real step as bytes: no protobuf, no handlers of ours. What a step costs beyond the forward
pass and this is our bookkeeping. ``python -m benchmarks.echo [ADDRESS]`` is the server: unary as ``Call``, on a stream
as ``Stream``. It imports nothing of ferrum_rpc.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from benchmarks.process import LISTENING, served
from benchmarks.sides import Round

SERVICE = "bench.Echo"
LEAD_IN = 4
ANY_PORT = "127.0.0.1:0"
OPTIONS = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))


Method = grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]


class Echo:
    """A caller of the echo server."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._set: Method = channel.unary_unary(f"/{SERVICE}/Set")
        self._call: Method = channel.unary_unary(f"/{SERVICE}/Call")
        self._request = b""
        self._answer_bytes = 0

    @classmethod
    @asynccontextmanager
    async def open(cls) -> AsyncIterator[Echo]:
        """Start the server. The channel is bare too: what our own channel's options cost is ours."""
        async with (
            served("-m", "benchmarks.echo") as target,
            grpc.aio.insecure_channel(target, options=OPTIONS) as channel,
        ):
            yield cls(channel)

    async def prepare(self, request: bytes, answer: bytes) -> None:
        """What is exchanged from now on."""
        self._request, self._answer_bytes = request, len(answer)
        await self._set(answer)

    async def round(self, steps: int) -> Round:
        """``steps`` timed exchanges."""
        timed = Round()
        for index in range(LEAD_IN + steps):
            began = time.perf_counter()
            answer = await self._call(self._request, timeout=120.0)
            ended = time.perf_counter()
            if index >= LEAD_IN:
                timed.step_s.append(ended - began)
        assert len(answer) == self._answer_bytes
        return timed


async def _serve(address: str) -> None:
    answer = b""

    async def set_answer(request: bytes, _: Any) -> bytes:
        nonlocal answer
        answer = request
        return b""

    async def call(_request: bytes, _: Any) -> bytes:
        return answer

    async def stream(_: Any, context: Any) -> None:
        while await context.read() is not grpc.aio.EOF:
            await context.write(answer)

    server = grpc.aio.server(options=(("grpc.so_reuseport", 0), *OPTIONS))
    methods = {"Set": set_answer, "Call": call}
    handlers: dict[str, Any] = {name: grpc.unary_unary_rpc_method_handler(method) for name, method in methods.items()}
    handlers["Stream"] = grpc.stream_stream_rpc_method_handler(stream)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    port = server.add_insecure_port(address)
    target = address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}"
    await server.start()
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    print(json.dumps({"event": LISTENING, "target": target}), file=sys.stderr, flush=True)
    await stop.wait()
    await server.stop(0)


if __name__ == "__main__":
    asyncio.run(_serve(*sys.argv[1:2] or [ANY_PORT]))
