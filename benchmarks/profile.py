"""`make profile`: where a step's microseconds go, stage by stage, from the first byte built to the rows in hand.

    python -m benchmarks.profile [--models identity demo qwen3-0.6b] [--batches 1 8 32] [--steps 100]

One table: a row for each stage, a column for each model and batch size. The identity model computes next to nothing, so
its columns are the wire and the bookkeeping; the others show what is left of that beside a forward pass.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks import environment
from benchmarks.echo import Echo
from benchmarks.profile_stages import WARM, Profile, profile, steps_of
from benchmarks.tables import number, show_plain
from benchmarks.workload import OUTPUTS, workload

WITHIN: Final = "  of these:"


@dataclass(frozen=True, slots=True)
class Column:
    """A case of the table. ``echo_us``: a bare grpc.aio exchange of the same bytes."""

    name: str
    found: Profile
    echo_us: float


def rows(columns: Sequence[Column]) -> list[tuple[str, ...]]:
    """The table: stages with their share of the step, what they come to, and the echo. Microseconds."""
    lines = [("stage, µs (share of the step)", *(column.name for column in columns))]
    lines += _lines([column.found.stages for column in columns], columns)
    lines += [("",) * (len(columns) + 1)]
    lines += _lines([_owners(column.found.stages) for column in columns], columns, "all of ")
    lines += _lines([column.found.inside for column in columns], columns, f"{WITHIN} ")
    totals: tuple[tuple[str, list[str]], ...] = (
        ("whole step", [number(column.found.whole_us) for column in columns]),
        ("server's bookkeeping", [number(sum(column.found.bookkeeping.values())) for column in columns]),
        ("bare grpc.aio echo of the same bytes", [number(column.echo_us) for column in columns]),
        ("whole step, in echoes", [f"{column.found.whole_us / column.echo_us:.2f}" for column in columns]),
    )
    return lines + [(name, *cells) for name, cells in totals]


def _lines(found: Sequence[dict[str, float]], columns: Sequence[Column], prefix: str = "") -> list[tuple[str, ...]]:
    longest = max(found, key=len)
    names = [*longest, *(name for each in found for name in each if name not in longest)]
    return [
        (
            prefix + name,
            *(
                f"{number(each[name])} ({each[name] / column.found.whole_us:.1%})" if name in each else ""
                for each, column in zip(found, columns, strict=True)
            ),
        )
        for name in dict.fromkeys(names)
    ]


def _owners(stages: dict[str, float]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for stage, value in stages.items():
        owner = stage.partition(":")[0]
        sums[owner] = sums.get(owner, 0.0) + value
    return sums


async def measure(options: argparse.Namespace) -> list[Column]:
    """Every case; a server for each model."""
    columns = []
    async with Echo.open() as echo:
        for model in options.models:
            work = workload(model, max(options.batches), steps_of(options.batches, options.steps))
            profiles = await profile(work, options.batches, options.output, options.steps, options.threads)
            for batch, found in zip(options.batches, profiles, strict=True):
                await echo.prepare(*found.exchange)
                await echo.round(WARM)
                timed = await echo.round(options.steps)
                columns.append(Column(f"{work.name} b{batch}", found, float(np.median(timed.step_s)) * 1e6))
    return columns


def main(argv: Sequence[str] | None = None) -> None:
    """Profile and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profile", description="A step, stage by stage.")
    parser.add_argument("--models", nargs="+", default=["identity", "qwen3-0.6b"], help="names or folders")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32], help="sequences of a step")
    parser.add_argument("--output", choices=OUTPUTS, default="greedy")
    parser.add_argument("--steps", type=int, default=100, help="of each case")
    parser.add_argument("--threads", type=int, default=environment.hardware()["cores"])
    parser.add_argument("--out", type=Path, help="JSON file of the medians (default: none)")
    options = parser.parse_args(argv)
    columns = asyncio.run(measure(options))
    print()
    show_plain(rows(columns))
    if options.out is not None:
        cases = {each.name: {"stages": each.found.stages, "inside": each.found.inside} for each in columns}
        facts = {"commit": environment.commit(), "hardware": environment.hardware(), "microseconds": cases}
        options.out.write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
