"""What every file of results holds besides its figures, and how it is written: after each part, so that an interrupted
run keeps what it has."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from benchmarks import machine
from benchmarks.cases import CACHE, SEED, tensor_shapes
from ferrum_rpc.runtime import polled

SCHEMA: Final = 1


class Record:
    """A result in the making; ``values`` is what the file holds. ``module`` runs it, where its name is another."""

    def __init__(self, benchmark: str, settings: Mapping[str, Any], out: Path, module: str = "") -> None:
        self._bystanders = machine.Bystanders()
        self._out = out
        self.values: dict[str, Any] = {
            "schema": SCHEMA,
            "benchmark": benchmark,
            "command": shlex.join(["python", "-m", f"benchmarks.{module or benchmark}", *sys.argv[1:]]),
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


def add_common(parser: argparse.ArgumentParser) -> None:
    """Options that all benchmarks have."""
    parser.add_argument("--rounds", type=int, help="of every side")
    parser.add_argument("--quick", action="store_true", help="the smallest size, few steps: does it run at all?")
    parser.add_argument("--out", type=Path, help="JSON file (default: benchmarks/results/NAME-<kind of machine>.json)")


def out_of(options: argparse.Namespace, name: str) -> Path:
    """The file of a result; a quick run is no result."""
    if options.out is not None:
        return Path(options.out)
    label = machine.label(machine.hardware())
    return CACHE / f"{name}-quick.json" if options.quick else machine.RESULTS / f"{name}-{label}.json"


def model_facts(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Of a checkpoint with random weights."""
    sizes = [shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in tensor_shapes(config).values()]
    return {
        "name": name,
        "parameters": sum(sizes),
        "layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "heads": config["num_attention_heads"],
        "kv_heads": config["num_key_value_heads"],
        "head_dim": config["head_dim"],
        "vocab_size": config["vocab_size"],
        "dtype": "bfloat16",
    }


def conditions(name: str, result: Any, more: Sequence[tuple[str, str]]) -> str:
    """The table at the end of a section: hardware, versions and the commands that made it."""
    here, commit = result["hardware"], result["commit"]
    versions = ", ".join(f"{package} {number}" for package, number in result["versions"].items())
    others = "unknown" if result["others_cpu"] is None else f"{result['others_cpu']:.1%} of the cores' time"
    rows = [
        ("taken", f"{result['began']} to {result['ended']}"),
        ("commit", f"`{commit['id'][:12]}`{' with uncommitted changes' if commit['dirty'] else ''}"),
        ("machine", f"{here['cores']} × {here['cpu']}, {here['memory_gib']} GiB, {', '.join(here['flags'])}"),
        ("huge pages", here["huge_pages"]),
        ("other processes", others),
        ("versions", versions),
        *((("gRPC's sockets", f"read {result['sockets']}"),) if "sockets" in result else ()),  # not in older files
        *more,
        ("file", f"`benchmarks/results/{name}`"),
    ]
    table = "\n".join(f"| {key} | {value} |" for key, value in rows)
    return f"| | |\n| --- | --- |\n{table}\n\n```sh\n{result['command']}\npython -m benchmarks.report\n```\n"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
