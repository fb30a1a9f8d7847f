"""Terminal capabilities: colours, moving lines, width."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, TextIO

MIN_COLUMNS: Final = 40
"""On narrower terminals lines are not wrapped here."""

PROGRAM: Final = "ferrum-rpc"


def moves(stream: TextIO, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a line may be overwritten: on a terminal that supports it."""
    return stream.isatty() and environment.get("TERM") != "dumb"


def colours(stream: TextIO, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether to use colours: if lines may be overwritten, unless NO_COLOR is set (https://no-color.org)."""
    return moves(stream, environment) and not environment.get("NO_COLOR")


def columns(stream: TextIO) -> int | None:
    """Columns of a terminal, at least `MIN_COLUMNS`; None for a file or a pipe, whose lines are not wrapped."""
    if not stream.isatty():
        return None
    try:
        found = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):  # a terminal without a size, or a test's
        found = 0
    return max(MIN_COLUMNS, found or 80)


def wrap(text: str, width: int | None, indent: int = 0) -> list[str]:
    """The lines of a text; those after the first are indented by ``indent``. Words are never cut, so paths can be
    copied."""
    if width is None:
        return [text]
    further = " " * indent
    return textwrap.wrap(text, width, subsequent_indent=further, break_long_words=False, break_on_hyphens=False) or [""]


def hanging(before: str, text: str, width: int | None) -> list[str]:
    """``before``, and after it a text that is wrapped below itself. Where too little of ``width`` is left for it, it
    begins on a line of its own."""
    if not text:
        return [before.rstrip()]
    longest = max(map(len, text.split()), default=0)
    if width is None or len(before) + max(longest, MIN_COLUMNS // 2) <= width:
        return wrap(before + text, width, len(before))
    head = before.rstrip()
    margin = len(head) - len(head.lstrip()) + 4
    return [*([head] if head else []), *wrap(" " * margin + text, width, margin)]


def aligned(rows: Iterable[tuple[str, str]], width: int | None, indent: int = 0) -> list[str]:
    """Names and texts in two columns."""
    listed = list(rows)
    size = max((len(name) for name, _ in listed), default=0)
    return [line for name, text in listed for line in hanging(f"{' ' * indent}{name:<{size}}  ", text, width)]


def table(rows: Sequence[Sequence[str]], *, numbers: bool = False) -> list[str]:
    """Cells in columns, a line each row. ``numbers``: all but the first column are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if numbers and at else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def program(arguments: Sequence[str] = sys.argv) -> str:
    """The command that starts this program: its name if a shell finds it, else as it was started."""
    name = arguments[0] if arguments else ""
    if Path(name).name != PROGRAM:
        return PROGRAM
    found = shutil.which(PROGRAM)
    return PROGRAM if found is not None and Path(found).samefile(name) else name
