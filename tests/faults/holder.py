"""A scheduler's process for R3: holds sequences with the client's own lease until it is killed.

    python -m tests.faults.holder TARGET TTL_S SEQUENCES STALL_S

Says ``holding`` when it holds them. With a stall it then lets its event loop stand still for so long, feeds every
sequence once more, and says how many were ``lost``.
"""

from __future__ import annotations

import asyncio
import sys
import time

from ferrum_rpc.client import ExecutorClient
from ferrum_rpc.client.lease import LeasePolicy
from ferrum_rpc.errors import ExecutorError


async def hold(target: str, ttl_s: float, count: int, stall_s: float) -> None:
    async with ExecutorClient(target, lease=LeasePolicy(ttl_s=ttl_s)) as client:
        sequences = [client.sequence() for _ in range(count)]
        for sequence in sequences:
            await sequence.prefill([1, 2, 3])
        print("holding", flush=True)
        if stall_s:
            time.sleep(stall_s)  # noqa: ASYNC251 - that is the fault
            lost = 0
            for sequence in sequences:
                try:
                    await sequence.decode(4)
                except ExecutorError:
                    lost += 1
            print("lost", lost, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(hold(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])))
