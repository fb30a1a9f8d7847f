"""What was measured beside what was promised. One type, so that a test and the soak report judge alike."""

from __future__ import annotations

import operator
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from tests.faults.sizes import CI, Size

TIMES: Final = ("s", "ms", "x")
"""Units of times, and of ratios of times: what runs beside a test changes them."""

_HOLDS: Final[dict[str, Callable[[float, float], bool]]] = {"<=": operator.le, ">=": operator.ge, "=": operator.eq}


@dataclass(frozen=True)
class Figure:
    """One measured number, and the number that it is held to."""

    name: str
    measured: float
    relation: str
    bound: float
    unit: str = ""

    @property
    def holds(self) -> bool:
        return _HOLDS[self.relation](self.measured, self.bound)

    @property
    def timed(self) -> bool:
        return self.unit in TIMES

    def __str__(self) -> str:
        unit = f" {self.unit}" if self.unit else ""
        return f"{self.name}: {_short(self.measured)}{unit}, promised {self.relation} {_short(self.bound)}{unit}"


def at_most(name: str, measured: float, bound: float, unit: str = "") -> Figure:
    return Figure(name, measured, "<=", bound, unit)


def at_least(name: str, measured: float, bound: float, unit: str = "") -> Figure:
    return Figure(name, measured, ">=", bound, unit)


def exactly(name: str, measured: float, bound: float, unit: str = "") -> Figure:
    return Figure(name, measured, "=", bound, unit)


class Figures:
    """The figures of one promise. ``facts``: what was done to get them, for the report."""

    def __init__(self, title: str, *figures: Figure, facts: dict[str, object] | None = None) -> None:
        self.title, self.figures, self.facts = title, figures, facts or {}

    def broken(self) -> list[str]:
        """The figures that do not hold, as text. A promise without figures does not hold either."""
        if not self.figures:
            return ["nothing was measured"]
        return [str(each) for each in self.figures if not each.holds]

    @property
    def late(self) -> bool:
        """Whether times do not hold, and all else does."""
        broken = [each for each in self.figures if not each.holds]
        return bool(broken) and all(each.timed for each in broken)


Promise = Callable[[Size], Awaitable[Figures]]


def number(promise: Promise) -> str:
    """``R9`` of ``r9_overload_bends``."""
    return promise.__name__.partition("_")[0].upper()


async def hold(promise: Promise) -> None:
    """Try a promise at the size of CI. Where only times are broken it is tried once more: a machine that is shared
    stalls now and then, a server that is too slow is so each time. Raises AssertionError that names what is broken."""
    figures = await promise(CI)
    if figures.late:
        figures = await promise(CI)
    assert not figures.broken(), f"{number(promise)}: {'; '.join(figures.broken())} ({figures.facts})"


def quantile(values: list[float], q: float) -> float:
    """The value below which a share ``q`` of the values lies; of the values themselves, nothing interpolated."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def milliseconds(seconds: list[float], *quantiles: float) -> list[float]:
    """These quantiles, for a report."""
    return [round(quantile(seconds, q) * 1e3, 2) for q in quantiles]


def _short(number: float) -> str:
    return f"{number:,.0f}" if number == int(number) else f"{number:,.4g}"
