"""`make bench`: what gRPC costs. The same decode steps by the runner in this process and through a server in another.

    A   the runner in this process, in a thread of its own: what an in-process engine would do
    B   the same over TCP loopback by `ferrum-rpc serve` in a process of its own, this process being its scheduler:
        BatchDecode, or frames of a session (`--way session`)
    E   a bare grpc.aio echo of B's bytes with a third process: the wire without us

Both compute with the same number of threads, on the same cores: only one side works at a time.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

from benchmarks import tables
from benchmarks.cases import (
    BLOCK_SIZE,
    CONTEXT,
    DECODE,
    IDENTITY,
    IDENTITY_CONTEXT,
    LEAD_IN,
    Cell,
    model_path,
    settings,
)
from benchmarks.compare import Player, Round, contest
from benchmarks.engines.echo import EchoCalls, echo_channel
from benchmarks.engines.grpc import Calls, Frames
from benchmarks.engines.inprocess import Inside
from benchmarks.record import Record, finish, out_of, read_options

WAYS: Final[dict[str, tuple[type[Calls], str]]] = {
    "unary": (Calls, "unary"),
    "session": (Frames, "one session; the echo is unary"),
}
"""Who steps, and how it is told."""

MAX_STEPS: Final = 128
ECHOES: Final = 32
"""Exchanges of an echo round, at least: they are cheap beside a step."""


class Echo(EchoCalls):
    """Exchanges of the bytes of the last step of a side, one after the other."""

    async def prepare(self, cell: Cell) -> None:
        """There is nothing to make."""

    async def round(self, cell: Cell, number: int, steps: int) -> Round:
        """Timed exchanges."""
        return await self.turn(1, max(steps, ECHOES))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.wire", description="What gRPC costs, as ratios in one run."
    )
    parser.add_argument("--models", nargs="+", help="identity, demo, qwen3-0.6b or a folder (default: these three)")
    parser.add_argument("--batches", nargs="+", type=int, help="sequences of a step (default: 1 8 32)")
    parser.add_argument("--outputs", nargs="+", choices=("greedy", "full"), help="default: both; in a session greedy")
    parser.add_argument("--way", choices=tuple(WAYS), default="unary", help="of B: calls, or frames of one session")
    parser.add_argument("--engine", choices=("thread", "process"), default="thread", help="of B's server")
    options = read_options(parser, argv, rounds=10, round_s=1.0)
    quick = options.quick
    options.models = options.models or ([IDENTITY] if quick else [IDENTITY, "demo", "qwen3-0.6b"])
    options.outputs = options.outputs or (["greedy", "full"] if options.way == "unary" else ["greedy"])
    if options.way == "session" and "full" in options.outputs:
        parser.error("in a session whole rows come in frames of their own: --outputs greedy")
    options.batches = sorted(set(options.batches or ([1, 8] if quick else [1, 8, 32])))
    words = ("wire", "session" * (options.way == "session"), "process" * (options.engine == "process"))
    options.name = "-".join(filter(None, words))  # unlike ways and engines are unlike benchmarks
    options.out = out_of(options, options.name)
    return options


def outputs_for(requested: Sequence[str], batch: int) -> list[str]:
    """The columns of a batch size: full rows are bfloat16, and for one sequence float32 as well."""
    columns = ["greedy"] if "greedy" in requested else []
    if "full" in requested:
        columns += ["full-bf16", "full-f32"] if batch == 1 else ["full-bf16"]
    return columns


def cells_of(model: str, options: argparse.Namespace) -> list[Cell]:
    """Every batch size with its outputs."""
    context, most = IDENTITY_CONTEXT if model == IDENTITY else CONTEXT, 16 if options.quick else MAX_STEPS
    return [
        Cell(DECODE, batch, context, most=most, output=output)
        for batch in options.batches
        for output in outputs_for(options.outputs, batch)
    ]


async def run(options: argparse.Namespace) -> Record:
    """Measure every cell. The file is written after each model: an interrupted run keeps what it has."""
    told = {
        "threads_in_process": options.threads,
        "threads_server": options.threads,
        "processes": "A and the scheduler of B in one, the server of B in another, the echo server in a third",
        "engine": options.engine,
        "transport": f"TCP loopback, insecure, {WAYS[options.way][1]}",
        "request_ids": True,
        "block_size": BLOCK_SIZE,
        "lead_in_steps": LEAD_IN,
        "rounds": options.rounds,
        "round_s": options.round_seconds,
    }
    record = Record(options.name, told, options.out)
    models: list[dict[str, Any]] = []
    cells: list[dict[str, Any]] = []
    async with echo_channel() as channel:
        for name in options.models:
            facts, measured = await _model(name, options, channel)
            models.append(facts)
            cells += measured
            record.save(models=models, cells=cells)
    return record


async def _model(name: str, options: argparse.Namespace, channel: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    path, cells, found = model_path(name), cells_of(name, options), []
    async with AsyncExitStack() as stack:
        inside = await stack.enter_async_context(Inside.open(path, cells, options.threads))
        remote = WAYS[options.way][0].open(path, cells, options.threads, options.engine)
        grpc = await stack.enter_async_context(remote)
        players: dict[str, Player] = {tables.IN_PROCESS: inside, tables.GRPC: grpc, tables.ECHO: Echo(channel, grpc)}
        for cell in cells:
            result = await contest(cell, players, tables.GRPC, options.rounds, options.round_seconds)
            found.append({"model": Path(path).name, **result, "exchange_bytes": [len(each) for each in grpc.exchange]})
            tables.show(tables.wire(found[-1:]))
        info, device = inside.runner.info, inside.runner.device
    return {
        "name": Path(path).name,
        "parameters": info.parameters,
        "vocab_size": info.vocab_size,
        "weight_dtype": info.weight_dtype,
        "kv_dtype": info.kv_dtype,
        "context": cells[0].context,
        "settings": settings(cells, options.threads),
        "choices": [list(choice) for choice in device.choices],
    }, found


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, show, save."""

    def show(values: dict[str, Any]) -> None:
        print()
        tables.show(tables.wire(values["cells"]), "wire")

    finish(run(parse(argv)), show)


if __name__ == "__main__":
    main()
