"""`make bench`: how fast, with the machine's limits and with transformers, and what gRPC costs, all in one run.

The sides alternate round by round. One of them serves the model by transformers' layers over our cache, as families are
served that have no native decoder. Around them: what adapters and other outputs than greedy tokens cost, how decode
steps fare with prefill chunks, and how long a start takes. ``--only`` runs a part.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

from benchmarks import parts
from benchmarks.cases import CELLS, DECODE, QUICK_CELLS, SHAPES, USUAL, Cell, settings
from benchmarks.engines.grpc import INT8, QUANTIZED, Client, open_quantized
from benchmarks.engines.inprocess import INSIDE, Inside
from benchmarks.engines.process import REFERENCE, PeerKind, PeerProcess
from benchmarks.record import Benchmark, Contest, Opening, Option, Record, median_of, shape_of
from benchmarks.table import Row, target

PARTS: Final = ("cells", "outputs", "mixed", "start")
INT8_TARGETS: Final = {"decode b1 @512": 32.0, "decode b8 @256": 140.0, "decode b32 @256": 260.0}
EAGER: Final = PeerKind("transformers eager", "hf")
HF_LAYERS: Final = "ours by transformers' layers, in process"
FULL_ROWS: Final = Cell(DECODE, 32, 256, output="full-bf16")
QUICK_FULL_ROWS: Final = Cell(DECODE, 3, 8, most=4, output="full-bf16")
GREEDY_TARGET: Final = 0.97  # a step in process, in those through gRPC, at least
FULL_TARGET: Final = 0.85  # the same, of `FULL_ROWS`


async def run(options: argparse.Namespace) -> Record:
    """Measure the parts. Starts come first: no other process holds the weights in memory yet."""
    here, quick = Contest(options), options.quick
    record, folder, cells = here.record, here.folder, QUICK_CELLS if quick else CELLS
    rows = list[Row]()
    if "start" in options.only:
        rows.append(await parts.starting(Path(folder), settings(cells, options.threads), 1 if quick else 3))
        record.put("parts", rows)
    if "outputs" in options.only:
        async with parts.with_adapters(folder, cells, options.threads, here.spec) as inside:
            asked = await parts.outputs(inside, cells, options.rounds, options.round_seconds / 4)
        record.put("outputs", parts.output_rows(asked), targets=[parts.adapted_target(asked)])
    mix = parts.QUICK_MIX if quick else parts.MIX
    if not {"cells", "mixed"} & set(options.only):
        return record
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(Client.open(folder, [*cells, mix.cell], options.threads))
        if "cells" in options.only:
            sides: dict[str, Opening] = {
                INSIDE: Inside.open(folder, cells, options.threads),
                HF_LAYERS: Inside.open(folder, cells, options.threads, dtype="bfloat16", model_backend="hf"),
                **{name: open_quantized(name, folder, cells, options.threads) for name in QUANTIZED},
                EAGER.name: PeerProcess.open(EAGER, folder, options.threads, here.spec.vocab_size),
            }
            others = await here.open_all(stack, sides)
            await here.play(cells, {REFERENCE: session, **others})
            await here.play([QUICK_FULL_ROWS if quick else FULL_ROWS], {REFERENCE: session, INSIDE: others[INSIDE]})
            if not options.variant:  # targets are of the usual one
                record.save(targets=[*record.values["targets"], *speeds(record.values["cells"])])
        if "mixed" in options.only:
            rows.append(await parts.mixed(session, mix))
            record.put("parts", rows)
    return record


def speeds(cells: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The targets of tokens a second, and of what gRPC costs."""
    rates = {(cell["cell"], side): found["tokens_per_s"] for cell in cells for side, found in cell["sides"].items()}
    found = []
    for cell in CELLS:
        assert cell.target is not None
        what = f"Qwen3-0.6B bf16 through gRPC, greedy, {cell.name}"
        rate = rates.get((cell.name, REFERENCE))
        found.append(target(what, rate, cell.target, unit=" tok/s", goal=cell.goal))
    for name, bound in INT8_TARGETS.items():
        found.append(target(f"the same, int8 weights, {name}", rates.get((name, INT8)), bound, unit=" tok/s"))
    of_inside = "gRPC against in process, b{}, {}"
    for cell in (each for each in CELLS if each.kind == DECODE):
        what = of_inside.format(cell.batch, "greedy, in a session")
        found.append(target(what, median_of(cells, cell.name, INSIDE), GREEDY_TARGET))
    whole = median_of(cells, FULL_ROWS.name, INSIDE)
    return [*found, target(of_inside.format(FULL_ROWS.batch, "full bf16 rows"), whole, FULL_TARGET)]


BENCHMARK: Final = Benchmark(
    "suite",
    run,
    (
        Option("--model", USUAL[0], "the shape of the model", USUAL[1], choices=[*SHAPES]),
        Option("--only", list(PARTS), "parts", choices=PARTS),
    ),
    round_s=2.0,
    variant=shape_of,
)
