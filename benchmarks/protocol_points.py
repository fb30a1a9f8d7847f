"""The figures of a run of `benchmarks.protocol`: from rounds to points, with what they are to be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypedDict

import numpy as np

from benchmarks.sides import Round

DEPTHS: Final = (1, 2, 4)
"""Steps in flight."""

MANY: Final = 64
"""Callers at a time, of unary calls only: a session is one scheduler's."""

CROWD: Final = 50
"""Coroutines on one client, each with a sequence of its own, and the items of a batch in lockstep."""

ECHO_OF: Final = {
    "unary": "echo, unary",
    "client, unary": "echo, unary",
    "session": "echo, stream",
    "client, session": "echo, stream",
    "client, batches": "echo, stream",
}
"""What each way is measured against."""

BATCHES: Final = "client, batches"
"""What a crowd of coroutines is measured against."""

BATCH_TARGET: Final = 1.25
"""A step of one of the crowd, in steps of a batch of as many, at most: 0.8 of its rate."""

ECHO_TARGET: Final = 2.0
"""An empty step with one in flight, in bare echoes of the same bytes, at most."""

TARGETS: Final = {1: ECHO_TARGET, CROWD: BATCH_TARGET}

RATE_TARGETS: Final = {("session", 4): 3000.0, ("unary", MANY): 3000.0}
"""Steps a second, at least, by way and depth. Like the other target it states where things are to be; nothing fails."""

Rounds = dict[tuple[str, str, int], list[Round]]
"""By transport, way and depth; the rounds of one index followed each other."""


class Ratio(TypedDict):
    """A way's median step over its echo's: each pair of rounds, and over the pairs."""

    pairs: list[float]
    median: float
    low: float
    high: float
    target: float | None


class Point(TypedDict):
    """One way over one transport at one depth. Milliseconds of a step; ``steps_per_s``: median of the rounds. Of the
    server's own clock, where there is one: ``queue_ms``, ``forward_ms``, and ``around_ms``, the step less its forward
    less the echo: what the protocol, its handlers and the hand-overs cost."""

    transport: str
    way: str
    depth: int
    samples: int
    p50_ms: float
    p99_ms: float
    steps_per_s: float
    rate_target: float | None
    ratio: Ratio | None
    queue_ms: float | None
    forward_ms: float | None
    around_ms: float | None


def points(taken: Rounds) -> list[Point]:
    """Every way at every depth, in the order of the rounds."""
    return [
        point(transport, way, depth, rounds, taken.get((transport, _against(way, depth), depth)))
        for (transport, way, depth), rounds in taken.items()
    ]


def _against(way: str, depth: int) -> str:
    if depth == CROWD:
        return "" if way == BATCHES else BATCHES
    return ECHO_OF.get(way, "")


def point(transport: str, way: str, depth: int, rounds: Sequence[Round], echoes: Sequence[Round] | None) -> Point:
    """The figures of rounds, and of the echo's rounds that they were paired with (None: it is an echo itself)."""
    steps = np.array([second for each in rounds for second in each.step_s])
    queue = [second for each in rounds for second in each.queue_s]
    forward = np.array([second for each in rounds for second in each.forward_s])
    around = None
    if len(forward) and echoes is not None:
        echo = np.array([second for each in echoes for second in each.step_s])
        around = _ms(np.median(steps - forward) - np.median(echo))
    return {
        "transport": transport,
        "way": way,
        "depth": depth,
        "samples": len(steps),
        "p50_ms": _ms(np.median(steps)),
        "p99_ms": _ms(np.percentile(steps, 99)),
        "steps_per_s": round(float(np.median([len(each.step_s) / each.wall_s for each in rounds])), 1),
        "rate_target": RATE_TARGETS.get((way, depth)),
        "ratio": None if echoes is None else _ratio(rounds, echoes, TARGETS.get(depth)),
        "queue_ms": _ms(np.median(queue)) if queue else None,
        "forward_ms": _ms(np.median(forward)) if len(forward) else None,
        "around_ms": around,
    }


def _ratio(rounds: Sequence[Round], echoes: Sequence[Round], target: float | None) -> Ratio:
    pairs = [float(np.median(ours.step_s) / np.median(bare.step_s)) for ours, bare in zip(rounds, echoes, strict=True)]
    return {
        "pairs": [round(each, 3) for each in pairs],
        "median": round(float(np.median(pairs)), 3),
        "low": round(min(pairs), 3),
        "high": round(max(pairs), 3),
        "target": target,
    }


def _ms(seconds: float | np.floating) -> float:
    return round(float(seconds) * 1e3, 4)
