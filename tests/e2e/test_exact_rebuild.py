"""Rebuilt to the last bit, where the executor promises it: after a lost lease and a restart, and after a preemption."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import numpy.typing as npt
import pytest

from ferrum_rpc.client import Answer, CacheMode, ExecutorClient, FullLogits, Greedy
from ferrum_rpc.config import ModelSettings
from ferrum_rpc.models import linear
from ferrum_rpc.native import cpu
from ferrum_rpc.scheduler.driver import Driver
from ferrum_rpc.scheduler.policy import Budget, PlannedFeed
from tests.e2e.test_scheduler_runs import DEMO, Watcher, prompts, requests
from tests.serving import Served, serve_model

PROMPT = [int(each) for each in np.random.default_rng(2).integers(0, 250, size=70)]
GENERATED = [int(each) for each in np.random.default_rng(3).integers(0, 250, size=45)]
Rows = npt.NDArray[np.float32]


@asynccontextmanager
async def exact(monkeypatch: pytest.MonkeyPatch, **options: int) -> AsyncIterator[Served]:
    """The demo model in bfloat16 with our products, which a CPU with a matrix unit would not choose by itself."""
    if not (DEMO / "model.safetensors").is_file():
        pytest.skip("the demo model has not been built")
    flags = cpu.flags() - {linear.AMX}
    monkeypatch.setattr(cpu, "flags", lambda: flags)
    config = ModelSettings(path=str(DEMO), device="cpu", dtype="bfloat16", **options)
    async with serve_model(config) as served, ExecutorClient(served.target) as client:
        if (await client.info()).limits.exact_span_tokens == 0:
            pytest.skip("this CPU does not multiply bfloat16 in vectors, or nothing was compiled")
        yield served


async def test_a_rebuilt_sequence_goes_on_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    async with exact(monkeypatch, kv_blocks=128) as served, ExecutorClient(served.target) as client:
        rows: dict[str, Rows] = {}
        for name in ("whole", "rebuilt", "carefree"):
            sequence = client.sequence(keep_tokens=True, rebuild=name == "carefree", cache_mode=CacheMode.BYPASS)
            await sequence.prefill(PROMPT, chunk=50)
            await sequence.truncate(60)  # within the second piece, of 20 tokens
            await sequence.verify(PROMPT[:40])
            await sequence.truncate(67)  # within a long one: 7 of its 40 tokens are left
            for token in GENERATED:
                await sequence.decode(token)
            if name != "whole":
                await client.reset()
            if name == "rebuilt":
                await sequence.rebuild()
            rows[name] = (await sequence.decode(1, FullLogits())).logits
            assert sequence.tokens == [*PROMPT[:60], *PROMPT[:7], *GENERATED, 1]
        assert np.array_equal(rows["rebuilt"], rows["whole"])
        assert np.array_equal(rows["carefree"], rows["whole"])


async def test_the_rows_of_a_rebuilding_are_those_of_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    async with (
        exact(monkeypatch, kv_blocks=128) as served,
        ExecutorClient(served.target) as client,
        client.sequence(keep_tokens=True, cache_mode=CacheMode.BYPASS) as sequence,
    ):
        await sequence.prefill(PROMPT)
        await sequence.truncate(65)
        last = (await sequence.decode(PROMPT[65], FullLogits())).logits
        await sequence.truncate(65)
        [row] = (await sequence.rebuild(output=FullLogits())).logits
        answer = await sequence.decode(PROMPT[65], FullLogits())
        assert answer.length == 66
        assert np.array_equal(answer.logits, last)
        fresh = client.sequence()
        expected = (await fresh.prefill(PROMPT[:65], FullLogits())).logits[0]
        assert np.allclose(row, expected, atol=0.3)


class Recorder(Driver):
    """Remembers the bits of every chosen token's log-probability, which has the whole row in it."""

    def _fed(self, feed: PlannedFeed, answer: Answer) -> None:
        if feed.completes:
            self.rows[feed.request.index, answer.length] = answer.logprobs.tobytes()
        super()._fed(feed, answer)


async def test_a_preempted_request_writes_the_same_text_from_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = []
    for blocks in (512, 30):
        async with exact(monkeypatch, kv_blocks=blocks) as served, ExecutorClient(served.target) as client:
            await client.info()
            budget = Budget(tokens=2048, items=32, running=16, headroom=0)
            work = requests(prompts(16, seed=1, longest=60), 48)
            for each in work:
                each.output, each.cache_mode = Greedy(logprob=True), CacheMode.BYPASS
            driver = Recorder(
                client,
                client.executors[0],
                budget=budget,
                observer=Watcher(),
            )
            driver.rows = {}
            run = await driver.run(work)
            assert (run.preemptions > 0) == (blocks == 30)
            rows.append(driver.rows)
    assert rows[1] == rows[0]
