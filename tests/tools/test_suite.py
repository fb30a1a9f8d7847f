"""`python -m benchmarks.suite --quick` runs: our two sides, a real peer, the other parts, the file and its page."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest

import benchmarks.suite
from benchmarks import compare, parts, report
from benchmarks.cases import CELLS, DECODE, PREFILL, QUICK_CELLS, SHAPES, Cell, settings
from benchmarks.compare import Round, Unsupported, alternate, contest, meanwhile
from benchmarks.engines.grpc import QUANTIZED
from benchmarks.engines.inprocess import INSIDE
from benchmarks.engines.process import REFERENCE
from benchmarks.limits import roof
from benchmarks.parts import MIXED
from benchmarks.record import cell_rows
from benchmarks.suite import EAGER, FULL_ROWS, HF_LAYERS, speeds
from benchmarks.table import rows_of
from ferrum_rpc.models.spec import ModelSpec
from tests.tools.running import Scripted

QWEN3_0_6B = ModelSpec.from_config(SHAPES["qwen3-0.6b"])
LIMITS = {"read_gb_s": 30.0, "bf16_tflops": 2.0, "threads": 2, "readings": []}


@pytest.fixture(scope="module")
def quick(quick_run):
    return quick_run(benchmarks.suite, "--only", "cells", "outputs", "mixed")


def test_a_quick_run_plays_every_cell_on_every_side(quick):
    *cells, full_rows = quick["cells"]
    assert [cell["cell"] for cell in cells] == [cell.name for cell in QUICK_CELLS]
    assert full_rows["cell"] == "decode b3 @8, full-bf16" and set(full_rows["sides"]) == {REFERENCE, INSIDE}
    assert full_rows["sides"][INSIDE]["same_tokens"] == full_rows["sides"][REFERENCE]["same_tokens"] == [2, 2]
    for cell in cells:
        sides = {REFERENCE, INSIDE, HF_LAYERS, *QUANTIZED, EAGER.name}
        assert set(cell["sides"]) | set(quick["left_out"]) == sides
        assert set(cell["ratios"]) == set(cell["sides"]) - {REFERENCE}
        assert all(len(each["pairs"]) == 2 for each in cell["ratios"].values())
        assert cell["roof"]["tokens_per_s"] > 0
        assert cell["sides"][INSIDE]["same_tokens"] == cell["sides"][REFERENCE]["same_tokens"]
        assert cell["sides"][EAGER.name]["same_tokens"][1] == 2 * cell["batch"]
    same, of = map(sum, zip(*(cell["sides"][EAGER.name]["same_tokens"] for cell in cells), strict=True))
    assert same > of / 2, "another engine with the same weights computes another model"
    assert quick["sides"][EAGER.name]["threads"] == quick["settings"]["threads"]


def test_a_quick_run_has_the_other_parts_and_makes_the_page(quick):
    rows = rows_of(quick["tables"]["parts"])
    assert [each["what"].partition(" ")[0] for each in rows] == ["p99"]
    assert rows[0]["measured"] >= 1 and "chunks" in rows[0]["of which"]
    outputs = rows_of(quick["tables"]["outputs"])
    prefill, *decodes = quick["tables"]["outputs"]["columns"][1:]
    assert {each["output"] for each in outputs if each[prefill]} == {*parts.PREFILLED, "greedy, ms"}
    for decode in decodes:
        assert {each["output"] for each in outputs if each[decode]} == {
            *parts.DECODED,
            parts.EACH,
            parts.ONE,
            "greedy, ms",
        }
    assert [each["value"] for each in quick["targets"] if each["what"] == MIXED] == [rows[0]["measured"]]
    page = report.document([("suite-2cpu.json", quick)])
    for each in rows_of(quick["tables"]["cells"]):
        assert f"| {each['cell']} | {each['side']} | " in page


def test_what_grpc_costs_is_the_ratio_to_the_runner_in_process():
    cell = CELLS[3]
    found = [
        {"cell": name, "sides": {}, "ratios": {INSIDE: {"median": value}}}
        for name, value in ((cell.name, 0.98), (FULL_ROWS.name, 0.9))
    ]
    values = {each["what"]: each["value"] for each in speeds(found) if each["what"].startswith("gRPC")}
    assert values == {
        "gRPC against in process, b1, greedy, in a session": None,
        "gRPC against in process, b8, greedy, in a session": None,
        "gRPC against in process, b32, greedy, in a session": 0.98,
        "gRPC against in process, b32, full bf16 rows": 0.9,
    }


def test_what_adapters_cost_is_a_share_of_the_rate_without():
    found = parts.adapted_target([{"cell": "decode b32 @256", "ratios": {parts.EACH: {"median": 1.25}}}])
    assert (found["value"], found["bound"], parts.adapted_target([])["value"]) == (0.8, 0.8, None)


async def test_sides_alternate_and_ratios_are_of_pairs():
    turns = []
    players = {"peer": Scripted("peer", 0.02, turns), "ours": Scripted("ours", 0.01, turns)}
    found = await contest(Cell(DECODE, 2, 8, most=5), players, "ours", rounds=3, round_s=0.05)
    assert [name for number, name in turns if number > 1][:6] == ["peer", "ours", "ours", "peer", "peer", "ours"]
    assert found["ratios"] == {"peer": {"pairs": [2.0] * 3, "median": 2.0, "low": 2.0, "high": 2.0}}
    assert found["sides"]["ours"]["tokens_per_s"] == 200.0
    assert found["sides"]["peer"]["same_tokens"] == [6, 6]
    assert found["steps"] == 5


def test_a_spread_is_of_all_steps():
    seconds = [each / 1000 for each in range(1, 102)]
    assert compare.spread(seconds) == {"median": 51.0, "p10": 11.0, "p90": 91.0}
    assert (compare.percentile(seconds, 99, 4), compare.median(seconds)) == (0.1, 0.051)


async def test_a_turn_that_others_disturbed_is_repeated_but_not_for_ever(monkeypatch):
    disturbed = iter([False, True, False, True, True, True])
    monkeypatch.setattr(compare, "Bystanders", lambda: SimpleNamespace(disturbed=lambda: next(disturbed)))
    numbers = []

    async def take(number):
        numbers.append(number)
        return Round(step_s=[float(number)])

    taken, counts = await alternate({"one": take}, 3, settle_s=0, first=2)
    assert (numbers, counts) == ([2, 3, 4, 5, 6, 7], [3, 1])
    assert [each.step_s for each in taken["one"]] == [[2.0], [4.0], [7.0]]


async def test_what_goes_on_meanwhile_has_begun_before_the_block_and_ends_with_it():
    done = []

    async def work():
        done.append(True)
        await asyncio.sleep(0)

    async with meanwhile(work) as seconds:
        assert len(done) == 1
        for _ in range(9):
            await asyncio.sleep(0)
        assert len(done) > 3
    ended = len(done)
    await asyncio.sleep(0)
    assert len(done) == ended == 1 + len(seconds)


async def test_a_side_that_cannot_play_says_why_and_the_others_go_on():
    players = {"ours": Scripted("ours", 0.01, []), "peer": Scripted("peer", 0.01, [], refuses=True)}
    found = await contest(QUICK_CELLS[1], players, "ours", 1, 0.01)
    assert set(found["sides"]) == {"ours"} and found["absent"] == {"peer": "it cannot"}
    assert [each["step, ms"] for each in cell_rows([found]) if each["side"] == "peer"] == ["none: it cannot"]
    with pytest.raises(Unsupported):
        await contest(QUICK_CELLS[1], players, "peer", 1, 0.01)


def test_the_limit_of_a_decode_is_reading_the_weights_and_of_a_prefill_the_products():
    decode = roof(Cell(DECODE, 1, 512), QWEN3_0_6B, LIMITS)
    assert decode["bound_by"] == "memory"
    assert decode["step_gb"] == pytest.approx(1.192 + 0.0587, abs=1e-3)  # 596 million weights, 512 tokens of K and V
    assert decode["tokens_per_s"] == pytest.approx(30 / decode["step_gb"], rel=1e-3)
    prefill = roof(Cell(PREFILL, 1, 512), QWEN3_0_6B, LIMITS)
    assert prefill["bound_by"] == "matrix products"
    assert 2000 < prefill["tokens_per_s"] < 2.0e12 / (2 * 440e6)


def test_a_step_reads_and_writes_the_states_of_its_sequences():
    spec = ModelSpec.from_config(SHAPES["qwen3.5-0.8b"])
    one, two = (roof(Cell(DECODE, batch, 64), spec, LIMITS)["step_gb"] for batch in (1, 2))
    cached, state = 6 * 2 * 2 * 256 * 2 * 64, 18 * 16 * 128 * 128 * 4
    assert two - one == pytest.approx((cached + 2 * state) / 1e9, abs=2e-3)
    assert one == pytest.approx(2 * 0.752, abs=0.05)  # the weights


def test_a_step_reads_the_experts_that_rows_choose_and_latents_once():
    spec, of_one = ModelSpec.from_config(SHAPES["deepseek-v2-lite-3"]), 3 * 1408 * 2048
    one, longer, two = (roof(Cell(DECODE, *each), spec, LIMITS) for each in ((1, 64), (1, 164), (2, 32)))
    assert longer["step_gb"] - one["step_gb"] == pytest.approx(100 * 3 * 1_152 / 1e9, abs=1e-3)
    second = 6 - 6 * 6 / 64  # the six of another row, without those of the first
    assert two["step_gb"] - one["step_gb"] == pytest.approx(2 * second * of_one * 2 / 1e9, abs=2e-3)
    head = 102_400 * 2048
    assert two["step_gflop"] - one["step_gflop"] > 2 * (head + 2 * 6 * of_one) / 1e9


def test_no_prompt_is_prefilled_twice_and_every_side_draws_the_same_tokens():
    cell = CELLS[0]
    first, second = cell.fresh(1000, 1, 3), cell.fresh(1000, 2, 3)
    assert len({tuple(prompt) for prompt in (*first.tolist(), *second.tolist())}) == 8
    assert (first == replace(cell).fresh(1000, 1, 3)).all()
    assert CELLS[3].fed(1000, 8).shape == (10, 32) and CELLS[3].prompts(1000).max() < 1000


def test_both_sides_of_ours_have_blocks_for_the_largest_cell():
    found = settings(CELLS, 2)
    assert found["kv_blocks"] * found["block_size"] > 32 * (256 + 2 + 48) + 512


async def test_loading_is_what_a_start_takes_beyond_one_without_weights(tmp_path, monkeypatch):
    (tmp_path / "model.safetensors").write_bytes(b"w" * 5000)
    took = iter([9.0, 2.0, 7.0, 2.5, 8.0, 3.0])

    async def start(model, flags):
        return next(took)

    monkeypatch.setattr(parts, "_start", start)
    found = await parts.starting(tmp_path, {}, 3)
    assert found["measured"] == 8.0 and found["of which"] == "loading 5.50"
