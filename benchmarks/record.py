"""What all measurements share: how one is declared and run, its command line, and the file of its result.

`python -m benchmarks NAME` runs a `Benchmark`. Its file is written after each part, so that an interrupted run keeps
what it has. The file holds its own tables and targets: `benchmarks.report` only lays them out.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import re
import shlex
import tomllib
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from benchmarks import machine
from benchmarks.cases import BLOCK_SIZE, BUILT_IN, CACHE, LEAD_IN, SEED, SHAPES, USUAL, Cell, checkpoint
from benchmarks.compare import Player, Unsupported, contest
from benchmarks.engines.process import REFERENCE
from benchmarks.limits import Machine, roof
from benchmarks.table import Row, is_target, show, table
from ferrum_rpc.logs import configure_logging
from ferrum_rpc.models.layout import parameter_count
from ferrum_rpc.models.spec import ModelSpec
from ferrum_rpc.runtime import openmp_waits, polled

Opening = AbstractAsyncContextManager[Player]
SCHEMA: Final = 2
PAGE: Final[dict[str, Any]] = tomllib.loads((machine.ROOT / "benchmarks" / "questions.toml").read_text("utf-8"))
"""The words of the page: its questions, and what stands around the tables that answer them."""


@dataclass(frozen=True, slots=True)
class Option:
    """A flag of a benchmark. ``default``: its value if it is not given, a list where it takes several; ``quick``: the
    same of a quick run. ``kind``: of the values, where the default does not say it."""

    flag: str
    default: Any
    help: str
    quick: Any = None
    choices: Sequence[str] | None = None
    kind: Callable[[str], Any] | None = None

    def add_to(self, parser: argparse.ArgumentParser, *, quick: bool) -> None:
        default = self.quick if quick and self.quick is not None else self.default
        if default is False:
            parser.add_argument(self.flag, action="store_true", help=self.help)
            return
        values = self.default if isinstance(self.default, list) else [self.default]
        said = "" if self.default is None else f" (default: {' '.join(map(str, values))})"
        parser.add_argument(
            self.flag,
            default=default,
            type=self.kind or type(values[0]),
            nargs="+" if isinstance(self.default, list) else None,
            choices=self.choices,
            help=self.help + said,
        )


@dataclass(frozen=True, slots=True)
class Benchmark:
    """``name``: of the file of results, and of the command. ``round_s``: seconds of a round, about, where it is they
    that decide how many steps it has. ``variant``: what is unlike its usual run; such results are of their own.
    ``loop`` makes the event loop. ``file``: of results, if it is not named after the kind of machine."""

    name: str
    run: Callable[[argparse.Namespace], Coroutine[Any, Any, Record]]
    options: Sequence[Option] = ()
    rounds: int = 5
    round_s: float | None = None
    variant: Callable[[argparse.Namespace], str] = lambda _: ""
    loop: Callable[[], asyncio.AbstractEventLoop] | None = None
    file: str = ""

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """The command line, with the options that all benchmarks have, and what was not given. ``variant`` and ``out``
        are set; a quick run is no result."""
        parser = argparse.ArgumentParser(
            prog=f"python -m benchmarks {self.name}", description=question_of(self.name).get("title")
        )
        every = [*self.options, Option("--rounds", self.rounds, "of every side", 2)]
        if self.round_s is not None:
            every.append(Option("--round-seconds", self.round_s, "of a round, about", 0.01))
            every.append(Option("--threads", machine.hardware()["cores"], "compute threads of every side"))
        for option in every:
            option.add_to(parser, quick="--quick" in argv)
        parser.add_argument("--quick", action="store_true", help="the smallest size, few steps: does it run at all?")
        parser.add_argument("--out", type=Path, help="JSON file (default: benchmarks/results/NAME-<machine kind>.json)")
        options = parser.parse_args(argv)
        options.command = shlex.join(["python", "-m", "benchmarks", self.name, *argv])
        options.variant = self.variant(options)
        options.benchmark = self.name
        name = "-".join(filter(None, (self.name, options.variant)))
        label = machine.label(machine.hardware())
        usual = f"{name}-{label}.json" if options.variant or not self.file else self.file
        own = CACHE / f"{name}-quick.json" if options.quick else machine.RESULTS / usual
        options.out = options.out or own
        return options

    def main(self, argv: Sequence[str]) -> None:
        """Measure, show, and say where the file is and whether the machine was quiet."""
        options = self.parse(argv)
        configure_logging(level="warning")
        with asyncio.Runner(loop_factory=self.loop) as runner:
            runner.run(self.run(options)).tell()


def question_of(benchmark: str) -> dict[str, Any]:
    """What a benchmark answers; nothing if it is none of the page's."""
    return next((each for each in PAGE["question"] if benchmark in each["benchmarks"]), {})


class Record:
    """A result in the making; ``values`` is what the file holds. ``settings``: under what it is measured."""

    def __init__(self, options: argparse.Namespace, **settings: Any) -> None:
        self._bystanders = machine.Bystanders()
        self._out = Path(options.out)
        question = question_of(options.benchmark)
        self._words: dict[str, dict[str, Any]] = question.get("tables", {})
        self.values: dict[str, Any] = {
            "schema": SCHEMA,
            "benchmark": options.benchmark,
            "variant": options.variant,
            "command": options.command,
            "began": _now(),
            "ended": "",
            "commit": machine.commit(),
            "hardware": machine.hardware(),
            "versions": machine.versions(),
            "others_cpu": None,
            "settings": {"seed": SEED, "rounds": options.rounds, **settings, "gRPC's sockets": f"read {polled()}"},
            "tables": {name: table(()) for name in question.get("tables", ())},  # in the order of the page
            "targets": [],
            "notes": [],
        }

    def put(self, name: str, rows: Iterable[Row], *, targets: Sequence[Mapping[str, Any]] = ()) -> None:
        """Write a table, and targets, those of its rows among them, in place of those with the same words; and write
        the file."""
        rows = list(rows)
        self.values["tables"][name] = table(rows, **(PAGE["tables"].get(name, {}) | self._words.get(name, {})))
        own = [cell for row in rows for cell in row.values() if is_target(cell)]
        standing = {each["what"]: each for each in (*self.values["targets"], *targets, *own) if each["what"]}
        self.save(targets=list(standing.values()))

    def save(self, **values: Any) -> None:
        self.values |= values
        self.values |= {"ended": _now(), "others_cpu": self._bystanders.share()}
        self._out.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.values, indent=1, ensure_ascii=False)
        self._out.write_text(text + "\n", encoding="utf-8")

    def tell(self) -> None:
        """The tables, where the file is, and whether the machine was quiet."""
        for found in self.values["tables"].values():
            if found["rows"]:
                print()
                show(found)
        print("", *self.values["notes"], f"saved {self._out}", sep="\n")
        others = self.values["others_cpu"]
        if others is not None and others > machine.QUIET:
            print(f"other processes had {others:.0%} of the cores' time: measure again on a quiet machine")


FEWER_BITS: Final = re.compile(r"int[48]|Q[48]_")
"""In the name of a side that reads half the bytes or less: the limit is not its own."""

LIMIT: Final = "limit of the machine"


def cell_rows(results: Iterable[Mapping[str, Any]]) -> list[Row]:
    """The limit of each cell, and every side of it; the results of one cell follow each other."""
    rows: list[Row] = []
    results = list(results)
    names = list(dict.fromkeys(cell["cell"] for cell in results))
    open_limits = {*names}
    for cell in sorted(results, key=lambda each: names.index(each["cell"])):
        name, roof_ = {"cell": cell["cell"]}, cell["roof"]
        if roof_ is not None and name["cell"] in open_limits:
            open_limits.remove(name["cell"])
            bound = f"bound by {roof_['bound_by']}"
            rows.append(name | {"side": LIMIT, "tok/s": roof_["tokens_per_s"], "step, ms": bound})
        for side, found in cell["sides"].items():
            same, of = found["same_tokens"]
            limited = roof_ is not None and not FEWER_BITS.search(side)
            rows.append(
                {
                    **name,
                    "side": side,
                    "tok/s": {"median": found["tokens_per_s"], "low": found["low"], "high": found["high"]},
                    "step, ms": found["step_ms"],
                    "of the limit": round(found["tokens_per_s"] / roof_["tokens_per_s"], 3) if limited else None,
                    "ours is, ×": cell["ratios"].get(side),
                    "same tokens": f"{same} of {of}" if of else None,  # nothing of a side that feeds its own
                }
            )
        rows += [name | {"side": side, "step, ms": f"none: {reason}"} for side, reason in cell["absent"].items()]
    return rows


class Contest:
    """The cells of a run, side by side: a result for each, with its limit, saved as it comes. The checkpoint is written
    when something first needs its ``folder``. ``shape``: where ``options`` have no ``model``."""

    def __init__(self, options: argparse.Namespace, shape: str = "qwen3-0.6b", device: str = "cpu") -> None:
        self.options = options
        self._shape = getattr(options, "model", "tiny" if options.quick else shape)
        self.spec = ModelSpec.from_config(SHAPES[self._shape])
        size = f"{parameter_count(self.spec) / 1e6:,.0f} million parameters"
        self.record = Record(
            options,
            model=f"{self._shape}: {size}, bfloat16, random weights",
            threads=options.threads,
            round_s=options.round_seconds,
            lead_in_steps=LEAD_IN,
            block_size=BLOCK_SIZE,
            openmp_waits=openmp_waits(),
            output="greedy: the arg-max of every row; the tokens fed were chosen beforehand, the same for all sides",
        )
        self.model = self._shape
        self._played: list[Cell] = []
        self.record.save(cells=[], sides={}, left_out={})
        self.machine = Machine(options.threads, device, quick=options.quick)
        self.machine.read()
        self.note_limits()

    @functools.cached_property
    def folder(self) -> str:
        return str(checkpoint(self._shape))

    async def open(self, stack: AsyncExitStack, name: str, opening: Opening) -> Player | None:
        """A side, or None: then it is left out, and the file says why."""
        try:
            return await stack.enter_async_context(opening)
        except (Unsupported, OSError) as error:
            self.leave_out(name, str(error))
            return None

    async def open_all(self, stack: AsyncExitStack, openings: Mapping[str, Opening]) -> dict[str, Player]:
        """Those of the sides that are there."""
        found = {name: await self.open(stack, name, opening) for name, opening in openings.items()}
        return {name: player for name, player in found.items() if player}

    def leave_out(self, name: str, reason: str) -> None:
        values = self.record.values
        values["left_out"][name] = reason
        values["notes"].append(f"{name} was left out: {reason}")
        print(values["notes"][-1], flush=True)
        self.record.save()

    async def play(self, cells: Sequence[Cell], players: Mapping[str, Player], reference: str = REFERENCE) -> None:
        """Every cell, by all sides in turn."""
        self.record.values["sides"] |= {name: player.facts for name, player in players.items()}
        for cell in cells:
            self.machine.read()
            options = self.options
            result = await contest(cell, players, reference, options.rounds, options.round_seconds)
            self.add(cell, result)
            print(f"{', '.join(players)}: {cell.name}: done", flush=True)

    def add(self, cell: Cell, result: dict[str, Any]) -> None:
        """Save the ``result`` of a cell."""
        results: list[dict[str, Any]] = self.record.values["cells"]
        results.append(result)
        self._played.append(cell)
        limits = self.machine.limits()  # the best readings of the whole run, for every cell
        for each, played in zip(results, self._played, strict=True):
            each["roof"] = roof(played, self.spec, limits)
        self.note_limits()
        self.record.put("cells", cell_rows(results))

    def note_limits(self) -> None:
        """The best readings so far, and how many turns others disturbed."""
        limits, values = self.machine.limits(), self.record.values
        values["settings"]["limits"] = (
            f"memory {limits['read_gb_s']:.1f} GB/s, bfloat16 products {limits['bf16_tflops']:.2f} TFLOP/s with "
            f"{limits['threads']} threads, best of {len(limits['readings'])} readings of this run"
        )
        repeated, kept = (sum(each["disturbed"][index] for each in values["cells"]) for index in (0, 1))
        values["settings"]["disturbed rounds"] = f"{repeated} repeated, {kept} kept"
        self.record.save(limits=limits)


def shape_of(options: argparse.Namespace) -> str:
    """The variant of a benchmark with ``--model``: a shape's results are of their own."""
    return "" if options.model in (*BUILT_IN, *USUAL) else str(options.model)


def median_of(cells: Iterable[Mapping[str, Any]], cell: str, of: str) -> float | None:
    """The median of the pairs' ratios to side ``of`` in a cell that is measured, of results of `contest`."""
    return next((each["ratios"][of]["median"] for each in cells if each["cell"] == cell and of in each["ratios"]), None)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
