"""The session carries what unary calls carry: the same answers and errors, exactly once, through lost connections."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import fields
from types import FrameType
from typing import Any

import pytest

import ferrum_rpc.client
from ferrum_rpc.client import (
    NEVER_RESEND,
    Answer,
    Capability,
    ExecutorClient,
    FullLogits,
    Greedy,
    OutputSpec,
    Positions,
    ResendPolicy,
    RowDType,
    SelectedTokens,
    Sequence,
    TopTokens,
)
from ferrum_rpc.client.pace import FramePace
from ferrum_rpc.core import OutputKind
from ferrum_rpc.errors import (
    DeadlineExceeded,
    ExecutorError,
    HandleReleased,
    InstanceMismatch,
    InvalidRequest,
    KvBlocksExhausted,
    SequenceVersionMismatch,
    TransportError,
    TruncateBeyondLength,
)
from ferrum_rpc.wire.rows import rows_from_proto
from tests.e2e.test_client_faults import counters, play
from tests.faults.proxy import TcpProxy, proxied
from tests.serving import Gate, Served, serve_identity
from tests.wiring import until

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
AT_ONCE = ResendPolicy(backoff_s=0)
PATIENT = ResendPolicy(times=20, backoff_s=0.01)

KINDS: list[OutputKind] = [
    Greedy(),
    Greedy(logprob=True),
    TopTokens(5),
    SelectedTokens((7, 0, 255)),
    FullLogits(),
    FullLogits(RowDType.BF16),
    FullLogits(RowDType.F16),
]


@asynccontextmanager
async def world(
    *, resend: ResendPolicy = AT_ONCE, client: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[tuple[Served, TcpProxy, ExecutorClient]]:
    """An executor, a TCP proxy before it, and a client with a session through that."""
    async with (
        serve_identity(positional=True, **options) as served,
        proxied(served.target) as proxy,
        ExecutorClient(proxy.target, session=True, resend=resend, **(client or {})) as connected,
    ):
        yield served, proxy, connected


@asynccontextmanager
async def both(**options: Any) -> AsyncIterator[tuple[Served, ExecutorClient, ExecutorClient]]:
    """An executor, a client of unary calls, and one with a session."""
    async with (
        serve_identity(positional=True, **options) as served,
        ExecutorClient(served.target) as unary,
        ExecutorClient(served.target, session=True) as session,
    ):
        yield served, unary, session


def raw(answer: Answer | ExecutorError) -> list[Any]:
    """Everything in an answer's rows, byte for byte."""
    assert isinstance(answer, Answer)
    if answer.rows is None:
        return [answer.length]
    block, span = answer.rows.block, slice(answer.rows.first, answer.rows.first + answer.rows.count)
    return [
        answer.length,
        block.kind,
        *((name, column[span].tobytes()) for name, column in block.columns.items()),
    ]


async def calls_of(served: Served) -> set[str]:
    """The methods that were called."""
    return {name.rpartition("/")[2] for name, count in served.server.calls.methods.items() if count.calls}


# --- the same as unary ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inline", [256, 1 << 20], ids=["row frames", "inline"])
async def test_every_kind_of_rows_is_byte_for_byte_the_unary_one(inline: int) -> None:
    async with both(session_inline_bytes=inline) as (served, unary, session):

        async def rows(client: ExecutorClient) -> list[Any]:
            seen: list[Any] = []
            sequences = [client.sequence() for _ in KINDS]
            for positions in Positions:
                outputs = [OutputSpec(positions, kind) for kind in KINDS]
                for tokens in (PROMPT, [1, 2, 3], [4]):
                    items = [each.item(tokens, output) for each, output in zip(sequences, outputs, strict=True)]
                    seen += [raw(each) for each in await client.forward(items)]
            for kind in KINDS:
                async with client.sequence() as sequence:
                    seen.append(raw(await sequence.prefill(PROMPT * 9, kind, chunk=20)))
                    seen.append(raw(await sequence.decode(5, kind, truncate_to=30)))
                    seen.append(raw(await sequence.verify([6, 7, 8], kind)))
            return seen

        expected, got = await rows(unary), await rows(session)
        assert len(got) == len(expected) == 3 * 3 * len(KINDS) + 3 * len(KINDS)
        assert got == expected
        assert "Session" in await calls_of(served)


async def test_an_answer_of_many_times_the_inline_limit_comes_in_frames_and_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    frames: list[int] = []

    def counted(blocks: Any, rows: Any) -> Any:
        frames.append(len(rows))
        return rows_from_proto(blocks, rows)

    monkeypatch.setattr("ferrum_rpc.client.session.stream.rows_from_proto", counted)
    async with both(session_inline_bytes=4096, vocab_size=8192) as (_, unary, session):
        wide = OutputSpec(Positions.ALL, FullLogits())
        answers = []
        for client in (unary, session):
            async with client.sequence() as sequence:
                answers.append(await sequence.prefill(range(256), wide))
        assert answers[1].logits.nbytes == 256 * 8192 * 4
        assert frames == [256], "a row of 32 kB is above the limit of 4 kB: a frame each"
        assert raw(answers[0]) == raw(answers[1])


async def test_forwards_truncates_forks_and_releases_are_frames_and_nothing_else_is_called() -> None:
    async with both() as (served, _, session):
        async with session.sequence() as sequence:
            await sequence.prefill(PROMPT)
            await sequence.truncate(6)
            one, two = await sequence.fork(2, at=5)
            assert (sequence.length, one.length, two.length) == (6, 5, 5)
            async with one, two:
                await session.forward([sequence.item([1]), one.item([2]), two.item([3])])
            await sequence.reserve(8)
        assert await calls_of(served) == {"GetInfo", "AcquireLease", "Session", "ReserveKv"}
        assert (await session.status()).pressure.sequences == 0
        await served.check()


async def test_the_same_life_is_the_same_through_both() -> None:
    async with both() as (served, unary, session):
        for seed in range(3):
            assert await play(session, seed) == await play(unary, seed)
        await served.check()


async def test_refusals_are_the_same_errors() -> None:
    async with both(kv_blocks=8) as (_, unary, session):
        for client in (unary, session):
            async with client.sequence() as sequence:
                with pytest.raises(InvalidRequest) as invalid:
                    await sequence.prefill([999])
                assert invalid.value.field is not None
                await sequence.prefill(PROMPT)
                with pytest.raises(TruncateBeyondLength):
                    await sequence.truncate(99)
                with pytest.raises(KvBlocksExhausted) as full:
                    await sequence.verify([1] * 30)
                assert full.value.number("needed_blocks") is not None
                good, bad = sequence.item([1]), client.sequence().item([999])
                with pytest.raises(InvalidRequest):
                    await client.forward([good, bad], all_or_nothing=True)
                results = await client.forward([good, bad])
                assert isinstance(results[0], Answer)
                assert isinstance(results[1], InvalidRequest)
                stale = client.sequence()
                stale._state.handle = sequence.handle
                await sequence.decode(1)
                with pytest.raises(SequenceVersionMismatch) as mismatch:
                    await stale.decode(1)
                assert mismatch.value.seq_len == sequence.length
                await sequence.release()
                with pytest.raises(HandleReleased):
                    await stale.truncate(1)


async def test_more_calls_than_steps_in_flight_wait_their_turn() -> None:
    async with both(max_steps_in_flight=2) as (served, _, session):
        sequences = [session.sequence() for _ in range(24)]
        await asyncio.gather(*(each.prefill(PROMPT) for each in sequences))
        answers = await asyncio.gather(*(each.decode(1) for each in sequences))
        assert [each.length for each in answers] == [9] * 24
        assert (await counters(served)) == (24, 24 * 9)


async def test_a_decode_that_shares_a_frame_costs_little_more_than_an_item_of_a_batch() -> None:
    """Counted in calls of the client's own functions, which a busy machine does not change. A coroutine counts when it
    begins and when it goes on."""
    here, calls = os.path.dirname(ferrum_rpc.client.__file__), 0

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.startswith(here)

    async def counted(work: Coroutine[Any, Any, object]) -> float:
        nonlocal calls
        calls = 0
        sys.setprofile(count)
        try:
            await work
        finally:
            sys.setprofile(None)
        return calls / (rounds * len(sequences))

    async def alone(sequence: Sequence) -> None:
        for _ in range(rounds):
            await sequence.decode(1)

    async def batches() -> None:
        for _ in range(rounds):
            await client.forward([sequence.item([1]) for sequence in sequences])

    async def everywhere() -> None:
        await asyncio.gather(*map(alone, sequences))

    rounds = 8
    async with serve_identity() as served, ExecutorClient(served.target, session=True) as client:
        sequences = [client.sequence() for _ in range(40)]
        await asyncio.gather(*(each.prefill(PROMPT) for each in sequences))
        item = await counted(batches())
        ask = await counted(everywhere())
    assert item <= 18
    assert ask <= 46


async def test_coroutines_that_decode_at_the_same_time_share_steps_and_no_neighbours_error() -> None:
    async with both() as (served, unary, session):
        answers: list[list[Any]] = []
        for client in (unary, session):
            sequences = [client.sequence() for _ in range(12)]
            for number, each in enumerate(sequences):
                await each.prefill([*PROMPT, number])
            before = served.server.state.engine.counters.steps
            tokens = [999 if number == 5 else number for number in range(12)]
            calls = [each.decode(token) for each, token in zip(sequences, tokens, strict=True)]
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
            answers.append([raw(each) if isinstance(each, Answer) else type(each) for each in outcomes])
        assert served.server.state.engine.counters.steps == before + 1
        assert answers[1] == answers[0]
        assert answers[1][5] is InvalidRequest


# --- lost connections -----------------------------------------------------------------------------------------------


async def test_a_connection_lost_in_the_middle_of_a_step_is_opened_again_and_the_step_runs_once() -> None:
    gate = Gate("forward")
    async with world(stage=gate, resend=PATIENT) as (served, proxy, client):
        sequence = client.sequence()
        await sequence.prefill(PROMPT)
        lease = client.lease
        call = await gate.hold(sequence.decode(7))
        proxy.reset_all()
        gate.open()
        answer = await call
        assert answer.replayed
        assert answer.length == sequence.length == len(PROMPT) + 1
        assert await counters(served) == (1, len(PROMPT) + 1)
        assert lease is not None
        assert client.lease is not None
        assert client.lease.lease_id == lease.lease_id
        assert proxy.connections == 2


async def test_without_a_resend_a_lost_stream_is_an_unknown_fate_that_the_same_call_settles() -> None:
    gate = Gate("forward")
    async with world(stage=gate, resend=NEVER_RESEND) as (served, proxy, client):
        sequence, other = client.sequence(), client.sequence()
        for each in (sequence, other):
            await each.prefill(PROMPT)
        held = await gate.hold(sequence.decode(7))
        queued = asyncio.ensure_future(other.truncate(3))
        await asyncio.sleep(0)
        proxy.reset_all()
        for call in (held, queued):
            with pytest.raises(TransportError) as lost:
                await call
            assert lost.value.metadata["grpc_code"] == "UNAVAILABLE"
        gate.open()
        assert sequence.in_doubt
        assert (await sequence.decode(7)).replayed
        await other.truncate(3)
        assert (sequence.length, other.length) == (len(PROMPT) + 1, 3)
        assert (await counters(served))[1] == 2 * len(PROMPT) + 1


async def test_a_connection_lost_between_steps_costs_nobody_anything() -> None:
    async with world(resend=NEVER_RESEND) as (served, proxy, client), client.sequence() as sequence:
        await sequence.prefill(PROMPT)
        transport = client._connection.transport
        for length in range(9, 12):
            proxy.reset_all()
            await until(lambda: not transport.ready)
            answer = await sequence.decode(1)
            assert (answer.length, answer.replayed) == (length, False)
        assert (await counters(served)) == (1, 11)


@pytest.mark.parametrize("seed", range(4))
async def test_a_life_of_lost_connections_is_the_life_without(seed: int) -> None:
    async with world(resend=PATIENT) as (served, proxy, client):
        quiet = await play(client, seed)
        fed = served.server.state.engine.counters.tokens
        proxy.weather.resets = 0.08
        noisy = await play(client, seed)
        proxy.weather.resets = 0
        assert proxy.lost_connections > 0
        assert noisy == quiet
        assert served.server.state.engine.counters.tokens == 2 * fed, "every token was fed exactly once"
        assert (await counters(served))[0] == 0
        await served.check()


async def test_after_a_restart_old_handles_say_so_and_a_rebuilt_sequence_goes_on_the_same() -> None:
    async with (
        serve_identity(positional=True) as second,
        world(resend=PATIENT) as (_, proxy, client),
        client.sequence(rebuild=True) as carefree,
        client.sequence() as careful,
        client.sequence() as whole,
    ):
        instance = (await client.info()).instance_id
        for sequence in (carefree, careful, whole):
            await sequence.prefill(PROMPT)
        expected = [(await whole.decode(token)).token for token in range(5)]
        proxy.upstream = second.target
        proxy.reset_all()
        with pytest.raises(InstanceMismatch):
            await careful.decode(0)
        assert [(await carefree.decode(token)).token for token in range(5)] == expected
        assert (await client.info()).instance_id != instance
        assert client.lease is not None
        fresh = client.sequence()
        await fresh.prefill(PROMPT)
        assert len(second.server.state.handles) == 2


# --- giving up ------------------------------------------------------------------------------------------------------


async def test_a_step_that_is_cancelled_before_it_began_never_does(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate("forward")
    monkeypatch.setattr(FramePace, "answered", lambda pace, *_: setattr(pace, "most", 2))  # both are in flight at once
    async with world(stage=gate) as (served, _, client):
        first, second = client.sequence(), client.sequence()
        for sequence in (first, second):
            await sequence.prefill(PROMPT)
        running = await gate.hold(first.decode(1))
        queued = asyncio.ensure_future(second.decode(2))
        await until(lambda: served.server.state.engine.queued_items > 0)
        queued.cancel()
        with pytest.raises(asyncio.CancelledError):
            await queued
        await until(lambda: served.server.state.engine.queued_items == 0)
        gate.open()
        await running
        assert (await second.decode(3)).length == len(PROMPT) + 1, "its sequence is as it was"
        assert (await counters(served))[1] == 2 * len(PROMPT) + 2


async def test_a_step_that_has_not_begun_by_its_deadline_never_does(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate("forward")
    monkeypatch.setattr(FramePace, "answered", lambda pace, *_: setattr(pace, "most", 2))  # both are in flight at once
    async with world(stage=gate, resend=NEVER_RESEND) as (served, _, client):
        first, second = client.sequence(), client.sequence()
        for sequence in (first, second):
            await sequence.prefill(PROMPT)
        running = await gate.hold(first.decode(1))
        late = asyncio.ensure_future(second.decode(2, timeout_s=0.5))
        await until(lambda: served.server.state.engine.queued_items > 0)
        with pytest.raises(DeadlineExceeded):
            await late
        await until(lambda: served.server.state.engine.queued_items == 0)
        gate.open()
        await running
        await second.decode(3)
        assert (await counters(served))[1] == 2 * len(PROMPT) + 2


# --- opening and closing --------------------------------------------------------------------------------------------


async def test_no_stream_is_opened_before_there_is_something_to_say() -> None:
    async with both() as (served, _, session):
        await session.info()
        assert (await session.status()).sessions == 0
        async with session.sequence() as sequence:
            await sequence.prefill(PROMPT)
            assert (await session.status()).sessions == 1
            assert (await session.status()).leases == 1
        assert await calls_of(served) == {"GetInfo", "GetStatus", "AcquireLease", "Session"}


async def test_leaving_the_client_ends_its_session_its_lease_and_its_sequences() -> None:
    async with serve_identity() as served, ExecutorClient(served.target) as observer:
        async with ExecutorClient(served.target, session=True) as client:
            for _ in range(3):
                await client.sequence().prefill(PROMPT)
            assert (await observer.status()).pressure.sequences == 3
        await until(lambda: len(served.server.state.leases) == 0)
        assert (await observer.status()).pressure.sequences == 0
        await until(lambda: served.server.state.sessions == 0)
        assert "Release" not in await calls_of(served), "one word frees them all"
        await served.check()


async def test_without_a_lease_of_its_own_the_session_has_one_and_keeps_it() -> None:
    async with (
        serve_identity(lease_ttl_s=1.0) as served,
        ExecutorClient(served.target, session=True, lease=None) as client,
    ):
        sequence = client.sequence()
        await sequence.prefill(PROMPT)
        assert client.lease is not None
        lease = next(iter(served.server.state.leases._live.values()))
        first = lease.expires
        await until(lambda: lease.expires > first)
        assert await calls_of(served) == {"GetInfo", "Session"}, "renewed by frames"
        assert (await sequence.decode(1)).length == len(PROMPT) + 1


async def test_a_lost_lease_opens_another_session_with_another_lease() -> None:
    async with world(resend=PATIENT) as (served, _, client):
        old = client.sequence(rebuild=True)
        expected = (await old.prefill(PROMPT)).token
        assert client.lease is not None
        lost = client.lease.lease_id
        assert await client.revoke_lease(lost) == 1
        fresh = client.sequence()
        assert (await fresh.prefill(PROMPT)).token == expected
        assert client.lease.lease_id != lost
        await old.decode(1)
        [branch] = await fresh.fork()
        leases = {record.lease.id for record in served.server.state.handles.records() if record.lease is not None}
        assert leases == {client.lease.lease_id}
        assert (branch.length, old.length) == (len(PROMPT), len(PROMPT) + 1)


async def test_an_executor_without_sessions_gets_unary_calls_and_that_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with both() as (served, _, session):
        real = await session.info()
        context: Any = session._context
        context.known_info = type(real)(
            **{each.name: getattr(real, each.name) for each in fields(real) if each.name != "capabilities"},
            capabilities=real.capabilities - {Capability.SESSION},
        )
        with caplog.at_level(logging.WARNING, logger="ferrum_rpc.client"):
            async with session.sequence() as sequence:
                await sequence.prefill(PROMPT)
                await sequence.decode(1)
        assert len([each for each in caplog.records if "SESSION" in each.getMessage()]) == 1
        assert {"Prefill", "Decode", "Release"} <= await calls_of(served)
        assert "Session" not in await calls_of(served)


async def test_a_frame_that_is_too_long_is_refused_alone_and_not_with_the_stream() -> None:
    async with (
        serve_identity(max_request_bytes=4096, max_batch_tokens=8192, max_context=8192, kv_blocks=4096) as served,
        ExecutorClient(served.target, session=True) as client,
    ):
        neighbour, long = client.sequence(), client.sequence()
        answer = await neighbour.prefill([1])
        opened = list(served.server.sessions)
        outcomes = await asyncio.gather(
            long.prefill([200] * 8000), neighbour.decode(answer.token), return_exceptions=True
        )
        assert isinstance(outcomes[0], InvalidRequest) and not isinstance(outcomes[1], BaseException)
        assert list(served.server.sessions) == opened  # the same stream still stands
