"""What the prefix cache gains and costs, as rows of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from benchmarks.tables import Column, Row, Table, bounded, cells, low_to_high, number, numbered, show, spread, tabulated

CROWD_COLUMNS: Final = (
    "model",
    "prompts a call",
    "cache",
    "measured",
    "blocks",
    "tokens computed",
    "seconds",
    "a call, ms",
    "first call, ms",
    "blocks without",
    "computed without",
    "target",
    "seconds without (rounds)",
)


def crowds(found: Sequence[Mapping[str, Any]]) -> Table:
    """Two rows for each crowd of `benchmarks.prefix`."""
    rows: list[Row] = []
    for each in found:
        for index, (side, its) in enumerate(each["sides"].items()):
            more = [f"{its[name]:,}" for name in ("measured", "blocks", "computed")]
            times = [f"{each[name]:.1f} ×" for name in ("times_blocks", "times_computed")]
            target = "" if each["target"] is None else f"≥ {each['target']:g} ×"
            ratios = [*times, target, low_to_high(each["times_seconds"]).replace(" (", " × (")]
            spent = (number(its["seconds"]), spread(its["call_ms"]), number(its["first_ms"]))
            rows.append((each["model"], f"{each['at_once']}", side, *more, *spent, *([""] * 4 if index else ratios)))
    return Table(CROWD_COLUMNS, rows, (0, 2))


def talk(result: Mapping[str, Any]) -> Table:
    """A row for each turn of the conversation, and one for all."""
    names = ("tokens", "new", "to_compute", "computed", "on_ms", "off_ms")
    found = [(f"{each['turn']}", each) for each in result["turns"]]
    found += [(f"all {result['talk']['turns']}", result["talk"])] if "talk" in result else []
    columns = ("turn", "tokens", "new", "to compute", "computed", "cache on, ms", "cache off, ms")
    return Table(columns, [(turn, *(f"{each[name]:,.0f}" for name in names)) for turn, each in found])


def misses(found: Sequence[Mapping[str, Any]]) -> Table:
    """A row for each kind of step in which nothing is found."""
    columns: dict[str, Column] = {
        "model": "{model}",
        "step": "{cell}",
        "cache on, ms": lambda each: spread(each["step_ms"]["cache on"]),
        "cache off, ms": lambda each: spread(each["step_ms"]["cache off"]),
        "on in off (pairs)": lambda each: low_to_high(each["ratio"], 3),
        "target": "≤ {target:g}",
    }
    return tabulated(found, columns, (0, 1))


def books(found: Sequence[Mapping[str, Any]]) -> Table:
    """A row for each size of the books."""
    columns: dict[str, Column] = {
        "sequences": "{live}",
        "tokens": "{length:,}",
        "cached blocks": "{cached:,}",
        "µs a sequence": "{per_sequence_us:.2f}",
        "in the first": "{of_first:.2f}",
        "a step, ms": numbered("step_ms"),
        "longest, ms": numbered("longest_ms"),
        "of a decode step": lambda each: f"{each['of_step']:.2%}" if "of_step" in each else "",
        "target": bounded("≤ {target:.0%}"),
    }
    return tabulated(found, columns)


def show_all(result: Mapping[str, Any]) -> None:
    """All tables on the terminal."""
    for name, table in every(result).items():
        print()
        show(table, name)
    for side, reason in result["left_out"].items():
        print(f"{side} was left out: {reason}")


def every(result: Mapping[str, Any]) -> dict[str, Table]:
    """The tables of `benchmarks.prefix`, by the names of their legends."""
    return {
        "crowds": crowds(result["crowds"]),
        "cells": cells(result["cells"]),
        "talk": talk(result),
        "misses": misses(result["misses"]),
        "books": books(result["books"]),
    }
