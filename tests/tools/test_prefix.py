"""`benchmarks.prefix` counts what is computed, sets sides beside each other by rounds, and its page shows it."""

import asyncio
from types import SimpleNamespace

from benchmarks import prefix
from benchmarks.cases import DECODE, PREFILL, SHAPES, Cell
from benchmarks.limits import roof
from benchmarks.prefix import OFF, ON, Taken, crowd, crowd_rows
from benchmarks.table import bound_of
from ferrum_rpc.client import ExecutorClient
from ferrum_rpc.models.spec import ModelSpec
from tests.support.serving import serve_identity

PROMPT = Cell(PREFILL, 1, 40, shared=32)


def test_prompts_of_a_cell_share_their_beginning_in_every_round_and_nothing_else():
    first, second = PROMPT.fresh(1000, 1, 2), PROMPT.fresh(1000, 2, 2)
    assert len({row[:32].tobytes() for row in (*first, *second)}) == 1
    assert len({row[32:].tobytes() for row in (*first, *second)}) == 6
    decode = Cell(DECODE, 2, 8)
    assert (Cell(DECODE, 2, 8, draw=1).fed(1000, 4) != decode.fed(1000, 4)).any()


def test_the_limit_of_a_prompt_that_was_seen_is_that_of_its_rest():
    spec, limits = ModelSpec.from_config(SHAPES["qwen3-0.6b"]), {"read_gb_s": 30.0, "bf16_tflops": 2.0}
    seen, whole = (roof(Cell(PREFILL, 1, 528, shared=shared), spec, limits) for shared in (512, 0))
    assert 30 < whole["step_gflop"] / seen["step_gflop"] < 33
    assert whole["bound_by"] == "matrix products" and seen["bound_by"] == "memory"


async def test_a_crowd_computes_and_holds_what_it_shares_once():
    prompts = PROMPT.fresh(250, 0, 11).tolist()
    async with (
        serve_identity(block_size=16, kv_blocks=128) as served,
        ExecutorClient(served.target, session=True) as client,
    ):
        taken = await crowd(client, prompts, 5, 2)
        assert (await client.status()).blocks.used == 0
    on, off = ((found.sequences, found.blocks, found.computed) for found in (taken[ON][0], taken[OFF][0]))
    assert (on, off) == ((12, 2 + 12, 32 + 12 * 8), (12, 36, 480))
    assert taken[ON][1].computed == taken[ON][0].computed, "a round finds what one before it left"
    assert [len(found.seconds) for found in taken[ON]] == [4, 4]


def test_ratios_of_a_crowd_are_of_the_same_round():
    taken = {
        ON: [Taken(1000, 1032, 16512, [1.0] + [0.5] * 2), Taken(1000, 1032, 16512, [0.5] * 4)],
        OFF: [Taken(1000, 33000, 528000, [4.0, 4.0]), Taken(1000, 33000, 528000, [5.0, 5.0])],
    }
    on, off = crowd_rows("qwen3-0.6b", 15, taken)
    assert [each["seconds"] for each in (on, off)] == [2.0, 9.0]
    assert (on["blocks without, ×"], on["computed without, ×"]) == (31.98, 31.98)
    assert on["target"]["value"] == 31.98 and bound_of(on["target"]) == "≥ 20 ×"
    assert on["target"]["what"].startswith("1,000 prompts that share 512 tokens")
    assert on["seconds without, ×"] == {"median": 4.5, "low": 4.0, "high": 5.0}
    assert on["first call, ms"] == 750 and on["a call, ms"]["median"] == 500


async def test_a_miss_is_set_beside_the_same_step_without_the_cache():
    async with (
        serve_identity(block_size=16, kv_blocks=256) as served,
        ExecutorClient(served.target, session=True) as client,
    ):
        for cell in (Cell(PREFILL, 1, 24, most=4), Cell(DECODE, 2, 16, most=4)):
            found = await prefix.miss("identity", (client, 250), cell, 1, 0.001)
            assert found["step"] == cell.name and len(found["on in off"]["pairs"]) == 1
            assert found["target"]["value"] == found["on in off"]["median"] and found["target"]["bound"] == 1.01
        status = await client.status()
    assert status.counters.searched_tokens and not status.counters.cached_tokens
    assert status.blocks.used == 0


def test_a_peer_that_is_not_installed_is_left_out_and_nothing_is_installed(tmp_path, monkeypatch):
    monkeypatch.setattr(prefix.peers, "ENVIRONMENTS", tmp_path)
    left_out: dict[str, str] = {}
    here = SimpleNamespace(leave_out=left_out.__setitem__)
    asyncio.run(prefix.beside(here, (None, 0), prefix.SEEN))  # type: ignore[arg-type]
    assert set(left_out) == set(prefix.PEER_NAMES)
    assert not list(tmp_path.iterdir())
