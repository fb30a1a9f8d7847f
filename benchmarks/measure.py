"""One point: rounds of the sides in turn (A B E A B E ...), a ratio for every pair of rounds, and where the time went.

Absolute figures hold for the machine and the minute; the ratio of a pair holds for longer, because both of its rounds
met the same weather. Its spread over the pairs says how far it can be trusted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypedDict

import numpy as np

from benchmarks.echo import Echo
from benchmarks.environment import Bystanders
from benchmarks.remote import Remote
from benchmarks.sides import Round

SETTLE_S: Final = 0.05
"""Between rounds: OpenMP's workers spin for some milliseconds after a side's last step, on the other side's cores."""

MIN_STEPS: Final = 4
ECHOES: Final = 32
"""Exchanges of an echo round, at least: they are cheap beside a step."""

RATIO_TARGETS: Final = {("greedy", None): 0.97, ("full-bf16", 32): 0.85}
"""In-process over gRPC step time, by output and batch size (None: every one). Goals of later work: this program states
where things are and passes or fails nothing."""

ECHO_TARGET: Final = 2.0
"""The identity model's step through the whole service, in bare echoes of the same bytes, at most."""


Trio = tuple[Round, Round, Round]
"""Rounds of A, B and E that followed each other."""


class Spread(TypedDict):
    """Of many samples."""

    median: float
    p10: float
    p90: float


class SideResult(TypedDict):
    """Milliseconds a step; rates from the median."""

    step_ms: Spread
    steps_per_s: float
    tokens_per_s: float
    samples: int


class Ratio(TypedDict):
    """In-process over gRPC step time: the medians of each pair of rounds, and over the pairs."""

    pairs: list[float]
    median: float
    low: float
    high: float
    target: float | None


class Disturbed(TypedDict):
    """Pairs of rounds during which others used the machine: thrown away and repeated, or kept when that never ended.
    The kernel's accounts decide, not the figures."""

    repeated: int
    kept: int


class Point(TypedDict):
    """``grpc_forward_ms`` and ``grpc_queue_ms`` are the server's own timings of the gRPC steps. ``overhead_ms`` is gRPC
    less in-process, ``bookkeeping_ms`` that less the echo; ``around_forward_ms`` is gRPC less the server's own forward,
    less the echo: the same thing without the two processes' different luck with memory pages. ``same_rows``: rounds
    whose last rows were bitwise the same on both sides."""

    model: str
    batch: int
    output: str
    context: int
    steps: int
    request_bytes: int
    response_bytes: int
    in_process: SideResult
    grpc: SideResult
    echo_ms: Spread
    grpc_forward_ms: Spread
    grpc_queue_ms: Spread
    ratio: Ratio
    echo_multiple: float
    echo_target: float | None
    overhead_ms: float
    bookkeeping_ms: float
    around_forward_ms: float
    same_rows: list[int]
    disturbed: Disturbed


class Stepping(Protocol):
    """A side that can be told to run steps."""

    async def round(self, batch: int, output: str, steps: int) -> Round:
        """Rolled back, then ``steps`` timed ones."""


@dataclass(frozen=True, slots=True)
class Sides:
    """A, B and E, all up and with their sequences prefilled."""

    in_process: Stepping
    grpc: Remote
    echo: Echo


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured: steps of ``batch`` sequences of ``context`` tokens that ask for ``output``."""

    model: str
    context: int
    batch: int
    output: str


class Schedule(TypedDict):
    """``rounds`` of each side, each of about ``round_s`` seconds and at most ``max_steps`` steps."""

    rounds: int
    round_s: float
    max_steps: int


async def measure(case: Case, sides: Sides, plan: Schedule) -> Point:
    """Warm up, choose the number of steps, and alternate."""
    in_process, grpc, echo = sides.in_process, sides.grpc, sides.echo
    await in_process.round(case.batch, case.output, MIN_STEPS)
    warm = await grpc.round(case.batch, case.output, MIN_STEPS)
    steps = min(max(MIN_STEPS, round(plan["round_s"] / float(np.median(warm.step_s)))), plan["max_steps"])
    await echo.prepare(*grpc.exchange)
    await echo.round(ECHOES)
    rounds: list[Trio] = []
    repeated = kept = 0
    while len(rounds) < plan["rounds"]:
        bystanders = Bystanders()
        await asyncio.sleep(SETTLE_S)
        a = await in_process.round(case.batch, case.output, steps)
        await asyncio.sleep(SETTLE_S)
        b = await grpc.round(case.batch, case.output, steps)
        await asyncio.sleep(SETTLE_S)
        trio = (a, b, await echo.round(max(steps, ECHOES)))
        if not bystanders.disturbed():
            rounds.append(trio)
        elif repeated < plan["rounds"]:
            repeated += 1
        else:
            kept += 1
            rounds.append(trio)
    return point(case, steps, grpc.exchange, rounds, {"repeated": repeated, "kept": kept})


def point(
    case: Case, steps: int, exchange: tuple[bytes, bytes], rounds: Sequence[Trio], disturbed: Disturbed | None = None
) -> Point:
    """The figures of rounds of ``steps`` steps whose request and answer took the bytes of ``exchange``."""
    inside = percentiles([second for a, _, _ in rounds for second in a.step_s])
    outside = percentiles([second for _, b, _ in rounds for second in b.step_s])
    wire = percentiles([second for _, _, e in rounds for second in e.step_s])
    around = [whole - forward for _, b, _ in rounds for whole, forward in zip(b.step_s, b.forward_s, strict=True)]
    samples = steps * len(rounds)
    overhead = outside["median"] - inside["median"]
    return {
        "model": case.model,
        "batch": case.batch,
        "output": case.output,
        "context": case.context,
        "steps": steps,
        "request_bytes": len(exchange[0]),
        "response_bytes": len(exchange[1]),
        "in_process": _side(inside, case.batch, samples),
        "grpc": _side(outside, case.batch, samples),
        "echo_ms": wire,
        "grpc_forward_ms": percentiles([second for _, b, _ in rounds for second in b.forward_s]),
        "grpc_queue_ms": percentiles([second for _, b, _ in rounds for second in b.queue_s]),
        "ratio": _ratio([float(np.median(a.step_s) / np.median(b.step_s)) for a, b, _ in rounds], case),
        "echo_multiple": round(outside["median"] / wire["median"], 3),
        "echo_target": ECHO_TARGET if case.model == "identity" else None,
        "overhead_ms": round(overhead, 4),
        "bookkeeping_ms": round(overhead - wire["median"], 4),
        "around_forward_ms": round(percentiles(around)["median"] - wire["median"], 4),
        "same_rows": [sum(a.digest == b.digest for a, b, _ in rounds), len(rounds)],
        "disturbed": disturbed or {"repeated": 0, "kept": 0},
    }


def _ratio(pairs: list[float], case: Case) -> Ratio:
    return {
        "pairs": [round(each, 4) for each in pairs],
        "median": round(float(np.median(pairs)), 4),
        "low": round(min(pairs), 4),
        "high": round(max(pairs), 4),
        "target": RATIO_TARGETS.get((case.output, None), RATIO_TARGETS.get((case.output, case.batch))),
    }


def percentiles(seconds: Sequence[float]) -> Spread:
    """Of seconds, in milliseconds."""
    p10, median, p90 = np.percentile(np.asarray(seconds) * 1e3, (10, 50, 90))
    return {"median": round(float(median), 4), "p10": round(float(p10), 4), "p90": round(float(p90), 4)}


def _side(step_ms: Spread, batch: int, samples: int) -> SideResult:
    rate = 1e3 / step_ms["median"]
    return {
        "step_ms": step_ms,
        "steps_per_s": round(rate, 2),
        "tokens_per_s": round(rate * batch, 2),
        "samples": samples,
    }
