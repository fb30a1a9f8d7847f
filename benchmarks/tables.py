"""Figures as rows of text: the same tables on the terminal and in the documentation."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from benchmarks import machine

Row = tuple[str, ...]
TEXTS: Final[dict[str, Any]] = tomllib.loads((machine.ROOT / "benchmarks" / "texts.toml").read_text("utf-8"))
"""The words of the page, and what the columns mean."""

NOT_YET: Final = "not yet measured"
IN_PROCESS: Final = "in process"
GRPC: Final = "gRPC"
ECHO: Final = "echo"


@dataclass(frozen=True, slots=True)
class Table:
    """Columns and rows, the columns in ``left`` set to the left."""

    columns: Row
    rows: Sequence[Row]
    left: Iterable[int] = (0,)

    def markdown(self) -> str:
        """For the documentation."""
        rule = tuple("---" if index in self.left else "---:" for index in range(len(self.columns)))
        return "\n".join("| " + " | ".join(cells) + " |" for cells in (self.columns, rule, *self.rows))


Column = str | Callable[[Mapping[str, Any]], str]
"""What stands in a column: a format of the record's fields, or what is written of the record."""


def tabulated(records: Iterable[Mapping[str, Any]], columns: Mapping[str, Column], left: Iterable[int] = (0,)) -> Table:
    """A row for each record, of ``columns`` by their headings."""
    rows = [
        tuple(column.format_map(each) if isinstance(column, str) else column(each) for column in columns.values())
        for each in records
    ]
    return Table(tuple(columns), rows, left)


def show(table: Table, legend: str = "") -> None:
    """On the terminal, in columns. ``legend``: the name of its own."""
    lines = [table.columns, *table.rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for cells in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip(), flush=True)
    for name, text in TEXTS["legend"].get(legend, {}).items():
        print(f"  {name}: {text}")


def number(value: float) -> str:
    """Three digits that mean something."""
    size = abs(value)
    return f"{value:.{0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3}f}"


def spread(value: Mapping[str, float]) -> str:
    """``1.23 (1.20 to 1.31)``: median, 10th and 90th percentile."""
    return f"{number(value['median'])} ({number(value['p10'])} to {number(value['p90'])})"


def numbered(field: str) -> Column:
    """A field as a `number`."""
    return lambda record: number(record[field])


def bounded(form: str) -> Column:
    """The target of a record in ``form``, where it has one."""
    return lambda record: "" if record.get("target") is None else form.format_map(record)


def low_to_high(ratio: Mapping[str, float] | None, digits: int = 2) -> str:
    """``1.23 (1.20 to 1.31)``: median, lowest and highest pair."""
    if ratio is None:
        return ""
    low, high = (f"{ratio[end]:.{digits}f}" for end in ("low", "high"))
    return f"{ratio['median']:.{digits}f} ({low} to {high})"


# --- cells: the suite, the peers, a GPU -------------------------------------------------------------------------------

CELL_COLUMNS: Final = (
    "cell",
    "side",
    "tok/s (lowest to highest round)",
    "step, ms",
    "of the limit",
    "ours is (pairs)",
    "same tokens",
)
EIGHT_BITS: Final = ("ours with int8 weights, gRPC session", "llama.cpp Q8_0", "OpenVINO GenAI int8", "int8 cache")
"""Sides that read half the bytes: the limit is not theirs."""


def cells(results: Sequence[Mapping[str, Any]]) -> Table:
    """The limit of each cell, and every side of it."""
    rows: list[Row] = []
    for cell in results:
        name, roof = cell["cell"], cell["roof"]
        if roof is not None:
            rows.append((name, f"limit: {roof['bound_by']}", number(roof["tokens_per_s"]), "", "1", "", ""))
        for side, found in cell["sides"].items():
            rate, (same, of) = found["tokens_per_s"], found["same_tokens"]
            ratio = cell["ratios"].get(side)
            rows.append(
                (
                    name,
                    side,
                    f"{number(rate)} ({number(found['low'])} to {number(found['high'])})",
                    spread(found["step_ms"]),
                    "" if roof is None or side in EIGHT_BITS else f"{rate / roof['tokens_per_s']:.2f}",
                    low_to_high(ratio).replace(" (", " × ("),
                    f"{same} of {of}" if of else "",  # nothing of a side that feeds tokens of its own
                )
            )
        rows += [(name, side, f"none: {reason}", "", "", "", "") for side, reason in cell["absent"].items()]
    return Table(CELL_COLUMNS, rows, (0, 1))


def outputs(results: Sequence[Mapping[str, Any]]) -> Table:
    """A row for each output, a column for each cell: how much longer than a greedy step."""
    names = dict.fromkeys(name for each in results for name in each["ratios"])
    rows: list[Row] = [("greedy, ms", *(spread(each["step_ms"]) for each in results))] if results else []
    rows += [(name, *(_more(each["ratios"].get(name)) for each in results)) for name in names]
    return Table(("output", *(each["cell"] for each in results)), rows)


def _more(ratio: Mapping[str, float] | None) -> str:
    if ratio is None:
        return ""
    median, low, high = (100 * (ratio[name] - 1) for name in ("median", "low", "high"))
    return f"{median:+.1f} % ({low:+.1f} to {high:+.1f})"


def parts(result: Mapping[str, Any]) -> Table:
    """The other parts of a suite."""
    return Table(("what", "measured", "target"), list(_parts(result)))


def _parts(result: Mapping[str, Any]) -> Iterator[Row]:
    if (mix := result.get("mixed")) is not None:
        of = f"(b{mix['batch']} @{mix['context']}) beside chunks of {mix['chunk']} tokens"
        times = f"{number(mix['p99_ms'])} over {number(mix['p50_ms'])} ms"
        alone = f"alone {number(mix['alone_p99_ms'])} over {number(mix['alone_p50_ms'])} ms"
        found = f"{mix['ratio']:.2f} ({times}, {mix['chunks']} chunks; {alone})"
        yield (f"p99 over p50 of a decode step {of}", found, f"≤ {mix['target']:g}")
    for slope in result.get("bookkeeping", ()):
        what = f"bookkeeping of a sequence and step: {slope['batch']} of {slope['live']} live @{slope['context']}"
        most = sorted(slope["stages_us"].items(), key=lambda each: -each[1])[:3]
        told = ", ".join(f"{name.partition(': ')[2]} {number(each)}" for name, each in most)
        yield (what, f"{slope['per_sequence_us']:.1f} µs ({told})", f"≤ {slope['target_us']:g} µs")
    if (start := result.get("start")) is not None:
        weights = f"{start['weight_bytes'] / 2**30:.2f} GiB of weights"
        page_cache = "from the disk" if start["cold"] else "from the page cache"
        yield (
            f"start of serve until the model answers, {weights} {page_cache}",
            f"{start['ready_s']:.2f} s, of which loading {start['loading_s']:.2f} s",
            f"a plain read: {start['plain_read_s']:.2f} s",
        )


def limit_line(result: Mapping[str, Any]) -> str:
    """The readings of the run."""
    limits = result.get("limits")
    if limits is None:
        return "No limits were read: the run was interrupted."
    return (
        f"Limits read in this run with {limits['threads']} threads, best of {len(limits['readings'])} readings: "
        f"memory {limits['read_gb_s']:.1f} GB/s, bfloat16 products {limits['bf16_tflops']:.2f} TFLOP/s."
    )


def show_suite(result: Mapping[str, Any]) -> None:
    """All of it on the terminal."""
    print()
    shared = result.get("two_ranks", {"cells": (), "said": ""})
    for table in (
        cells(result.get("cells", ())),
        cells(shared["cells"]),
        outputs(result.get("outputs", ())),
        parts(result),
    ):
        if table.rows:
            show(table)
            print()
    if shared["said"]:
        print(shared["said"])
    print(limit_line(result))


# --- what gRPC costs --------------------------------------------------------------------------------------------------

RATIO_TARGETS: Final = {("greedy", None): 0.97, ("full-bf16", 32): 0.85}
"""In-process over gRPC step time, by output and batch size (None: every one). Goals of later work: they state where
things are to be, and nothing passes or fails."""

ECHO_TARGET: Final = 2.0
"""The identity model's step through the whole service, in bare echoes of the same bytes, at most."""

WIRE_COLUMNS: Final = (
    "model",
    "batch",
    "output",
    "in process, ms",
    "gRPC, ms",
    "tok/s in process",
    "tok/s gRPC",
    "ratio (lowest to highest pair)",
    "target",
    "forward in server, ms",
    "echo, ms",
    "ours, ms",
    "around forward, ms",
)


def wire(results: Sequence[Mapping[str, Any]]) -> Table:
    """A row for each cell of `benchmarks.wire`."""
    return Table(WIRE_COLUMNS, [_wire(each) for each in results], (0, 2))


def _wire(cell: Mapping[str, Any]) -> Row:
    inside, grpc, echo = (cell["sides"][side] for side in (IN_PROCESS, GRPC, ECHO))
    echo_ms, step_ms = echo["step_ms"]["median"], grpc["step_ms"]["median"]
    output, batch = cell["output"], cell["batch"]
    least = RATIO_TARGETS.get((output, None), RATIO_TARGETS.get((output, batch)))
    target = "" if least is None else f"≥ {least:.2f}"
    if cell["model"] == "identity":
        target = f"≤ {ECHO_TARGET:g} echoes: {step_ms / echo_ms:.2f}"
    return (
        cell["model"],
        str(batch),
        output,
        spread(inside["step_ms"]),
        spread(grpc["step_ms"]),
        number(inside["tokens_per_s"]),
        number(grpc["tokens_per_s"]),
        low_to_high(cell["ratios"][IN_PROCESS], 3),
        target,
        number(grpc["forward_ms"]["median"]),
        spread(echo["step_ms"]),
        number(round(step_ms - inside["step_ms"]["median"] - echo_ms, 4)),
        number(round(grpc["beyond_ms"]["median"] - echo_ms, 4)),
    )


# --- what the protocol costs ------------------------------------------------------------------------------------------

DEPTHS: Final = (1, 2, 4, 64)
CROWD: Final = 50
PROTOCOL_COLUMNS: Final = (
    "transport",
    "way",
    "p50, ms",
    "p99, ms",
    "in echoes (lowest to highest pair)",
    "target",
    *(f"steps/s at {depth}" for depth in DEPTHS),
    f"in batches of {CROWD} (lowest to highest pair)",
    "queue, ms",
    "forward, ms",
    "around, ms",
)


def protocol(points: Sequence[Mapping[str, Any]]) -> Table:
    """A row for each way over each transport."""
    by_way: dict[tuple[str, str], dict[int, Mapping[str, Any]]] = {}
    for point in points:
        by_way.setdefault((point["transport"], point["way"]), {})[point["depth"]] = point
    return Table(PROTOCOL_COLUMNS, [_protocol(depths) for depths in by_way.values()], (0, 1))


def _protocol(depths: Mapping[int, Mapping[str, Any]]) -> Row:
    one = depths[1]
    ratio = one["ratio"]
    rates = [f"{depths[depth]['steps_per_s']:,.0f}" if depth in depths else "" for depth in DEPTHS]
    times = (one["queue_ms"], one["forward_ms"], one["around_ms"])
    return (
        one["transport"],
        one["way"],
        number(one["p50_ms"]),
        number(one["p99_ms"]),
        low_to_high(ratio),
        "" if ratio is None or ratio["target"] is None else f"≤ {ratio['target']:g}",
        *rates,
        low_to_high(depths[CROWD]["ratio"] if CROWD in depths else None),
        *("" if value is None else number(value) for value in times),
    )


# --- what a long way costs --------------------------------------------------------------------------------------------


def trips(points: Sequence[Mapping[str, Any]]) -> Table:
    """A row for each way, batch and delay of `benchmarks.trips`."""
    columns: dict[str, Column] = {
        "way": "{way}",
        "texts": "{batch}",
        "each way": "{delay_ms:g} ms",
        "tokens/s": "{tokens_per_s:,.0f}",
        "of no delay": "{of_no_delay:.2f}",
        "target": bounded("≥ {target:g}"),
    }
    return tabulated(points, columns)


def speculation(points: Sequence[Mapping[str, Any]]) -> Table:
    """A row for each way, batch and delay of `benchmarks.speculation`."""
    columns: dict[str, Column] = {
        "way": "{way}",
        "texts": "{batch}",
        "each way": "{delay_ms:g} ms",
        "tokens/s": "{tokens_per_s:,.0f}",
        "of single steps": "{of_single:.2f}",
        "target": bounded("≥ {target:g}"),
        "tokens a trip": "{per_trip:.1f}",
        "accepted": lambda each: "" if each["accepted"] is None else f"{each['accepted']:.0%}",
    }
    return tabulated(points, columns)


def streams(points: Sequence[Mapping[str, Any]]) -> Table:
    """A row for each way and number of streams of `benchmarks.streams`."""
    columns: dict[str, Column] = {
        "way": "{way}",
        "texts": "{streams}",
        "tokens/s": "{tokens_per_s:,.0f}",
        "of lockstep": lambda each: low_to_high(each["of_lockstep"]),
        "target": bounded("≥ {target:g}"),
        "whole round, tokens/s": lambda each: "" if "whole_per_s" not in each else f"{each['whole_per_s']:,.0f}",
        "texts a step": lambda each: "" if "rows" not in each else f"{each['rows']:.2f}",
        "fed a token": lambda each: "" if "fed" not in each else f"{each['fed']:.2f}",
        "in steps": lambda each: "" if "busy" not in each else f"{each['busy']:.1%}",
        "first token, ms (p99)": lambda each: (
            "" if each["first_p50_ms"] is None else f"{each['first_p50_ms']:,.0f} ({each['first_p99_ms']:,.0f})"
        ),
    }
    return tabulated(points, columns)


def structured(points: Sequence[Mapping[str, Any]]) -> Table:
    """A row for each way of `benchmarks.structured`."""
    columns: dict[str, Column] = {
        "by": "{way}",
        "temperature": "{temperature:g}",
        "delay, ms": "{delay_ms:g}",
        "valid": "{valid:,} of {texts:,}",
        "different": "{different:,}",
        "tokens a trip": "{tokens_per_trip:.2f}",
        "accepted": lambda each: "" if each["accepted"] is None else f"{each['accepted']:.0%}",
        "tokens/s": "{tokens_per_s:,.0f}",
    }
    return tabulated(points, columns)


CANCEL_COLUMNS: Final[dict[str, Column]] = {
    "texts": "{streams}",
    "cancels": "{cancels}",
    "a step, ms": numbered("step_ms"),
    "sequence gone, ms": numbered("gone_p50_ms"),
    "p99": numbered("gone_p99_ms"),
    "longest": numbered("gone_max_ms"),
    "target": bounded("≤ {target:g}"),
}


def cancels(found: Sequence[Mapping[str, Any]]) -> Table:
    """The cancels of `benchmarks.streams`."""
    return tabulated(found, CANCEL_COLUMNS)


def fronts(points: Sequence[Mapping[str, Any]]) -> Table:
    """A row for each way and number of texts of `benchmarks.fronts`."""
    columns: dict[str, Column] = {
        "way": "{way}",
        "texts": "{streams}",
        "tokens/s": "{tokens_per_s:,.0f}",
        "of the library": lambda each: low_to_high(each["of_library"], 3),
        "target": bounded("≥ {target:g}"),
        "texts a step": "{rows:.2f}",
        "in steps": "{busy:.1%}",
        "first token, ms (p99)": "{first_p50_ms:,.0f} ({first_p99_ms:,.0f})",
    }
    names = list(dict.fromkeys(name for each in points for name in each["token_us"]))
    columns |= {f"{name}, µs": f"{{token_us[{name}]:,}}" for name in names}
    return tabulated(points, columns)


def leaves(found: Sequence[Mapping[str, Any]]) -> Table:
    """A row for each way of `benchmarks.fronts` to leave a text."""
    return tabulated(found, {"way": "{way}", **CANCEL_COLUMNS})


def grammars(points: Sequence[Mapping[str, Any]]) -> Table:
    """A row for each batch of `benchmarks.grammars`."""
    columns: dict[str, Column] = {
        "batch": "{batch}",
        "by a registered mask, ms": numbered("mask_ms"),
        "by a grammar, ms": numbered("grammar_ms"),
        "ratio (lowest to highest pair)": lambda each: low_to_high(each["ratio"]),
        "target": bounded("≤ {target:g}"),
    }
    return tabulated(points, columns)


def answers(found: Sequence[Mapping[str, Any]]) -> Table:
    """A row for each model of `benchmarks.cache`."""
    columns: dict[str, Column] = {
        "model": "{model}",
        "context": "{context}",
        "rows": "{rows}",
        "KL, mean": "{kl_mean:.2g}",
        "largest": "{kl_largest:.2g}",
        "same tokens": "{same_tokens:.1%}",
    }
    return tabulated(found, columns)


def beside(found: Sequence[Mapping[str, Any]]) -> Table:
    """A row for each load beside the decode steps of one sequence."""
    columns: dict[str, Column] = {
        "beside": "{beside}",
        "p50, ms": numbered("p50_ms"),
        "p99, ms": numbered("p99_ms"),
        "p99 in alone": "{of_alone:.2f}",
        "p99 in single steps": "{of_single_steps:.2f}",
        "target": bounded("≤ {target:g}"),
    }
    return tabulated(found, columns)


def memory(points: Sequence[Mapping[str, Any]]) -> Table:
    """A row for each part of each plan of `benchmarks.memory`."""
    columns: dict[str, Column] = {
        "weights": "{kind}",
        "tokens of sequences": "{tokens} of {sequences}",
        "of": "{of}",
        "planned, MiB": lambda each: f"{each['planned'] / 2**20:,.1f}",
        "resident, MiB": lambda each: f"{each['resident'] / 2**20:,.1f}",
        "ratio": "{ratio:.3f}",
    }
    return tabulated(points, columns, (0, 1, 2))


def transfer(points: Sequence[Mapping[str, Any]]) -> Table:
    """A row for each shape and kind of engine of `benchmarks.transfer`."""
    columns: dict[str, Column] = {
        "cache": "{shape}",
        "engine": "{engine}",
        "tokens": "{tokens}",
        "MB": "{mb}",
        "export, MB/s": "{export_mb_s}",
        "bare stream, MB/s": "{bare_mb_s}",
        "moved, MB/s": "{move_mb_s}",
        "moved in, ms": "{move_ms}",
        "decode p99, ms": "{decode_p99_ms}",
        "beside an export": "{decode_beside_p99_ms}",
    }
    return tabulated(points, columns, (0, 1))


def collectives(points: Sequence[Mapping[str, Any]]) -> Table:
    """A row for each size of `benchmarks.collectives`, a column for each side: median and 90th percentile."""
    sides = list(dict.fromkeys(each["side"] for each in points))
    found: dict[tuple[str, str], dict[str, str]] = {}
    for each in points:
        figures = f"{number(each['median_us'])} ({number(each['p90_us'])})"
        found.setdefault((each["dtype"], f"{each['rows']}"), {})[each["side"]] = figures
    rows = [(*size, *(row[side] for side in sides)) for size, row in found.items()]
    return Table(("dtype", "rows", *(f"{side}, µs (p90)" for side in sides)), rows)


def show_trips(result: Mapping[str, Any]) -> None:
    """Both tables on the terminal."""
    show(trips(result["points"]))
    print()
    show(beside(result["beside"]), "trips")


# --- attention kernels on a GPU ---------------------------------------------------------------------------------------


def attention(result: Mapping[str, Any]) -> Table:
    """A row for each load of the kernels alone."""
    columns = ("attention alone", "ms", "of the bandwidth", "of the matrix units", "SDPA took", "varlen_attn took")
    return Table(columns, [_attention(each) for each in result.get("attention", ())])


def _attention(load: Mapping[str, Any]) -> Row:
    shares = (f"{load['share_of_bandwidth']:.2f}", f"{load['share_of_matrix_units']:.2f}")
    peers = (
        f"{low_to_high(load['ratios'][side])} ×" if side in load["ratios"] else f"none: {load['absent'][side]}"
        for side in ("sdpa", "varlen_attn")
    )
    return (load["name"], number(load["ms"]), *shares, *(each.replace("|", "\\|") for each in peers))
