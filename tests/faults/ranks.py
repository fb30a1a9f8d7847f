"""R29: a rank's death is known, whether it ends or hangs, in the middle of a step or while nothing is to be done."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from contextlib import suppress
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from ferrum_rpc.client import ExecutorClient
from ferrum_rpc.errors import ExecutorError
from tests.faults.figures import Figures, at_most, exactly
from tests.faults.health import NOT_SERVING, SERVING, Watcher
from tests.faults.sizes import Size
from tests.support.checkpoints import make_checkpoint
from tests.support.process import dialled, free_port, runs
from tests.support.waiting import until

CALLERS: Final = 4
ENDS_S: Final = 5.0
TORCHRUN: Final = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--no-python", "--master-port")
KINDS: Final = tuple(product((signal.SIGKILL, signal.SIGSTOP), (True, False), ("shared-memory", "gloo"), ((),)))
WAYS: Final = ((signal.SIGKILL, True, "shared-memory", TORCHRUN), *reversed(KINDS))
"""How it ends, whether there are callers, the transport, and who starts ranks."""


async def r29_a_ranks_death_is_known(size: Size) -> Figures:
    """Kill or stop the other rank of two, with callers and without, over either transport; start again each time."""
    told: list[float] = []
    wrong: list[str] = []
    unanswered = left = calls = 0
    with TemporaryDirectory() as folder:
        models = [str(make_checkpoint(Path(folder) / each, each)) for each in ("qwen3", "qwen3_5", "deepseek_v3")]
        for number in range(size.rank_deaths):
            how, busy, transport, prefix = WAYS[number % len(WAYS)]
            if prefix:
                prefix += (str(free_port()),)
            model = models[(number + number // len(WAYS)) % len(models)]
            flags = ("--tensor-parallel", "2", "--rank-transport", transport, "--dtype", "float32")
            async with dialled(*flags, model=model, kv_blocks=256, prefix=prefix) as (server, raw):
                joined = await server.event("rank_joined")
                watcher = Watcher(raw.health)
                await watcher.until(SERVING)
                async with ExecutorClient(server.target, timeout_s=30.0) as client:
                    begun = asyncio.Semaphore(0)
                    callers = [asyncio.create_task(_decode(client, begun)) for _ in range(CALLERS if busy else 0)]
                    for _ in callers:
                        await begun.acquire()
                    began = time.monotonic()
                    os.kill(joined["pid"], how)
                    told.append(await watcher.until(NOT_SERVING) - began)
                    done, open_ = await asyncio.wait(callers, timeout=10.0) if callers else (set(), set())
                    unanswered += len(open_)
                    calls += sum(task.result() for task in done)
                status = await server.ended()
                lost = await server.event("rank_lost")
                if status != 1 or lost["rank"] != 1 or lost["host"] != joined["host"]:
                    wrong.append(f"{how.name} {transport}: status {status}, {lost}")
                with suppress(TimeoutError):
                    await until(lambda pid=joined["pid"]: not runs(pid), ENDS_S)
                left += runs(joined["pid"])
    return Figures(
        "A rank's death is known",
        at_most("death of a rank until Watch says NOT_SERVING, worst", max(told), 2, "s"),
        exactly("calls that were not answered", unanswered, 0),
        exactly("ends that did not name rank and host, or without exit status 1", len(wrong), 0),
        exactly("ranks that outlived rank 0", left, 0),
        facts={"deaths": len(told), "calls": calls, "wrong": wrong},
    )


async def _decode(client: ExecutorClient, begun: asyncio.Semaphore) -> int:
    """Until a call fails; how many were answered, that one among them."""
    answered = 0
    try:
        sequence = client.sequence()
        await sequence.prefill([1, 2, 3])
        while True:
            answered += 1
            await sequence.decode(answered % 100)
            begun.release()
            if sequence.length > 400:
                await sequence.truncate(3)
    except ExecutorError:
        return answered + 1
