"""`python -m benchmarks.wire --quick` runs: both sides, the echo, the file and the page that is made of it."""

import json

import numpy as np

import benchmarks.wire
from benchmarks import report
from benchmarks.cases import CONTEXT, DECODE, Cell, settings
from benchmarks.machine import hardware, label
from benchmarks.profile import timelines
from benchmarks.wire import outputs_for


def test_a_quick_run_measures_the_identity_model_through_both_ways(tmp_path, quick_run):
    out = tmp_path / "wire.json"
    told = quick_run(benchmarks.wire, "--rounds", "2", "--batches", "1", "4", "--out", str(out))
    result = json.loads(out.read_text(encoding="utf-8"))
    assert [(point["batch"], point["output"]) for point in result["cells"]] == [
        (1, "greedy"),
        (1, "full-bf16"),
        (1, "full-f32"),
        (4, "greedy"),
        (4, "full-bf16"),
    ]
    for point in result["cells"]:
        assert len(point["ratios"]["in process"]["pairs"]) == 2
        assert point["sides"]["in process"]["same_rounds"] == [2, 2]  # both sides ran the same steps
        grpc = point["sides"]["gRPC"]
        assert 0 < grpc["forward_ms"]["median"] < grpc["step_ms"]["median"]
        assert point["sides"]["echo"]["step_ms"]["median"] > 0
    assert result["settings"]["threads_server"] == result["settings"]["threads_in_process"]
    assert result["others_cpu"] is None or 0 <= result["others_cpu"] <= 1
    assert result["hardware"]["cores"] >= 1 and result["versions"]["torch"] != "absent"
    assert "full-f32" in told and str(out) in told
    assert "### identity" in report.document([("wire.json", result)])


def test_both_sides_draw_the_same_tokens_below_the_vocabulary():
    cell = Cell(DECODE, 3, CONTEXT, most=5)
    assert cell.prompts(264).shape == (3, CONTEXT)
    assert cell.fed(264, 5).shape == (7, 3)
    assert np.array_equal(cell.fed(264, 5), cell.fed(264, 5))
    assert cell.fed(264, 5).max() < 264


def test_a_larger_batch_begins_with_the_prompts_of_a_smaller_one():
    small, large = (Cell(DECODE, batch, CONTEXT).prompts(264) for batch in (3, 8))
    assert np.array_equal(large[:3], small) and not np.array_equal(large[0], large[1])


def test_the_cache_holds_every_sequence_at_its_longest():
    found = settings([Cell(DECODE, 3, CONTEXT, most=128), Cell(DECODE, 1, CONTEXT)], 1)
    assert found["kv_blocks"] * found["block_size"] >= 3 * (CONTEXT + 2 + 128)


def test_float32_rows_are_a_column_of_one_sequence_only():
    assert outputs_for(["greedy", "full"], 1) == ["greedy", "full-bf16", "full-f32"]
    assert outputs_for(["greedy", "full"], 32) == ["greedy", "full-bf16"]
    assert outputs_for(["full"], 8) == ["full-bf16"]


def test_a_result_is_named_after_a_kind_of_machine():
    assert label(hardware() | {"cores": 2, "flags": ["avx2", "avx512f", "amx_bf16"]}) == "2cpu-amx_bf16"


def test_the_stages_of_a_step_add_up_to_the_whole():
    client = [[("client: build", 1000), ("wire: request", 3000), ("client: parse", 9000), ("end", 10_000)]]
    server = [("server: admit", 500), ("server: admit", 4000), ("reserve", 5000), ("reserve", 6000), ("other", 11_000)]
    (stages,) = timelines(client, server)
    assert stages == {
        "client: build": 2.0,
        "wire: request": 1.0,
        "server: admit": 1.0,
        "reserve": 4.0,
        "client: parse": 1.0,
    }
    assert sum(stages.values()) == 9.0
