"""The figures of `benchmarks.suite` and `benchmarks.peers` as rows of text, for the terminal and the documentation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from benchmarks.contest import CellResult, Pairs
from benchmarks.ours import INT8
from benchmarks.tables import number, show_plain

NOT_YET: Final = "not yet measured"

COLUMNS: Final = (
    "cell",
    "side",
    "tok/s (lowest to highest round)",
    "step, ms",
    "of the limit",
    "ours is (pairs)",
    "same tokens",
)
LEGEND: Final = (
    ("tok/s", "median of the rounds' medians, lowest and highest round"),
    ("step", "median (10th to 90th percentile) of all timed steps"),
    ("of the limit", "of what memory and matrix products allow on this machine, by the best readings of the same run"),
    ("ours is", "tokens a second of ours, the first side, over this side's: median of the pairs (lowest to highest)"),
    (
        "same tokens",
        "arg-max tokens of the rounds' last steps that agree with ours: bfloat16 decides close calls anyhow",
    ),
)
PARTS_COLUMNS: Final = ("what", "measured", "target")

Row = tuple[str, ...]

EIGHT_BITS: Final = (INT8, "llama.cpp Q8_0")
"""Sides that read half the bytes: the limit is not theirs."""


def cell_rows(cells: Sequence[CellResult]) -> list[Row]:
    """The limit of each cell, and every side of it."""
    rows: list[Row] = []
    for cell in cells:
        roof = cell["roof"]
        if roof is not None:
            rows.append((cell["cell"], f"limit: {roof['bound_by']}", number(roof["tokens_per_s"]), "", "1", "", ""))
        for name, side in cell["sides"].items():
            step = side["step_ms"]
            rows.append(
                (
                    cell["cell"],
                    name,
                    f"{number(side['tokens_per_s'])} ({number(side['low'])} to {number(side['high'])})",
                    f"{number(step['median'])} ({number(step['p10'])} to {number(step['p90'])})",
                    "" if roof is None or name in EIGHT_BITS else f"{side['tokens_per_s'] / roof['tokens_per_s']:.2f}",
                    _times(cell["ratios"].get(name)),
                    _same(side["same_tokens"]),
                )
            )
        rows += [(cell["cell"], name, f"none: {reason}", "", "", "", "") for name, reason in cell["absent"].items()]
    return rows


def part_rows(result: Mapping[str, Any]) -> list[Row]:
    """The other parts of a suite."""
    rows: list[Row] = []
    if (mix := result.get("mixed")) is not None:
        what = (
            f"p99 over p50 of a decode step (b{mix['batch']} @{mix['context']}) beside chunks of {mix['chunk']} tokens"
        )
        times = f"{number(mix['p99_ms'])} over {number(mix['p50_ms'])} ms"
        alone = f"alone {number(mix['alone_p99_ms'])} over {number(mix['alone_p50_ms'])} ms"
        rows.append((what, f"{mix['ratio']:.2f} ({times}, {mix['chunks']} chunks; {alone})", f"≤ {mix['target']:g}"))
    for slope in result.get("bookkeeping", ()):
        what = f"bookkeeping of a sequence and step: {slope['batch']} of {slope['live']} live @{slope['context']}"
        dearest = ", ".join(f"{name.partition(': ')[2]} {number(each)}" for name, each in _dearest(slope["stages_us"]))
        rows.append((what, f"{slope['per_sequence_us']:.1f} µs ({dearest})", f"≤ {slope['target_us']:g} µs"))
    if (start := result.get("start")) is not None:
        gib = start["weight_bytes"] / 2**30
        page_cache = "from the disk" if start["cold"] else "from the page cache"
        rows.append(
            (
                f"start of serve until the model answers, {gib:.2f} GiB of weights {page_cache}",
                f"{start['ready_s']:.2f} s, of which loading {start['loading_s']:.2f} s",
                f"a plain read: {start['plain_read_s']:.2f} s",
            )
        )
    return rows


def limit_line(result: Mapping[str, Any]) -> str:
    """The readings of the run."""
    limits = result.get("limits")
    if limits is None:
        return "No limits were read: the run was interrupted."
    return (
        f"Limits read in this run with {limits['threads']} threads, best of {len(limits['readings'])} readings: "
        f"memory {limits['read_gb_s']:.1f} GB/s, bfloat16 products {limits['bf16_tflops']:.2f} TFLOP/s."
    )


def table(columns: Row, rows: Sequence[Row], left: int) -> str:
    """Markdown, the first ``left`` columns to the left."""
    rule = tuple("---" if index < left else "---:" for index in range(len(columns)))
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (columns, rule, *rows))


def show(result: Mapping[str, Any]) -> None:
    """On the terminal."""
    print()
    if rows := cell_rows(result.get("cells", ())):
        show_plain([COLUMNS, *rows])
        print()
    if rows := part_rows(result):
        show_plain([PARTS_COLUMNS, *rows])
        print()
    print(limit_line(result))


def _times(pairs: Pairs | None) -> str:
    return "" if pairs is None else f"{pairs['median']:.2f} × ({pairs['low']:.2f} to {pairs['high']:.2f})"


def _same(tokens: Sequence[int]) -> str:
    """Nothing of a side that feeds tokens of its own."""
    return f"{tokens[0]} of {tokens[1]}" if tokens[1] else ""


def _dearest(stages: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(stages.items(), key=lambda each: -each[1])[:3]
