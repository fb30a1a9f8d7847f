"""Decode steps of 64 sequences as they are served, by what their rows ask for: a step of first light.

Greedy, top-p and penalties by `ferrum-rpc serve` through its client; then in process the same, and with an adapter of
rank 16 each, 8 of them. What a kind costs beyond greedy is what sampling costs. Runs are measured through the client,
and in process with each step begun when the tokens of the one before it have been read, and before: the difference is
how long the device idled between steps. No targets: `benchmarks.gpu` has those.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any, Final

from benchmarks.cases import CACHE, DECODE, LEAD_IN, SHAPES, Cell, checkpoint, write_adapter
from benchmarks.compare import Player, contest, spread
from benchmarks.engines.grpc import Client
from benchmarks.engines.inprocess import Inside
from benchmarks.gpu.first_light import tell
from ferrum_rpc.logs import configure_logging
from ferrum_rpc.models.spec import ModelSpec

OUTPUTS: Final = ("greedy", "sample", "sample-top-p", "sample-penalties")
ADAPTERS: Final = 8
RANK: Final = 16
FIRST: Final = 1 << 20  # the number of the first sequence with an adapter


async def timed(player: Player, cell: Cell, rounds: int, round_s: float) -> dict[str, Any]:
    """Milliseconds of a step of the cell, with the server's own if there is one."""
    found = (await contest(cell, {"it": player}, "it", rounds, round_s))["sides"]["it"]
    return {name: found[name] for name in ("step_ms", "forward_ms") if name in found}


async def measure(*, rehearse: bool) -> dict[str, Any]:
    """By how it is served and by output, its times."""
    shape, device = ("tiny", "cpu") if rehearse else ("qwen3-8b", "cuda")
    cell = Cell(DECODE, 4, 16, most=6) if rehearse else Cell(DECODE, 64, 1024, most=98)
    steps = cell.most - LEAD_IN
    rounds, round_s = (1, 0.01) if rehearse else (3, 1.0)
    folder, found = str(checkpoint(shape)), dict[str, Any]()

    def note(name: str, figures: dict[str, Any]) -> None:
        found[name] = figures
        print(name, json.dumps(figures), flush=True)

    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(Client.open(folder, [cell], 1, device))
        for output in OUTPUTS:
            note(f"{output}, gRPC", await timed(client, replace(cell, output=output), rounds, round_s))
        several = []
        for _ in range(rounds):
            await client.prepare(cell)
            several.append(await client.runs(cell, steps))
        note("greedy runs, gRPC", {"step_ms": spread(several)})
    adapters = CACHE / f"adapters-{shape}"
    name = write_adapter(ModelSpec.from_config(SHAPES[shape]), RANK, adapters)
    more: dict[str, Any] = {"adapter_dir": adapters, "max_adapter_rank": RANK, "adapter_memory": 4 << 30}
    async with AsyncExitStack() as stack:
        twice = replace(cell, batch=2 * cell.batch)  # with adapters and without, in one cache
        inside = await stack.enter_async_context(Inside.open(folder, [twice], 1, device, **more))
        print("\n".join(f"{choice}: {why}" for choice, why in inside.runner.device.choices))
        for output in OUTPUTS:
            note(f"{output}, in process", await timed(inside, replace(cell, output=output), rounds, round_s))
        ways, taken = {"their tokens read first": False, "begun before": True}, dict[str, list[float]]()
        for _ in range(rounds):
            for way, following in ways.items():
                if inside.runner.follows or not following:
                    taken.setdefault(way, []).extend(await inside.runs(cell, steps, following=following))
        for way, seconds in taken.items():
            note(f"greedy runs, {way}, in process", {"step_ms": spread(seconds)})
        await inside.load_adapters(name, ADAPTERS)
        of_adapters = inside.beside(range(1, ADAPTERS + 1), FIRST)
        note("greedy, 8 adapters, in process", await timed(of_adapters, cell, rounds, round_s))
    return found


def serving(*, rehearse: bool) -> None:
    """Measure and print."""
    configure_logging(level="warning")
    tell(asyncio.run(measure(rehearse=rehearse)))
