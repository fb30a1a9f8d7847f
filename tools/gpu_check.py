"""`make gpu-check`: everything that waits for a CUDA device, in one command, with its results as data.

Parts, each of which goes on where another fails: the attention kernels against float64; a model of the Qwen3-8B shape,
replayed against eager and timed against what the device can do in the same run; steps begun behind one another; gRPC
against in process; transformers on the same shape; the attention kernels' speed; `tests/kernels` and `tests/gpu`. The
model needs torch, triton and numpy; a part that needs packages that are not there, or more time than is left of
``--budget`` seconds, is skipped, and the record says so. Writes what ran, on what, with which versions and outcomes, as
JSON. Exit status 1 if anything failed or a target was missed, or if there is no CUDA device (a check that cannot fail
would be none).

``--interpret`` runs all but the peer and the tests on a CPU, tiny, through Triton's interpreter and with steps that run
again instead of being replayed: it shows that the check itself runs. Its record is no result, and is written only where
``--out`` says.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from xml.etree import ElementTree

import torch

if TYPE_CHECKING:
    from tools.gpu_record import Check

ROOT: Final = Path(__file__).resolve().parent.parent
SUITES: Final = {"tests/kernels": ("pytest", "hypothesis"), "tests/gpu": ("pytest", "transformers", "structlog")}
"""Tests, and what they need that may not be there."""

SHARED_OUT: Final = ("tests/kernels",)
"""Suites whose tests may share the device with each other."""

ENGINE: Final = ("structlog",)
"""What the engine needs that may not be there."""

SERVER: Final = ("grpc", "grpc_health", "grpc_reflection", "structlog")
"""What the server needs that may not be there."""

BUDGET_S: Final = 560.0
"""Within ten minutes, start and end included."""

RECORD: Final = ROOT / "benchmarks/results/gpu-check.json"

ATTENTION_SHARE: Final = 0.8
"""Of the bandwidth, that the attention of the first load is to reach."""

PEER_BATCH_1: Final = 2.0
"""How many times as fast as the peer a lone decode is to be."""


def parity(device: torch.device, *, tiny: bool) -> list[dict[str, Any]]:
    """The kernels' largest error against float64 per layer, dtype and step, beside the torch path's own."""
    from ferrum_rpc.attention.torch_paged import TorchPagedAttention
    from ferrum_rpc.attention.triton_paged import TritonPagedAttention
    from tools.gpu_cases import LONG, MIX, SPECS, TOLERANCE, paged_step

    steps = {"mix": MIX[:4]} if tiny else {"mix": MIX, "long": LONG}
    names = ["group 7"] if tiny else list(SPECS)
    found = []
    for name in names:
        for dtype, tolerance in TOLERANCE.items():
            for step, spans in steps.items():
                world = paged_step(SPECS[name], spans, device=device, dtype=dtype)
                record: dict[str, Any] = {"layer": name, "dtype": str(dtype).removeprefix("torch."), "step": step}
                for side, backend in (("error", TritonPagedAttention), ("torch_error", TorchPagedAttention)):
                    attention: Any = backend([world.spec], [world.keys], [world.values])
                    record[side] = world.error(attention.attend(0, world.query, attention.plan(world.geometry)))
                found.append(record | {"tolerance": tolerance, "passed": record["error"] <= tolerance})
    return found


def check_model(check: Check, device: torch.device, *, tiny: bool) -> None:
    """The whole model: parity, targets, wire, peer."""
    from tools.gpu_attention import device_limits
    from tools.gpu_model import FULL, TINY, decode_cells, parity_cells, prefill_cell, staging_cell, store_cells
    from tools.gpu_rerun import Rerun
    from tools.gpu_world import World

    size = TINY if tiny else FULL
    limits = check.part("limits", lambda: device_limits(device, tiny=tiny), needs_s=5)
    if limits is None:
        return
    worlds: list[World] = []

    def build() -> dict[str, Any]:
        world = World(size.model, device, size.blocks, Rerun() if tiny else None)
        world.compute.attention.warm_up()  # type: ignore[attr-defined]
        world.graphs(max(batch for batch, *_ in size.decodes), size.prefill[0] + 128)
        worlds.append(world)
        return {"weight_bytes": world.weight_bytes, "rows": world.ops.name, "rows_reason": world.rows_reason}

    if check.part("model", build, needs_s=60 * (not tiny)) is None:
        return
    [world] = worlds
    check.cells("graph_parity", lambda: parity_cells(world, size), needs_s=20 * (not tiny))
    check.cells("decode", lambda: decode_cells(world, size, limits), needs_s=40 * (not tiny))
    check.cells("prefill", lambda: [prefill_cell(world, size, limits)], needs_s=15 * (not tiny))
    check.cells("store", lambda: store_cells(world, size), needs_s=10 * (not tiny))
    check.cells("staging", lambda: [staging_cell(world, size)], needs_s=5 * (not tiny))

    def overlap() -> list[dict[str, Any]]:
        from tools.gpu_overlap import overlap_cell

        batch, context, _ = size.decodes[-1]
        least = 0.0 if tiny else 1.0
        return [overlap_cell(world, batch, context, rounds=size.rounds, steps=size.steps, least=least)]

    def wire() -> list[dict[str, Any]]:
        from tools.gpu_wire import wire_cell

        batch, context, _ = size.decodes[-1]
        share = 0.0 if tiny else 0.97
        return [wire_cell(world, batch, context, rounds=size.rounds, steps=size.steps, share=share)]

    def peer() -> list[dict[str, Any]]:
        return [_peer(check, size)]

    check.cells("overlap", overlap, needs_s=15 * (not tiny), packages=ENGINE)
    check.cells("wire", wire, needs_s=90 * (not tiny), packages=SERVER)
    if tiny:
        check.skip("peer", "--interpret")
    else:
        check.cells("peer", peer, needs_s=120, packages=("transformers",))


def _peer(check: Check, size: Any) -> dict[str, Any]:
    """transformers' decode of one sequence, over ours of this run."""
    if "decode" not in check.record:
        raise RuntimeError("there is no decode of this run to compare with")
    context = size.decodes[0][1]
    command = [sys.executable, "tools/gpu_peer.py", "qwen3-8b", context, size.rounds, size.steps]
    limit_s = min(240.0, check.left_s)
    done = subprocess.run(
        [str(each) for each in command], cwd=ROOT, capture_output=True, text=True, timeout=limit_s, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr.strip().rpartition("\n")[2])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    theirs = sorted(found["seconds"])[len(found["seconds"]) // 2]
    ours = check.record["decode"][0]["seconds"]["graphs"]
    return {
        "name": f"decode, batch 1 @ {context + 1}, against {found['peer']}",
        "passed": theirs / ours >= PEER_BATCH_1,
        "times_as_fast": theirs / ours,
        "target": PEER_BATCH_1,
        "seconds": {"ours": ours, "peer": theirs},
        "rounds": found["seconds"],
    }


def check_attention(check: Check, device: torch.device, *, tiny: bool) -> None:
    """The kernels alone."""
    from tools.gpu_attention import LOADS, TINY, measure

    loads, target = (TINY, 0.0) if tiny else (LOADS, ATTENTION_SHARE)
    limits = check.record.get("limits")
    if limits is None:
        check.skip("attention", "there are no limits of this run to compare with")
        return
    found = check.part(
        "attention", lambda: measure(device, loads, limits, rounds=1 if tiny else 9), needs_s=40 * (not tiny)
    )
    if found is None:
        return
    load = found["loads"][0]
    share = load["share_of_bandwidth"]
    load |= {"target": target, "passed": share >= target}
    if not load["passed"]:
        check.failed.append(f"attention: {load['name']}: {share:.2f} of the bandwidth, not {target}")


def run_suite(folder: str, check: Check) -> dict[str, Any]:
    """Each test's outcome and seconds, within the time that is left."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "junit.xml"
        # what the whole suite shares (quiet logs) needs packages that these tests do not
        command = [sys.executable, "-m", "pytest", folder, "-q", "-p", "no:cacheprovider", f"--rootdir={ROOT}"]
        command += [f"--confcutdir={folder}", f"--junitxml={report}"]
        if folder in SHARED_OUT and find_spec("xdist") is not None:
            command += ["-n", "8"]  # a GPU's tests are mostly waiting for a compiler
        done = subprocess.run(command, cwd=ROOT, timeout=check.left_s, check=False)
        cases = list(ElementTree.parse(report).iter("testcase"))  # noqa: S314 - pytest's own file
    tests = {}
    for case in cases:
        outcome = next((each.tag for each in case if each.tag in ("failure", "error", "skipped")), "passed")
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        tests[name] = {"outcome": outcome, "seconds": float(case.get("time", 0))}
    counts = {kind: sum(test["outcome"] == kind for test in tests.values()) for kind in ("passed", "skipped")}
    return counts | {"failed": len(tests) - sum(counts.values()), "status": done.returncode, "tests": tests}


def main() -> None:
    """Check, write, exit."""
    parser = argparse.ArgumentParser(description="Run the CUDA checks and write their results.")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/gpu-check.json; --interpret: nowhere")
    parser.add_argument("--interpret", action="store_true", help="tiny, on a CPU, through Triton's interpreter")
    parser.add_argument("--only", nargs="*", default=[], metavar="PART", help="these parts alone (see the record)")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds; what does not fit is skipped")
    arguments = parser.parse_args()
    tiny: bool = arguments.interpret
    out: Path | None = arguments.out or (None if tiny else RECORD)
    if tiny:
        from tools.gpu_interpreter import interpret

        interpret()
    elif not torch.cuda.is_available():
        sys.exit("gpu-check: torch finds no CUDA device; nothing was checked")
    from ferrum_rpc.polling import poll_directly
    from tools.gpu_record import Check, closing, opening

    poll_directly()  # as `serve` does, and the caller that is measured with it
    device = torch.device("cpu" if tiny else "cuda")
    record = opening(device, arguments.only, tiny=tiny)
    check = Check(record, arguments.budget, {*arguments.only, "limits", "model"} if arguments.only else ())
    with torch.inference_mode():
        check.cells("parity", lambda: parity(device, tiny=tiny), needs_s=30 * (not tiny))
        check_model(check, device, tiny=tiny)
        torch.cuda.empty_cache()
        check_attention(check, device, tiny=tiny)
    for suite, packages in SUITES.items():
        if tiny:
            check.skip(suite, "--interpret")
            continue
        found = check.part(suite, partial(run_suite, suite, check), needs_s=60, packages=packages)
        if found is not None and found["status"]:
            check.failed.append(f"{suite}: {found['failed']} failed, status {found['status']}")
    if not tiny:
        from tools.gpu_attention import LOADS, shapes

        check.part("shapes", lambda: shapes(device, LOADS), needs_s=200)
    record |= closing(check)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    for word, lines in (("FAILED", check.failed), ("SKIPPED", check.skipped)):
        for each in lines:
            print(f"gpu-check: {word} {each}")
    print(f"gpu-check: {'failed' if check.failed else 'passed'}; wrote {'nothing' if out is None else out}")
    sys.exit(bool(check.failed))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
