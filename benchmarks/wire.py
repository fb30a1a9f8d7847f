"""`make bench`: what gRPC costs. The same decode steps by the runner in this process and through a server in another.

    A   the runner in this process, in a thread of its own: what an in-process engine would do
    B   the same over TCP loopback by `ferrum-rpc serve` in a process of its own, this process being its scheduler:
        BatchDecode, or frames of a session (`--way session`)
    E   a bare grpc.aio echo of B's bytes with a third process: the wire without us

Both compute with the same number of threads, on the same cores: only one side works at a time.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

from benchmarks.cases import BLOCK_SIZE, CONTEXT, DECODE, IDENTITY, IDENTITY_CONTEXT, LEAD_IN, Cell, model_path
from benchmarks.compare import Player, Round, contest
from benchmarks.engines.echo import EchoCalls, echo_channel
from benchmarks.engines.grpc import Calls, Frames
from benchmarks.engines.inprocess import Inside
from benchmarks.record import Benchmark, Option, Record
from benchmarks.table import target

IN_PROCESS, GRPC, ECHO = "in process", "gRPC", "echo"
WAYS: Final[dict[str, tuple[type[Calls], str, str]]] = {
    "unary": (Calls, "unary", "unary calls"),
    "session": (Frames, "one session; the echo is unary", "in a session"),
}
"""Who steps, and what it is called in the settings and in targets."""

MAX_STEPS: Final = 128
ECHOES: Final = 32  # exchanges of an echo round, at least: they are cheap beside a step


class Echo(EchoCalls):
    """Exchanges of the bytes of the last step of a side, one after the other."""

    async def round(self, cell: Cell, number: int, steps: int) -> Round:
        return await self.turn(1, max(steps, ECHOES))


GREEDY_TARGET: Final = 0.97  # in-process over gRPC step time, at least
FULL_TARGET: Final = 0.85  # the same, of whole rows of 32 sequences
ECHO_TARGET: Final = 2.0
"""The identity model's step through the whole service, in bare echoes of the same bytes, at most."""


def row(cell: Mapping[str, Any], way: str = "unary") -> dict[str, Any]:
    """Of a result of `contest`, and its model."""
    inside, grpc, echo = (cell["sides"][side] for side in (IN_PROCESS, GRPC, ECHO))
    echo_ms, step_ms = echo["step_ms"]["median"], grpc["step_ms"]["median"]
    standing: Any = None
    if cell["model"] == IDENTITY:
        standing = f"≤ {ECHO_TARGET:g} echoes: {step_ms / echo_ms:.2f}"
    elif cell["output"] == "greedy" or (cell["output"], cell["batch"]) == ("full-bf16", 32):
        of = f"greedy, {WAYS[way][2]}" if cell["output"] == "greedy" else "full bf16 rows"
        what = f"gRPC against in process, b{cell['batch']}, {of}" if cell["model"] == "qwen3-0.6b" else ""
        least = GREEDY_TARGET if cell["output"] == "greedy" else FULL_TARGET
        standing = target(what, cell["ratios"][IN_PROCESS]["median"], least)
    return {
        "model": cell["model"],
        "batch": cell["batch"],
        "output": cell["output"],
        "in process, ms": inside["step_ms"],
        "gRPC, ms": grpc["step_ms"],
        "tok/s in process": inside["tokens_per_s"],
        "tok/s gRPC": grpc["tokens_per_s"],
        "ratio": cell["ratios"][IN_PROCESS],
        "target": standing,
        "forward in server, ms": grpc["forward_ms"]["median"],
        "echo, ms": echo["step_ms"],
        "ours, ms": round(step_ms - inside["step_ms"]["median"] - echo_ms, 4),
        "around forward, ms": round(grpc["beyond_ms"]["median"] - echo_ms, 4),
    }


def cells_of(model: str, options: argparse.Namespace) -> list[Cell]:
    """Every batch size with its outputs. Whole rows have frames of their own in a session; in float32 they are of one
    sequence."""
    context, most = IDENTITY_CONTEXT if model == IDENTITY else CONTEXT, 16 if options.quick else MAX_STEPS
    return [
        Cell(DECODE, batch, context, most=most, output=output)
        for batch in sorted({*options.batches})  # a larger batch begins with the sequences of a smaller one
        for output in ("greedy", *(() if options.way == "session" else ("full-bf16", *["full-f32"] * (batch == 1))))
    ]


async def run(options: argparse.Namespace) -> Record:
    """Measure every cell. The file is written after each model: an interrupted run keeps what it has."""
    record = Record(
        options,
        threads=f"{options.threads} in process, as many in the server",
        processes="A and the scheduler of B in one, the server of B in another, the echo server in a third",
        transport=f"TCP loopback, insecure, {WAYS[options.way][1]}",
        block_size=BLOCK_SIZE,
        lead_in_steps=LEAD_IN,
        round_s=options.round_seconds,
    )
    cells: list[dict[str, Any]] = []
    record.values["cells"] = cells
    async with echo_channel() as channel:
        for name in options.models:
            facts, measured = await _model(name, options, channel)
            cells += measured
            record.values["settings"][facts[0]] = facts[1]
            same, of = (sum(cell["sides"][IN_PROCESS]["same_rounds"][index] for cell in cells) for index in (0, 1))
            repeated, kept = (sum(cell["disturbed"][index] for cell in cells) for index in (0, 1))
            record.values["notes"] = [
                f"The last rows of {same} of {of} pairs of rounds were bitwise the same on both sides. Other processes "
                f"disturbed {repeated + kept} pairs: {repeated} were repeated, {kept} kept."
            ]
            record.put("steps", [row(each, options.way) for each in cells])
    return record


async def _model(name: str, options: argparse.Namespace, channel: Any) -> tuple[tuple[str, str], list[dict[str, Any]]]:
    """Its name and what it is; the results of its cells."""
    path, cells, found = model_path(name), cells_of(name, options), []
    async with AsyncExitStack() as stack:
        inside = await stack.enter_async_context(Inside.open(path, cells, options.threads))
        remote = WAYS[options.way][0].open(path, cells, options.threads)
        grpc = await stack.enter_async_context(remote)
        players: dict[str, Player] = {IN_PROCESS: inside, GRPC: grpc, ECHO: Echo(channel, grpc)}
        for cell in cells:
            result = await contest(cell, players, GRPC, options.rounds, options.round_seconds)
            found.append({"model": Path(path).name, **result})
            print(f"{name}, b{cell.batch}, {cell.output}: done", flush=True)
        info, device = inside.runner.info, inside.runner.device
    size = f"{info.parameters / 1e6:,.0f} million parameters" if info.parameters else "no weights"
    told = f"{size}, vocabulary {info.vocab_size:,}, weights {info.weight_dtype}, cache {info.kv_dtype}"
    chosen = ", ".join(f"`{choice}`" for choice, _ in device.choices)
    return (Path(path).name, f"{told}, {cells[0].context} tokens of context; {chosen}"), found


BENCHMARK: Final = Benchmark(
    "wire",
    run,
    (
        Option("--models", [IDENTITY, "demo", "qwen3-0.6b"], "names or folders", [IDENTITY]),
        Option("--batches", [1, 8, 32], "sequences of a step", [1, 8]),
        Option("--way", "unary", "of B: calls, or frames of one session", choices=tuple(WAYS)),
    ),
    rounds=10,
    round_s=1.0,
    variant=lambda options: "session" * (options.way == "session"),
)
