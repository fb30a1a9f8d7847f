"""R30: no caller can stop the server, with a credential or without, by what it sends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.faults.figures import Figure, Figures, at_most, quantile
from tests.faults.process import Dialled, ServerProcess, dial, serving
from tests.faults.sizes import Size
from tests.faults.slow_bodies import SlowBodies
from tests.faults.waiting import until
from tests.wiring import field, item, pb

MIB: Final = 1 << 20
SERVICE: Final = "/ferrum_rpc.executor.v1.ModelExecutor/"
HEALTH: Final = "/grpc.health.v1.Health/Check"
TOKEN: Final = (("authorization", "Bearer a-token-of-alice"),)
HEALTH_S: Final = 0.05
SLOWER: Final = 3.0
UNFOLDED: Final = 3.0
"""Times its bytes that a message may take."""
NOISE: Final = 16 * MIB
"""What the allocator swings by."""
WITHOUT: Final = 64 * MIB
"""What callers without credentials may take, all together."""
BACK_S: Final = 2.0
BUSY_S: Final = 20.0
"""The same where tests share two cores."""
PAUSE_S: Final = 0.002
CONNECTIONS: Final = 16
STREAMS: Final = 16


def messages() -> dict[str, tuple[str, bytes]]:
    """Messages of just under the limit of 1 MiB that unfold into as much as they can, and their methods."""
    room = MIB - 64
    return {
        "empty items": ("BatchPrefill", b"\x0a\x00" * (room // 2)),
        "unknown fields": ("GetStatus", b"\x78\x00" * (room // 2)),
        "token ids": ("Prefill", field(1, field(3, b"\x01" * (room - 16)))),
        "handles": ("Session", field(4, b"\x0a\x00" * (room // 2 - 8))),
        "the most items that pass": ("UnifiedForward", b"\x0a\x00" * 8000),
        "a long request id": ("Decode", field(1, field(6, b"i" * (room - 16)))),
        "a grammar": ("RegisterGrammar", b"\x08\x02" + field(2, b"(a|b)" * (room // 5 - 2))),
        "a grammar's id": ("Prefill", _named(greedy={"grammar_id": b"g" * (room - 32)})),
        "masks beside a grammar's id": (
            "Prefill",
            _named(greedy={"grammar_id": b"g" * 32, "row_mask_ids": [b""] * (room // 2 - 64)}),
        ),
        "noise": ("UnifiedForward", b"\xff" * room),
    }


def _named(**output: Any) -> bytes:
    """A request whose output names a grammar."""
    return pb.PrefillRequest(item=item([1], output=output)).SerializeToString()


async def r30_no_caller_stops_the_server(size: Size) -> Figures:
    """A token's holder sends what unfolds; then nobody in particular sends bodies without an end."""
    figures: list[Figure] = []
    facts: dict[str, object] = {}
    with TemporaryDirectory() as folder:
        tokens = Path(folder) / "tokens"
        tokens.write_text("alice a-token-of-alice\nbob a-token-of-bob\n")
        tokens.chmod(0o600)
        async with serving("--tokens", str(tokens), model="demo", fresh=True) as server, dial(server.target) as prober:
            health = health_pb2_grpc.HealthStub(prober.channel)
            async with _unfinished(server, HEALTH) as ended:  # the allocator keeps 32 MiB of what was freed
                await ended.wait()
            alone = await _health(health, size.hostile_messages)
            given: dict[str, Any] = {"server": server, "health": health, "alone": alone, "size": size, "facts": facts}
            for name, (method, data) in messages().items():
                beside = _sending(server, size.hostile_messages, method, data)
                figures += await _tried(name=name, hostile=beside, held=len(data), **given)
            for name, hostile in (
                ("bodies that do not end, without a token", _unfinished(server, SERVICE + "BatchPrefill")),
                ("health checks that do not end", _unfinished(server, HEALTH)),
                ("long health checks", _sending(server, size.hostile_messages, "", b"\x78\x00" * (MIB // 2 - 64))),
            ):
                figures += await _tried(name=name, hostile=hostile, held=WITHOUT, times=1.0, **given)
    return Figures("R30", "No caller can stop the server", tuple(figures), facts)


async def _checked(health: Any) -> float:
    at = time.perf_counter()
    await health.Check(health_pb2.HealthCheckRequest())
    return time.perf_counter() - at


async def _health(health: Any, count: int) -> float:
    """p99 of a health check where nothing else goes on."""
    waits = []
    for _ in range(max(20, count)):
        waits.append(await _checked(health))
        await asyncio.sleep(PAUSE_S)
    return quantile(waits, 0.99)


async def _tried(
    *,
    server: ServerProcess,
    health: Any,
    name: str,
    hostile: Any,
    held: int,
    alone: float,
    size: Size,
    facts: dict[str, object],
    times: float = UNFOLDED,
) -> list[Figure]:
    """Health checks and memory while ``hostile`` is at it, and the memory after. ``held``: bytes that are at the server
    at once."""
    before = server.rss_bytes()
    most = before
    waits: list[float] = []
    async with hostile as ended:
        while not ended.is_set() or len(waits) < 20:
            waits.append(await _checked(health))
            most = max(most, server.rss_bytes())
            await asyncio.sleep(PAUSE_S)
    back = BACK_S if size.absolute else BUSY_S
    with suppress(TimeoutError):
        back = await until(lambda: server.rss_bytes() - before <= NOISE, back, every_s=0.02)
    p99 = quantile(waits, 0.99)
    facts[name] = {
        "p99 of a health check ms": round(p99 * 1e3, 1),
        "memory MiB": round((most - before) / MIB, 1),
        "back after s": round(back, 2),
    }
    figures = [
        at_most(f"memory under {name}", (most - before) / MIB, (times * held + NOISE) / MIB, "MiB"),
        at_most(f"memory left after {name}", (server.rss_bytes() - before) / MIB, NOISE / MIB, "MiB"),
    ]
    if size.absolute:
        figures.append(at_most(f"p99 of a health check under {name}", p99, HEALTH_S, "s"))
    else:
        quiet = max(alone, size.p99_floor_s)
        figures.append(at_most(f"p99 of a health check under {name}, in p99s alone", p99 / quiet, SLOWER, "x"))
    return figures


@asynccontextmanager
async def _sending(server: ServerProcess, count: int, method: str, data: bytes) -> AsyncIterator[asyncio.Event]:
    """One message after the other, two at a time, until so many were sent; without a method, to the health check."""
    ended = asyncio.Event()

    async def send(client: Dialled) -> None:
        for _ in range(count // 2):
            with suppress(grpc.aio.AioRpcError):
                if method == "Session":
                    stream = client.channel.stream_stream(SERVICE + method)(iter((data,)), metadata=TOKEN)
                    await stream.code()
                else:
                    path = SERVICE + method if method else HEALTH
                    await client.channel.unary_unary(path)(data, metadata=TOKEN)

    async def both() -> None:
        async with dial(server.target) as client:
            await asyncio.gather(send(client), send(client))
        ended.set()

    task = asyncio.create_task(both())
    try:
        yield ended
    finally:
        await task


@asynccontextmanager
async def _unfinished(server: ServerProcess, path: str) -> AsyncIterator[asyncio.Event]:
    """A second of connections whose calls announce a message just under the limit and never end it."""
    host, _, port = server.target.rpartition(":")
    ended = asyncio.Event()

    connections = [SlowBodies(host, int(port), path, STREAMS, MIB - 64) for _ in range(CONNECTIONS)]
    tasks = [asyncio.create_task(each.run()) for each in connections]
    asyncio.get_running_loop().call_later(1.0, ended.set)
    try:
        yield ended
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
