"""One cell: rounds of all sides in turn (A B C A B C ...), and a ratio for each pair of rounds that belong together.

The number of steps is chosen once, from the reference side's pace, and is the same for all. A side that cannot do a
cell says why, and the others go on without it.
"""

from __future__ import annotations

import asyncio
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TypedDict

import numpy as np

from benchmarks.cells import Cell
from benchmarks.environment import Bystanders
from benchmarks.limits import Machine, Roof, roof
from benchmarks.measure import SETTLE_S, Spread, percentiles
from benchmarks.ours import Player, Unsupported
from benchmarks.peer_process import PeerFailed
from benchmarks.sides import Round

WARM_STEPS: Final = 2
LEAST_STEPS: Final = 3


class SideFigures(TypedDict):
    """``tokens_per_s``: of the rounds' medians, their median, lowest and highest. ``same_tokens``: of the last step of
    each round, how many of the reference side's arg-max tokens it found as well, and of how many (bfloat16 in another
    order of sums decides close calls otherwise)."""

    tokens_per_s: float
    low: float
    high: float
    step_ms: Spread
    samples: int
    same_tokens: list[int]


class Pairs(TypedDict):
    """The reference side's tokens a second over the other's: pairs of rounds, and over the pairs."""

    pairs: list[float]
    median: float
    low: float
    high: float


class CellResult(TypedDict):
    """``sides`` by name; ``absent``: which side did not run the cell, and why. ``ratios`` of the reference side to each
    other one. ``disturbed``: turns during which others used the machine, repeated and kept."""

    cell: str
    kind: str
    batch: int
    context: int
    steps: int
    roof: Roof | None
    target: float | None
    goal: float | None
    reference: str
    sides: dict[str, SideFigures]
    absent: dict[str, str]
    ratios: dict[str, Pairs]
    disturbed: list[int]


@dataclass(frozen=True, slots=True)
class Plan:
    """``rounds`` of each side, each of about ``round_s`` seconds."""

    rounds: int
    round_s: float


async def contest(cell: Cell, players: dict[str, Player], reference: str, plan: Plan) -> CellResult:
    """Warm up, choose the number of steps, and alternate."""
    absent: dict[str, str] = {}
    taking_part: dict[str, Player] = {}
    steps = 0
    for name in sorted(players, key=lambda each: each != reference):  # the reference tells the pace
        player = players[name]
        try:
            await player.prepare(cell)
            if not steps:
                warm = await player.round(cell, 0, WARM_STEPS)
                steps = min(cell.most, max(LEAST_STEPS, round(plan.round_s / float(np.median(warm.step_s)))))
            await player.round(cell, 1, steps)
            taking_part[name] = player
        except (Unsupported, PeerFailed) as reason:
            if name == reference:
                raise
            absent[name] = str(reason)
    order = [name for name in players if name in taking_part]
    turns: list[dict[str, Round]] = []
    repeated = kept = 0
    number = 2
    while len(turns) < plan.rounds:
        bystanders = Bystanders()
        turn: dict[str, Round] = {}
        for name in order:
            await asyncio.sleep(SETTLE_S)
            turn[name] = await taking_part[name].round(cell, number, steps)
        number += 1
        if bystanders.disturbed():
            if repeated < plan.rounds:
                repeated += 1
                continue
            kept += 1
        turns.append(turn)
    return _result(cell, steps, turns, reference) | {"absent": absent, "disturbed": [repeated, kept]}


def _result(cell: Cell, steps: int, turns: Sequence[dict[str, Round]], reference: str) -> CellResult:
    others = [name for name in turns[0] if name != reference]
    return {
        "cell": cell.name,
        "kind": cell.kind,
        "batch": cell.batch,
        "context": cell.context,
        "steps": steps,
        "roof": None,
        "target": cell.target,
        "goal": cell.goal,
        "reference": reference,
        "sides": {name: _figures(cell, [turn[name] for turn in turns], turns, reference) for name in turns[0]},
        "absent": {},
        "ratios": {name: _pairs([_pace(turn[name]) / _pace(turn[reference]) for turn in turns]) for name in others},
        "disturbed": [0, 0],
    }


def _pace(timed: Round) -> float:
    return float(np.median(timed.step_s))


def _figures(cell: Cell, rounds: Sequence[Round], turns: Sequence[dict[str, Round]], reference: str) -> SideFigures:
    rates = [cell.tokens_per_step / _pace(each) for each in rounds]
    steps = [second for each in rounds for second in each.step_s]
    same = of = 0
    for each, turn in zip(rounds, turns, strict=True):
        same += sum(map(operator.eq, each.tokens, turn[reference].tokens))
        of += len(each.tokens)
    return {
        "tokens_per_s": round(float(np.median(rates)), 2),
        "low": round(min(rates), 2),
        "high": round(max(rates), 2),
        "step_ms": percentiles(steps),
        "samples": len(steps),
        "same_tokens": [same, of],
    }


def _pairs(ratios: Sequence[float]) -> Pairs:
    return {
        "pairs": [round(each, 3) for each in ratios],
        "median": round(float(np.median(ratios)), 3),
        "low": round(min(ratios), 3),
        "high": round(max(ratios), 3),
    }


def under_roofs(results: Sequence[CellResult], cells: Sequence[Cell], config: dict[str, Any], machine: Machine) -> None:
    """Set the limit beside every cell, of the best readings of the whole run."""
    limits = machine.limits()
    named = {cell.name: cell for cell in cells}
    for result in results:
        result["roof"] = roof(named[result["cell"]], config, limits)
