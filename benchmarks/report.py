"""`docs/benchmarks.md`, written from the JSON files of `benchmarks/results/`: no figure in it was typed by a person.

Run ``python -m benchmarks report`` after a benchmark. A section answers a question of `benchmarks/questions.toml`. The
newest results of all kinds of machines stand side by side in it, row by row; the tables are those of the files.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.cases import CELLS, USUAL
from benchmarks.machine import RESULTS, ROOT, label
from benchmarks.peers import PEERS
from benchmarks.record import LIMIT, PAGE, SCHEMA
from benchmarks.table import bound_of, markdown, number, reached, rows_of, shown

DOCUMENT: Final = ROOT / "docs" / "benchmarks.md"
PAGES_OF_THEIR_OWN: Final = frozenset({"soak.json", "first-light.json"})
"""Results that are no benchmark: tests/faults/soak.py writes docs/soak.md, and docs/operations.md speaks of a first
light."""

NOT_YET: Final = "not yet measured"
OURS: Final = "ours"
Result = dict[str, Any]


def newest(results: Sequence[tuple[str, Result]]) -> list[Result]:
    """The latest result of each variant of a benchmark on each kind of machine, latest first. ``results``: file names
    and what they hold."""
    known = {program for question in PAGE["question"] for program in question["benchmarks"]}
    found: dict[tuple[str, str, str], Result] = {}
    for name, result in sorted(results, key=lambda each: str(each[1].get("ended"))):
        if result.get("benchmark") not in known or result["schema"] != SCHEMA:
            raise ValueError(f"{name}: no report for {result.get('benchmark')!r} of schema {result.get('schema')}")
        machine = label(result["hardware"])
        found[result["benchmark"], result["variant"], machine] = result | {"file": name, "machine": machine}
    return sorted(found.values(), key=lambda each: str(each["ended"]), reverse=True)


def document(results: Sequence[tuple[str, Result]]) -> str:
    """The whole page."""
    found = newest(results)
    if not found:
        return "\n".join([PAGE["head"], "No results yet: run `make bench`.\n"])
    parts = [PAGE["head"], machines(found), glance(found), PAGE["targets"], standing(found)]
    for question in PAGE["question"]:
        runs = [each for program in question["benchmarks"] for each in found if each["benchmark"] == program]
        parts += [f"\n## {question['title']}\n\n{question['text']}", *section(runs, question.get("variants", {}))]
    return "\n".join(parts).rstrip() + "\n"


def machines(found: Sequence[Result]) -> str:
    """What the names of the kinds of machines mean."""
    kinds = {each["machine"]: each["hardware"] for each in reversed(found)}
    rows = [
        (kind, its["cpu"], its["cores"], its["memory_gib"], ", ".join(its["flags"]), its["huge_pages"])
        for kind, its in sorted(kinds.items())
    ]
    return markdown(("machine", "processor", "cores", "memory, GiB", "instructions", "huge pages"), rows, 6) + "\n"


# --- all engines at a glance ------------------------------------------------------------------------------------------


def glance(found: Sequence[Result]) -> str:
    """For each kind of machine with peers: a row for the limit and every engine, a column for every cell."""
    parts = [PAGE["glance"]]
    on = {
        machine: {cell.name: dict(rates_of(cell.name, machine, found)) for cell in CELLS} for machine in peers_on(found)
    }
    engines = dict.fromkeys(name for rates in on.values() for each in rates.values() for name in each)
    engines |= dict.fromkeys(peer.name for peer in PEERS)
    for machine, rates in on.items():
        absent = {name for each in played(machine, found) for name in each["left_out"]}
        rows = [(name, *(_glance(rates[cell.name].get(name), name in absent) for cell in CELLS)) for name in engines]
        rows += [("ours, to reach", *(f"≥ {cell.target:g}" for cell in CELLS))]
        rows += [("goal", *(f"≥ {cell.goal:g}" for cell in CELLS))]
        parts += [f"\n**{machine}**\n", markdown(("", *(cell.name for cell in CELLS)), rows)]
    return "\n".join([*parts, ""])


def peers_on(found: Sequence[Result]) -> list[str]:
    """The kinds of machines with peers, the latest first."""
    return list(dict.fromkeys(each["machine"] for each in found if each["benchmark"] == "peers"))


def played(machine: str, found: Sequence[Result]) -> list[Result]:
    """What was measured on it of all engines and the usual model: rates of two models are no comparison."""
    runs = [each for each in found if each["machine"] == machine and each["benchmark"] in {"peers", "suite"}]
    return [each for each in runs if each["settings"].get("model", f"{USUAL[0]}:").startswith(f"{USUAL[0]}:")]


def rates_of(cell: str, machine: str, found: Sequence[Result]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The limit, and each engine with its latest row, our own first. A row without figures counts too: it says why."""
    rows: dict[str, dict[str, Any]] = {}
    for result in reversed(played(machine, found)):
        cells = result["tables"].get("cells", {"columns": (), "rows": ()})
        rows |= {row["side"]: row for row in rows_of(cells) if row["cell"] == cell}
    yield from sorted(rows.items(), key=lambda each: (each[0] != LIMIT, not each[0].startswith(OURS)))


def _glance(row: Mapping[str, Any] | None, absent: bool) -> str:
    if row is None:
        return "left out" if absent else NOT_YET
    if row["tok/s"] is None:
        return "–"
    ratio = row["ours is, ×"]
    rate = row["tok/s"]
    median = float(rate["median"] if isinstance(rate, Mapping) else rate)
    return number(median) + ("" if ratio is None else f" ({ratio['median']:.2f} ×)")


# --- targets ----------------------------------------------------------------------------------------------------------


def standing(found: Sequence[Result]) -> str:
    """Every target, and where it stands on each kind of machine."""
    kinds = sorted({each["machine"] for each in found})
    rows: dict[str, dict[str, str]] = {}
    for question in PAGE["question"]:
        for result in (each for each in found if each["benchmark"] in question["benchmarks"]):
            for target in result["targets"]:
                row = rows.setdefault(target["what"], {"target": bound_of(target)})
                row["goal"] = "" if target["goal"] is None else bound_of(target | {"bound": target["goal"]})
                if target["value"] is not None:
                    value = number(target["value"]) + target["unit"]
                    row.setdefault(result["machine"], f"{value}, {'yes' if reached(target) else 'no'}")
    lines = []
    for what, row in rows.items():
        values = [row.get(kind, "") for kind in kinds]
        if not any(values):
            values[0] = NOT_YET
        lines.append((what, row["target"], row["goal"], *values))
    return markdown(("what", "target", "goal", *kinds), lines)


# --- a question -------------------------------------------------------------------------------------------------------


def section(runs: Sequence[Result], variants: Mapping[str, str]) -> Iterator[str]:
    """The tables of the runs and under what they were taken; ``variants``: what those are called."""
    if not runs:
        yield "Not yet measured.\n"
    names = sorted({each["variant"] for each in runs})
    for variant in names:
        several = [each for each in runs if each["variant"] == variant]
        if len(names) > 1 or variant:
            yield f"### {variants.get(variant, variant) or variants.get('', 'the demo model')}\n"
        for name in dict.fromkeys(name for each in several for name in each["tables"]):
            having = [each for each in several if name in each["tables"]]
            yield from side_by_side([(each["machine"], each["tables"][name]) for each in having])
        for each in several:
            yield from (f"- {each['machine']}: {note}" for note in each["notes"])
        yield "\n" + conditions(several)


def side_by_side(tables: Sequence[tuple[str, dict[str, Any]]]) -> Iterator[str]:
    """The same table of several kinds of machines: rows about the same thing follow each other."""
    tables = [(machine, table) for machine, table in tables if table["rows"]]
    if not tables:
        return
    first = tables[0][1]
    left = first["left"]
    columns = list(dict.fromkeys(name for _, table in tables for name in table["columns"]))
    about, rest = columns[:left], columns[left:]
    rows: dict[tuple[Any, ...], list[list[Any]]] = {}
    for machine, table in tables:
        seen = Counter[tuple[Any, ...]]()
        for row in rows_of(table):
            what = tuple(f"{row[name]:g}" if isinstance(row[name], float) else shown(row[name]) for name in about)
            seen[what] += 1
            cells = [*what, machine, *(row.get(name) for name in rest)]
            rows.setdefault((*what, seen[what]), []).append(cells)
    if first["text"]:
        yield f"{first['text'].strip()}\n"
    yield markdown((*about, "machine", *rest), itertools.chain(*rows.values()), left + 1) + "\n"
    legend = {term: text for _, table in reversed(tables) for term, text in table["legend"].items()}
    if legend:
        yield "\n".join(f"- **{term}**: {text}" for term, text in legend.items()) + "\n"


def conditions(runs: Sequence[Result]) -> str:
    """Versions, settings and the command of each run, a column each."""
    columns = [dict(facts(each)) for each in runs]
    names = dict.fromkeys(name for each in columns for name in each)
    ordered = sorted(names, key=lambda name: name in {"command", "file"})  # those last, also of sides that one run has
    rows = [(name, *(each.get(name, "") for each in columns)) for name in ordered]
    return markdown(("", *(each["machine"] for each in runs)), rows, 1 + len(runs)) + "\n"


def facts(result: Result) -> Iterator[tuple[str, str]]:
    """What a run's figures are worth nothing without."""
    commit, others = result["commit"], result["others_cpu"]
    yield "taken", f"{result['began']} to {result['ended']}"
    yield "commit", f"`{commit['id'][:12]}`{' with uncommitted changes' if commit['dirty'] else ''}"
    yield "other processes", "unknown" if others is None else f"{others:.1%} of the cores' time"
    yield "versions", ", ".join(f"{package} {version}" for package, version in result["versions"].items())
    yield from ((name.replace("_", " "), str(value)) for name, value in result["settings"].items())
    for name, side in result.get("sides", {}).items():
        more = [f"`{choice}`" for choice in side.get("choices", ())]
        more += [f"{package} {version}" for package, version in side.get("versions", {}).items()]
        more += [side["cache"]] if "cache" in side else []
        yield name, ", ".join([*([side["name"]] * (side["name"] != name)), f"{side['threads']} threads", *more])
    yield "command", f"`{result['command']}`"
    yield "file", f"`benchmarks/results/{result['file']}`"


def main(argv: Sequence[str]) -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks report", description="Write docs/benchmarks.md.")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of JSON files")
    parser.add_argument("--out", type=Path, default=DOCUMENT, help="the page")
    options = parser.parse_args(argv)
    files = sorted(path for path in options.results.glob("*.json") if path.name not in PAGES_OF_THEIR_OWN)
    results = [(path.name, json.loads(path.read_text(encoding="utf-8"))) for path in files]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(document(results), encoding="utf-8")
    print(f"wrote {options.out} from {len(results)} files")
