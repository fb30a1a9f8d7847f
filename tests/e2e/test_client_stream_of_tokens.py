"""A stream of tokens against a real executor: what ends it, and where the sequence stands then."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from ferrum_rpc.client import ExecutorClient, FullLogits, Sample, Sequence
from ferrum_rpc.errors import InvalidRequest
from tests.serving import Gate, Served, serve_identity

PROMPT = [3, 1, 4, 1, 5]
CONTEXT = 48


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[Served]:
    async with serve_identity(max_context=CONTEXT, positional=True) as served:
        yield served


@pytest_asyncio.fixture(loop_scope="module", params=[False, True], ids=["unary", "session"])
async def client(served: Served, request: pytest.FixtureRequest) -> AsyncIterator[ExecutorClient]:
    async with ExecutorClient(served.target, session=request.param) as client:
        yield client


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def by_hand(client: ExecutorClient, steps: int) -> list[int]:
    """What single calls give, greedily."""
    async with client.sequence() as sequence:
        tokens = [(await sequence.prefill(PROMPT)).token]
        while len(tokens) < steps:
            tokens.append((await sequence.decode(tokens[-1])).token)
        return tokens


async def taken(sequence: Sequence, *args: Any, **options: Any) -> list[int]:
    return [token async for token in sequence.generate(*args, **options)]


async def test_a_stream_yields_what_single_calls_give_and_leaves_its_last_token_unfed(client: ExecutorClient) -> None:
    expected = await by_hand(client, 12)
    async with client.sequence() as sequence:
        seen = []
        async for token in sequence.generate(PROMPT, max_tokens=8):
            seen.append(token)
            assert sequence.length == len(PROMPT) + len(seen) - 1
        assert seen == expected[:8]
        assert sequence.length == len(PROMPT) + 7
        assert await taken(sequence, seen[-1:], max_tokens=4) == expected[8:], "it goes on with the token not fed"


async def test_without_a_bound_a_stream_ends_where_the_models_word_or_the_context_ends_it(
    client: ExecutorClient,
) -> None:
    async with client.sequence() as sequence:
        tokens = await taken(sequence, PROMPT)
        assert sequence.length == CONTEXT
        assert len(PROMPT) + len(tokens) == CONTEXT + 1, "the last row was computed, its token can't be fed"
    eos = next(token for token in tokens if token != tokens[0])
    info = await client.info()
    client._context.known_info = type(info)(**{**_fields(info), "model": _with_eos(info.model, eos)})
    async with client.sequence() as sequence:
        assert await taken(sequence, PROMPT) == tokens[: tokens.index(eos)]
        assert await taken(client.sequence(), PROMPT, max_tokens=9, stop=()) == tokens[:9], "no stop but the bound"


def _fields(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


def _with_eos(model: Any, eos: int) -> Any:
    return type(model)(**{**_fields(model), "eos_token_ids": (eos,)})


async def test_a_sampled_stream_is_its_seeds_whatever_way_it_travels(served: Served, client: ExecutorClient) -> None:
    sampling = Sample(temperature=5.0, top_k=50, seed=7)
    texts = []
    async with ExecutorClient(served.target) as other:
        for each, seed in ((client, 7), (other, 7), (client, 8)):
            async with each.sequence() as sequence:
                texts.append(await taken(sequence, PROMPT, max_tokens=16, output=replace(sampling, seed=seed)))
        async with client.sequence() as sequence:
            half = await taken(sequence, PROMPT, max_tokens=9, output=sampling)
            half += await taken(sequence, half[-1:], max_tokens=7, output=sampling)
    assert texts[0] == texts[1] == half
    assert texts[0] != texts[2]
    assert len(set(texts[0])) > 3


async def test_a_stream_is_of_single_tokens(client: ExecutorClient) -> None:
    async with client.sequence() as sequence:
        with pytest.raises(InvalidRequest, match="Greedy"):
            sequence.generate(PROMPT, output=FullLogits())  # type: ignore[arg-type]
        assert sequence.length == 0


async def test_a_stream_that_is_closed_leaves_the_sequence_where_it_stood(client: ExecutorClient) -> None:
    expected = await by_hand(client, 8)
    async with client.sequence() as sequence:
        async with aclosing(sequence.generate(PROMPT)) as stream:
            seen = [await anext(stream) for _ in range(3)]
        assert seen == expected[:3]
        assert (sequence.length, sequence.in_doubt) == (len(PROMPT) + 2, False)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        await sequence.truncate(len(PROMPT))
        assert await taken(sequence, seen[:1], max_tokens=3) == expected[1:4]
    unstarted = client.sequence()
    await unstarted.generate(PROMPT).aclose()
    assert unstarted.length == 0


async def test_mistakes_are_refused_at_the_call(client: ExecutorClient) -> None:
    sequence = client.sequence()
    for field, call in {
        "token_ids": lambda: sequence.generate([]),
        "max_tokens": lambda: sequence.generate([1], max_tokens=0),
        "stop": lambda: sequence.generate([1], stop=3),  # type: ignore[arg-type]
    }.items():
        with pytest.raises(InvalidRequest) as refused:
            call()
        assert refused.value.field == field
    assert sequence.handle is None


@pytest.mark.parametrize("session", [False, True], ids=["unary", "session"])
async def test_a_stream_cancelled_in_a_step_goes_on_from_its_last_token(session: bool) -> None:
    gate = Gate("forward")
    async with (
        serve_identity(stage=gate, positional=True) as served,
        ExecutorClient(served.target, session=session) as client,
        client.sequence() as sequence,
    ):
        expected = await by_hand(client, 100)
        stream = sequence.generate(PROMPT)
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
        assert seen + await taken(sequence, seen[-1:], max_tokens=3) == expected[: len(seen) + 3]
        assert (sequence.length, sequence.in_doubt) == (len(PROMPT) + len(seen) + 2, False)
        await served.check()
