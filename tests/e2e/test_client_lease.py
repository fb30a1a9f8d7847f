"""A client's sequences live with its lease: freed with it, kept by it, and made anew when it was lost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ferrum_rpc.client import NEVER_RESEND, Answer, Capability, ExecutorClient, LeasePolicy, LeaseTrouble
from ferrum_rpc.client.client import connection_of
from ferrum_rpc.errors import InvalidRequest, LeaseExpired, LeaseUnknown, TransportError
from tests.support.clients import BOTH_WAYS, answers, connected, losing, without
from tests.support.serving import Served, serve_identity
from tests.support.waiting import until

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def leases(served: Served) -> list[str]:
    """The lease of each live sequence; empty for none."""
    return ["" if each.lease is None else each.lease.id for each in served.server.state.handles.records()]


def calls(served: Served, method: str) -> int:
    """How often a method was called."""
    methods = served.server.calls.methods.items()
    return sum(each.calls for name, each in methods if name.endswith(f"ModelExecutor/{method}"))


def records(served: Served) -> list[Any]:
    """The leases of live sequences."""
    return [each.lease for each in served.server.state.handles.records() if each.lease is not None]


async def lose_lease(served: Served, client: ExecutorClient) -> str:
    """The executor forgets the client's lease, as if it had heard nothing for too long."""
    lost, others = client.lease.lease_id, len(served.server.state.leases) - 1
    next(each for each in records(served) if each.id == lost).expires = 0.0
    await until(lambda: len(served.server.state.leases) == others)
    return lost


@BOTH_WAYS
async def test_all_sequences_of_a_client_share_one_lease_with_its_name(session: bool) -> None:
    async with connected(session, about={"client_name": "somebody"}) as (served, client):
        assert client.lease is None
        sequences = [client.sequence() for _ in range(8)]
        await asyncio.gather(*(each.prefill(PROMPT) for each in sequences[:4]))
        await client.forward([each.item(PROMPT) for each in sequences[4:]])
        await sequences[0].fork(2)
        assert leases(served) == [client.lease.lease_id] * 10
        assert records(served)[0].client_name == "somebody"
        assert calls(served, "AcquireLease") == 1


@BOTH_WAYS
async def test_a_lease_that_the_caller_names_wins(session: bool) -> None:
    async with connected(session) as (served, client):
        own = await client.acquire_lease(5.0, client_name="mine")
        assert (own.ttl_s, own.renew_every_s) == (5.0, pytest.approx(5 / 6))
        named = client.sequence(lease_id=own.lease_id)
        await named.prefill(PROMPT)
        await named.fork()
        await client.sequence().prefill(PROMPT)
        assert sorted(leases(served)) == sorted([own.lease_id] * 2 + [client.lease.lease_id])
        assert await client.keep_alive(own.lease_id) == 5.0
        assert await client.revoke_lease(own.lease_id) == 2
        for call in (client.keep_alive, client.revoke_lease):
            with pytest.raises(LeaseUnknown):
                await call(own.lease_id)
        with pytest.raises(LeaseUnknown):
            await client.sequence(lease_id=own.lease_id).prefill(PROMPT)
        assert leases(served) == [client.lease.lease_id], "its own lease is no worse for that"


@pytest.mark.parametrize("why", ["the client wants none", "the executor has none"])
async def test_without_a_lease_sequences_have_none(why: str) -> None:
    about = {"lease": None} if why == "the client wants none" else {}
    async with connected(session=False, about=about) as (served, client):
        await client.info()
        if why == "the executor has none":
            without(client, Capability.LEASES)
        await client.sequence().prefill(PROMPT)
        assert (leases(served), client.lease) == ([""], None)
        assert calls(served, "AcquireLease") == 0
    assert leases(served) == []


@BOTH_WAYS
async def test_leaving_the_client_frees_its_sequences_in_one_call(session: bool) -> None:
    async with serve_identity() as served:
        async with ExecutorClient(served.target, session=session) as client:
            for _ in range(5):
                await client.sequence().prefill(PROMPT)
            released = client.sequence()
            await released.prefill(PROMPT)
            await released.release()
        await until(lambda: len(served.server.state.leases) == served.server.state.sessions == 0)
        assert leases(served) == []
        assert calls(served, "Release") == (0 if session else 1), "one word frees the others"
        assert session or calls(served, "RevokeLease") == 1
        await served.check()


async def test_renewals_that_fail_are_told_and_so_is_the_loss() -> None:
    told: list[LeaseTrouble] = []
    about: Any = {"lease": LeasePolicy(ttl_s=0.4), "on_lease_trouble": told.append, "resend": NEVER_RESEND}
    async with losing(about=about, min_lease_ttl_s=0.1) as (served, proxy, client):
        sequence = client.sequence(rebuild=True)
        await sequence.prefill(PROMPT)
        lease_id = client.lease.lease_id
        proxy.only = "KeepAlive"
        proxy.faults.extend(["refuse"] * 1000)
        await until(lambda: len(told) == 1)
        assert isinstance(told[0].error, TransportError)
        await until(lambda: len(served.server.state.leases) == 0)
        proxy.faults.clear()
        await until(lambda: len(told) == 2)
        assert [(each.lease_id, each.lost) for each in told] == [(lease_id, False), (lease_id, True)]
        assert isinstance(told[1].error, LeaseExpired)
        assert client.lease is None
        assert (await sequence.decode(1)).length == len(PROMPT) + 1
        assert client.lease.lease_id != lease_id
        assert len(told) == 2


CREATIONS: dict[str, Any] = {
    "alone": lambda client: asyncio.gather(client.sequence().prefill(PROMPT)),
    "together": lambda client: asyncio.gather(*(client.sequence().prefill(PROMPT) for _ in range(5))),
    "batch": lambda client: client.forward([client.sequence().item(PROMPT) for _ in range(3)]),
    "atomic batch": lambda client: client.forward(
        [client.sequence().item(PROMPT) for _ in range(3)], all_or_nothing=True
    ),
}


@BOTH_WAYS
@pytest.mark.parametrize("how", CREATIONS)
async def test_a_sequence_begun_after_the_lease_was_lost_gets_a_new_one_and_never_knows(how, session) -> None:
    async with connected(session) as (served, client):
        await client.sequence().prefill(PROMPT)
        lost = await lose_lease(served, client)
        found = answers(await CREATIONS[how](client))
        assert client.lease.lease_id != lost
        assert leases(served) == [client.lease.lease_id] * len(found)
        assert len(served.server.state.leases) == 1


@BOTH_WAYS
async def test_in_a_batch_after_a_lost_lease_each_item_has_its_own_outcome(session: bool) -> None:
    async with connected(session) as (served, client):
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
    async with losing(about={"resend": NEVER_RESEND}) as (served, proxy, client):
        sequence = client.sequence()
        proxy.faults.append("lose")
        with pytest.raises(TransportError):
            await sequence.prefill(PROMPT)
        connection_of(client).leases.lost(client.lease.lease_id, LeaseExpired("so it thinks"))
        await client.sequence().prefill(PROMPT)
        answer = await sequence.prefill(PROMPT)
        assert answer.replayed, "under another lease it would have been another call"
        assert len(leases(served)) == 2
