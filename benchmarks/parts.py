"""What stands around the cells of the suite: other outputs, mixed load, and how long a start takes.

- Steps that ask for other outputs than greedy tokens, or have adapters, by the runner in this process; rounds of all
  alternate.
- Decode steps of one scheduler with another's long prompts in chunks: what natural batching makes a step wait for.
- Seconds of `ferrum-rpc serve` until its model answers. The pages of the weights' file are dropped from the kernel's
  cache before, where the system offers that.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from benchmarks.cases import CACHE, DECODE, IDENTITY, NOTHING, PREFILL, Cell, write_adapter
from benchmarks.compare import Figures, Player, Round, contest, meanwhile, median, percentile
from benchmarks.engines.grpc import Client, executor
from benchmarks.engines.inprocess import Inside
from benchmarks.record import median_of
from benchmarks.table import Row, number, target
from ferrum_rpc.client import ExecutorClient
from ferrum_rpc.models.spec import ModelSpec

MIXED: Final = "p99 over p50 of a decode step under mixed load"
MIXED_TARGET: Final = 2.0  # 99th percentile over median of a decode step, at most


GREEDY: Final = "greedy"
DECODED: Final = (
    *("greedy-logprobs", "greedy-masked", "sample", "sample-penalties", "sample-masked"),
    *("top-tokens-20", "full-bf16", "hidden-states", "verify-4", "accept-4", "accept-4-sampled"),
)
PREFILLED: Final = ("next-token", "next-token-logprobs")  # names of `cases.OUTPUTS`
EACH, ONE = "an adapter each", "one adapter for all"
RANK: Final = 16  # of adapters
ADAPTED: Final = "decode b32 @256 with an adapter of rank 16 each, in process, of none"
ADAPTED_TARGET: Final = 0.8  # tokens a second of `ADAPTED`, at least
SIDES: Final = 1 << 20  # between the numbers of two sides' sequences


class Asking:
    """A side whose steps ask for ``output``, whatever the cell says."""

    def __init__(self, side: Player, output: str) -> None:
        self.facts = side.facts
        self._side, self._output = side, output

    async def prepare(self, cell: Cell) -> None:
        await self._side.prepare(cell)

    async def round(self, cell: Cell, number: int, steps: int) -> Round:
        return await self._side.round(replace(cell, output=self._output), number, steps)


@asynccontextmanager
async def with_adapters(model: str, cells: Sequence[Cell], threads: int, spec: ModelSpec) -> AsyncIterator[Inside]:
    """A runner with an adapter for each sequence of the largest cell, and room for three sides."""
    most, folder = max(cell.batch for cell in cells), CACHE / f"{Path(model).name}-adapters"
    name = write_adapter(spec, RANK, folder)
    more: dict[str, Any] = {"adapter_dir": folder, "max_adapter_rank": RANK, "adapter_memory": 64 << 30}
    room = [replace(cell, batch=3 * cell.batch) for cell in cells]
    async with Inside.open(model, room, threads, **more) as inside:
        await inside.load_adapters(name, most)
        yield inside


async def outputs(side: Inside, cells: Sequence[Cell], rounds: int, round_s: float) -> list[Figures]:
    """The contest of each cell's outputs, and of decode steps with adapters, with greedy steps as the reference."""
    found, most = [], max(cell.batch for cell in cells)
    adapted = {EACH: side.beside(range(1, most + 1), SIDES), ONE: side.beside([1], 2 * SIDES)}
    for cell in cells:
        asked = (GREEDY, *(PREFILLED if cell.kind == PREFILL else DECODED))
        players: dict[str, Player] = {name: Asking(side, name) for name in asked}
        if cell.kind != PREFILL:
            players |= adapted
        found.append(await contest(cell, players, GREEDY, rounds, round_s))
    return found


def adapted_target(found: Sequence[Figures]) -> dict[str, Any]:
    """Of `outputs`."""
    more = median_of(found, ADAPTED.partition(" with")[0], EACH)
    return target(ADAPTED, more and round(1 / more, 3), ADAPTED_TARGET)


def output_rows(found: Sequence[Figures]) -> list[Row]:
    """A row for each output, a column for each cell: how much longer than a greedy step."""
    names = dict.fromkeys(name for each in found for name in each["ratios"])
    rows: list[Row] = [{"output": "greedy, ms"} | {each["cell"]: each["sides"][GREEDY]["step_ms"] for each in found}]
    return rows + [
        {"output": name} | {each["cell"]: _more(each["ratios"][name]) for each in found if name in each["ratios"]}
        for name in names
    ]


def _more(ratio: Figures) -> str:
    median, low, high = (100 * (ratio[name] - 1) for name in ("median", "low", "high"))
    return f"{median:+.1f} % ({low:+.1f} to {high:+.1f})"


@dataclass(frozen=True, slots=True)
class Mix:
    """Steps of ``cell``'s batch, beside prompts of ``prompt`` tokens in chunks of ``chunk``, one in flight.
    ``alone``: decode steps without the other scheduler, for comparison."""

    cell: Cell
    prompt: int
    chunk: int
    steps: int
    alone: int


MIX: Final = Mix(Cell(DECODE, 8, 256), prompt=512, chunk=64, steps=200, alone=40)
QUICK_MIX: Final = Mix(Cell(DECODE, 2, 8, most=4), prompt=16, chunk=4, steps=8, alone=4)


async def mixed(session: Client, mix: Mix) -> dict[str, Any]:
    """Milliseconds of a decode step, alone and then beside a second client of the server; ``chunks``: fed meanwhile."""
    cell = mix.cell
    await session.prepare(cell)
    await session.round(cell, 0, 2)  # warm up
    alone = await _decode(session, mix, mix.alone)
    async with (
        ExecutorClient(session.client.target, session=True, timeout_s=600.0) as other,
        aclosing(_chunks(other, session.vocab_size, mix)) as chunks,
        meanwhile(chunks.__anext__) as fed,
    ):
        beside = await _decode(session, mix, mix.steps)
    p50, p99, p50_alone, p99_alone = (1e3 * percentile(each, of, 6) for each in (beside, alone) for of in (50, 99))
    ratio = round(p99 / p50, 3)
    return {
        "what": f"p99 over p50 of a decode step (b{cell.batch} @{cell.context}) with chunks of {mix.chunk} tokens",
        "measured": ratio,
        "of which": f"{number(p99)} over {number(p50)} ms, {len(fed)} chunks; "
        f"alone {number(p99_alone)} over {number(p50_alone)} ms",
        "target": target(MIXED, ratio, MIXED_TARGET, least=False),
    }


async def _decode(session: Client, mix: Mix, steps: int) -> list[float]:
    """Rounds of the cell until there are so many steps."""
    taken: list[float] = []
    while len(taken) < steps:
        timed = await session.round(mix.cell, 0, min(mix.cell.most, steps - len(taken)))
        taken += timed.step_s
    return taken


async def _chunks(client: ExecutorClient, vocab_size: int, mix: Mix) -> AsyncGenerator[None, None]:
    """Feeds new prompts, chunk by chunk."""
    for at in itertools.count():
        [prompt] = Cell(PREFILL, 1, mix.prompt).fresh(vocab_size, at, 0).tolist()
        async with client.sequence() as sequence:
            for start in range(0, mix.prompt, mix.chunk):
                last = start + mix.chunk >= mix.prompt
                await sequence.prefill(prompt[start : start + mix.chunk], mix.cell.spec if last else NOTHING)
                yield


async def starting(model: Path, settings: dict[str, Any], times: int) -> dict[str, Any]:
    """Alternate: start with the model, start without one. Medians; loading is what is beyond the start without weights.
    From the disk: the file's pages were dropped."""
    file = model / "model.safetensors"
    ready, bare, cold = list[float](), list[float](), True
    for _ in range(times):
        cold &= _drop(file)
        ready.append(await _start(str(model), settings))
        bare.append(await _start(IDENTITY, settings))
    weights = f"{file.stat().st_size / 2**30:.2f} GiB of weights from the {'disk' if cold else 'page cache'}"
    return {
        "what": f"start of serve until the model answers, s: {weights}",
        "measured": median(ready),
        "of which": f"loading {median(ready) - median(bare):.2f}",
    }


async def _start(model: str, settings: dict[str, Any]) -> float:
    began = time.perf_counter()
    async with executor(model, settings):
        return time.perf_counter() - began


def _drop(file: Path) -> bool:
    """Out of the page cache with it; False where the system has no such call."""
    if not hasattr(os, "posix_fadvise"):
        return False
    with file.open("rb") as opened:
        os.fsync(opened.fileno())  # only clean pages can go
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return True
