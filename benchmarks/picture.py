"""A picture of bars: where each stands. The template beside it has the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import jinja2

from benchmarks.table import number

LONGEST: Final = 460.0
BAR: Final = 21  # with the gap below it
TITLE: Final = 30
GAP: Final = 5
COLORS: Final = {"limit": "#b8bec7", "ours": "#c2541b", "peer": "#3f6f9f"}


class Bar(NamedTuple):
    """``kind``: limit, ours or peer."""

    label: str
    value: float
    kind: str


def svg(panels: Mapping[str, Sequence[Bar]]) -> str:
    """Panels below each other, by their titles; the largest value of one is its longest bar."""
    drawn, top = [], 0
    for title, bars in panels.items():
        largest = max(bar.value for bar in bars)
        lengths = [max(1.0, bar.value / largest * LONGEST) for bar in bars]
        placed = [(top + TITLE + BAR * at, *each) for at, each in enumerate(zip(lengths, bars, strict=True))]
        drawn.append((top, title, placed))
        top += TITLE + BAR * len(bars) + GAP
    text = Path(__file__).with_suffix(".svg.j2").read_text("utf-8")
    template = jinja2.Template(text, trim_blocks=True, autoescape=True, keep_trailing_newline=True)
    return str(template.render(height=top, panels=drawn, colors=COLORS, number=number))
