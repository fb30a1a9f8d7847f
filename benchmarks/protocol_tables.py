"""The points of `benchmarks.protocol` as rows of text, for the terminal and for the documentation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from benchmarks.protocol_points import BATCH_TARGET, CROWD, DEPTHS, MANY, Point, Ratio
from benchmarks.tables import number, show_plain

COLUMNS: Final = (
    "transport",
    "way",
    "p50, ms",
    "p99, ms",
    "in echoes (lowest to highest pair)",
    "target",
    *(f"steps/s at {depth}" for depth in (*DEPTHS, MANY)),
    f"in batches of {CROWD} (lowest to highest pair)",
    "queue, ms",
    "forward, ms",
    "around, ms",
)
LEGEND: Final = (
    ("unary, session", "Decode calls, or forward frames of one session, by the bare stubs: until the next handle"),
    ("client, …", "the same through `ferrum_rpc.client`, until the answer's rows are arrays"),
    ("echo", "a bare grpc.aio server that answers the same bytes, by unary calls or on one stream"),
    ("p50, p99", "of a step with one in flight"),
    ("in echoes", "median step over the echo's, median of the pairs of rounds and its spread"),
    ("target", "in echoes, at most; no verdict"),
    (
        "steps/s",
        f"with so many steps in flight; to be ≥ 3,000 in a session at 4, and of {MANY} unary callers in total",
    ),
    (
        f"in batches of {CROWD}",
        f"a step of one of {CROWD} coroutines on one client, in steps of a batch of {CROWD}; at most {BATCH_TARGET:g}",
    ),
    ("queue, forward", "by the server's clock: from the submit to the step, and the step itself"),
    ("around", "the step less its forward less the echo: protobuf, handlers, admission, hand-overs, replay log"),
)


def rows(points: Sequence[Point]) -> list[tuple[str, ...]]:
    """One for each way over each transport, in the order of `COLUMNS`."""
    by_way: dict[tuple[str, str], dict[int, Point]] = {}
    for point in points:
        by_way.setdefault((point["transport"], point["way"]), {})[point["depth"]] = point
    return [_row(depths) for depths in by_way.values()]


def markdown(points: Sequence[Point]) -> str:
    """A table for the documentation."""
    lines = [COLUMNS, tuple("---" if index < 2 else "---:" for index in range(len(COLUMNS))), *rows(points)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def show(points: Sequence[Point]) -> None:
    """On the terminal."""
    show_plain([COLUMNS, *rows(points)])
    for name, text in LEGEND:
        print(f"  {name}: {text}")


def _row(depths: dict[int, Point]) -> tuple[str, ...]:
    one = depths[1]
    ratio = one["ratio"]
    rates = [f"{depths[depth]['steps_per_s']:,.0f}" if depth in depths else "" for depth in (*DEPTHS, MANY)]
    crowd = depths[CROWD]["ratio"] if CROWD in depths else None
    return (
        one["transport"],
        one["way"],
        number(one["p50_ms"]),
        number(one["p99_ms"]),
        _spread(ratio),
        "" if ratio is None or ratio["target"] is None else f"≤ {ratio['target']:g}",
        *rates,
        _spread(crowd),
        *("" if value is None else number(value) for value in (one["queue_ms"], one["forward_ms"], one["around_ms"])),
    )


def _spread(ratio: Ratio | None) -> str:
    return "" if ratio is None else f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"
