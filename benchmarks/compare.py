"""The comparison that every benchmark makes: rounds of all sides in turn (A B C A B C ...), and ratios of their pairs.

Absolute figures hold for the machine and the minute; the ratio of a pair of rounds that followed each other holds for
longer, because both met the same conditions. Its spread over the pairs says how far it can be trusted.
"""

from __future__ import annotations

import asyncio
import operator
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any, Final, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from benchmarks.cases import Cell
from benchmarks.machine import Bystanders

SETTLE_S: Final = 0.05
"""Between rounds: OpenMP's workers spin for some milliseconds after a side's last step, on the other side's cores."""

WARM_STEPS: Final = 2
LEAST_STEPS: Final = 3

Name = TypeVar("Name")
T = TypeVar("T")
Figures = dict[str, Any]


@dataclass(slots=True)
class Round:
    """Seconds of every timed step. ``forward_s`` and ``queue_s``: the server's own timings of the same steps, where
    there is a server of ours. ``wall_s``: of all of them together, where several are in flight at a time. ``last``: of
    the last step, the arg-max of each row or a digest of all, to show that the sides compute the same."""

    step_s: list[float] = field(default_factory=list)
    forward_s: list[float] = field(default_factory=list)
    queue_s: list[float] = field(default_factory=list)
    wall_s: float = 0.0
    last: list[Any] = field(default_factory=list)
    _began: float = 0.0

    def steps(self, inputs: Iterable[T], lead_in: int) -> Iterator[tuple[int, T]]:
        """The inputs of steps in turn, with their index: each must end with `done`. The first ``lead_in`` do not
        count."""
        for numbered in enumerate(inputs):
            self._began = perf_counter()
            yield numbered
        for seconds in (self.step_s, self.forward_s, self.queue_s):
            del seconds[:lead_in]

    def done(self, forward_s: float | None = None, queue_s: float = 0.0, began: float | None = None) -> None:
        """A step has ended that began ``began`` (with `steps`, if it is not said)."""
        self.step_s.append(perf_counter() - (self._began if began is None else began))
        if forward_s is not None:
            self.forward_s.append(forward_s)
            self.queue_s.append(queue_s)


class Unsupported(RuntimeError):
    """A side does not do that, or is not there; the reason."""


class Player(Protocol):
    """A side of a comparison."""

    facts: dict[str, Any]
    """What it is: ``name``, ``threads``, ``versions``, and what else it tells."""

    async def prepare(self, cell: Cell) -> None:
        """Make the sequences of ``cell``, and forget those that it cannot use."""

    async def round(self, cell: Cell, number: int, steps: int) -> Round:
        """``steps`` timed steps of the cell that was prepared; ``number`` tells prefill rounds apart."""


async def alternate(
    sides: Mapping[Name, Callable[[int], Awaitable[T]]], rounds: int, *, settle_s: float = SETTLE_S, first: int = 0
) -> tuple[dict[Name, list[T]], list[int]]:
    """``rounds`` rounds of each side, in turn, every other turn in the opposite order, so that a machine that becomes
    faster or slower favours nobody; each is told its number, from ``first``. A turn during which others used
    the machine is repeated, ``rounds`` times at most: the kernel's accounts decide, not the figures. Returns the rounds
    of each side, and how many turns were repeated and how many kept although disturbed."""
    taken: dict[Name, list[T]] = {name: [] for name in sides}
    done = repeated = kept = 0
    while done < rounds:
        bystanders = Bystanders()
        turn: dict[Name, T] = {}
        for name, take in [*sides.items()][:: -1 if done % 2 else 1]:
            await asyncio.sleep(settle_s)
            turn[name] = await take(first + done + repeated)
        if bystanders.disturbed():
            if repeated < rounds:
                repeated += 1
                continue
            kept += 1
        done += 1
        for name, found in turn.items():
            taken[name].append(found)
    return taken, [repeated, kept]


@asynccontextmanager
async def meanwhile(work: Callable[[], Awaitable[object]]) -> AsyncIterator[list[float]]:
    """``work`` again and again while the block runs, which begins when it was done once; the seconds of each time."""
    taken, runs = list[float](), True

    async def repeat() -> None:
        while runs:
            began = perf_counter()
            await work()
            taken.append(perf_counter() - began)

    await work()
    task = asyncio.create_task(repeat())
    try:
        yield taken
    finally:
        runs = False
        await task


def median(values: Iterable[float], digits: int = 3) -> float:
    """Of figures, rounded."""
    return round(float(np.median(list(values))), digits)


def percentile(values: npt.ArrayLike, share: float, digits: int = 3) -> float:
    """Of figures, rounded; ``share`` of 100."""
    return round(float(np.percentile(np.asarray(values, float), share)), digits)


def spread(seconds: Sequence[float], times: float = 1e3, digits: int = 4) -> dict[str, float]:
    """Median, 10th and 90th percentile of seconds, in milliseconds."""
    p10, p50, p90 = (percentile(np.asarray(seconds) * times, share, digits) for share in (10, 50, 90))
    return {"median": p50, "p10": p10, "p90": p90}


def ratio(over: Sequence[Round], under: Sequence[Round], digits: int = 3) -> Figures:
    """Median step of ``over`` in those of ``under``: each pair of rounds, and over the pairs."""
    found = [float(np.median(a.step_s) / np.median(b.step_s)) for a, b in zip(over, under, strict=True)]
    return {"pairs": [round(each, digits) for each in found], **shares(found, [1.0] * len(found), digits)}


def shares(rates: Sequence[float], of: Sequence[float], digits: int = 3) -> dict[str, float]:
    """The ratios of figures to those of another way in the same rounds."""
    found = np.divide(rates, of)
    ends = {"median": np.median(found), "low": found.min(), "high": found.max()}
    return {name: round(float(each), digits) for name, each in ends.items()}


def figures(cell: Cell, rounds: Sequence[Round], reference: Sequence[Round]) -> Figures:
    """Of one side. ``tokens_per_s``: of the rounds' medians, their median, lowest and highest. ``same_tokens``: of the
    last step of each round, how many of the reference's rows it found as well, and of how many (bfloat16 in another
    order of sums decides close calls otherwise). With a server of ours, ``forward_ms`` by its clock."""
    rates = [cell.tokens_per_step / float(np.median(each.step_s)) for each in rounds]
    same = sum(sum(map(operator.eq, ours.last, theirs.last)) for ours, theirs in zip(rounds, reference, strict=True))
    steps = [second for each in rounds for second in each.step_s]
    found: Figures = {
        "tokens_per_s": round(float(np.median(rates)), 2),
        "low": round(min(rates), 2),
        "high": round(max(rates), 2),
        "step_ms": spread(steps),
        "samples": len(steps),
        "same_tokens": [same, sum(len(each.last) for each in rounds)],
    }
    if forward := [second for each in rounds for second in each.forward_s]:
        found["forward_ms"] = spread(forward)
    return found


@dataclass(frozen=True, slots=True)
class Played:
    """Rounds ``by_name`` of the sides of a cell, of so many ``steps`` each; turns that others ``disturbed``, see
    `alternate`; sides that are ``absent``, and why."""

    steps: int
    by_name: dict[str, list[Round]]
    disturbed: list[int]
    absent: dict[str, str]


async def contest(cell: Cell, players: Mapping[str, Player], reference: str, rounds: int, round_s: float) -> Figures:
    """One cell: warm up, choose the number of steps from the reference side's pace, and alternate. A side that cannot
    do the cell is ``absent`` with its reason, and the others go on. ``ratios``: of each other side's step to the
    reference's, which are tokens a second of the reference over the other's."""
    return result_of(cell, await rounds_of(cell, players, reference, rounds, round_s), reference)


async def rounds_of(  # noqa: PLR0917
    cell: Cell, players: Mapping[str, Player], reference: str, rounds: int, round_s: float, steps: int = 0
) -> Played:
    """The rounds of `contest`. ``steps`` of each; 0: see there."""
    absent: dict[str, str] = {}
    for name in sorted(players, key=lambda each: each != reference):  # the reference tells the pace
        try:
            await players[name].prepare(cell)
            if not steps:
                warm = await players[name].round(cell, 0, WARM_STEPS)
                steps = min(cell.most, max(LEAST_STEPS, round(round_s / float(np.median(warm.step_s)))))
            await players[name].round(cell, 1, steps)
        except Unsupported as reason:
            if name == reference:
                raise
            absent[name] = str(reason)
    takes = {name: partial(each.round, cell, steps=steps) for name, each in players.items() if name not in absent}
    return Played(steps, *await alternate(takes, rounds, first=2), absent)


def result_of(cell: Cell, played: Played, reference: str) -> Figures:
    """The result of `contest`, of rounds that were played."""
    ours = played.by_name[reference]
    return {
        "cell": cell.name,
        "kind": cell.kind,
        "batch": cell.batch,
        "context": cell.context,
        "output": cell.output,
        "steps": played.steps,
        "roof": None,
        "target": cell.target,
        "goal": cell.goal,
        "reference": reference,
        "sides": {name: figures(cell, each, ours) for name, each in played.by_name.items()},
        "absent": played.absent,
        "ratios": {name: ratio(each, ours) for name, each in played.by_name.items() if name != reference},
        "disturbed": played.disturbed,
    }
