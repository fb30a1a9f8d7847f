"""What the benchmarks are to reach, and where each figure stands in their results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.adapters import BASE
from benchmarks.adapters import TARGET as ADAPTERS_TARGET
from benchmarks.cache import EXACT
from benchmarks.cache import TARGET as INT8_CACHE_TARGET
from benchmarks.cases import CELLS
from benchmarks.engines.grpc import INT8
from benchmarks.engines.inprocess import INSIDE
from benchmarks.engines.process import REFERENCE
from benchmarks.fronts import ROUTER
from benchmarks.fronts import STREAMS as FRONT_STREAMS
from benchmarks.fronts import TARGET as FRONTS_TARGET
from benchmarks.memory import TARGET as PLAN_TARGET
from benchmarks.prefix import BOOKS_TARGET, LESS_TARGET, MISS_TARGET
from benchmarks.speculation import TARGETS as DRAFT_TARGETS
from benchmarks.streams import RANDOM, STREAMS
from benchmarks.streams import TARGET as STREAMS_TARGET
from benchmarks.tables import IN_PROCESS, NOT_YET, Row, Table, number
from benchmarks.trips import OTHERS_TARGET
from benchmarks.trips import TARGETS as TRIP_TARGETS

STANDING: Final = ("what", "measured", "target", "reached", "goal", "file")

Results = Mapping[str, tuple[str, Any]]
"""The newest result of each benchmark, with its file's name."""

Place = tuple[str | dict[str, Any], ...]
"""Where a figure stands in a result: keys, and in a list what the entry has."""


def find(value: Any, path: Place) -> Any:
    """What stands there, or None."""
    for key in path:
        if isinstance(key, dict):
            value = next((each for each in value if key.items() <= each.items()), {})
        else:
            value = {} if value is None else value.get(key, {})
    return None if value == {} else value


@dataclass(frozen=True, slots=True)
class Target:
    """``path``: of the figure in a result of ``benchmark``, and ``over``, of what it is a share of; of several parts
    the largest counts. ``least``: at least ``bound``, else at most."""

    what: str
    benchmark: str
    path: Place
    bound: float
    least: bool = True
    unit: str = ""
    goal: float | None = None
    over: Place = ()

    def row(self, results: Results) -> Row:
        """Of the table."""
        name, result = results.get(self.benchmark, ("", {}))
        value = self._value(result)
        sign = "≥" if self.least else "≤"
        goal = "" if self.goal is None else f"{sign} {self.goal:g}{self.unit}"
        bound = f"{sign} {self.bound:g}{self.unit}"
        if value is None:
            return (self.what, NOT_YET, bound, "", goal, "")
        reached = value >= self.bound if self.least else value <= self.bound
        return (self.what, f"{number(value)}{self.unit}", bound, "yes" if reached else "no", goal, f"`{name}`")

    def _value(self, result: Any) -> float | None:
        *parts, figure = self.path
        found, over = find(result, tuple(parts)), find(result, self.over) if self.over else 1.0
        entries = found if isinstance(found, list) else [found or {}]
        values = [float(each[str(figure)]) for each in entries if str(figure) in each]
        return max(values) / over if values and over is not None else None


def _rate(cell: str, side: str = REFERENCE) -> Place:
    return ("cells", {"cell": cell}, "sides", side, "tokens_per_s")


def _speed() -> Iterator[Target]:
    for cell in CELLS:
        assert cell.target is not None
        what = f"Qwen3-0.6B bf16 through gRPC, greedy, {cell.name}"
        yield Target(what, "suite", _rate(cell.name), cell.target, unit=" tok/s", goal=cell.goal)
    for name, bound in (("decode b1 @512", 32.0), ("decode b8 @256", 140.0), ("decode b32 @256", 260.0)):
        yield Target(f"the same, int8 weights, {name}", "suite", _rate(name, INT8), bound, unit=" tok/s")


def _costs() -> Iterator[Target]:
    cell = {"model": "qwen3-0.6b", "batch": 32, "output": "full-bf16"}
    ratio = ("ratios", IN_PROCESS, "median")
    for way, benchmark in (("unary calls", "wire"), ("in a session", "wire-session")):
        for batch in (1, 8, 32):
            what = f"gRPC against in process, b{batch}, greedy, {way}"
            yield Target(what, benchmark, ("cells", cell | {"batch": batch, "output": "greedy"}, *ratio), 0.97)
    yield Target("gRPC against in process, b32, full bf16 rows", "wire", ("cells", cell, *ratio), 0.85)
    for way in ("unary", "session"):
        point = {"transport": "tcp", "way": way, "depth": 1}
        what = f"an empty step, {way}, in bare echoes"
        yield Target(what, "protocol", ("points", point, "ratio", "median"), 2.0, least=False)
    for engine, benchmark in (("", "protocol"), (", engine in a process", "protocol-process")):
        for what, way, depth in (
            ("empty steps in a session, 4 in flight", "session", 4),
            ("empty steps of 64 unary callers", "unary", 64),
        ):
            point = {"transport": "tcp", "way": way, "depth": depth}
            yield Target(what + engine, benchmark, ("points", point, "steps_per_s"), 3000, unit="/s")
    for batch in (1, 8):
        for delay_ms, bound in TRIP_TARGETS.items():
            what = f"{batch} text{'s' * (batch > 1)} by runs, {delay_ms:g} ms each way, of no delay"
            point = {"way": "runs", "delay_ms": delay_ms, "batch": batch}
            yield Target(what, "trips", ("points", point, "of_no_delay"), bound)
    for batch, bound in DRAFT_TARGETS.items():
        what = f"{batch} text{'s' * (batch > 1)} with the draft model, 10 ms each way, of single steps"
        point = {"way": "draft model", "delay_ms": 10.0, "batch": batch}
        yield Target(what, "speculation", ("points", point, "of_single"), bound)
    for count in STREAMS:
        what = f"{count} texts that arrive at any time, of lockstep, Qwen3-0.6B"
        point = {"way": RANDOM, "streams": count}
        yield Target(what, "streams-qwen3-0.6b", ("points", point, "of_lockstep", "median"), STREAMS_TARGET)
    for count in FRONT_STREAMS:
        what = f"{count} text{'s' * (count > 1)} of a router and a worker, of the scheduler as a library, Qwen3-0.6B"
        point = {"way": ROUTER, "streams": count}
        yield Target(what, "fronts-qwen3-0.6b", ("points", point, "of_library", "median"), FRONTS_TARGET)
    what = "decode b32 @2048 over an int8 cache, in process, of bfloat16"
    yield Target(what, "cache", ("cells", {"cell": "decode b32 @2048"}, "ratios", EXACT, "median"), INT8_CACHE_TARGET)
    what = "decode b32 @256 with an adapter of rank 16 each, in process, of none"
    yield Target(what, "adapters", ("cells", {"cell": "decode b32 @256"}, "ratios", BASE, "median"), ADAPTERS_TARGET)
    what = "p99 of a decode step beside 32 runs, in those beside single steps"
    yield Target(what, "trips", ("beside", {"beside": "runs"}, "of_single_steps"), OTHERS_TARGET, least=False)
    yield Target("a plan, off by what is resident", "memory", ("off",), PLAN_TARGET, least=False)
    mixed = "p99 over p50 of a decode step under mixed load"
    yield Target(mixed, "suite", ("mixed", "ratio"), 2.0, least=False)
    bookkeeping = "bookkeeping of a sequence and step"
    yield Target(bookkeeping, "suite", ("bookkeeping", "per_sequence_us"), 30.0, least=False, unit=" µs")


def _prefix() -> Iterator[Target]:
    for model in ("identity", "qwen3-0.6b"):
        what = f"1,000 prompts that share 512 tokens, {model}: computed without the prefix cache, of with it"
        yield Target(what, "prefix", ("crowds", {"model": model}, "times_computed"), LESS_TARGET, unit=" ×")
    what = "a conversation of 20 turns: tokens computed, of the new ones in whole blocks"
    yield Target(what, "prefix", ("talk", "of_to_compute"), 1.0, least=False)
    for model, cell in (
        ("qwen3-0.6b", "prefill 512"),
        ("qwen3-0.6b", "decode b32 @256"),
        ("identity", "decode b32 @256"),
    ):
        what = f"{model}, {cell} with the prefix cache that finds nothing, of without it"
        path: Place = ("misses", {"model": model, "cell": cell}, "ratio", "median")
        yield Target(what, "prefix", path, MISS_TARGET, least=False)
    what = "books of a step of 256 sequences, at most, of a decode step of Qwen3-0.6B at b32"
    yield Target(what, "prefix", ("books", "of_step"), BOOKS_TARGET, least=False)


def _gpu() -> Iterator[Target]:
    prefix = "CUDA, Qwen3-8B shape, bf16: "
    for what, cell, bound in (
        ("decode b1 @1k", "decode b1 @1024", 0.85),
        ("decode b64 @2k", "decode b64 @2048", 0.80),
        ("prefill 8k", "prefill 8192", 0.60),
    ):
        limit: Place = ("cells", {"cell": cell}, "roof", "tokens_per_s")
        yield Target(f"{prefix}{what}, of the limit", "gpu", _rate(cell, INSIDE), bound, over=limit)
    load: Place = ("attention", {"name": "decode, 64 x 4k"}, "share_of_bandwidth")
    yield Target(f"{prefix}attention, decode b64 @4k, of the limit", "gpu", load, 0.80)
    ratio: Place = ("cells", {"cell": "decode b64 @2048"}, "ratios", INSIDE, "median")
    yield Target(f"{prefix}gRPC against in process, b64, greedy", "gpu", ratio, 0.97)


TARGETS: Final = (*_speed(), *_costs(), *_prefix(), *_gpu())


def newest(results: Sequence[tuple[str, Any]]) -> dict[str, tuple[str, Any]]:
    """The latest result of each benchmark."""
    found: dict[str, tuple[str, Any]] = {}
    for name, result in sorted(results, key=lambda each: each[1]["ended"]):
        found[result["benchmark"]] = (name, result)
    return found


def standing(results: Results) -> Table:
    """Every target, and where it stands."""
    return Table(STANDING, [target.row(results) for target in TARGETS])
