"""The session carries what unary calls carry: the same answers and errors, exactly once, through lost connections."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from types import FrameType
from typing import Any

import pytest

import ferrum_rpc.client
from ferrum_rpc.client import (
    NEVER_RESEND,
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
from ferrum_rpc.client.client import connection_of
from ferrum_rpc.errors import InvalidRequest, TransportError
from tests.support.clients import raw, without
from tests.support.lives import counters, play
from tests.support.proxy import TcpProxy, proxied
from tests.support.serving import Gate, Served, serve_identity
from tests.support.wiring import until

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
PATIENT = ResendPolicy(times=20, backoff_s=0.01)

KINDS = [
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
    *, resend: ResendPolicy = PATIENT, **options: Any
) -> AsyncIterator[tuple[Served, TcpProxy, ExecutorClient]]:
    """An executor, a TCP proxy before it, and a client with a session through that."""
    async with (
        serve_identity(positional=True, **options) as served,
        proxied(served.target) as proxy,
        ExecutorClient(proxy.target, session=True, resend=resend) as connected,
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


def calls_of(served: Served) -> set[str]:
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
        assert "Session" in calls_of(served)


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
        assert calls_of(served) == {"GetInfo", "AcquireLease", "Session", "ReserveKv"}
        assert (await session.status()).pressure.sequences == 0
        await served.check()


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


# --- lost connections -----------------------------------------------------------------------------------------------


async def test_a_connection_lost_in_the_middle_of_a_step_is_opened_again_and_the_step_runs_once() -> None:
    gate = Gate("forward")
    async with world(stage=gate) as (served, proxy, client):
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
        assert client.lease.lease_id == lease.lease_id
        assert proxy.connections == 2


async def test_a_step_that_waits_for_its_turn_goes_with_the_next_connection() -> None:
    """It was never sent: also a client that sends nothing twice does so."""
    gate = Gate("forward")
    async with (
        serve_identity(stage=gate) as served,
        proxied(served.target) as proxy,
        ExecutorClient(proxy.target, session=True, resend=NEVER_RESEND, steps_in_flight=1) as client,
    ):
        first, second = client.sequence(), client.sequence()
        for each in (first, second):
            await each.prefill(PROMPT)
        sent = await gate.hold(first.decode(1))
        waits = asyncio.ensure_future(second.decode(1))
        await asyncio.sleep(0)
        proxy.reset_all()
        with pytest.raises(TransportError):
            await sent
        gate.open()
        assert (await waits).length == len(PROMPT) + 1


async def test_a_connection_lost_between_steps_costs_nobody_anything() -> None:
    async with world(resend=NEVER_RESEND) as (served, proxy, client), client.sequence() as sequence:
        await sequence.prefill(PROMPT)
        transport = connection_of(client).transport
        for length in range(9, 12):
            proxy.reset_all()
            await until(lambda: not transport.ready)
            answer = await sequence.decode(1)
            assert (answer.length, answer.replayed) == (length, False)
        assert (await counters(served)) == (1, 11)


@pytest.mark.parametrize("seed", range(3))
async def test_a_life_of_lost_connections_is_that_of_unary_calls(seed: int) -> None:
    async with world() as (served, proxy, client), ExecutorClient(served.target) as unary:
        quiet = await play(unary, seed)
        fed = served.server.state.engine.counters.tokens
        proxy.weather.resets = 0.08
        noisy = await play(client, seed)
        proxy.weather.resets = 0
        assert proxy.lost_connections > 0
        assert noisy == quiet
        assert served.server.state.engine.counters.tokens == 2 * fed, "every token was fed exactly once"
        assert (await counters(served))[0] == 0
        await served.check()


# --- opening and closing --------------------------------------------------------------------------------------------


async def test_no_stream_is_opened_before_there_is_something_to_say() -> None:
    async with both() as (served, _, session):
        await session.info()
        assert (await session.status()).sessions == 0
        async with session.sequence() as sequence:
            await sequence.prefill(PROMPT)
            status = await session.status()
            assert (status.sessions, status.leases) == (1, 1)
        assert calls_of(served) == {"GetInfo", "GetStatus", "AcquireLease", "Session"}


async def test_without_a_lease_of_its_own_the_session_has_one_and_keeps_it() -> None:
    async with (
        serve_identity(lease_ttl_s=1.0) as served,
        ExecutorClient(served.target, session=True, lease=None) as client,
    ):
        sequence = client.sequence()
        await sequence.prefill(PROMPT)
        assert client.lease is not None
        [lease] = [each.lease for each in served.server.state.handles.records()]
        first = lease.expires
        await until(lambda: lease.expires > first)
        assert calls_of(served) == {"GetInfo", "Session"}, "renewed by frames"
        assert (await sequence.decode(1)).length == len(PROMPT) + 1


async def test_a_lost_lease_opens_another_session_with_another_lease() -> None:
    async with world() as (served, _, client):
        old = client.sequence(rebuild=True)
        expected = (await old.prefill(PROMPT)).token
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


async def test_an_executor_without_sessions_gets_unary_calls_and_that_is_said_once(caplog) -> None:
    async with both() as (served, _, session):
        await session.info()
        without(session, Capability.SESSION)
        with caplog.at_level(logging.WARNING, logger="ferrum_rpc.client"):
            async with session.sequence() as sequence:
                await sequence.prefill(PROMPT)
                await sequence.decode(1)
        assert len([each for each in caplog.records if "SESSION" in each.getMessage()]) == 1
        assert {"Prefill", "Decode", "Release"} <= calls_of(served)
        assert "Session" not in calls_of(served)


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
