"""R9: overload bends, never breaks.

The peak is measured in a closed loop, the overload in an open one: calls begin when the clock says so, whatever became
of the ones before. Both take turns in one run. The server computes in its own process; this one only asks.

On a machine that others use too, goodput by the clock tells what they left over. So it is also taken per second of CPU
time that the server got, which counts the work of refusing in full: by the clock a second core does that for nothing.
One of the two must hold; a server that wastes itself on refusals fails both.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any, Final

import grpc

from ferrum_rpc.errors import Reason
from ferrum_rpc.wire.status import error_from_rpc
from tests.faults.figures import Figures, at_least, at_most, exactly
from tests.faults.process import Dialled, ServerProcess, dial, serving
from tests.faults.sizes import Size
from tests.wiring import item, pb, prefill

TOKENS: Final = 256
MODEL: Final = ("--identity-heads", "64", "--identity-kv-heads", "4", "--identity-head-dim", "32")
"""A forward of several milliseconds a call, as a model has: next to it a refusal is cheap."""
CALLERS: Final = 16
POOL: Final = 96
QUEUE: Final = 32
FACTOR: Final = 4
TOGETHER: Final = 2
"""Calls of a step. Few, so that a buffer of a step is small beside `FLAT_BYTES`: how many of them the allocator keeps
apart is its luck (8 calls of this model have one of 16 MiB); growth with the number of calls is what is looked for."""
TURNS: Final = 3
FLAT_BYTES: Final = 16 << 20


@dataclass
class Ends:
    """How calls ended, and what the server said of its queue."""

    codes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    deepest: int = 0
    seconds: float = 0.0
    sending_s: float = 0.0
    cpu_s: float = 0.0
    """CPU time that the server got meanwhile."""

    @property
    def goodput(self) -> float:
        return self.codes["OK"] / self.seconds

    @property
    def offered(self) -> float:
        return sum(self.codes.values()) / self.sending_s

    @property
    def efficiency(self) -> float:
        return self.codes["OK"] / self.cpu_s


class Load:
    """A pool of sequences, and calls on them."""

    def __init__(self, server: ServerProcess, client: Dialled, handles: list[Any]) -> None:
        self._server = server
        self._client = client
        self._free = deque(handles)
        self._tokens = [number % 256 for number in range(TOKENS)]

    async def call(self, ends: Ends, handle: Any) -> None:
        """Feed a sequence after rolling it back, and note how that ended."""
        try:
            request = pb.PrefillRequest(item=item(self._tokens, handle, truncate_to=1))
            response = await self._client.executor.Prefill(request)
            handle = response.output.handle
            ends.deepest = max(ends.deepest, response.pressure.queued_items)
            ends.codes["OK"] += 1
        except grpc.aio.AioRpcError as failure:
            error = error_from_rpc(failure)
            ends.codes[failure.code().name] += 1
            if error.reason is not Reason.QUEUE_FULL or not error.retry_after_s:
                ends.wrong.append(f"{failure.code().name} {failure.details()}")
        finally:
            self._free.append(handle)

    async def closed_loop(self, ends: Ends, seconds: float) -> None:
        """So many callers, each with its next call when the last is answered."""
        began, cpu_s = time.monotonic(), self._server.cpu_s()

        async def caller() -> None:
            while time.monotonic() - began < seconds:
                await self.call(ends, self._free.popleft())

        await asyncio.gather(*[caller() for _ in range(CALLERS)])
        ends.seconds += time.monotonic() - began
        ends.cpu_s += self._server.cpu_s() - cpu_s

    async def open_loop(self, ends: Ends, rate: float, seconds: float) -> int:
        """``rate`` calls a second by the clock. Calls for which there was no free sequence."""
        began, sent, skipped = time.monotonic(), 0, 0
        cpu_s, running = self._server.cpu_s(), set[asyncio.Task[None]]()
        while (now := time.monotonic() - began) < seconds:
            while sent + skipped < now * rate:
                if not self._free:
                    skipped += 1
                    continue
                sent += 1
                task = asyncio.ensure_future(self.call(ends, self._free.popleft()))
                running.add(task)
                task.add_done_callback(running.discard)
            await asyncio.sleep(0.002)
        ends.sending_s += time.monotonic() - began
        while running:
            await asyncio.wait(running)
        ends.seconds += time.monotonic() - began
        ends.cpu_s += self._server.cpu_s() - cpu_s
        return skipped


async def r9_overload_bends(size: Size) -> Figures:
    """Four times the peak, in turns with the peak."""
    flags = (*MODEL, "--max-batch-items", str(TOGETHER), "--max-queued-items", str(QUEUE))
    flags += ("--max-batch-tokens", str(TOGETHER * TOKENS))
    warm, peak, over = Ends(), Ends(), Ends()
    async with (
        serving(*flags, kv_blocks=POOL * (TOKENS // 16 + 2)) as server,
        dial(server.target, ("grpc.enable_retries", 0)) as client,
    ):
        load = Load(server, client, [await prefill(client, [1]) for _ in range(POOL)])
        await load.closed_loop(warm, size.peak_s / 2)
        await load.open_loop(warm, 50.0, size.peak_s / 2)  # a slow machine refuses some of these already
        rss, skipped = 0, 0
        for turn in range(TURNS):
            await load.closed_loop(peak, size.peak_s / TURNS)
            skipped += await load.open_loop(over, FACTOR * peak.goodput, size.overload_s / TURNS)
            if turn == 0:
                rss = server.peak_rss_bytes()  # after the first overload: its buffers are part of a server's size
        grown = server.peak_rss_bytes() - rss
        queue_full = (await client.status()).counters.queue_full
    refused = over.codes["RESOURCE_EXHAUSTED"]
    uncounted = abs(queue_full - sum(each.codes["RESOURCE_EXHAUSTED"] for each in (warm, peak, over)))
    by_clock, by_cpu = over.goodput / peak.goodput, over.efficiency / peak.efficiency
    return Figures(
        "R9",
        "Overload bends, never breaks",
        (
            at_least("goodput in overload, share of the peak", max(by_clock, by_cpu), size.goodput_share),
            at_least("share of the calls that were too many", refused / sum(over.codes.values()), 0.4),
            at_most("items in the queue", over.deepest, QUEUE),
            exactly("refusals that the server did not count", uncounted, 0),
            exactly("answers other than OK and QUEUE_FULL with RetryInfo", len(over.wrong) + len(peak.wrong), 0),
            at_most("memory that overload took", grown, FLAT_BYTES, "bytes"),
        ),
        {
            "peak calls/s": round(peak.goodput, 1),
            "overload goodput/s": round(over.goodput, 1),
            "offered/s": round(over.offered, 1),
            "goodput share by the clock": round(by_clock, 3),
            "goodput share per CPU second of the server": round(by_cpu, 3),
            "not sent for want of a sequence": skipped,
            "wrong": (over.wrong + peak.wrong)[:3],
        },
    )
