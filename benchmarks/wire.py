"""`make bench`: what gRPC costs. The same decode steps by the runner in this process and through a server in another.

    A   the runner in this process, in a thread of its own: what an in-process engine would do
    B   BatchDecode over TCP loopback to `ferrum-rpc serve` in a process of its own, this process being its scheduler
    E   a bare grpc.aio echo of B's bytes with a third process: the wire without us

Both compute with the same number of threads, on the same cores: only one side works at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TypedDict

from benchmarks import environment
from benchmarks.echo import Echo
from benchmarks.inprocess import InProcess
from benchmarks.measure import Case, Point, Schedule, Sides, measure
from benchmarks.remote import Remote
from benchmarks.tables import show, spread
from benchmarks.workload import BLOCK_SIZE, CACHE, LEAD_IN, MAX_STEPS, SEED, outputs_for, workload
from ferrum_rpc.logs import configure_logging

RESULTS: Final = environment.ROOT / "benchmarks" / "results"
SCHEMA: Final = 1


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


class Result(TypedDict):
    """What the JSON file holds."""

    schema: int
    benchmark: str
    command: str
    began: str
    ended: str
    commit: environment.Commit
    hardware: environment.Hardware
    versions: dict[str, str]
    others_cpu: float | None
    settings: dict[str, Any]
    models: list[Served]
    points: list[Point]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.wire", description="What gRPC costs, as ratios in one run."
    )
    parser.add_argument("--models", nargs="+", help="identity, demo, qwen3-0.6b or a folder (default: these three)")
    parser.add_argument("--batches", nargs="+", type=int, help="sequences of a step (default: 1 8 32)")
    parser.add_argument("--outputs", nargs="+", choices=("greedy", "full"), default=["greedy", "full"])
    parser.add_argument("--rounds", type=int, help="pairs of rounds (default: 10)")
    parser.add_argument("--round-seconds", type=float, help="of a round, about (default: 1)")
    parser.add_argument("--threads", type=int, help="compute threads of both sides (default: one per core)")
    parser.add_argument("--quick", action="store_true", help="the identity model, few steps: does it run at all?")
    parser.add_argument("--out", type=Path, help="JSON file (default: benchmarks/results/wire-<kind of machine>.json)")
    options = parser.parse_args(argv)
    quick = options.quick
    options.models = options.models or (["identity"] if quick else ["identity", "demo", "qwen3-0.6b"])
    options.batches = sorted(set(options.batches or ([1, 8] if quick else [1, 8, 32])))
    options.rounds = options.rounds or (2 if quick else 10)
    options.round_seconds = options.round_seconds or (0.02 if quick else 1.0)
    machine = environment.hardware()
    options.threads = options.threads or machine["cores"]
    if options.out is None:  # a quick run is no result
        options.out = CACHE / "wire-quick.json" if quick else RESULTS / f"wire-{environment.label(machine)}.json"
    return options


async def run(options: argparse.Namespace) -> Result:
    """Measure every point. The file is written after each model: an interrupted run keeps what it has."""
    bystanders = environment.Bystanders()
    plan: Schedule = {
        "rounds": options.rounds,
        "round_s": options.round_seconds,
        "max_steps": 16 if options.quick else MAX_STEPS,
    }
    result = _blank(options, plan)
    async with Echo.open() as echo:
        for name in options.models:
            served, points = await _model(name, options, plan, echo)
            result["models"].append(served)
            result["points"] += points
            result["ended"] = _now()
            result["others_cpu"] = bystanders.share()
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return result


def _blank(options: argparse.Namespace, plan: Schedule) -> Result:
    """Everything that is known before the first step."""
    return {
        "schema": SCHEMA,
        "benchmark": "wire",
        "command": shlex.join(["python", "-m", "benchmarks.wire", *sys.argv[1:]]),
        "began": _now(),
        "ended": "",
        "commit": environment.commit(),
        "hardware": environment.hardware(),
        "versions": environment.versions(),
        "others_cpu": None,
        "settings": {
            "threads_in_process": options.threads,
            "threads_server": options.threads,
            "processes": "A and the scheduler of B in one, the server of B in another, the echo server in a third",
            "transport": "TCP loopback, insecure, unary",
            "request_ids": True,
            "block_size": BLOCK_SIZE,
            "seed": SEED,
            "lead_in_steps": LEAD_IN,
            **plan,
        },
        "models": [],
        "points": [],
    }


async def _model(name: str, options: argparse.Namespace, plan: Schedule, echo: Echo) -> tuple[Served, list[Point]]:
    work = workload(name, max(options.batches), plan["max_steps"])
    async with AsyncExitStack() as stack:
        in_process = await stack.enter_async_context(InProcess.open(work, options.threads))
        sides = Sides(in_process, await stack.enter_async_context(Remote.open(work, options.threads)), echo)
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


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, show, save."""
    options = parse(argv)
    configure_logging(level="warning")
    result = asyncio.run(run(options))
    print()
    show(result["points"])
    print(f"\nsaved {options.out}")
    others = result["others_cpu"]
    if others is not None and others > environment.QUIET:
        print(f"other processes had {others:.0%} of the cores' time: measure again on a quiet machine")


if __name__ == "__main__":
    main()
