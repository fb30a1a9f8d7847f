"""A picture of bars, which needs no library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple
from xml.sax.saxutils import escape

from benchmarks.table import number

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
