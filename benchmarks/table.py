"""Tables of a result: what its file holds, and the same as text for the terminal and for the page.

A cell is a number, a text, nothing, a `target` or a figure with its spread: ``median`` with the lowest and the highest
(``low``, ``high``) or with the 10th and the 90th percentile (``p10``, ``p90``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeGuard

Value = str | int | float | Mapping[str, Any] | None
Row = Mapping[str, Value]
Table = dict[str, Any]


def table(rows: Iterable[Row], *, left: int = 1, legend: Mapping[str, str] = {}, text: str = "") -> Table:
    """As the file holds it: the columns in the order in which the rows first name them. The first ``left`` columns say
    what a row is about. ``text`` stands before the table. Of a target the bound is written."""
    rows = list(rows)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[bound_of(cell) if is_target(cell := row.get(name)) else cell for name in columns] for row in rows]
    return {"text": text, "columns": columns, "left": left, "rows": cells, "legend": dict(legend)}


def rows_of(found: Table) -> list[dict[str, Any]]:
    """The rows by their columns."""
    return [dict(zip(found["columns"], row, strict=True)) for row in found["rows"]]


def number(value: float) -> str:
    """Three digits that mean something; a count as it is."""
    if isinstance(value, int) or not value:
        return f"{value:,.0f}"
    size = abs(value)
    return f"{value:,.{0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3 if size >= 0.01 else 5}f}"


def shown(value: Value) -> str:
    """A cell as text: ``1.23``, or with its spread ``1.23 (1.20 to 1.31)``."""
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, Mapping):
        return number(value)
    low, high = ("low", "high") if "low" in value else ("p10", "p90")
    return f"{number(value['median'])} ({number(value[low])} to {number(value[high])})"


def markdown(columns: Sequence[str], rows: Iterable[Sequence[Value]], left: int = 1) -> str:
    """For the page."""
    lines = [list(columns), ["---"] * left + ["---:"] * (len(columns) - left)]
    lines += [[shown(cell).replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def show(found: Table) -> None:
    """On the terminal."""
    lines = [found["columns"], *([shown(cell) for cell in row] for row in found["rows"])]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip(), flush=True)
    for name, text in found["legend"].items():
        print(f"  {name}: {text}")


def target(
    what: str, value: float | None, bound: float, *, least: bool = True, unit: str = "", goal: float | None = None
) -> dict[str, Any]:
    """``what`` is to be reached, and where it stands (None: not measured). ``least``: at least ``bound``, else at most.
    Nothing passes or fails by it, but for `benchmarks.gpu`. A cell without ``what`` has a bound only."""
    return {"what": what, "value": value, "least": least, "bound": bound, "unit": unit, "goal": goal}


def is_target(cell: Any) -> TypeGuard[Mapping[str, Any]]:
    """Whether a cell is one."""
    return isinstance(cell, Mapping) and "bound" in cell


def bound_of(found: Mapping[str, Any]) -> str:
    """``≥ 0.9``."""
    return f"{'≥' if found['least'] else '≤'} {found['bound']:g}{found['unit']}"


def reached(found: Mapping[str, Any]) -> bool | None:
    """Whether a target is reached; None: it is not measured."""
    value, bound = found["value"], found["bound"]
    return None if value is None else bool(value >= bound if found["least"] else value <= bound)
