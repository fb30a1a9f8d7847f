"""`benchmarks.prefix` counts what is computed, sets sides beside each other by rounds, and its page shows it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import prefix
from benchmarks.cases import DECODE, PREFILL, SHAPES, Cell
from benchmarks.limits import roof
from benchmarks.prefix import OFF, ON, QUICK_SIZES, Books, Taken, book_figures, crowd, crowd_figures, talk, turns
from benchmarks.sections import prefix as page
from benchmarks.targets import TARGETS
from ferrum_rpc.client import ExecutorClient
from ferrum_rpc.models.spec import ModelSpec
from tests.serving import serve_identity
from tests.tools.conditions import conditions

PROMPT = Cell(PREFILL, 1, 40, shared=32)
CONDITIONS = {
    "settings": {"rounds": 3, "round_s": 2.0, "openmp_waits": "", "output": "greedy", "seed": 0},
    "model": {"name": "qwen3-0.6b", "parameters": 596e6, "dtype": "bfloat16"},
    "sides": {},
    **conditions("prefix"),
}


def test_prompts_of_a_cell_share_their_beginning_in_every_round_and_nothing_else() -> None:
    first, second = PROMPT.fresh(1000, 1, 2), PROMPT.fresh(1000, 2, 2)
    assert len({row[:32].tobytes() for row in (*first, *second)}) == 1
    assert len({row[32:].tobytes() for row in (*first, *second)}) == 6
    decode = Cell(DECODE, 2, 8)
    assert (Cell(DECODE, 2, 8, draw=1).fed(1000, 4) != decode.fed(1000, 4)).any()


def test_the_limit_of_a_prompt_that_was_seen_is_that_of_its_rest() -> None:
    spec, limits = ModelSpec.from_config(SHAPES["qwen3-0.6b"]), {"read_gb_s": 30.0, "bf16_tflops": 2.0}
    seen, whole = (roof(Cell(PREFILL, 1, 528, shared=shared), spec, limits) for shared in (512, 0))
    assert 30 < whole["step_gflop"] / seen["step_gflop"] < 33
    assert whole["bound_by"] == "matrix products" and seen["bound_by"] == "memory"


@pytest.mark.parametrize("sample", [None, 4])
async def test_a_crowd_computes_and_holds_what_it_shares_once(sample: int | None) -> None:
    prompts = PROMPT.fresh(250, 0, 11).tolist()
    async with (
        serve_identity(block_size=16, kv_blocks=128) as served,
        ExecutorClient(served.target, session=True) as client,
    ):
        taken = await crowd(client, prompts, 5, 2, sample)
        assert (await client.status()).blocks.used == 0
    on, off = ((found.sequences, found.blocks, found.computed) for found in (taken[ON][0], taken[OFF][0]))
    if sample is None:
        assert (on, off) == ((12, 2 + 12, 32 + 12 * 8), (12, 36, 480))
        assert taken[ON][1].computed == taken[ON][0].computed, "a round finds what one before it left"
    else:
        assert (on, off) == ((6, 2 + 6, 32 + 6 * 8), (4, 12, 160))
        assert taken[ON][1].computed == 6 * 8
    assert [len(found.seconds) for found in taken[ON]] == ([4, 4] if sample is None else [2, 2])


def test_figures_of_a_crowd_are_in_proportion_and_ratios_of_the_same_round() -> None:
    taken = {
        ON: [Taken(50, 82, 1312, [1.0] + [0.5] * 49), Taken(50, 50, 800, [0.5] * 50)],
        OFF: [Taken(2, 66, 1056, [4.0, 4.0]), Taken(2, 66, 1056, [5.0, 5.0])],
    }
    found = crowd_figures("m", 1, 100, taken)
    assert [found["sides"][side]["measured"] for side in (ON, OFF)] == [100, 4]
    assert [found["sides"][side]["blocks"] for side in (ON, OFF)] == [132, 3300]
    assert [found["sides"][side]["computed"] for side in (ON, OFF)] == [2112, 52800]
    assert (found["times_blocks"], found["times_computed"], found["target"]) == (25, 25, None)
    assert found["times_seconds"] == {"median": pytest.approx(8.922, abs=1e-3), "low": 7.843, "high": 10.0}
    assert found["sides"][ON]["first_ms"] == 1000 and found["sides"][ON]["call_ms"]["median"] == 500


async def test_a_turn_computes_what_is_new_in_whole_blocks() -> None:
    said = list(range(6 * prefix.TURN))
    async with serve_identity(block_size=16, kv_blocks=64) as served, ExecutorClient(served.target) as client:
        talks = {side: [await talk(client, said, side, b"")] for side in (ON, OFF)}
    assert [computed for computed, _ in talks[OFF][0]] == [24, 48, 72, 96, 120, 144]
    found = turns(talks)
    assert [each["computed"] for each in found] == [each["to_compute"] for each in found] == [24, 32] * 3
    assert prefix.talk_figures(found)["of_to_compute"] == 1


async def test_a_miss_is_set_beside_the_same_step_without_the_cache() -> None:
    async with (
        serve_identity(block_size=16, kv_blocks=256) as served,
        ExecutorClient(served.target, session=True) as client,
    ):
        for cell in (Cell(PREFILL, 1, 24, most=4), Cell(DECODE, 2, 16, most=4)):
            found = await prefix.miss("identity", (client, 250), cell, 1, 0.001)
            assert found["cell"] == cell.name and len(found["ratio"]["pairs"]) == 1
        status = await client.status()
    assert status.counters.searched_tokens and not status.counters.cached_tokens
    assert status.blocks.used == 0


def test_every_block_that_the_books_begin_takes_the_place_of_a_cached_one() -> None:
    side = Books(size := QUICK_SIZES[0])
    rounds = [side.round() for _ in range(3)]
    state = side._manager.state()
    side._manager.check()
    assert state.blocks_evicted >= 20 and state.total_blocks - state.free_blocks == size.live
    slow = [[2 * each for each in found] for found in rounds]
    found = book_figures(size, slow, rounds)
    assert found["of_first"] == 2 and found["longest_ms"] >= found["step_ms"] > 0
    [told] = prefix.share([found | {"step_ms": 2.0}], {"step_ms": {ON: {"median": 100.0}}})
    assert told["of_step"] == 0.02


def test_a_peer_that_is_not_installed_is_left_out_and_nothing_is_installed(tmp_path: Path) -> None:
    saved: list[dict[str, object]] = []
    record = SimpleNamespace(values={"left_out": {}}, save=lambda **values: saved.append(values))
    here = SimpleNamespace(options=SimpleNamespace(installed=tmp_path), record=record)
    asyncio.run(prefix.beside(here, (None, 0)))  # type: ignore[arg-type]
    assert set(record.values["left_out"]) == set(prefix.PEER_NAMES)
    assert not list(tmp_path.iterdir())


def test_the_page_shows_every_part_and_the_standing_the_targets() -> None:
    taken = {ON: [Taken(1000, 1032, 16512, [0.1] * 2)], OFF: [Taken(1000, 33000, 528000, [1.0] * 2)]}
    found = [
        {"turn": 1, "tokens": 24, "new": 24, "to_compute": 24, "computed": 24, "on_ms": 1.0, "off_ms": 2.0},
    ]
    spread = {"median": 100.0, "p10": 99.0, "p90": 101.0}
    miss = {"model": "qwen3-0.6b", "cell": "decode b32 @256", "step_ms": {ON: spread, OFF: spread}, "target": 1.01}
    miss["ratio"] = {"median": 1.02, "low": 1.0, "high": 1.04}
    sizes = [book_figures(size, [[0.001] * 32], [[0.001] * 32]) for size in QUICK_SIZES]
    result = CONDITIONS | {
        "crowds": [crowd_figures("qwen3-0.6b", 15, 1000, taken)],
        "cells": [],
        "turns": found,
        "talk": prefix.talk_figures(found),
        "misses": [miss],
        "books": prefix.share(sizes, miss),
        "left_out": {"vLLM CPU bf16": "not installed"},
    }
    text = page("prefix.json", result)
    assert "| 1,000 | 1,032 | 16,512 |" in text and "≥ 20 ×" in text and "1.020 (1.000 to 1.040)" in text
    assert "all 1 | 24" in text and "1.00%" in text and "vLLM CPU bf16 was left out: not installed" in text
    standing = {
        target.what: target.row({"prefix": ("f", result)}) for target in TARGETS if target.benchmark == "prefix"
    }
    rows = [row[1:4] for row in standing.values()]
    assert ("32.0 ×", "≥ 20 ×", "yes") in rows and ("1.02", "≤ 1.01", "no") in rows
    assert ("1.00", "≤ 1", "yes") in rows and ("0.010", "≤ 0.05", "yes") in rows
