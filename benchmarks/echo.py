"""The wire alone: a bare grpc.aio server in another process that answers a fixed number of bytes, and its caller.

It carries the bytes of a real step as bytes: no protobuf, no handlers of ours. What a step costs beyond the forward
pass and this is our bookkeeping. ``python -m benchmarks.echo`` is the server; it imports nothing of ferrum_rpc.
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


async def _serve() -> None:
    answer = b""

    async def set_answer(request: bytes, _: Any) -> bytes:
        nonlocal answer
        answer = request
        return b""

    async def call(_request: bytes, _: Any) -> bytes:
        return answer

    server = grpc.aio.server(options=(("grpc.so_reuseport", 0), *OPTIONS))
    methods = {"Set": set_answer, "Call": call}
    handlers: dict[str, Any] = {name: grpc.unary_unary_rpc_method_handler(method) for name, method in methods.items()}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    print(json.dumps({"event": LISTENING, "target": f"127.0.0.1:{port}"}), file=sys.stderr, flush=True)
    await stop.wait()
    await server.stop(0)


if __name__ == "__main__":
    asyncio.run(_serve())
