"""Many sequences in one call: rolled back and released together, with an outcome for each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from ferrum_rpc.client import ExecutorClient, Sequence, SequenceMisuseError, sync
from ferrum_rpc.client.retry import fate_unknown
from ferrum_rpc.client.session.transport import SessionTransport
from ferrum_rpc.errors import ExecutorError, HandleReleased, InvalidRequest, TruncateBeyondLength
from tests.serving import Gate, Served, serve_identity
from tests.wiring import messages

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
    return isinstance(client._connection.transport, SessionTransport)


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
    assert gone.handle is not None
    async with ExecutorClient(served.target) as other:
        thief = other.sequence()
        thief._state.handle = gone.handle
        await thief.release()
    results = await client.truncate([(good, 3), (short, 4), (gone, 1), (last, 0)])
    assert [type(each) for each in results] == [type(None), TruncateBeyondLength, HandleReleased, type(None)]
    assert [each.length for each in (good, short, last)] == [3, 2, 0]
    assert not any(each.in_doubt for each in (good, short, gone, last))
    assert (await short.decode(1)).length == 3


async def test_what_was_cancelled_is_settled_by_the_same_call() -> None:
    for session in (False, True):
        gate = Gate("forward")
        async with (
            serve_identity(stage=gate) as served,
            ExecutorClient(served.target, session=session) as client,
        ):
            first, second, other = await fed(client, 3)
            step = await gate.hold(other.decode(1))
            call = asyncio.ensure_future(client.truncate([(first, 2), (second, 3)]))
            async with asyncio.timeout(10):
                while len([each for each in served.server.state.handles.records() if each.busy]) < 3:
                    await client.status()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert first.in_doubt
            assert second.in_doubt
            gate.open()
            await step
            versions = [first.version, second.version]
            again = client.truncate([(first, 2), (second, 3)])
            assert await again == [None, None]
            assert [first.length, second.length] == [2, 3]
            assert [first.version, second.version] == [each + 1 for each in versions], "once, however often it was sent"
            assert not first.in_doubt
            await served.check()


async def test_when_nobody_answers_every_sequence_says_so() -> None:
    for session in (False, True):
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
    with pytest.raises(SequenceMisuseError, match="prefill it first"):
        await client.truncate([(first, 1), (client.sequence(), 1)])
    first._state.claim("decode")
    with pytest.raises(SequenceMisuseError, match="release while decode"):
        await client.release([second, first])
    first._state.busy = ""
    assert not second.released
    assert await client.truncate([(first, 5), (second, 5)]) == [None, None]


async def test_a_program_without_asyncio_has_them_too(served: Served) -> None:
    def program() -> None:
        with sync.ExecutorClient(served.target, session=True) as client:
            sequences = [client.sequence() for _ in range(3)]
            for each in sequences:
                each.prefill([1, 2, 3])
            assert client.truncate((each, 1) for each in sequences) == [None] * 3
            assert [each.length for each in sequences] == [1] * 3
            assert client.release(sequences) == [None] * 3
            assert all(each.released for each in sequences)
            with pytest.raises(InvalidRequest):
                client.release(3)  # type: ignore[arg-type]

    await asyncio.to_thread(program)
