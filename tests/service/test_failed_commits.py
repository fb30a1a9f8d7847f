"""What settling a call raises ends that call, or one item of it, with INTERNAL_ERROR: nobody waits for ever, nothing
stays busy or charged, and it is counted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from ferrum_rpc.core import ANYBODY, CreateOptions, OutputSpec, Positions, WorkItem
from ferrum_rpc.engine.thread import ModelThread
from ferrum_rpc.errors import InternalError, Reason
from ferrum_rpc.executor.v1 import forward_pb2, session_pb2, types_pb2
from ferrum_rpc.service.forward import ForwardCall
from ferrum_rpc.service.handles import HandleTable
from ferrum_rpc.service.kv_ops import OperationCall, fork, release, reserve, truncate
from ferrum_rpc.service.quotas import Quotas
from ferrum_rpc.service.records import Account, Resource, no_follower
from ferrum_rpc.service.replay import ReplayLog, record_bytes
from ferrum_rpc.service.state import ServerState
from ferrum_rpc.service.supervisor import BackgroundTask
from ferrum_rpc.wire.items import handle_from_proto, handle_to_proto
from tests.service.test_run import following, running, stepping
from tests.support.failing import failing
from tests.support.inside import accounts, creating, recorded
from tests.support.raw_session import raw_session
from tests.support.serving import Gate, Served, gated, serve_identity
from tests.support.wiring import item, pb, prefill, reason_of, refused, until


def of_record(handle: types_pb2.KvHandle) -> Callable[..., bool]:
    return lambda _, record: record.id == handle.id


def of_entry(handle: types_pb2.KvHandle) -> Callable[..., bool]:
    return lambda _, entry, __: entry.scope.key[1] == handle.id


FAULTS = {
    "the charge": (Quotas, "settle", of_record, False),
    "the answer's record": (ReplayLog, "finish", of_entry, False),
    "the answer's rows": (ReplayLog, "_record", of_entry, False),
    "what follows its record": (ReplayLog, "_record", of_entry, True),
}


@contextmanager
def fault(name: str, handle: types_pb2.KvHandle) -> Iterator[None]:
    """Settling a call on the sequence of this handle fails once."""
    owner, method, of, late = FAULTS[name]
    with failing(owner, method, of=of(handle), late=late):
        yield


async def nothing_held(served: Served, failures: int = 1) -> None:
    """Every sequence is free and as the engine has it, no account pays for what is over, the failures are counted."""
    state = served.server.state
    await served.check()
    assert not creating(state) and not any(record.busy for record in state.handles.records())
    for account in accounts(state):
        assert account.held[0] == len(state.handles) and not any(account.held[4:])
    entries = recorded(state.replay)
    assert all(entry.answer is not None and not entry.waiters for entry in entries)
    assert sum(entry.rows_bytes for entry in entries) == state.replay.rows
    assert sum(map(record_bytes, entries)) == state.replay.records
    assert state.supervisor.failures[BackgroundTask.CALLBACK] == failures


async def in_one_step(served: Served, gate: Gate, *batches: list[forward_pb2.ForwardItem]) -> list[Any]:
    """What they come to: they are taken while another step runs, and then together."""
    held = await gate.hold(prefill(served, [9, 9]))
    tasks = [asyncio.ensure_future(served.batch_decode(*each)) for each in batches]
    await until(lambda: served.server.state.engine.queued_items >= sum(map(len, batches)))
    gate.open()
    async with asyncio.timeout(10):
        await served.release(await held)
        return await asyncio.gather(*tasks)


def reasons(results: Any) -> list[Reason | None]:
    return list(map(reason_of, results))


@pytest.mark.parametrize("name", FAULTS)
async def test_one_item_that_cannot_be_committed_ends_alone(name: str) -> None:
    async with gated(max_blocks_per_caller=200) as (served, gate):
        handles = [await prefill(served, [1] * 8 + [each]) for each in range(5)]
        items = [item([7], each, truncate_to=2, request_id="once") for each in handles]
        with fault(name, handles[2]):
            one, batch, other = await in_one_step(served, gate, items[:1], items[1:4], items[4:])
        assert reasons(batch.results) == [None, Reason.INTERNAL_ERROR, None]
        assert reasons(one.results) == reasons(other.results) == [None]
        await nothing_held(served)
        assert {each.charged for each in served.server.state.handles.records()} == {1}, "of three blocks before"
        again = await served.batch_decode(*items[1:4])
        assert reasons(again.results) == [None, Reason.SEQUENCE_VERSION_MISMATCH, None], "never fed twice"
        there = types_pb2.KvHandle(id=handles[2].id, seq_len=3, version=handles[2].version + 1)
        await served.decode([8], there)


@pytest.mark.parametrize("name", FAULTS)
async def test_duplicates_that_wait_for_it_hear_of_it(name: str) -> None:
    async with gated() as (served, gate):
        handle, other = await prefill(served, [1, 2]), await prefill(served, [1, 2])
        request = pb.DecodeRequest(item=item([7], handle, request_id="once"))
        with fault(name, handle):
            held = await gate.hold(served.executor.Decode(request))
            unary = asyncio.ensure_future(served.executor.Decode(request))
            batch = asyncio.ensure_future(served.batch_decode(item([7], other), request.item))
            [entry] = served.server.state.replay.scope(("", handle.id)).values()
            await until(lambda: len(entry.waiters) == 2)
            gate.open()
            async with asyncio.timeout(10):
                await refused(held, Reason.INTERNAL_ERROR)
                await refused(unary, Reason.INTERNAL_ERROR)
                assert reasons((await batch).results) == [None, Reason.INTERNAL_ERROR]
        await nothing_held(served)


@pytest.mark.parametrize("name", FAULTS)
async def test_a_frame_of_a_session_is_answered_and_the_session_goes_on(served: Served, name: str) -> None:
    one, other = await prefill(served, [1, 2]), await prefill(served, [3, 4])
    items = [item([7], each, request_id="once") for each in (one, other)]
    async with raw_session(served.executor) as session, asyncio.timeout(10):
        with fault(name, one):
            results = await session.step(*items)
        assert reasons(results) == [Reason.INTERNAL_ERROR, None]
        assert reasons(await session.step(item([7], results[1].output.handle))) == [None]
    await nothing_held(served)


async def test_all_or_nothing_names_the_item_that_could_not_be_committed(served: Served) -> None:
    handles = [await prefill(served, [1, each]) for each in range(2)]
    with fault("the charge", handles[1]):
        call = served.batch_decode(*(item([7], each) for each in handles), all_or_nothing=True)
        error = await refused(call, Reason.INTERNAL_ERROR)
    assert error.metadata["item"] == "1"
    await nothing_held(served)


@pytest.mark.parametrize(
    ("owner", "method", "late"),
    [
        (HandleTable, "insert", False),
        (HandleTable, "insert", True),
        (ServerState, "publish", False),
        (Quotas, "settle", False),
        (ReplayLog, "finish", False),
    ],
)
async def test_a_sequence_whose_creation_cannot_be_committed_is_released(served, owner, method, late):
    with failing(owner, method, late=late):
        await asyncio.wait_for(refused(served.prefill([1, 2, 3], request_id="once"), Reason.INTERNAL_ERROR), 10)
    state = served.server.state
    await until(lambda: state.engine.cache.sequences == 0)
    assert not len(state.handles) and state.counters.sequences_created == state.counters.sequences_released
    await nothing_held(served)
    assert not (await served.prefill([1, 2, 3], request_id="once")).output.replayed


async def test_a_refused_item_whose_end_fails_is_refused_all_the_same() -> None:
    async with serve_identity(kv_blocks=2, block_size=4) as served:
        with failing(Account, "free", of=lambda _, resource, *__: resource is Resource.SEQUENCES):
            async with asyncio.timeout(10):
                error = await refused(served.prefill(range(1, 30)), Reason.INTERNAL_ERROR)
        assert isinstance(error, InternalError)
        await nothing_held(served)


OPERATIONS = {
    "truncate": lambda state, handle: truncate(state, handle, 1, "once"),
    "fork": lambda state, handle: fork(state, handle, 3, request_id="once"),
    "release": lambda state, handle: release(state, handle, request_id="once"),
    "reserve": lambda state, handle: reserve(state, handle, 4),
}


@pytest.mark.parametrize(
    ("operation", "owner", "method", "late"),
    [
        ("truncate", Quotas, "settle", False),
        ("truncate", ReplayLog, "_record", False),
        ("fork", ServerState, "publish", False),
        ("fork", Quotas, "settle", False),
        ("fork", ReplayLog, "_record", True),
        ("release", HandleTable, "remove", False),
        ("release", ReplayLog, "_record", False),
        ("reserve", Quotas, "settle", False),
    ],
)
async def test_an_operation_that_cannot_be_committed_ends_and_so_do_its_duplicates(
    served, operation, owner, method, late
):
    state = served.server.state
    handle = handle_from_proto(await prefill(served, [1, 2, 3]))
    begin = OPERATIONS[operation]
    with failing(owner, method, late=late):
        calls = [begin(state, handle)] if operation == "reserve" else [begin(state, handle) for _ in range(3)]
        for call in calls:
            with pytest.raises(InternalError):
                await asyncio.wait_for(call, 10)
    await until(lambda: state.engine.cache.sequences == len(state.handles))
    assert len(state.handles) == (0 if operation == "release" else 1)
    await nothing_held(served)


@pytest.mark.parametrize("kind", ["forward", "operation"])
async def test_a_call_that_the_engine_does_not_take_gives_back_what_it_claimed(served: Served, kind: str) -> None:
    handle = await prefill(served, [1, 2, 3])
    with failing(ModelThread, "submit"):
        once = {"request_id": "once"}
        call = served.decode([7], handle, **once) if kind == "forward" else served.truncate(handle, 1, **once)
        await refused(call, Reason.INTERNAL_ERROR)
    await nothing_held(served, failures=0)
    await served.decode([7], handle, request_id="once")


@pytest.mark.parametrize("all_or_nothing", [False, True])
async def test_a_duplicate_that_fails_to_hear_ends_and_gives_back_what_it_claimed(all_or_nothing: bool) -> None:
    """A call that waits for another one's answer and brings an item of its own. It fails with the former."""
    async with gated() as (served, gate):
        one, other = await prefill(served, [1, 2]), await prefill(served, [3, 4])
        repeated = item([7], one, request_id="once")
        held = await gate.hold(served.executor.Decode(pb.DecodeRequest(item=repeated)))
        request = pb.BatchDecodeRequest(items=[repeated, item([7], other)], all_or_nothing=all_or_nothing)
        with failing(ReplayLog, "repeat"):
            both = asyncio.ensure_future(served.executor.BatchDecode(request))
            [entry] = served.server.state.replay.scope(("", one.id)).values()
            await until(lambda: len(entry.waiters) == 1)
            gate.open()
            async with asyncio.timeout(10):
                await held
                await refused(both, Reason.INTERNAL_ERROR)
        await until(lambda: not any(each.busy for each in served.server.state.handles.records()))
        await nothing_held(served)


async def test_a_duplicate_that_fails_to_hear_leaves_what_follows_later_calls_alone() -> None:
    """Its own item was committed before: another call is on that sequence by now, and the follower is that one's."""
    async with stepping(2) as (served, steps), raw_session(served.executor) as session:
        one, other = await prefill(served, [1, 2]), await prefill(served, [3, 4])
        state, record = served.server.state, served.server.state.handles.live[other.id]
        run = running([9], one, most=3)
        first = asyncio.ensure_future(served.executor.Decode(pb.DecodeRequest(item=run)))
        await steps.held()
        both = asyncio.ensure_future(served.unified(run, item([7], other)))
        await until(lambda: state.engine.queued_items == 1)
        steps.allow(2)
        await until(lambda: record.length == 3)
        await steps.held()  # at the last step of the run
        later = running([8], handle_to_proto(record.handle), most=5)
        ahead = asyncio.ensure_future(served.executor.Decode(pb.DecodeRequest(item=later)))
        await until(lambda: record.busy)
        behind = types_pb2.KvHandle(id=other.id, seq_len=8, version=record.version + 1)
        _, follows = await session.send(forward=session_pb2.SessionForward(items=[following(behind)]))
        await until(lambda: record.follower is not no_follower)
        with failing(ReplayLog, "repeat"):
            steps.allow(1)
            await first
            await refused(both, Reason.INTERNAL_ERROR)
        assert record.busy and record.follower is not None
        steps.free()
        assert (await ahead).output.handle == behind
        assert (await follows).forward.results[0].output.handle.seq_len == 9
        await nothing_held(served)


@pytest.mark.parametrize("kind", [ForwardCall, OperationCall])
async def test_a_caller_that_is_cancelled_meanwhile_leaves_nothing_either(kind: type) -> None:
    gate = Gate("forward" if kind is ForwardCall else "truncate")
    async with serve_identity(stage=gate) as served:
        handle, state = await prefill(served, [1, 2, 3]), served.server.state
        known = handle_from_proto(handle)
        work = WorkItem(0, known, np.ones(1, np.int32), None, OutputSpec(Positions.LAST), "once", CreateOptions())

        async def call() -> object:
            if kind is ForwardCall:
                return await ForwardCall(state, state.quotas.account(ANYBODY), [work])
            return await truncate(state, known, 1, "once")

        with fault("the charge", handle):
            task = await gate.hold(call())
            task.cancel()
            await asyncio.wait([task])
            gate.open()
            await until(lambda: not any(record.busy for record in state.handles.records()))
        await nothing_held(served)
