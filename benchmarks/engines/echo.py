"""The wire alone: a bare grpc.aio server in another process that answers a fixed number of bytes.

It carries the bytes of a real step as bytes: no protobuf, no handlers of ours. What a step costs beyond the forward
pass and this is our bookkeeping. ``python -m benchmarks.engines.echo [ADDRESS]`` is the server: unary as ``Call``, on a
stream as ``Stream``. The channel to it is bare too: what our own channel's options cost is ours.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import grpc

from benchmarks.engines.process import LISTENING, served

SERVICE: Final = "bench.Echo"
ANY_PORT: Final = "127.0.0.1:0"
OPTIONS: Final = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))


@asynccontextmanager
async def echo_channel(address: str = ANY_PORT) -> AsyncIterator[grpc.aio.Channel]:
    """Start the server, and a channel to it."""
    async with (
        served("-m", "benchmarks.engines.echo", address) as target,
        grpc.aio.insecure_channel(target, options=OPTIONS) as channel,
    ):
        yield channel


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
