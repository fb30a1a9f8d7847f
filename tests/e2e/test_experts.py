"""What stands above a model, on gpt-oss: it has sinks, windows in some layers, and experts with biases."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from ferrum_rpc.client import CacheMode, ExecutorClient, FullLogits, Sequence
from ferrum_rpc.config import ModelSettings
from tests.support.checkpoints import make_checkpoint
from tests.support.serving import Served, serve_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

SHAPE = {"hidden_size": 128, "intermediate_size": 64, "head_dim": 64}
PROMPT = [*range(20, 51)]
FOLLOWING = [7, 90, 3, 3, 250]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def two(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Served, Served]]:
    """Two executors of one model; both have our kernels, or neither."""
    folder = make_checkpoint(tmp_path_factory.mktemp("model"), "gpt_oss", **SHAPE)
    config = ModelSettings(str(folder), device="cpu", dtype="bfloat16", kv_blocks=64, block_size=4)
    async with serve_model(config) as one, serve_model(config) as other:
        yield one, other


@pytest_asyncio.fixture(loop_scope="module")
async def clients(two: tuple[Served, Served]) -> AsyncIterator[tuple[ExecutorClient, ExecutorClient]]:
    async with ExecutorClient(two[0].target) as one, ExecutorClient(two[1].target) as other:
        if not (await one.info()).limits.exact_span_tokens:
            pytest.skip("no kernel of ours runs here")
        yield one, other
    for each in two:
        await each.check()


async def rows(sequence: Sequence) -> np.ndarray:
    """Behind each of `FOLLOWING`, fed one by one."""
    return np.concatenate([(await sequence.decode(token, FullLogits())).logits for token in FOLLOWING])


async def test_a_prefix_a_verification_and_a_move_have_the_bits_of_single_decodes(
    clients: tuple[ExecutorClient, ExecutorClient], tmp_path: Path
) -> None:
    client, other = clients
    assert "model=native" in dict((await client.info()).device.choices)
    async with client.sequence(cache_mode=CacheMode.BYPASS) as alone:
        await alone.prefill(PROMPT)
        await alone.export_to(tmp_path / "sequence.kv")
        expected = await rows(alone)
    async with client.sequence() as first, client.sequence() as second, other.sequence() as moved:
        await first.prefill(PROMPT)
        assert (await second.prefill(PROMPT)).cached_tokens == 28
        assert (await rows(second)).tobytes() == expected.tobytes()
        assert (await first.verify(FOLLOWING, FullLogits())).logits.tobytes() == expected.tobytes()
        await moved.import_from(tmp_path / "sequence.kv")
        assert (await rows(moved)).tobytes() == expected.tobytes()
