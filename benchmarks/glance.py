"""All engines at a glance: a table, and a picture of bars, which needs no library."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple
from xml.sax.saxutils import escape

from benchmarks.cases import CELLS
from benchmarks.engines.grpc import INT8
from benchmarks.engines.inprocess import INSIDE
from benchmarks.engines.process import REFERENCE
from benchmarks.peers import PEERS
from benchmarks.tables import NOT_YET, TEXTS, Table, number
from benchmarks.targets import Results

PICTURE: Final = "benchmarks.svg"

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
