"""A picture of bars as SVG, written here because a few rectangles need no plotting library among the dependencies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from xml.sax.saxutils import escape

WIDTH: Final = 760
LABEL: Final = 230
VALUE: Final = 70
BAR: Final = 16
GAP: Final = 5
TITLE: Final = 30
COLORS: Final = {"limit": "#b8bec7", "ours": "#c2541b", "peer": "#3f6f9f"}
TEXT: Final = "#24292f"


@dataclass(frozen=True, slots=True)
class Bar:
    """``kind``: limit, ours or peer. ``shown``: what is written beside it."""

    label: str
    value: float
    shown: str
    kind: str


@dataclass(frozen=True, slots=True)
class Panel:
    """Bars of one scale, longest that which is largest."""

    title: str
    bars: Sequence[Bar]


def svg(panels: Sequence[Panel]) -> str:
    """Panels below each other."""
    parts: list[str] = []
    top = 0
    for panel in panels:
        parts.append(_text(8, top + 20, panel.title, weight="bold"))
        top += TITLE
        largest = max((bar.value for bar in panel.bars), default=1.0)
        for bar in panel.bars:
            length = max(1.0, bar.value / largest * (WIDTH - LABEL - VALUE))
            middle = top + BAR - 4
            parts.append(_text(LABEL - 8, middle, bar.label, anchor="end"))
            parts.append(f'<rect x="{LABEL}" y="{top}" width="{length:.1f}" height="{BAR}" fill="{COLORS[bar.kind]}"/>')
            parts.append(_text(LABEL + length + 6, middle, bar.shown))
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
