"""`Sequence.stream` against a real executor: the tokens of single calls, their log-probabilities, and why it ended."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

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
from ferrum_rpc.client.pace import FIRST_RUN
from tests.e2e.test_client_faults import proxied as lossy
from tests.serving import Gate, Served, serve_identity

PROMPT = [3, 1, 4, 1, 5]
CHOSEN = (7, 200, 3)
BESIDE = RowLogprobs(4, CHOSEN)
SAMPLE = Sample(temperature=3.0, seed=5, repetition_penalty=1.3, logprob=True, logprobs=BESIDE)
GREEDY = Greedy(logprob=True, logprobs=BESIDE)

BOTH_WAYS = pytest.mark.parametrize("session", [False, True], ids=["unary", "session"])
EACH_KIND = pytest.mark.parametrize("output", [SAMPLE, GREEDY], ids=["sample", "greedy"])


@dataclass(frozen=True)
class Expected:
    """A token by single calls, with what was asked for beside it."""

    token: int
    logprob: float
    top: list[tuple[int, float]]
    selected: list[float]

    def same_as(self, found: StreamToken) -> bool:
        assert found.top_logprobs is not None and found.selected_logprobs is not None
        assert found.top_logprobs.token_ids.shape == found.top_logprobs.logprobs.shape == (BESIDE.top_k,)
        top = list(zip(found.top_logprobs.token_ids.tolist(), found.top_logprobs.logprobs.tolist(), strict=True))
        same = Expected(found.token, found.logprob or 0.0, top, found.selected_logprobs.tolist())
        return self == same


@asynccontextmanager
async def connected(session: bool = True, **options: Any) -> AsyncIterator[tuple[Served, ExecutorClient]]:
    async with (
        serve_identity(**{"kv_blocks": 1024, "positional": True, **options}) as served,
        ExecutorClient(served.target, session=session) as client,
    ):
        yield served, client
        await served.check()


async def by_hand(
    client: ExecutorClient, count: int, output: Any = SAMPLE, prompt: list[int] = PROMPT
) -> list[Expected]:
    """What single calls give."""
    found = list[Expected]()
    async with client.sequence() as sequence:
        while len(found) < count:
            answer = await (sequence.decode(found[-1].token, output) if found else sequence.prefill(prompt, output))
            [best], [theirs] = map(np.ndarray.tolist, answer.top_logprobs)
            top = list(zip(best, theirs, strict=True))
            [selected] = answer.selected_logprobs.tolist()
            found.append(Expected(answer.token, float(answer.logprobs[0]), top, selected))
    return found


async def taken(sequence: Sequence, tokens: list[int], count: int | None = None, **options: Any) -> list[StreamToken]:
    return [each async for each in sequence.stream(tokens, max_tokens=count, **{"output": SAMPLE, **options})]


def agree(found: list[StreamToken], expected: list[Expected]) -> bool:
    return len(found) == len(expected) and all(a.same_as(b) for a, b in zip(expected, found, strict=True))


def without(client: ExecutorClient, *missing: Capability) -> None:
    """The executor that the client knows lacks some capabilities."""
    info = client._context.known_info
    assert info is not None
    client._context.known_info = replace(info, capabilities=info.capabilities - set(missing))


async def requests(client: ExecutorClient) -> int:
    """Items that the executor was asked for."""
    names = ("Session", "Prefill", "Decode")
    return sum(each.items for each in (await client.status()).methods if each.method.endswith(names))


# --- what it yields ---------------------------------------------------------------------------------------------------


@BOTH_WAYS
@EACH_KIND
@pytest.mark.parametrize(
    "missing", [(), (Capability.FOLLOW,), (Capability.RUN,)], ids=["runs", "no followers", "steps"]
)
async def test_a_stream_has_the_tokens_and_log_probabilities_of_single_calls(
    session: bool, output: Any, missing: tuple[Capability, ...]
) -> None:
    async with connected(session, max_context=96) as (_, client):
        expected = await by_hand(client, 92, output)
        without(client, *missing)
        for count, reason in (
            (1, FinishReason.LENGTH),
            (5, FinishReason.LENGTH),
            (33, FinishReason.LENGTH),
            (None, FinishReason.CONTEXT),
        ):
            async with client.sequence(keep_tokens=True) as sequence:
                found = await taken(sequence, PROMPT, count, output=output, stop=())
                assert agree(found, expected[: count or 92])
                assert [each.finish_reason for each in found] == [None] * (len(found) - 1) + [reason]
                assert sequence.length == len(PROMPT) + len(found) - 1 and sequence._sender.prefetcher is None
                assert not found[-1].more
        async with client.sequence() as sequence:
            ids = [each async for each in sequence.generate(PROMPT, output=output, stop=())]
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
    async with serve_identity(stage=gate, positional=True) as served, ExecutorClient(served.target) as client:
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


@BOTH_WAYS
@EACH_KIND
async def test_a_stop_token_is_reported_and_not_fed(session: bool, output: Any) -> None:
    async with connected(session) as (_, client):
        expected = await by_hand(client, 60, output)
        for end in sorted({each.token for each in expected}):
            first = [each.token for each in expected].index(end)
            async with client.sequence(keep_tokens=True) as sequence:
                found = await taken(sequence, PROMPT, 60, output=output, stop=[end, 10**6])
                assert agree(found, expected[: first + 1])
                assert found[-1].finish_reason is FinishReason.STOP and found[-1].token == end
                assert sequence.tokens == PROMPT + [each.token for each in expected[:first]]
                on = await taken(sequence, [end], 3, output=output, stop=())
                assert agree(on, expected[first + 1 : first + 4]) or first > 56


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


@BOTH_WAYS
async def test_a_stream_is_left_at_any_token_and_goes_on_from_there(session: bool) -> None:
    async with connected(session) as (_, client):
        expected = await by_hand(client, 40)
        for after in range(1, 36):
            sequence, found = client.sequence(keep_tokens=True), list[StreamToken]()
            async with aclosing(sequence.stream(PROMPT, output=SAMPLE, stop=())) as stream:
                while len(found) < after:
                    found.append(await anext(stream))
            assert sequence.tokens == PROMPT + [each.token for each in found[:-1]]
            assert not sequence.in_doubt
            found += await taken(sequence, [found[-1].token], 40 - after, stop=())
            assert agree(found, expected)
            await sequence.release()


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


# --- min_tokens -------------------------------------------------------------------------------------------------------


@BOTH_WAYS
@EACH_KIND
@pytest.mark.parametrize("missing", [(), (Capability.RUN,)], ids=["runs", "steps"])
async def test_no_stop_token_is_chosen_before_min_tokens(
    session: bool, output: Any, missing: tuple[Capability, ...]
) -> None:
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
        info = await client.info()
        client._context.known_info = replace(info, limits=replace(info.limits, max_biases=2))
        async with client.sequence() as sequence:
            with pytest.raises(InvalidRequest) as refused:
                await taken(sequence, PROMPT, 6, min_tokens=3, stop=[1, 2, 3], output=Greedy())
            assert refused.value.field == "min_tokens" and sequence.length == 0 and not sequence.in_doubt
            assert len(await taken(sequence, PROMPT, 6, stop=[], min_tokens=3, output=Greedy())) == 6


async def test_min_tokens_cost_one_request_more() -> None:
    async with connected() as (_, client):
        counts = []
        await taken(client.sequence(), PROMPT, 64)
        for least in (0, 40):
            pace = client._connection.pace
            pace.trip_s, pace.step_s = 0.0, 1e-9  # runs as long as they may be
            before = await requests(client)
            assert len(await taken(client.sequence(), PROMPT, 100, min_tokens=least, stop=[10**6])) == 100
            counts.append(await requests(client) - before)
        assert counts[0] <= counts[1] <= counts[0] + 1


# --- pace, faults -----------------------------------------------------------------------------------------------------


@BOTH_WAYS
async def test_a_delay_bounds_the_length_of_runs(session: bool) -> None:
    async with connected(session) as (_, client):
        expected = await by_hand(client, 33)
        pace = client._connection.pace
        for max_delay_s, step_s, most in ((0.0, 1.0, 1), (0.035, 0.01, 4), (0.3, 10.0, 1), (None, 1e-9, 32)):
            before = await requests(client)
            pace.note = lambda *_: None  # type: ignore[method-assign]
            pace.trip_s, pace.step_s = 0.0, step_s
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
        pace = client._connection.pace
        pace.trip_s, pace.step_s = 0.0, 1e-9
        async with client.sequence() as single:
            with pytest.raises(OutputTooLarge):
                await single.prefill(PROMPT, output, run=Run(32))
        async with client.sequence() as sequence:
            found = await taken(sequence, PROMPT, 60, output=output, stop=())
            assert len(found) == 60
            assert all(each.top_logprobs is not None and len(each.top_logprobs.token_ids) == 200 for each in found)


async def test_log_probabilities_survive_lost_replies_and_a_log_that_keeps_no_rows() -> None:
    async with (
        serve_identity(positional=True, kv_blocks=1024, replay_bytes=1) as served,
        lossy(served.target) as (proxy, target),
        ExecutorClient(served.target) as straight,
    ):
        expected = await by_hand(straight, 60)
        async with ExecutorClient(target, resend=ResendPolicy(times=3, backoff_s=0)) as client:
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
def test_any_history_of_streams_and_calls_is_that_of_single_calls(
    session: bool, steps: list[tuple[str, int, int]]
) -> None:
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
