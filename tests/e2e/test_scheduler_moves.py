"""The scheduler on two executors, prompts on one and texts on the other: the tokens are those of a single one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest

from clients.scheduler.options import parse
from clients.scheduler.program import main, serve
from ferrum_rpc.client import ExecutorClient, Greedy, Sample, transfer
from ferrum_rpc.scheduler.counts import RunCounts
from ferrum_rpc.scheduler.policy import Budget
from ferrum_rpc.scheduler.request import Request, Stage
from tests.support.proxy import proxied
from tests.support.scheduling import (
    BUDGET,
    GREEDY,
    SAMPLED,
    STOP,
    Texts,
    Watcher,
    assert_nothing_is_left,
    fleet,
    identity,
    of_one,
    prompts,
    requests,
    scheduled,
    texts,
)


async def disaggregate(prefill: str, decode: str, /, work: list[Request], **how: Any) -> RunCounts:
    return await fleet([decode], [prefill], work, **how)


@pytest.fixture(scope="module")
def expected() -> dict[Greedy | Sample, Texts]:
    """Twelve texts of one executor."""
    return {
        sampling: of_one(partial(scheduled, work=requests(prompts(12)), sampling=sampling, stop=STOP))
        for sampling in (GREEDY, SAMPLED)
    }


@pytest.mark.parametrize(
    ("blocks", "how"),
    [
        ((512, 512), {"sampling": GREEDY, "session": False}),
        ((512, 512), {"budget": Budget(tokens=5, items=32, running=3), "run_tokens": 5}),
        ((20, 512), {}),
        ((512, 20), {"run_tokens": 5, "session": False}),
        ((30, 30), {"budget": Budget(tokens=64, items=32, running=12, headroom=0)}),
    ],
    ids=["roomy", "small chunks", "a small source", "a small target", "no headroom"],
)
async def test_tokens_are_those_of_one_executor(blocks, how, expected) -> None:
    async with identity(kv_blocks=blocks[0]) as one, identity(kv_blocks=blocks[1]) as two:
        work = requests(prompts(12))
        run = await disaggregate(one.target, two.target, work, **how)
        assert texts(work) == expected[how.get("sampling", SAMPLED)]
        began = sum(len(each.generated) > 0 for each in work)
        assert len(run.moves) >= began and run.rebuilds == 0
        assert run.moved_tokens >= sum(len(each.prompt) for each in work if each.generated)
        for served in (one, two):
            await assert_nothing_is_left(served)


async def test_sequences_stay_at_the_source_while_the_target_is_full(expected) -> None:
    async with identity(kv_blocks=512) as one, identity(kv_blocks=64) as two, ExecutorClient(two.target) as other:
        hog, watcher, work = other.sequence(), Watcher(), requests(prompts(12))
        await hog.prefill([1] * 250)
        freed: list[asyncio.Task[None]] = []

        def token() -> None:
            if len({index for index, _ in watcher.tokens}) == BUDGET.running and not freed:
                assert all(each.stage is not Stage.RUNNING for each in work if each.generated[1:])
                freed.append(asyncio.ensure_future(hog.release()))

        watcher.on_token = token
        run = await disaggregate(one.target, two.target, work, watcher=watcher)
        assert texts(work) == expected[SAMPLED] and freed and run.preemptions == run.rebuilds == 0
        await assert_nothing_is_left(one)


async def test_a_target_that_refuses_for_want_of_a_quota_is_asked_again(expected: dict[Greedy | Sample, Texts]) -> None:
    async with identity(kv_blocks=512) as one, identity(kv_blocks=512, max_sequences=2) as two:
        work = requests(prompts(12))
        await disaggregate(one.target, two.target, work)
        assert texts(work) == expected[SAMPLED]
        await assert_nothing_is_left(two)


@contextmanager
def at_frame(number: int, act: Callable[[], Any]) -> Iterator[None]:
    """Act once in the middle of a move."""
    exported, count = transfer.exported, 0

    async def frames(*arguments: Any) -> Any:
        nonlocal count
        async for frame in exported(*arguments):
            count += 1
            if count == number:
                act()
            yield frame

    with mock.patch.object(transfer, "exported", frames):
        yield


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_an_executor_that_restarts_in_the_middle_of_a_move_changes_no_token(side, expected) -> None:
    async with (
        identity(kv_blocks=512) as one,
        identity(kv_blocks=512) as two,
        identity(kv_blocks=512) as again,
        proxied((one if side == "prefill" else two).target) as proxy,
    ):
        first, then = (proxy.target, two.target) if side == "prefill" else (one.target, proxy.target)
        work = requests(prompts(12))
        with at_frame(20, lambda: proxy.lead_to(again.target)):
            run = await disaggregate(first, then, work, session=False)
        assert proxy.lost_connections > 0 and run.rebuilds > 0
        assert texts(work) == expected[SAMPLED]
        await assert_nothing_is_left(two if side == "prefill" else one)
        await assert_nothing_is_left(again)


async def test_executors_of_two_models_are_refused_at_the_start(capsys: pytest.CaptureFixture[str]) -> None:
    async with identity() as one, identity(layers=3) as two:
        arguments = ["--target", two.target, "--prefill-target", one.target, "--prompt", "x"]
        assert await asyncio.to_thread(main, arguments) == 1
        assert one.server.state.engine.counters.steps == 0
    message = capsys.readouterr().err
    assert "LAYOUT_MISMATCH" in message and one.target in message and two.target in message


async def test_the_program_moves_texts_from_one_executor_to_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    async with identity(kv_blocks=512) as one, identity(kv_blocks=512) as two:
        flags = ["--target", two.target, "--demo", "--max-new-tokens", "24", "--plain"]
        alone = await serve(parse(flags))
        run = await serve(parse([*flags, "--prefill-target", one.target]))
        assert texts(list(run.requests)) == texts(list(alone.requests)) and len(run.moves) == 8
    assert "moves                 8 sequences" in capsys.readouterr().out
