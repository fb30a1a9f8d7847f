"""`docs/benchmarks.md`, written from the JSON files of `benchmarks/results/`: no figure in it was typed by a person.

Run ``python -m benchmarks.report`` after a benchmark.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.glance import PICTURE, glance, panels, svg
from benchmarks.machine import RESULTS, ROOT
from benchmarks.record import SCHEMA
from benchmarks.sections import RENDERERS
from benchmarks.tables import TEXTS
from benchmarks.targets import newest, standing

DOCUMENT: Final = ROOT / "docs" / "benchmarks.md"
PAGES_OF_THEIR_OWN: Final = frozenset({"soak.json"})
"""Results that are no benchmark: tests/faults/soak.py writes docs/soak.md."""


def document(results: Sequence[tuple[str, Any]]) -> str:
    """The whole page. ``results``: file names and what they hold."""
    if not results:
        return "\n".join([TEXTS["head"], "No results yet: run `make bench`.\n"])
    programs = list(RENDERERS)
    found = []
    for name, result in results:
        program = result["benchmark"].partition("-")[0]
        if program not in programs or result["schema"] != SCHEMA:
            raise ValueError(f"{name}: no report for {result['benchmark']!r} of schema {result['schema']}")
        found.append((programs.index(program), result["benchmark"], RENDERERS[program](name, result)))
    latest = newest(results)
    parts = [TEXTS["head"], glance(latest), f"{TEXTS['targets']}\n{standing(latest).markdown()}\n"]
    parts += [text for _, _, text in sorted(found, key=lambda each: each[:2])]
    return "\n".join(parts)


def main(argv: Sequence[str] | None = None) -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description="Write docs/benchmarks.md.")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of JSON files")
    parser.add_argument("--out", type=Path, default=DOCUMENT, help="the page")
    options = parser.parse_args(argv)
    files = sorted(path for path in options.results.glob("*.json") if path.name not in PAGES_OF_THEIR_OWN)
    results = [(path.name, json.loads(path.read_text(encoding="utf-8"))) for path in files]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(document(results), encoding="utf-8")
    if found := panels(newest(results)):
        options.out.with_name(PICTURE).write_text(svg(found), encoding="utf-8")
    print(f"wrote {options.out} from {len(results)} files")


if __name__ == "__main__":
    main()
