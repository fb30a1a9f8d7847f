"""Runs and followers with the client: streams give the tokens of single decodes, with few trips, whatever happens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from ferrum_rpc.client import (
    Answer,
    Capability,
    ExecutorClient,
    FullLogits,
    Greedy,
    HiddenStates,
    Item,
    OutputSpec,
    Positions,
    ResendPolicy,
    Run,
    RunEnd,
    Sample,
    Sequence,
    SequenceMisuseError,
)
from ferrum_rpc.client.pace import FIRST_RUN, RunPace
from ferrum_rpc.client.state import SequenceState
from ferrum_rpc.core import StepTiming
from ferrum_rpc.errors import (
    ChainBroken,
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidRequest,
    KvBlocksExhausted,
    NotSupported,
    SequenceBusy,
    StepFailed,
)
from tests.e2e.test_client_faults import proxied as lossy
from tests.faults.proxy import proxied
from tests.serving import Gate, Served, serve_identity

PROMPT = [3, 1, 4, 1, 5]
SAMPLE = Sample(temperature=3.0, seed=5, repetition_penalty=1.3)
"""The identity model's greedy tokens soon repeat; these do not."""

BOTH_WAYS = pytest.mark.parametrize("session", [False, True], ids=["unary", "session"])
EACH_KIND = pytest.mark.parametrize("output", [SAMPLE, Greedy()], ids=["sample", "greedy"])


async def by_hand(client: ExecutorClient, count: int, output: Any = SAMPLE, prompt: list[int] = PROMPT) -> list[int]:
    """What single calls give."""
    async with client.sequence() as sequence:
        tokens = [(await sequence.prefill(prompt, output)).token]
        while len(tokens) < count:
            tokens.append((await sequence.decode(tokens[-1], output)).token)
        return tokens


async def taken(sequence: Sequence, tokens: list[int], count: int | None = None, **options: Any) -> list[int]:
    options.setdefault("output", SAMPLE)
    return [token async for token in sequence.generate(tokens, max_tokens=count, **options)]


def without(client: ExecutorClient, *missing: Capability) -> None:
    """The executor that the client knows lacks some capabilities."""
    info = client._context.known_info
    assert info is not None
    client._context.known_info = replace(info, capabilities=info.capabilities - set(missing))


@asynccontextmanager
async def connected(session: bool = True, **options: Any) -> AsyncIterator[tuple[Served, ExecutorClient]]:
    async with (
        serve_identity(**{"kv_blocks": 1024, "positional": True, **options}) as served,
        ExecutorClient(served.target, session=session) as client,
    ):
        yield served, client
        await served.check()


# --- streams ----------------------------------------------------------------------------------------------------------


@BOTH_WAYS
@EACH_KIND
async def test_a_stream_is_what_single_decodes_give(session: bool, output: Greedy | Sample) -> None:
    async with connected(session, max_context=96) as (_, client):
        expected = await by_hand(client, 92, output)
        for count in (1, 2, 5, 31, 64, None):
            async with client.sequence(keep_tokens=True) as sequence:
                found = await taken(sequence, PROMPT, count, output=output, stop=())
                assert found == expected[: count or 92]
                assert sequence.tokens == (PROMPT + found)[: sequence.length]
                assert sequence.length == len(PROMPT) + len(found) - 1 and sequence._sender.prefetcher is None


@BOTH_WAYS
@EACH_KIND
async def test_a_stop_id_ends_a_stream_at_any_place(session: bool, output: Greedy | Sample) -> None:
    async with connected(session) as (_, client):
        expected = await by_hand(client, 60, output)
        for end in sorted(set(expected)):
            first = expected.index(end)
            async with client.sequence(keep_tokens=True) as sequence:
                assert await taken(sequence, PROMPT, 60, output=output, stop=[end, 10**6]) == expected[:first]
                assert sequence.tokens == PROMPT + expected[:first]
                assert (await sequence.decode(end, output)).length == len(PROMPT) + first + 1


async def test_many_streams_share_a_session() -> None:
    async with connected() as (served, client):
        prompts = [[each % 250 + 1, 7] for each in range(24)]
        expected = [await by_hand(client, 40 + each % 7, SAMPLE, prompt) for each, prompt in enumerate(prompts)]

        async def one(number: int) -> list[int]:
            async with client.sequence() as sequence:
                return await taken(sequence, prompts[number], 40 + number % 7)

        assert await asyncio.gather(*map(one, range(24))) == expected
        assert not served.server.state.handles.live


async def test_a_stream_makes_few_trips() -> None:
    async with connected() as (_, client):

        async def items() -> int:
            methods = (await client.status()).methods
            return sum(each.items for each in methods if each.method.endswith("Session"))

        async with client.sequence() as sequence:
            await taken(sequence, PROMPT, 64)
        before = await items()
        async with client.sequence() as sequence:
            assert len(await taken(sequence, PROMPT, 128)) == 128
        assert await items() - before < 128 / 4
        without(client, Capability.RUN)
        before = await items()
        async with client.sequence() as sequence:
            await taken(sequence, PROMPT, 128)
        assert await items() - before == 128


@BOTH_WAYS
async def test_a_short_stream_is_one_trip(session: bool) -> None:
    async with connected(session) as (_, client):
        expected = await by_hand(client, 4)

        async def requests() -> int:
            methods = (await client.status()).methods
            names = ("Session",) if session else ("Prefill", "Decode")
            return sum(each.items for each in methods if each.method.endswith(names))

        before = await requests()
        async with client.sequence() as sequence:
            assert await taken(sequence, PROMPT, FIRST_RUN) == expected
        assert await requests() - before == 1


@BOTH_WAYS
async def test_a_long_prompt_runs_behind_its_last_chunk(session: bool) -> None:
    prompt = [each % 250 for each in range(70)]
    async with connected(session, max_batch_tokens=32) as (_, client):
        async with client.sequence() as single:
            expected = [(await single.prefill(prompt, SAMPLE)).token]
            while len(expected) < 20:
                expected.append((await single.decode(expected[-1], SAMPLE)).token)
        async with client.sequence(keep_tokens=True) as sequence:
            assert await taken(sequence, prompt, 20) == expected
            assert sequence.tokens == prompt + expected[:-1]


@BOTH_WAYS
@pytest.mark.parametrize("goes_on", [False, True])
async def test_a_stream_that_is_cancelled_in_its_first_run_leaves_nothing(session: bool, goes_on: bool) -> None:
    gate = Gate("forward")
    async with serve_identity(stage=gate) as served, ExecutorClient(served.target, session=session) as client:
        async with client.sequence() as sequence:
            held = await gate.hold(anext(sequence.generate(PROMPT, max_tokens=3)))
            held.cancel()
            with pytest.raises(asyncio.CancelledError):
                await held
            assert (sequence.length, sequence.in_doubt) == (0, True)
            gate.open()
            if goes_on:
                assert len(await taken(sequence, PROMPT, 3, output=Greedy())) == 3
                assert (sequence.length, sequence.in_doubt) == (len(PROMPT) + 2, False)
        await served.check()
        assert not served.server.state.handles.live


def test_runs_are_long_where_trips_are_and_steps_are_not() -> None:
    def pace(trip_s: float, step_s: float, *, chains: bool = True) -> int:
        pace = RunPace()
        pace.note(trip_s + 4 * step_s, StepTiming(1, 1, 1, 0.0, 4 * step_s), 4)
        return pace.tokens(32, chains=chains)

    assert RunPace().tokens(32, chains=True) == FIRST_RUN and RunPace().tokens(2, chains=True) == 2
    assert pace(0.0005, 0.050) == 2
    assert pace(0.0005, 0.005) == pace(0.020, 0.005) == 12
    assert pace(0.080, 0.005) == 24
    assert pace(0.020, 0.005, chains=False) == 24
    assert pace(0.200, 0.001) == pace(0.0, 0.0) == 32


def test_a_trip_is_what_the_fastest_answers_took() -> None:
    pace = RunPace()
    for elapsed_s in (0.5, 0.012, 0.012):  # the first opened a session
        pace.note(elapsed_s, StepTiming(1, 1, 1, 0.0, 0.010), 0)
    assert pace.trip_s == pytest.approx(0.002) and pace.step_s is None


# --- left early, other calls ------------------------------------------------------------------------------------------


@BOTH_WAYS
@pytest.mark.parametrize("after", [1, 2, 7, 30])
async def test_a_stream_that_is_left_leaves_the_sequence_where_its_reader_is(session: bool, after: int) -> None:
    async with connected(session) as (_, client):
        expected = await by_hand(client, after + 20)

        async def left() -> tuple[Sequence, list[int]]:
            sequence, seen = client.sequence(keep_tokens=True), list[int]()
            async with aclosing(sequence.generate(PROMPT, output=SAMPLE)) as stream:
                async for token in stream:
                    seen.append(token)
                    assert sequence.tokens == PROMPT + seen[:-1]
                    if len(seen) == after:
                        break
            assert (seen, sequence.in_doubt) == (expected[:after], False)
            assert sequence.length == len(PROMPT) + after - 1
            return sequence, seen

        sequence, seen = await left()
        assert seen + await taken(sequence, seen[-1:], 20) == expected
        sequence, seen = await left()
        assert (await sequence.decode(seen[-1], SAMPLE)).token == expected[after]
        sequence, seen = await left()
        [child] = await sequence.fork()
        assert child.length == sequence.length
        assert seen + await taken(child, seen[-1:], 20) == expected
        sequence, seen = await left()
        assert await client.truncate([(sequence, len(PROMPT))]) == [None]
        assert seen[:1] + await taken(sequence, seen[:1], after + 19) == expected
        sequence, _ = await left()
        with pytest.raises(SequenceMisuseError, match="not read to its end"):
            sequence.item([1])
        await sequence.rebuild()
        sequence.item([1])
        sequence, _ = await left()
        assert await client.release([sequence]) == [None]


@BOTH_WAYS
async def test_a_call_between_two_tokens_comes_between(session: bool) -> None:
    async with connected(session) as (_, client):
        async with client.sequence() as single:
            expected = [(await single.prefill(PROMPT, SAMPLE)).token]
            for at in range(12):
                if at == 5:
                    await single.decode(77, SAMPLE)
                expected.append((await single.decode(expected[-1], SAMPLE)).token)
        async with client.sequence() as sequence:
            seen = []
            async for token in sequence.generate(PROMPT, max_tokens=13, output=SAMPLE):
                seen.append(token)
                if len(seen) == 6:
                    await sequence.decode(77, SAMPLE)
            assert seen == expected


@BOTH_WAYS
async def test_a_prompt_that_does_not_fit_is_refused_as_it_is_alone(session: bool) -> None:
    async with connected(session, kv_blocks=4, block_size=4, max_context=40) as (_, client):
        async with client.sequence() as sequence:
            assert len(await taken(sequence, list(range(16)), 1)) == 1
        for prompt, error in ((list(range(17)), KvBlocksExhausted), (list(range(41)), ContextLengthExceeded)):
            async with client.sequence() as sequence:
                with pytest.raises(error):
                    await taken(sequence, prompt)
                assert (sequence.length, sequence.in_doubt) == (0, False)


async def test_a_stream_takes_shorter_runs_where_blocks_are_short() -> None:
    async with connected(kv_blocks=16, block_size=4, max_run_tokens=32) as (_, client):
        expected = await by_hand(client, 60)
        async with client.sequence() as sequence:
            seen = []
            with pytest.raises(KvBlocksExhausted):
                async for token in sequence.generate(PROMPT, output=SAMPLE):
                    seen.append(token)  # noqa: PERF401 - it raises
            assert seen == expected[: len(seen)] and len(seen) == 60
            assert not sequence.in_doubt and sequence._sender.prefetcher is None


# --- faults -----------------------------------------------------------------------------------------------------------


@BOTH_WAYS
async def test_lost_connections_change_no_token(session: bool) -> None:
    async with (
        serve_identity(positional=True, kv_blocks=1024) as served,
        ExecutorClient(served.target) as straight,
        proxied(served.target, seed=3) as proxy,
    ):
        expected = await by_hand(straight, 100)
        resend = ResendPolicy(times=20, backoff_s=0)
        async with ExecutorClient(proxy.target, session=session, resend=resend) as client:
            proxy.weather.resets = 0.05

            async def one() -> list[int]:
                sequence = client.sequence(keep_tokens=True)
                found = await taken(sequence, PROMPT, 100)
                assert sequence.tokens == PROMPT + found[:-1]
                return found

            rounds = 0
            while rounds < 4 or proxy.lost_connections < 2:
                assert await asyncio.gather(one(), one(), one()) == [expected] * 3
                rounds += 1
            proxy.weather.resets = 0.0
        await served.check()


async def test_lost_replies_change_no_token() -> None:
    async with serve_identity(positional=True, kv_blocks=1024) as served, lossy(served.target) as (proxy, target):
        async with ExecutorClient(served.target) as straight:
            expected = await by_hand(straight, 60)
        async with ExecutorClient(target, resend=ResendPolicy(times=3, backoff_s=0)) as client:
            proxy.only = "Decode"
            proxy.faults.extend(["", "lose", "refuse"] * 50)
            async with client.sequence() as sequence:
                assert await taken(sequence, PROMPT, 60) == expected
            assert proxy.lost > 0


@BOTH_WAYS
async def test_an_executor_that_restarts_is_fed_again(session: bool) -> None:
    async with (
        serve_identity(positional=True) as first,
        serve_identity(positional=True) as second,
        proxied(first.target) as proxy,
        ExecutorClient(proxy.target, session=session) as client,
    ):
        expected = await by_hand(client, 80)
        sequence = client.sequence(rebuild=True)
        seen = []
        async for token in sequence.generate(PROMPT, max_tokens=80, output=SAMPLE):
            seen.append(token)
            if len(seen) == 9:
                proxy.upstream = second.target
                proxy.reset_all()
        assert seen == expected and sequence.tokens == PROMPT + expected[:-1]
        left = aclosing(sequence.generate(seen[-1:], output=SAMPLE))
        async with left as stream:
            await anext(stream)
        proxy.upstream = first.target
        proxy.reset_all()
        assert (await sequence.decode(seen[-1], SAMPLE)).length == len(PROMPT) + 81
        await second.check()


@BOTH_WAYS
async def test_a_failed_step_costs_no_token_that_came_before(session: bool) -> None:
    def stage(name: str) -> None:
        if name == "forward" and served.server.state.engine.counters.steps == 60 and fails:
            fails.pop()
            raise RuntimeError("a device that hiccups")

    fails: list[int] = []
    async with (
        serve_identity(positional=True, stage=stage) as served,
        ExecutorClient(served.target, session=session) as client,
    ):
        expected = await by_hand(client, 40)
        fails.append(1)
        sequence, seen = client.sequence(), list[int]()
        try:
            async for token in sequence.generate(PROMPT, max_tokens=40, output=SAMPLE):
                seen.append(token)
        except StepFailed:  # it was the first step of a run
            seen += await taken(sequence, seen[-1:], 40 - len(seen))
        assert seen == expected and not fails


# --- an executor without them -----------------------------------------------------------------------------------------


@BOTH_WAYS
async def test_an_executor_without_runs_gets_single_decodes(session: bool) -> None:
    async with connected(session) as (_, client):
        expected = await by_hand(client, 20)
        await client.info()
        without(client, Capability.FOLLOW)
        assert await taken(client.sequence(), PROMPT, 20) == expected
        without(client, Capability.RUN)
        assert await taken(client.sequence(), PROMPT, 20) == expected
        sequence = client.sequence()
        for call in (sequence.prefill(PROMPT, run=Run(2)), client.forward([sequence.item(PROMPT, run=Run(2))])):
            with pytest.raises(NotSupported, match="capability RUN") as refused:
                await call
            assert refused.value.field == "run"
        assert not sequence.in_doubt and sequence.handle is None


# --- items ------------------------------------------------------------------------------------------------------------


@BOTH_WAYS
async def test_single_calls_take_runs(session: bool) -> None:
    async with connected(session, max_context=40) as (_, client):
        expected = await by_hand(client, 36)
        sequence = client.sequence(keep_tokens=True)
        first = await sequence.prefill(PROMPT, SAMPLE, run=Run(3))
        assert (first.tokens.tolist(), first.run_end, first.run_cause) == (expected[:3], RunEnd.MAX_TOKENS, None)
        assert sequence.tokens == PROMPT + expected[:2] and sequence.length == first.length == 7
        second = await sequence.decode(expected[2], SAMPLE, run=Run(20, (expected[9],)))
        assert (second.tokens.tolist(), second.run_end) == (expected[3:10], RunEnd.STOP_ID)
        third = await sequence.decode(expected[5], SAMPLE, truncate_to=10, run=Run(32))
        assert (third.tokens.tolist(), third.run_end) == (expected[6:36], RunEnd.CONTEXT)
        assert sequence.tokens == PROMPT + expected[:35] and third.length == 40
        again = client.sequence()
        chunked = await again.prefill(PROMPT, SAMPLE, chunk=2, run=Run(4))
        assert chunked.tokens.tolist() == expected[:4] and chunked.run_end is RunEnd.MAX_TOKENS
        for field, bad in {"run": 3, "run.max_tokens": Run(0), "run.stop_token_ids": Run(1, (-1,))}.items():
            with pytest.raises(InvalidRequest) as refused:
                await sequence.decode(1, run=bad)  # type: ignore[arg-type]
            assert refused.value.field == field
        with pytest.raises(InvalidRequest, match="output of a run must be"):
            await sequence.decode(1, HiddenStates(), run=Run(2))


def answered(result: object) -> Answer:
    assert isinstance(result, Answer), result
    return result


async def test_items_follow_each_other() -> None:
    async with connected() as (_, client):
        expected = await by_hand(client, 40)
        sequence, other = client.sequence(keep_tokens=True), client.sequence()
        items = [sequence.item(PROMPT, SAMPLE, run=Run(8))]
        calls = [asyncio.ensure_future(client.forward([items[0], other.item(PROMPT, SAMPLE)]))]
        found: list[int] = []
        for _ in range(4):
            items.append(sequence.item(output=SAMPLE, run=Run(8), follows=items[-1]))
            calls.append(asyncio.ensure_future(client.forward(items[-1:])))
            results = await calls[-2]
            found += answered(results[0]).tokens.tolist()
        assert answered(results[0]).run_end is RunEnd.MAX_TOKENS
        found += answered((await calls[-1])[0]).tokens.tolist()
        assert found == expected
        assert sequence.tokens == PROMPT + expected[:39] and not sequence.in_doubt
        [again] = await client.forward(items[-1:])
        assert answered(again).replayed and answered(again).tokens.tolist() == expected[32:]
        [on] = await client.forward([sequence.item(expected[-1:], SAMPLE)])
        assert answered(on).length == len(PROMPT) + 40


async def test_chunks_of_a_prompt_and_plain_decodes_are_followed_too() -> None:
    async with connected() as (_, client):
        expected = await by_hand(client, 3)
        sequence = client.sequence(keep_tokens=True)
        made = sequence.item(PROMPT[:2], SAMPLE)
        chunk = sequence.item(PROMPT[2:], SAMPLE, follows=made)
        first = asyncio.ensure_future(client.forward([made]))
        second = asyncio.ensure_future(client.forward([chunk]))
        await first
        last = sequence.item(output=SAMPLE, follows=chunk)
        third = asyncio.ensure_future(client.forward([last]))
        assert [answered((await second)[0]).token, answered((await third)[0]).token] == expected[:2]
        assert sequence.tokens == PROMPT + expected[:1]


async def test_a_follower_of_what_ends_otherwise_changes_nothing() -> None:
    async with connected() as (_, client):
        expected = await by_hand(client, 12)
        sequence = client.sequence(keep_tokens=True)
        item = sequence.item(PROMPT, SAMPLE, run=Run(8, (expected[3],)))
        behind = sequence.item(output=SAMPLE, follows=item)
        first, second = await asyncio.gather(client.forward([item]), client.forward([behind]))
        assert answered(first[0]).run_end is RunEnd.STOP_ID and isinstance(second[0], ChainBroken)
        assert sequence.tokens == PROMPT + expected[:3] and not sequence.in_doubt
        assert (await sequence.decode(expected[3], SAMPLE)).token == expected[4]


async def test_one_item_follows_another_and_sessions_are_needed() -> None:
    gate = Gate("forward")
    async with serve_identity(stage=gate) as served:
        async with ExecutorClient(served.target, session=True) as client:
            sequence = client.sequence()
            await sequence.prefill(PROMPT)
            item = sequence.item([1], run=Run(2))
            first = await gate.hold(client.forward([item]))
            second = asyncio.ensure_future(client.forward([sequence.item(follows=item)]))
            await asyncio.sleep(0)
            with pytest.raises(SequenceMisuseError):
                await client.forward([sequence.item(follows=item)])
            with pytest.raises(SequenceMisuseError):
                await sequence.decode(1)
            gate.open()
            answered((await first)[0])
            answered((await second)[0])
            await sequence.decode(1)
        async with ExecutorClient(served.target) as client:
            sequence = client.sequence()
            item = sequence.item(PROMPT, run=Run(2))
            await client.forward([item])
            with pytest.raises(NotSupported, match="sessions"):
                await client.forward([sequence.item(follows=item)])


async def test_an_item_is_sent_again_while_its_follower_waits_for_it() -> None:
    """As after a lost connection, where the client's own attempts for the two end at different times."""
    gate = Gate("forward")
    async with serve_identity(stage=gate) as served, ExecutorClient(served.target, session=True) as client:
        expected = await by_hand(client, 5)
        sequence = client.sequence(keep_tokens=True)
        await sequence.prefill(PROMPT, SAMPLE)
        item = sequence.item([expected[0]], SAMPLE, run=Run(2))
        behind = sequence.item(output=SAMPLE, run=Run(2), follows=item)
        first = await gate.hold(client.forward([item], timeout_s=0.1))
        second = asyncio.ensure_future(client.forward([behind]))
        with pytest.raises(DeadlineExceeded):
            await first
        again = asyncio.ensure_future(client.forward([item]))
        gate.open()
        assert answered((await again)[0]).tokens.tolist() == expected[1:2], "cut where its caller left"
        assert isinstance((await second)[0], ChainBroken)
        [outcome] = await client.forward([sequence.item([expected[1]], SAMPLE, run=Run(3))])
        assert answered(outcome).tokens.tolist() == expected[2:5]


async def test_items_that_are_apart_share_a_frame() -> None:
    """A batch with runs is one frame, and every item has the outcome that is its own."""
    async with connected() as (_, client):
        expected = await by_hand(client, 12)
        sequences = [client.sequence() for _ in range(4)]
        items: list[Item] = [
            sequences[0].item(PROMPT, SAMPLE, run=Run(12)),
            sequences[1].item(PROMPT, SAMPLE, run=Run(3)),
            sequences[2].item(PROMPT, HiddenStates()),
            sequences[3].item([10**6], SAMPLE),
        ]
        long, short, hidden, refused = await client.forward(items)
        assert answered(long).tokens.tolist() == expected and answered(short).tokens.tolist() == expected[:3]
        assert answered(hidden).hidden_states.shape[0] == 1
        assert isinstance(refused, InvalidRequest) and not isinstance(refused, SequenceBusy)


# --- items behind prompts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("made", ["whole", "chunk", "known", "child", "cut child", "all rows"])
async def test_a_run_follows_a_prompt_in_flight(made: str) -> None:
    """A creation, which has no handle yet, a chunk of it, a chunk of a known prompt, and the first item of a child."""
    async with connected() as (_, client):
        expected = await by_hand(client, 9)
        parent, sequence = client.sequence(), client.sequence(keep_tokens=True)
        tokens, behind, output = PROMPT, list[int](), Positions.LAST
        if made == "known":
            await sequence.prefill(PROMPT[:1], Positions.NONE)
        if "child" in made:
            await parent.prefill(PROMPT[: 2 + (made == "cut child")], Positions.NONE)
            sequence = parent.child(2)
        start = {"known": 1, "child": 2, "cut child": 2}.get(made, 0)
        if made in ("chunk", "known"):
            tokens, behind, output = PROMPT[:3], PROMPT[3:], Positions.NONE
        spec = (
            output if output is Positions.NONE else OutputSpec(Positions.ALL if made == "all rows" else output, SAMPLE)
        )
        item = sequence.item(tokens[start:], spec)
        follower = sequence.item(behind or (), SAMPLE, run=Run(7), follows=item)
        [first], [second] = await asyncio.gather(client.forward([item]), client.forward([follower]))
        given = [] if output is Positions.NONE else answered(first).tokens.tolist()[-1:]
        assert given + answered(second).tokens.tolist() == expected[: len(given) + 7]
        assert sequence.length == len(PROMPT) + len(given) + 6 and not sequence.in_doubt
        on = await sequence.decode(expected[len(given) + 6], SAMPLE)
        assert on.token == expected[len(given) + 7]


async def test_a_follower_waits_for_a_creation_that_waits_for_a_lease_a_session_or_a_place() -> None:
    """It is sent behind what it follows, though both were begun at once, at a client that has sent nothing yet, and
    though large answers wait longer for a place than small ones."""
    async with serve_identity(positional=True, kv_blocks=1024) as served:
        for count, output in ((1, SAMPLE), (30, FullLogits())):
            async with ExecutorClient(served.target, session=True, steps_in_flight=2) as client:

                async def one(client: ExecutorClient = client, output: Any = output) -> None:
                    sequence = client.sequence()
                    item = sequence.item(PROMPT, output)
                    behind = sequence.item([9], SAMPLE, run=Run(3), follows=item)
                    results = await asyncio.gather(client.forward([item]), client.forward([behind]))
                    assert [answered(each).length for [each] in results] == [5, 8]

                await asyncio.gather(*(one() for _ in range(count)))


async def test_the_first_stream_of_a_client_breaks_no_chain() -> None:
    async with serve_identity(positional=True, kv_blocks=1024) as served:
        for _ in range(3):
            async with ExecutorClient(served.target, session=True) as client, client.sequence() as sequence:
                with mock.patch.object(SequenceState, "failed", side_effect=AssertionError("nothing is refused")):
                    assert len(await taken(sequence, PROMPT, 40, stop=())) == 40


async def test_items_of_one_call_follow_each_other_and_wait_for_nothing() -> None:
    async with connected() as (_, client):
        sequence = client.sequence()
        item = sequence.item(PROMPT, SAMPLE, run=Run(2))
        async with asyncio.timeout(20):
            results = await client.forward([item, sequence.item(output=SAMPLE, follows=item)], timeout_s=60)
        assert [answered(each).length for each in results] == [6, 7]


async def test_a_follower_of_a_prompt_that_is_refused_or_not_sent_changes_nothing() -> None:
    async with connected(kv_blocks=4, block_size=4) as (_, client):
        sequence = client.sequence()
        item = sequence.item(list(range(40)), SAMPLE)
        behind = sequence.item(output=SAMPLE, run=Run(2), follows=item)
        [first], [second] = await asyncio.gather(client.forward([item]), client.forward([behind]))
        assert isinstance(first, KvBlocksExhausted) and isinstance(second, ChainBroken)
        never = sequence.item(PROMPT, SAMPLE)
        [alone] = await client.forward([sequence.item(output=SAMPLE, follows=never)])
        assert isinstance(alone, ChainBroken), "what it follows was never sent"
        assert sequence.handle is None and not sequence.in_doubt
        assert (await sequence.prefill(PROMPT, SAMPLE)).length == 5
