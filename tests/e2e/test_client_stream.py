"""`Sequence.stream` against a real executor: the tokens of single calls, their log-probabilities, and why it ended."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ferrum_rpc.client import (
    Capability,
    ExecutorClient,
    FinishReason,
    FullLogits,
    Greedy,
    InvalidRequest,
    OutputTooLarge,
    ResendPolicy,
    RowLogprobs,
    Run,
    Sample,
    Sequence,
    StreamToken,
)
from ferrum_rpc.client.client import connection_of
from ferrum_rpc.client.pace import FIRST_RUN
from ferrum_rpc.client.sequence import sender_of
from tests.support.clients import BOTH_WAYS, PROMPT, believe, connected, losing, requests, text, without
from tests.support.serving import Gate

CHOSEN = (7, 200, 3)
BESIDE = RowLogprobs(4, CHOSEN)
SAMPLE = Sample(temperature=3.0, seed=5, repetition_penalty=1.3, logprob=True, logprobs=BESIDE)
GREEDY = Greedy(logprob=True, logprobs=BESIDE)

KINDS = {"sample": SAMPLE, "greedy": GREEDY}
LACKS: dict[str, tuple[Capability, ...]] = {
    "runs": (),
    "no followers": (Capability.FOLLOW,),
    "steps": (Capability.RUN,),
}


def each_way(*named: tuple[bool, str, str]) -> pytest.MarkDecorator:
    """A test by these ways to send, kinds of output and executors: any two of them stand together once."""
    chosen = [(session, KINDS[kind], LACKS[lacks]) for session, kind, lacks in named]
    ids = [f"{kind}-{lacks}-{'session' if session else 'unary'}" for session, kind, lacks in named]
    return pytest.mark.parametrize(("session", "output", "missing"), chosen, ids=ids)


class Fact(NamedTuple):
    """A token, with what was asked for beside it."""

    token: int
    logprob: float | None
    top: list[list[int] | list[float]]
    selected: list[float]


def fact(found: StreamToken) -> Fact:
    assert found.top_logprobs is not None and found.selected_logprobs is not None
    top = [each.tolist() for each in found.top_logprobs]
    return Fact(found.token, found.logprob, top, found.selected_logprobs.tolist())


async def by_hand(client: ExecutorClient, count: int, output: Any = SAMPLE) -> list[Fact]:
    """What single calls give."""
    found = list[Fact]()
    async with client.sequence() as sequence:
        while len(found) < count:
            answer = await (sequence.decode(found[-1].token, output) if found else sequence.prefill(PROMPT, output))
            top = [each[0].tolist() for each in answer.top_logprobs]
            found.append(Fact(answer.token, answer.logprobs.tolist()[0], top, answer.selected_logprobs.tolist()[0]))
    return found


async def taken(sequence: Sequence, tokens: list[int], count: int | None = None, **options: Any) -> list[StreamToken]:
    return [each async for each in sequence.stream(tokens, max_tokens=count, **{"output": SAMPLE, **options})]


def agree(found: list[StreamToken], expected: list[Fact]) -> bool:
    return list(map(fact, found)) == expected


# --- what it yields ---------------------------------------------------------------------------------------------------


@each_way(
    (True, "sample", "runs"),
    (False, "greedy", "runs"),
    (True, "greedy", "no followers"),
    (False, "sample", "no followers"),
    (True, "greedy", "steps"),
    (False, "sample", "steps"),
)
async def test_a_stream_has_the_tokens_and_log_probabilities_of_single_calls(session, output, missing) -> None:
    async with connected(session, max_context=64) as (_, client):
        expected = await by_hand(client, 60, output)
        without(client, *missing)
        for count in (1, 5, 33, None):
            reason = FinishReason.CONTEXT if count is None else FinishReason.LENGTH
            async with client.sequence(keep_tokens=True) as sequence:
                found = await taken(sequence, PROMPT, count, output=output, stop=())
                assert agree(found, expected[: count or 60])
                assert [each.finish_reason for each in found] == [None] * (len(found) - 1) + [reason]
                assert sequence.tokens == (PROMPT + [each.token for each in found])[: sequence.length]
                assert sequence.length == len(PROMPT) + len(found) - 1 and sender_of(sequence).prefetcher is None
                assert not found[-1].more
        ids = await text(client, PROMPT, None, output, stop=())
        assert ids == [each.token for each in expected], "generate is a view of it"


async def test_what_was_not_asked_for_is_none_and_arrays_are_read_only() -> None:
    async with connected() as (_, client):
        async with client.sequence() as sequence:
            [bare, *_] = await taken(sequence, PROMPT, 3, output=Greedy())
            assert bare.logprob is bare.top_logprobs is bare.selected_logprobs is None
        async with client.sequence() as sequence:
            [one, *_] = await taken(sequence, PROMPT, 3, output=Greedy(logprobs=RowLogprobs(2)))
            assert one.logprob is None and one.selected_logprobs is None and one.top_logprobs is not None
            with pytest.raises(ValueError, match="read-only"):
                one.top_logprobs.logprobs[0] = 0.0


@BOTH_WAYS
async def test_the_first_token_has_the_cached_tokens_of_the_whole_prompt(session: bool) -> None:
    prompt = [each % 250 for each in range(70)]
    async with connected(session, max_batch_tokens=32) as (_, client):
        async with client.sequence() as sequence:
            assert not any(each.cached_tokens for each in await taken(sequence, prompt, 20))
        async with client.sequence() as single, client.sequence() as sequence:
            cached = (await single.prefill(prompt, run=Run(4))).cached_tokens
            assert cached > 32, "of more than one chunk"
            assert [each.cached_tokens for each in await taken(sequence, prompt, 20)] == [cached] + [0] * 19


async def test_more_says_what_can_be_read_without_waiting() -> None:
    gate = Gate("forward")
    async with connected(session=False, stage=gate) as (_, client):
        sequence = client.sequence()
        async with aclosing(sequence.stream(PROMPT, stop=())) as stream:
            first = await anext(stream)
            gate.closed, seen = True, 1
            while first.more:
                first = await asyncio.wait_for(anext(stream), 30)
                seen += 1
            assert seen == FIRST_RUN
            gate.open()


# --- how it ends ------------------------------------------------------------------------------------------------------


@each_way((True, "sample", "runs"), (False, "greedy", "runs"), (False, "sample", "runs"), (True, "greedy", "runs"))
async def test_a_stop_token_is_reported_and_not_fed(session, output, missing) -> None:
    async with connected(session) as (_, client):
        expected = await by_hand(client, 60, output)
        without(client, *missing)
        tokens = [each.token for each in expected]
        firsts = sorted({tokens.index(each) for each in tokens})
        for first in firsts[:8] + firsts[8::7]:  # ends of all short runs, and some of long ones
            end = tokens[first]
            async with client.sequence(keep_tokens=True) as sequence:
                found = await taken(sequence, PROMPT, 60, output=output, stop=[end, 10**6])
                assert agree(found, expected[: first + 1])
                assert found[-1].finish_reason is FinishReason.STOP and found[-1].token == end
                assert sequence.tokens == PROMPT + [each.token for each in expected[:first]]
                on = await taken(sequence, [end], 3, output=output, stop=())
                assert agree(on, expected[first + 1 : first + 4]) or first > 56
            ids = await text(client, PROMPT, 60, output, stop=[end])
            assert ids == tokens[:first], "generate does not yield it"


async def test_the_reason_that_comes_first_counts_and_a_stop_comes_before_a_length() -> None:
    async with connected(max_context=len(PROMPT) + 8) as (_, client):
        expected = [each.token for each in await by_hand(client, 9)]
        assert len(set(expected)) == 9
        for count, stop, reason, length in (
            (4, expected[3:4], FinishReason.STOP, 4),
            (4, expected[4:5], FinishReason.LENGTH, 4),
            (9, (), FinishReason.LENGTH, 9),
            (10, (), FinishReason.CONTEXT, 9),
            (10, expected[8:], FinishReason.STOP, 9),
        ):
            found = await taken(client.sequence(), PROMPT, count, stop=stop)
            assert [each.token for each in found] == expected[:length]
            assert found[-1].finish_reason is reason


async def test_mistakes_are_refused_at_the_call() -> None:
    async with connected() as (_, client):
        sequence = client.sequence()
        wrong: dict[str, list[dict[str, Any]]] = {
            "token_ids": [{"tokens": []}],
            "max_tokens": [{"max_tokens": 0}],
            "min_tokens": [{"min_tokens": -1}, {"min_tokens": True}, {"max_tokens": 3, "min_tokens": 4}],
            "stop": [{"stop": 3}],
            "output": [{"output": FullLogits()}],
            "max_delay_s": [{"max_delay_s": each} for each in (-0.1, float("nan"), "1", True)],
        }
        for field, each in wrong.items():
            for options in each:
                for call in (sequence.stream, sequence.generate):
                    with pytest.raises(InvalidRequest) as refused:
                        call(**{"tokens": [1], **options})
                    assert refused.value.field == field
        assert sequence.handle is None


@BOTH_WAYS
async def test_without_a_bound_a_stream_ends_at_a_token_of_the_model_or_with_the_context(session: bool) -> None:
    async with connected(session, max_context=48) as (_, client):
        async with client.sequence() as sequence:
            tokens = [each.token for each in await taken(sequence, PROMPT)]
            assert sequence.length == 48, "the last row was computed, its token cannot be fed"
            assert len(PROMPT) + len(tokens) == 49
        end = next(token for token in tokens if token != tokens[0])
        believe(client, model=replace((await client.info()).model, eos_token_ids=(end,)))
        for stop, count in ((None, tokens.index(end) + 1), ((), 9)):
            async with client.sequence() as sequence:
                found = await taken(sequence, PROMPT, 9 if stop == () else None, stop=stop)
                assert [each.token for each in found] == tokens[:count]


@BOTH_WAYS
async def test_a_stream_cancelled_in_a_step_goes_on_from_its_last_token(session: bool) -> None:
    gate = Gate("forward")
    async with connected(session, stage=gate) as (served, client), client.sequence() as sequence:
        expected = [each.token for each in await by_hand(client, 100)]
        stream = sequence.generate(PROMPT, output=SAMPLE)
        seen = [await anext(stream) for _ in range(3)]
        gate.closed = True
        [record] = served.server.state.handles.records()
        held = asyncio.ensure_future(anext(stream))
        while not (gate.reached.is_set() and record.version == sequence.version and not held.done()):
            if held.done():
                seen.append(held.result())
                held = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0)
        held.cancel()
        with pytest.raises(asyncio.CancelledError):
            await held
        gate.open()
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        assert sequence.in_doubt
        assert sequence.length == len(PROMPT) + len(seen) - 1
        seen += [each.token for each in await taken(sequence, seen[-1:], 3)]
        assert seen == expected[: len(seen)]
        assert (sequence.length, sequence.in_doubt) == (len(PROMPT) + len(seen) - 1, False)


# --- min_tokens -------------------------------------------------------------------------------------------------------


@each_way((True, "sample", "runs"), (False, "greedy", "runs"), (False, "sample", "steps"), (True, "greedy", "steps"))
async def test_no_stop_token_is_chosen_before_min_tokens(session, output, missing) -> None:
    """The tokens are those of single calls with a mask that forbids the stop tokens, then of calls without it."""
    async with connected(session) as (_, client):
        free = [each.token for each in await by_hand(client, 12, output)]
        stop = sorted({*free[:4], free[9]})
        allowed = np.ones((await client.info()).model.vocab_size, bool)
        allowed[stop] = False
        masked = replace(output, mask=await client.register_token_mask(allowed))
        without(client, *missing)
        for least in (1, 2, FIRST_RUN, FIRST_RUN + 1, 9, 30):
            expected = list[int]()
            async with client.sequence() as single:
                while not expected or (expected[-1] not in stop and len(expected) < 40):
                    kind = masked if len(expected) < least else output
                    answer = await (single.decode(expected[-1], kind) if expected else single.prefill(PROMPT, kind))
                    expected.append(answer.token)
            assert not set(expected[:least]) & set(stop)
            async with client.sequence() as sequence:
                found = await taken(sequence, PROMPT, 40, min_tokens=least, stop=stop, output=output)
                assert [each.token for each in found] == expected
                ended = FinishReason.STOP if expected[-1] in stop else FinishReason.LENGTH
                assert found[-1].finish_reason is ended
                assert sequence.length == len(PROMPT) + len(found) - 1


async def test_log_probabilities_before_min_tokens_are_of_the_models_row() -> None:
    async with connected() as (_, client):
        async with client.sequence() as sequence:
            greedy = await sequence.prefill(PROMPT, GREEDY)
        async with client.sequence() as sequence:
            [first] = await taken(sequence, PROMPT, 1, min_tokens=1, stop=[greedy.token], output=GREEDY)
        assert first.token != greedy.token and first.top_logprobs is not None
        assert first.top_logprobs.logprobs.tolist() == greedy.top_logprobs.logprobs[0].tolist()
        assert first.top_logprobs.token_ids[0] == greedy.token


async def test_min_tokens_hold_from_where_a_stream_goes_on_after_another_call() -> None:
    async with connected() as (_, client):
        stop = list(range(128))
        async with client.sequence() as sequence:
            found = list[int]()
            async for each in sequence.stream(PROMPT, max_tokens=20, min_tokens=20, stop=stop, output=SAMPLE):
                found.append(each.token)
                if len(found) in (2, 9):
                    await sequence.decode(77)
            assert len(found) == 20 and not set(found) & set(stop)


async def test_where_a_mask_allows_stop_tokens_only_they_are_fed_until_min_tokens() -> None:
    async with connected() as (_, client):
        allowed = np.zeros((await client.info()).model.vocab_size, bool)
        allowed[[7, 9]] = True
        output = Greedy(mask=await client.register_token_mask(allowed))
        async with client.sequence() as sequence:
            found = await taken(sequence, PROMPT, 20, min_tokens=6, stop=[7, 9], output=output)
        assert [each.token in (7, 9) for each in found] == [True] * 7
        assert [each.finish_reason for each in found] == [None] * 6 + [FinishReason.STOP]


async def test_own_biases_stay_before_min_tokens_and_too_many_stop_ids_are_refused() -> None:
    async with connected() as (_, client):
        biased = Sample(temperature=0.0, bias=((11, 1e6), (12, 1e5)))
        async with client.sequence() as sequence:
            found = await taken(sequence, PROMPT, 6, min_tokens=3, stop=[11], output=biased)
        assert [each.token for each in found] == [12, 12, 12, 11]
        believe(client, limits=replace((await client.info()).limits, max_biases=2))
        async with client.sequence() as sequence:
            with pytest.raises(InvalidRequest) as refused:
                await taken(sequence, PROMPT, 6, min_tokens=3, stop=[1, 2, 3], output=Greedy())
            assert refused.value.field == "min_tokens" and sequence.length == 0 and not sequence.in_doubt
            assert len(await taken(sequence, PROMPT, 6, stop=[], min_tokens=3, output=Greedy())) == 6


def steps_take(client: ExecutorClient, step_s: float) -> None:
    """As if it had measured so."""
    pace = connection_of(client).pace
    pace.trip_s, pace.step_s = 0.0, step_s


async def test_min_tokens_cost_one_request_more() -> None:
    async with connected() as (_, client):
        counts = []
        await taken(client.sequence(), PROMPT, 64)
        for least in (0, 40):
            steps_take(client, 1e-9)  # runs as long as they may be
            before = await requests(client)
            assert len(await taken(client.sequence(), PROMPT, 100, min_tokens=least, stop=[10**6])) == 100
            counts.append(await requests(client) - before)
        assert counts[0] <= counts[1] <= counts[0] + 1


# --- pace, faults -----------------------------------------------------------------------------------------------------


@BOTH_WAYS
async def test_a_delay_bounds_the_length_of_runs(session: bool) -> None:
    async with connected(session) as (_, client):
        expected = await by_hand(client, 33)
        for max_delay_s, step_s, most in ((0.0, 1.0, 1), (0.035, 0.01, 4), (0.3, 10.0, 1), (None, 1e-9, 32)):
            before = await requests(client)
            connection_of(client).pace.note = lambda *_: None
            steps_take(client, step_s)
            found = await taken(client.sequence(), PROMPT, 33, max_delay_s=max_delay_s)
            assert agree(found, expected)
            runs = await requests(client) - before
            least = -(-33 // most)
            assert least <= runs <= least + 1


@BOTH_WAYS
async def test_runs_are_no_longer_than_their_answers_may_be(session: bool) -> None:
    """A run of the executor's limit with so many log-probabilities would be refused with `OutputTooLarge`."""
    async with connected(session, max_response_bytes=8000, max_session_response_bytes=9000) as (_, client):
        output = Greedy(logprob=True, logprobs=RowLogprobs(200))
        steps_take(client, 1e-9)
        async with client.sequence() as single:
            with pytest.raises(OutputTooLarge):
                await single.prefill(PROMPT, output, run=Run(32))
        async with client.sequence() as sequence:
            found = await taken(sequence, PROMPT, 60, output=output, stop=())
            assert len(found) == 60
            assert all(each.top_logprobs is not None and len(each.top_logprobs.token_ids) == 200 for each in found)


async def test_log_probabilities_survive_lost_replies_and_a_log_that_keeps_no_rows() -> None:
    about = {"resend": ResendPolicy(times=3, backoff_s=0)}
    async with losing(about=about, kv_blocks=1024, replay_bytes=1) as (_, proxy, client):
        expected = await by_hand(client, 60)
        for only in ("Prefill", "Decode"):
            proxy.only, lost = only, proxy.lost
            proxy.faults.extend(["lose", "", "refuse"] * 20)
            async with client.sequence() as sequence:
                assert agree(await taken(sequence, PROMPT, 60), expected)
            assert proxy.lost > lost
            proxy.faults.clear()


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["leave", "end", "stop", "generate", "decode", "truncate", "between", "least"]),
        st.integers(1, 12),
        st.integers(0, 2**16),
    ),
    min_size=2,
    max_size=8,
)


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(session=st.booleans(), steps=STEPS)
def test_any_history_of_streams_and_calls_is_that_of_single_calls(session, steps) -> None:
    """Whatever a stream computed ahead, the sequence is where its reader is, and what follows is the same."""
    asyncio.run(lived(session, steps))


async def lived(session: bool, steps: list[tuple[str, int, int]]) -> None:
    async with connected(session) as (_, client), client.sequence(keep_tokens=True) as sequence:

        async def after(fed: list[int], output: Sample = SAMPLE) -> int:
            async with client.sequence() as other:
                return (await other.prefill(fed, output)).token

        held, unfed = list[int](), list(PROMPT)
        for what, count, seed in steps:
            rng = random.Random(seed)
            if what == "truncate" and len(held) > 1:
                length = rng.randint(1, len(held) - 1)
                await sequence.truncate(length)
                held, unfed = held[:length], [rng.randrange(250)]
                continue
            if what == "decode" and len(unfed) == 1:
                answer = await sequence.decode(unfed[0], SAMPLE)
                held, unfed = held + unfed, [answer.token]
                assert await after(held) == answer.token
                continue
            stop = [rng.randrange(250) for _ in range(60)] if what in ("stop", "least") else ()
            options: dict[str, Any] = {"stop": stop, "max_tokens": None if what == "leave" else count, "output": SAMPLE}
            least, masked = 0, SAMPLE
            if what == "least":
                least = options["min_tokens"] = rng.randint(0, count)
                allowed = np.ones((await client.info()).model.vocab_size, bool)
                allowed[stop] = False
                masked = replace(SAMPLE, mask=await client.register_token_mask(allowed))
            seen = list[StreamToken]()
            async with aclosing(sequence.stream(unfed, **options)) as stream:
                async for each in stream:
                    seen.append(each)
                    held, unfed = held + unfed, [each.token]
                    assert await after(held, masked if len(seen) <= least else SAMPLE) == each.token
                    if what == "between" and rng.random() < 0.3:
                        extra = rng.randrange(250)
                        await sequence.decode(extra, SAMPLE)
                        held.append(extra)
                    if what == "leave" and len(seen) == count:
                        break
            assert sequence.tokens == held
            if what != "leave":
                assert seen[-1].finish_reason is not None
