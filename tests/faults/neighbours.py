"""R30, between tenants: what one takes, another does not lose.

A step takes `STEP_MS` by the clock, as a device's does, and computes next to nothing, so what is measured is whose turn
it is, and not how many cores this machine has to spare. One tenant holds all that it gets of everything and keeps the
queue full; the other goes on as if alone.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any, Final

import grpc

from ferrum_rpc.executor.v1 import forward_pb2, session_pb2, types_pb2
from ferrum_rpc.wire.info import SCHEMA_REVISION
from ferrum_rpc.wire.status import error_from_rpc
from tests.faults.crowd import TEXTS, crowded
from tests.faults.figures import Figures, at_least, at_most, exactly, milliseconds, quantile
from tests.faults.models import Model
from tests.faults.sizes import Size
from tests.support.process import Dialled, ServerProcess, dial, serving
from tests.support.tokens import token_file
from tests.support.waiting import until
from tests.support.wiring import full, item, pb

STEP_MS: Final = 20
TOGETHER: Final = 8
"""Items of a step, and of the large tenant's calls."""
HOPELESS_S: Final = 0.5
QUEUE: Final = 1024
CALLS: Final = QUEUE // 2 // TOGETHER + 16
"""Calls of the large tenant at a time: its share of the queue, and some that are refused."""
TURNS: Final = 4
RUNNING: Final = 16
RUN_CALLS: Final = 12
"""Calls of the large tenant with `TOGETHER` runs each: its share of the places, over and over."""
RUN_TOKENS: Final = 14
"""With the token before them they fit into one block."""
FEW_TOKENS: Final = 2
"""Of a run of the other."""
LEASES: Final = 32
BLOCKS: Final = 4096
SLOTS: Final = 2048
"""Of which the large tenant has fewer than its share, as of sequences."""
STEP_TOKENS: Final = 64
"""Of a step, of which schedulers' prompts fill what their runs leave."""
SCHEDULERS: Final = 8
"""What one has to do at a time fits into a step, so one alone keeps nobody waiting. With so many a step takes 2.1 times
as long as alone, and 10 times as long where the first that comes is the first that goes."""
REPLAY_BYTES: Final = 64 << 10


class Tenant:
    """One caller on a connection of its own."""

    def __init__(self, client: Dialled, name: str) -> None:
        self._client = client.by(f"secret-{name}")
        self.refusals: Counter[str] = Counter()
        self._ids = itertools.count()

    async def call(self, method: str, request: Any) -> Any:
        """The answer, or None where it was refused, which is counted."""
        try:
            return await getattr(self._client.executor, method)(request)
        except grpc.aio.AioRpcError as failure:
            error = error_from_rpc(failure)
            self.refusals[error.reason] += 1
            if error.retry_after_s:
                await asyncio.sleep(error.retry_after_s)
            return None

    async def status(self) -> Any:
        """`GetStatus`."""
        return await self.call("GetStatus", pb.GetStatusRequest())

    async def session(self, lease_id: str) -> Any:
        """An open stream, or None where it was refused."""
        stream = self._client.executor.Session()
        hello = session_pb2.SessionHello(client_revision=SCHEMA_REVISION, lease_id=lease_id)
        try:
            await stream.write(session_pb2.SessionRequest(step_id=1, hello=hello))
            return stream if await stream.read() is not grpc.aio.EOF else None
        except grpc.aio.AioRpcError as failure:
            self.refusals[error_from_rpc(failure).reason] += 1
            return None

    async def sequences(self, count: int) -> list[types_pb2.KvHandle]:
        """Fresh ones, of one token."""
        handles: list[types_pb2.KvHandle] = []
        while len(handles) < count:
            answer = await self.call("BatchPrefill", pb.BatchPrefillRequest(items=[item([1])] * TOGETHER))
            handles += [each.output.handle for each in answer.results]
        return handles

    async def latencies(
        self, count: int, handle: types_pb2.KvHandle, run: forward_pb2.Run | None = None
    ) -> tuple[list[float], types_pb2.KvHandle]:
        """Seconds of so many steps or runs, one after the other; of fewer, where they take longer than any figure
        allows."""
        seconds: list[float] = []
        while len(seconds) < count and sum(seconds) < count * HOPELESS_S:
            began = time.monotonic()
            request_id = f"run {next(self._ids)}" if run else ""
            request = item([2], handle, truncate_to=1, run=run, request_id=request_id)
            answer = await self.call("Prefill", pb.PrefillRequest(item=request))
            seconds.append(time.monotonic() - began)
            handle = answer.output.handle
        return seconds, handle

    @asynccontextmanager
    async def flooding(
        self, handles: list[types_pb2.KvHandle], run: forward_pb2.Run | None = None
    ) -> AsyncIterator[None]:
        """Callers with `TOGETHER` sequences each, of which they feed a step or a ``run`` at a time, until the end."""

        async def flood(first: int) -> None:
            mine = handles[first : first + TOGETHER]
            while True:
                ids = [f"flood {next(self._ids)}" if run else "" for _ in mine]
                items = [item([3], each, truncate_to=1, run=run, request_id=ids[at]) for at, each in enumerate(mine)]
                answer = await self.call("BatchPrefill", pb.BatchPrefillRequest(items=items))
                if answer is not None:
                    mine = handles[first : first + TOGETHER] = [each.output.handle for each in answer.results]

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(flood(first)) for first in range(0, len(handles), TOGETHER)]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()


async def until_refused(ask: Callable[[], Awaitable[Any]]) -> list[Any]:
    """All that is given."""
    given = []
    while (each := await ask()) is not None:
        given.append(each)
    return given


@asynccontextmanager
async def _with_tenants(model: Model, *flags: str) -> AsyncIterator[ServerProcess]:
    """A server whose steps take `STEP_MS`, with two tenants."""
    flags = (*model.flags(**({"state_slots": SLOTS} if model.recurrent else {})), *flags)
    flags += ("--failpoints", f"before_forward=delay:{STEP_MS}", "--max-batch-items", str(TOGETHER))
    with token_file("large secret-large", "small secret-small") as tokens:
        async with serving(*flags, "--tokens", str(tokens), model=model.path, kv_blocks=BLOCKS) as server:
            yield server


async def _beside_schedulers(model: Model, count: int) -> tuple[list[float], list[float]]:
    """Seconds of the small one's steps, alone and alongside schedulers of the large one with more texts than fit."""
    flags = ("--max-running", str(RUNNING), "--max-batch-tokens", str(STEP_TOKENS))
    async with _with_tenants(model, *flags) as server, dial(server.target) as client:
        small = Tenant(client, "small")
        [own, *_] = await small.sequences(1)
        alone, own = await small.latencies(count, own)
        async with crowded(server.target, 0, 0, TEXTS, SCHEDULERS, "secret-large"):
            beside, _ = await small.latencies(count, own)
    assert not small.refusals
    return alone, beside


async def r30_a_neighbour_takes_its_share_alone(size: Size, model: Model | None = None) -> Figures:
    """Hold everything, fill the queue, and ask for little beside it."""
    flags = ("--max-queued-items", str(QUEUE), "--max-sequences", str(4 * QUEUE), "--max-leases", str(LEASES))
    flags += ("--max-sessions", str(LEASES), "--replay-bytes", str(REPLAY_BYTES), "--max-running", str(RUNNING))
    alone: list[float] = []
    beside: list[float] = []
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(_with_tenants(model or Model({"path": "identity"}), *flags))
        large, small = [
            Tenant(await stack.enter_async_context(dial(server.target)), name) for name in ("large", "small")
        ]

        (own,) = (await small.sequences(1))[:1]
        kept = pb.PrefillRequest(item=item([1], request_id="kept", output=full()))
        await small.call("Prefill", kept)
        many = await large.sequences(CALLS * TOGETHER)
        runners = await large.sequences(RUN_CALLS * TOGETHER)

        # its share of everything, and beyond
        lease = pb.AcquireLeaseRequest()
        leases = await until_refused(lambda: large.call("AcquireLease", lease))
        sessions = await until_refused(lambda: large.session(leases[0].lease_id))
        long = pb.PrefillRequest(item=item([1] * 4096))
        held = await until_refused(lambda: large.call("Prefill", long))
        for number in range(2 * REPLAY_BYTES // (1024 * TOGETHER)):
            items = [item([1], each, request_id=str(number), output=full()) for each in many[:TOGETHER]]
            answer = await large.call("BatchPrefill", pb.BatchPrefillRequest(items=items))
            many[:TOGETHER] = [each.output.handle for each in answer.results]

        mine = [await small.call("AcquireLease", lease) for _ in range(LEASES // 4)]
        opened = [await small.session(mine[0].lease_id) for _ in range(LEASES // 4)]
        again = await small.call("Prefill", kept)
        for _ in range(TURNS):
            some, own = await small.latencies(size.neighbour_calls // TURNS, own)
            alone += some
            async with large.flooding(many):
                await until(lambda: large.refusals["QUEUE_FULL"] > 0, 60)
                some, own = await small.latencies(size.neighbour_calls // TURNS, own)
                beside += some
            large.refusals["QUEUE_FULL"] = 0
        few, run = forward_pb2.Run(max_tokens=FEW_TOKENS), forward_pb2.Run(max_tokens=RUN_TOKENS)
        runs_alone, own = await small.latencies(size.neighbour_runs, own, few)
        async with large.flooding(runners, run):
            async with asyncio.timeout(60):
                while (await small.status()).pressure.running_items < RUNNING // 2:
                    pass
            runs_beside, own = await small.latencies(size.neighbour_runs, own, few)
        small_refusals = small.refusals.total()
        for each in (*sessions, *opened):
            with suppress(AttributeError):
                each.cancel()
    texts_alone, beside_texts = await _beside_schedulers(model or Model({"path": "demo-draft"}), size.neighbour_runs)
    blocks = len(held) * 256 + len(many) + len(runners)
    ratio, ratio_of_runs, ratio_of_texts = [
        quantile(one, 0.99) / max(quantile(other, 0.99), size.p99_floor_s)
        for one, other in ((beside, alone), (runs_beside, runs_alone), (beside_texts, texts_alone))
    ]
    return Figures(
        "A neighbour takes its share alone",
        at_most("p99 of a step beside a full queue, in those alone", ratio, 3, "x"),
        at_most("p99 of a run alongside more runs than a caller's share, in those alone", ratio_of_runs, 3, "x"),
        at_most("p99 of a step alongside full schedulers with grammars, in those alone", ratio_of_texts, 3, "x"),
        exactly("refusals to the one that asks for little", small_refusals, 0),
        exactly("its recorded rows, after another recorded twice the budget", len(again.row_blocks), 1),
        at_most("leases of the large one", len(leases), LEASES // 2),
        at_most("sessions of the large one", len(sessions), LEASES // 2),
        at_most("share of the cache's blocks of the large one", blocks / BLOCKS, 0.5),
        at_least("kinds of refusals that the large one got", len(large.refusals), 2),
        facts={
            "steps": len(beside),
            "p50 and p99 alone, ms": milliseconds(alone, 0.5, 0.99),
            "p50 and p99 beside, ms": milliseconds(beside, 0.5, 0.99),
            "p50 and p99 of runs alone, ms": milliseconds(runs_alone, 0.5, 0.99),
            "p50 and p99 of runs beside, ms": milliseconds(runs_beside, 0.5, 0.99),
            "p50 and p99 alongside schedulers, ms": milliseconds(beside_texts, 0.5, 0.99),
            "refusals to the large one": dict(large.refusals),
        },
    )
