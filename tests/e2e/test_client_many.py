"""Many sequences in one call: fed, rolled back and released together, with an outcome for each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from ferrum_rpc.client import Answer, ExecutorClient, Sequence, SequenceMisuseError
from ferrum_rpc.client.retry import fate_unknown
from ferrum_rpc.errors import ExecutorError, HandleReleased, InvalidRequest, TruncateBeyondLength
from ferrum_rpc.wire.items import handle_to_proto
from tests.support.clients import BOTH_WAYS, answers, connected
from tests.support.serving import Gate, Served, serve_identity
from tests.support.wiring import messages, release, until

MOST = 8
"""Handles that the executor takes at once."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[Served]:
    async with serve_identity(max_batch_items=MOST) as served:
        yield served
        await served.check()


@pytest_asyncio.fixture(loop_scope="module", params=[False, True], ids=["unary", "session"])
async def client(served: Served, request: pytest.FixtureRequest) -> AsyncIterator[ExecutorClient]:
    async with ExecutorClient(served.target, session=request.param) as client:
        yield client


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def fed(client: ExecutorClient, count: int, tokens: int = 6) -> list[Sequence]:
    sequences = [client.sequence(keep_tokens=True) for _ in range(count)]
    await asyncio.gather(*(each.prefill(range(tokens)) for each in sequences))
    return sequences


def by_session(client: ExecutorClient) -> bool:
    return "session" in repr(client)


async def test_many_are_rolled_back_each_to_its_length_in_as_few_messages_as_can_be(client: ExecutorClient) -> None:
    sequences = await fed(client, 2 * MOST + 3)
    sent = messages(client)
    assert await client.truncate([(each, at % 6) for at, each in enumerate(sequences)]) == [None] * len(sequences)
    assert [each.length for each in sequences] == [at % 6 for at in range(len(sequences))]
    assert [each.tokens for each in sequences] == [list(range(at % 6)) for at in range(len(sequences))]
    assert len(sent) == (3 if by_session(client) else len(sequences))
    for at, each in enumerate(sequences[:4]):
        assert (await each.decode(1)).length == at + 1
    assert await client.truncate([]) == []


async def test_a_refusal_is_one_sequences_own(client: ExecutorClient, served: Served) -> None:
    good, short, gone, last = await fed(client, 4)
    await short.truncate(2)
    await release(served, handle_to_proto(gone.handle))
    results = await client.truncate([(good, 3), (short, 4), (gone, 1), (last, 0)])
    assert [type(each) for each in results] == [type(None), TruncateBeyondLength, HandleReleased, type(None)]
    assert [each.length for each in (good, short, last)] == [3, 2, 0]
    assert not any(each.in_doubt for each in (good, short, gone, last))
    assert (await short.decode(1)).length == 3


@BOTH_WAYS
async def test_what_was_cancelled_is_settled_by_the_same_call(session: bool) -> None:
    gate = Gate("forward")
    async with connected(session, stage=gate) as (served, client):
        first, second, other = await fed(client, 3)
        step = await gate.hold(other.decode(1))
        call = asyncio.ensure_future(client.truncate([(first, 2), (second, 3)]))
        await until(lambda: sum(each.busy for each in served.server.state.handles.records()) == 3)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert first.in_doubt and second.in_doubt
        gate.open()
        await step
        versions = [first.version, second.version]
        assert await client.truncate([(first, 2), (second, 3)]) == [None, None]
        assert [first.length, second.length] == [2, 3]
        assert [first.version, second.version] == [each + 1 for each in versions], "once, however often it was sent"
        assert not first.in_doubt


@BOTH_WAYS
async def test_when_nobody_answers_every_sequence_says_so(session: bool) -> None:
    async with (
        serve_identity() as served,
        ExecutorClient(served.target, session=session, release_timeout_s=0.2) as client,
    ):
        sequences = await fed(client, 3)
        await served.server.stop()
        results = await client.truncate([(each, 1) for each in sequences])
        assert all(each is not None and fate_unknown(each) for each in results)
        assert all(each.in_doubt for each in sequences)
        assert [each.length for each in sequences] == [6, 6, 6]
        failures = await client.release(sequences)
        assert all(isinstance(each, ExecutorError) for each in failures)
        assert all(each.released for each in sequences)


async def test_many_are_released_and_what_is_gone_already_counts_as_released(client: ExecutorClient) -> None:
    before = (await client.status()).pressure.sequences
    sequences = await fed(client, 2 * MOST + 3)
    await sequences[0].release()
    unfed = client.sequence()
    sent = messages(client)
    assert await client.release([*sequences, unfed]) == [None] * (len(sequences) + 1)
    assert len(sent) == (3 if by_session(client) else len(sequences) - 1)
    assert all(each.released for each in [*sequences, unfed])
    assert (await client.status()).pressure.sequences == before
    assert await client.release(sequences) == [None] * len(sequences)
    assert await client.release([]) == []


async def test_mistakes_are_refused_before_anything_is_sent(client: ExecutorClient) -> None:
    first, second = await fed(client, 2)
    wrong: Any
    for wrong in ([first], [(first, -1)], [(first, 1.0)], [[first, 1]], [(first,)], first, None):
        with pytest.raises(InvalidRequest, match="rollbacks"):
            await client.truncate(wrong)
    for wrong in ([1], [(first, 1)], first, [None]):
        with pytest.raises(InvalidRequest, match="sequences"):
            await client.release(wrong)
    with pytest.raises(SequenceMisuseError, match="in flight"):
        await client.truncate([(first, 1), (second, 1), (first, 2)])
    with pytest.raises(SequenceMisuseError, match="in flight on the same sequence"):
        await client.forward([second.item([2]), first.item([1]), first.item([2])])
    with pytest.raises(SequenceMisuseError, match="prefill it first"):
        await client.truncate([(first, 1), (client.sequence(), 1)])
    busy = asyncio.ensure_future(first.decode(1))
    await asyncio.sleep(0)
    with pytest.raises(SequenceMisuseError, match="release while decode"):
        await client.release([second, first])
    await busy
    assert not second.released
    assert await client.truncate([(first, 5), (second, 5)]) == [None, None], "both are free again"


# --- batches ----------------------------------------------------------------------------------------------------------


async def test_a_refused_item_leaves_its_sequence_and_all_or_nothing_those_of_its_neighbours(client) -> None:
    good, bad, far = await fed(client, 3, tokens=2)
    before = bad.handle, far.handle
    with pytest.raises(TruncateBeyondLength):
        await client.forward([good.item([3]), far.item([3], truncate_to=77)], all_or_nothing=True)
    assert (good.length, far.length) == (2, 2)
    results = await client.forward([bad.item([999]), good.item([3]), far.item([3], truncate_to=77)])
    assert [type(each) for each in results] == [InvalidRequest, Answer, TruncateBeyondLength]
    assert (good.length, bad.handle, far.handle) == (3, *before)
    assert len(answers(await client.forward([good.item([4]), bad.item([3])], all_or_nothing=True))) == 2


async def test_the_named_batches_say_what_their_items_are(client: ExecutorClient) -> None:
    one, two = client.sequence(), client.sequence()
    first = answers(await client.batch_prefill([one.item([1, 2]), two.item([3, 4, 5])]))
    assert [answer.length for answer in first] == [2, 3]
    then = answers(await client.batch_decode([one.item([first[0].token]), two.item([first[1].token])]))
    assert [answer.length for answer in then] == [3, 4]
    [longer] = await client.batch_decode([one.item([1, 2])])
    assert isinstance(longer, Answer if by_session(client) else InvalidRequest), "a frame does not say it"
    assert await client.forward([]) == []
