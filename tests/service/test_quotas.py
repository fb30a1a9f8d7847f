"""What one caller may hold, while another has all the room that is left."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest

from ferrum_rpc.core import ANYBODY, Caller, CreateOptions, HandleRef, ItemAnswer, OutputSpec, Positions, Run, WorkItem
from ferrum_rpc.engine.commands import Command
from ferrum_rpc.errors import ExecutorError, QueueFull, QuotaExceeded, Reason
from ferrum_rpc.executor.v1 import kv_transfer_pb2, session_pb2
from ferrum_rpc.service.asking import between_steps
from ferrum_rpc.service.forward import ForwardCall
from ferrum_rpc.service.guard.auth import Security, parse
from ferrum_rpc.service.guard.slots import Slots
from ferrum_rpc.service.kv_ops import fork, release, reserve, truncate
from ferrum_rpc.service.parked import ParkedFiles
from ferrum_rpc.service.parking import park
from ferrum_rpc.service.quotas import EMPTY_ACCOUNTS, Quotas
from ferrum_rpc.service.records import Account, Resource, SequenceEnd
from ferrum_rpc.service.state import ServerState
from ferrum_rpc.wire.info import SCHEMA_REVISION
from tests.serving import LIMITS, Gate, Served, serve_identity
from tests.wiring import pb, refused, until

ALICE, BOB = Caller("alice", operator=False, shares=True), Caller("bob", operator=False, shares=True)


class Side:
    """One caller of a server, below the guard."""

    def __init__(self, served: Served, caller: Caller) -> None:
        self.caller = caller
        self.state = served.server.state

    async def feed(
        self, tokens: int, handle: HandleRef | None = None, *, truncate_to: int | None = None, reserve: int = 0
    ) -> HandleRef:
        work = WorkItem(
            0,
            handle,
            np.ones(tokens, dtype=np.int32),
            truncate_to,
            OutputSpec(Positions.LAST),
            "",
            CreateOptions(reserve_tokens=reserve),
        )
        outcome = (await ForwardCall(self.state, self.state.quotas.account(self.caller), [work])).outcomes[0]
        if isinstance(outcome, ExecutorError):
            raise outcome
        assert isinstance(outcome, ItemAnswer)
        return outcome.handle

    @property
    def held(self) -> tuple[int, int]:
        account = self.state.quotas.account(self.caller)
        return account.held[Resource.SEQUENCES], account.held[Resource.BLOCKS]


async def test_a_caller_at_its_quota_of_sequences_is_refused_and_others_are_not() -> None:
    async with serve_identity(max_sequences_per_caller=2) as served:
        alice, bob = Side(served, ALICE), Side(served, BOB)
        first = await alice.feed(3)
        await alice.feed(3)
        with pytest.raises(QuotaExceeded) as refusal:
            await alice.feed(3)
        assert refusal.value.number("max_sequences_per_caller") == 2
        with pytest.raises(QuotaExceeded):
            await fork(alice.state, first, caller=ALICE)
        await bob.feed(3)
        await release(alice.state, first, caller=ALICE)
        await alice.feed(3)
        assert (alice.held[0], bob.held[0]) == (2, 1)
        await served.check()


async def test_blocks_are_charged_by_length_and_given_back(served: Served) -> None:
    async with serve_identity(block_size=4, max_blocks_per_caller=6) as limited:
        alice, bob = Side(limited, ALICE), Side(limited, BOB)
        handle = await alice.feed(16)
        assert alice.held == (1, 4)
        with pytest.raises(QuotaExceeded):
            await alice.feed(9, handle)
        handle = await alice.feed(8, handle)
        assert alice.held == (1, 6)
        with pytest.raises(QuotaExceeded):
            await alice.feed(1)
        assert alice.held == (1, 6)
        [handle], _ = await truncate(alice.state, handle, 5, caller=ALICE)
        assert alice.held == (1, 2)
        [child], _ = await fork(alice.state, handle, caller=ALICE)
        assert alice.held == (2, 4)
        with pytest.raises(QuotaExceeded):
            await reserve(alice.state, child, 12, caller=ALICE)
        [child], _ = await reserve(alice.state, child, 11, caller=ALICE)
        assert alice.held == (2, 6)
        handle = await alice.feed(2, handle, truncate_to=0)
        assert alice.held == (2, 5)
        await bob.feed(24)
        for each in (handle, child):
            await release(alice.state, each, caller=ALICE)
        assert alice.held == (0, 0)
        await limited.check()


async def test_a_refused_item_leaves_the_account_as_it_was() -> None:
    async with serve_identity(kv_blocks=9, block_size=4, max_blocks_per_caller=50) as served:
        alice = Side(served, ALICE)
        handle = await alice.feed(16)
        with pytest.raises(ExecutorError, match="block"):
            await alice.feed(30, handle)  # within the quota, not within the pool
        with pytest.raises(ExecutorError, match="block"):
            await alice.feed(40)
        assert alice.held == (1, 4)
        with pytest.raises(ExecutorError, match="block"):
            await alice.feed(4, reserve=40)
        assert alice.held == (1, 4)
        await served.check()


async def test_one_of_several_callers_has_a_share_of_sequences_and_blocks_and_one_alone_has_all() -> None:
    async with serve_identity(max_sequences=4, kv_blocks=9, block_size=4) as served:
        alice, bob, lone = Side(served, ALICE), Side(served, BOB), Side(served, ANYBODY)
        handles = [await alice.feed(4), await alice.feed(4)]
        with pytest.raises(QuotaExceeded) as refusal:
            await alice.feed(4)
        assert refusal.value.number("max_sequences_per_caller") == 2
        await alice.feed(12, handles[0])
        with pytest.raises(QuotaExceeded) as refusal:
            await alice.feed(4, handles[1])
        assert refusal.value.number("max_blocks_per_caller") == 4 + served.runner.kv.state().total_blocks % 2
        await bob.feed(4)
        await served.server.state.ended(served.server.state.handles.records(), SequenceEnd.RESET)
        assert alice.held == bob.held == (0, 0)
        assert [(await lone.feed(8)).seq_len for _ in range(4)] == [8] * 4


@pytest.mark.parametrize(("names", "share"), [("a", 4), ("ab", 2)])
async def test_leases_sessions_and_watchers_have_a_share_per_caller_where_there_are_several(
    names: str, share: int, tmp_path: Path
) -> None:
    """Over the wire. One alone, beside an operator, has all of them."""
    tokens = tmp_path / "tokens"
    tokens.write_text("operator secret-o operator\n" + "".join(f"{name} secret-{name}\n" for name in names))
    tokens.chmod(0o600)
    limits = {"max_leases": 4, "max_sessions": 4, "max_watchers": 4}
    async with serve_identity(**limits, security=Security(tokens=tokens)) as served:

        def token(name: str) -> tuple[tuple[str, str], ...]:
            return (("authorization", f"Bearer secret-{name}"),)

        async def lease(name: str) -> str:
            answer = await served.executor.AcquireLease(pb.AcquireLeaseRequest(), metadata=token(name))
            return str(answer.lease_id)

        async def session(name: str) -> Any:
            hello = session_pb2.SessionHello(client_revision=SCHEMA_REVISION, lease_id=leases[0])
            while True:
                stream = served.executor.Session(metadata=token(name))
                try:
                    await stream.write(session_pb2.SessionRequest(step_id=1, hello=hello))
                    break
                except grpc.aio.AioRpcError as error:  # grpcio's own, if the refusal meets the write: 4 of 12,000
                    if error.details() != "Internal error from Core":
                        raise
            assert await stream.read() is not grpc.aio.EOF
            return stream

        async def watch(name: str) -> Any:
            stream = served.transfer.WatchKvEvents(kv_transfer_pb2.WatchKvEventsRequest(), metadata=token(name))
            await stream.read()
            return stream

        leases = [await lease("a") for _ in range(share)]
        watchers = [await watch("a") for _ in range(share)]
        streams = [await session("a") for _ in range(share)]
        expected = Reason.QUOTA_EXCEEDED if len(names) > 1 else Reason.SEQUENCES_EXHAUSTED
        for ask in (lease, session, watch):
            await refused(ask("a"), expected, grpc.StatusCode.RESOURCE_EXHAUSTED)
        if len(names) > 1:
            assert await lease("b")
            watchers.append(await watch("b"))
        await served.executor.RevokeLease(pb.RevokeLeaseRequest(lease_id=leases.pop()), metadata=token("a"))
        assert await lease("a")
        told = (await served.executor.GetInfo(pb.GetInfoRequest(), metadata=token("a"))).limits
        assert told.max_sequences_per_caller == (LIMITS.max_sequences // 2 if len(names) > 1 else 0)
        streams.pop().cancel()
        state = served.server.state
        await until(lambda: state.sessions == len(streams))
        streams.append(await session("a"))
        for stream in (*streams, *watchers):
            stream.cancel()
        held = state.quotas.account(Caller("a")).held
        await until(lambda: not state.sessions and not held[Resource.WATCHERS])
        assert held[Resource.SESSIONS] == 0


async def test_the_queue_has_a_share_per_caller_that_an_answer_and_a_cancel_give_back() -> None:
    gate = Gate("forward")
    async with serve_identity(stage=gate, max_queued_items=4, max_batch_items=2) as served:
        alice, bob = Side(served, ALICE), Side(served, BOB)
        account = served.server.state.quotas.account(ALICE)
        running = await gate.hold(alice.feed(3))
        waiting = asyncio.create_task(alice.feed(3))
        await until(lambda: account.held[Resource.QUEUED_ITEMS] == 2)
        with pytest.raises(QueueFull) as refusal:
            await alice.feed(3)
        assert refusal.value.number("max_queued_items") == 2 and refusal.value.retry_after_s
        other = asyncio.create_task(bob.feed(3))
        waiting.cancel()
        await asyncio.wait([waiting])
        again = asyncio.create_task(alice.feed(3))
        gate.open()
        await asyncio.gather(running, other, again)
        assert account.held[Resource.QUEUED_ITEMS] == account.held[Resource.QUEUED_TOKENS] == 0
        await served.check()


@pytest.mark.parametrize(("shares", "order"), [(True, ["b0", "a0", "a1"]), (False, ["a0", "b0", "a1"])])
async def test_runs_have_a_share_per_caller_and_those_beyond_it_wait(shares: bool, order: list[str]) -> None:
    """Without several callers one has all of the places, and others wait for them in their order."""
    callers = {"a": replace(ALICE, shares=shares), "b": replace(BOB, shares=shares)}
    gate, ended, most = Gate("forward"), list[str](), 0
    async with serve_identity(stage=gate, max_running=4) as served:
        state = served.server.state

        async def call(name: str, count: int, tokens: int) -> None:
            nonlocal most
            items = [
                WorkItem(
                    at,
                    None,
                    np.ones(1, dtype=np.int32),
                    None,
                    OutputSpec(Positions.LAST),
                    f"{name} {at}",
                    CreateOptions(),
                    Run(tokens),
                )
                for at in range(count)
            ]
            done = await ForwardCall(state, state.quotas.account(callers[name[0]]), items)
            assert [each.rows.count for each in done.outcomes] == [tokens] * count
            ended.append(name)
            most = max(most, state.engine.counters.running)

        first = await gate.hold(call("a0", 2, 9))
        others = [asyncio.create_task(call(*each)) for each in (("a1", 2, 20), ("b0", 1, 5))]
        await until(lambda: state.engine.queued_items == 3)
        gate.open()
        await asyncio.gather(first, *others)
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
    assert (slots._free, len(slots.waiting), len(slots._held)) == (4, 0, 0)
    every = [asyncio.create_task(work(lone, "z0")) for _ in range(4)]
    began.clear()
    ends["z0"].clear()
    await until(lambda: len(began) == 4)  # who does not share has all
    ends["z0"].set()
    await asyncio.wait(every)


async def test_one_that_parks_much_does_not_keep_another_from_parking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, entered, create = threading.Event(), threading.Semaphore(0), ParkedFiles.create
    held = True

    def slow(files: ParkedFiles, path: Path) -> Any:
        if held:
            entered.release()
            assert go_on.wait(30)
        return create(files, path)

    monkeypatch.setattr(ParkedFiles, "create", slow)
    async with serve_identity(positional=True, max_context=64, park_dir=tmp_path) as served:
        alice, bob = Side(served, ALICE), Side(served, BOB)
        many = [asyncio.create_task(park(alice.state, await alice.feed(9), ALICE)) for _ in range(6)]
        try:
            for _ in range(2):
                assert await asyncio.to_thread(entered.acquire, timeout=30)
            held = False
            handle, _ = await asyncio.wait_for(park(bob.state, await bob.feed(9), BOB), 30)
            await asyncio.wait_for(bob.feed(1, handle), 30)
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
