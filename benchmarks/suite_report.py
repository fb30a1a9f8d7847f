"""The sections of `docs/benchmarks.md` that say how fast: all engines at a glance, a picture, the suite, the peers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from benchmarks import targets
from benchmarks.cells import CELLS
from benchmarks.contest import CellResult
from benchmarks.ours import INSIDE, INT8, REFERENCE
from benchmarks.peers import LEFT_OUT, PEERS
from benchmarks.plot import Bar, Panel
from benchmarks.record import conditions
from benchmarks.suite_tables import (
    COLUMNS,
    LEGEND,
    NOT_YET,
    PARTS_COLUMNS,
    Row,
    cell_rows,
    limit_line,
    part_rows,
    table,
)
from benchmarks.tables import number

PICTURE: Final = "benchmarks.svg"

GLANCE: Final = """## All engines at a glance

Qwen3-0.6B shape, random weights in bfloat16, greedy, tokens a second. In brackets: how many times as fast ours is
through gRPC, by pairs of rounds of one run; figures of different rows may be of different runs, the brackets never are.
Like is set beside like: a peer with 8-bit weights beside ours with int8 weights.
"""
TARGETS: Final = """## Targets, and where they stand

Of performance work; nothing here passes or fails a build. Each figure is explained in the section of its file.
"""
SUITE: Final = """## How fast

The same weights and the same tokens by our runner in the measuring process, by `ferrum-rpc serve` in another one
through a session, by a third with weights rounded to 8 bits, and by transformers in a fourth, driven through its own
forward pass and cache without `generate` around it. Rounds of all sides alternate; a ratio belongs to a pair of rounds
that followed each other.
"""
PEERS_TEXT: Final = """## Beside other engines

One peer at a time beside our server, each in a process of its own with the same number of threads: A B A B for every
cell, the same weights and tokens. A peer with 8-bit weights stands beside ours with int8 weights.
"""


def glance(results: targets.Results) -> str:
    """A row for the limit and every engine, a column for every cell."""
    lines = [_glance_row(name, results) for name in _names()]
    limits = tuple(_limit(cell.name, results) for cell in CELLS)
    ours = [
        ("ours, to reach", *(f"≥ {cell.target:g}" for cell in CELLS)),
        ("goal", *(f"≥ {cell.goal:g}" for cell in CELLS)),
    ]
    text = table(("", *(cell.name for cell in CELLS)), [("limit of the machine", *limits), *lines, *ours], left=1)
    picture = f"\n![Tokens a second of all engines]({PICTURE})\n" if panels(results) else ""
    return f"{GLANCE}\n{text}\n{picture}"


def standing(results: targets.Results) -> str:
    """The table of targets."""
    return f"{TARGETS}\n{table(targets.COLUMNS, targets.rows(results), left=1)}\n"


def panels(results: targets.Results) -> list[Panel]:
    """What was measured, a panel for each cell."""
    found = []
    for cell in CELLS:
        bars = []
        for name in _names():
            result, ours = _result(cell.name, name, results), name in (REFERENCE, INSIDE, INT8)
            if result is not None:
                value = result["sides"][name]["tokens_per_s"]
                bars.append(Bar(name, value, number(value), "ours" if ours else "peer"))
        limit = _roof(cell.name, results)
        if bars and limit is not None:
            bars.insert(0, Bar("limit of the machine", limit, number(limit), "limit"))
        if bars:
            found.append(Panel(f"{cell.name}, tokens a second", bars))
    return found


def suite(name: str, result: Any) -> str:
    """The section of one run of `benchmarks.suite`."""
    parts = [SUITE]
    if rows := cell_rows(result.get("cells", ())):
        legend = "\n".join(f"- **{term}**: {text}" for term, text in LEGEND)
        parts += [table(COLUMNS, rows, left=2), "", legend, ""]
    if rows := part_rows(result):
        parts += [table(PARTS_COLUMNS, rows, left=1), ""]
    return "\n".join([*parts, _left_out(result), limit_line(result), "", conditions(name, result, _facts(result))])


def peers(name: str, result: Any) -> str:
    """The section of one run of `benchmarks.peers`."""
    cells = table(COLUMNS, cell_rows(result.get("cells", ())), left=2)
    return "\n".join(
        [PEERS_TEXT, cells, "", _left_out(result), limit_line(result), "", conditions(name, result, _facts(result))]
    )


def _left_out(result: Any) -> str:
    return "".join(f"- {peer} was left out: {reason}\n" for peer, reason in result.get("left_out", {}).items())


def _facts(result: Any) -> list[tuple[str, str]]:
    settings, model = result["settings"], result["model"]
    size = f"{model['parameters'] / 1e6:,.0f} million parameters, {model['dtype']}, random weights"
    sides = [(name, _side(facts)) for name, facts in result.get("sides", {}).items()]
    turns = f"{settings['rounds']} of each side, of about {settings['round_s']:g} s"
    disturbed = [sum(cell["disturbed"][index] for cell in result.get("cells", ())) for index in (0, 1)]
    spins = "; llama.cpp by its own default" if any(name.startswith("llama") for name, _ in sides) else ""
    return [
        ("model", f"{model['name']}: {size}"),
        *sides,
        ("rounds", f"{turns}; disturbed by other processes: {disturbed[0]} repeated, {disturbed[1]} kept"),
        ("OpenMP waits", f"{settings['openmp_waits']}{spins}"),
        ("output", settings["output"]),
        ("seed", str(settings["seed"])),
    ]


def _side(facts: dict[str, Any]) -> str:
    more = [f"`{choice}`" for choice in facts.get("choices", ())]
    more += [f"{package} {number}" for package, number in facts.get("versions", {}).items()]
    return ", ".join([facts["name"], f"{facts['threads']} threads", *more])


def _names() -> Iterator[str]:
    yield from (REFERENCE, INSIDE, INT8)
    yield from (peer.name for peer in PEERS)
    yield from LEFT_OUT


def _glance_row(name: str, results: targets.Results) -> Row:
    cells = []
    for cell in CELLS:
        result = _result(cell.name, name, results)
        if result is None:
            cells.append(_why_not(cell.name, name, results))
            continue
        ratio = result["ratios"].get(name)
        times = "" if ratio is None else f" ({ratio['median']:.2f} ×)"
        cells.append(f"{number(result['sides'][name]['tokens_per_s'])}{times}")
    return (name, *cells)


def _why_not(cell: str, name: str, results: targets.Results) -> str:
    if name in LEFT_OUT:
        return "left out"
    if any(each["cell"] == cell and name in each["absent"] for each in _cells(results)):
        return "–"
    return NOT_YET


def _cells(results: targets.Results) -> Iterator[CellResult]:
    """Of the suite first: it has the ones that are in both."""
    for benchmark in ("suite", "peers"):
        if benchmark in results:
            yield from results[benchmark][1].get("cells", ())


def _result(cell: str, name: str, results: targets.Results) -> CellResult | None:
    return next((each for each in _cells(results) if each["cell"] == cell and name in each["sides"]), None)


def _roof(cell: str, results: targets.Results) -> float | None:
    return next(
        (each["roof"]["tokens_per_s"] for each in _cells(results) if each["cell"] == cell and each["roof"]), None
    )


def _limit(cell: str, results: targets.Results) -> str:
    limit = _roof(cell, results)
    return NOT_YET if limit is None else number(limit)
