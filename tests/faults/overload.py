"""R9: overload bends, never breaks.

The peak is measured in a closed loop: a caller's next call begins when its last one is answered. In the overload
`FACTOR` calls begin for each that was served, whatever became of the others: so there are so many times too many
however fast the machine is, the caller's half of it included, which no rate by the clock can promise beside other work.

Both take turns, and a turn of one is compared with its neighbour of the other: by the clock, and per second of CPU time
that the server got, which counts the work of refusing in full (by the clock a second core does that for nothing). What
else runs on the machine may spoil some turns, so the best one counts; a server that wastes itself on refusals has none.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import grpc

from ferrum_rpc.errors import Reason
from ferrum_rpc.wire.status import error_from_rpc
from tests.faults.figures import Figures, at_least, at_most, exactly
from tests.faults.sizes import Size
from tests.support.process import Dialled, ServerProcess, dialled
from tests.support.wiring import item, pb, prefill

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
    cpu_s: float = 0.0
    """CPU time that the server got meanwhile."""

    @property
    def goodput(self) -> float:
        return self.codes["OK"] / self.seconds

    @property
    def offered(self) -> float:
        return sum(self.codes.values()) / self.seconds

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
        with self._timed(ends) as began:

            async def caller() -> None:
                while time.monotonic() - began < seconds:
                    await self.call(ends, self._free.popleft())

            await asyncio.gather(*[caller() for _ in range(CALLERS)])

    async def overload(self, ends: Ends, seconds: float) -> None:
        """As many calls as there are sequences, then `FACTOR` for each that was served."""
        sent, running = 0, set[asyncio.Task[None]]()
        with self._timed(ends) as began:
            while time.monotonic() - began < seconds:
                while sent < POOL + FACTOR * ends.codes["OK"] and self._free:
                    sent += 1
                    running.add(asyncio.ensure_future(self.call(ends, self._free.popleft())))
                _, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            if running:
                await asyncio.wait(running)

    @contextmanager
    def _timed(self, ends: Ends) -> Iterator[float]:
        began, cpu_s = time.monotonic(), self._server.cpu_s()
        yield began
        ends.seconds, ends.cpu_s = time.monotonic() - began, self._server.cpu_s() - cpu_s


async def r9_overload_bends(size: Size) -> Figures:
    """Four times the peak, in turns with the peak."""
    flags = (*MODEL, "--max-batch-items", str(TOGETHER), "--max-queued-items", str(QUEUE))
    flags += ("--max-batch-tokens", str(TOGETHER * TOKENS))
    turns: list[tuple[Ends, Ends]] = []
    about: Any = {"kv_blocks": POOL * (TOKENS // 16 + 2), "fresh": size.absolute}
    async with dialled(*flags, options=(("grpc.enable_retries", 0),), **about) as (server, client):
        load = Load(server, client, [await prefill(client, [1]) for _ in range(POOL)])
        warm = [Ends(), Ends()]
        await load.closed_loop(warm[0], size.peak_s / 2)
        await load.overload(warm[1], size.peak_s / 2)
        rss = 0
        for turn in range(TURNS):
            peak, over = Ends(), Ends()
            await load.closed_loop(peak, size.peak_s / TURNS)
            await load.overload(over, size.overload_s / TURNS)
            turns.append((peak, over))
            if turn == 0:
                rss = server.peak_rss_bytes()  # after the first overload: its buffers are part of a server's size
        grown = server.peak_rss_bytes() - rss
        queue_full = (await client.status()).counters.queue_full
    overs = [over for _, over in turns]
    ends = [*warm, *(each for pair in turns for each in pair)]
    codes = sum((over.codes for over in overs), Counter[str]())
    wrong = [each for end in ends for each in end.wrong]
    uncounted = abs(queue_full - sum(each.codes["RESOURCE_EXHAUSTED"] for each in ends))
    by_clock = [over.goodput / peak.goodput for peak, over in turns]
    by_cpu = [over.efficiency / peak.efficiency for peak, over in turns]
    left = max(by_clock + by_cpu)
    return Figures(
        "Overload bends, never breaks",
        at_least("goodput in overload, share of the peak, best turn", left, size.goodput_share, "x"),
        at_least("share of the calls that were too many", codes["RESOURCE_EXHAUSTED"] / codes.total(), 0.4),
        at_most("items in the queue", max(over.deepest for over in overs), QUEUE),
        exactly("refusals that the server did not count", uncounted, 0),
        exactly("answers other than OK and QUEUE_FULL with RetryInfo", len(wrong), 0),
        at_most("memory that overload took", grown, FLAT_BYTES, "bytes"),
        facts={
            "peak calls/s": [round(peak.goodput, 1) for peak, _ in turns],
            "overload goodput/s": [round(over.goodput, 1) for over in overs],
            "offered/s": [round(over.offered, 1) for over in overs],
            "goodput share by the clock": [round(each, 3) for each in by_clock],
            "goodput share per CPU second of the server": [round(each, 3) for each in by_cpu],
            "wrong": wrong[:3],
        },
    )
