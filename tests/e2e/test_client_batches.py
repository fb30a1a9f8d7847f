"""Batches through the client: one forward pass, an outcome per item, and items that are safe to send again."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

import ferrum_rpc.client
from ferrum_rpc.client import (
    Answer,
    CacheMode,
    ExecutorClient,
    FullLogits,
    Greedy,
    OutputSpec,
    Positions,
    SequenceMisuseError,
    TopTokens,
)
from ferrum_rpc.errors import InvalidRequest, KvBlocksExhausted, QueueFull, TruncateBeyondLength
from tests.identity_oracle import OracleConfig, identity_logits
from tests.serving import Gate, Served, serve_identity
from tests.wiring import until

ORACLE = OracleConfig(positional=True)


@pytest_asyncio.fixture
async def served() -> AsyncIterator[Served]:
    async with serve_identity(kv_blocks=64, block_size=4, max_context=128, positional=True) as served:
        yield served


@pytest_asyncio.fixture
async def client(served: Served) -> AsyncIterator[ExecutorClient]:
    async with ExecutorClient(served.target) as client:
        yield client


def answers(results: list[Any]) -> list[Answer]:
    assert all(isinstance(each, Answer) for each in results), results
    return results


async def test_a_mixed_batch_runs_in_one_step_and_each_item_gets_what_it_asked_for(client: ExecutorClient) -> None:
    decoding, chunked, verifying = (client.sequence(keep_tokens=True) for _ in range(3))
    for sequence in (decoding, chunked, verifying):
        await sequence.prefill([1, 2, 3])
    new = client.sequence(keep_tokens=True)
    items = [
        decoding.item([4], FullLogits()),
        chunked.item([5, 6, 7], OutputSpec(Positions.NONE)),
        verifying.item([8, 9], OutputSpec(Positions.ALL, FullLogits()), truncate_to=2),
        new.item([10, 11], TopTokens(3)),
    ]
    decode, chunk, verify, prefill = answers(await client.forward(items))
    assert len({answer.timing for answer in (decode, chunk, verify, prefill)}) == 1
    assert decode.timing is not None
    assert (decode.timing.sequences, decode.timing.tokens) == (4, 8)
    np.testing.assert_allclose(decode.logits, identity_logits([1, 2, 3, 4], [3], ORACLE), atol=1e-5)
    assert chunk.rows is None
    np.testing.assert_allclose(verify.logits, identity_logits([1, 2, 8, 9], [2, 3], ORACLE), atol=1e-5)
    assert prefill.top_tokens.token_ids[0, 0] == identity_logits([10, 11], [1], ORACLE).argmax()
    assert [each.tokens for each in (decoding, chunked, verifying, new)] == [
        [1, 2, 3, 4],
        [1, 2, 3, 5, 6, 7],
        [1, 2, 8, 9],
        [10, 11],
    ]


async def test_a_refused_item_is_returned_and_its_neighbours_advance(client: ExecutorClient) -> None:
    good, bad, far = (client.sequence() for _ in range(3))
    for sequence in (good, bad, far):
        await sequence.prefill([1, 2])
    before = bad.handle, far.handle
    results = await client.forward([bad.item([999]), good.item([3]), far.item([3], truncate_to=77)])
    assert isinstance(results[0], InvalidRequest)
    assert isinstance(results[1], Answer)
    assert isinstance(results[2], TruncateBeyondLength)
    assert (good.length, bad.handle, far.handle) == (3, *before)


async def test_all_or_nothing_raises_and_nobody_advances(client: ExecutorClient) -> None:
    good, bad = client.sequence(), client.sequence()
    for sequence in (good, bad):
        await sequence.prefill([1, 2])
    with pytest.raises(TruncateBeyondLength):
        await client.forward([good.item([3]), bad.item([3], truncate_to=77)], all_or_nothing=True)
    assert (good.length, bad.length) == (2, 2)
    assert len(answers(await client.forward([good.item([3]), bad.item([3])], all_or_nothing=True))) == 2


async def test_the_named_batches_say_what_their_items_are(client: ExecutorClient) -> None:
    one, two = client.sequence(), client.sequence()
    first = answers(await client.batch_prefill([one.item([1, 2]), two.item([3, 4, 5])]))
    assert [answer.length for answer in first] == [2, 3]
    then = answers(await client.batch_decode([one.item([first[0].token]), two.item([first[1].token])]))
    assert [answer.length for answer in then] == [3, 4]
    assert isinstance((await client.batch_decode([one.item([1, 2])]))[0], InvalidRequest)
    assert await client.forward([]) == []


async def test_the_same_sequence_twice_is_refused_before_anything_is_sent(client: ExecutorClient) -> None:
    sequence, other = client.sequence(), client.sequence()
    await sequence.prefill([1])
    with pytest.raises(SequenceMisuseError, match="in flight on the same sequence"):
        await client.forward([other.item([2]), sequence.item([1]), sequence.item([2])])
    assert sequence.length == 1
    assert len(answers(await client.forward([other.item([2]), sequence.item([1])]))) == 2, "both are free again"


async def test_an_item_built_before_the_sequence_moved_on_is_refused(client: ExecutorClient) -> None:
    sequence = client.sequence()
    await sequence.prefill([1])
    stale = sequence.item([2])
    await sequence.decode(3)
    with pytest.raises(SequenceMisuseError, match="moved on to 2"):
        await client.forward([stale])


async def test_the_same_items_sent_again_are_answered_and_not_run_again(client: ExecutorClient) -> None:
    sequence, new = client.sequence(), client.sequence()
    await sequence.prefill([1])
    items = [sequence.item([2], FullLogits()), new.item([3, 4], Greedy())]
    first = answers(await client.forward(items))
    again = answers(await client.forward(items))
    assert [answer.replayed for answer in first + again] == [False, False, True, True]
    np.testing.assert_array_equal(first[0].logits, again[0].logits)
    assert first[1].token == again[1].token
    assert (sequence.length, new.length) == (2, 2)
    assert (await client.status()).pressure.sequences == 2


async def test_overload_is_raised_at_once_and_the_same_items_can_wait_for_room() -> None:
    gate = Gate("forward")
    async with (
        serve_identity(stage=gate, max_queued_items=2) as served,
        ExecutorClient(served.target) as client,
    ):
        sequences = [client.sequence() for _ in range(5)]
        for sequence in sequences:
            await sequence.prefill([1])
        running = await gate.hold(sequences[0].decode(2))
        queued = asyncio.ensure_future(client.forward([sequences[1].item([2]), sequences[2].item([2])]))
        await until(lambda: served.server.state.engine.queued_items == 2)
        items = [sequences[3].item([2]), sequences[4].item([2])]
        with pytest.raises(QueueFull) as refused:
            await client.forward(items)
        assert refused.value.retry_after_s is not None
        status = await client.status()
        counts = [each for each in status.methods if each.method.endswith("/UnifiedForward")]
        assert counts[0].calls == 2, "RESOURCE_EXHAUSTED is not retried by itself"
        gate.open()
        await running
        answers(await queued)
        assert [answer.replayed for answer in answers(await client.forward(items))] == [False, False]


async def test_one_starving_item_does_not_starve_the_batch(client: ExecutorClient) -> None:
    hog, small, large = (client.sequence(cache_mode=CacheMode.BYPASS) for _ in range(3))
    await hog.prefill([0] * 100)
    await hog.reserve(28)
    results = await client.forward([large.item([0] * 128), small.item([0] * 100)])
    assert isinstance(results[0], Answer)
    assert isinstance(results[1], KvBlocksExhausted)


async def test_the_example_of_the_package_runs(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    text = re.split(r"\n\n(?=Sequences )", ferrum_rpc.client.__doc__ or "")[0]
    code = "\n".join(line.removeprefix("    ") for line in text.splitlines()[2:])
    code = code.replace("localhost:50051", served.target).replace("asyncio.run(main())", "")
    scope: dict[str, Any] = {}
    exec(code, scope)  # noqa: S102 - our own docstring
    await scope["main"]()
    assert "identity 256" in capsys.readouterr().out
