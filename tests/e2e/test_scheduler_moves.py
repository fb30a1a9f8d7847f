"""The scheduler on two executors, prompts on one and texts on the other: the tokens are those of a single one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest

from clients.scheduler.options import parse
from clients.scheduler.program import main, serve
from ferrum_rpc.client import ExecutorClient, Greedy, Sample, transfer
from ferrum_rpc.client.fleet import Member, Members
from ferrum_rpc.scheduler.counts import RunCounts
from ferrum_rpc.scheduler.driver import Driver
from ferrum_rpc.scheduler.policy import Budget
from ferrum_rpc.scheduler.request import Request, RequestEnd, Stage
from ferrum_rpc.scheduler.router import Router
from tests.e2e.test_scheduler_runs import (
    BUDGET,
    DEMO,
    SAMPLED,
    STOP,
    Watcher,
    assert_nothing_is_left,
    identity,
    prompts,
    requests,
    sampled_by,
    schedule,
)
from tests.faults.process import ServerProcess, serving
from tests.faults.proxy import proxied

GREEDY = Greedy()
Texts = list[tuple[list[int], RequestEnd | None]]


async def fleet(
    decode: Iterable[str],
    prefill: Iterable[str],
    work: list[Request],
    *,
    budget: Budget = BUDGET,
    sampling: Greedy | Sample = SAMPLED,
    watcher: Watcher | None = None,
    patience_s: float = 30.0,
    run_tokens: int = 0,
    session: bool = True,
    stop: frozenset[int] = STOP,
    hung_patience_s: float = 10.0,
    timeout_s: float = 60.0,
) -> RunCounts:
    sampled_by(work, sampling, stop)
    connect = partial(ExecutorClient, session=session, timeout_s=timeout_s, release_timeout_s=min(5.0, timeout_s))

    def driver(member: Member, prompts: bool) -> Driver:
        return Driver(
            member.client,
            member,
            budget=budget,
            observer=watcher or Watcher(),
            run_tokens=0 if prompts else run_tokens,
            chains=session,
        )

    async with AsyncExitStack() as stack:
        roles = [
            await stack.enter_async_context(
                Members(
                    targets,
                    connect=connect,
                    look_every_s=0.02,
                    resolve_every_s=0.02,
                    hung_patience_s=hung_patience_s,
                )
            )
            for targets in (decode, prefill)
            if targets
        ]
        for members in roles:
            while not members.named or len(members.there) < len(members.named):
                await members.changed(members.changes)
        run = await Router(driver, *roles, patience_s=patience_s).run(work)
        await assert_released(roles)
        return run


async def assert_released(roles: Iterable[Members]) -> None:
    """Nothing is left of a run at any executor while the connections are still open."""
    for member in [member for members in roles for member in members.serving]:
        await member.client.status()
        assert member.client.pressure is not None and member.client.pressure.sequences == 0, member.target


async def disaggregate(prefill: str, decode: str, /, work: list[Request], **how: Any) -> RunCounts:
    return await fleet([decode], [prefill], work, **how)


def texts(work: list[Request]) -> Texts:
    return [(each.generated, each.ending) for each in work]


@pytest.fixture(scope="module")
def expected() -> dict[Greedy | Sample, Texts]:
    """Twelve texts of one executor."""

    async def generate() -> dict[Greedy | Sample, Texts]:
        found = {}
        async with identity(kv_blocks=512) as served:
            for sampling in (GREEDY, SAMPLED):
                await schedule(served.target, work := requests(prompts(12)), sampling=sampling, stop=STOP)
                found[sampling] = texts(work)
        return found

    return asyncio.run(generate())


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
async def test_tokens_are_those_of_one_executor(
    blocks: tuple[int, int], how: dict[str, Any], expected: dict[Greedy | Sample, Texts]
) -> None:
    async with identity(kv_blocks=blocks[0]) as one, identity(kv_blocks=blocks[1]) as two:
        work = requests(prompts(12))
        run = await disaggregate(one.target, two.target, work, **how)
        assert texts(work) == expected[how.get("sampling", SAMPLED)]
        began = sum(len(each.generated) > 0 for each in work)
        assert len(run.moves) >= began and run.rebuilds == 0
        assert run.moved_tokens >= sum(len(each.prompt) for each in work if each.generated)
        for served in (one, two):
            await assert_nothing_is_left(served)


async def test_sequences_stay_at_the_source_while_the_target_is_full(
    expected: dict[Greedy | Sample, Texts],
) -> None:
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
async def test_an_executor_that_restarts_in_the_middle_of_a_move_changes_no_token(
    side: str, expected: dict[Greedy | Sample, Texts]
) -> None:
    async with (
        identity(kv_blocks=512) as one,
        identity(kv_blocks=512) as two,
        identity(kv_blocks=512) as again,
        proxied((one if side == "prefill" else two).target) as proxy,
    ):

        def restart() -> None:
            proxy.upstream = again.target
            proxy.reset_all()

        first, then = (proxy.target, two.target) if side == "prefill" else (one.target, proxy.target)
        work = requests(prompts(12))
        with at_frame(20, restart):
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


def test_without_an_executor_for_prompts_the_program_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    async def run() -> int:
        async with identity() as served:
            return await asyncio.to_thread(main, ["--target", served.target, "--prefill-target", "127.0.0.1:1"])

    assert asyncio.run(run()) == 1
    error = capsys.readouterr().err  # gRPC adds the number now and then
    assert error.replace(" (111)", "") == "error: cannot reach an executor at 127.0.0.1:1: Connection refused\n"


async def test_processes_write_the_same_together_as_one_alone_also_when_one_is_killed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Seeded texts of the demo model, from the command line on."""
    if not (DEMO / "model.safetensors").is_file():
        pytest.skip("the demo model has not been built")
    async with AsyncExitStack() as stack:

        async def start(port: int = 0) -> ServerProcess:
            return await stack.enter_async_context(serving(model=str(DEMO), kv_blocks=512, port=port))

        async def texts_of(*arguments: str) -> Texts:
            run = await serve(parse(["--target", two.target, "--demo", "--max-new-tokens", "24", *arguments]))
            assert len(run.moves) >= (8 if arguments else 0) and not run.failed
            return texts(list(run.requests))

        one, two = await asyncio.gather(start(), start())
        alone = await texts_of()
        assert await texts_of("--prefill-target", one.target) == alone
        assert "moves                 8 sequences" in capsys.readouterr().out
        restarts: list[asyncio.Task[ServerProcess]] = []

        async def restart() -> ServerProcess:
            await two.kill()
            return await start(two.port)

        with at_frame(15, lambda: restarts.append(asyncio.ensure_future(restart()))):
            assert await texts_of("--prefill-target", one.target) == alone
        await asyncio.gather(*restarts)
        assert restarts
