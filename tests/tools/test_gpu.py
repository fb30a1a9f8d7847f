"""The check for a GPU runs without one, as far as it can: its cells on a CPU, its kernels through the interpreter."""

import asyncio
import os
import weakref
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from benchmarks import limits, report
from benchmarks.cases import QUICK_CELLS
from benchmarks.engines.inprocess import INSIDE
from benchmarks.engines.process import REFERENCE
from benchmarks.gpu import attention, check
from benchmarks.gpu.check import BOTH_BYTES
from benchmarks.limits import Machine
from benchmarks.record import Contest
from benchmarks.table import reached
from ferrum_rpc.core import AttentionSpec
from tests.support.interpreter import interpret
from tools.commands import ROOT, run


def test_the_cells_run_without_a_gpu_and_that_is_no_result(quick_run):
    found = quick_run(check)
    assert found["failed"] == [] and [cell["cell"] for cell in found["cells"]] == [cell.name for cell in QUICK_CELLS]
    for cell in found["cells"]:
        assert set(cell["sides"]) == {REFERENCE, INSIDE} and cell["roof"]["tokens_per_s"] > 0
        assert cell["sides"][INSIDE]["same_tokens"] == cell["sides"][REFERENCE]["same_tokens"]
    with pytest.raises(ValueError, match="rehearsed"):
        report.document([("gpu-check.json", found)])
    page = report.document([("gpu-check.json", found | {"benchmark": "gpu"})])
    assert all(f"| {cell.name} | {INSIDE} | " in page for cell in QUICK_CELLS)


def test_make_starts_it_without_an_environment_for_development(tmp_path):
    """So that it runs where only wheels can be carried: `make` installs nothing for it, also in an empty folder."""
    command = ["make", "--dry-run", "-f", str(ROOT / "Makefile"), "-C", str(tmp_path), "gpu-check", "PYTHON=python"]
    assert run([*command, "-s"], env=os.environ | {"MAKEFLAGS": "", "MAKELEVEL": ""}) == "python -m benchmarks.gpu\n"


def test_without_a_device_the_check_fails():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(SystemExit, match="no CUDA device"):
        check.main([])


async def test_the_kernels_are_timed_beside_those_of_torch():
    pytest.importorskip("triton")
    interpret()
    loads, limits = (
        (attention.Load("decode", 2, 19, 1), attention.Load("prefill", 1, 0, 24)),
        {"read_gb_s": 10.0, "bf16_tflops": 1.0},
    )
    found = await attention.attention(torch.device("cpu"), loads, limits, 1, AttentionSpec(4, 1, 128, 0.1))
    for load in found:
        assert {"sdpa", "varlen_attn"} == set(load["ratios"]) | set(load["absent"]) and "sdpa" in load["ratios"]
        assert 0 < load["share_of_bandwidth"] < 1 and 0 < load["share_of_matrix_units"] < 1
    assert [row["attention alone"] for row in attention.attention_rows(found)] == ["decode", "prefill"]


@pytest.fixture
def contest(tmp_path):
    """Before anything is run."""
    options = check.BENCHMARK.parse(["--quick", "--out", str(tmp_path / "gpu.json")])
    options.cells = QUICK_CELLS
    return Contest(options, "tiny")


def test_one_side_at_a_time_gives_the_same_result(contest, monkeypatch):
    """As on a device that does not hold both; here its memory alone is said."""
    monkeypatch.setattr(check.torch.cuda, "empty_cache", lambda: None)
    asyncio.run(check.one_at_a_time(contest, "cpu"))
    found = contest.record.values["cells"]
    assert [each["cell"] for each in found] == [cell.name for cell in QUICK_CELLS]
    for each in found:
        assert set(each["sides"]) == {REFERENCE, INSIDE} and set(each["ratios"]) == {INSIDE}
        assert each["roof"]["tokens_per_s"] > 0 and each["ratios"][INSIDE]["median"] > 0
        assert each["sides"][INSIDE]["samples"] == each["sides"][REFERENCE]["samples"]
        assert each["sides"][INSIDE]["same_tokens"] == each["sides"][REFERENCE]["same_tokens"]


def test_a_device_that_does_not_hold_both_sides_has_one_at_a_time(contest, monkeypatch):
    class Both(Exception):
        """Both sides are opened."""

    class Alone(Exception):
        """One side is."""

    monkeypatch.setattr(check.Client, "open", Mock(side_effect=Both))
    monkeypatch.setattr(check, "one_at_a_time", Mock(side_effect=Alone))
    for total, expected in ((80 << 30, Alone), (BOTH_BYTES, Both)):
        monkeypatch.setattr(check.torch.cuda, "mem_get_info", lambda total=total: (total, total))
        with pytest.raises(expected):
            asyncio.run(check.cells(contest, "cuda"))


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
    monkeypatch.setattr(attention, "_copies", lambda *_: 3)
    pytest.importorskip("triton")
    calls, _ = attention.calls_of(torch.device("cpu"), attention.Load("decode", 2, 19, 1), attention.LLAMA)
    assert [len(each) for each in calls.values()] == [3] * len(calls)
    [backend] = {each.func.__self__ for each in calls["ours"]}
    layers = [each.args[0] for each in calls["ours"]]
    assert len({backend._keys[layer].data_ptr() for layer in layers}) == 3


def test_calls_read_more_than_the_l2_cache_holds(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(L2_cache_size=50 << 20))
    device = torch.device("cuda")
    assert attention._copies(device, 8 * 1024 * 4096) == 7 and attention._copies(device, 1 << 30) == 1


def cell(name, inside, grpc, limit):
    """A result of a check, with figures that nobody measured."""
    sides = {REFERENCE: {"tokens_per_s": grpc}, INSIDE: {"tokens_per_s": inside}}
    ratios = {INSIDE: {"median": grpc / inside}}
    return {"cell": name, "roof": {"tokens_per_s": limit}, "sides": sides, "ratios": ratios}


def test_targets_of_a_gpu_are_shares_of_its_limits():
    cells = [
        cell("prefill 8192", 30000.0, 29000.0, 48000.0),
        cell("decode b1 @1024", 220.0, 210.0, 250.0),
        cell("decode b64 @2048", 11360.0, 11132.8, 16000.0),
    ]
    found = check.targets(
        {"cells": cells, "attention": [{"name": attention.LOADS[0].name, "share_of_bandwidth": 0.83}]}
    )
    assert [each["value"] for each in found] == [0.88, 0.71, 0.625, 0.83, pytest.approx(0.98)]
    assert [reached(each) for each in found] == [True, False, True, True, True]
    assert [each["value"] for each in check.targets({"cells": cells[:1]})] == [None, None, 0.625, None, None]
