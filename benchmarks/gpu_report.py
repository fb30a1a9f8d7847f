"""The section of `docs/benchmarks.md` that `make gpu-check` fills: what a CUDA device reached, and what was not asked.

The check writes a part of its record for each of its questions, and a part may be missing: skipped with a reason,
failed, or not asked for. What is not there is said, never left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any, Final

from benchmarks.record import conditions
from benchmarks.suite_tables import Row, table
from benchmarks.tables import number

HEAD: Final = """## On a GPU

`make gpu-check` on a CUDA device: the Qwen3-8B shape with random weights in bfloat16. Limits are what the device did in
the same run: memory the better of a large copy and a large read, matrix units a large square product. Sides alternate;
a ratio belongs to a pair of rounds that followed each other, and stands as median (lowest to highest).
"""
LIMITED: Final = ("cell", "tok/s", "limit, tok/s", "of the limit", "target", "reached")
BESIDE: Final = ("what", "ratio", "target", "reached")
KERNELS: Final = (
    "attention alone",
    "ms",
    "of the bandwidth",
    "of the matrix units",
    "SDPA took",
    "varlen_attn took",
    "target",
    "reached",
)
RIGHT: Final = ("whether it is right", "error", "at most", "reached", "more")
TILES: Final = ("attention with other tiles", "chosen, ms", "fastest other, ms", "its tiles (rows × keys)")

PARTS: Final = (
    "parity",
    "limits",
    "model",
    "graph_parity",
    "decode",
    "prefill",
    "store",
    "staging",
    "wire",
    "peer",
    "attention",
    "tests/kernels",
    "tests/gpu",
    "shapes",
)


def gpu(name: str, result: Any) -> str:
    """The section of one run of `tools.gpu_check`."""
    parts = [HEAD]
    for columns, rows in (
        (LIMITED, _limited(result)),
        (BESIDE, _beside(result)),
        (KERNELS, _kernels(result)),
        (TILES, _tiles(result)),
        (RIGHT, _right(result)),
    ):
        if found := list(rows):
            parts += [table(columns, found, left=1), ""]
    parts += [f"- {line}" for line in (*_suites(result), *_absent(result))]
    return "\n".join([*parts, "", _limits(result), "", _conditions(name, result)])


def _limited(result: Mapping[str, Any]) -> Iterator[Row]:
    for cell in (*result.get("decode", ()), *result.get("prefill", ())):
        limit = cell.get("limit_tokens_per_s", cell["tokens_per_s"] / cell["share_of_limit"])
        speeds = (number(cell["tokens_per_s"]), number(limit), f"{cell['share_of_limit']:.2f}")
        yield (cell["name"], *speeds, f"≥ {cell['target']:g}", _reached(cell))


def _beside(result: Mapping[str, Any]) -> Iterator[Row]:
    for cell in result.get("decode", ()):
        yield (f"{cell['name']}: a step without graphs, in ours", _spread(cell["eager_over_graphs"]), "", "")
        rows = _spread(cell["torch_rows_over_graphs"])
        yield (f"{cell['name']}: with torch's operations between the products, in ours", rows, "", "")
    for cell in result.get("wire", ()):
        yield (cell["name"], _spread(cell["ratios"]), f"≥ {cell['target']:g}", _reached(cell))
    for cell in result.get("peer", ()):
        times = f"{cell['times_as_fast']:.2f} × as fast"
        yield (cell["name"], times, f"≥ {cell['target']:g}", _reached(cell))
    for cell in result.get("store", ()):
        yield (f"{cell['name']}, in `index_copy_`", f"{cell['over_index_copy']:.2f}", "≤ 1", _reached(cell))
    for cell in result.get("staging", ()):
        yield (f"{cell['name']}, in single copies", f"{cell['over_single_copies']:.2f}", "≤ 1", _reached(cell))
    for cell in result.get("overlap", ()):
        yield (
            f"{cell['name']}, without over with",
            _spread(cell["off_over_on"]),
            f"≥ {cell['target']:g}",
            _reached(cell),
        )


def _kernels(result: Mapping[str, Any]) -> Iterator[Row]:
    for load in result.get("attention", {}).get("loads", ()):
        shares = (f"{load['share_of_bandwidth']:.2f}", f"{load['share_of_matrix_units']:.2f}")
        peers = (_times(load, side) for side in ("sdpa", "varlen_attn"))
        judged = (f"≥ {load['target']:g} of the bandwidth", _reached(load)) if "target" in load else ("", "")
        yield (load["name"], number(1e3 * load["seconds"]["ours"]), *shares, *peers, *judged)


def _times(load: Mapping[str, Any], side: str) -> str:
    if side in load["over_ours"]:
        return f"{_spread(load['over_ours'][side])} ×"
    return f"none: {load['absent'].get(side, 'not asked')}".replace("|", "\\|")


def _tiles(result: Mapping[str, Any]) -> Iterator[Row]:
    chosen = {load["name"]: load["seconds"]["ours"] for load in result.get("attention", {}).get("loads", ())}
    for load in result.get("shapes", ()):
        ours = number(1e3 * chosen[load["name"]]) if load["name"] in chosen else ""
        ran = [each for each in load["shapes"] if not isinstance(each["result"], str)]
        if not ran:
            yield (load["name"], ours, "none ran", "")
            continue
        best = min(ran, key=lambda each: each["result"])
        tiles = [f"{best[size]['rows']} × {best[size]['keys']}" for size in ("small", "large")]
        yield (load["name"], ours, number(1e3 * best["result"]), ", ".join(tiles))


def _right(result: Mapping[str, Any]) -> Iterator[Row]:
    cells = result.get("parity", ())
    for dtype in dict.fromkeys(cell["dtype"] for cell in cells):
        same = [cell for cell in cells if cell["dtype"] == dtype]
        worst = max(same, key=lambda cell: (not cell["passed"], cell["error"]))  # no number is the worst of all
        passed = sum(cell["passed"] for cell in same)
        yield (
            f"attention against float64, {dtype}, the worst of {len(same)} cases",
            f"{worst['error']:.1e}",
            f"{worst['tolerance']:.1e}",
            "yes" if passed == len(same) else f"no: {len(same) - passed} of {len(same)}",
            f"torch's own {worst['torch_error']:.1e}; {worst['layer']}, {worst['step']}",
        )
    for cell in result.get("graph_parity", ()):
        if "recorded" in cell:
            more = f"{len(cell['recorded'])} shapes" + (f"; closed: {cell['closed']}" if cell["closed"] else "")
            yield (f"graphs: {cell['name']}", "", "", _reached(cell), more)
        else:
            more = f"{'' if cell['bitwise'] else 'not '}the same bits, {cell['same_tokens']:.0%} the same tokens"
            figures = (f"{cell['error']:.1e}", f"{cell['tolerance']:.1e}")
            yield (cell["name"], *figures, _reached(cell), more)


def _suites(result: Mapping[str, Any]) -> Iterator[str]:
    for name in ("tests/kernels", "tests/gpu"):
        if name in result:
            counts = ", ".join(f"{result[name][kind]} {kind}" for kind in ("passed", "skipped", "failed"))
            yield f"`{name}`: {counts}"


def _absent(result: Mapping[str, Any]) -> Iterator[str]:
    """What did not run, each with why; cells that failed have a row of their own above."""
    told = set()
    for word, lines in (("skipped", result["skipped"]), ("failed", result["failed"])):
        for line in lines:
            part, _, why = line.partition(": ")
            told.add(part)
            if part not in result:
                yield f"`{part}` {'was ' * (word == 'skipped')}{word}: {why}"
    if rest := [part for part in PARTS if part not in result and part not in told]:
        yield f"{', '.join(f'`{part}`' for part in rest)}: not asked for, or what they need had failed"


def _limits(result: Mapping[str, Any]) -> str:
    limits = result.get("limits")
    if limits is None:
        return "No limits were read in this run."
    copies, reads, products = (limits[f"{each}_per_s"] / 1e12 for each in ("copy_bytes", "read_bytes", "operations"))
    return (
        f"Limits read in this run: copies {copies:.2f} TB/s, reads {reads:.2f} TB/s, "
        f"bfloat16 products {products:.0f} TFLOP/s."
    )


def _conditions(name: str, result: Mapping[str, Any]) -> str:
    device = result["environment"]
    facts = [device["device"]]
    if "capability" in device:
        capability = ".".join(map(str, device["capability"]))
        facts += [f"capability {capability}", f"{device['memory_bytes'] / 2**30:.0f} GiB", f"CUDA {device['cuda']}"]
    rows = [("GPU", ", ".join(facts))]
    if (model := result.get("model")) is not None:
        weights = f"{model['weight_bytes'] / 2**30:.2f} GiB of weights read by a decode step"
        rows.append(("model", f"{weights}; between the products: {model['rows']} ({model['rows_reason']})"))
    seconds = ", ".join(f"{part} {took:g}" for part, took in result["part_seconds"].items())
    rows.append(("seconds", seconds))
    versions = {"python": device["python"]} | {name: each or "absent" for name, each in device["versions"].items()}
    return conditions(name, {**result, "versions": versions}, rows)


def _reached(cell: Mapping[str, Any]) -> str:
    return "yes" if cell["passed"] else "no"


def _spread(values: Sequence[float]) -> str:
    return f"{median(values):.3f} ({min(values):.3f} to {max(values):.3f})"
