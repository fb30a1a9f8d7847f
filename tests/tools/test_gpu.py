"""The check for a GPU runs without one, as far as it can: its cells on a CPU, its kernels through the interpreter."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import weakref
from functools import partial

import pytest
import torch

from benchmarks import limits, record, report, tables, targets
from benchmarks.cases import QUICK_CELLS
from benchmarks.engines.inprocess import INSIDE
from benchmarks.engines.process import REFERENCE
from benchmarks.gpu import check
from benchmarks.gpu.check import BOTH_BYTES, LLAMA, LOADS, ONE_RANK, Load, run_suite
from benchmarks.limits import Machine
from benchmarks.machine import ROOT
from benchmarks.record import Contest


def python(*arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_cells_run_without_a_gpu_and_that_is_no_result(tmp_path, quick_run):
    out = tmp_path / "gpu.json"
    with pytest.raises(SystemExit) as ended:
        quick_run(check, "--out", str(out))
    assert not ended.value.code
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["failed"] == [] and [cell["cell"] for cell in found["cells"]] == [cell.name for cell in QUICK_CELLS]
    for cell in found["cells"]:
        assert set(cell["sides"]) == {REFERENCE, INSIDE} and cell["roof"]["tokens_per_s"] > 0
        assert cell["sides"][INSIDE]["same_tokens"] == cell["sides"][REFERENCE]["same_tokens"]
    shared = found["two_ranks"]
    assert [set(cell["sides"]) for cell in shared["cells"]] == [{ONE_RANK, "tensor 2"}] * len(QUICK_CELLS)
    assert shared["transport"] in {"shared-memory", "gloo"} and shared["said"].startswith("NCCL was not run")
    with pytest.raises(ValueError, match="rehearsed"):
        report.document([("gpu-check.json", found)])
    page = report.document([("gpu-check.json", found | {"benchmark": "gpu"})])
    assert shared["said"] in page
    for row in [*tables.cells(found["cells"]).rows, *tables.cells(shared["cells"]).rows]:
        assert "| " + " | ".join(row) + " |" in page


def test_make_starts_it_without_an_environment_for_development(tmp_path):
    """So that it runs where only wheels can be carried: `make` installs nothing for it, also in an empty folder."""
    command = ["make", "--dry-run", "-f", str(ROOT / "Makefile"), "-C", str(tmp_path), "gpu-check", "PYTHON=python"]
    environment = os.environ | {"MAKEFLAGS": "", "MAKELEVEL": ""}
    done = subprocess.run([*command, "-s"], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "python -m benchmarks.gpu\n"), done.stderr


def test_without_a_device_the_check_fails():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(SystemExit, match="no CUDA device"):
        check.main([])


def test_the_kernels_are_timed_beside_those_of_torch():
    pytest.importorskip("triton")
    program = (
        "from tests.kernels.interpreter import interpret; interpret();"
        "import asyncio, json, torch; from benchmarks.gpu.check import AttentionSpec, Load, attention;"
        "spec = AttentionSpec(4, 1, 128, 0.1);"
        "loads = (Load('decode', 2, 19, 1), Load('prefill', 1, 0, 24));"
        "limits = {'read_gb_s': 10.0, 'bf16_tflops': 1.0};"
        "print(json.dumps(asyncio.run(attention(torch.device('cpu'), loads, limits, 1, spec))))"
    )
    loads = json.loads(python("-c", program).splitlines()[-1])
    for load in loads:
        assert {"sdpa", "varlen_attn"} == set(load["ratios"]) | set(load["absent"]) and "sdpa" in load["ratios"]
        assert 0 < load["share_of_bandwidth"] < 1 and 0 < load["share_of_matrix_units"] < 1
    assert len(tables.attention({"attention": loads}).rows) == 2


def test_one_side_at_a_time_gives_the_same_result(tmp_path, monkeypatch):
    """As on a device that does not hold both; here its memory alone is said."""
    options = check.parse(["--quick", "--only", "cells", "--out", str(tmp_path / "gpu.json")])
    here = Contest(options, "gpu, rehearsed", "tiny")
    monkeypatch.setattr(check.torch.cuda, "empty_cache", lambda: None)
    asyncio.run(check.one_at_a_time(here, "cpu"))
    found = here.record.values["cells"]
    assert [each["cell"] for each in found] == [cell.name for cell in QUICK_CELLS]
    for each in found:
        assert set(each["sides"]) == {REFERENCE, INSIDE} and set(each["ratios"]) == {INSIDE}
        assert each["roof"]["tokens_per_s"] > 0 and each["ratios"][INSIDE]["median"] > 0
        assert each["sides"][INSIDE]["samples"] == each["sides"][REFERENCE]["samples"]
        assert each["sides"][INSIDE]["same_tokens"] == each["sides"][REFERENCE]["same_tokens"]


@pytest.fixture
def contest(tmp_path):
    """Before anything is run."""
    options = check.parse(["--quick", "--out", str(tmp_path / "gpu.json")])
    return Contest(options, "gpu, rehearsed", "tiny")


def test_a_device_that_does_not_hold_both_sides_has_one_at_a_time(contest, monkeypatch):
    class Both(Exception):
        """Both sides are opened."""

    class Alone(Exception):
        """One side is."""

    def raising(error):
        def call(*_):
            raise error

        return call

    monkeypatch.setattr(check.Client, "open", raising(Both))
    monkeypatch.setattr(check, "one_at_a_time", raising(Alone))
    for total, expected in ((80 << 30, Alone), (BOTH_BYTES, Both)):
        monkeypatch.setattr(check.torch.cuda, "mem_get_info", lambda total=total: (total, total))
        with pytest.raises(expected):
            asyncio.run(check.cells(contest, "cuda"))


def test_the_checkpoint_is_written_for_those_who_need_it(contest, monkeypatch):
    """Not for the kernels alone, and once."""
    written = []
    monkeypatch.setattr(record, "checkpoint", lambda shape: written.append(shape) or "a folder")
    here = Contest(contest.options, "gpu, rehearsed", "tiny")
    assert not written
    assert here.folder == here.folder == "a folder" and written == ["tiny"]


def test_the_buffers_of_a_reading_are_gone_after_it(monkeypatch):
    """2.4 GiB of a GPU, which the sides need."""
    held, gone = [], []

    def calls(_):
        buffer = torch.ones(8)
        held.append(weakref.ref(buffer))
        return [(partial(torch.sum, buffer), 32)], [(partial(torch.amax, buffer), 8)]

    monkeypatch.setattr(limits, "_gpu_calls", calls)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: gone.append(held[-1]() is None))
    machine = Machine(torch.get_num_threads(), "cuda")
    assert not held
    machine.read()
    machine.read()
    assert gone == [True, True] and len(machine.readings) == 2


def test_calls_that_are_timed_have_caches_of_their_own(monkeypatch):
    monkeypatch.setattr(check, "_copies", lambda *_: 3)
    pytest.importorskip("triton")
    calls, _ = check.calls_of(torch.device("cpu"), Load("decode", 2, 19, 1), LLAMA)
    assert [len(each) for each in calls.values()] == [3] * len(calls)
    [backend] = {each.func.__self__ for each in calls["ours"]}
    layers = [each.args[0] for each in calls["ours"]]
    assert len({backend._keys[layer].data_ptr() for layer in layers}) == 3


def test_calls_read_more_than_the_l2_cache_holds(monkeypatch):
    class Properties:
        L2_cache_size = 50 << 20

    monkeypatch.setattr(check.torch.cuda, "get_device_properties", lambda _: Properties)
    device = check.torch.device("cuda")
    assert check._copies(device, 8 * 1024 * 4096) == 7 and check._copies(device, 1 << 30) == 1


def a_check():
    """As `benchmarks.gpu` writes it, with figures that nobody measured."""

    def cell(name, inside, grpc, limit):
        ratios = {INSIDE: {"median": grpc / inside, "low": 0.9, "high": 1.0}}
        figures = {"low": 1.0, "high": 2.0, "step_ms": dict.fromkeys(("median", "p10", "p90"), 1.0)}
        sides = {REFERENCE: {"tokens_per_s": grpc}, INSIDE: {"tokens_per_s": inside}}
        sides = {side: {**figures, **each, "same_tokens": [1, 1]} for side, each in sides.items()}
        roof = {"tokens_per_s": limit, "bound_by": "memory"}
        return {"cell": name, "roof": roof, "sides": sides, "ratios": ratios, "absent": {}, "disturbed": [0, 0]}

    load = {"name": LOADS[0].name, "ms": 0.31, "share_of_bandwidth": 0.83, "share_of_matrix_units": 0.05}
    sdpa = {"median": 2.0, "low": 1.9, "high": 2.1}
    return {
        "schema": 1,
        "benchmark": "gpu",
        "command": "python -m benchmarks.gpu",
        "began": "2026-11-21T06:00:00+00:00",
        "ended": "2026-11-21T06:10:00+00:00",
        "commit": {"id": "0123456789abcdef0123", "dirty": False},
        "hardware": {"cpu": "Some CPU", "cores": 2, "memory_gib": 23.4, "flags": ["avx2"], "huge_pages": "madvise"},
        "versions": {"python": "3.12.3", "torch": "2.13.0"},
        "others_cpu": 0.0,
        "settings": {"gpu": "Some GPU", "rounds": 5, "round_s": 2.0, "openmp_waits": "", "output": "greedy", "seed": 1},
        "model": {"name": "qwen3-8b", "parameters": 8 << 30, "dtype": "bfloat16"},
        "sides": {},
        "left_out": {"transformers static, compiled": "no such module"},
        "cells": [
            cell("prefill 8192", 30000.0, 29000.0, 48000.0),
            cell("decode b1 @1024", 220.0, 210.0, 250.0),
            cell("decode b64 @2048", 11360.0, 11132.8, 16000.0),
        ],
        "attention": [load | {"ratios": {"sdpa": sdpa}, "absent": {"varlen_attn": "no such | thing"}}],
        "tests": {"tests/kernels": {"passed": 120, "skipped": 2, "failed": 1, "status": 1}},
        "failed": ["tests/kernels: 1 failed"],
    }


def test_what_waits_for_a_gpu_is_not_yet_measured_until_a_check_of_one_is_there():
    def of_the_gpu(results):
        return [line for line in targets.standing(targets.newest(results)).rows if line[0].startswith("CUDA")]

    assert [line[1] for line in of_the_gpu([])] == [tables.NOT_YET] * 5
    found = of_the_gpu([("gpu-check.json", a_check())])
    assert [(line[1], line[3]) for line in found] == [
        ("0.880", "yes"),
        ("0.710", "no"),
        ("0.625", "yes"),
        ("0.830", "yes"),
        ("0.980", "yes"),
    ]
    some = a_check()
    del some["attention"]
    some["cells"] = some["cells"][:1]
    assert [line[1] for line in of_the_gpu([("gpu-check.json", some)])] == [tables.NOT_YET] * 2 + ["0.625"] + [
        tables.NOT_YET
    ] * 2


def test_the_page_says_what_a_gpu_reached_what_it_missed_and_what_did_not_run():
    page = report.document([("gpu-check.json", a_check())])
    for text in (
        "| decode b1 @1024 | ours, in process | 220 (1.00 to 2.00) |",
        "| decode, 64 x 4k | 0.310 | 0.83 | 0.05 | 2.00 (1.90 to 2.10) × | none: no such \\| thing |",
        "`tests/kernels`: 120 passed, 2 skipped, 1 failed",
        "missed or failed: tests/kernels: 1 failed",
        "transformers static, compiled was left out: no such module",
        "| GPU | Some GPU |",
    ):
        assert text in page, text


def test_a_suite_is_counted(tmp_path):
    (tmp_path / "test_three.py").write_text(
        "import pytest\ndef test_a(): pass\ndef test_b(): assert 0\n@pytest.mark.skip\ndef test_c(): pass\n"
    )
    assert run_suite(str(tmp_path)) == {"passed": 1, "skipped": 1, "failed": 1, "status": 1}
