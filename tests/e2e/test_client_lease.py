"""A client's sequences live with its lease: freed with it, kept by it, and made anew when it was lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import fields
from typing import Any

import pytest

from ferrum_rpc.client import (
    NEVER_RESEND,
    Answer,
    Capability,
    ExecutorClient,
    LeasePolicy,
    LeaseTrouble,
    ResendPolicy,
)
from ferrum_rpc.errors import (
    InvalidRequest,
    LeaseExpired,
    LeaseUnknown,
    SequencesExhausted,
    TransportError,
)
from tests.e2e.test_client_faults import proxied
from tests.serving import Served, serve_identity

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
AT_ONCE = ResendPolicy(backoff_s=0)
BOTH_WAYS = pytest.mark.parametrize("session", [True, False], ids=["session", "unary"])


@asynccontextmanager
async def world(
    *, client: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[tuple[Served, ExecutorClient]]:
    async with (
        serve_identity(positional=True, **options) as served,
        ExecutorClient(served.target, resend=AT_ONCE, **(client or {})) as connected,
    ):
        yield served, connected


def leases(served: Served) -> list[str]:
    """The lease of each live sequence; empty for none."""
    return ["" if each.lease is None else each.lease.id for each in served.server.state.handles.records()]


def calls(served: Served, method: str) -> int:
    """How often a method was called."""
    return sum(
        each.calls for name, each in served.server.calls.methods.items() if name.endswith(f"ModelExecutor/{method}")
    )


async def in_time(predicate: Callable[[], bool]) -> None:
    """Wait for what takes real time, such as the end of a lease."""
    for _ in range(6000):
        if predicate():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it never came to be")


async def lose_lease(served: Served, client: ExecutorClient) -> str:
    """The executor forgets the client's lease, as if it had heard nothing for too long."""
    assert client.lease is not None
    lease = served.server.state.leases._live[client.lease.lease_id]
    lease.expires = 0.0
    await in_time(lambda: lease.id not in served.server.state.leases._live)
    return lease.id


@BOTH_WAYS
async def test_all_sequences_of_a_client_share_one_lease_with_its_name(session: bool) -> None:
    async with world(client={"client_name": "somebody", "session": session}) as (served, client):
        assert client.lease is None
        sequences = [client.sequence() for _ in range(8)]
        await asyncio.gather(*(each.prefill(PROMPT) for each in sequences[:4]))
        await client.forward([each.item(PROMPT) for each in sequences[4:]])
        await sequences[0].fork(2)
        assert client.lease is not None
        assert leases(served) == [client.lease.lease_id] * 10
        assert served.server.state.leases._live[client.lease.lease_id].client_name == "somebody"
        assert calls(served, "AcquireLease") == 1


@BOTH_WAYS
async def test_a_lease_that_the_caller_names_wins(session: bool) -> None:
    async with world(client={"session": session}) as (served, client):
        own = await client.acquire_lease(5.0, client_name="mine")
        assert (own.ttl_s, own.renew_every_s) == (5.0, pytest.approx(5 / 6))
        named = client.sequence(lease_id=own.lease_id)
        await named.prefill(PROMPT)
        await named.fork()
        await client.sequence().prefill(PROMPT)
        assert client.lease is not None
        assert sorted(leases(served)) == sorted([own.lease_id] * 2 + [client.lease.lease_id])
        assert await client.keep_alive(own.lease_id) == 5.0
        assert await client.revoke_lease(own.lease_id) == 2
        for call in (client.keep_alive, client.revoke_lease):
            with pytest.raises(LeaseUnknown):
                await call(own.lease_id)
        with pytest.raises(LeaseUnknown):
            await client.sequence(lease_id=own.lease_id).prefill(PROMPT)
        assert leases(served) == [client.lease.lease_id], "its own lease is no worse for that"


async def test_a_client_that_wants_no_lease_has_none() -> None:
    async with world(client={"lease": None}) as (served, client):
        await client.sequence().prefill(PROMPT)
        assert (leases(served), client.lease) == ([""], None)
        assert calls(served, "AcquireLease") == 0
    assert leases(served) == []


async def test_an_executor_without_leases_is_used_without() -> None:
    async with world() as (served, client):
        real = await client.info()
        context: Any = client._context
        context.known_info = type(real)(
            **{each.name: getattr(real, each.name) for each in fields(real) if each.name != "capabilities"},
            capabilities=real.capabilities - {Capability.LEASES},
        )
        await client.sequence().prefill(PROMPT)
        assert (leases(served), client.lease) == ([""], None)


async def test_leaving_the_client_frees_its_sequences_in_one_call() -> None:
    async with serve_identity() as served:
        async with ExecutorClient(served.target) as client:
            for _ in range(5):
                await client.sequence().prefill(PROMPT)
            released = client.sequence()
            await released.prefill(PROMPT)
            await released.release()
        assert leases(served) == []
        assert len(served.server.state.leases) == 0
        assert (calls(served, "RevokeLease"), calls(served, "Release")) == (1, 1)
        await served.check()


@BOTH_WAYS
async def test_a_client_that_says_nothing_keeps_its_sequences_and_one_that_is_gone_does_not(session: bool) -> None:
    async with (
        serve_identity(min_lease_ttl_s=0.5) as served,
        ExecutorClient(served.target, lease=LeasePolicy(ttl_s=1.0), session=session) as quiet,
        ExecutorClient(served.target, lease=LeasePolicy(ttl_s=1.0)) as gone,
    ):
        kept, lost = quiet.sequence(), gone.sequence()
        for each in (kept, lost):
            await each.prefill(PROMPT)
        gone._connection.leases.stop()  # as if its process were
        await in_time(lambda: len(served.server.state.handles) == 1)
        assert (await kept.decode(1)).length == len(PROMPT) + 1
        with pytest.raises(LeaseExpired):
            await lost.decode(1)
        assert quiet.lease is not None
        assert quiet.lease.healthy
        assert quiet.lease.ttl_s == 1.0


async def test_renewals_that_fail_are_told_and_so_is_the_loss_and_a_rebuilt_sequence_goes_on_the_same() -> None:
    told: list[LeaseTrouble] = []
    async with (
        serve_identity(positional=True, min_lease_ttl_s=0.1) as served,
        proxied(served.target) as (proxy, target),
        ExecutorClient(
            target, lease=LeasePolicy(ttl_s=0.4), on_lease_trouble=told.append, resend=NEVER_RESEND
        ) as client,
    ):
        sequence, whole = client.sequence(rebuild=True), client.sequence(rebuild=True)
        for each in (sequence, whole):
            await each.prefill(PROMPT)
        expected = [(await whole.decode(token)).token for token in range(4)]
        assert client.lease is not None
        lease_id = client.lease.lease_id
        proxy.only = "KeepAlive"
        proxy.faults.extend(["refuse"] * 1000)
        await in_time(lambda: len(told) == 1)
        assert isinstance(told[0].error, TransportError)
        await in_time(lambda: len(served.server.state.leases) == 0)
        proxy.faults.clear()
        await in_time(lambda: len(told) == 2)
        assert [(each.lease_id, each.lost) for each in told] == [(lease_id, False), (lease_id, True)]
        assert isinstance(told[1].error, LeaseExpired)
        assert client.lease is None
        assert [(await sequence.decode(token)).token for token in range(4)] == expected
        assert client.lease is not None
        assert client.lease.lease_id != lease_id
        assert len(told) == 2


Create = Callable[[ExecutorClient], Awaitable[list[Any]]]

CREATIONS: dict[str, Create] = {
    "alone": lambda client: asyncio.gather(client.sequence().prefill(PROMPT)),
    "together": lambda client: asyncio.gather(*(client.sequence().prefill(PROMPT) for _ in range(5))),
    "batch": lambda client: client.forward([client.sequence().item(PROMPT) for _ in range(3)]),
    "atomic batch": lambda client: client.forward(
        [client.sequence().item(PROMPT) for _ in range(3)], all_or_nothing=True
    ),
}


@BOTH_WAYS
@pytest.mark.parametrize("how", CREATIONS)
async def test_a_sequence_begun_after_the_lease_was_lost_gets_a_new_one_and_never_knows(
    how: str, session: bool
) -> None:
    async with world(client={"session": session}) as (served, client):
        await client.sequence().prefill(PROMPT)
        lost = await lose_lease(served, client)
        answers = await CREATIONS[how](client)
        assert all(isinstance(each, Answer) for each in answers)
        assert client.lease is not None
        assert client.lease.lease_id != lost
        assert leases(served) == [client.lease.lease_id] * len(answers)
        assert len(served.server.state.leases) == 1


@BOTH_WAYS
async def test_in_a_batch_after_a_lost_lease_each_item_has_its_own_outcome(session: bool) -> None:
    async with world(client={"session": session}) as (served, client):
        old = client.sequence()
        await old.prefill(PROMPT)
        named = client.sequence(lease_id=(await client.acquire_lease()).lease_id)
        await named.prefill(PROMPT)
        await lose_lease(served, client)
        items = [
            client.sequence().item(PROMPT),
            old.item([1]),
            client.sequence().item([999]),
            named.item([1]),
            client.sequence().item(PROMPT),
        ]
        kinds = [type(each) for each in await client.forward(items)]
        assert kinds == [Answer, LeaseExpired, InvalidRequest, Answer, Answer]


async def test_a_lost_answer_to_a_creation_is_asked_for_again_with_the_same_lease() -> None:
    async with (
        serve_identity(positional=True) as served,
        proxied(served.target) as (proxy, target),
        ExecutorClient(target, resend=NEVER_RESEND) as client,
    ):
        await client.info()
        sequence = client.sequence()
        proxy.faults.append("lose")
        with pytest.raises(TransportError):
            await sequence.prefill(PROMPT)
        assert client.lease is not None
        client._connection.leases.lost(client.lease.lease_id, LeaseExpired("so it thinks"))
        await client.sequence().prefill(PROMPT)
        assert client.lease is not None
        answer = await sequence.prefill(PROMPT)
        assert answer.replayed, "under another lease it would have been another call"
        assert len(leases(served)) == 2


async def test_an_executor_with_too_many_leases_says_so_to_the_creation() -> None:
    async with world(max_leases=1) as (served, client):
        await client.sequence().prefill(PROMPT)
        async with ExecutorClient(served.target, resend=AT_ONCE) as other:
            with pytest.raises(SequencesExhausted):
                await other.sequence().prefill(PROMPT)
            assert other.lease is None
