"""`docs/benchmarks.md`, written from the JSON files of `benchmarks/results/`: no figure in it was typed by a person.

Run ``python -m benchmarks.report`` after a benchmark.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple
from xml.sax.saxutils import escape

from benchmarks import tables
from benchmarks.adapters import BASE
from benchmarks.adapters import TARGET as ADAPTERS_TARGET
from benchmarks.cache import EXACT
from benchmarks.cache import TARGET as INT8_CACHE_TARGET
from benchmarks.cases import CELLS
from benchmarks.engines.grpc import INT8
from benchmarks.engines.inprocess import INSIDE
from benchmarks.engines.process import REFERENCE
from benchmarks.machine import RESULTS, ROOT
from benchmarks.memory import TARGET as PLAN_TARGET
from benchmarks.peers import PEERS
from benchmarks.prefix import BOOKS_TARGET, LESS_TARGET, MISS_TARGET
from benchmarks.record import SCHEMA
from benchmarks.speculation import TARGETS as DRAFT_TARGETS
from benchmarks.tables import IN_PROCESS, NOT_YET, TEXTS, Row, Table, number
from benchmarks.trips import OTHERS_TARGET
from benchmarks.trips import TARGETS as TRIP_TARGETS

DOCUMENT: Final = ROOT / "docs" / "benchmarks.md"
PICTURE: Final = "benchmarks.svg"
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


# --- targets, and where they stand ------------------------------------------------------------------------------------


STANDING: Final = ("what", "measured", "target", "reached", "goal", "file")

Results = Mapping[str, tuple[str, Any]]
"""The newest result of each benchmark, with its file's name."""

Place = tuple[str | dict[str, Any], ...]
"""Where a figure stands in a result: keys, and in a list what the entry has."""


def find(value: Any, path: Place) -> Any:
    """What stands there, or None."""
    for key in path:
        if isinstance(key, dict):
            value = next((each for each in value if key.items() <= each.items()), {})
        else:
            value = {} if value is None else value.get(key, {})
    return None if value == {} else value


@dataclass(frozen=True, slots=True)
class Target:
    """``path``: of the figure in a result of ``benchmark``, and ``over``, of what it is a share of; of several parts
    the largest counts. ``least``: at least ``bound``, else at most."""

    what: str
    benchmark: str
    path: Place
    bound: float
    least: bool = True
    unit: str = ""
    goal: float | None = None
    over: Place = ()

    def row(self, results: Results) -> Row:
        """Of the table."""
        name, result = results.get(self.benchmark, ("", {}))
        value = self._value(result)
        sign = "≥" if self.least else "≤"
        goal = "" if self.goal is None else f"{sign} {self.goal:g}{self.unit}"
        bound = f"{sign} {self.bound:g}{self.unit}"
        if value is None:
            return (self.what, NOT_YET, bound, "", goal, "")
        reached = value >= self.bound if self.least else value <= self.bound
        return (self.what, f"{number(value)}{self.unit}", bound, "yes" if reached else "no", goal, f"`{name}`")

    def _value(self, result: Any) -> float | None:
        *parts, figure = self.path
        found, over = find(result, tuple(parts)), find(result, self.over) if self.over else 1.0
        entries = found if isinstance(found, list) else [found or {}]
        values = [float(each[str(figure)]) for each in entries if str(figure) in each]
        return max(values) / over if values and over is not None else None


def _rate(cell: str, side: str = REFERENCE) -> Place:
    return ("cells", {"cell": cell}, "sides", side, "tokens_per_s")


def _speed() -> Iterator[Target]:
    for cell in CELLS:
        assert cell.target is not None
        what = f"Qwen3-0.6B bf16 through gRPC, greedy, {cell.name}"
        yield Target(what, "suite", _rate(cell.name), cell.target, unit=" tok/s", goal=cell.goal)
    for name, bound in (("decode b1 @512", 32.0), ("decode b8 @256", 140.0), ("decode b32 @256", 260.0)):
        yield Target(f"the same, int8 weights, {name}", "suite", _rate(name, INT8), bound, unit=" tok/s")


def _costs() -> Iterator[Target]:
    cell = {"model": "qwen3-0.6b", "batch": 32, "output": "full-bf16"}
    ratio = ("ratios", IN_PROCESS, "median")
    for way, benchmark in (("unary calls", "wire"), ("in a session", "wire-session")):
        for batch in (1, 8, 32):
            what = f"gRPC against in process, b{batch}, greedy, {way}"
            yield Target(what, benchmark, ("cells", cell | {"batch": batch, "output": "greedy"}, *ratio), 0.97)
    yield Target("gRPC against in process, b32, full bf16 rows", "wire", ("cells", cell, *ratio), 0.85)
    for way in ("unary", "session"):
        point = {"transport": "tcp", "way": way, "depth": 1}
        what = f"an empty step, {way}, in bare echoes"
        yield Target(what, "protocol", ("points", point, "ratio", "median"), 2.0, least=False)
    for engine, benchmark in (("", "protocol"), (", engine in a process", "protocol-process")):
        for what, way, depth in (
            ("empty steps in a session, 4 in flight", "session", 4),
            ("empty steps of 64 unary callers", "unary", 64),
        ):
            point = {"transport": "tcp", "way": way, "depth": depth}
            yield Target(what + engine, benchmark, ("points", point, "steps_per_s"), 3000, unit="/s")
    for batch in (1, 8):
        for delay_ms, bound in TRIP_TARGETS.items():
            what = f"{batch} text{'s' * (batch > 1)} by runs, {delay_ms:g} ms each way, of no delay"
            point = {"way": "runs", "delay_ms": delay_ms, "batch": batch}
            yield Target(what, "trips", ("points", point, "of_no_delay"), bound)
    for batch, bound in DRAFT_TARGETS.items():
        what = f"{batch} text{'s' * (batch > 1)} with the draft model, 10 ms each way, of single steps"
        point = {"way": "draft model", "delay_ms": 10.0, "batch": batch}
        yield Target(what, "speculation", ("points", point, "of_single"), bound)
    what = "decode b32 @2048 over an int8 cache, in process, of bfloat16"
    yield Target(what, "cache", ("cells", {"cell": "decode b32 @2048"}, "ratios", EXACT, "median"), INT8_CACHE_TARGET)
    what = "decode b32 @256 with an adapter of rank 16 each, in process, of none"
    yield Target(what, "adapters", ("cells", {"cell": "decode b32 @256"}, "ratios", BASE, "median"), ADAPTERS_TARGET)
    what = "p99 of a decode step beside 32 runs, in those beside single steps"
    yield Target(what, "trips", ("beside", {"beside": "runs"}, "of_single_steps"), OTHERS_TARGET, least=False)
    yield Target("a plan, off by what is resident", "memory", ("off",), PLAN_TARGET, least=False)
    mixed = "p99 over p50 of a decode step under mixed load"
    yield Target(mixed, "suite", ("mixed", "ratio"), 2.0, least=False)
    bookkeeping = "bookkeeping of a sequence and step"
    yield Target(bookkeeping, "suite", ("bookkeeping", "per_sequence_us"), 30.0, least=False, unit=" µs")


def _prefix() -> Iterator[Target]:
    for model in ("identity", "qwen3-0.6b"):
        what = f"1,000 prompts that share 512 tokens, {model}: computed without the prefix cache, of with it"
        yield Target(what, "prefix", ("crowds", {"model": model}, "times_computed"), LESS_TARGET, unit=" ×")
    what = "a conversation of 20 turns: tokens computed, of the new ones in whole blocks"
    yield Target(what, "prefix", ("talk", "of_to_compute"), 1.0, least=False)
    for model, cell in (
        ("qwen3-0.6b", "prefill 512"),
        ("qwen3-0.6b", "decode b32 @256"),
        ("identity", "decode b32 @256"),
    ):
        what = f"{model}, {cell} with the prefix cache that finds nothing, of without it"
        path: Place = ("misses", {"model": model, "cell": cell}, "ratio", "median")
        yield Target(what, "prefix", path, MISS_TARGET, least=False)
    what = "books of a step of 256 sequences, at most, of a decode step of Qwen3-0.6B at b32"
    yield Target(what, "prefix", ("books", "of_step"), BOOKS_TARGET, least=False)


def _gpu() -> Iterator[Target]:
    prefix = "CUDA, Qwen3-8B shape, bf16: "
    for what, cell, bound in (
        ("decode b1 @1k", "decode b1 @1024", 0.85),
        ("decode b64 @2k", "decode b64 @2048", 0.80),
        ("prefill 8k", "prefill 8192", 0.60),
    ):
        limit: Place = ("cells", {"cell": cell}, "roof", "tokens_per_s")
        yield Target(f"{prefix}{what}, of the limit", "gpu", _rate(cell, INSIDE), bound, over=limit)
    load: Place = ("attention", {"name": "decode, 64 x 4k"}, "share_of_bandwidth")
    yield Target(f"{prefix}attention, decode b64 @4k, of the limit", "gpu", load, 0.80)
    ratio: Place = ("cells", {"cell": "decode b64 @2048"}, "ratios", INSIDE, "median")
    yield Target(f"{prefix}gRPC against in process, b64, greedy", "gpu", ratio, 0.97)


TARGETS: Final = (*_speed(), *_costs(), *_prefix(), *_gpu())


def newest(results: Sequence[tuple[str, Any]]) -> dict[str, tuple[str, Any]]:
    """The latest result of each benchmark."""
    found: dict[str, tuple[str, Any]] = {}
    for name, result in sorted(results, key=lambda each: each[1]["ended"]):
        found[result["benchmark"]] = (name, result)
    return found


def standing(results: Results) -> Table:
    """Every target, and where it stands."""
    return Table(STANDING, [target.row(results) for target in TARGETS])


# --- all engines at a glance ------------------------------------------------------------------------------------------


def glance(results: Results) -> str:
    """A row for the limit and every engine, a column for every cell."""
    limits = [_roof(cell.name, results) for cell in CELLS]
    rows = [
        ("limit of the machine", *(NOT_YET if limit is None else number(limit) for limit in limits)),
        *((name, *(_glance(cell.name, name, results) for cell in CELLS)) for name in _names()),
        ("ours, to reach", *(f"≥ {cell.target:g}" for cell in CELLS)),
        ("goal", *(f"≥ {cell.goal:g}" for cell in CELLS)),
    ]
    text = Table(("", *(cell.name for cell in CELLS)), rows).markdown()
    picture = f"\n![Tokens a second of all engines]({PICTURE})\n" if panels(results) else ""
    return f"{TEXTS['glance']}\n{text}\n{picture}"


def panels(results: Results) -> dict[str, list[Bar]]:
    """What was measured, bars for each cell."""
    found: dict[str, list[Bar]] = {}
    for cell in CELLS:
        bars = []
        for name in _names():
            if (result := _result(cell.name, name, results)) is not None:
                kind = "ours" if name in (REFERENCE, INSIDE, INT8) else "peer"
                bars.append(Bar(name, result["sides"][name]["tokens_per_s"], kind))
        limit = _roof(cell.name, results)
        if bars:
            limits = [] if limit is None else [Bar("limit of the machine", limit, "limit")]
            found[f"{cell.name}, tokens a second"] = limits + bars
    return found


def _names() -> Sequence[str]:
    return (REFERENCE, INSIDE, INT8, *(peer.name for peer in PEERS))


def _glance(cell: str, name: str, results: Results) -> str:
    result = _result(cell, name, results)
    if result is not None:
        ratio = result["ratios"].get(name)
        times = "" if ratio is None else f" ({ratio['median']:.2f} ×)"
        return f"{number(result['sides'][name]['tokens_per_s'])}{times}"
    if any(each["cell"] == cell and name in each["absent"] for each in _cells(results)):
        return "–"
    return "left out" if any(name in result.get("left_out", ()) for _, result in results.values()) else NOT_YET


def _cells(results: Results) -> Iterator[Any]:
    """Of the suite first: it has the ones that are in both."""
    for benchmark in ("suite", "peers"):
        if benchmark in results:
            yield from results[benchmark][1].get("cells", ())


def _result(cell: str, name: str, results: Results) -> Any:
    return next((each for each in _cells(results) if each["cell"] == cell and name in each["sides"]), None)


def _roof(cell: str, results: Results) -> float | None:
    roofs = (each["roof"] for each in _cells(results) if each["cell"] == cell)
    return next((roof["tokens_per_s"] for roof in roofs if roof), None)


# --- a picture of bars, which needs no library ------------------------------------------------------------------------


WIDTH: Final = 760
LABEL: Final = 230
VALUE: Final = 70
BAR: Final = 16
GAP: Final = 5
TITLE: Final = 30
COLORS: Final = {"limit": "#b8bec7", "ours": "#c2541b", "peer": "#3f6f9f"}
TEXT: Final = "#24292f"


class Bar(NamedTuple):
    """``kind``: limit, ours or peer."""

    label: str
    value: float
    kind: str


def svg(panels: Mapping[str, Sequence[Bar]]) -> str:
    """Panels below each other, by their titles; the largest value of one is its longest bar."""
    parts: list[str] = []
    top = 0
    for title, bars in panels.items():
        parts.append(_text(8, top + 20, title, weight="bold"))
        top += TITLE
        largest = max(bar.value for bar in bars)
        for label, value, kind in bars:
            length = max(1.0, value / largest * (WIDTH - LABEL - VALUE))
            parts.append(_text(LABEL - 8, top + BAR - 4, label, anchor="end"))
            parts.append(f'<rect x="{LABEL}" y="{top}" width="{length:.1f}" height="{BAR}" fill="{COLORS[kind]}"/>')
            parts.append(_text(LABEL + length + 6, top + BAR - 4, number(value)))
            top += BAR + GAP
        top += GAP
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top}" width="{WIDTH}" height="{top}" '
        f'font-family="sans-serif" font-size="12" fill="{TEXT}">'
    )
    ground = f'<rect width="{WIDTH}" height="{top}" fill="#ffffff"/>'
    return "\n".join([head, ground, *parts, "</svg>", ""])


def _text(x: float, y: float, text: str, anchor: str = "start", weight: str = "normal") -> str:
    return f'<text x="{x:.1f}" y="{y}" text-anchor="{anchor}" font-weight="{weight}">{escape(text)}</text>'


# --- the sections -----------------------------------------------------------------------------------------------------


def cells(name: str, result: Any) -> str:
    """One run of `benchmarks.suite`, `benchmarks.peers` or `benchmarks.gpu`. What did not run is said, never left
    out."""
    kind = result["benchmark"]
    parts = [TEXTS[kind], *_table(tables.cells(result.get("cells", ())), "" if kind == "peers" else "cells")]
    parts += _table(tables.outputs(result.get("outputs", ())), "outputs")
    parts += [*_table(tables.parts(result)), *_table(tables.attention(result))]
    for suite, found in result.get("tests", {}).items():
        counts = ", ".join(f"{found[outcome]} {outcome}" for outcome in ("passed", "skipped", "failed"))
        parts.append(f"- `{suite}`: {counts}")
    parts += [f"- missed or failed: {each}" for each in result.get("failed", ())]
    left_out = "".join(f"- {side} was left out: {reason}\n" for side, reason in result.get("left_out", {}).items())
    return "\n".join([*parts, left_out, tables.limit_line(result), "", conditions(name, result, _facts(result))])


def _table(table: Table, legend: str = "") -> list[str]:
    if not table.rows:
        return []
    return [table.markdown(), "", *([_legend(legend), ""] if legend else [])]


def _legend(name: str) -> str:
    return "\n".join(f"- **{term}**: {text}" for term, text in TEXTS["legend"][name].items())


def _facts(result: Any) -> list[tuple[str, str]]:
    settings, model = result["settings"], result["model"]
    size = f"{model['parameters'] / 1e6:,.0f} million parameters, {model['dtype']}, random weights"
    sides = [(name, _side(facts)) for name, facts in result.get("sides", {}).items()]
    turns = f"{settings['rounds']} of each side, of about {settings['round_s']:g} s"
    repeated, kept = _disturbed(result.get("cells", ()))
    spins = "; llama.cpp by its own default" if any(name.startswith("llama") for name, _ in sides) else ""
    device = [("GPU", settings["gpu"])] if "gpu" in settings else []
    return [
        *device,
        ("model", f"{model['name']}: {size}"),
        *sides,
        ("rounds", f"{turns}; disturbed by other processes: {repeated} repeated, {kept} kept"),
        ("OpenMP waits", f"{settings['openmp_waits']}{spins}"),
        ("output", settings["output"]),
        ("seed", str(settings["seed"])),
    ]


def _side(facts: Mapping[str, Any]) -> str:
    more = [f"`{choice}`" for choice in facts.get("choices", ())]
    more += [f"{package} {number}" for package, number in facts.get("versions", {}).items()]
    return ", ".join([facts["name"], f"{facts['threads']} threads", *more])


def _disturbed(cells: Sequence[Any]) -> list[int]:
    return [sum(cell["disturbed"][index] for cell in cells) for index in (0, 1)]


def wire(name: str, result: Any) -> str:
    """One run of `benchmarks.wire`."""
    cells, settings = result["cells"], result["settings"]
    parts = [TEXTS["wire"]]
    for model in result["models"]:
        table = tables.wire([cell for cell in cells if cell["model"] == model["name"]]).markdown()
        parts.append(f"### {model['name']}\n\n{_model(model)}\n\n{table}\n")
    same, of = (sum(cell["sides"][tables.IN_PROCESS]["same_rounds"][index] for cell in cells) for index in (0, 1))
    repeated, kept = _disturbed(cells)
    agreement = (
        f"The last rows of {same} of {of} pairs of rounds were bitwise the same on both sides. "
        f"Other processes disturbed {repeated + kept} pairs (by the kernel's accounts, not by the figures): "
        f"{repeated} were repeated, {kept} kept."
    )
    rows = [
        ("threads", f"{settings['threads_in_process']} in process, {settings['threads_server']} in the server"),
        ("processes", settings["processes"]),
        ("transport", settings["transport"]),
        ("engine", settings.get("engine", "thread")),
        ("rounds", f"{settings['rounds']} pairs, {settings['lead_in_steps']} untimed steps at the start of each"),
        ("block size", f"{settings['block_size']} tokens"),
        ("seed", str(settings["seed"])),
    ]
    return "\n".join([*parts, _legend("wire"), "", agreement, "", conditions(name, result, rows)])


def _model(facts: Mapping[str, Any]) -> str:
    size = f"{facts['parameters'] / 1e6:,.0f} million parameters" if facts["parameters"] else "no weights"
    chosen = ", ".join(f"`{choice}`" for choice, _ in facts["choices"])
    return (
        f"{size}, vocabulary {facts['vocab_size']:,}, weights {facts['weight_dtype']}, cache {facts['kv_dtype']}, "
        f"{facts['context']} tokens of context. Chosen at start: {chosen}."
    )


def protocol(name: str, result: Any) -> str:
    """One run of `benchmarks.protocol`."""
    settings = result["settings"]
    steps = ", ".join(f"{count} at {depth}" for depth, count in settings["steps"].items())
    sizes = "; ".join(f"{way} {asked} and {got}" for way, (asked, got) in settings["exchange_bytes"].items())
    rows = [
        ("model", settings["model"]),
        ("engine", settings.get("engine", "thread")),
        ("processes", settings["processes"]),
        ("rounds", f"{settings['rounds']}, {settings['disturbed_rounds_kept']} of them disturbed by other processes"),
        ("steps", f"of each sequence in a round: {steps}; {settings['lead_in_steps']} untimed ones before them"),
        ("context", f"{settings['context']} tokens when a round begins"),
        ("bytes", f"of a request and its answer: {sizes}"),
    ]
    table = tables.protocol(result["points"]).markdown()
    return "\n".join([TEXTS["protocol"], table, "", _legend("protocol"), "", conditions(name, result, rows)])


def trips(name: str, result: Any) -> str:
    """One run of `benchmarks.trips`."""
    settings = result["settings"]
    rows = [
        ("model", settings["model"]),
        (
            "rounds",
            f"{settings['rounds']}, of {settings['tokens']} tokens a text, and as many decode steps beside others",
        ),
        ("seed", str(settings["seed"])),
    ]
    parts = [TEXTS["trips"], tables.trips(result["points"]).markdown(), "", TEXTS["beside"]]
    parts += [tables.beside(result["beside"]).markdown(), "", _legend("trips"), ""]
    return "\n".join([*parts, conditions(name, result, rows)])


def speculation(name: str, result: Any) -> str:
    """One run of `benchmarks.speculation`."""
    settings = result["settings"]
    rows = [
        ("models", f"{settings['model']}; drafts by {settings['draft']}"),
        ("rounds", f"{settings['rounds']}, of {settings['tokens']} tokens a text; runs of {settings['run_tokens']}"),
        ("seed", str(settings["seed"])),
    ]
    table = tables.speculation(result["points"]).markdown()
    return "\n".join([TEXTS["speculation"], table, "", _legend("speculation"), "", conditions(name, result, rows)])


def cache(name: str, result: Any) -> str:
    """One run of `benchmarks.cache`."""
    parts = [TEXTS["cache"], tables.cells(result["cells"]).markdown(), "", _legend("cells"), ""]
    parts += [tables.answers(result["answers"]).markdown(), "", _legend("answers"), ""]
    return "\n".join([*parts, conditions(name, result, _rounds(result["settings"]))])


def _rounds(settings: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [
        ("threads", f"{settings['threads']}"),
        ("rounds", f"{settings['rounds']}, {settings['lead_in_steps']} untimed steps at the start of each"),
        ("seed", str(settings["seed"])),
    ]


def adapters(name: str, result: Any) -> str:
    """One run of `benchmarks.adapters`."""
    told = ("adapters", f"{result['adapters']} of rank {result['rank']}, of all products")
    parts = [TEXTS["adapters"], tables.cells(result["cells"]).markdown(), "", _legend("cells"), ""]
    return "\n".join([*parts, conditions(name, result, [told, *_rounds(result["settings"])])])


def backends(name: str, result: Any) -> str:
    """One run of `benchmarks.backends`."""
    parts = [TEXTS["backends"], tables.cells(result["cells"]).markdown(), "", _legend("cells"), ""]
    return "\n".join([*parts, conditions(name, result, _rounds(result["settings"]))])


def memory(name: str, result: Any) -> str:
    """One run of `benchmarks.memory`."""
    table = tables.memory(result["points"]).markdown()
    return "\n".join([TEXTS["memory"], table, "", conditions(name, result, [("model", result["model"])])])


def transfer(name: str, result: Any) -> str:
    """One run of `benchmarks.transfer`."""
    table = tables.transfer(result["points"]).markdown()
    rounds = [("rounds", str(result["settings"]["rounds"]))]
    return "\n".join([TEXTS["transfer"], table, "", conditions(name, result, rounds)])


def ranks(name: str, result: Any) -> str:
    """One run of `benchmarks.ranks`."""
    told = [
        (side, f"loaded in {each['start_s']:.1f} s" + "".join(f", {own / 1e6:,.0f} MB on rank 1" for own in others))
        for side, each in result["ranks"].items()
        for others in [each.get("own_bytes", [])]
    ]
    parts = [TEXTS["ranks"], tables.cells(result["cells"]).markdown(), "", _legend("cells"), ""]
    return "\n".join([*parts, conditions(name, result, [*told, *_rounds(result["settings"])])])


def collectives(name: str, result: Any) -> str:
    """One run of `benchmarks.collectives`."""
    table = tables.collectives(result["points"]).markdown()
    settings = [(key, str(result["settings"][key])) for key in ("ranks", "hidden", "rounds")]
    return "\n".join([TEXTS["collectives"], table, "", conditions(name, result, settings)])


def prefix(name: str, result: Any) -> str:
    """One run of `benchmarks.prefix`."""
    parts = [TEXTS["prefix"]]
    for part, table in tables.prefix(result).items():
        if table.rows:
            parts += [TEXTS["prefix_parts"][part], table.markdown(), "", _legend(part), ""]
    left_out = [f"- {side} was left out: {reason}" for side, reason in result["left_out"].items()]
    return "\n".join([*parts, *left_out, "", conditions(name, result, _facts(result))])


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


RENDERERS: Final[dict[str, Callable[[str, Any], str]]] = {
    "suite": cells,
    "peers": cells,
    "protocol": protocol,
    "wire": wire,
    "trips": trips,
    "speculation": speculation,
    "cache": cache,
    "adapters": adapters,
    "backends": backends,
    "memory": memory,
    "prefix": prefix,
    "transfer": transfer,
    "ranks": ranks,
    "collectives": collectives,
    "gpu": cells,
}
"""By the program whose ``benchmark`` a file has, in the order of the page."""


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
