"""What one caller may hold, while another has all the room that is left."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from ferrum_rpc.core import ANYBODY, Caller
from ferrum_rpc.engine.commands import Command
from ferrum_rpc.errors import ExecutorError, QuotaExceeded, Reason
from ferrum_rpc.executor.v1 import kv_transfer_pb2, session_pb2
from ferrum_rpc.service.asking import between_steps
from ferrum_rpc.service.guard.auth import parse
from ferrum_rpc.service.guard.slots import Slots
from ferrum_rpc.service.parked import ParkedFiles
from ferrum_rpc.service.quotas import EMPTY_ACCOUNTS, Quotas
from ferrum_rpc.service.records import Account, Resource
from ferrum_rpc.service.state import ServerState
from ferrum_rpc.wire.info import SCHEMA_REVISION
from tests.support.serving import LIMITS, Served, gated, serve_identity
from tests.support.wiring import item, prefill, refused, release, until

ALICE, BOB = Caller("alice", operator=False, shares=True), Caller("bob", operator=False, shares=True)
TOKENS = ("alice a", "bob b", "ops o operator")


def held(served: Served, caller: Caller) -> tuple[int, int]:
    """Sequences and blocks."""
    account = served.server.state.quotas.account(caller)
    return account.held[Resource.SEQUENCES], account.held[Resource.BLOCKS]


async def over(call: Any) -> ExecutorError:
    """Await what is refused for its caller's quota."""
    return await refused(call, Reason.QUOTA_EXCEEDED)


async def test_a_caller_at_its_quota_of_sequences_is_refused_and_others_are_not() -> None:
    async with serve_identity(max_sequences_per_caller=2, tokens=TOKENS) as served:
        alice, bob = map(served.by, "ab")
        first, _ = [await prefill(alice, [1] * 3) for _ in range(2)]
        for call in (alice.prefill([1] * 3), alice.fork(first)):
            assert (await over(call)).number("max_sequences_per_caller") == 2
        await prefill(bob, [1] * 3)
        await alice.release(first)
        await prefill(alice, [1] * 3)
        assert (held(served, ALICE)[0], held(served, BOB)[0]) == (2, 1)
        await served.check()


async def test_blocks_are_charged_by_length_and_given_back() -> None:
    async with serve_identity(block_size=4, max_blocks_per_caller=6, tokens=TOKENS) as served:
        alice, bob = map(served.by, "ab")
        handle = await prefill(alice, [1] * 16)
        assert held(served, ALICE) == (1, 4)
        await over(alice.prefill([1] * 9, handle))
        handle = await prefill(alice, [1] * 8, handle=handle)
        assert held(served, ALICE) == (1, 6)
        await over(alice.prefill([1]))
        assert held(served, ALICE) == (1, 6)
        handle = (await alice.truncate(handle, 5)).handle
        assert held(served, ALICE) == (1, 2)
        [child] = (await alice.fork(handle)).handles
        assert held(served, ALICE) == (2, 4)
        await over(alice.reserve(child, 12))
        child = (await alice.reserve(child, 11)).handle
        assert held(served, ALICE) == (2, 6)
        handle = await prefill(alice, [1] * 2, handle=handle, truncate_to=0)
        assert held(served, ALICE) == (2, 5)
        await prefill(bob, [1] * 24)
        await release(alice, handle, child)
        assert held(served, ALICE) == (0, 0)
        await served.check()


async def test_a_refused_item_leaves_the_account_as_it_was() -> None:
    """Within the quota, and not within the pool."""
    async with serve_identity(kv_blocks=9, block_size=4, max_blocks_per_caller=50) as served:
        handle = await prefill(served, [1] * 16)
        reserving: dict[str, Any] = {"create": {"reserve_tokens": 40}}
        for tokens, options in ((30, {"handle": handle}), (40, {}), (4, reserving)):
            call = served.prefill([1] * tokens, **options)  # only now: a call begins when it is made
            await refused(call, Reason.KV_BLOCKS_EXHAUSTED)
            assert held(served, ANYBODY) == (1, 4)
        await served.check()


async def test_one_of_several_callers_has_a_share_of_sequences_and_blocks_and_one_alone_has_all() -> None:
    async with serve_identity(max_sequences=4, kv_blocks=9, block_size=4, tokens=TOKENS) as served:
        alice, bob, operator = map(served.by, "abo")
        handles = [await prefill(alice, [1] * 4) for _ in range(2)]
        assert (await over(alice.prefill([1] * 4))).number("max_sequences_per_caller") == 2
        await alice.prefill([1] * 12, handles[0])
        error = await over(alice.prefill([1] * 4, handles[1]))
        assert error.number("max_blocks_per_caller") == 4 + served.runner.kv.state().total_blocks % 2
        await prefill(bob, [1] * 4)
        await operator.reset()
        assert held(served, ALICE) == held(served, BOB) == (0, 0)
        assert [(await prefill(operator, [1] * 8)).seq_len for _ in range(4)] == [8] * 4


@pytest.mark.parametrize(("names", "share"), [("a", 4), ("ab", 2)])
async def test_leases_sessions_and_watchers_have_a_share_per_caller_where_there_are_several(names, share):
    """Over the wire. One alone, beside an operator, has all of them."""
    tokens = ["operator o operator", *(f"{each} {each}" for each in names)]
    async with serve_identity(max_leases=4, max_sessions=4, max_watchers=4, tokens=tokens) as served:
        one = served.by("a")

        async def lease(by: Served) -> str:
            return str((await by.acquire()).lease_id)

        async def session(by: Served) -> Any:
            hello = session_pb2.SessionHello(client_revision=SCHEMA_REVISION, lease_id=leases[0])
            while True:
                stream = by.executor.Session()
                try:
                    await stream.write(session_pb2.SessionRequest(step_id=1, hello=hello))
                    break
                except grpc.aio.AioRpcError as error:  # grpcio's own, if the refusal meets the write: 4 of 12,000
                    if error.details() != "Internal error from Core":
                        raise
            assert await stream.read() is not grpc.aio.EOF
            return stream

        async def watch(by: Served) -> Any:
            stream = by.transfer.WatchKvEvents(kv_transfer_pb2.WatchKvEventsRequest())
            await stream.read()
            return stream

        leases = [await lease(one) for _ in range(share)]
        watchers = [await watch(one) for _ in range(share)]
        streams = [await session(one) for _ in range(share)]
        expected = Reason.QUOTA_EXCEEDED if len(names) > 1 else Reason.SEQUENCES_EXHAUSTED
        for ask in (lease, session, watch):
            await refused(ask(one), expected)
        if len(names) > 1:
            assert await lease(served.by("b"))
            watchers.append(await watch(served.by("b")))
        await one.revoke(leases.pop())
        assert await lease(one)
        told = (await one.info()).limits
        assert told.max_sequences_per_caller == (LIMITS.max_sequences // 2 if len(names) > 1 else 0)
        streams.pop().cancel()
        state = served.server.state
        await until(lambda: state.sessions == len(streams))
        streams.append(await session(one))
        for stream in (*streams, *watchers):
            stream.cancel()
        held = state.quotas.account(Caller("a")).held
        await until(lambda: not state.sessions and not held[Resource.WATCHERS])
        assert held[Resource.SESSIONS] == 0


async def test_the_queue_has_a_share_per_caller_that_an_answer_and_a_cancel_give_back() -> None:
    async with gated(max_queued_items=4, max_batch_items=2, tokens=TOKENS) as (served, gate):
        alice, bob = map(served.by, "ab")
        account = served.server.state.quotas.account(ALICE)
        running = await gate.hold(alice.prefill([1]))
        waiting = alice.prefill([1])
        await until(lambda: account.held[Resource.QUEUED_ITEMS] == 2)
        error = await refused(alice.prefill([1]), Reason.QUEUE_FULL)
        assert error.number("max_queued_items") == 2 and error.retry_after_s
        other = asyncio.ensure_future(bob.prefill([1]))
        waiting.cancel()
        await until(lambda: account.held[Resource.QUEUED_ITEMS] == 1)
        again = asyncio.ensure_future(alice.prefill([1]))
        gate.open()
        await asyncio.gather(running, other, again)
        assert account.held[Resource.QUEUED_ITEMS] == account.held[Resource.QUEUED_TOKENS] == 0
        await served.check()


@pytest.mark.parametrize(("role", "order"), [("", ["b0", "a0", "a1"]), (" operator", ["a0", "b0", "a1"])])
async def test_runs_have_a_share_per_caller_and_those_beyond_it_wait(role: str, order: list[str]) -> None:
    """Operators have no shares: one has all of the places, and others wait for them in their order."""
    ended, most = list[str](), 0
    async with gated(max_running=4, tokens=[f"{each} {each}{role}" for each in "ab"]) as (served, gate):
        engine = served.server.state.engine

        async def call(name: str, count: int, tokens: int) -> None:
            nonlocal most
            items = [item([1], request_id=f"{name} {at}", run={"max_tokens": tokens}) for at in range(count)]
            answer = await served.by(name[0]).unified(*items)
            assert [each.output.rows.count for each in answer.results] == [tokens] * count
            ended.append(name)
            most = max(most, engine.counters.running)

        calls = [await gate.hold(call("a0", 2, 9))]
        for about, queued in ((("a1", 2, 20), 2), (("b0", 1, 5), 3)):
            calls.append(asyncio.create_task(call(*about)))
            await until(lambda queued=queued: engine.queued_items == queued)
        gate.open()
        await asyncio.gather(*calls)
        assert ended == order and most <= 4
        await served.check()


async def test_pieces_of_the_second_tier_are_read_one_at_a_time_and_turn_by_turn_of_callers() -> None:
    state, submitted, read = ServerState(LIMITS), list[Any](), list[str]()
    state.engine = SimpleNamespace(submit=submitted.append)  # type: ignore[assignment]
    alice, bob = state.quotas.account(ALICE), state.quotas.account(BOB)

    async def piece(account: Account, name: str) -> None:
        async with state.tier_reads.held(((account, 1),)):
            await between_steps(state.engine.submit, Command(SimpleNamespace(__name__=name)))
        read.append(name)

    names = [(alice, f"a{number}") for number in range(5)] + [(bob, "b0"), (bob, "b1")]
    tasks = [asyncio.create_task(piece(*each)) for each in names]
    for _ in names:
        await until(lambda: submitted)
        [one] = submitted
        submitted.clear()
        one.done(None)
    await asyncio.gather(*tasks)
    assert read == ["a0", "a1", "b0", "a2", "b1", "a3", "a4"]


async def test_slots_go_to_whoever_has_fewest_within_its_share_and_a_cancelled_wait_takes_none() -> None:
    quotas = Quotas(replace(LIMITS, max_transfers=4))
    alice, bob, lone = map(quotas.account, (ALICE, BOB, ANYBODY))
    slots, began = Slots(4), list[str]()
    ends = {name: asyncio.Event() for name in ("a0", "a1", "a2", "a3", "a4", "b0", "b1", "b2", "z0", "z1", "z2")}

    async def work(account: Account, name: str) -> None:
        async with slots.held(((account, account.most[Resource.TRANSFERS]),)):
            began.append(name)
            await ends[name].wait()

    tasks = {}
    for account, first, count in ((alice, "a", 5), (bob, "b", 3), (lone, "z", 3)):
        for number in range(count):
            tasks[f"{first}{number}"] = asyncio.create_task(work(account, f"{first}{number}"))
    await until(lambda: len(began) == 4)
    assert began == ["a0", "a1", "b0", "b1"], "each its share, though others came before"
    tasks["a2"].cancel()
    ends["b0"].set()
    await until(lambda: len(began) == 5)
    assert began[4] == "z0", "it has none yet"
    ends["a0"].set()
    await until(lambda: len(began) == 6)
    assert began[5] in {"a3", "b2", "z1"}
    for each in ends.values():
        each.set()
    await asyncio.wait(tasks.values())
    assert set(began) == ends.keys() - {"a2"}
    assert [each for each in began if each[0] == "a"] == ["a0", "a1", "a3", "a4"], "in their order"
    assert not slots.waiting and not slots._held
    every = [asyncio.create_task(work(lone, "z0")) for _ in range(5)]
    began.clear()
    ends["z0"].clear()
    await until(lambda: bool(slots.waiting))
    assert len(began) == 4, "who does not share has all"
    ends["z0"].set()
    await asyncio.wait(every)


async def test_one_that_parks_much_does_not_keep_another_from_parking(tmp_path, monkeypatch):
    go_on, entered, create = threading.Event(), threading.Semaphore(0), ParkedFiles.create
    held = True

    def slow(files: ParkedFiles, path: Path) -> Any:
        if held:
            entered.release()
            assert go_on.wait(30)
        return create(files, path)

    monkeypatch.setattr(ParkedFiles, "create", slow)
    async with serve_identity(positional=True, max_context=64, park_dir=tmp_path, tokens=TOKENS) as served:
        alice, bob = map(served.by, "ab")
        many = [asyncio.ensure_future(alice.park(await prefill(alice, [1] * 9))) for _ in range(6)]
        try:
            for _ in range(2):
                assert await asyncio.to_thread(entered.acquire, timeout=30)
            held = False
            handle = (await asyncio.wait_for(bob.park(await prefill(bob, [1] * 9)), 30)).handle
            await asyncio.wait_for(bob.decode([1], handle), 30)
            assert not any(each.done() for each in many)
        finally:
            go_on.set()
        await asyncio.gather(*many)
        await served.check()


def test_what_a_refused_call_took_is_given_back_and_empty_accounts_are_dropped() -> None:
    quotas = Quotas(replace(LIMITS, max_leases=2))
    holder = quotas.account(ALICE)
    holder.allocate(Resource.LEASES)
    with pytest.raises(QuotaExceeded):
        holder.allocate(Resource.LEASES)
    assert holder.held[Resource.LEASES] == 1
    for number in range(EMPTY_ACCOUNTS + 1):
        quotas.account(Caller(f"visitor {number}"))
    assert quotas.account(ALICE) is holder and len(quotas) < EMPTY_ACCOUNTS


def test_a_caller_is_alone_until_the_file_names_another_that_is_no_operator() -> None:
    def shares(text: str) -> dict[str, bool]:
        return {caller.name: caller.shares for caller in parse(text, "file").values()}

    assert shares("a one\na two\nb three operator") == {"a": False, "b": False}
    assert shares("a one\nb two\nc three operator") == {"a": True, "b": True, "c": False}
    quotas = Quotas(LIMITS)
    account = quotas.account(Caller("a", operator=False))
    assert account.most[Resource.LEASES] >= LIMITS.max_leases
    assert quotas.account(Caller("a", operator=False, shares=True)) is account
    assert account.most[Resource.LEASES] < LIMITS.max_leases, "the file was read anew"
