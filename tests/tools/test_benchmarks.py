"""Every benchmark without a file of its own here: its quick run, and how its figures are made of what it took."""

from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import pytest

from benchmarks import (
    grammars,
    memory,
    quantized,
    streams,
    transfer,
    trips,
)
from benchmarks.cases import DECODE, SHAPES, Cell, with_words, write_checkpoint
from benchmarks.engines.grpc import Client
from benchmarks.engines.inprocess import Inside
from benchmarks.streams import Round
from benchmarks.table import bound_of, rows_of
from ferrum_rpc.building import model_folder
from ferrum_rpc.models.native_linear import NibbleFactory
from ferrum_rpc.scheduler.counts import RunCounts
from ferrum_rpc.scheduler.request import Request
from tests.quantized.gguf_files import write_model
from tests.support.harness import made_or_skip

# --- cases -----------------------------------------------------------------------------------------------------------


def test_a_larger_batch_begins_with_the_prompts_of_a_smaller_one():
    small, large = (Cell(DECODE, batch, 256).prompts(264) for batch in (3, 8))
    assert np.array_equal(large[:3], small) and not np.array_equal(large[0], large[1])


# --- streams, trips ---------------------------------------------------------------------------------------------------


def test_streams_take_every_way_of_a_shape_without_a_tokenizer(quick_run):
    for package in ("smg_grpc_proto", "smg"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    found = quick_run(streams, "--model", "tiny", "--rounds", "1")
    rows = rows_of(found["tables"]["ways"])
    assert [each["way"] for each in rows] == list(streams.WAYS)
    for each in rows:
        assert each["tokens/s"] > 0 and 0 < each["in steps"] <= 1 and each["texts a step"] <= 2
        assert each["fed a token"] == pytest.approx((16 + 7) / 8, rel=0.2), "some text found its prompt in the cache"
        assert min(each[f"{name}, µs"] for name in ("executor", "worker", "router", "caller")) >= 0
        assert (each["first token, ms"] is None) == (each["way"] in {streams.STEPS, streams.RUNS})
    assert all(0 < each["first token, ms"] <= each["p99"] for each in rows[2:])
    assert [each["of the library"]["median"] == 1.0 for each in rows] == [False, False, True, False, False]


def test_lockstep_alone_needs_no_router(quick_run):
    ways = [streams.STEPS, streams.RUNS]
    found = quick_run(
        streams, "--model", "identity", "--texts", "3", "--prompt", "32", "--tokens", "16", "--ways", *ways
    )
    rows = rows_of(found["tables"]["ways"])
    assert [each["way"] for each in rows] == ways and "router" not in found["settings"]
    assert [each["fed a token"] for each in rows] == [round((32 + 15) / 16, 3)] * 2  # none cached
    assert [each["texts a step"] for each in rows] == [3.0] * 2 and "of the library" not in rows[0]


def test_ratios_of_streams_are_of_a_round_and_times_of_a_token():
    def turns(*rates, worker_s=0.0, first=()):
        steps = {"texts a step": 16.0, "fed a token": 1.2, "in steps": 0.9}
        return [Round(rate, rate / 2, steps, list(first), 1000, {"worker": worker_s}) for rate in rates]

    taken = {
        (streams.STEPS, 16): turns(100.0, 300.0),
        (streams.RUNS, 16): turns(200.0, 200.0),
        (streams.STREAMS, 16): turns(100.0, 240.0, first=(0.1, 0.3)),
        (streams.WORKER, 16): turns(90.0, 240.0, worker_s=0.25),
        (streams.ROUTER, 16): turns(50.0, 216.0, worker_s=0.5),
    }
    steps, _, library, worker, router = streams.points(taken, shaped=True)
    assert library["of lockstep"] == {"median": 0.65, "low": 0.5, "high": 0.8}
    assert (library["first token, ms"], library["target"]["value"]) == (200.0, 0.65)
    assert bound_of(library["target"]) == "≥ 0.9"
    assert library["target"]["what"].startswith("16 texts that arrive at any time, of lockstep")
    assert library["of the library"]["median"] == 1.0 and steps["target"] is None is worker["target"]
    assert worker["of the library"] == {"median": 0.95, "low": 0.9, "high": 1.0} and worker["worker, µs"] == 250
    assert router["of the library"]["median"] == router["target"]["value"] == 0.7
    assert bound_of(router["target"]) == "≥ 0.95"
    assert not any(each["target"] and each["target"]["what"] for each in streams.points(taken, shaped=False))
    names = ("whole round, tokens/s", "texts a step", "fed a token", "in steps")
    assert [library[name] for name in names] == [85.0, 16.0, 1.2, 0.9]


def test_no_two_prompts_of_streams_begin_alike():
    work = streams.Work(16, 64, 64, 256)
    numbers = [*range(64), *range(10**6, 10**6 + 256), *range(2 * 10**6, 2 * 10**6 + 256)]
    assert len({tuple(work.text(number)[:8]) for number in numbers}) == len(numbers)


def test_trips_take_every_way_at_every_delay(quick_run):
    found = quick_run(trips, "--model", "identity")
    texts = rows_of(found["tables"]["texts"])
    assert len(texts) == len(trips.WAYS) * len(trips.DELAYS_MS) * len(trips.BATCHES)
    for each in texts:
        assert each["tokens/s"] > 0
        drafts = {trips.SINGLE: False, trips.RUNS: False, trips.LOOKUP: True, trips.DRAFT: True}.get(each["way"])
        assert drafts is None or (each["accepted"] is not None) is drafts
        assert each["tokens a trip"] == 1 if each["way"] == trips.SINGLE else each["tokens a trip"] > 1
    assert len(found["targets"]) == 6 and all(each["value"] for each in found["targets"])


def test_ratios_of_trips_are_of_the_same_round():
    def taken(*seconds):
        request = Request(0, (1,), 8, generated=[0] * 8)
        return [RunCounts([request], sequences=5, decode_tokens=8, wall_seconds=each) for each in seconds]

    single, runs, draft = trips.SINGLE, trips.RUNS, trips.DRAFT
    near = {(single, 0.0, 1): (4.0, 4.0, 2.0), (runs, 0.0, 1): (4.0, 2.0, 1.0), (draft, 0.0, 1): (1.0, 1.0, 1.0)}
    far = {(single, 10.0, 1): (8.0, 4.0, 2.0), (runs, 10.0, 1): (8.0, 4.0, 2.0), (draft, 10.0, 1): (2.0, 2.0, 0.5)}
    found = trips.points({key: taken(*seconds) for key, seconds in (near | far).items()})
    assert [each["of no delay"]["median"] for each in found] == [1.0, 1.0, 1.0, 1.0, 0.5, 0.5]
    assert [each["of single steps"]["median"] for each in found] == [1.0, 2.0, 4.0, 1.0, 1.0, 4.0]
    assert [each["tokens a trip"] for each in found] == [2.0] * 6
    assert [each["target"] and (each["target"]["value"], bound_of(each["target"])) for each in found] == [
        *[None] * 4,
        (0.5, "≥ 0.9"),
        (4.0, "≥ 2.5"),
    ]


def test_the_made_tokenizer_has_a_text_for_every_token_but_the_ends():
    from ferrum_rpc.fronts.folder import FolderTokenizer

    tokenizer = FolderTokenizer(with_words("tiny") / "tokenizer.json")
    tokens = tokenizer.encode("Some text.")
    assert tokenizer.decode(tokens) == "Some text." and len(tokens) == 10
    assert [token for token in range(512) if not tokenizer.decode([token])] == [1, 2]


# --- grammars ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["demo", "tiny"])
def test_grammars_take_every_batch(quick_run, model):
    rows = rows_of(quick_run(grammars, "--model", model, "--batches", "1", "3")["tables"]["steps"])
    assert [each["batch"] for each in rows] == [1, 3]
    assert all(each["by a registered mask, ms"] > 0 and each["by a grammar, ms"] > 0 for each in rows)


def test_ratios_of_grammars_are_of_the_same_round():
    mask, grammar = grammars.MASK, grammars.GRAMMAR
    [found] = grammars.points({8: {mask: [1.0, 4.0, 2.0], grammar: [1.5, 4.0, 4.0]}})
    assert found["ratio"] == {"median": 1.5, "low": 1.0, "high": 2.0} and found["by a grammar, ms"] == 4.0


# --- the cache, memory, ranks -----------------------------------------------------------------------------------------


def test_the_divergence_of_answers_is_that_of_its_definition():
    exact = np.log(np.array([[0.5, 0.25, 0.25], [0.8, 0.1, 0.1]], dtype=np.float32)) + 3
    moved = np.log(np.array([[0.25, 0.5, 0.25], [0.8, 0.1, 0.1]], dtype=np.float32)) - 70
    kl = 0.25 * np.log(2)
    figures = {"KL, mean": float(f"{kl / 2:.3g}"), "largest": float(f"{kl:.3g}"), "same tokens": "50.0%"}
    assert quantized.divergence(exact, moved) == {"rows": 2} | figures


def test_quantized_weights_move_answers_as_much_as_their_bits(quick_run, tmp_path, monkeypatch):
    """A file of a type is made without llama.cpp."""
    gguf, transformers = pytest.importorskip("gguf"), pytest.importorskip("transformers")
    made_or_skip(NibbleFactory)
    demo = transformers.AutoModelForCausalLM.from_pretrained(model_folder("demo"))
    write_model(tmp_path / "demo.gguf", demo, gguf.GGMLQuantizationType.Q8_0)
    monkeypatch.setattr(quantized, "files", lambda *_: {"Q8_0": str(tmp_path / "demo.gguf")})
    result = quick_run(quantized)
    cells = {each["side"]: each for each in rows_of(result["tables"]["cells"]) if each["ours is, ×"]}
    assert [*cells] == [quantized.EXACT]
    moved = {each["weights"]: each["KL, mean"] for each in rows_of(result["tables"]["answers"])}
    cache, int8, int4, stored, expanded = moved.values()
    assert [*moved] == [
        *("bfloat16, int8 cache", "--quantize int8", "--quantize int4", "Q8_0, as stored", "Q8_0, expanded")
    ]
    assert 0 < expanded < int8 < stored < 0.3 * int4 and int4 < 0.003 and 0 < cache < int4
    gained, held, of_q8, of_q4 = (each["value"] for each in result["targets"])
    assert gained == cells[quantized.EXACT]["ours is, ×"]["median"]
    assert 0.9 < held < 1.05 and 0 < of_q8 < 1 and of_q4 is None


def test_files_of_ggufs_types_need_the_quantizer_of_a_peer(tmp_path, monkeypatch):
    monkeypatch.setattr(quantized, "ENVIRONMENTS", tmp_path)
    assert quantized.files(tmp_path, ["Q8_0"], tmp_path / "to") == {} and not list(tmp_path.iterdir())


def test_every_part_of_a_plan_is_measured(tmp_path):
    if not Path("/proc/self/smaps_rollup").exists():
        pytest.skip("this kernel does not tell what is resident")
    found = memory.measure(write_checkpoint(tmp_path, SHAPES["tiny"]), "float32", 64, 2)
    assert [each["of"] for each in found] == ["weights", "cache", "largest step"]
    assert all(each["planned, MiB"] > 0 for each in found)


def test_a_sequence_is_moved_at_every_size_by_every_engine(quick_run):
    rows = rows_of(quick_run(transfer, "--rounds", "1")["tables"]["moves"])
    assert [(each["cache"], each["engine"]) for each in rows] == [
        (shape, engine) for shape in transfer.SHAPES for engine in transfer.ENGINES
    ]
    small, *_, large = rows
    assert small["moved in, ms"] > 0 and small["MB"] < large["MB"] == round(64 * 28 * 2 * 8 * 128 * 4 / 1e6, 1)
    assert all(each["during a move"] > 0 and each["decode p99, ms"] > 0 for each in rows)


async def test_callers_of_a_server_compute_what_one_does(tmp_path, forked_servers):
    folder = str(write_checkpoint(tmp_path / "tiny", SHAPES["tiny"]))
    one, two = Cell(DECODE, 4, 8, most=4), Cell(DECODE, 4, 8, most=4, callers=2)
    assert [one.name, two.name] == ["decode b4 @8", "decode b2+b2 @8"]
    async with AsyncExitStack() as stack:
        inside = await stack.enter_async_context(Inside.open(folder, [one], 1))
        served = await stack.enter_async_context(Client.open(folder, [one, two], 1))
        rounds = []
        for player, cell in ((inside, one), (served, one), (served, two)):
            await player.prepare(cell)
            rounds.append(await player.round(cell, 0, 3))
    assert len(rounds[0].last) == 4 and all(each.last == rounds[0].last for each in rounds)
    assert all(len(each.step_s) == 3 and min(each.step_s) > 0 for each in rounds)
