"""R19: a health check tells the truth: promptly while the device works, soon when it does not, without false alarms.

The 2 s are those of a thread that stands still, and of a device that is lost. A GPU that hangs while the thread that
waits for it spins is found after 30 s (`engine.liveness`), which `tests/unit/test_liveness.py` tests.
"""

from __future__ import annotations

import asyncio
import signal
import time
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2

from tests.faults.figures import Figures, at_least, at_most, exactly, quantile
from tests.faults.sizes import Size
from tests.support.process import Dialled, ServerProcess, dial, serving
from tests.support.wiring import decode, prefill, release

SERVING: Final = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING: Final = health_pb2.HealthCheckResponse.NOT_SERVING
STALL_S: Final = 2.75
HONEST_S: Final = 3.0
STOPPED_S: Final = 2.0
LONG_PROMPTS: Final = ("--max-batch-tokens", "131072", "--identity-max-context", "131072", "--kv-blocks", "16384")


class Watcher:
    """A Watch stream and when it said what."""

    def __init__(self, health: Any) -> None:
        self._stream = health.Watch(health_pb2.HealthCheckRequest())
        self._heard = asyncio.Event()
        self.said: list[tuple[float, int]] = []
        self.reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            async for each in self._stream:
                self.said.append((time.monotonic(), each.status))
                self._heard.set()
        except grpc.aio.AioRpcError:  # the server's end
            pass

    async def until(self, status: int, timeout_s: float = 30.0) -> float:
        """When it said so, last; waits until it does."""
        async with asyncio.timeout(timeout_s):
            while not self.said or self.said[-1][1] != status:
                self._heard.clear()
                await self._heard.wait()
        return self.said[-1][0]

    def alarms(self) -> int:
        """How often it said NOT_SERVING."""
        return sum(status == NOT_SERVING for _, status in self.said)


async def r19_health_tells_the_truth(size: Size) -> Figures:
    """Long prefills, hangs that end, a stopped process, and at last a device that dies, under a watch."""
    stalls: list[float] = []
    recoveries: list[float] = []
    waits: list[float] = []
    honest = false_alarms = 0.0
    rules = ";".join(f"before_forward=delay:{STALL_S * 1000:.0f}@{2 + n}" for n in range(size.hangs))
    async with serving("--failpoints", f"{rules};truncate=device_lost", *LONG_PROMPTS) as server:
        async with dial(server.target) as client:
            watcher, other = Watcher(client.health), Watcher(client.health)
            await watcher.until(SERVING)
            handle = await prefill(client, [1, 2, 3])
            for _ in range(size.hangs):
                began = time.monotonic()
                call = asyncio.ensure_future(decode(client, [4], handle))
                stalls.append(await watcher.until(NOT_SERVING) - began)
                handle = await call
                recoveries.append(await watcher.until(SERVING) - began - STALL_S)
            other.reading.cancel()  # a watcher that leaves takes nobody along
            before = watcher.alarms()
            honest = await _prefill_at_least(client, waits)
            await _stop_for_a_while(server, client)
            false_alarms = watcher.alarms() - before
            began = time.monotonic()
            truncate = client.truncate(handle, length=1)
            death = await watcher.until(NOT_SERVING) - began
            await asyncio.gather(truncate, return_exceptions=True)
            await watcher.reading
        status = await server.ended()
        fired = server.count("failpoint_fired")  # all of its log has been read
    return Figures(
        "A health check tells the truth",
        at_most("Check, p99, during a long prefill", quantile(waits, 0.99) * 1e3, 50, "ms"),
        at_most("hang until Watch says NOT_SERVING, worst", max(stalls), 2, "s"),
        at_most("end of a hang until Watch says SERVING, worst", max(recoveries), 2, "s"),
        at_most("death of the device until Watch says NOT_SERVING", death, 2, "s"),
        at_least("an honest prefill", honest, HONEST_S, "s"),
        exactly("false alarms in it and after SIGSTOP", false_alarms, 0),
        exactly("failures that were asked for and came", fired, size.hangs + 1),
        exactly("exit status after the device's death", status, 1),
        facts={"checks": len(waits), "hangs": size.hangs, "watchers": 2},
    )


async def _prefill_at_least(client: Dialled, waits: list[float]) -> float:
    """A prefill that takes `HONEST_S` on this machine, health checked all the while; how long it took."""
    tokens, took = 8192, 0.0
    while took < HONEST_S:  # attention grows with the square of the prompt
        waits.clear()
        began = time.monotonic()
        call = asyncio.ensure_future(prefill(client, [5] * tokens))
        while not call.done():
            asked = time.monotonic()
            assert await _answer(client) == SERVING
            waits.append(time.monotonic() - asked)
            await asyncio.sleep(0.005)
        took = time.monotonic() - began
        await release(client, await call)
        tokens = min(int(tokens * min(4.0, max(1.1, (HONEST_S * 1.15 / took) ** 0.5))), 131_000)
    return took


async def _answer(client: Dialled) -> int:
    """To a health check."""
    return int((await client.health_check()).status)


async def _stop_for_a_while(server: ServerProcess, client: Dialled) -> None:
    server.signal(signal.SIGSTOP)
    await asyncio.sleep(STOPPED_S)
    server.signal(signal.SIGCONT)
    for _ in range(20):  # longer than a stall would have taken to be told
        assert await _answer(client) == SERVING
        await asyncio.sleep(0.1)
