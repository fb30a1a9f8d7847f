"""The terminal output: a progress line while it runs, tables at the end.

The line is for a terminal only; a pipe gets only the tables.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import AsyncIterator
from typing import Any, Final, TextIO

from ferrum_rpc.bench.options import Workload
from ferrum_rpc.bench.stats import Stats
from ferrum_rpc.terminal import moves, table

REFRESH_S: Final = 0.2
BAR: Final = 24
CLEAR: Final = "\r\x1b[2K"

Table = list[tuple[str, ...]]
TIMES: Final = {
    "prompt": "prompt",
    "step": "step",
    "sent_late": "  sent after it was due",
    "queue": "  queue in the executor",
    "forward": "  forward pass",
    "rest": "  wire, protocol, client",
}
COLUMNS: Final = {"p50": "p50", "p90": "p90", "p99": "p99", "p99_9": "p99.9", "max": "max", "mean": "mean"}


@contextlib.asynccontextmanager
async def progress(workload: Workload, stats: Stats, out: TextIO) -> AsyncIterator[None]:
    """A progress line on ``out`` while the body runs, if that is a terminal."""
    if not moves(out):
        yield
        return

    async def draw() -> None:
        while True:
            width = shutil.get_terminal_size().columns - 1
            out.write(CLEAR + progress_line(workload, stats, time.perf_counter())[:width])
            out.flush()
            await asyncio.sleep(REFRESH_S)

    task = asyncio.ensure_future(draw())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
        out.write(CLEAR)
        out.flush()


def progress_line(workload: Workload, stats: Stats, now: float) -> str:
    """The progress of a run: completed steps, their rate, and the remaining seconds."""
    if stats.phase != "steps":
        prompts = f" {stats.prompt.count}/{workload.sequences}" if stats.phase == "prefill" else ""
        return f"{stats.phase}{prompts} ..."
    ran = max(now - stats.began, 1e-9)
    rate = stats.attempts / ran
    shares = []
    if workload.steps is not None:
        shares.append(stats.attempts / workload.steps)
    if workload.seconds is not None:
        shares.append(ran / workload.seconds)
    done = min(1.0, max(shares))
    left = f"{ran / done - ran:.0f} s left" if done else ""
    bar = ("#" * round(BAR * done)).ljust(BAR, "-")
    refused = f"  {sum(stats.errors.values())} refused" if stats.errors else ""
    return f"[{bar}] {done:4.0%}  {stats.attempts:,} steps  {rate:,.1f}/s  {left}{refused}"


def show(report: dict[str, Any], out: TextIO) -> None:
    """Write a report's tables and notes."""
    tables = ["\n".join(table(rows, numbers=len(rows[0]) > 3)) for rows in (figures(report), times(report)) if rows]
    out.write("\n\n".join([_heading(report), *tables, "\n".join(report["notes"])]) + "\n")


def figures(report: dict[str, Any]) -> Table:
    """Totals and rates, a row each."""
    prefill, decode, workload = report["prefill"], report["decode"], report["workload"]
    rows: Table = []
    if prefill["prompts"]:
        rows.append(("prefill", _per_second(prefill["tokens_per_s"], "tokens"), f"{prefill['prompts']:,} prompts"))
    if decode["steps"]:
        rows += [
            ("decode", _per_second(decode["tokens_per_s"], "tokens"), f"{decode['tokens']:,} tokens"),
            ("", _per_second(decode["steps_per_s"], "steps"), f"{decode['steps']:,} in {decode['seconds']:.1f} s"),
        ]
    if decode["sequences_per_forward"]:
        rows.append(("", f"{decode['sequences_per_forward']:.1f} sequences", "in a forward pass, mean"))
    if workload["rate_per_s"] is not None:
        rows.append(("due", _per_second(workload["rate_per_s"], "steps"), f"{report['unsent']:,} never sent"))
        rows.append(("refused", f"{report['queue_full']:,} QUEUE_FULL", f"of {report['attempts']:,} sent"))
    for reason, count in report["errors"].items():
        if reason != "QUEUE_FULL" or workload["rate_per_s"] is None:
            rows.append(("errors", f"{count:,} {reason}", f"of {report['attempts']:,} sent"))
    if report["gave_up"]:
        rows.append(("gave up", f"{report['gave_up']} of {workload['in_flight']}", "callers, before the end"))
    return rows


def times(report: dict[str, Any]) -> Table:
    """Percentiles in milliseconds; no rows if nothing was timed."""
    rows: Table = [
        (title, *(f"{report['milliseconds'][name][column]:,.3f}" for column in COLUMNS))
        for name, title in TIMES.items()
        if report["milliseconds"][name]
    ]
    return [("milliseconds", *COLUMNS.values()), *rows] if rows else []


def _heading(report: dict[str, Any]) -> str:
    server, workload = report["server"], report["workload"]
    model = "{model} ({weight_dtype}, {device}, {threads} threads)".format(**server) if server else "unknown model"
    flight = "step" if workload["in_flight"] == 1 else "steps"
    each = "1 sequence" if workload["batch"] == 1 else f"{workload['batch']} sequences"
    arrivals = f", {workload['arrivals']} arrivals" if workload["arrivals"] else ""
    return (
        f"{model} on {report['target']}, executor {server.get('version', '?')}\n"
        f"{workload['calls']}: {workload['in_flight']} {flight} in flight, {each} each; context {workload['context']}, "
        f"prompts of {workload['prompt_tokens']}, {workload['output']}, {workload['loop']} loop{arrivals}"
        + ("\ninterrupted: what was measured until then" if report["interrupted"] else "")
    )


def _per_second(rate: float | None, what: str) -> str:
    return "-" if rate is None else f"{rate:,.1f} {what}/s"
