"""Adapters over the wire: loaded by name, bound at creation, inherited, kept apart, and gone when nobody has them."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch

from ferrum_rpc import cli
from ferrum_rpc.client import Accept, ExecutorClient, FullLogits, OutputSpec, PrefixIndex
from ferrum_rpc.config import ModelSettings
from ferrum_rpc.engine.assembly.choose import choose
from ferrum_rpc.errors import InvalidRequest, NotSupported, Reason
from ferrum_rpc.executor.v1 import executor_control_pb2 as control_pb
from ferrum_rpc.executor.v1 import forward_pb2, info_pb2, kv_transfer_pb2
from ferrum_rpc.wire.rows import rows_from_proto
from tests.support.adapters import make_adapter, merge
from tests.support.checkpoints import make_checkpoint, make_model
from tests.support.harness import reference_logits, worst
from tests.support.hf_families import make_family, make_family_checkpoint
from tests.support.serving import Gate, Served, serve_model
from tests.support.transfers import brought, chunks_of, exported, header, imported, row
from tests.support.wiring import full, item, prefill, refused, until

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7]
ONE = forward_pb2.CreateOptions(adapter="one")
FAMILY = {"seed": 3, "vocab_size": 300}


class World:
    """A model's folder, an adapter folder, and their oracle."""

    def __init__(self, folder: Path) -> None:
        self.model, self.adapters = folder / "model", folder / "adapters"
        make_checkpoint(self.model, "qwen3", **FAMILY)
        for seed, (name, options) in enumerate(
            {"one": {}, "two": {"r": 8, "use_rslora": True}, "three": {"targets": ("q_proj", "down_proj")}}.items()
        ):
            make_adapter(self.adapters / name, make_model("qwen3", **FAMILY), seed=seed, **options)

    def truth(self, name: str, tokens: list[int] = PROMPT) -> torch.Tensor:
        """Logits of the last of the tokens, float64 [V]. ``name``: of the adapter, or empty."""
        model = make_model("qwen3", **FAMILY).double()
        if name:
            merge(model, self.adapters / name)
        return reference_logits(model, tokens, torch.float64)[-1]

    def settings(self, **options: Any) -> ModelSettings:
        return ModelSettings(
            path=str(self.model),
            device="cpu",
            **{"kv_blocks": 256, "block_size": 4, "adapter_dir": self.adapters, "max_adapter_rank": 16, **options},
        )

    @asynccontextmanager
    async def serving(
        self, *, stage: Any = None, park_dir: Path | None = None, **options: Any
    ) -> AsyncIterator[Served]:
        config = self.settings(**options)
        async with serve_model(config, stage=stage, park_dir=park_dir, max_adapters=config.max_adapters) as served:
            yield served


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("adapters"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(world: World, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    async with world.serving(park_dir=tmp_path_factory.mktemp("parked")) as served:
        yield served


@pytest_asyncio.fixture(loop_scope="module")
async def served(shared: Served) -> AsyncIterator[Served]:
    """With no sequences, no adapters, and an empty prefix cache."""
    yield shared
    await shared.reset()
    for each in await listed(shared):
        assert each.sequences == 0
        await unload(shared, each.name)
    await shared.check()


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def load(served: Served, name: str) -> control_pb.AdapterInfo:
    return (await served.control.LoadAdapter(control_pb.LoadAdapterRequest(name=name))).adapter


async def unload(served: Served, name: str) -> None:
    await served.control.UnloadAdapter(control_pb.UnloadAdapterRequest(name=name))


async def listed(served: Served) -> list[control_pb.AdapterInfo]:
    return list((await served.control.ListAdapters(control_pb.ListAdaptersRequest())).adapters)


async def rows(served: Served, *names: str, tokens: list[int] = PROMPT) -> list[np.ndarray]:
    """The last logits of one prompt for sequences of these adapters, all in one step, without the prefix cache."""
    mode = forward_pb2.CACHE_MODE_BYPASS
    items = [
        item(tokens, create=forward_pb2.CreateOptions(adapter=each, cache_mode=mode), output=full()) for each in names
    ]
    answer = await served.unified(*items)
    assert answer.timing.step_sequences == len(names)
    [block] = rows_from_proto(answer.row_blocks)
    found = [block["logits"][each.output.rows.first] for each in answer.results]
    for each in answer.results:
        await served.release(each.output.handle)
    return found


def is_of(row: np.ndarray, truth: torch.Tensor) -> bool:
    return worst(torch.from_numpy(row.copy()), truth) <= 1e-4


# --- forward ----------------------------------------------------------------------------------------------------------


async def test_many_adapters_and_the_base_in_one_step(served: Served, world: World) -> None:
    names = ["one", "", "two", "one", "three", ""]
    for each in {*names} - {""}:
        await load(served, each)
    for name, found in zip(names, await rows(served, *names), strict=True):
        assert is_of(found, world.truth(name))
    for name in ("two", ""):
        [alone] = await rows(served, name)
        assert is_of(alone, world.truth(name))


async def test_it_is_that_of_the_sequence_for_its_life(served: Served, world: World) -> None:
    """Decode, rollback, verify, runs, forks of both kinds, and the followers of a run."""
    await load(served, "one")
    async with ExecutorClient(served.target, session=True) as client, client.sequence(adapter="one") as sequence:
        await sequence.prefill(PROMPT[:5])
        await sequence.prefill(PROMPT[5:-1])
        answer = await sequence.decode(PROMPT[-1], OutputSpec(kind=FullLogits()))
        assert is_of(answer.logits[0], world.truth("one"))
        chosen = [token async for token in sequence.generate([1], max_tokens=5)]
        whole = [*PROMPT, 1]
        for token in chosen:
            assert token == int(world.truth("one", whole).argmax())
            whole.append(token)
        await sequence.truncate(len(PROMPT))
        answer = await sequence.verify([1, *chosen[:3], 0], Accept())
        assert answer.tokens.tolist() == chosen[:4]
        await sequence.truncate(len(PROMPT) - 1)
        [child] = await sequence.fork(1)
        async with child:
            for each in (child, sequence):
                answer = await each.decode(PROMPT[-1], OutputSpec(kind=FullLogits()))
                assert is_of(answer.logits[0], world.truth("one"))
            assert [each.adapter for each in await client.list_sequences()] == ["one", "one"]
            [info] = await client.list_adapters()
            assert (info.name, info.rank, info.sequences) == ("one", 4, 2)
        handle = await prefill(served, PROMPT[:-1], create=ONE)
        forked = item([PROMPT[-1]], handle, create=forward_pb2.CreateOptions(fork=True), output=full())
        answer = await served.unified(forked)
        [block] = rows_from_proto(answer.row_blocks)
        assert is_of(block["logits"][0], world.truth("one"))
        named = item([1], handle, create=forward_pb2.CreateOptions(fork=True, adapter="one"))
        answer = await served.unified(named)
        assert "INVALID_REQUEST" in str(answer.results[0].error)


# --- the prefix cache -------------------------------------------------------------------------------------------------


async def cached(client: ExecutorClient, adapter: str = "", **options: Any) -> int:
    async with client.sequence(adapter=adapter, **options) as sequence:
        return (await sequence.prefill(PROMPT)).cached_tokens


async def test_cached_blocks_are_of_one_adapter(served: Served, world: World, tmp_path: Path) -> None:
    """Also of one that has another's name, and not of none. The same one that comes again finds them."""
    async with ExecutorClient(served.target) as client:
        first = await client.load_adapter("one")
        await client.load_adapter("two")
        assert [await cached(client, each) for each in ("", "one", "two", "", "one", "two")] == [0, 0, 0, 12, 12, 12]
        assert await cached(client, "one", cache_salt=b"s") == 0
        await client.unload_adapter("one")
        again = await client.load_adapter("one")
        assert again.fingerprint == first.fingerprint and await cached(client, "one") == 12
        await client.unload_adapter("one")
        kept = shutil.move(world.adapters / "one", tmp_path / "one")
        try:
            shutil.copytree(world.adapters / "three", world.adapters / "one")
            other = await client.load_adapter("one")
            assert other.fingerprint != first.fingerprint and await cached(client, "one") == 0
            [found] = await rows(served, "one")
            assert is_of(found, world.truth("three"))
        finally:
            shutil.rmtree(world.adapters / "one")
            shutil.move(kept, world.adapters / "one")


async def test_a_router_can_compute_their_hashes_and_events_tell_the_adapter(served: Served) -> None:
    async with ExecutorClient(served.target) as client:
        info = await client.load_adapter("one")
        await cached(client, "one")
        watch = client.watch_prefixes()
        index = PrefixIndex.of(await client.info())
        index.apply(await anext(watch))
        await watch.aclose()
        assert index.match(PROMPT, adapter=info) == 12 and index.match(PROMPT) == 0
        call = served.transfer.WatchKvEvents(kv_transfer_pb2.WatchKvEventsRequest())
        events = (await call.read()).events
        assert {each.stored.adapter for each in events} == {"one"}
        await cached(client)
        assert {each.stored.adapter for each in (await call.read()).events} == {""}
        call.cancel()


# --- moving -----------------------------------------------------------------------------------------------------------


async def test_a_moved_sequence_needs_the_adapter_where_it_goes(served: Served, world: World, tmp_path: Path) -> None:
    info = await load(served, "one")
    handle = await prefill(served, PROMPT[:-1], create=ONE)
    frames = await exported(served, handle)
    layout = frames[0].layout
    assert (layout.adapter, layout.model_fingerprint) == ("one", info.fingerprint)
    others = tmp_path / "adapters"
    async with world.serving(adapter_dir=others) if not others.mkdir() else None as target:
        error = await refused(imported(target, header(layout)), Reason.ADAPTER_UNKNOWN)
        assert error.field == "header.layout.adapter"
        shutil.copytree(world.adapters / "two", others / "one")
        await load(target, "one")
        error = await refused(imported(target, header(layout)), Reason.LAYOUT_MISMATCH)
        assert error.metadata["differs"] == "model_fingerprint"
        await unload(target, "one")
        shutil.rmtree(others / "one")
        shutil.copytree(world.adapters / "one", others / "one")
        await load(target, "one")
        await refused(imported(target, header(layout, adapter="two")), Reason.INVALID_REQUEST)
        for name in ("", "one"):
            answer = await imported(target, header(layout, f"named {name}", adapter=name), *brought(chunks_of(frames)))
            logits = np.frombuffer(await row(target, answer.handle, PROMPT[-1]), np.float32)
            assert is_of(logits, world.truth("one"))
        [there] = await listed(target)
        assert there.sequences == 2
        await target.check()


async def test_a_parked_sequence_keeps_it(served: Served, world: World) -> None:
    await load(served, "two")
    handle = await prefill(served, PROMPT[:-1], create=forward_pb2.CreateOptions(adapter="two"))
    await served.park(handle)
    assert (await refused(unload(served, "two"), Reason.ADAPTER_IN_USE)).number("sequences") == 1
    await served.reset()  # of cached blocks: it comes back from its file
    assert [each.sequences for each in await listed(served)] == [0]
    handle = await prefill(served, PROMPT[:-1], create=forward_pb2.CreateOptions(adapter="two"))
    await served.park(handle)
    assert is_of(np.frombuffer(await row(served, handle, PROMPT[-1]), np.float32), world.truth("two"))


# --- their lives ------------------------------------------------------------------------------------------------------


async def test_it_stays_while_sequences_have_it(served: Served) -> None:
    await load(served, "one")
    handles = [await prefill(served, PROMPT, create=ONE) for _ in range(3)]
    handles += (await served.fork(handles[0], count=2)).handles
    for left in range(len(handles), 0, -1):
        error = await refused(unload(served, "one"), Reason.ADAPTER_IN_USE)
        assert error.number("sequences") == left and ("1 sequence and" in error.message) == (left == 1)
        await served.release(handles.pop())
    await unload(served, "one")
    assert await listed(served) == []
    error = await refused(served.prefill(PROMPT, create=ONE), Reason.ADAPTER_UNKNOWN)
    assert (error.field, error.message) == ("create.adapter", "no adapter 'one' is loaded")
    for loaded in ("none is loaded", "2 loaded (three, two)"):  # an operator is told which
        call = unload(served, "one")
        assert (await refused(call, Reason.ADAPTER_UNKNOWN)).message == f"no adapter 'one' is loaded: {loaded}"
        for name in ("two", "three"):
            await load(served, name)


async def test_loading_twice_is_loading_once(served: Served) -> None:
    first, second = await asyncio.gather(load(served, "one"), load(served, "one"))
    assert first == second == await load(served, "one")
    assert await listed(served) == [first]


async def test_steps_go_on_while_one_is_loaded(world: World) -> None:
    """Its pieces are read between steps, and the event loop answers meanwhile."""
    gate = Gate("adapter")
    async with world.serving(stage=gate) as served:
        loading = await gate.hold(load(served, "one"))
        waiting = asyncio.create_task(prefill(served, PROMPT))
        status = await served.status()
        assert status.state == info_pb2.EXECUTOR_STATE_SERVING and await listed(served) == []
        await refused(served.prefill(PROMPT, create={"adapter": "one"}), Reason.ADAPTER_UNKNOWN)
        gate.open()
        await waiting
        assert (await loading).name == "one"
        async with gate.shut():
            gone = asyncio.create_task(load(served, "two"))
            await gate.held()
            gone.cancel()  # its caller: it is loaded all the same
        await until(lambda: len(served.server.state.adapters) == 2)


async def test_what_fails_on_its_way_leaves_nothing(world: World) -> None:
    pieces = 0

    def stage(name: str) -> None:
        nonlocal pieces
        pieces += name == "adapter"
        if pieces == 2:
            raise RuntimeError("a disk")

    async with world.serving(stage=stage, max_adapters=2) as served:
        await refused(load(served, "one"), Reason.STEP_FAILED)
        pieces = 10
        for name in ("one", "two"):
            await load(served, name)
        assert (await refused(load(served, "three"), Reason.SEQUENCES_EXHAUSTED)).number("max_adapters") == 2
        error = await refused(load(served, "nowhere"), Reason.ADAPTER_UNKNOWN)  # however many are loaded
        assert "'nowhere'" in error.message
        assert len(served.runner.compute.loras) == 2


async def test_what_they_take_of_the_memory_is_bounded(world: World) -> None:
    async with world.serving(adapter_memory=100_000) as served:
        taken = (await load(served, "one")).bytes
        error = await refused(load(served, "two"), Reason.SEQUENCES_EXHAUSTED)
        assert (error.number("adapter_memory"), error.number("held_bytes")) == (100_000, taken)
        await unload(served, "one")
        assert (await load(served, "two")).bytes <= 100_000


# --- what is offered --------------------------------------------------------------------------------------------------


async def test_capability_and_metrics(served: Served) -> None:
    answer = await served.info()
    assert info_pb2.CAPABILITY_ADAPTERS in answer.capabilities
    before = served.server.state.counters.adapter_tokens
    await load(served, "one")
    await rows(served, "one", "", tokens=PROMPT[:4])
    assert served.server.state.counters.adapter_tokens == before + 4


async def test_experts_are_not_adapted_and_doctor_reports_that_before(tmp_path, capsys):
    """As PEFT writes an adapter of w1, w2 and w3 since transformers joins experts."""
    folder, adapters = make_family_checkpoint(tmp_path / "model", "mixtral"), tmp_path / "adapters"
    attention = ("q_proj", "v_proj")
    make_adapter(adapters / "good", make_family("mixtral"), targets=attention)
    rewritten = {"target_parameters": ["down_proj", "gate_up_proj"], "rank_pattern": {r".*\.gate_up_proj": 8}}
    make_adapter(adapters / "experts", make_family("mixtral"), targets=attention, **rewritten)
    with pytest.raises(SystemExit) as done:
        cli.main(["doctor", str(folder), "--adapter-dir", str(adapters), "--device=cpu", "--kv-blocks=16", "--json"])
    facts = json.loads(capsys.readouterr().out)
    assert done.value.code == 0
    assert facts["adapters"]["good"] == "rank 4, of 4 modules"
    config = ModelSettings(str(folder), device="cpu", kv_blocks=16, adapter_dir=adapters)
    async with serve_model(config, max_adapters=4) as served:
        error = await refused(load(served, "experts"), Reason.NOT_SUPPORTED)
        assert "experts are not adapted: down_proj, gate_up_proj" in error.message
        assert facts["adapters"]["experts"] == f"refused: {error.message}"
        assert (await load(served, "good")).rank == 4


async def test_a_model_without_products_takes_none(tmp_path: Path) -> None:
    """And that is known before a weight is read."""
    for model in ("identity", str(make_family_checkpoint(tmp_path, "gpt2"))):
        with pytest.raises(NotSupported, match=r"takes no adapters.* without --adapter-dir"):
            choose(ModelSettings(path=model, device="cpu", adapter_dir=tmp_path))
        with pytest.raises(InvalidRequest, match="must be a folder"):
            choose(ModelSettings(path=model, device="cpu", adapter_dir=tmp_path / "none"))
