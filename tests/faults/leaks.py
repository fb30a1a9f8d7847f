"""R15: nothing leaks, however a call ends.

One thing does, and is told apart: a call whose deadline passes takes some bytes with it in a bare grpc.aio server too
(55 to 110 a call with 1.76 and 1.85). No Python object is left, so they are of its C or Cython part; which, is not
known. `_expired` measures both. The endings below show that of ours nothing is left behind by such a call.
"""

from __future__ import annotations

import asyncio
import sys
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final

import grpc

from ferrum_rpc.executor.v1 import executor_control_pb2, session_pb2
from ferrum_rpc.service.handles import TOMBSTONES
from ferrum_rpc.service.replay import PLAIN_BYTES, RECORDS
from tests.faults.endings import ENDINGS, World
from tests.faults.figures import Figures, at_least, at_most, exactly
from tests.faults.gate import StepGate
from tests.faults.process import ROOT, Dialled, ServerProcess, dial, serving
from tests.faults.raw_session import raw_session
from tests.faults.sizes import Size
from tests.faults.waiting import until
from tests.serving import serve_identity
from tests.wiring import item, pb, prefill

SHORT_LEASE_S: Final = 0.5
SETTLED_S: Final = 5.0
"""For the short lease, a sweep, and a machine that is busy elsewhere."""
FILL_BATCH: Final = 256
CALLS_OF_A_LIFE: Final = 4
ENTRIES: Final = RECORDS // PLAIN_BYTES
"""More answers than are recorded."""

WARM_LIVES: Final = ENTRIES * 11 // 20
"""Each leaves two recorded answers. Only when the last answer of the quick filling has made room for one of a life does
memory stand still: measured, 300 bytes a life until then and none after it."""
WARM_CALLS: Final = 5_000
"""After 1,000 calls a process of this size still moves by 0.4 MB either way, after these by 0.15."""

LEAK_PER_100_000: Final = 1 << 20
"""What R15 allows 100,000 calls."""
HURRIED_S: Final = 0.0005
NOISE_BYTES: Final = 512 << 10
"""What allocators and page granularity move a process by without a leak: no bound is held below it."""


async def r15_nothing_leaks(size: Size) -> Figures:
    """Every ending in turn: afterwards no sequence, no block, no lease, no session and no queued work is left."""
    gate = StepGate()
    left: Counter[str] = Counter()
    async with serve_identity(
        stage=gate, kv_blocks=64, lease_ttl_s=SHORT_LEASE_S, min_lease_ttl_s=SHORT_LEASE_S
    ) as served:
        world = World(served, gate)
        state = served.server.state
        for _ in range(size.endings):
            for ending in ENDINGS:
                await ending(world)
                try:
                    await until(lambda: _clean(state), SETTLED_S)
                except TimeoutError:
                    left[ending.__name__] += 1
                    await served.control.Reset(executor_control_pb2.ResetRequest())
            await served.check()
        created, released = state.counters.sequences_created, state.counters.sequences_released
    grown, warm = await _growth(size.leak_calls, whole_lives=size.leak_whole_lives)
    facts = await _expired(size.expired_calls) if size.expired_calls else {}
    bound = max(NOISE_BYTES, round(LEAK_PER_100_000 * size.leak_calls / 100_000))
    return Figures(
        "R15",
        "Nothing leaks",
        (
            at_least("endings", len(ENDINGS), 13),
            exactly("sequences created and not released", created - released, 0),
            exactly("endings that left something behind", sum(left.values()), 0),
            at_most("memory that calls after warm-up took", grown, bound, "bytes"),
        ),
        {"rounds": size.endings, "sequences": created, "calls": size.leak_calls, "rss bytes": warm, "left": dict(left)}
        | facts,
    )


def _clean(state: Any) -> bool:
    """Nothing is held, and nothing waits."""
    pressure = state.pressure()
    return (
        pressure.sequences == 0
        and pressure.free_blocks == pressure.total_blocks
        and pressure.queued_items == 0
        and len(state.leases) == 0
        and state.sessions == 0
        and state.counters.sequences_created == state.counters.sequences_released
    )


async def _growth(calls: int, *, whole_lives: bool) -> tuple[int, int]:
    """Bytes by which a server process grew over so many calls after warm-up, and its size after warm-up. With
    ``whole_lives`` calls create and release sequences, and what is bounded by design (recorded answers, tombstones) is
    filled first; else they are calls on sequences that live from before the warm-up on: each has its most recorded
    answers by then, 21 KB of them."""
    flags = ("--replay-bytes", "64KiB", "--max-sequences", "512", "--max-batch-items", str(FILL_BATCH))
    async with serving(*flags, kv_blocks=1024, fresh=True) as server, dial(server.target) as client:
        if whole_lives:
            await _fill(client)
            await _whole_lives(client, WARM_LIVES * CALLS_OF_A_LIFE)
            warm = await _settled(server)
            await _whole_lives(client, calls)
        else:
            handles = [await prefill(client, [1, 2, 3, number]) for number in range(8)]
            handles = await _long_lives(client, handles, max(WARM_CALLS, calls // 5))
            warm = await _settled(server)
            await _long_lives(client, handles, calls)
        return await _settled(server) - warm, warm


async def _settled(server: ServerProcess) -> int:
    """Its size, once what was freed has gone back."""
    await asyncio.sleep(0.3)
    return server.rss_bytes()


async def _fill(client: Dialled) -> None:
    """Twice as many sequences as are remembered, each with a recorded creation and a recorded step."""
    async with raw_session(client.executor) as session:
        for first in range(0, 2 * max(ENTRIES, TOMBSTONES), FILL_BATCH):
            items = [item([1], request_id=f"fill:{first + number}") for number in range(FILL_BATCH)]
            answer = await session.ask(forward=session_pb2.SessionForward(items=items))
            items = [item([1], each.output.handle, request_id="d") for each in answer.forward.results]
            answer = await session.ask(forward=session_pb2.SessionForward(items=items))
            handles = [each.output.handle for each in answer.forward.results]
            await session.ask(release=session_pb2.SessionRelease(handles=handles))
        await session.ask(close=session_pb2.SessionClose())


async def _whole_lives(client: Dialled, count: int) -> None:
    """Good and bad calls of sequences from their creation to their release, eight at a time."""
    run, left = uuid.uuid4().hex, count

    async def worker(number: int) -> None:
        nonlocal left
        while left > 0:
            left -= CALLS_OF_A_LIFE
            handle = await prefill(client, [1, 2, 3, number], request_id=f"{run}:{left}")
            handle = await _step(client, handle, "d")
            await client.executor.Release(pb.ReleaseRequest(handle=handle))

    await asyncio.gather(*[worker(number) for number in range(8)])


async def _long_lives(client: Dialled, handles: list[Any], count: int) -> list[Any]:
    """Good and bad calls on these sequences, and their handles afterwards."""
    run, left = uuid.uuid4().hex, count

    async def worker(handle: Any) -> Any:
        nonlocal left
        while left > 0:
            left -= 2
            handle = await _step(client, handle, f"{run}:{left}", truncate_to=4)
        return handle

    return await asyncio.gather(*[worker(handle) for handle in handles])


async def _step(client: Dialled, handle: Any, request_id: str, **fields: Any) -> Any:
    """Two calls: a step, and one with the handle that it has made stale."""
    request = pb.DecodeRequest(item=item([4], handle, request_id=request_id, **fields))
    answer = await client.executor.Decode(request)
    with suppress(grpc.aio.AioRpcError):
        await client.executor.Decode(pb.DecodeRequest(item=item([4], handle)))
    return answer.output.handle


async def _expired(calls: int) -> dict[str, str]:
    """Bytes that a call takes whose caller does not wait, in our server and in one of grpc.aio alone."""
    async with serving(fresh=True) as server, dial(server.target) as client:
        handle = await prefill(client, [1, 2, 3])
        request = pb.ReserveKvRequest(handle=handle)
        ours = await _lost(server, lambda: client.executor.ReserveKv(request, timeout=HURRIED_S), calls)
    echo = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.engines.echo", cwd=ROOT, stderr=asyncio.subprocess.PIPE
    )
    bare = ServerProcess(echo)
    try:
        async with grpc.aio.insecure_channel((await bare.event("listening"))["target"]) as channel:
            call = channel.unary_unary("/bench.Echo/Call")
            grpcs = await _lost(bare, lambda: call(b"", timeout=HURRIED_S), calls)
    finally:
        await bare.kill()
    return {"bytes lost by an expired call": f"{ours:.0f}; in a bare grpc.aio server: {grpcs:.0f}"}


async def _lost(server: ServerProcess, call: Callable[[], Awaitable[Any]], calls: int) -> float:
    """Bytes of the server's memory per expired call, after a fifth as many to warm up."""
    expired = 0

    async def worker(count: int) -> None:
        nonlocal expired
        for _ in range(count):
            try:
                await call()
            except grpc.aio.AioRpcError:
                expired += 1

    await asyncio.gather(*[worker(calls // 40) for _ in range(8)])
    before, expired = server.rss_bytes(), 0
    await asyncio.gather(*[worker(calls // 8) for _ in range(8)])
    return (server.rss_bytes() - before) / max(1, expired)
