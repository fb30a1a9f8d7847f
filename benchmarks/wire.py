"""`make bench`: what gRPC costs. The same decode steps by the runner in this process and through a server in another.

    A   the runner in this process, in a thread of its own: what an in-process engine would do
    B   the same over TCP loopback by `ferrum-rpc serve` in a process of its own, this process being its scheduler:
        BatchDecode, or frames of a session (`--way session`)
    E   a bare grpc.aio echo of B's bytes with a third process: the wire without us

Both compute with the same number of threads, on the same cores: only one side works at a time.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final, TypedDict

from benchmarks import environment
from benchmarks.echo import Echo
from benchmarks.inprocess import InProcess
from benchmarks.measure import Case, Point, Schedule, Sides, measure
from benchmarks.record import Record
from benchmarks.remote import Remote, RemoteSession
from benchmarks.tables import show, spread
from benchmarks.workload import BLOCK_SIZE, CACHE, LEAD_IN, MAX_STEPS, outputs_for, workload
from ferrum_rpc.logs import configure_logging

RESULTS: Final = environment.ROOT / "benchmarks" / "results"
WAYS: Final[dict[str, tuple[type[Remote], str]]] = {
    "unary": (Remote, "unary"),
    "session": (RemoteSession, "one session; the echo is unary"),
}
"""Who steps, and how it is told."""


class Served(TypedDict):
    """What a model turned out to be: the runner's own words."""

    name: str
    parameters: int
    vocab_size: int
    weight_dtype: str
    kv_dtype: str
    context: int
    settings: dict[str, Any]
    choices: list[list[str]]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.wire", description="What gRPC costs, as ratios in one run."
    )
    parser.add_argument("--models", nargs="+", help="identity, demo, qwen3-0.6b or a folder (default: these three)")
    parser.add_argument("--batches", nargs="+", type=int, help="sequences of a step (default: 1 8 32)")
    parser.add_argument("--outputs", nargs="+", choices=("greedy", "full"), help="default: both; in a session greedy")
    parser.add_argument("--rounds", type=int, help="pairs of rounds (default: 10)")
    parser.add_argument("--round-seconds", type=float, help="of a round, about (default: 1)")
    parser.add_argument("--threads", type=int, help="compute threads of both sides (default: one per core)")
    parser.add_argument("--way", choices=tuple(WAYS), default="unary", help="of B: calls, or frames of one session")
    parser.add_argument("--engine", choices=("thread", "process"), default="thread", help="of B's server")
    parser.add_argument("--quick", action="store_true", help="the identity model, few steps: does it run at all?")
    parser.add_argument("--out", type=Path, help="JSON file (default: benchmarks/results/wire-<kind of machine>.json)")
    options = parser.parse_args(argv)
    quick = options.quick
    options.models = options.models or (["identity"] if quick else ["identity", "demo", "qwen3-0.6b"])
    options.outputs = options.outputs or (["greedy", "full"] if options.way == "unary" else ["greedy"])
    if options.way == "session" and "full" in options.outputs:
        parser.error("in a session whole rows come in frames of their own: --outputs greedy")
    options.batches = sorted(set(options.batches or ([1, 8] if quick else [1, 8, 32])))
    options.rounds = options.rounds or (2 if quick else 10)
    options.round_seconds = options.round_seconds or (0.02 if quick else 1.0)
    machine = environment.hardware()
    options.threads = options.threads or machine["cores"]
    if options.out is None:  # a quick run is no result
        label = f"{_benchmark(options)}-{environment.label(machine)}"
        options.out = CACHE / "wire-quick.json" if quick else RESULTS / f"{label}.json"
    return options


async def run(options: argparse.Namespace) -> Record:
    """Measure every point. The file is written after each model: an interrupted run keeps what it has."""
    plan: Schedule = {
        "rounds": options.rounds,
        "round_s": options.round_seconds,
        "max_steps": 16 if options.quick else MAX_STEPS,
    }
    record = Record(_benchmark(options), _settings(options, plan), options.out, module="wire")
    models: list[Served] = []
    points: list[Point] = []
    async with Echo.open() as echo:
        for name in options.models:
            served, measured = await _model(name, options, plan, echo)
            models.append(served)
            points += measured
            record.save(models=models, points=points)
    return record


def _benchmark(options: argparse.Namespace) -> str:
    """What the result is called: unlike ways and engines are unlike benchmarks."""
    parts = ("wire", "session" if options.way == "session" else "", "process" if options.engine == "process" else "")
    return "-".join(part for part in parts if part)


def _settings(options: argparse.Namespace, plan: Schedule) -> dict[str, Any]:
    return {
        "threads_in_process": options.threads,
        "threads_server": options.threads,
        "processes": "A and the scheduler of B in one, the server of B in another, the echo server in a third",
        "engine": options.engine,
        "transport": f"TCP loopback, insecure, {WAYS[options.way][1]}",
        "request_ids": True,
        "block_size": BLOCK_SIZE,
        "lead_in_steps": LEAD_IN,
        **plan,
    }


async def _model(name: str, options: argparse.Namespace, plan: Schedule, echo: Echo) -> tuple[Served, list[Point]]:
    work = workload(name, max(options.batches), plan["max_steps"])
    async with AsyncExitStack() as stack:
        in_process = await stack.enter_async_context(InProcess.open(work, options.threads))
        remote = WAYS[options.way][0].open(work, options.threads, options.engine)
        sides = Sides(in_process, await stack.enter_async_context(remote), echo)
        points = []
        for batch in options.batches:
            for output in outputs_for(options.outputs, batch):
                point = await measure(Case(work.name, work.context, batch, output), sides, plan)
                points.append(point)
                _tell(point)
        info, device = in_process.runner.info, in_process.runner.device
    served: Served = {
        "name": work.name,
        "parameters": info.parameters,
        "vocab_size": info.vocab_size,
        "weight_dtype": info.weight_dtype,
        "kv_dtype": info.kv_dtype,
        "context": work.context,
        "settings": work.settings,
        "choices": [list(choice) for choice in device.choices],
    }
    return served, points


def _tell(point: Point) -> None:
    """The pairs as they come."""
    inside, outside, ratio = point["in_process"]["step_ms"], point["grpc"]["step_ms"], point["ratio"]
    print(
        f"{point['model']} batch {point['batch']} {point['output']}: in process {spread(inside)} ms,"
        f" gRPC {spread(outside)} ms, ratio {ratio['median']:.3f} of pairs {' '.join(map(str, ratio['pairs']))}",
        flush=True,
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, show, save."""
    options = parse(argv)
    configure_logging(level="warning")
    record = asyncio.run(run(options))
    print()
    show(record.values["points"])
    record.tell()


if __name__ == "__main__":
    main()
