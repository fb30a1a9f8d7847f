"""The wire alone: a bare grpc.aio server in another process that answers a fixed number of bytes.

It carries the bytes of a real step as bytes: no protobuf, no handlers of ours. What a step costs beyond the forward
pass and this is our bookkeeping. ``python -m benchmarks.engines.echo [ADDRESS]`` is the server: unary as ``Call``, on a
stream as ``Stream``. The channel to it is bare too: what our own channel's options cost is ours.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import grpc

from benchmarks.cases import Cell
from benchmarks.compare import Round
from benchmarks.engines.process import LISTENING, served
from benchmarks.engines.ways import Way, in_calls, in_frames

SERVICE: Final = "bench.Echo"
ANY_PORT: Final = "127.0.0.1:0"
OPTIONS: Final = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))


@asynccontextmanager
async def echo_channel(address: str = ANY_PORT) -> AsyncIterator[grpc.aio.Channel]:
    """Start the server, and a channel to it."""
    async with (
        served("-m", "benchmarks.engines.echo", address) as server,
        grpc.aio.insecure_channel(server.target, options=OPTIONS) as channel,
    ):
        yield channel


class EchoCalls(Way):
    """Unary calls of the echo server, of the bytes of ``like``'s steps."""

    def __init__(self, channel: grpc.aio.Channel, like: Any) -> None:
        self._set: Any = channel.unary_unary(f"/{SERVICE}/Set")
        self._call: Any = channel.unary_unary(f"/{SERVICE}/Call")
        self._stream: Any = channel.stream_stream(f"/{SERVICE}/Stream")
        self._like = like

    async def prepare(self, cell: Cell) -> None:
        """There is nothing to make."""

    async def take(self, depth: int, steps: int) -> Round:
        return await in_calls(self._step, depth, steps)

    async def turn(self, depth: int, steps: int) -> Round:
        """Timed exchanges of the bytes that the other side's last step had."""
        await self._set(self._like.exchange[1])
        return await super().turn(depth, steps)

    async def _step(self, _: int) -> None:
        await self._call(self._like.exchange[0])


class EchoFrames(EchoCalls):
    """A stream of the echo server, of the bytes of ``like``'s steps. Its answers come in order."""

    async def prepare(self, cell: Cell) -> None:
        self._opened = self._stream()
        self._in_flight: deque[int] = deque()

    async def take(self, depth: int, steps: int) -> Round:
        return await in_frames(self._send, self._receive, depth, steps)

    async def _send(self, sequence: int) -> None:
        self._in_flight.append(sequence)
        await self._opened.write(self._like.exchange[0])

    async def _receive(self) -> tuple[int, None]:
        await self._opened.read()
        return self._in_flight.popleft(), None


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
    print(json.dumps({"event": LISTENING, "target": target}), file=sys.stderr, flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(_serve(*sys.argv[1:2] or [ANY_PORT]))
