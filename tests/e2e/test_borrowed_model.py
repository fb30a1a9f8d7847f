"""What stands above a model, on one that transformers runs: prefixes, runs, drafts, moves, parking, masks."""

from __future__ import annotations

from collections.abc import AsyncIterator

import numpy as np
import pytest
import pytest_asyncio

from ferrum_rpc.client import Accept, CacheMode, ExecutorClient, FullLogits, Run, Sample, Sequence
from ferrum_rpc.config import ModelSettings
from tests.support.hf_families import make_family_checkpoint
from tests.support.serving import Served, serve_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = [*range(20, 51)]
TIMES = 1e-5


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def two(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Served, Served]]:
    """Two executors of one model, with windows and sinks."""
    folder = make_family_checkpoint(tmp_path_factory.mktemp("model"), "gpt_oss")
    config = ModelSettings(str(folder), device="cpu", model_backend="hf", kv_blocks=64, block_size=4)
    parked = tmp_path_factory.mktemp("parked")
    async with serve_model(config, park_dir=parked) as one, serve_model(config) as other:
        yield one, other


@pytest_asyncio.fixture(loop_scope="module")
async def client(two: tuple[Served, Served]) -> AsyncIterator[ExecutorClient]:
    async with ExecutorClient(two[0].target) as client:
        yield client
    await two[0].check()
    assert two[0].runner.cache_state().sequences == 0


async def row(sequence: Sequence, token: int = 7) -> np.ndarray:
    answer = await sequence.decode(token, FullLogits())
    return np.array(answer.logits[0])


async def fresh(client: ExecutorClient) -> np.ndarray:
    """The row behind the prompt, of a sequence that shares nothing."""
    async with client.sequence(cache_mode=CacheMode.BYPASS) as sequence:
        await sequence.prefill(PROMPT)
        return await row(sequence)


async def test_a_prompt_that_was_seen_is_not_computed_again(client: ExecutorClient) -> None:
    async with client.sequence() as first, client.sequence() as second:
        await first.prefill(PROMPT)
        assert (await second.prefill(PROMPT)).cached_tokens == 28
        np.testing.assert_allclose(await row(second), await fresh(client), atol=TIMES)


async def test_runs_and_drafts_choose_what_single_steps_choose(client: ExecutorClient) -> None:
    sample = Sample(temperature=0.8, seed=11)
    async with client.sequence() as one, client.sequence() as other, client.sequence() as third:
        tokens = [(await one.prefill(PROMPT, sample)).token]
        for _ in range(5):
            tokens.append((await one.decode(tokens[-1], sample)).token)
        assert (await other.prefill(PROMPT, sample, run=Run(max_tokens=6))).tokens.tolist() == tokens
        await third.prefill(PROMPT, sample)
        answer = await third.verify([tokens[0], tokens[1], tokens[2], (tokens[3] + 1) % 128], Accept(sample))
        assert answer.tokens.tolist() == tokens[1:4]


async def test_a_sequence_moves_to_a_file_to_another_executor_and_out_of_the_way(client, two, tmp_path) -> None:
    expected = await fresh(client)
    async with client.sequence() as source, ExecutorClient(two[1].target) as other, other.sequence() as target:
        await source.prefill(PROMPT)
        await source.export_to(tmp_path / "sequence.kv")
        await target.import_from(tmp_path / "sequence.kv")
        np.testing.assert_allclose(await row(target), expected, atol=TIMES)
        await source.park()
        np.testing.assert_allclose(await row(source), expected, atol=TIMES)
