"""The scheduler against a real executor: whatever the budget, the pool and the company, the tokens are the same."""

from __future__ import annotations

import asyncio
import random
import threading
from functools import partial
from typing import Any
from unittest import mock

import pytest

from clients.scheduler.options import parse
from clients.scheduler.program import main, serve
from ferrum_rpc.client import NEVER_RESEND, CacheMode, ExecutorClient, Greedy, ResendPolicy, StreamToken
from ferrum_rpc.client.lease import Lease, Leases
from ferrum_rpc.errors import TransportError, Unauthenticated
from ferrum_rpc.scheduler.patience import ExecutorGone
from ferrum_rpc.scheduler.policy import Budget
from ferrum_rpc.scheduler.request import Request, RequestEnd, Stage
from tests.support.clients import BOTH_WAYS
from tests.support.fleets import identity, several
from tests.support.lossy import proxied
from tests.support.proxy import proxied as relayed
from tests.support.scheduling import (
    SAMPLED,
    SHAPES,
    STOP,
    At,
    Texts,
    Watcher,
    assert_nothing_is_left,
    demo,
    emptied,
    of_one,
    one_at_a_time,
    prompts,
    requests,
    schedule,
    scheduled,
    texts,
)
from tests.support.states import with_states


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """Twelve prompts, each generated alone in a large pool."""
    return of_one(lambda served: one_at_a_time(served.target, prompts(12)))


@pytest.fixture(scope="module")
def sampled() -> Texts:
    """Twelve texts by single steps, and what ended them."""
    return of_one(partial(scheduled, work=requests(prompts(12)), sampling=SAMPLED, stop=STOP))


@pytest.mark.parametrize(
    ("shape", "run_tokens", "session"),
    [
        *((shape, 0, True) for shape in ("a roomy pool", "a token a step", "chunks of five", "no headroom at all")),
        *((shape, 0, False) for shape in ("a pool for three", "a pool for one, in chunks")),
        ("a roomy pool", 1, True),
        ("a roomy pool", 32, False),
        ("a pool for one, in chunks", 5, False),
        *((shape, (5, 32)[at % 2], True) for at, shape in enumerate(SHAPES)),
        ("no headroom at all", 32, True),
    ],
)
async def test_texts_do_not_depend_on_budget_pool_company_or_runs(shape, run_tokens, session, sampled) -> None:
    blocks, budget = SHAPES[shape]
    assert {ending for _, ending in sampled} == {RequestEnd.LENGTH, RequestEnd.STOP}
    async with emptied(kv_blocks=blocks) as served:
        work, how = requests(prompts(12)), {"budget": budget, "session": session, "run_tokens": run_tokens}
        run = await schedule(served.target, work, sampling=SAMPLED, stop=STOP, **how)
        assert texts(work) == sampled
        assert not run.failed and run.rebuilds == 0
        assert run.preemptions == sum(each.preemptions for each in work)
        assert blocks < 512 or run.preemptions == 0
        if shape == "no headroom at all" and not run_tokens:
            assert run.preemptions > work[0].preemptions == 0, "the oldest is never a victim"
            assert run.peak_use > 0.9
        assert run.decode_tokens + run.prompt_tokens >= sum(len(each.prompt) + len(each.generated) - 1 for each in work)


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


@pytest.mark.parametrize("short_of", ["blocks", "slots"])
async def test_two_schedulers_share_what_there_is(expected: list[list[int]], short_of: str) -> None:
    scarce: dict[str, Any] = {"kv_blocks": 32} if short_of == "blocks" else {"kv_blocks": 512, "made": with_states(3)}
    async with emptied(**scarce) as served:
        both = [requests(prompts(12)) for _ in range(2)]
        how: dict[str, Any] = {"run_tokens": 8}
        if short_of == "blocks":
            how = {"budget": Budget(tokens=64, items=32, running=12, headroom=0)}
        await asyncio.gather(*(schedule(served.target, work, session=True, **how) for work in both))
        for work in both:
            assert [each.generated for each in work] == expected


@pytest.mark.parametrize("run_tokens", [0, 8])
async def test_no_more_sequences_begin_than_there_are_slots(expected: list[list[int]], run_tokens: int) -> None:
    async with emptied(kv_blocks=512, made=with_states(3)) as served:
        work = requests(prompts(12))
        run = await schedule(served.target, work, session=True, run_tokens=run_tokens)
        assert [each.generated for each in work] == expected
        assert run.preemptions == served.server.state.counters.kv_exhausted == 0


async def test_a_request_that_is_refused_a_slot_waits_until_another_ends(expected: list[list[int]]) -> None:
    async with emptied(kv_blocks=512, made=with_states(1, more=1)) as served:
        work = requests(prompts(2))
        run = await schedule(served.target, work, session=True, run_tokens=8)
        assert [each.generated for each in work] == expected[:2]
        refused = served.server.state.counters.kv_exhausted
        assert refused == run.preemptions > 0, "a single step would need a slot as well"


@pytest.mark.parametrize(
    "limit", [{"max_sequences": 2}, {"max_sequences_per_caller": 3}, {"max_blocks_per_caller": 30}], ids=str
)
async def test_an_executor_with_less_than_wanted_is_still_used_to_the_end(limit, expected) -> None:
    async with emptied(kv_blocks=512, **limit) as served:
        work = requests(prompts(12))
        await schedule(served.target, work, session=True)
        assert [each.generated for each in work] == expected


# --- several tokens a trip ------------------------------------------------------------------------------------------


async def test_a_text_that_ends_early_waits_for_no_longer_run() -> None:
    ended, waits = threading.Event(), list[bool]()

    def stage(name: str) -> None:
        if name == "forward" and served.server.state.engine.counters.steps == 12:
            waits.append(ended.wait(10))

    class Ended(Watcher):
        def changed(self, request: Request) -> None:
            if request.stage is Stage.FINISHED:
                ended.set()

    async with emptied(kv_blocks=512, stage=stage) as served:
        work = [Request(0, (1, 2, 3), 40), Request(1, (4, 5), 6)]
        await schedule(served.target, work, session=True, run_tokens=32, watcher=Ended())
        assert waits == [True] and [len(each.generated) for each in work] == [40, 6]


async def test_runs_make_few_trips() -> None:
    async with identity(kv_blocks=1024) as served:
        run = await schedule(served.target, requests(prompts(8), 64), sampling=SAMPLED, session=True, run_tokens=16)
        assert run.sequences <= 8 * 64 / 4


# --- faults ---------------------------------------------------------------------------------------------------------


@BOTH_WAYS
async def test_an_item_that_is_sent_again_under_another_lease_and_not_answered_ends_no_request(
    expected, session
) -> None:
    """The item alone has no answer, and its call has one."""
    acquire, leases = Leases.acquire_lease, list[str]()

    async def acquired(*arguments: Any) -> Lease:
        if len(leases) == 1:
            leases.append("lost on the way")
            raise TransportError("the connection was lost", metadata={"grpc_code": "UNAVAILABLE"})
        lease = await acquire(*arguments)
        leases.append(lease.lease_id)
        return lease

    async with identity(kv_blocks=512) as served, ExecutorClient(served.target) as other:
        work = requests(prompts(12))
        watcher = At({20: lambda: other.revoke_lease(leases[0])})
        with mock.patch.object(Leases, "acquire_lease", acquired):
            await schedule(served.target, work, watcher=watcher, session=session)
        assert len(leases) > 2 and [each.generated for each in work] == expected
        await asyncio.gather(*watcher.doing)
        await assert_nothing_is_left(served)


@pytest.mark.parametrize("policy", [ResendPolicy(backoff_s=0), NEVER_RESEND])
async def test_lost_answers_change_no_token(expected: list[list[int]], policy: ResendPolicy) -> None:
    async with emptied(kv_blocks=40) as served, proxied(served.target) as (proxy, target):
        dice = random.Random(1)
        proxy.only = "UnifiedForward"
        proxy.faults.extend(dice.choices(("", "lose", "refuse"), (6, 2, 2), k=10_000))
        work = requests(prompts(12))
        run = await schedule(target, work, resend=policy)
        assert proxy.lost > 5
        assert [each.generated for each in work] == expected
        assert run.rebuilds == 0, "resending is enough"


@BOTH_WAYS
async def test_a_restart_in_the_middle_changes_no_token(expected: list[list[int]], session: bool) -> None:
    async with several(2, kv_blocks=40) as (first, second), relayed(first.target) as proxy:
        watcher, work = At({40: lambda: proxy.lead_to(second.target)}), requests(prompts(12))
        run = await schedule(proxy.target, work, watcher=watcher, session=session)
        assert run.rebuilds > 0
        assert [each.generated for each in work] == expected
        assert len(second.server.state.handles) == 0


async def test_a_reset_in_the_middle_changes_no_token(sampled: Texts) -> None:
    """By unary calls. A session's: tests/e2e/test_scheduler_machine.py."""
    async with identity(kv_blocks=40) as served, ExecutorClient(served.target) as operator:
        watcher, work = At({30: operator.reset, 90: operator.reset}), requests(prompts(12))
        run = await schedule(served.target, work, sampling=SAMPLED, stop=STOP, watcher=watcher)
        await asyncio.gather(*watcher.doing)
        assert run.rebuilds > 0
        assert texts(work) == sampled
        await assert_nothing_is_left(served)


@BOTH_WAYS
async def test_a_full_queue_is_waited_for(expected: list[list[int]], session: bool) -> None:
    async with identity(kv_blocks=512, max_queued_items=8) as served:
        every, budget = [requests(prompts(12)) for _ in range(4)], Budget(tokens=64, items=8, running=8)
        runs = await asyncio.gather(*(schedule(served.target, work, budget=budget, session=session) for work in every))
        assert all([each.generated for each in work] == expected for work in every)
        assert sum(run.waits for run in runs) == served.server.state.counters.queue_full


async def test_a_dead_executor_ends_the_run_and_says_so() -> None:
    async with identity() as served:
        watcher = At({20: lambda: served.server.stop(grace_s=0)})
        with pytest.raises(ExecutorGone, match="no progress"):
            await schedule(served.target, requests(prompts(12)), watcher=watcher, patience_s=0.3, session=True)
        await asyncio.gather(*watcher.doing)


async def test_a_draining_executor_finishes_what_runs_and_the_rest_is_given_up() -> None:
    async with identity() as served:
        watcher, work = At({20: served.server.state.drain}), requests(prompts(12))
        budget = Budget(tokens=64, items=32, running=4)
        with pytest.raises(ExecutorGone, match="no new sequences"):
            await schedule(served.target, work, budget=budget, watcher=watcher, patience_s=0.1, session=True)
        assert [each.ending for each in work[:4]] == [RequestEnd.LENGTH] * 4
        assert {each.stage for each in work[4:]} == {Stage.WAITING}


@pytest.mark.parametrize("failures", [1, 3, 4])
async def test_a_failed_step_is_tried_again_and_not_for_ever(expected: list[list[int]], failures: int) -> None:
    left = [failures]

    def stage(name: str) -> None:
        if name == "forward" and served.server.state.engine.counters.steps == 5 and left[0]:
            left[0] -= 1
            raise RuntimeError("a device that hiccups")

    async with emptied(stage=stage) as served:
        work = requests(prompts(4))
        run = await schedule(served.target, work, session=True)
        if failures <= 3:
            assert [each.generated for each in work] == expected[:4]
        else:
            assert len(run.failed) == 4
            assert all("forward pass failed" in each.error for each in run.failed)


async def test_a_lost_device_ends_the_run_and_says_so() -> None:
    class Unplugged(BaseException):
        pass

    def stage(name: str) -> None:
        if name == "forward" and served.server.state.engine.counters.steps == 5:
            raise Unplugged

    async with identity(stage=stage) as served:
        with pytest.raises(ExecutorGone, match="restarted"):
            await schedule(served.target, requests(prompts(4)), patience_s=0.1, session=True)


@BOTH_WAYS
async def test_a_cancelled_run_leaves_nothing_behind(session: bool) -> None:
    async with emptied() as served:
        reached = asyncio.Event()
        work, watcher = requests(prompts(12), 1000), At({20: reached.set})
        task = asyncio.create_task(schedule(served.target, work, watcher=watcher, session=session))
        await reached.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


# --- endings --------------------------------------------------------------------------------------------------------


async def test_a_text_ends_where_the_whole_pool_does_and_what_cannot_be_served_is_refused() -> None:
    async with emptied(kv_blocks=8) as served:
        lengths = ((20, 100), (40, 5), (2, 5), (0, 5))
        work = [Request(at, tuple(range(prompt)), most) for at, (prompt, most) in enumerate(lengths)]
        await schedule(served.target, work, session=True)
        assert work[0].ending is RequestEnd.POOL
        assert work[0].known == 33, "32 tokens in the cache, and the last one that they gave"
        assert [each.stage for each in (work[1], work[3])] == [Stage.FAILED] * 2
        assert "needs 10 blocks of 4 tokens; 8 exist" in work[1].error
        assert work[2].ending is RequestEnd.LENGTH


# --- the program ----------------------------------------------------------------------------------------------------


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
    figures = ("tokens/s", "time to first token", "mean batch", "tokens per trip", "preemptions", "cache use", method)
    assert all(each in shown for each in figures)


@pytest.mark.parametrize("missing", ["--target", "--prefill-target"])
async def test_without_an_executor_the_program_says_so_in_one_line(missing, capsys) -> None:
    async with identity() as served:
        targets = {"--target": served.target, missing: "127.0.0.1:1"}
        assert await asyncio.to_thread(main, [word for flag in targets.items() for word in flag]) == 1
    error = capsys.readouterr().err  # gRPC adds the number now and then
    assert error.replace(" (111)", "") == "error: cannot reach an executor at 127.0.0.1:1: Connection refused\n"


def test_without_a_token_the_program_says_how_to_name_one(monkeypatch, capsys) -> None:
    async def refuse(_: object) -> None:
        raise Unauthenticated("no token")

    monkeypatch.setattr("clients.scheduler.program.serve", refuse)
    assert main(["--target", "here"]) == 1
    advice = "name a file with a token, --token-file FILE"
    assert capsys.readouterr().err == f"error: here answers UNAUTHENTICATED: no token; {advice}\n"


async def test_without_a_tokenizer_for_the_model_the_program_says_what_to_do(capsys) -> None:
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


# --- to the last bit --------------------------------------------------------------------------------------------------


async def test_a_preempted_request_writes_the_same_text_from_the_same_bits() -> None:
    """Where the executor promises it: the demo model in bfloat16 with our products. A token's log-probability has the
    whole row of logits in it."""
    found = list[list[list[tuple[int, float | None]]]]()
    for blocks in (512, 30):
        async with demo(dtype="bfloat16", kv_blocks=blocks) as served, ExecutorClient(served.target) as client:
            if (await client.info()).limits.exact_span_tokens == 0:
                pytest.skip("this CPU does not multiply bfloat16 in vectors, or nothing was compiled")
            work, budget = requests(prompts(16, seed=1, longest=60), 48), Budget(2048, 32, running=16, headroom=0)
            found.append([[] for _ in work])
            for each, row in zip(work, found[-1], strict=True):
                each.cache_mode, each.chosen = CacheMode.BYPASS, partial(noted, row)
            run = await schedule(served.target, work, budget=budget, sampling=Greedy(logprob=True))
            assert (run.preemptions > 0) == (blocks == 30)
    assert found[0] == found[1] and all(len(row) == 48 for row in found[0])


def noted(row: list[tuple[int, float | None]], tokens: list[StreamToken], _: int) -> bool:
    row += [(each.token, each.logprob) for each in tokens]
    return False
