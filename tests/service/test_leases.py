"""Leases over the wire: a scheduler's sequences live while it gives a sign of life, and only then.

Time is moved by calling the sweep with a later clock: no test here waits for a lease.
"""

from __future__ import annotations

import asyncio
import time

import grpc
import pytest
from google.protobuf import duration_pb2

from ferrum_rpc.core import Caller
from ferrum_rpc.errors import Reason
from ferrum_rpc.executor.v1 import forward_pb2, types_pb2
from ferrum_rpc.service.leases import LeaseTable
from ferrum_rpc.service.lifecycle import Sweeper
from ferrum_rpc.service.quotas import Quotas
from tests.serving import LIMITS, Gate, Served, serve_identity
from tests.wiring import item, pb, prefill, refused, until

NOT_FOUND = grpc.StatusCode.NOT_FOUND
TTL = 30.0


async def acquire(served: Served, ttl: float = TTL, name: str = "") -> str:
    request = pb.AcquireLeaseRequest(ttl=duration_pb2.Duration(seconds=int(ttl)), client_name=name)
    return (await served.executor.AcquireLease(request)).lease_id


async def leased(served: Served, lease: str, tokens: list[int], **fields: object) -> types_pb2.KvHandle:
    return await prefill(served, tokens, create=forward_pb2.CreateOptions(lease_id=lease), **fields)


def sweep(served: Served, later: float) -> None:
    """As if ``later`` seconds had passed."""
    Sweeper(served.server.state).sweep(time.monotonic() + later)


async def decode(served: Served, handle: types_pb2.KvHandle, token: int = 1) -> types_pb2.KvHandle:
    return (await served.executor.Decode(pb.DecodeRequest(item=item([token], handle)))).output.handle


async def free_blocks(served: Served) -> int:
    return (await served.executor.GetStatus(pb.GetStatusRequest())).pressure.free_blocks


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
        await refused(served.executor.Decode(pb.DecodeRequest(item=item([1], handle))), Reason.LEASE_EXPIRED, NOT_FOUND)
    await refused(served.executor.KeepAlive(pb.KeepAliveRequest(lease_id=doomed)), Reason.LEASE_EXPIRED, NOT_FOUND)
    await refused(leased(served, doomed, [1]), Reason.LEASE_EXPIRED, NOT_FOUND)
    here = await decode(served, here)
    await served.executor.Release(pb.ReleaseRequest(handle=here))
    assert await free_blocks(served) == before
    status = await served.executor.GetStatus(pb.GetStatusRequest())
    assert (status.counters.leases_expired, status.counters.sequences_expired, status.leases) == (1, 3, 1)
    await served.check()


@pytest.mark.parametrize("sign", ["keep_alive", "decode", "truncate", "fork", "reserve", "refused decode"])
async def test_every_call_on_one_of_its_handles_renews_a_lease(served: Served, sign: str) -> None:
    lease = await acquire(served, 10)
    handle, other = await leased(served, lease, [1, 2, 3]), await leased(served, lease, [4, 5])
    held = served.server.state.leases.find(lease, "")
    held.expires = time.monotonic() + 0.5  # nearly over
    match sign:
        case "keep_alive":
            answer = await served.executor.KeepAlive(pb.KeepAliveRequest(lease_id=lease))
            assert answer.ttl.seconds == 10
        case "decode":
            await decode(served, handle)
        case "truncate":
            await served.executor.TruncateKv(pb.TruncateKvRequest(handle=handle, length=1))
        case "fork":
            await served.executor.ForkKv(pb.ForkKvRequest(handle=handle))
        case "reserve":
            await served.executor.ReserveKv(pb.ReserveKvRequest(handle=handle, tokens=4))
        case _:
            stale = types_pb2.KvHandle(id=handle.id, seq_len=9, version=9)
            with pytest.raises(grpc.aio.AioRpcError):
                await decode(served, stale)
    sweep(served, 9.0)
    await decode(served, other)


async def test_a_sequence_in_a_running_step_is_pinned() -> None:
    gate = Gate("forward")
    async with serve_identity(stage=gate) as served:
        lease = await acquire(served, 10)
        idle = await leased(served, lease, [1, 2])
        busy = await leased(served, lease, [3, 4])
        running = await gate.hold(decode(served, busy))
        sweep(served, 1000)
        gate.open()
        busy = await running
        await decode(served, idle)  # the step's end was a sign of life
        await decode(served, busy)
        sweep(served, 11)
        await refused(served.executor.Decode(pb.DecodeRequest(item=item([1], busy))), Reason.LEASE_EXPIRED, NOT_FOUND)
        await served.check()


async def test_a_creation_longer_than_its_lease_survives_it() -> None:
    gate = Gate("forward")
    async with serve_identity(stage=gate) as served:
        lease = await acquire(served, 10)
        creating = await gate.hold(leased(served, lease, [1, 2, 3]))
        sweep(served, 1000)
        gate.open()
        await decode(served, await creating)


async def test_a_step_whose_caller_is_gone_is_no_sign_of_life() -> None:
    gate = Gate("forward")
    async with serve_identity(stage=gate) as served:
        lease = await acquire(served, 10)
        handle = await leased(served, lease, [1, 2, 3])
        call = served.executor.Decode(pb.DecodeRequest(item=item([1], handle)))

        async def wait() -> None:
            await call

        running = await gate.hold(wait())
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
    gate = Gate("forward")
    async with serve_identity(stage=gate) as served:
        before = await free_blocks(served)
        lease = await acquire(served)
        idle, busy = await leased(served, lease, [1, 2]), await leased(served, lease, [3])
        running = await gate.hold(decode(served, busy))
        creating = asyncio.ensure_future(leased(served, lease, [7, 8]))
        await until(lambda: served.server.calls.in_flight >= 2)
        revoking = asyncio.ensure_future(served.executor.RevokeLease(pb.RevokeLeaseRequest(lease_id=lease)))
        await until(lambda: not len(served.server.state.leases))
        gate.open()
        assert (await revoking).released_sequences == 3
        for handle in (idle, await running, await creating):
            await refused(
                served.executor.Decode(pb.DecodeRequest(item=item([1], handle))), Reason.HANDLE_RELEASED, NOT_FOUND
            )
        await refused(served.executor.KeepAlive(pb.KeepAliveRequest(lease_id=lease)), Reason.LEASE_UNKNOWN, NOT_FOUND)
        assert await free_blocks(served) == before
        await served.check()


async def test_an_unused_sequence_without_a_lease_is_freed_after_the_idle_time(served: Served) -> None:
    idle_ttl = served.server.state.limits.idle_ttl_s
    handle = await prefill(served, [1, 2, 3])
    sweep(served, idle_ttl - 1)
    handle = await decode(served, handle)
    sweep(served, idle_ttl + 1)
    error = await refused(
        served.executor.Decode(pb.DecodeRequest(item=item([1], handle))), Reason.LEASE_EXPIRED, NOT_FOUND
    )
    assert "no lease" in error.message
    await served.check()


async def test_an_answer_that_nobody_heard_does_not_hold_blocks_for_ever(served: Served) -> None:
    """A creation with a request id whose caller never comes back."""
    before = await free_blocks(served)
    await prefill(served, [1, 2, 3], request_id="lost")
    sweep(served, served.server.state.limits.idle_ttl_s + 1)
    await served.check()
    assert await free_blocks(served) == before


async def test_children_live_with_their_parents_lease_or_with_the_one_that_is_named(served: Served) -> None:
    mine, other = await acquire(served, 10), await acquire(served, 100)
    parent = await leased(served, mine, [1, 2, 3])
    heir = (await served.executor.ForkKv(pb.ForkKvRequest(handle=parent))).handles[0]
    adopted = (await served.executor.ForkKv(pb.ForkKvRequest(handle=parent, lease_id=other))).handles[0]
    sweep(served, 11)
    for handle in (parent, heir):
        await refused(served.executor.Decode(pb.DecodeRequest(item=item([1], handle))), Reason.LEASE_EXPIRED, NOT_FOUND)
    await decode(served, adopted)


async def test_a_lease_that_is_not_there_says_which_way(served: Served) -> None:
    lease = await acquire(served)
    unknown = lease[:-1] + ("0" if lease[-1] != "0" else "1")
    foreign = "0123456789abcdef" + lease[16:]
    precondition = grpc.StatusCode.FAILED_PRECONDITION
    for bad, reason, code in (
        (unknown, Reason.LEASE_UNKNOWN, NOT_FOUND),
        ("x", Reason.LEASE_UNKNOWN, NOT_FOUND),
        (foreign, Reason.INSTANCE_MISMATCH, precondition),
    ):
        await refused(served.executor.KeepAlive(pb.KeepAliveRequest(lease_id=bad)), reason, code)
        await refused(served.executor.RevokeLease(pb.RevokeLeaseRequest(lease_id=bad)), reason, code)
        await refused(leased(served, bad, [1]), reason, code)
    await served.check()


async def test_the_time_of_a_lease_is_told_and_kept_within_limits(served: Served) -> None:
    limits = served.server.state.limits
    default = await served.executor.AcquireLease(pb.AcquireLeaseRequest())
    assert default.ttl.ToTimedelta().total_seconds() == limits.lease_ttl_s
    assert default.renew_every.ToTimedelta().total_seconds() == limits.lease_ttl_s / 6
    longest = pb.AcquireLeaseRequest(ttl=duration_pb2.Duration(seconds=315_576_000_000))
    assert (await served.executor.AcquireLease(longest)).ttl.seconds == limits.max_lease_ttl_s
    shortest = pb.AcquireLeaseRequest(ttl=duration_pb2.Duration(nanos=1))
    assert (await served.executor.AcquireLease(shortest)).ttl.seconds == limits.min_lease_ttl_s
    nonsense = pb.AcquireLeaseRequest(ttl=duration_pb2.Duration(seconds=-5))
    await refused(served.executor.AcquireLease(nonsense), Reason.INVALID_REQUEST, grpc.StatusCode.INVALID_ARGUMENT)


async def test_leases_are_bounded() -> None:
    async with serve_identity(max_leases=2) as served:
        first = await acquire(served)
        await acquire(served)
        await refused(acquire(served), Reason.SEQUENCES_EXHAUSTED, grpc.StatusCode.RESOURCE_EXHAUSTED)
        await served.executor.RevokeLease(pb.RevokeLeaseRequest(lease_id=first))
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
        lease = (await served.executor.AcquireLease(pb.AcquireLeaseRequest())).lease_id
        await leased(served, lease, [1, 2, 3])
        async with asyncio.timeout(5):
            await served.server.state.empty.wait()
        await served.check()


def test_a_lease_of_somebody_else_reads_as_unknown() -> None:
    book = LeaseTable(LIMITS, Quotas(LIMITS), "00ff")
    lease = book.acquire(Caller("alice"), None, "a")
    expired = book.acquire(Caller("alice"), None, "a")
    book.remove(expired, expired=True)
    for each in (lease, expired):
        with pytest.raises(Exception, match="no such lease"):
            book.find(each.id, "bob")
    assert book.find(lease.id, "alice") is lease


async def test_handles_request_ids_and_leases_belong_to_their_caller(served: Served) -> None:
    """On the floor below the guard: what a caller's name decides."""
    from ferrum_rpc.errors import ExecutorError
    from ferrum_rpc.service.forward import ForwardCall
    from ferrum_rpc.service.kv_ops import fork, release, reserve, truncate
    from ferrum_rpc.wire.items import CallShape, item_from_proto

    alice, bob = Caller("alice", operator=False), Caller("bob", operator=False)
    state = served.server.state

    async def feed(caller: Caller, message: forward_pb2.ForwardItem) -> object:
        work = item_from_proto(message, CallShape.ANY, state.capabilities)
        return (await ForwardCall(state, state.quotas.account(caller), [work])).outcomes[0]

    first = await feed(alice, item([1, 2, 3], request_id="same"))
    second = await feed(bob, item([9, 9], request_id="same"))
    assert not isinstance(first, ExecutorError)
    assert not isinstance(second, ExecutorError)
    assert not second.replayed
    stolen = types_pb2.KvHandle(id=first.handle.id, seq_len=3, version=first.handle.version)
    grown = await feed(alice, item([7], stolen, request_id="step"))
    assert not isinstance(grown, ExecutorError)
    for message in (item([7], stolen, request_id="step"), item([7], stolen)):
        refusal = await feed(bob, message)
        assert isinstance(refusal, ExecutorError)
        assert (refusal.reason, refusal.message) == (Reason.HANDLE_UNKNOWN, "no such sequence")
    for call in (
        truncate(state, first.handle, 1, caller=bob),
        fork(state, first.handle, caller=bob),
        release(state, first.handle, caller=bob, any_version=True),
        reserve(state, first.handle, 4, caller=bob),
    ):
        with pytest.raises(ExecutorError, match="no such sequence"):
            await call
    await release(state, grown.handle, caller=alice)
    with pytest.raises(ExecutorError, match="no such sequence"):
        await release(state, grown.handle, caller=bob)
    with pytest.raises(ExecutorError, match="was released"):
        await release(state, grown.handle, caller=alice)
    await served.check()
