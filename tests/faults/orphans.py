"""R3: orphans are freed, the living are not. And a scheduler that holds sequences until it is killed, a program:

    python -m tests.faults.orphans TARGET TTL_S STALL_S

Says ``holding`` when it holds them with a lease of its own. With a stall it then lets its event loop stand still for so
long, feeds every sequence once more, and says how many were ``lost``.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Iterable
from typing import Final

from ferrum_rpc.client import ExecutorClient, Sequence
from ferrum_rpc.client.lease import LeasePolicy
from ferrum_rpc.errors import ExecutorError
from tests.faults.figures import Figures, at_most, exactly
from tests.faults.sizes import Size
from tests.support.process import Dialled, ServerProcess, dialled, next_line, program

HELD: Final = 20
PROMISED_S: Final = 1.0
PATIENCE_S: Final = 20.0
HOLDER: Final = "tests.faults.orphans"


async def _killed(server: ServerProcess, client: Dialled, lease_s: float) -> float:
    """Seconds from the SIGKILL of a holder until its sequences and blocks are free."""
    async with program(HOLDER, server.target, lease_s, 0, says="holding") as holder:
        assert min(await client.held()) >= HELD, "nothing was held"
        # Past one renewal, so that what is measured is a lease that was kept alive.
        await asyncio.sleep(lease_s / 3)
        holder.kill()
        began = time.monotonic()
        await client.released(lease_s + PATIENCE_S)
        return time.monotonic() - began


async def _stalled(server: ServerProcess, size: Size) -> int:
    """Sequences that a holder lost while its event loop stood still."""
    async with program(HOLDER, server.target, size.lease_s, size.stall_s) as holder:
        return int((await next_line(holder, "lost")).split()[1])


async def _stopped(server: ServerProcess, size: Size) -> int:
    """Sequences that a client lost while the server's process stood still for longer than their lease."""
    async with ExecutorClient(server.target, lease=LeasePolicy(ttl_s=size.lease_s), timeout_s=60.0) as client:
        sequences = await _sequences(client)
        server.signal(signal.SIGSTOP)
        await asyncio.sleep(size.lease_s * 1.5)
        server.signal(signal.SIGCONT)
        await asyncio.sleep(size.lease_s / 2)  # whoever is to be swept wrongly would be by now
        return await _lost(sequences)


async def _sequences(client: ExecutorClient) -> list[Sequence]:
    held = [client.sequence() for _ in range(HELD)]
    for sequence in held:
        await sequence.prefill([1, 2, 3])
    return held


async def _lost(sequences: Iterable[Sequence]) -> int:
    """Feed each once more; how many were not there."""
    lost = 0
    for sequence in sequences:
        try:
            await sequence.decode(4)
        except ExecutorError:
            lost += 1
    return lost


async def r3_orphans_are_freed(size: Size) -> Figures:
    """Kill a client that holds sequences; let another one's loop stand still; stop the server for longer than a
    lease."""
    async with dialled() as (server, client):
        freed_s = await _killed(server, client, size.lease_s)
        stalled = await _stalled(server, size)
        await client.released(size.lease_s + PATIENCE_S)  # the stalled holder was killed when it had spoken
        stopped = await _stopped(server, size)
        sequences, blocks = await client.held()
    return Figures(
        "Orphans are freed, the living are not",
        at_most("from the SIGKILL of a client to its blocks' freedom", freed_s, size.lease_s + PROMISED_S, "s"),
        exactly("live sequences lost while their client's loop stood still", stalled, 0),
        exactly("live sequences lost while the server's process was stopped", stopped, 0),
        exactly("sequences left behind", sequences, 0),
        exactly("blocks left behind", blocks, 0),
        facts={"lease s": size.lease_s, "stall s": size.stall_s, "server stopped s": size.lease_s * 1.5},
    )


async def hold(target: str, ttl_s: float, stall_s: float) -> None:
    """The program."""
    async with ExecutorClient(target, lease=LeasePolicy(ttl_s=ttl_s)) as client:
        sequences = await _sequences(client)
        print("holding", flush=True)
        if stall_s:
            time.sleep(stall_s)  # noqa: ASYNC251 - that is the fault
            print("lost", await _lost(sequences), flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(hold(sys.argv[1], *map(float, sys.argv[2:])))
