"""A model whose layers all have a window through the client, against a real executor: rows are those of `transformers`
behind a truncation to any length, on a fork, and after a move; and memory is that of a window."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch

from ferrum_rpc.client import CacheMode, ExecutorClient, FullLogits, OutputSpec, Positions
from ferrum_rpc.config import ModelSettings
from ferrum_rpc.errors import QuotaExceeded
from ferrum_rpc.wire.items import handle_to_proto
from tests.support.checkpoints import make_checkpoint, make_model
from tests.support.clients import BOTH_WAYS
from tests.support.serving import Served, serve_model
from tests.support.transfers import as_import, exported, header, imported

SHAPE = {"sliding_window": 10}
BLOCK, FREE = 4, 32
LAST = OutputSpec(Positions.LAST, FullLogits())
PROMPT = np.random.default_rng(3).integers(0, 300, 200).tolist()


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelSettings:
    folder = make_checkpoint(tmp_path_factory.mktemp("mistral"), "mistral", **SHAPE)
    cache: dict[str, Any] = {"block_size": BLOCK, "kv_blocks": 200}
    return ModelSettings(str(folder), device="cpu", dtype="float32", **cache)


@pytest_asyncio.fixture
async def served(config: ModelSettings, tmp_path: Path) -> AsyncIterator[Served]:
    async with serve_model(config, park_dir=tmp_path / "parked") as served:
        yield served


def near(rows: np.ndarray, history: list[int]) -> bool:
    """Whether ``rows`` are the last ones of ``history``."""
    with torch.inference_mode():
        wanted = make_model("mistral", **SHAPE)(torch.tensor([history])).logits[0].float().numpy()
    return bool(np.abs(rows - wanted[len(history) - len(rows) :]).max() <= 1e-4 * wanted.std())


@BOTH_WAYS
async def test_a_sequence_is_cut_and_fed_as_any_other(served: Served, session: bool) -> None:
    async with ExecutorClient(served.target, session=session) as client:
        info = await client.info()
        assert (info.limits.free_truncation_tokens, info.limits.checkpoint_tokens) == (FREE, 0)
        sequence, history = client.sequence(cache_mode=CacheMode.BYPASS), list(PROMPT)
        answer = await sequence.prefill(history, LAST)
        assert near(answer.logits, history) and answer.recomputed_tokens == 0
        held = answer.pressure.total_blocks - answer.pressure.free_blocks
        assert held <= (10 - 1 + FREE) // BLOCK + 2 < len(PROMPT) // BLOCK
        for length, again in ((len(PROMPT) - FREE, 0), (60, 60), (5, 5)):
            await sequence.truncate(length)
            history = [*history[:length], 7]
            answer = await sequence.decode(7, LAST)
            assert near(answer.logits, history) and answer.recomputed_tokens == again


async def test_a_caller_is_charged_for_a_window_and_a_step(config: ModelSettings) -> None:
    """And for what was promised, which counts from the least length since."""
    most = (10 - 1 + FREE + 16 + BLOCK - 2) // BLOCK + 1
    async with (
        serve_model(config, max_blocks_per_caller=most) as served,
        ExecutorClient(served.target) as client,
    ):
        sequence = client.sequence(cache_mode=CacheMode.BYPASS)
        for first in range(0, 192, 16):
            await sequence.prefill(PROMPT[first : first + 16], LAST)
        with pytest.raises(QuotaExceeded):
            await sequence.prefill(PROMPT[:21], LAST)
        await sequence.reserve(16)
        with pytest.raises(QuotaExceeded):
            await sequence.reserve(21)
        await sequence.truncate(100)
        await sequence.prefill(PROMPT[100:116], LAST)
        await sequence.truncate(3)
        answer = await sequence.decode(9, LAST)
        assert near(answer.logits, [*PROMPT[:3], 9])
        await sequence.release()
        await served.check()


async def test_what_the_second_tier_has_is_not_fed_again(config: ModelSettings, tmp_path: Path) -> None:
    """Of a sequence that goes back, in its forward or before, and of forks."""
    async with (
        serve_model(replace(config, kv_blocks=60, kv_tier_dir=tmp_path)) as served,
        ExecutorClient(served.target) as client,
    ):
        sequence, other = client.sequence(), client.sequence(cache_mode=CacheMode.BYPASS)
        await sequence.prefill(PROMPT, LAST)
        await other.prefill(np.random.default_rng(1).integers(0, 300, 180).tolist(), LAST)
        await client.release([other])
        [child] = await sequence.fork(at=100)
        for each, at in ((child, 100), (sequence.child(at=60), 60)):
            answer = await each.decode(9, LAST)
            assert answer.recomputed_tokens == 0 and near(answer.logits, [*PROMPT[:at], 9])
        await sequence.truncate(20)
        answer = await sequence.decode(9, LAST)
        assert answer.recomputed_tokens == 0 and near(answer.logits, [*PROMPT[:20], 9])
        await served.check()


async def test_a_sequence_moves_and_is_parked_with_its_window(
    served: Served, config: ModelSettings, tmp_path: Path
) -> None:
    """Also behind a truncation whose tokens were not fed again yet, and to blocks of another size."""
    async with (
        serve_model(replace(config, block_size=8)) as elsewhere,
        ExecutorClient(served.target) as client,
        ExecutorClient(elsewhere.target) as there,
    ):
        sequence = client.sequence(cache_mode=CacheMode.BYPASS)
        await sequence.prefill(PROMPT, LAST)
        for length in (len(PROMPT), 120):
            await sequence.truncate(length)
            moved, filed = there.sequence(), client.sequence(cache_mode=CacheMode.BYPASS)
            [stays] = await sequence.fork()
            await stays.export_to(tmp_path / f"file {length}")
            await filed.import_from(tmp_path / f"file {length}")
            await stays.move_to(moved)
            await sequence.park()
            for each in (moved, filed, sequence):
                answer = await each.decode(9, LAST)
                assert near(answer.logits, [*PROMPT[:length], 9])
            await sequence.truncate(length)
            await client.release([filed])
            await there.release([moved])


async def test_an_unfinished_import_counts_the_blocks_of_its_window(served: Served) -> None:
    async with ExecutorClient(served.target) as client:
        sequence = client.sequence(cache_mode=CacheMode.BYPASS)
        await sequence.prefill(PROMPT, LAST)
        assert sequence.handle is not None
        frames = await exported(served, handle_to_proto(sequence.handle))
        await client.release([sequence])
        await imported(served, header(frames[0].layout), *as_import(frames)[:-1])
        blocks, [caller] = (await client.status()).blocks, (await client.activity()).callers
        assert blocks.unfinished_imports == 1
        assert blocks.used <= blocks.importing == caller.blocks <= blocks.used + 1 < len(PROMPT) // BLOCK


async def test_what_is_free_stays_free_on_the_way(served: Served, config: ModelSettings) -> None:
    """Also behind a truncation within the last step, whose exporter has less of the window than it would keep."""
    async with (
        serve_model(replace(config, block_size=2)) as elsewhere,
        ExecutorClient(served.target) as client,
        ExecutorClient(elsewhere.target) as there,
    ):
        for cut in (0, 9):
            sequence, moved = client.sequence(cache_mode=CacheMode.BYPASS), there.sequence()
            await sequence.prefill(PROMPT[:-FREE], LAST)
            await sequence.prefill(PROMPT[-FREE:], LAST)
            await sequence.truncate(len(PROMPT) - cut)
            [stays] = await sequence.fork()
            await stays.move_to(moved)
            await sequence.park()
            for each in (moved, sequence):
                await each.truncate(len(PROMPT) - FREE)
                answer = await each.decode(9, LAST)
                assert near(answer.logits, [*PROMPT[:-FREE], 9])
                assert answer.recomputed_tokens == 0
