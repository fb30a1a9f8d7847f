"""Adapters as operators and schedulers meet them: a server process, its engine in another, the commands, a restart."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

import pytest

from ferrum_rpc.client import Capability, ExecutorClient
from ferrum_rpc.errors import AdapterInUse, AdapterUnknown, InstanceMismatch
from ferrum_rpc.models.spec import ModelSpec
from tests.support.adapters import Weights, make_adapter
from tests.support.commands import answer
from tests.support.process import serving

MODEL = "demo-draft"
PROMPT = list(b"In the beginning")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One adapter that turns the demo model's words."""
    made = tmp_path_factory.mktemp("adapters")
    config = json.loads((resources.files("ferrum_rpc_demo") / MODEL / "config.json").read_text())
    make_adapter(made / "words", Weights(ModelSpec.from_config(config)), size=2.0)
    return made


async def text(client: ExecutorClient, adapter: str = "") -> list[int]:
    async with client.sequence(adapter=adapter) as sequence:
        return [token async for token in sequence.generate(PROMPT, max_tokens=12, stop=())]


async def test_an_operator_loads_one(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--adapter-dir", str(folder), "--engine", "process", "--block-size", "4")
    async with (
        serving(*flags, model=MODEL, kv_blocks=128) as server,
        ExecutorClient(server.target, session=True) as client,
    ):
        assert Capability.ADAPTERS in (await client.info()).capabilities
        assert await answer(capsys, server.target, "adapters") == []
        with pytest.raises(AdapterUnknown):
            await text(client, "words")
        [info] = await answer(capsys, server.target, "adapters", "--load", "words")
        assert (info["name"], info["rank"], info["sequences"]) == ("words", 4, 0)
        assert await text(client, "words") != await text(client)
        sequence = client.sequence(adapter="words")
        await sequence.prefill(PROMPT)
        with pytest.raises(AdapterInUse) as refused:
            await answer(capsys, server.target, "adapters", "--unload", "words")
        assert refused.value.number("sequences") == 1


async def test_a_lost_sequence_is_not_rebuilt_without_its_adapter(folder: Path) -> None:
    """It would go on with other words than it began with."""
    flags = ("--adapter-dir", str(folder))
    async with serving(*flags, model=MODEL, kv_blocks=128) as server:
        port, target = server.port, server.target
        async with ExecutorClient(target) as client:
            await client.load_adapter("words")
            kept = client.sequence(adapter="words", rebuild=True)
            first = await kept.prefill(PROMPT)
            await server.kill()
            async with serving(*flags, model=MODEL, kv_blocks=128, port=port):
                with pytest.raises((AdapterUnknown, InstanceMismatch)):
                    await kept.decode(first.token)
                await client.load_adapter("words")
                assert (await kept.decode(first.token)).length == len(PROMPT) + 1


async def test_ranks_load_it_and_sequences_that_have_it_go_to_them(folder: Path) -> None:
    """In two processes, as in one: texts, fingerprints, and what may not be unloaded."""
    flags = ("--adapter-dir", str(folder), "--dtype", "float32")
    async with (
        serving(*flags, model=MODEL, kv_blocks=128) as one,
        serving(*flags, "--tensor-parallel", "2", model=MODEL, kv_blocks=128) as two,
        ExecutorClient(one.target) as of_one,
        ExecutorClient(two.target) as of_two,
    ):
        loaded = [await client.load_adapter("words") for client in (of_one, of_two)]
        assert loaded[0].fingerprint == loaded[1].fingerprint and loaded[1].nbytes < loaded[0].nbytes
        texts = [[await text(client, each) for each in ("words", "")] for client in (of_one, of_two)]
        assert texts[0] == texts[1] and texts[0][0] != texts[0][1]
        kept, moved = of_one.sequence(adapter="words"), of_two.sequence()
        first = await kept.prefill(PROMPT)
        await kept.move_to(moved)
        assert first.token == texts[0][0][0] and (await moved.decode(first.token)).token == texts[0][0][1]
        with pytest.raises(AdapterInUse):
            await of_two.unload_adapter("words")
        await moved.release()
        await of_two.unload_adapter("words")
        with pytest.raises(AdapterUnknown):
            await text(of_two, "words")
        assert (await of_two.load_adapter("words")).fingerprint == loaded[0].fingerprint
        assert await text(of_two, "words") == texts[0][0]
