"""R10: HTTP/2 abuse does not hurt others."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Any, Final

import grpc

from tests.faults.abuser import IDLE_CONNECTIONS
from tests.faults.figures import Figure, Figures, at_least, at_most, exactly, quantile
from tests.faults.sizes import Size
from tests.support.process import Dialled, ServerProcess, dialled, program
from tests.support.waiting import until
from tests.support.wiring import decode, prefill

KINDS: Final = ("rapid_resets", "ping_flood", "large_metadata", "garbage", "idle_connections")
SLOWER: Final = 2.0
MEMORY: Final = 50 << 20
DESCRIPTORS_S: Final = 2.0
PAUSE_S: Final = 0.002
LEAST_HELD: Final = 0.9 * IDLE_CONNECTIONS
TRIES: Final = 3
"""Where tests share the machine, what else begins in the middle of a measurement looks like the abuse: the best one
counts. A server that abuse hurts has none."""


class Honest:
    """A client that decodes, one token after the other."""

    def __init__(self, client: Dialled, handle: Any) -> None:
        self._client = client
        self._handle = handle
        self.failed = 0

    async def p99(self, seconds: float) -> float:
        """Seconds that all but one of a hundred calls take at most."""
        began, waits = time.monotonic(), []
        while time.monotonic() - began < seconds:
            at = time.monotonic()
            try:
                self._handle = await decode(self._client, [1], self._handle, truncate_to=4)
            except grpc.aio.AioRpcError:
                self.failed += 1
            waits.append(time.monotonic() - at)
            await asyncio.sleep(PAUSE_S)
        return quantile(waits, 0.99)


async def r10_abuse_does_not_hurt_others(size: Size) -> Figures:
    """One kind of abuse after the other, each between two measurements of an honest client. Where others use the
    machine too, the slower of the two is what it was like without."""
    figures: list[Figure] = []
    facts: dict[str, object] = {}
    # As docs/operations.md has it where hostile clients may connect.
    async with dialled("--max-streams", "16", fresh=size.absolute) as (server, client):
        honest = Honest(client, await prefill(client, [1, 2, 3, 4]))
        await honest.p99(size.abuse_s)
        quiet = await honest.p99(size.abuse_s)
        memory = server.rss_bytes()
        for kind in KINDS:
            for _ in range(1 if size.absolute else TRIES):
                found, quiet = await _abused(server, honest, kind, quiet, size, facts)
                if all(each.holds for each in found):
                    break
            figures += found
        grown = server.rss_bytes() - memory
        await client.status()
    figures += [
        exactly("calls of the honest client that failed", honest.failed, 0),
        at_most("memory that all of it took", grown, MEMORY, "bytes"),
    ]
    return Figures("HTTP/2 abuse does not hurt others", *figures, facts=facts)


async def _abused(  # noqa: PLR0917 - each is of one abuse
    server: ServerProcess, honest: Honest, kind: str, before: float, size: Size, facts: dict[str, object]
) -> tuple[list[Figure], float]:
    """The figures of an abuse, and the p99 after it. ``before``: the p99 before it."""
    host, _, port = server.target.rpartition(":")
    descriptors = server.descriptors()
    worked = server.cpu_s()
    async with program("tests.faults.abuser", host, port, kind, says="begun"):
        looking = asyncio.create_task(_most_descriptors(server))
        during = await honest.p99(size.abuse_s)
        if kind == "idle_connections":  # on a busy machine they are opened for longer than that
            with suppress(TimeoutError):  # the figure of what was held reports it
                await until(lambda: server.descriptors() >= descriptors + LEAST_HELD, DESCRIPTORS_S)
        looking.cancel()
        held = await looking - descriptors
    worked = server.cpu_s() - worked
    left, seconds = await server.settled_descriptors(descriptors, 2 * DESCRIPTORS_S)
    after = await honest.p99(size.abuse_s)
    quiet = max(before, after, size.p99_floor_s)
    facts[kind] = {
        "p99 before ms": round(before * 1e3, 2),
        "p99 during ms": round(during * 1e3, 2),
        "p99 after ms": round(after * 1e3, 2),
        "descriptors held": held,
        "server cpu s": round(worked, 2),
    }
    return [
        at_most(f"p99 under {kind}, in p99s before and after", during / quiet, SLOWER, "x"),
        at_most(f"descriptors back after {kind}", seconds, DESCRIPTORS_S, "s"),
        at_most(f"descriptors kept after {kind}", left - descriptors, 0),
        *([at_least("connections held open", held, LEAST_HELD)] if kind == "idle_connections" else []),
    ], after


async def _most_descriptors(server: ServerProcess) -> int:
    """The most that were open until this was cancelled: the server closes what says nothing for 5 s."""
    most = 0
    with suppress(asyncio.CancelledError):
        while True:
            most = max(most, server.descriptors())
            await asyncio.sleep(PAUSE_S)
    return most
