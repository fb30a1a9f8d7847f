"""R3: orphans are freed, the living are not."""

from __future__ import annotations

import asyncio
import signal
import time
from typing import Final

from ferrum_rpc.client import ExecutorClient
from ferrum_rpc.client.lease import LeasePolicy
from ferrum_rpc.errors import ExecutorError
from tests.faults.figures import Figures, at_most, exactly
from tests.faults.process import Dialled, ServerProcess, dial, program, serving
from tests.faults.sizes import Size

HELD: Final = 20
PROMISED_S: Final = 1.0
HOLDER: Final = "tests.faults.holder"


async def _held(client: Dialled) -> tuple[int, int]:
    """Sequences that live, and blocks that are not free."""
    pressure = (await client.status()).pressure
    return pressure.sequences, pressure.total_blocks - pressure.free_blocks


async def _said(process: asyncio.subprocess.Process, word: str) -> list[str]:
    assert process.stdout is not None
    async with asyncio.timeout(120):
        while line := (await process.stdout.readline()).decode():
            if line.startswith(word):
                return line.split()
    raise AssertionError(f"the holder never said {word!r}")


async def _killed(server: ServerProcess, client: Dialled, lease_s: float) -> float:
    """Seconds from the SIGKILL of a holder until its sequences and blocks are free."""
    async with program(HOLDER, server.target, str(lease_s), str(HELD), "0") as holder:
        await _said(holder, "holding")
        sequences, blocks = await _held(client)
        assert sequences >= HELD and blocks >= HELD, "nothing was held"
        before = sequences - HELD, blocks - HELD
        # Past one renewal, so that what is measured is a lease that was kept alive.
        await asyncio.sleep(lease_s / 3)
        holder.kill()
        return await _freed(client, before, lease_s)


async def _freed(client: Dialled, wanted: tuple[int, int], lease_s: float) -> float:
    """Seconds until no more than that is held; a lease and 20 s at most."""
    began = time.monotonic()
    while await _held(client) != wanted and time.monotonic() - began < lease_s + 20:  # noqa: ASYNC110 - it must ask
        await asyncio.sleep(0.02)
    return time.monotonic() - began


async def _stalled(server: ServerProcess, size: Size) -> int:
    """Sequences that a holder lost while its event loop stood still."""
    stall_s = str(size.stall_s)
    async with program(HOLDER, server.target, str(size.lease_s), str(HELD), stall_s) as holder:
        return int((await _said(holder, "lost"))[1])


async def _stopped(server: ServerProcess, size: Size) -> int:
    """Sequences that a client lost while the server's process stood still for longer than their lease."""
    lost = 0
    async with ExecutorClient(server.target, lease=LeasePolicy(ttl_s=size.lease_s), timeout_s=60.0) as client:
        sequences = [client.sequence() for _ in range(HELD)]
        for sequence in sequences:
            await sequence.prefill([1, 2, 3])
        server.signal(signal.SIGSTOP)
        await asyncio.sleep(size.lease_s * 1.5)
        server.signal(signal.SIGCONT)
        await asyncio.sleep(size.lease_s / 2)  # whoever is to be swept wrongly would be by now
        for sequence in sequences:
            try:
                await sequence.decode(4)
            except ExecutorError:
                lost += 1
    return lost


async def r3_orphans_are_freed(size: Size) -> Figures:
    """Kill a client that holds sequences; let another one's loop stand still; stop the server for longer than a
    lease."""
    async with serving() as server, dial(server.target) as client:
        freed_s = await _killed(server, client, size.lease_s)
        stalled = await _stalled(server, size)
        await _freed(client, (0, 0), size.lease_s)  # the stalled holder was killed when it had spoken
        stopped = await _stopped(server, size)
        sequences, blocks = await _held(client)
    return Figures(
        "R3",
        "Orphans are freed, the living are not",
        (
            at_most("from the SIGKILL of a client to its blocks' freedom", freed_s, size.lease_s + PROMISED_S, "s"),
            exactly("live sequences lost while their client's loop stood still", stalled, 0),
            exactly("live sequences lost while the server's process was stopped", stopped, 0),
            exactly("sequences left behind", sequences, 0),
            exactly("blocks left behind", blocks, 0),
        ),
        {"lease s": size.lease_s, "stall s": size.stall_s, "server stopped s": size.lease_s * 1.5},
    )
