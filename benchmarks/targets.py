"""Every figure that is to be reached, and where it stands: what no file of results answers says "not yet measured"."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.cases import CELLS
from benchmarks.engines.grpc import INT8
from benchmarks.engines.inprocess import INSIDE
from benchmarks.engines.process import REFERENCE
from benchmarks.tables import IN_PROCESS, NOT_YET, Row, number

COLUMNS: Final = ("what", "measured", "target", "reached", "goal", "file")

Results = Mapping[str, tuple[str, Any]]
"""The newest result of each benchmark, with its file's name."""


@dataclass(frozen=True, slots=True)
class Target:
    """``find``: the figure in a result of ``benchmark``, or None. ``least``: at least ``bound``, else at most."""

    what: str
    benchmark: str
    find: Callable[[Any], float | None]
    bound: float
    least: bool = True
    unit: str = ""
    goal: float | None = None

    def row(self, results: Results) -> Row:
        """Of the table."""
        name, result = results.get(self.benchmark, ("", None))
        value = None if result is None else self.find(result)
        sign = "≥" if self.least else "≤"
        goal = "" if self.goal is None else f"{sign} {self.goal:g}{self.unit}"
        bound = f"{sign} {self.bound:g}{self.unit}"
        if value is None:
            return (self.what, NOT_YET, bound, "", goal, "")
        reached = value >= self.bound if self.least else value <= self.bound
        return (self.what, f"{number(value)}{self.unit}", bound, "yes" if reached else "no", goal, f"`{name}`")


def _first(found: Iterator[Any]) -> float | None:
    value = next(found, None)
    return None if value is None else float(value)


def _cell(name: str, side: str = REFERENCE) -> Callable[[Any], float | None]:
    return lambda result: _first(
        cell["sides"][side]["tokens_per_s"]
        for cell in result.get("cells", ())
        if cell["cell"] == name and side in cell["sides"]
    )


def _wire(batch: int, output: str) -> Callable[[Any], float | None]:
    return lambda result: _first(
        cell["ratios"][IN_PROCESS]["median"]
        for cell in result["cells"]
        if (cell["model"], cell["batch"], cell["output"]) == ("qwen3-0.6b", batch, output)
    )


def _protocol(way: str, depth: int, *figure: str) -> Callable[[Any], float | None]:
    def find(result: Any) -> float | None:
        for point in result["points"]:
            if (point["transport"], point["way"], point["depth"]) == ("tcp", way, depth):
                value = point
                for key in figure:
                    value = value[key]
                return float(value)
        return None

    return find


def _mixed(result: Any) -> float | None:
    return None if result.get("mixed") is None else float(result["mixed"]["ratio"])


def _bookkeeping(result: Any) -> float | None:
    return max((float(each["per_sequence_us"]) for each in result.get("bookkeeping", ())), default=None)


def _share(name: str) -> Callable[[Any], float | None]:
    """By the cell's name: a check of another size, or of other parts, has none of that name."""
    return lambda result: _first(
        cell["sides"][INSIDE]["tokens_per_s"] / cell["roof"]["tokens_per_s"]
        for cell in result.get("cells", ())
        if cell["cell"] == name and INSIDE in cell["sides"]
    )


def _gpu_wire(name: str) -> Callable[[Any], float | None]:
    return lambda result: _first(
        cell["ratios"][INSIDE]["median"]
        for cell in result.get("cells", ())
        if cell["cell"] == name and INSIDE in cell["ratios"]
    )


def _attention(name: str) -> Callable[[Any], float | None]:
    return lambda result: _first(
        load["share_of_bandwidth"] for load in result.get("attention", ()) if load["name"] == name
    )


def _speed() -> Iterator[Target]:
    for cell in CELLS:
        assert cell.target is not None
        what = f"Qwen3-0.6B bf16 through gRPC, greedy, {cell.name}"
        yield Target(what, "suite", _cell(cell.name), cell.target, unit=" tok/s", goal=cell.goal)
    for name, bound in (("decode b1 @512", 32.0), ("decode b8 @256", 140.0), ("decode b32 @256", 260.0)):
        yield Target(f"the same, int8 weights, {name}", "suite", _cell(name, INT8), bound, unit=" tok/s")


def _costs() -> Iterator[Target]:
    for way, benchmark in (("unary calls", "wire"), ("in a session", "wire-session")):
        for batch in (1, 8, 32):
            what = f"gRPC against in process, b{batch}, greedy, {way}"
            yield Target(what, benchmark, _wire(batch, "greedy"), 0.97)
    yield Target("gRPC against in process, b32, full bf16 rows", "wire", _wire(32, "full-bf16"), 0.85)
    for way in ("unary", "session"):
        what = f"an empty step, {way}, in bare echoes"
        yield Target(what, "protocol", _protocol(way, 1, "ratio", "median"), 2.0, least=False)
    for engine, benchmark in (("", "protocol"), (", engine in a process", "protocol-process")):
        for what, find in (
            ("empty steps in a session, 4 in flight", _protocol("session", 4, "steps_per_s")),
            ("empty steps of 64 unary callers", _protocol("unary", 64, "steps_per_s")),
        ):
            yield Target(what + engine, benchmark, find, 3000, unit="/s")
    yield Target("p99 over p50 of a decode step under mixed load", "suite", _mixed, 2.0, least=False)
    yield Target("bookkeeping of a sequence and step", "suite", _bookkeeping, 30.0, least=False, unit=" µs")


def _gpu() -> Iterator[Target]:
    for what, find, bound in (
        ("decode b1 @1k, of the limit", _share("decode b1 @1024"), 0.85),
        ("decode b64 @2k, of the limit", _share("decode b64 @2048"), 0.80),
        ("prefill 8k, of the limit", _share("prefill 8192"), 0.60),
        ("attention, decode b64 @4k, of the limit", _attention("decode, 64 x 4k"), 0.80),
        ("gRPC against in process, b64, greedy", _gpu_wire("decode b64 @2048"), 0.97),
    ):
        yield Target(f"CUDA, Qwen3-8B shape, bf16: {what}", "gpu", find, bound)


TARGETS: Final = (*_speed(), *_costs(), *_gpu())


def newest(results: Sequence[tuple[str, Any]]) -> dict[str, tuple[str, Any]]:
    """The latest result of each benchmark."""
    found: dict[str, tuple[str, Any]] = {}
    for name, result in sorted(results, key=lambda each: each[1]["ended"]):
        found[result["benchmark"]] = (name, result)
    return found


def rows(results: Results) -> list[Row]:
    """Every target."""
    return [target.row(results) for target in TARGETS]
