"""Runs and followers with the client: streams give the tokens of single decodes, with few trips, whatever happens."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any
from unittest import mock

import pytest

from ferrum_rpc.client import (
    Capability,
    ExecutorClient,
    FullLogits,
    Greedy,
    HiddenStates,
    OutputSpec,
    Positions,
    ResendPolicy,
    Run,
    RunEnd,
    Sample,
    Sequence,
    SequenceMisuseError,
)
from ferrum_rpc.client.pace import FIRST_RUN
from ferrum_rpc.client.sequence import sender_of
from ferrum_rpc.client.state import SequenceState
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
from tests.support.clients import BOTH_WAYS, PROMPT, connected, requests, restarting, text, without
from tests.support.proxy import proxied
from tests.support.serving import Gate, serve_identity

SAMPLE = Sample(temperature=3.0, seed=5, repetition_penalty=1.3)
"""The identity model's greedy tokens soon repeat; these do not."""


async def by_hand(client: ExecutorClient, count: int, output: Any = SAMPLE, prompt: list[int] = PROMPT) -> list[int]:
    """What single calls give."""
    async with client.sequence() as sequence:
        tokens = [(await sequence.prefill(prompt, output)).token]
        while len(tokens) < count:
            tokens.append((await sequence.decode(tokens[-1], output)).token)
        return tokens


async def taken(sequence: Sequence, tokens: list[int], count: int | None = None, **options: Any) -> list[int]:
    return [token async for token in sequence.generate(tokens, max_tokens=count, **{"output": SAMPLE, **options})]


# --- streams ----------------------------------------------------------------------------------------------------------


async def test_a_stream_makes_few_trips() -> None:
    async with connected() as (_, client):
        await text(client, PROMPT, 64, SAMPLE)
        before = await requests(client)
        assert len(await text(client, PROMPT, 128, SAMPLE)) == 128
        assert await requests(client) - before < 128 / 4
        without(client, Capability.RUN)
        before = await requests(client)
        await text(client, PROMPT, 128, SAMPLE)
        assert await requests(client) - before == 128


@BOTH_WAYS
async def test_a_short_stream_is_one_trip(session: bool) -> None:
    async with connected(session) as (_, client):
        expected, before = await by_hand(client, 4), await requests(client)
        assert await text(client, PROMPT, FIRST_RUN, SAMPLE) == expected
        assert await requests(client) - before == 1


@BOTH_WAYS
async def test_a_long_prompt_runs_behind_its_last_chunk(session: bool) -> None:
    prompt = [each % 250 for each in range(70)]
    async with connected(session, max_batch_tokens=32) as (_, client):
        expected = await by_hand(client, 20, prompt=prompt)
        async with client.sequence(keep_tokens=True) as sequence:
            assert await taken(sequence, prompt, 20) == expected
            assert sequence.tokens == prompt + expected[:-1]


@BOTH_WAYS
@pytest.mark.parametrize("goes_on", [False, True])
async def test_a_stream_that_is_cancelled_in_its_first_run_leaves_nothing(session: bool, goes_on: bool) -> None:
    gate = Gate("forward")
    async with connected(session, stage=gate) as (served, client):
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
        assert not served.server.state.handles.live


# --- left early, other calls ------------------------------------------------------------------------------------------


@BOTH_WAYS
@pytest.mark.parametrize("after", [2, 30])
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
        await (unstarted := client.sequence()).stream(PROMPT).aclose()
        assert unstarted.length == 0


@BOTH_WAYS
async def test_a_prompt_that_does_not_fit_is_refused_as_it_is_alone(session: bool) -> None:
    async with connected(session, kv_blocks=4, block_size=4, max_context=40) as (_, client):
        assert len(await text(client, range(16), 1, SAMPLE)) == 1
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
            assert not sequence.in_doubt and sender_of(sequence).prefetcher is None


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


@BOTH_WAYS
async def test_an_executor_that_restarts_is_fed_again(session: bool) -> None:
    async with restarting(session) as (first, second, proxy, client):
        expected = await by_hand(client, 80)
        sequence = client.sequence(rebuild=True)
        seen = []
        async for token in sequence.generate(PROMPT, max_tokens=80, output=SAMPLE):
            seen.append(token)
            if len(seen) == 9:
                proxy.lead_to(second.target)
        assert seen == expected and sequence.tokens == PROMPT + expected[:-1]
        async with aclosing(sequence.generate(seen[-1:], output=SAMPLE)) as stream:
            await anext(stream)
        proxy.lead_to(first.target)
        assert (await sequence.decode(seen[-1], SAMPLE)).length == len(PROMPT) + 81
        await second.check()


@BOTH_WAYS
async def test_a_failed_step_costs_no_token_that_came_before(session: bool) -> None:
    def stage(name: str) -> None:
        if name == "forward" and served.server.state.engine.counters.steps == 60 and fails:
            fails.pop()
            raise RuntimeError("a device that hiccups")

    fails: list[int] = []
    async with connected(session, stage=stage) as (served, client):
        expected = await by_hand(client, 40)
        fails.append(1)
        sequence, seen = client.sequence(), list[int]()
        try:
            async for token in sequence.generate(PROMPT, max_tokens=40, output=SAMPLE):
                seen.append(token)
        except StepFailed:  # it was the first step of a run
            seen += await taken(sequence, seen[-1:], 40 - len(seen))
        assert seen == expected and not fails


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
        with pytest.raises(InvalidRequest, match="output of a run must be"):
            await sequence.decode(1, HiddenStates(), run=Run(2))


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
            found += results[0].tokens.tolist()
        assert results[0].run_end is RunEnd.MAX_TOKENS
        found += (await calls[-1])[0].tokens.tolist()
        assert found == expected
        assert sequence.tokens == PROMPT + expected[:39] and not sequence.in_doubt
        [again] = await client.forward(items[-1:])
        assert again.replayed and again.tokens.tolist() == expected[32:]
        [on] = await client.forward([sequence.item(expected[-1:], SAMPLE)])
        assert on.length == len(PROMPT) + 40


async def test_a_follower_of_what_ends_otherwise_changes_nothing() -> None:
    async with connected() as (_, client):
        expected = await by_hand(client, 12)
        sequence = client.sequence(keep_tokens=True)
        item = sequence.item(PROMPT, SAMPLE, run=Run(8, (expected[3],)))
        behind = sequence.item(output=SAMPLE, follows=item)
        first, second = await asyncio.gather(client.forward([item]), client.forward([behind]))
        assert first[0].run_end is RunEnd.STOP_ID and isinstance(second[0], ChainBroken)
        assert sequence.tokens == PROMPT + expected[:3] and not sequence.in_doubt
        assert (await sequence.decode(expected[3], SAMPLE)).token == expected[4]


async def test_followers_need_a_session() -> None:
    async with connected(session=False) as (_, client), client.sequence() as sequence:
        item = sequence.item(PROMPT, run=Run(2))
        await client.forward([item])
        with pytest.raises(NotSupported, match="sessions"):
            await client.forward([sequence.item(follows=item)])


async def test_an_item_is_sent_again_while_its_follower_waits_for_it() -> None:
    """As after a lost connection, where the client's own attempts for the two end at different times."""
    gate = Gate("forward")
    async with connected(stage=gate) as (_, client):
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
        assert (await again)[0].tokens.tolist() == expected[1:2], "cut where its caller left"
        assert isinstance((await second)[0], ChainBroken)
        [outcome] = await client.forward([sequence.item([expected[1]], SAMPLE, run=Run(3))])
        assert outcome.tokens.tolist() == expected[2:5]


async def test_items_that_are_apart_share_a_frame() -> None:
    """A batch with runs is one frame, and every item has the outcome that is its own."""
    async with connected() as (_, client):
        expected = await by_hand(client, 12)
        sequences = [client.sequence() for _ in range(4)]
        items = [
            sequences[0].item(PROMPT, SAMPLE, run=Run(12)),
            sequences[1].item(PROMPT, SAMPLE, run=Run(3)),
            sequences[2].item(PROMPT, HiddenStates()),
            sequences[3].item([10**6], SAMPLE),
        ]
        long, short, hidden, refused = await client.forward(items)
        assert long.tokens.tolist() == expected and short.tokens.tolist() == expected[:3]
        assert hidden.hidden_states.shape[0] == 1
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
        if made == "all rows":
            output = Positions.ALL
        spec = output if output is Positions.NONE else OutputSpec(output, SAMPLE)
        item = sequence.item(tokens[start:], spec)
        follower = sequence.item(behind or (), SAMPLE, run=Run(7), follows=item)
        [first], [second] = await asyncio.gather(client.forward([item]), client.forward([follower]))
        given = [] if output is Positions.NONE else first.tokens.tolist()[-1:]
        assert given + second.tokens.tolist() == expected[: len(given) + 7]
        assert sequence.length == len(PROMPT) + len(given) + 6 and not sequence.in_doubt
        on = await sequence.decode(expected[len(given) + 6], SAMPLE)
        assert on.token == expected[len(given) + 7]


async def test_a_follower_waits_for_a_creation_that_waits_for_a_lease_a_session_or_a_place() -> None:
    """It is sent behind what it follows, though both were begun at once, at a client that has sent nothing yet, and
    though large answers wait longer for a place than small ones."""
    async with serve_identity(positional=True, kv_blocks=1024) as served:
        for count, output in ((1, SAMPLE), (30, FullLogits())):
            async with ExecutorClient(served.target, session=True, steps_in_flight=2) as client:
                sequences = [client.sequence() for _ in range(count)]
                prompts = [each.item(PROMPT, output) for each in sequences]
                runs = [
                    each.item([9], SAMPLE, run=Run(3), follows=item)
                    for each, item in zip(sequences, prompts, strict=True)
                ]
                both = [each for pair in zip(prompts, runs, strict=True) for each in pair]
                results = await asyncio.gather(*(client.forward([each]) for each in both))
                assert [each.length for [each] in results] == [5, 8] * count


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
        assert [each.length for each in results] == [6, 7]


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
