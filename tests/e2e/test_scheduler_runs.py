"""The scheduler against a real executor: whatever the budget, the pool and the company, the tokens are the same."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clients.scheduler.options import parse
from clients.scheduler.program import main, serve
from ferrum_rpc.client import NEVER_RESEND, ExecutorClient, Greedy, ResendPolicy, Sample
from ferrum_rpc.config import ModelSettings
from ferrum_rpc.engine.assembly.build import build_runner
from ferrum_rpc.errors import Unauthenticated
from ferrum_rpc.scheduler.counts import RunCounts
from ferrum_rpc.scheduler.driver import Driver
from ferrum_rpc.scheduler.patience import ExecutorGone
from ferrum_rpc.scheduler.policy import Budget
from ferrum_rpc.scheduler.queues import Observer
from ferrum_rpc.scheduler.request import Request, RequestEnd, Stage
from ferrum_rpc.scheduler.speculation import Drafter
from ferrum_rpc.service.server import ExecutorServer
from tests.e2e.test_client_faults import proxied
from tests.faults.proxy import proxied as relayed
from tests.serving import LIMITS, Served, serve_identity, serve_model

GREEDY = Greedy()
BUDGET = Budget(tokens=64, items=32, running=8, headroom=8)
DEMO = Path(__file__).parents[2] / "ferrum_rpc_demo" / "demo"
NEW_TOKENS = 16
PERSISTENT = ResendPolicy(times=5, backoff_s=0)
"""For a network that resets connections all the time: a release that is given up keeps its blocks until the lease ends,
and the pools here are small."""
BOTH_WAYS = pytest.mark.parametrize("session", [True, False], ids=["session", "unary"])


class Watcher(Observer):
    """Remembers what an observer is told."""

    def __init__(self) -> None:
        self.tokens: list[tuple[int, int]] = []
        self.stages: list[tuple[int, Stage]] = []
        self.on_token: Callable[[], None] = lambda: None

    def token(self, request: Request, token: int) -> None:
        self.tokens.append((request.index, token))
        self.on_token()

    def changed(self, request: Request) -> None:
        self.stages.append((request.index, request.stage))


def prompts(count: int, seed: int = 0, longest: int = 40) -> list[list[int]]:
    dice = random.Random(seed)
    return [[dice.randrange(256) for _ in range(dice.randint(1, longest))] for _ in range(count)]


def requests(texts: Sequence[Sequence[int]], new_tokens: int = NEW_TOKENS) -> list[Request]:
    return [Request(at, tuple(text), new_tokens) for at, text in enumerate(texts)]


def sampled_by(work: list[Request], sampling: Greedy | Sample, stop: Collection[int]) -> None:
    """Have all of them sampled alike, with a seed of their own each."""
    for each in work:
        seeded = isinstance(sampling, Sample) and sampling.seed is not None
        each.output = replace(sampling, seed=(sampling.seed << 32) + each.index) if seeded else sampling
        each.stops = tuple(sorted(stop))


async def schedule(
    target: str,
    work: list[Request],
    *,
    budget: Budget = BUDGET,
    sampling: Greedy | Sample = GREEDY,
    resend: ResendPolicy = ResendPolicy(backoff_s=0),  # noqa: B008
    stop: Collection[int] = (),
    watcher: Watcher | None = None,
    patience_s: float = 30.0,
    session: bool = False,
    run_tokens: int = 0,
    max_delay_s: float | None = None,
    drafter: Drafter | None = None,
) -> RunCounts:
    sampled_by(work, sampling, stop)
    async with ExecutorClient(target, resend=resend, session=session) as client:
        await client.info()
        driver = Driver(
            client,
            client.executors[0],
            budget=budget,
            observer=watcher or Watcher(),
            patience_s=patience_s,
            drafter=drafter,
            run_tokens=run_tokens,
            max_delay_s=max_delay_s,
            chains=session,
        )
        run = await driver.run(work)
    assert run.executor_seconds <= run.prefill_seconds + run.decode_seconds
    return run


async def one_at_a_time(target: str, texts: Sequence[Sequence[int]], new_tokens: int = NEW_TOKENS) -> list[list[int]]:
    """Greedy generation by hand: the reference."""
    out = []
    async with ExecutorClient(target) as client:
        for text in texts:
            async with client.sequence() as sequence:
                tokens = [(await sequence.prefill(text)).token]
                while len(tokens) < new_tokens:
                    tokens.append((await sequence.decode(tokens[-1])).token)
                out.append(tokens)
    return out


async def assert_nothing_is_left(served: Served) -> None:
    assert len(served.server.state.handles) == 0
    await served.check()
    state = served.server.state.engine.cache
    assert state.free_blocks == state.total_blocks


def identity(**options: Any) -> Any:
    return serve_identity(**{"positional": True, "head_dim": 64, "block_size": 4, **options})


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """Twelve prompts, each generated alone in a large pool."""

    async def generate() -> list[list[int]]:
        async with identity(kv_blocks=512) as served:
            return await one_at_a_time(served.target, prompts(12))

    return asyncio.run(generate())


SHAPES: dict[str, tuple[int, Budget]] = {
    "a roomy pool": (512, BUDGET),
    "one at a time": (512, Budget(tokens=64, items=32, running=1)),
    "a token a step": (512, Budget(tokens=1, items=32, running=8)),
    "chunks of five": (512, Budget(tokens=5, items=32, running=8)),
    "two items a step": (512, Budget(tokens=64, items=2, running=8)),
    "a pool for three": (40, BUDGET),
    "a pool for one": (15, BUDGET),
    "a pool for one, in chunks": (15, Budget(tokens=7, items=32, running=8, headroom=0)),
    "no headroom at all": (30, Budget(tokens=64, items=32, running=12, headroom=0)),
}


@BOTH_WAYS
@pytest.mark.parametrize("shape", SHAPES)
async def test_greedy_tokens_do_not_depend_on_budget_pool_or_company(
    shape: str, expected: list[list[int]], session: bool
) -> None:
    blocks, budget = SHAPES[shape]
    async with identity(kv_blocks=blocks) as served:
        work = requests(prompts(12))
        run = await schedule(served.target, work, budget=budget, session=session)
        assert [each.generated for each in work] == expected
        assert all((each.stage, each.ending) == (Stage.FINISHED, RequestEnd.LENGTH) for each in work)
        assert run.preemptions == sum(each.preemptions for each in work)
        assert blocks < 512 or run.preemptions == 0
        assert run.decode_tokens + run.prompt_tokens >= sum(len(each.prompt) + NEW_TOKENS - 1 for each in work)
        await assert_nothing_is_left(served)


@BOTH_WAYS
async def test_a_tight_pool_preempts_the_young_and_everybody_still_gets_their_tokens(
    expected: list[list[int]], session: bool
) -> None:
    async with identity(kv_blocks=30) as served:
        work = requests(prompts(12))
        run = await schedule(
            served.target, work, budget=Budget(tokens=64, items=32, running=12, headroom=0), session=session
        )
        assert run.preemptions > 0
        assert work[0].preemptions == 0, "the oldest is never a victim"
        assert run.peak_use > 0.9
        assert [each.generated for each in work] == expected


@BOTH_WAYS
async def test_the_executor_is_told_of_every_step_in_one_call(expected: list[list[int]], session: bool) -> None:
    async with identity(kv_blocks=512) as served, ExecutorClient(served.target) as client:
        run = await schedule(served.target, requests(prompts(12)), session=session)
        counts = {each.method.rpartition("/")[2]: each for each in (await client.status()).methods}
        assert counts["Session" if session else "UnifiedForward"].items == run.sequences
        if session:
            assert not {"UnifiedForward", "Release"} & set(counts)
            assert counts["Session"].calls == 1
        else:
            assert counts["UnifiedForward"].calls == run.steps
            assert counts["Release"].calls == 12
        assert run.sequences / run.steps > 3


@BOTH_WAYS
async def test_two_schedulers_on_one_small_pool_both_finish_with_the_right_tokens(
    expected: list[list[int]], session: bool
) -> None:
    async with identity(kv_blocks=32) as served:
        both = [requests(prompts(12)) for _ in range(2)]
        budget = Budget(tokens=64, items=32, running=12, headroom=0)
        await asyncio.gather(*(schedule(served.target, work, budget=budget, session=session) for work in both))
        for work in both:
            assert [each.generated for each in work] == expected
        await assert_nothing_is_left(served)


@BOTH_WAYS
async def test_an_executor_with_fewer_sequences_than_wanted_is_still_used_to_the_end(
    expected: list[list[int]], session: bool
) -> None:
    async with identity(kv_blocks=512, max_sequences=2) as served:
        work = requests(prompts(12))
        await schedule(served.target, work, session=session)
        assert [each.generated for each in work] == expected


@BOTH_WAYS
@pytest.mark.parametrize("quota", [{"max_sequences_per_caller": 3}, {"max_blocks_per_caller": 30}], ids=str)
async def test_a_callers_quota_is_kept_to_and_everybody_still_gets_their_tokens(
    quota: dict[str, int], expected: list[list[int]], session: bool
) -> None:
    async with identity(kv_blocks=512, **quota) as served:
        work = requests(prompts(12))
        await schedule(served.target, work, session=session)
        assert [each.generated for each in work] == expected
        await assert_nothing_is_left(served)


# --- several tokens a trip ------------------------------------------------------------------------------------------


SAMPLED = Sample(temperature=3.0, seed=5, repetition_penalty=1.3)
"""The identity model's greedy tokens soon repeat; these do not."""


STOP = frozenset({7, 99, 200})


@pytest.fixture(scope="module")
def sampled() -> list[tuple[list[int], RequestEnd | None]]:
    """Twelve texts by single steps, and what ended them."""

    async def generate() -> list[tuple[list[int], RequestEnd | None]]:
        async with identity(kv_blocks=512) as served:
            work = requests(prompts(12))
            await schedule(served.target, work, sampling=SAMPLED, stop=STOP)
            return [(each.generated, each.ending) for each in work]

    return asyncio.run(generate())


@pytest.mark.parametrize(
    ("shape", "run_tokens", "session"),
    [("a roomy pool", 1, True), ("a roomy pool", 32, False)]
    + [(shape, *way) for shape in SHAPES for way in ((5, True), (32, True), (5, False))],
)
async def test_texts_are_the_same_with_runs_whatever_the_budget_and_the_pool(
    shape: str, run_tokens: int, sampled: list[tuple[list[int], RequestEnd | None]], session: bool
) -> None:
    blocks, budget = SHAPES[shape]
    assert {ending for _, ending in sampled} == {RequestEnd.LENGTH, RequestEnd.STOP}
    async with identity(kv_blocks=blocks) as served:
        work = requests(prompts(12))
        run = await schedule(
            served.target, work, budget=budget, sampling=SAMPLED, stop=STOP, session=session, run_tokens=run_tokens
        )
        assert [(each.generated, each.ending) for each in work] == sampled
        assert not run.failed and run.rebuilds == 0
        await assert_nothing_is_left(served)


async def test_a_text_that_ends_early_waits_for_no_longer_run() -> None:
    ended, waits = threading.Event(), list[bool]()

    def stage(name: str) -> None:
        if name == "forward" and served.server.state.engine.counters.steps == 12:
            waits.append(ended.wait(10))

    class Ended(Watcher):
        def changed(self, request: Request) -> None:
            if request.stage is Stage.FINISHED:
                ended.set()

    async with identity(kv_blocks=512, stage=stage) as served:
        work = [Request(0, (1, 2, 3), 40), Request(1, (4, 5), 6)]
        await schedule(served.target, work, session=True, run_tokens=32, watcher=Ended())
        assert waits == [True] and [len(each.generated) for each in work] == [40, 6]
        await assert_nothing_is_left(served)


async def test_runs_make_few_trips() -> None:
    async with identity(kv_blocks=1024) as served:
        trips = []
        for run_tokens in (0, 16):
            work = requests(prompts(8), 64)
            run = await schedule(served.target, work, sampling=SAMPLED, session=True, run_tokens=run_tokens)
            trips.append(run.sequences)
        assert trips[0] >= 8 * 64 and 4 * trips[1] <= trips[0]


@BOTH_WAYS
async def test_lost_connections_and_resets_change_no_token_of_runs(session: bool) -> None:
    async with identity(kv_blocks=512) as served:
        work = requests(prompts(12), 48)
        await schedule(served.target, work, sampling=SAMPLED)
        expected = [each.generated for each in work]
        async with relayed(served.target, seed=1) as proxy:
            proxy.weather.resets = 0.03
            for _ in range(3):
                work = requests(prompts(12), 48)
                run = await schedule(
                    proxy.target, work, sampling=SAMPLED, session=session, run_tokens=4, resend=PERSISTENT
                )
                assert [each.generated for each in work] == expected
                assert run.rebuilds == 0
            proxy.weather.resets = 0.0
            assert proxy.lost_connections > 0
        async with ExecutorClient(served.target) as operator:
            watcher, work = Watcher(), requests(prompts(12), 48)
            resets: list[asyncio.Task[int]] = []
            watcher.on_token = lambda: (
                resets.append(asyncio.ensure_future(operator.reset())) if len(watcher.tokens) in {100, 300} else None
            )
            await schedule(served.target, work, sampling=SAMPLED, watcher=watcher, session=session, run_tokens=8)
            await asyncio.gather(*resets)
            assert [each.generated for each in work] == expected
        await assert_nothing_is_left(served)


# --- faults ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [ResendPolicy(backoff_s=0), NEVER_RESEND])
async def test_lost_answers_change_no_token(expected: list[list[int]], policy: ResendPolicy) -> None:
    async with identity(kv_blocks=40) as served, proxied(served.target) as (proxy, target):
        dice = random.Random(1)
        proxy.only = "UnifiedForward"
        proxy.faults.extend(dice.choices(("", "lose", "refuse"), (6, 2, 2), k=10_000))
        work = requests(prompts(12))
        run = await schedule(target, work, resend=policy)
        assert proxy.lost > 5
        assert [each.generated for each in work] == expected
        assert run.rebuilds == 0, "resending is enough"
        await assert_nothing_is_left(served)


async def test_a_restart_in_the_middle_changes_no_token(expected: list[list[int]]) -> None:
    async with (
        identity(kv_blocks=40) as first,
        identity(kv_blocks=40) as second,
        proxied(first.target) as (proxy, target),
    ):
        watcher, work = Watcher(), requests(prompts(12))
        switched: list[asyncio.Task[None]] = []

        def restart() -> None:
            if len(watcher.tokens) == 40:
                switched.append(asyncio.ensure_future(proxy.switch(second.target)))

        watcher.on_token = restart
        run = await schedule(target, work, watcher=watcher)
        await asyncio.gather(*switched)
        assert run.rebuilds > 0
        assert [each.generated for each in work] == expected
        assert len(second.server.state.handles) == 0


@BOTH_WAYS
async def test_lost_connections_change_no_token(expected: list[list[int]], session: bool) -> None:
    async with identity(kv_blocks=40) as served, relayed(served.target, seed=1) as proxy:
        proxy.weather.resets = 0.03
        work = requests(prompts(12))
        run = await schedule(proxy.target, work, session=session, resend=PERSISTENT)
        proxy.weather.resets = 0.0
        assert proxy.lost_connections > 0
        assert [each.generated for each in work] == expected
        assert run.rebuilds == 0, "resending is enough"


async def test_a_restart_in_the_middle_of_a_session_changes_no_token(expected: list[list[int]]) -> None:
    async with (
        identity(kv_blocks=40) as first,
        identity(kv_blocks=40) as second,
        relayed(first.target) as proxy,
    ):
        watcher, work = Watcher(), requests(prompts(12))

        def restart() -> None:
            if len(watcher.tokens) == 40:
                proxy.upstream = second.target
                proxy.reset_all()

        watcher.on_token = restart
        run = await schedule(proxy.target, work, watcher=watcher, session=True)
        assert run.rebuilds > 0
        assert [each.generated for each in work] == expected
        assert len(second.server.state.handles) == 0


@BOTH_WAYS
async def test_a_reset_in_the_middle_changes_no_token(expected: list[list[int]], session: bool) -> None:
    async with identity(kv_blocks=40) as served, ExecutorClient(served.target) as operator:
        watcher, work = Watcher(), requests(prompts(12))
        resets: list[asyncio.Task[int]] = []
        watcher.on_token = lambda: (
            resets.append(asyncio.ensure_future(operator.reset())) if len(watcher.tokens) in (30, 90) else None
        )
        run = await schedule(served.target, work, watcher=watcher, session=session)
        await asyncio.gather(*resets)
        assert run.rebuilds > 0
        assert [each.generated for each in work] == expected
        await assert_nothing_is_left(served)


@BOTH_WAYS
async def test_a_full_queue_is_waited_for(expected: list[list[int]], session: bool) -> None:
    async with identity(kv_blocks=512, max_queued_items=8) as served:
        both = [requests(prompts(12)) for _ in range(4)]
        runs = await asyncio.gather(
            *(
                schedule(served.target, work, budget=Budget(tokens=64, items=8, running=8), session=session)
                for work in both
            )
        )
        assert all([each.generated for each in work] == expected for work in both)
        assert sum(run.waits for run in runs) == served.server.state.counters.queue_full


@BOTH_WAYS
async def test_a_dead_executor_ends_the_run_and_says_so(session: bool) -> None:
    async with identity() as served:
        watcher = Watcher()
        stops: list[asyncio.Task[None]] = []
        watcher.on_token = lambda: (
            stops.append(asyncio.ensure_future(served.server.stop(grace_s=0))) if len(watcher.tokens) == 20 else None
        )
        with pytest.raises(ExecutorGone, match="no progress"):
            await schedule(served.target, requests(prompts(12)), watcher=watcher, patience_s=0.3, session=session)
        await asyncio.gather(*stops)


@BOTH_WAYS
async def test_a_draining_executor_finishes_what_runs_and_the_rest_is_given_up(session: bool) -> None:
    async with identity() as served:
        watcher, work = Watcher(), requests(prompts(12))
        watcher.on_token = lambda: served.server.state.drain() if len(watcher.tokens) == 20 else None
        budget = Budget(tokens=64, items=32, running=4)
        with pytest.raises(ExecutorGone, match="no new sequences"):
            await schedule(served.target, work, budget=budget, watcher=watcher, patience_s=0.1, session=session)
        assert [each.ending for each in work[:4]] == [RequestEnd.LENGTH] * 4
        assert {each.stage for each in work[4:]} == {Stage.WAITING}


@BOTH_WAYS
@pytest.mark.parametrize("failures", [1, 3, 4])
async def test_a_failed_step_is_tried_again_and_not_for_ever(
    expected: list[list[int]], failures: int, session: bool
) -> None:
    left = [failures]

    def stage(name: str) -> None:
        if name == "forward" and served.server.state.engine.counters.steps == 5 and left[0]:
            left[0] -= 1
            raise RuntimeError("a device that hiccups")

    async with identity(stage=stage) as served:
        work = requests(prompts(4))
        run = await schedule(served.target, work, session=session)
        if failures <= 3:
            assert [each.generated for each in work] == expected[:4]
        else:
            assert len(run.failed) == 4
            assert all("forward pass failed" in each.error for each in run.failed)
        await assert_nothing_is_left(served)


@BOTH_WAYS
async def test_a_lost_device_ends_the_run_and_says_so(session: bool) -> None:
    class Unplugged(BaseException):
        pass

    def stage(name: str) -> None:
        if name == "forward" and served.server.state.engine.counters.steps == 5:
            raise Unplugged

    async with identity(stage=stage) as served:
        with pytest.raises(ExecutorGone, match="restarted"):
            await schedule(served.target, requests(prompts(4)), patience_s=0.1, session=session)


@BOTH_WAYS
async def test_a_cancelled_run_leaves_nothing_behind(session: bool) -> None:
    async with identity() as served:
        watcher, reached = Watcher(), asyncio.Event()
        watcher.on_token = lambda: reached.set() if len(watcher.tokens) == 20 else None
        task = asyncio.create_task(
            schedule(served.target, requests(prompts(12), 1000), watcher=watcher, session=session)
        )
        await reached.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await assert_nothing_is_left(served)


# --- endings --------------------------------------------------------------------------------------------------------


@BOTH_WAYS
async def test_each_text_ends_for_the_right_reason(session: bool) -> None:
    async with identity(kv_blocks=16, max_context=60) as served:
        [[*tokens]] = await one_at_a_time(served.target, [[1, 2, 3]], 12)
        stop = tokens[6]
        work = [
            Request(0, (1, 2, 3), 100),
            Request(1, tuple(range(100, 155)), 100),
            Request(2, tuple(range(61)), 5),
            Request(3, (), 5),
            Request(4, (999,), 5),
        ]
        await schedule(served.target, work, stop=frozenset({stop}), session=session)
        assert (work[0].ending, work[0].generated) == (RequestEnd.STOP, tokens[: tokens.index(stop)])
        assert work[1].ending in (RequestEnd.CONTEXT, RequestEnd.STOP)
        assert work[1].ending is RequestEnd.STOP or work[1].known == 61
        assert [each.stage for each in work[2:]] == [Stage.FAILED] * 3
        assert "61 tokens; 1 to 60" in work[2].error
        assert "vocabulary" in work[4].error
        await assert_nothing_is_left(served)


@BOTH_WAYS
async def test_a_text_that_outgrows_the_whole_pool_ends_there_and_a_prompt_that_does_is_refused(session: bool) -> None:
    async with identity(kv_blocks=8) as served:
        work = [Request(0, tuple(range(20)), 100), Request(1, tuple(range(40)), 5), Request(2, (1, 2), 5)]
        await schedule(served.target, work, session=session)
        assert work[0].ending is RequestEnd.POOL
        assert work[0].known == 33, "32 tokens in the cache, and the last one that they gave"
        assert work[1].stage is Stage.FAILED
        assert "needs 10 blocks of 4 tokens; 8 exist" in work[1].error
        assert work[2].ending is RequestEnd.LENGTH


# --- sampling -------------------------------------------------------------------------------------------------------


@BOTH_WAYS
@pytest.mark.parametrize("sampling", [Sample(top_k=40, seed=3), Sample(top_p=0.9, seed=3)])
async def test_sampled_texts_depend_on_the_seed_and_not_on_the_company(sampling: Sample, session: bool) -> None:
    texts = prompts(6)
    outcomes = []
    for blocks, budget in ((512, BUDGET), (40, Budget(tokens=9, items=32, running=3))):
        async with identity(kv_blocks=blocks) as served:
            work = requests(texts)
            await schedule(served.target, work, budget=budget, sampling=sampling, session=session)
            outcomes.append([each.generated for each in work])
    assert outcomes[0] == outcomes[1]
    async with identity(kv_blocks=512) as served:
        work = requests(texts)
        await schedule(
            served.target,
            work,
            sampling=replace(sampling, seed=4),
            session=session,
        )
        assert [each.generated for each in work] != outcomes[0]


# --- the program ----------------------------------------------------------------------------------------------------


@asynccontextmanager
async def demo(**options: Any) -> AsyncIterator[Served]:
    if not (DEMO / "model.safetensors").is_file():
        pytest.skip("the demo model has not been built")
    async with serve_model(ModelSettings(path=str(DEMO), device="cpu", dtype="float32", **options)) as served:
        yield served


async def test_the_demo_model_writes_the_same_in_a_tight_pool_as_alone() -> None:
    texts = [list(text.encode()) for text in parse(["--demo"]).prompts]
    async with demo(kv_blocks=256) as served:
        expected = await one_at_a_time(served.target, texts, 24)
    async with demo(kv_blocks=14) as served:
        work = requests(texts, 24)
        run = await schedule(served.target, work, budget=Budget(tokens=48, items=32, running=8, headroom=0))
        assert [each.generated for each in work] == expected
        assert run.preemptions > 0


@BOTH_WAYS
async def test_the_program_serves_prompts_and_sums_up(capsys: pytest.CaptureFixture[str], session: bool) -> None:
    way = [] if session else ["--unary"]
    async with identity() as served:
        run = await serve(parse(["--target", served.target, "--demo", "--greedy", "--max-new-tokens", "8", *way]))
        assert not run.failed
        await assert_nothing_is_left(served)
    shown = capsys.readouterr().out
    assert shown.count("8 tokens, length") == 8
    method = "Session" if session else "UnifiedForward"
    headings = ("tokens/s", "time to first token", "mean batch", "tokens per trip", "preemptions", "cache use", method)
    for heading in headings:
        assert heading in shown


@BOTH_WAYS
async def test_the_program_reaches_an_executor_on_a_unix_socket(tmp_path: Path, session: bool) -> None:
    config = ModelSettings(path="identity", device="cpu", kv_blocks=64, block_size=4)
    server = ExecutorServer(lambda: build_runner(config), LIMITS, host=f"unix:{tmp_path / 'socket'}")
    await server.start()
    try:
        await server.ready()
        way = [] if session else ["--unary"]
        run = await serve(parse(["--target", server.target, "--prompt", "hello", "--max-new-tokens", "4", *way]))
        assert not run.failed
    finally:
        await server.stop(grace_s=1)


async def test_the_program_runs_as_a_module_and_exits_with_0() -> None:
    async with identity() as served:
        program = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "clients.scheduler", "--target", served.target, "--prompt", "hello"),
            *("--greedy", "--max-new-tokens", "4"),
            cwd=DEMO.parents[1],
            stdout=asyncio.subprocess.PIPE,
        )
        out, _ = await program.communicate()
        assert program.returncode == 0
        assert out.decode().startswith("hello")
        assert "(4 tokens, length)" in out.decode()


def test_without_an_executor_the_program_says_so_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--target", "127.0.0.1:1"]) == 1
    error = capsys.readouterr().err  # gRPC adds the number now and then
    assert error.replace(" (111)", "") == "error: cannot reach an executor at 127.0.0.1:1: Connection refused\n"


def test_without_a_token_the_program_says_how_to_name_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def refuse(_: object) -> None:
        raise Unauthenticated("no token")

    monkeypatch.setattr("clients.scheduler.program.serve", refuse)
    assert main(["--target", "here"]) == 1
    assert capsys.readouterr().err == (
        "error: here answers UNAUTHENTICATED: no token; name a file with a token, --token-file FILE\n"
    )


async def test_without_a_tokenizer_for_the_model_the_program_says_what_to_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with identity(vocab_size=1000) as served:
        arguments = ["--target", served.target, "--prompt", "x"]
        assert await asyncio.to_thread(main, arguments) == 1
        assert "1000 tokens, which are not bytes: say --tokenizer PATH" in capsys.readouterr().err
        assert await asyncio.to_thread(main, [*arguments, "--tokenizer", "/nowhere"]) == 1
        assert "no tokenizer at /nowhere" in capsys.readouterr().err


async def test_a_prompt_that_fails_makes_the_program_fail(capsys: pytest.CaptureFixture[str]) -> None:
    async with identity(max_context=8) as served:
        arguments = ["--target", served.target, "--prompt", "far too long", "--prompt", "ok", "--max-new-tokens", "2"]
        assert await asyncio.to_thread(main, arguments) == 1
    shown = capsys.readouterr().out
    assert "[1] failed: the prompt has 12 tokens; 1 to 8 can be served" in shown
    assert "[2] 2 tokens" in shown


def test_the_scheduler_stands_on_the_client_alone() -> None:
    program = "import sys, clients.scheduler.program; print(chr(10).join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=DEMO.parents[1]
    )
    modules = set(done.stdout.split())
    assert not {"torch", "pydantic", "structlog"} & {name.partition(".")[0] for name in modules}
    floors = {name.split(".")[1] for name in modules if name.startswith("ferrum_rpc.")}
    assert floors <= {"client", "core", "errors", "executor", "prefix_hash", "scheduler", "wire"}
