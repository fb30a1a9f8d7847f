"""The summary of a run."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field

from ferrum_rpc.client import ExecutorStatus, MethodCount
from ferrum_rpc.scheduler import RunCounts, Stage


@dataclass(frozen=True, slots=True)
class Summary:
    """The table at the end: rows of (what, figure), and one row per RPC."""

    figures: list[tuple[str, str]]
    methods: list[tuple[str, int, int, int, int]] = field(default_factory=list)


def summarise(run: RunCounts, before: ExecutorStatus | None, after: ExecutorStatus | None) -> Summary:
    """``before`` and ``after`` are the executor's own counts around the run."""
    first = [each.first_token - each.arrived for each in run.requests if each.first_token]
    generated = sum(len(each.generated) for each in run.requests)
    steps_s = run.prefill_seconds + run.decode_seconds
    figures = [
        ("requests", f"{sum(each.stage is Stage.FINISHED for each in run.requests)} of {len(run.requests)}"),
        ("generated", f"{generated} tokens, {_rate(generated, run.wall_seconds)}"),
        ("prefill", f"{run.prompt_tokens} tokens, {_rate(run.prompt_tokens, run.prefill_seconds)}"),
        ("decode", f"{run.decode_tokens} tokens, {_rate(run.decode_only_tokens, run.decode_seconds)} in pure steps"),
        ("time to first token", f"p50 {1000 * statistics.median(first):.1f} ms" if first else "-"),
        ("steps", f"{run.steps}, mean batch {run.sequences / run.steps:.1f}" if run.steps else "0"),
        ("tokens per trip", f"{generated / run.steps:.1f}" if run.steps else "-"),
        ("time in the executor", f"{run.executor_seconds / steps_s:.0%} of the steps" if steps_s else "- of the steps"),
        (
            "drafts",
            f"{run.accepted} of {run.drafted} tokens accepted, {1 + run.accepted / run.trips:.2f} tokens a trip"
            if run.drafted
            else "-",
        ),
        (
            "moves",
            f"{len(run.moves)} sequences, {run.moved_tokens} tokens, p50 {1000 * statistics.median(run.moves):.1f} ms"
            if run.moves
            else "-",
        ),
        ("preemptions", str(run.preemptions)),
        ("rebuilt sequences", str(run.rebuilds)),
        ("lost executors", str(run.executors_lost)),
        ("cache use, peak", f"{run.peak_use:.1%}"),
    ]
    return Summary(figures, method_rows(before.methods, after.methods) if before and after else [])


def method_rows(before: Iterable[MethodCount], after: Iterable[MethodCount]) -> list[tuple[str, int, int, int, int]]:
    """The difference of two counts: (method, calls, items, failed calls, refused items), busiest first."""
    old = {each.method: each for each in before}
    rows = []
    for each in after:
        was = old.get(each.method, MethodCount(each.method, 0, 0, 0, 0))
        added = (each.calls - was.calls, each.items - was.items, each.errors - was.errors)
        refused = each.item_errors - was.item_errors
        if added[0] > 0:
            rows.append((each.method.rpartition("/")[2], *added, refused))
    return sorted(rows, key=lambda row: (-row[1], row[0]))


def _rate(tokens: int, seconds: float) -> str:
    return f"{tokens / seconds:,.0f} tokens/s" if tokens and seconds else "-"
