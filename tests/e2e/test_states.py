"""A model with recurrent layers through the client, against a real executor: rows are those of `transformers` after
verification, truncation to any length, forks and lost answers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch

from ferrum_rpc.client import ExecutorClient, FullLogits, OutputSpec, Positions, Run
from ferrum_rpc.config import ModelSettings
from ferrum_rpc.engine import checkpoint_files
from ferrum_rpc.engine.api import Submission
from ferrum_rpc.errors import Cancelled, DeadlineExceeded, StepFailed
from tests.support.checkpoints import make_checkpoint, make_model
from tests.support.clients import BOTH_WAYS
from tests.support.serving import Served, serve_model

SHAPE = {"num_hidden_layers": 4, "full_attention_interval": 2, "intermediate_size": 128, "vocab_size": 300}
SLOTS = 6
ALL = OutputSpec(Positions.ALL, FullLogits())
LAST = OutputSpec(Positions.LAST, FullLogits())
PROMPT = np.random.default_rng(3).integers(0, 300, 200).tolist()


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelSettings:
    folder = make_checkpoint(tmp_path_factory.mktemp("qwen"), "qwen3_5", **SHAPE)
    cache: dict[str, Any] = {"block_size": 4, "kv_blocks": 400, "state_slots": SLOTS}
    return ModelSettings(str(folder), device="cpu", dtype="float32", **cache)


@pytest_asyncio.fixture
async def served(config: ModelSettings) -> AsyncIterator[Served]:
    async with serve_model(config) as served:
        yield served


def near(rows: np.ndarray, history: list[int]) -> bool:
    """Whether ``rows`` are the last ones of ``history``."""
    with torch.inference_mode():
        wanted = make_model("qwen3_5", **SHAPE)(torch.tensor([history])).logits[0].float().numpy()
    return bool(np.abs(rows - wanted[len(history) - len(rows) :]).max() <= 1e-4 * wanted.std())


@BOTH_WAYS
async def test_a_sequence_is_cut_and_fed_as_any_other(served: Served, session: bool) -> None:
    async with ExecutorClient(served.target, session=session) as client:
        info = await client.info()
        assert (info.limits.free_truncation_tokens, info.limits.checkpoint_tokens) == (32, 512)
        assert info.model.state_bytes > 0
        sequence, history = client.sequence(), list(PROMPT)
        answer = await sequence.prefill(history, LAST)
        assert near(answer.logits, history) and answer.recomputed_tokens == 0
        assert (answer.pressure.total_slots, answer.pressure.free_slots) == (SLOTS, SLOTS - 1)
        for kept, draft in ((2, [5, 6, 7, 8, 9]), (0, [3]), (3, [1, 2, 3])):
            assert near((await sequence.verify(draft, ALL)).logits, history + draft)
            await sequence.truncate(len(history) + kept)
            history += draft[:kept]
            answer = await sequence.decode(42, LAST)
            history.append(42)
            assert near(answer.logits, history) and answer.recomputed_tokens == 0
        deep = 100
        answer = await sequence.decode(7, LAST, truncate_to=deep)
        history = [*history[:deep], 7]
        assert near(answer.logits, history) and answer.recomputed_tokens == deep
        children = await sequence.fork(2, at=50)
        for child in children:
            answer = await child.decode(9, LAST)
            assert near(answer.logits, [*history[:50], 9]) and answer.recomputed_tokens == 50
            await child.release()
        answer = await sequence.decode(8, LAST)
        assert near(answer.logits, [*history, 8])
        run = await sequence.decode(1, run=Run(5), truncate_to=60)
        assert len(run.tokens) == 5 and run.recomputed_tokens == 60
        await sequence.release()
        assert (await client.status()).pressure.free_slots == SLOTS


async def test_steps_of_others_run_between_the_pieces_of_a_checkpoint_that_comes_back(
    config: ModelSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_files, "PIECE_BYTES", 1 << 12)
    tiered = replace(config, kv_tier_dir=tmp_path)
    async with serve_model(tiered) as served, ExecutorClient(served.target) as client:
        await client.sequence().prefill([*PROMPT, 1])
    async with serve_model(tiered) as served, ExecutorClient(served.target) as client:
        other, done, arrived = client.sequence(), list[str](), threading.Event()
        await other.prefill([1, 2, 3])
        loop, runner, engine = asyncio.get_running_loop(), served.runner, served.server.state.engine
        fetch, begin, submit = runner.fetch_states, runner.begin, engine.submit
        calls = list[Any]()

        def fetched(*about: Any) -> bool:
            done.append("piece")
            if len(done) == 2:
                calls.append(asyncio.run_coroutine_threadsafe(other.decode(4, LAST), loop))
                assert arrived.wait(30)
            return bool(fetch(*about))

        def submitted(work: Any) -> None:
            submit(work)
            if isinstance(work, Submission):
                arrived.set()

        monkeypatch.setattr(runner, "fetch_states", fetched)
        monkeypatch.setattr(runner, "begin", lambda step: done.append("step") or begin(step))
        monkeypatch.setattr(engine, "submit", submitted)
        answer = await client.sequence().prefill([*PROMPT, 1], LAST)
        assert answer.cached_tokens == len(PROMPT) and near(answer.logits, [*PROMPT, 1])
        assert near((await asyncio.wrap_future(calls[0])).logits, [1, 2, 3, 4])
        assert done[-2:] == ["piece", "step"] and "step" in done[2:-1]


async def test_a_warm_up_drops_no_checkpoint(served: Served) -> None:
    """One of many tokens neither, which would keep checkpoints itself, nor one that meets only slots that have one."""
    pool = served.runner.states.pool
    async with ExecutorClient(served.target) as client:
        for kept in range(SLOTS):
            before = pool.items()
            assert len(before) == kept
            report = await client.warmup(prefill_tokens=1100)
            assert (report.steps, pool.items(), pool.dropped) == (2, before, 0)
            sequence = client.sequence()
            await sequence.prefill([kept, *PROMPT])
            if kept < SLOTS - 1:
                await sequence.release()
        before = pool.items()
        assert len(before) == (await client.status()).pressure.free_slots
        assert (await client.warmup()).steps == 0 and pool.items() == before


async def test_slots_of_callers_and_checkpoints_that_were_dropped_are_told(served: Served) -> None:
    async with ExecutorClient(served.target) as client:
        held = [client.sequence() for _ in range(SLOTS)]
        for each in held[:2]:
            await each.prefill(PROMPT)
        await held[2].prefill([1])
        assert [each.slots for each in (await client.activity()).callers] == [3]
        status = await client.status()
        assert (status.pressure.free_slots, status.counters.checkpoints_dropped) == (SLOTS - 3, 0)
        for each in held[3:]:
            await each.prefill([1])
        assert (await client.status()).counters.checkpoints_dropped == 1


@pytest.mark.parametrize("ends", ["cancel", "deadline", "fails"])
async def test_a_call_that_ends_while_its_tokens_are_fed_again_changes_nothing(
    config: ModelSettings, ends: str
) -> None:
    """The second piece of three is reached. Then the next call is as if there had been none."""
    reached, go_on = asyncio.Event(), asyncio.Event()
    passages, loop = iter(range(1000)), asyncio.get_running_loop()

    def stage(name: str) -> None:
        if name == "forward" and next(passages) == 2:
            loop.call_soon_threadsafe(reached.set)
            asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result(30)
            if ends == "fails":
                raise RuntimeError("broken")

    async with serve_model(config, stage=stage) as served, ExecutorClient(served.target) as client:
        sequence = client.sequence()
        await sequence.prefill(PROMPT)
        await sequence.truncate(150)
        timeout_s = 1.0 if ends == "deadline" else None
        call = asyncio.create_task(sequence.decode(9, LAST, timeout_s=timeout_s))
        await reached.wait()
        if ends == "cancel":
            call.cancel()
        if ends != "deadline":
            await asyncio.sleep(0)
            go_on.set()
        with pytest.raises((asyncio.CancelledError, Cancelled, DeadlineExceeded, StepFailed)):
            await call
        go_on.set()
        assert sequence.length == 150
        answer = await sequence.decode(8, LAST)
        assert near(answer.logits, [*PROMPT[:150], 8]) and answer.recomputed_tokens >= 150
