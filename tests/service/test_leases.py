"""Leases over the wire: a scheduler's sequences live while it gives a sign of life, and only then.

Time is moved by calling the sweep with a later clock: no test here waits for a lease.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf import duration_pb2

from ferrum_rpc.errors import Reason
from ferrum_rpc.executor.v1 import forward_pb2, types_pb2
from ferrum_rpc.service.lifecycle import Sweeper
from tests.support.inside import creating
from tests.support.serving import Served, gated, serve_identity
from tests.support.wiring import prefill, refused, until

TTL = 30.0


async def acquire(served: Served, ttl: float = TTL) -> str:
    return (await served.acquire(ttl=duration_pb2.Duration(seconds=int(ttl)))).lease_id


async def leased(served: Served, lease: str, tokens: list[int], **fields: object) -> types_pb2.KvHandle:
    return await prefill(served, tokens, create=forward_pb2.CreateOptions(lease_id=lease), **fields)


def sweep(served: Served, later: float) -> None:
    """As if ``later`` seconds had passed."""
    Sweeper(served.server.state).sweep(time.monotonic() + later)


async def decode(served: Served, handle: types_pb2.KvHandle, token: int = 1) -> types_pb2.KvHandle:
    return (await served.decode([token], handle)).output.handle


async def free_blocks(served: Served) -> int:
    return (await served.status()).pressure.free_blocks


async def test_an_expired_lease_frees_all_its_sequences_and_no_other(served: Served) -> None:
    before = await free_blocks(served)
    doomed, living = await acquire(served, 10), await acquire(served, 100)
    gone = [await leased(served, doomed, [1, 2, 3, 4, 5]) for _ in range(3)]
    here = await leased(served, living, [1, 2, 3, 4, 5])
    sweep(served, 9.9)
    gone[0] = await decode(served, gone[0])  # renews the lease, and with it the others
    sweep(served, 9.9)
    sweep(served, 10.1)
    for handle in gone:
        await refused(served.decode([1], handle), Reason.LEASE_EXPIRED)
    await refused(served.keep_alive(doomed), Reason.LEASE_EXPIRED)
    await refused(leased(served, doomed, [1]), Reason.LEASE_EXPIRED)
    here = await decode(served, here)
    await served.release(here)
    assert await free_blocks(served) == before
    status = await served.status()
    assert (status.counters.leases_expired, status.counters.sequences_expired, status.leases) == (1, 3, 1)
    await served.check()


SIGNS: dict[str, Callable[[Served, types_pb2.KvHandle, str], Any]] = {
    "keep_alive": lambda served, handle, lease: served.keep_alive(lease),
    "decode": lambda served, handle, lease: served.decode([1], handle),
    "truncate": lambda served, handle, lease: served.truncate(handle),
    "fork": lambda served, handle, lease: served.fork(handle),
    "reserve": lambda served, handle, lease: served.reserve(handle, 4),
    "refused": lambda served, handle, lease: refused(
        served.decode([1], types_pb2.KvHandle(id=handle.id, seq_len=9, version=9)), Reason.SEQUENCE_VERSION_MISMATCH
    ),
}


@pytest.mark.parametrize("sign", SIGNS)
async def test_every_call_on_one_of_its_handles_renews_a_lease(served: Served, sign: str) -> None:
    lease = await acquire(served, 10)
    handle, other = await leased(served, lease, [1, 2, 3]), await leased(served, lease, [4, 5])
    served.server.state.leases.find(lease, "").expires = time.monotonic() + 0.5  # nearly over
    await SIGNS[sign](served, handle, lease)
    sweep(served, 9.0)
    await decode(served, other)


async def test_a_sequence_in_a_step_and_one_that_is_being_created_are_pinned() -> None:
    async with gated() as (served, gate):
        lease = await acquire(served, 10)
        idle, busy = await leased(served, lease, [1, 2]), await leased(served, lease, [3, 4])
        running = await gate.hold(decode(served, busy))
        made = asyncio.ensure_future(leased(served, await acquire(served, 10), [1, 2, 3]))
        await until(lambda: creating(served.server.state) == 1)
        sweep(served, 1000)
        gate.open()
        busy = await running
        for each in (idle, busy, await made):  # the step's end was a sign of life
            await decode(served, each)
        sweep(served, 11)
        await refused(served.decode([1], busy), Reason.LEASE_EXPIRED)
        await served.check()


async def test_a_step_whose_caller_is_gone_is_no_sign_of_life() -> None:
    async with gated() as (served, gate):
        lease = await acquire(served, 10)
        handle = await leased(served, lease, [1, 2, 3])
        call = served.decode([1], handle)
        running = await gate.hold(call)
        record = served.server.state.handles.records()[0]
        held = served.server.state.leases.find(lease, "")
        held.expires = due = time.monotonic() + 0.25
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await until(lambda: not served.server.calls.in_flight)
        gate.open()
        await until(lambda: not record.busy)
        assert held.expires == due


async def test_revoking_frees_now_what_is_idle_and_what_runs_when_it_ends() -> None:
    async with gated() as (served, gate):
        before = await free_blocks(served)
        lease = await acquire(served)
        idle, busy = await leased(served, lease, [1, 2]), await leased(served, lease, [3])
        running = await gate.hold(decode(served, busy))
        creating = asyncio.ensure_future(leased(served, lease, [7, 8]))
        await until(lambda: served.server.calls.in_flight >= 2)
        revoking = asyncio.ensure_future(served.revoke(lease))
        await until(lambda: not len(served.server.state.leases))
        gate.open()
        assert (await revoking).released_sequences == 3
        for handle in (idle, await running, await creating):
            await refused(served.decode([1], handle), Reason.HANDLE_RELEASED)
        await refused(served.keep_alive(lease), Reason.LEASE_UNKNOWN)
        assert await free_blocks(served) == before
        await served.check()


async def test_an_unused_sequence_without_a_lease_is_freed_after_the_idle_time(served: Served) -> None:
    """One whose caller has never come back for the answer, too."""
    idle_ttl, before = served.server.state.limits.idle_ttl_s, await free_blocks(served)
    handle = await prefill(served, [1, 2, 3])
    sweep(served, idle_ttl - 1)
    await prefill(served, [1, 2, 3], request_id="lost")
    handle = await decode(served, handle)
    sweep(served, idle_ttl + 1)
    assert "no lease" in (await refused(served.decode([1], handle), Reason.LEASE_EXPIRED)).message
    await served.check()
    assert await free_blocks(served) == before


async def test_children_live_with_their_parents_lease_or_with_the_one_that_is_named(served: Served) -> None:
    mine, other = await acquire(served, 10), await acquire(served, 100)
    parent = await leased(served, mine, [1, 2, 3])
    heir = (await served.fork(parent)).handles[0]
    adopted = (await served.fork(parent, lease_id=other)).handles[0]
    sweep(served, 11)
    for handle in (parent, heir):
        await refused(served.decode([1], handle), Reason.LEASE_EXPIRED)
    await decode(served, adopted)


async def test_a_lease_that_is_not_there_says_which_way(served: Served) -> None:
    lease = await acquire(served)
    for bad, reason in (
        (lease[:-1] + ("0" if lease[-1] != "0" else "1"), Reason.LEASE_UNKNOWN),
        ("x", Reason.LEASE_UNKNOWN),
        ("0123456789abcdef" + lease[16:], Reason.INSTANCE_MISMATCH),
    ):
        await refused(served.keep_alive(bad), reason)
        await refused(served.revoke(bad), reason)
        await refused(leased(served, bad, [1]), reason)
    await served.check()


async def test_the_time_of_a_lease_is_told_and_kept_within_limits(served: Served) -> None:
    limits = served.server.state.limits
    default = await served.acquire()
    assert default.ttl.ToTimedelta().total_seconds() == limits.lease_ttl_s
    assert default.renew_every.ToTimedelta().total_seconds() == limits.lease_ttl_s / 6
    longest = await served.acquire(ttl=duration_pb2.Duration(seconds=315_576_000_000))
    shortest = await served.acquire(ttl=duration_pb2.Duration(nanos=1))
    assert (longest.ttl.seconds, shortest.ttl.seconds) == (limits.max_lease_ttl_s, limits.min_lease_ttl_s)
    for none in ({"seconds": -5}, {"nanos": 0}, {"nanos": -1}):
        await refused(served.acquire(ttl=duration_pb2.Duration(**none)), Reason.INVALID_REQUEST)


async def test_leases_are_bounded_and_the_refusal_says_that_it_is_they() -> None:
    async with serve_identity(max_leases=2) as served:
        first, _ = await acquire(served), await acquire(served)
        error = await refused(served.acquire(), Reason.SEQUENCES_EXHAUSTED)
        assert error.metadata == {"max_leases": "2"} and error.retry_after_s
        await prefill(served, [1])  # of sequences there are enough
        await served.revoke(first)
        await acquire(served)


async def test_a_server_that_was_deaf_gives_the_time_back(served: Served) -> None:
    """Stopped for longer than a lease lives, it judges nobody before it has heard everybody."""
    lease = await acquire(served, 10)
    handle, unleased = await leased(served, lease, [1, 2]), await prefill(served, [3])
    Sweeper(served.server.state).prolong(1000.0)
    sweep(served, 1005)
    await decode(served, handle)
    await decode(served, unleased)


async def test_the_sweep_runs_by_itself() -> None:
    async with serve_identity(min_lease_ttl_s=0.01, lease_ttl_s=0.05) as served:
        lease = (await served.acquire()).lease_id
        await leased(served, lease, [1, 2, 3])
        await asyncio.wait_for(served.server.state.empty.wait(), 5)
        await served.check()


async def test_handles_request_ids_and_leases_belong_to_their_caller() -> None:
    async with serve_identity(tokens=("alice a", "bob b")) as served:
        alice, bob = served.by("a"), served.by("b")
        handle = await prefill(alice, [1, 2, 3], request_id="same")
        assert not (await bob.prefill([9, 9], request_id="same")).output.replayed
        grown = (await alice.decode([7], handle, request_id="step")).output.handle
        for call in (
            bob.decode([7], handle, request_id="step"),
            bob.decode([7], handle),
            bob.truncate(handle, 1),
            bob.fork(handle),
            bob.release(handle, any_version=True),
            bob.reserve(handle, 4),
        ):
            assert (await refused(call, Reason.HANDLE_UNKNOWN)).message == "no such sequence"
        await alice.release(grown)
        await refused(bob.release(grown), Reason.HANDLE_UNKNOWN)
        await refused(alice.release(grown), Reason.HANDLE_RELEASED)
        lease = await acquire(alice, 10)
        await refused(bob.keep_alive(lease), Reason.LEASE_UNKNOWN)
        await alice.keep_alive(lease)
        sweep(served, 11)
        await refused(bob.keep_alive(lease), Reason.LEASE_UNKNOWN)
        await refused(alice.keep_alive(lease), Reason.LEASE_EXPIRED)
        await served.check()
