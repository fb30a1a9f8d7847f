"""A sequence through the client, against a real executor over a real port: lengths, rows, rollback, forks, release."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from ferrum_rpc.client import (
    Capability,
    ExecutorClient,
    ExecutorState,
    FullLogits,
    Health,
    OutputSpec,
    Positions,
    SequenceMisuseError,
)
from ferrum_rpc.client.client import connection_of
from ferrum_rpc.errors import (
    ContextLengthExceeded,
    InstanceMismatch,
    InvalidRequest,
    KvBlocksExhausted,
    NotSupported,
    StepFailed,
    TruncateBeyondLength,
)
from ferrum_rpc.failpoints import Failpoints, parse_failpoints
from tests.support.clients import BOTH_WAYS
from tests.support.identity_oracle import OracleConfig, identity_logits
from tests.support.serving import Served, serve_identity
from tests.support.waiting import until

ORACLE = OracleConfig(positional=True)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
ALL = Positions.ALL


@pytest_asyncio.fixture
async def served() -> AsyncIterator[Served]:
    """64 blocks of 4 tokens, a context of as many tokens, at most 16 tokens a call."""
    async with serve_identity(
        kv_blocks=64, block_size=4, max_context=256, max_batch_tokens=16, positional=True
    ) as served:
        yield served


@pytest_asyncio.fixture
async def client(served: Served) -> AsyncIterator[ExecutorClient]:
    async with ExecutorClient(served.target) as client:
        yield client


async def live(client: ExecutorClient) -> int:
    """Sequences that the executor holds."""
    return (await client.status()).pressure.sequences


def assert_close(rows: np.ndarray, tokens: list[int], positions: list[int] | None = None) -> None:
    np.testing.assert_allclose(rows, identity_logits(tokens, positions, ORACLE), atol=1e-5)


# --- lengths and rows -----------------------------------------------------------------------------------------------


async def test_a_prompt_longer_than_a_call_goes_in_chunks_and_asks_for_rows_once(client: ExecutorClient) -> None:
    prompt = [(7 * at) % 256 for at in range(50)]
    before = (await client.status()).counters
    async with client.sequence() as sequence:
        answer = await sequence.prefill(prompt, FullLogits())
        after = (await client.status()).counters
        assert (after.steps - before.steps, after.rows - before.rows) == (4, 1)
        assert_close(answer.logits, prompt, [49])


async def test_rows_too_large_for_one_message_are_fetched_in_smaller_chunks() -> None:
    room = 3 * 256 * 4 + (64 << 10)  # three rows beside the allowance for the rest of a message
    async with (
        serve_identity(max_response_bytes=room, positional=True) as served,
        ExecutorClient(served.target) as client,
        client.sequence() as sequence,
    ):
        answer = await sequence.prefill(range(40), OutputSpec(ALL, FullLogits()))
        assert_close(answer.logits, list(range(40)))


# --- refusals -------------------------------------------------------------------------------------------------------


async def test_a_refused_call_leaves_the_sequence_as_it_was(client: ExecutorClient) -> None:
    async with client.sequence() as sequence:
        await sequence.prefill(PROMPT)
        before = sequence.handle
        for call, error in (
            (sequence.decode(256), InvalidRequest),
            (sequence.truncate(99), TruncateBeyondLength),
            (sequence.decode(1, truncate_to=99), TruncateBeyondLength),
            (sequence.prefill([0] * 256), ContextLengthExceeded),
        ):
            length = sequence.length
            with pytest.raises(error):
                await call
            assert error is ContextLengthExceeded or sequence.handle == before
            assert sequence.length >= length
        answer = await sequence.decode(1, FullLogits(), truncate_to=len(PROMPT))
        assert_close(answer.logits, [*PROMPT, 1], [len(PROMPT)])


async def test_a_long_prompt_that_stops_halfway_goes_on_where_it_stopped(client: ExecutorClient) -> None:
    prompt = [(3 * at) % 256 for at in range(90)]
    async with client.sequence() as hog, client.sequence() as sequence:
        await hog.prefill([0] * 160)
        async with client.sequence() as other:
            await other.prefill([0] * 48)
            with pytest.raises(KvBlocksExhausted):
                await sequence.prefill(prompt, OutputSpec(ALL, FullLogits()))
            assert 0 < sequence.length < len(prompt)
        answer = await sequence.prefill(prompt, OutputSpec(ALL, FullLogits()))
        assert sequence.length == len(prompt)
        assert_close(answer.logits, prompt)


async def test_a_sequence_in_use_refuses_a_second_call_before_anything_is_sent(client: ExecutorClient) -> None:
    async with client.sequence() as sequence:
        await sequence.prefill(PROMPT)
        calls = (await client.status()).counters.steps
        first = asyncio.ensure_future(sequence.decode(1))
        await asyncio.sleep(0)
        calls_beside = (sequence.decode(2), sequence.truncate(1), sequence.fork(), sequence.release())
        for second in (*calls_beside, client.forward([sequence.item([2])])):
            with pytest.raises(SequenceMisuseError, match="while decode is in flight"):
                await second
        await first
        assert sequence.length == len(PROMPT) + 1
        assert (await client.status()).counters.steps == calls + 1


async def test_a_sequence_that_holds_nothing_must_be_prefilled_first(client: ExecutorClient) -> None:
    sequence = client.sequence()
    for call in (sequence.decode(1), sequence.verify([1]), sequence.truncate(0), sequence.fork(), sequence.reserve(1)):
        with pytest.raises(SequenceMisuseError, match="prefill it first"):
            await call


# --- release --------------------------------------------------------------------------------------------------------


ENDINGS: dict[str, type] = {
    "released twice": type(None),
    "an error": ZeroDivisionError,
    "a refusal": InvalidRequest,
    "a time-out": TimeoutError,
    "a cancel": asyncio.CancelledError,
}


@pytest.mark.parametrize("how", ENDINGS)
async def test_a_sequence_is_released_however_its_body_ends(client: ExecutorClient, how: str) -> None:
    fed = asyncio.Event()

    async def use() -> None:
        async with client.sequence() as sequence:
            await sequence.prefill(PROMPT)
            fed.set()
            match how:
                case "released twice":
                    await sequence.release()
                    await sequence.release()
                case "an error":
                    raise ZeroDivisionError
                case "a refusal":
                    await sequence.decode(999)
                case "a time-out":
                    async with asyncio.timeout(0):
                        await sequence.decode(1)
                case _:
                    await asyncio.Event().wait()

    task = asyncio.create_task(use())
    await fed.wait()
    if how == "a cancel":
        task.cancel()
    [outcome] = await asyncio.gather(task, return_exceptions=True)
    assert type(outcome) is ENDINGS[how]
    pressure = (await client.status()).pressure
    assert (pressure.sequences, pressure.free_blocks) == (0, pressure.total_blocks)


async def test_a_task_cancelled_during_its_release_does_not_stop_it(served: Served) -> None:
    async with ExecutorClient(served.target) as client:
        sequence = client.sequence()
        await sequence.prefill(PROMPT)
        task = asyncio.create_task(sequence.release())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    async with ExecutorClient(served.target) as other:
        assert await live(other) == 0


async def test_a_client_remembers_only_sequences_that_the_executor_may_hold(client: ExecutorClient) -> None:
    live = connection_of(client).live
    for _ in range(5):
        client.sequence()
        with pytest.raises(InvalidRequest):
            await client.sequence().prefill([999])
        async with client.sequence() as sequence:
            await sequence.prefill(PROMPT)
            for child in await sequence.fork(2):
                await child.release()
            assert len(live) == 1
    assert not live


@BOTH_WAYS
@pytest.mark.parametrize("again", ["by its own", "by another's", "by the client's end"])
async def test_a_release_that_failed_is_made_again(session: bool, again: str) -> None:
    async with serve_identity(failpoints=Failpoints(parse_failpoints("release=error@1"))) as served:
        live = served.server.state.handles.live
        async with ExecutorClient(served.target, session=session, lease=None) as client:
            sequence = client.sequence()
            await sequence.prefill(PROMPT)
            with pytest.raises(StepFailed):
                await sequence.release()
            assert len(live) == 1
            if again == "by its own":
                await sequence.release()
                assert not live
                await sequence.release()
            elif again == "by another's":
                async with client.sequence() as other:
                    await other.prefill(PROMPT)
                await until(lambda: not live)
        await until(lambda: not live)


async def test_a_released_sequence_cannot_be_used(client: ExecutorClient) -> None:
    async with client.sequence() as sequence:
        await sequence.prefill(PROMPT)
    assert sequence.released
    for call in (sequence.decode(1), sequence.prefill([1]), sequence.truncate(0), sequence.rebuild([1])):
        with pytest.raises(SequenceMisuseError, match="released"):
            await call
    with pytest.raises(SequenceMisuseError, match="released"):
        sequence.item([1])


# --- rebuilding -----------------------------------------------------------------------------------------------------


async def test_rebuild_takes_tokens_from_a_caller_who_keeps_them_and_answers_their_row(client: ExecutorClient) -> None:
    async with client.sequence() as sequence:
        for _ in range(2):  # a sequence can begin so
            answer = await sequence.rebuild(PROMPT, FullLogits())
            assert_close(answer.logits, PROMPT, [len(PROMPT) - 1])
            assert await live(client) == 1, "the old one was released"
        with pytest.raises(SequenceMisuseError, match="keep_tokens"):
            await sequence.rebuild()


SURVIVORS: dict[str, Any] = {
    "prefill": lambda sequence: sequence.prefill([7, 8]),
    "long prefill": lambda sequence: sequence.prefill(range(40)),
    "decode": lambda sequence: sequence.decode(7),
    "decode after a rollback": lambda sequence: sequence.decode(7, truncate_to=3),
    "decode after a rollback to nothing": lambda sequence: sequence.decode(7, truncate_to=0),
    "verify": lambda sequence: sequence.verify([7, 8, 9]),
    "truncate": lambda sequence: sequence.truncate(5),
    "reserve": lambda sequence: sequence.reserve(5),
}


@pytest.mark.parametrize("name", SURVIVORS)
async def test_a_sequence_with_the_rebuild_policy_survives_its_loss_in_any_call(client, name) -> None:
    rows = []
    for lose in (False, True):
        async with client.sequence(rebuild=True) as sequence:
            await sequence.prefill(range(30))
            if lose:
                await client.reset()
            await SURVIVORS[name](sequence)
            length = sequence.length
            rows.append((length, sequence.tokens, (await sequence.decode(99, FullLogits())).logits.tolist()))
    assert rows[0][:2] == rows[1][:2]
    np.testing.assert_allclose(rows[0][2], rows[1][2], atol=1e-6)


async def test_what_is_rolled_back_anyway_is_not_fed_again(client: ExecutorClient) -> None:
    async with client.sequence(rebuild=True) as sequence:
        await sequence.prefill(range(60))
        await client.reset()
        before = (await client.status()).counters.tokens
        await sequence.decode(7, truncate_to=5)
        assert (await client.status()).counters.tokens == before + 6


async def test_a_fork_of_a_lost_sequence_is_a_fork_of_its_rebuilt_self(client: ExecutorClient) -> None:
    async with client.sequence(rebuild=True) as sequence:
        await sequence.prefill(PROMPT)
        await client.reset()
        [child] = await sequence.fork()
        async with child:
            answer = await child.decode(1, FullLogits())
            assert_close(answer.logits, [*PROMPT, 1], [len(PROMPT)])


async def test_a_rebuild_that_finds_no_room_is_taken_up_again_by_the_next_call(client: ExecutorClient) -> None:
    async with client.sequence(rebuild=True) as sequence, client.sequence() as hog:
        await sequence.prefill(range(60))
        await client.reset()
        await hog.prefill([0] * 180)
        async with client.sequence() as other:
            await other.prefill([0] * 16)
            await other.reserve(16)
            with pytest.raises(KvBlocksExhausted):
                await sequence.decode(7)
            assert sequence.length == 60
            with pytest.raises(SequenceMisuseError, match="not rebuilt yet"):
                sequence.item([7])
        answer = await sequence.decode(7, FullLogits())
        assert_close(answer.logits, [*range(60), 7], [60])


async def test_an_explicit_rebuild_that_finds_no_room_can_be_repeated(client: ExecutorClient) -> None:
    async with client.sequence() as sequence, client.sequence() as hog:
        await sequence.prefill([1])
        await hog.prefill([0] * 200)
        with pytest.raises(KvBlocksExhausted):
            await sequence.rebuild(range(100))
        await hog.truncate(4)
        assert sequence.length == 100
        answer = await sequence.decode(7, FullLogits())
        assert_close(answer.logits, [*range(100), 7], [100])


# --- the executor ---------------------------------------------------------------------------------------------------


async def test_info_tells_what_the_executor_is_and_is_asked_once(served: Served, client: ExecutorClient) -> None:
    info = await client.info()
    assert info is await client.info()
    assert (info.model.name, info.model.vocab_size, info.model.max_context) == ("identity", 256, 256)
    assert (info.block_size, info.total_blocks, info.limits.max_batch_tokens) == (4, 64, 16)
    assert info.instance_id == served.server.state.handles.instance_id
    assert {Capability.OUTPUT_GREEDY, Capability.REPLAY, Capability.FORK} <= info.capabilities
    assert info.device.kind == "cpu"
    assert all(choice and reason for choice, reason in info.device.choices)


async def test_status_counts_what_was_done(client: ExecutorClient) -> None:
    async with client.sequence() as sequence:
        await sequence.prefill(PROMPT)
    status = await client.status()
    assert status.state is ExecutorState.SERVING
    assert (status.counters.steps, status.counters.tokens, status.counters.rows) == (1, len(PROMPT), 1)
    assert (status.counters.sequences_created, status.counters.sequences_released) == (1, 1)
    assert status.counters.forward_s > 0
    prefills = [each for each in status.methods if each.method.endswith("/Prefill")]
    assert [(each.calls, each.items, each.errors) for each in prefills] == [(1, 1, 0)]


async def test_every_answer_tells_pressure_and_timing_and_the_client_keeps_the_last(client: ExecutorClient) -> None:
    assert client.pressure is None
    async with client.sequence() as sequence:
        answer = await sequence.prefill(PROMPT)
        assert answer.pressure is client.pressure
        assert answer.pressure.free_blocks == 64 - 3
        assert (answer.timing.step, answer.timing.tokens, answer.timing.sequences) == (1, len(PROMPT), 1)
        assert answer.timing.forward_s > 0
    assert client.pressure.free_blocks == 64


async def test_health_warmup_and_reset_reach_the_executor(client: ExecutorClient) -> None:
    assert await client.health() is Health.SERVING
    assert await client.health("ferrum_rpc.executor.v1.ModelExecutor") is Health.SERVING
    report = await client.warmup(batch_size=2, prefill_tokens=4)
    assert report.steps >= 1
    assert report.elapsed_s > 0
    with pytest.raises(InstanceMismatch):
        await client.reset(instance_id="another life")
    assert await client.reset(instance_id=(await client.info()).instance_id) == 0


async def test_the_live_sequences_are_listed_page_by_page(client, monkeypatch) -> None:
    monkeypatch.setattr("ferrum_rpc.service.control.LIST_PAGE", 2)
    assert await client.list_sequences() == []
    sequences = [client.sequence() for _ in range(5)]
    for length, sequence in enumerate(sequences, 3):
        await sequence.prefill(PROMPT[:length])
    found = await client.list_sequences()
    assert [each.length for each in found] == [3, 4, 5, 6, 7]
    assert [each.blocks for each in found] == [1, 1, 2, 2, 2]
    assert len({each.label for each in found}) == 5
    assert all(each.leased and not each.busy and each.client_name and each.idle_s >= 0 for each in found)
    for sequence in sequences:
        await sequence.release()
    assert await client.list_sequences() == []


async def test_an_executor_that_needs_newer_clients_is_refused(client, monkeypatch) -> None:
    monkeypatch.setattr("ferrum_rpc.client.context.SCHEMA_REVISION", 0)
    with pytest.raises(NotSupported, match="needs clients of schema revision"):
        await client.info()


async def test_a_client_must_be_open(served: Served) -> None:
    client = ExecutorClient(served.target)
    for use in (client.info, client.status, client.sequence):
        with pytest.raises(RuntimeError, match="not open"):
            await use()  # type: ignore[misc]
    async with client:
        with pytest.raises(RuntimeError, match="open already"):
            await client.__aenter__()
    await client.close()
