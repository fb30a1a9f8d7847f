"""What the programs of measurements share: their options, what every file of results holds besides its figures, and how
it is written: after each part, so that an interrupted run keeps what it has."""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import shlex
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from benchmarks import machine
from benchmarks.cases import BLOCK_SIZE, CACHE, LEAD_IN, SEED, SHAPES, Cell, checkpoint
from benchmarks.compare import Player, Unsupported, contest
from benchmarks.engines.process import REFERENCE
from benchmarks.limits import Machine, roof
from ferrum_rpc.logs import configure_logging
from ferrum_rpc.models.layout import parameter_count
from ferrum_rpc.models.spec import ModelSpec
from ferrum_rpc.runtime import openmp_waits, polled

Opening = AbstractAsyncContextManager[Player]
SCHEMA: Final = 1


class Record:
    """A result in the making; ``values`` is what the file holds. A ``benchmark`` is named after the program that runs
    it, and what is unlike its usual run."""

    def __init__(self, benchmark: str, settings: Mapping[str, Any], out: Path) -> None:
        self._bystanders = machine.Bystanders()
        self._out = out
        self.values: dict[str, Any] = {
            "schema": SCHEMA,
            "benchmark": benchmark,
            "command": shlex.join(["python", "-m", f"benchmarks.{benchmark.partition('-')[0]}", *sys.argv[1:]]),
            "began": _now(),
            "ended": "",
            "commit": machine.commit(),
            "hardware": machine.hardware(),
            "versions": machine.versions(),
            "sockets": polled(),
            "others_cpu": None,
            "settings": {"seed": SEED, **settings},
        }

    def save(self, **values: Any) -> None:
        """Add ``values`` and write the file."""
        self.values |= values
        self.values |= {"ended": _now(), "others_cpu": self._bystanders.share()}
        self._out.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.values, indent=1, ensure_ascii=False)
        self._out.write_text(text + "\n", encoding="utf-8")

    def tell(self) -> None:
        """Where it is, and whether the machine was quiet."""
        print(f"\nsaved {self._out}")
        others = self.values["others_cpu"]
        if others is not None and others > machine.QUIET:
            print(f"other processes had {others:.0%} of the cores' time: measure again on a quiet machine")


def read_options(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None, rounds: int, round_s: float | None = None
) -> argparse.Namespace:
    """The command line, with the options that all benchmarks have, and what was not written in it. ``round_s``: seconds
    of a round, about, where it is they that decide how many steps it has."""
    parser.add_argument("--rounds", type=int, help=f"of every side (default: {rounds})")
    if round_s is not None:
        parser.add_argument("--round-seconds", type=float, help=f"of a round, about (default: {round_s:g})")
        parser.add_argument("--threads", type=int, help="compute threads of every side (default: one per core)")
    parser.add_argument("--quick", action="store_true", help="the smallest size, few steps: does it run at all?")
    parser.add_argument("--out", type=Path, help="JSON file (default: benchmarks/results/NAME-<kind of machine>.json)")
    options = parser.parse_args(argv)
    options.rounds = options.rounds or (2 if options.quick else rounds)
    if round_s is not None:
        options.round_seconds = options.round_seconds or (0.01 if options.quick else round_s)
        options.threads = options.threads or machine.hardware()["cores"]
    return options


def out_of(options: argparse.Namespace, name: str) -> Path:
    """The file of a result; a quick run is no result."""
    if options.out is not None:
        return Path(options.out)
    label = machine.label(machine.hardware())
    return CACHE / f"{name}-quick.json" if options.quick else machine.RESULTS / f"{name}-{label}.json"


def finish(
    measuring: Coroutine[Any, Any, Record],
    show: Callable[[dict[str, Any]], None],
    loop: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> None:
    """Measure, show, and say where the file is, and whether the machine was quiet. ``loop`` makes the event loop; None:
    the default one."""
    configure_logging(level="warning")
    with asyncio.Runner(loop_factory=loop) as runner:
        record = runner.run(measuring)
    show(record.values)
    record.tell()


class Contest:
    """The cells of a run, side by side: a result for each, with its limit, saved as it comes. The checkpoint is written
    when something first needs its ``folder``."""

    def __init__(self, options: argparse.Namespace, name: str, shape: str, device: str = "cpu") -> None:
        self.options = options
        self._shape = "tiny" if options.quick else shape
        self.spec = ModelSpec.from_config(SHAPES[self._shape])
        told = {
            "threads": options.threads,
            "rounds": options.rounds,
            "round_s": options.round_seconds,
            "lead_in_steps": LEAD_IN,
            "block_size": BLOCK_SIZE,
            "openmp_waits": openmp_waits(),
            "output": "greedy: the arg-max of every row; the tokens fed were chosen beforehand, the same for all sides",
        }
        self.record = Record(name, told, options.out)
        facts = {"name": self._shape, "parameters": parameter_count(self.spec), "dtype": "bfloat16"}
        facts |= {"layers": len(self.spec.layers), "hidden_size": self.spec.hidden_size}
        facts |= {name: getattr(self.spec.attention_specs[0], name) for name in ("heads", "kv_heads", "head_dim")}
        facts["vocab_size"] = self.spec.vocab_size
        self.record.save(model=facts, cells=[], sides={}, left_out={})
        self.machine = Machine(options.threads, device, quick=options.quick)
        self.machine.read()

    @functools.cached_property
    def folder(self) -> str:
        """The checkpoint."""
        return str(checkpoint(self._shape))

    async def open(self, stack: AsyncExitStack, name: str, opening: Opening) -> Player | None:
        """A side, or None: then it is left out, and the file says why."""
        values = self.record.values
        try:
            player = await stack.enter_async_context(opening)
        except (Unsupported, OSError) as error:
            values["left_out"][name] = str(error)
            print(f"{name} is left out: {error}", flush=True)
            return None
        values["sides"][name] = player.facts
        return player

    async def play(self, cells: Sequence[Cell], players: Mapping[str, Player], reference: str = REFERENCE) -> None:
        """Every cell, by all sides in turn."""
        for cell in cells:
            self.machine.read()
            options = self.options
            result = await contest(cell, players, reference, options.rounds, options.round_seconds)
            self.add(cell, result)
            print(f"{', '.join(players)}: {cell.name}: done", flush=True)

    def add(self, cell: Cell, result: dict[str, Any]) -> None:
        """Save the ``result`` of a cell."""
        results: list[dict[str, Any]] = self.record.values["cells"]
        named = {each.name: each for each in (*self.options.cells, cell)}
        results.append(result)
        limits = self.machine.limits()  # the best readings of the whole run, for every cell
        for each in results:
            each["roof"] = roof(named[each["cell"]], self.spec, limits)
        self.record.save(limits=limits)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
