"""The points of a run as rows of text: one set of columns for the terminal and for the documentation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from benchmarks.measure import Point, Spread

COLUMNS: Final = (
    "model",
    "batch",
    "output",
    "in process, ms",
    "gRPC, ms",
    "tok/s in process",
    "tok/s gRPC",
    "ratio (lowest to highest pair)",
    "target",
    "forward in server, ms",
    "echo, ms",
    "ours, ms",
    "around forward, ms",
)
LEGEND: Final = (
    ("in process, gRPC, echo", "median step (10th to 90th percentile), milliseconds"),
    ("ratio", "in process over gRPC, median of the pairs of rounds and its spread: 1 means that gRPC costs nothing"),
    (
        "target",
        "of later work, no verdict: a ratio at least; for the identity model gRPC in echoes at most, and what it is",
    ),
    (
        "forward in server",
        "the same forward pass by the server's clock: slower than in process where it begins cold, after a wait",
    ),
    ("echo", "bare grpc.aio exchange of the same request and answer bytes with another process"),
    (
        "ours",
        "gRPC less in process less echo: protobuf, handlers, admission, hand-overs, replay log, the colder forward",
    ),
    ("around forward", "gRPC less the forward in the server less echo: the same without the colder forward"),
)


def row(point: Point) -> tuple[str, ...]:
    """One point, in the order of `COLUMNS`."""
    ratio = point["ratio"]
    return (
        point["model"],
        str(point["batch"]),
        point["output"],
        spread(point["in_process"]["step_ms"]),
        spread(point["grpc"]["step_ms"]),
        number(point["in_process"]["tokens_per_s"]),
        number(point["grpc"]["tokens_per_s"]),
        f"{ratio['median']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})",
        _target(point),
        number(point["grpc_forward_ms"]["median"]),
        spread(point["echo_ms"]),
        number(point["bookkeeping_ms"]),
        number(point["around_forward_ms"]),
    )


def markdown(points: Sequence[Point]) -> str:
    """A table for the documentation."""
    lines = [COLUMNS, tuple("---" if index in (0, 2) else "---:" for index in range(len(COLUMNS))), *map(row, points)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def show(points: Sequence[Point]) -> None:
    """On the terminal: rich where there is one, plain columns in a pipe."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        show_plain([COLUMNS, *map(row, points)])
    else:
        table = Table(*COLUMNS[:3], show_edge=False)
        for column in COLUMNS[3:]:
            table.add_column(column, justify="right")
        previous = ""
        for point in points:
            if previous not in ("", point["model"]):
                table.add_section()
            previous = point["model"]
            table.add_row(*row(point))
        console.print(table)
    for name, text in LEGEND:
        print(f"  {name}: {text}")


def spread(value: Spread) -> str:
    """``1.23 (1.20 to 1.31)``."""
    return f"{number(value['median'])} ({number(value['p10'])} to {number(value['p90'])})"


def show_plain(lines: Sequence[tuple[str, ...]]) -> None:
    """Columns for a pipe."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for cells in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip())


def _target(point: Point) -> str:
    if point["echo_target"] is not None:
        return f"≤ {point['echo_target']:g} echoes: {point['echo_multiple']:.2f}"
    return "" if point["ratio"]["target"] is None else f"≥ {point['ratio']['target']:.2f}"


def number(value: float) -> str:
    """Three digits that mean something."""
    size = abs(value)
    return (
        f"{value:.0f}"
        if size >= 100
        else f"{value:.1f}"
        if size >= 10
        else f"{value:.2f}"
        if size >= 1
        else f"{value:.3f}"
    )
