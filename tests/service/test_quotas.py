"""What one caller may hold, while another has all the room that is left."""

from __future__ import annotations

import numpy as np
import pytest

from ferrum_rpc.core import Caller, CreateOptions, HandleRef, ItemAnswer, OutputSpec, Positions, WorkItem
from ferrum_rpc.errors import ExecutorError, QuotaExceeded
from ferrum_rpc.service.forward import ForwardPath
from ferrum_rpc.service.operations import CacheOperations
from tests.serving import Served, serve_identity

ALICE, BOB = Caller("alice", operator=False), Caller("bob", operator=False)


class Side:
    """One caller of a server, below the guard."""

    def __init__(self, served: Served, caller: Caller) -> None:
        self.caller = caller
        self.books = served.server.books
        self.operations = CacheOperations(self.books)

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
        outcome = (await ForwardPath(self.books).forward([work], caller=self.caller)).outcomes[0]
        if isinstance(outcome, ExecutorError):
            raise outcome
        assert isinstance(outcome, ItemAnswer)
        return outcome.handle

    @property
    def held(self) -> tuple[int, int]:
        account = self.books.accounts[self.caller.name]
        return account.sequences, account.blocks


async def test_a_caller_at_its_quota_of_sequences_is_refused_and_others_are_not() -> None:
    async with serve_identity(max_sequences_per_caller=2) as served:
        alice, bob = Side(served, ALICE), Side(served, BOB)
        first = await alice.feed(3)
        await alice.feed(3)
        with pytest.raises(QuotaExceeded) as refused:
            await alice.feed(3)
        assert refused.value.number("max_sequences_per_caller") == 2
        with pytest.raises(QuotaExceeded):
            await alice.operations.fork(first, caller=ALICE)
        await bob.feed(3)
        await alice.operations.release(first, caller=ALICE)
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
        handle, _ = await alice.operations.truncate(handle, 5, caller=ALICE)
        assert alice.held == (1, 2)
        [child], _ = await alice.operations.fork(handle, caller=ALICE)
        assert alice.held == (2, 4)
        with pytest.raises(QuotaExceeded):
            await alice.operations.reserve(child, 12, caller=ALICE)
        child = await alice.operations.reserve(child, 11, caller=ALICE)
        assert alice.held == (2, 6)
        handle = await alice.feed(2, handle, truncate_to=0)
        assert alice.held == (2, 5)
        await bob.feed(24)
        for each in (handle, child):
            await alice.operations.release(each, caller=ALICE)
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
