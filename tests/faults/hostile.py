"""R30: no caller can stop the server, with a credential or without, by what it sends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import grpc

from ferrum_rpc.executor.v1 import kv_transfer_pb2, types_pb2
from tests.faults.figures import Figure, Figures, at_most, quantile
from tests.faults.models import Model
from tests.faults.sizes import Size
from tests.faults.slow_bodies import SlowBodies
from tests.support.process import Dialled, ServerProcess, dial, dialled
from tests.support.tokens import bearer, token_file
from tests.support.waiting import until
from tests.support.wiring import field, item, pb

kt = kv_transfer_pb2
MIB: Final = 1 << 20
PACKAGE: Final = "/ferrum_rpc.executor.v1."
SERVICE: Final = PACKAGE + "ModelExecutor/"
SESSION: Final = SERVICE + "Session"
HEALTH: Final = "/grpc.health.v1.Health/Check"
ALICE: Final = "a-token-of-alice"
HEALTH_S: Final = 0.05
SLOWER: Final = 3.0
UNFOLDED: Final = 3.0
"""Times its bytes that a message may take."""
NOISE: Final = 16 * MIB
"""What the allocator swings by."""
WARM_ROUNDS: Final = 5
"""At most: until one adds little. How much a server reads in one depends on what else the machine does."""
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
    chunk = kt.KvChunk(parts=[kt.KvPart()] * (room // 2 - 8))
    layout = kt.ImportKvHeader(layout=kt.KvLayout(tensors=[types_pb2.KvTensor()] * (room // 2 - 16)))
    moved = {
        "parts of a chunk": kt.ImportKvRequest(chunk=chunk),
        "tensors of a layout": kt.ImportKvRequest(header=layout),
    }
    calls = {
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
    return {name: (f"ModelExecutor/{method}", data) for name, (method, data) in calls.items()} | {
        name: ("KvTransfer/ImportKv", message.SerializeToString()) for name, message in moved.items()
    }


def _named(**output: Any) -> bytes:
    """A request whose output names a grammar."""
    return pb.PrefillRequest(item=item([1], output=output)).SerializeToString()


async def r30_no_caller_stops_the_server(size: Size, model: Model | None = None) -> Figures:
    """A token's holder sends what unfolds; then nobody in particular sends bodies without an end."""
    figures: list[Figure] = []
    facts: dict[str, object] = {}
    model = model or Model({"path": "demo"})
    with token_file(f"alice {ALICE}", "bob a-token-of-bob") as tokens:
        flags = (*model.flags(), "--tokens", str(tokens))
        async with dialled(*flags, model=model.path, fresh=size.absolute) as (server, prober):
            for _ in range(WARM_ROUNDS):  # the allocator keeps 32 MiB of what was freed
                cold = server.rss_bytes()
                async with unfinished(server, HEALTH) as ended:
                    await ended.wait()
                if await server.settled_rss_bytes() - cold < NOISE // 4:
                    break
            trial = Trial(server, size, {"a health check": prober.health_check})
            await trial.alone()
            for name, (method, data) in messages().items():
                beside = sending(server, size.hostile_messages, PACKAGE + method, data)
                figures += await trial.of(name, beside, len(data))
            for name, hostile in (
                ("bodies that do not end, without a token", unfinished(server, SERVICE + "BatchPrefill")),
                ("health checks that do not end", unfinished(server, HEALTH)),
                ("long health checks", sending(server, size.hostile_messages, HEALTH, b"\x78\x00" * (MIB // 2 - 64))),
            ):
                figures += await trial.of(name, hostile, WITHOUT, times=1.0)
            facts |= trial.facts
    return Figures("No caller can stop the server", *figures, facts=facts)


class Trial:
    """What honest callers and the memory of a server make of a hostile one. ``probes``: honest calls by their name.
    ``noise``: bytes that the allocator swings by. ``facts``: what was measured, for the report."""

    def __init__(
        self, server: ServerProcess, size: Size, probes: dict[str, Callable[[], Awaitable[Any]]], noise: int = NOISE
    ) -> None:
        self._noise = noise
        self._server = server
        self._size = size
        self._probes = probes
        self._alone: dict[str, float] = {}
        self.facts: dict[str, object] = {}

    async def alone(self) -> None:
        """Measure the probes while nothing else goes on."""
        waits = await self._probed(lambda count: count >= max(20, self._size.hostile_messages), lambda: None)
        self._alone = {name: quantile(each, 0.99) for name, each in waits.items()}

    async def _probed(self, over: Callable[[int], bool], after_each: Callable[[], None]) -> dict[str, list[float]]:
        """Seconds of each call, round after round, until it is ``over`` after so many rounds."""
        waits: dict[str, list[float]] = {name: [] for name in self._probes}
        count = 0
        while not over(count):
            for name, probe in self._probes.items():
                at = time.perf_counter()
                await probe()
                waits[name].append(time.perf_counter() - at)
            after_each()
            count += 1
            await asyncio.sleep(PAUSE_S)
        return waits

    async def of(
        self,
        name: str,
        hostile: Any,
        held: int,
        *,
        times: float = UNFOLDED,
        least: int = 20,
        within_s: float | None = None,
    ) -> list[Figure]:
        """The probes, each ``least`` times or more, and memory while ``hostile`` is at it, and the memory after.
        ``held``: bytes that are at the server at once, which may take ``times`` as much there. ``within_s``: seconds of
        a probe other than the health check, in place of a ratio."""
        server, size = self._server, self._size
        before = most = server.rss_bytes()

        def look() -> None:
            nonlocal most
            most = max(most, server.rss_bytes())

        async with hostile as ended:
            waits = await self._probed(lambda count: ended.is_set() and count >= least, look)
        back = BACK_S if size.absolute else BUSY_S
        with suppress(TimeoutError):  # the figure below reports it
            back = await until(lambda: server.rss_bytes() - before <= self._noise, back, every_s=0.02)
        figures = [
            at_most(f"memory under {name}", (most - before) / MIB, (times * held + self._noise) / MIB, "MiB"),
            at_most(f"memory left after {name}", (server.rss_bytes() - before) / MIB, self._noise / MIB, "MiB"),
        ]
        p99s = {probe: quantile(each, 0.99) for probe, each in waits.items()}
        for probe, p99 in p99s.items():
            bound = HEALTH_S if size.absolute and probe == "a health check" else within_s
            if bound is not None:
                figures.append(at_most(f"p99 of {probe} under {name}", p99, bound, "s"))
            else:
                quiet = max(self._alone[probe], size.p99_floor_s)
                figures.append(at_most(f"p99 of {probe} under {name}, in p99s alone", p99 / quiet, SLOWER, "x"))
        self.facts[name] = {f"p99 of {probe} ms": round(p99 * 1e3, 1) for probe, p99 in p99s.items()} | {
            "memory MiB": round((most - before) / MIB, 1),
            "back after s": round(back, 2),
        }
        return figures


@asynccontextmanager
async def sending(
    server: ServerProcess, count: int, path: str, data: bytes, *, streams: bool = False
) -> AsyncIterator[asyncio.Event]:
    """Alice's messages, one after the other, two at a time, until so many were sent to the method of a ``path``.
    ``streams``: it answers with a stream."""
    metadata = bearer(ALICE)

    async def send(client: Dialled) -> None:
        for _ in range(count // 2):
            with suppress(grpc.aio.AioRpcError):
                if path == SESSION:
                    stream = client.channel.stream_stream(path)(iter((data,)), metadata=metadata)
                    await stream.code()
                elif streams:
                    async for _ in client.channel.unary_stream(path)(data, metadata=metadata):
                        pass
                else:
                    await client.channel.unary_unary(path)(data, metadata=metadata)

    async with dial(server.target) as client, going_on(send(client), send(client)) as ended:
        yield ended


@asynccontextmanager
async def going_on(*work: Coroutine[Any, Any, object]) -> AsyncIterator[asyncio.Event]:
    """All of it, which has ended when the event is set, and at the end."""
    ended = asyncio.Event()
    tasks = asyncio.gather(*work)
    tasks.add_done_callback(lambda _: ended.set())
    try:
        yield ended
    finally:
        await tasks


@asynccontextmanager
async def unfinished(server: ServerProcess, path: str) -> AsyncIterator[asyncio.Event]:
    """A second of connections whose calls announce a message just under the limit and never end it."""
    host, _, port = server.target.rpartition(":")
    ended = asyncio.Event()
    bodies = [SlowBodies(host, int(port), path, STREAMS, MIB - 64) for _ in range(CONNECTIONS)]
    tasks = [asyncio.create_task(each.run()) for each in bodies]
    asyncio.get_running_loop().call_later(1.0, ended.set)
    try:
        yield ended
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
