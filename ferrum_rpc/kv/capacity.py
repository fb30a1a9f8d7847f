"""Capacity promised to a sequence: spare blocks reserved for it.

A remote scheduler admits a sequence if it is sure to finish, which `KvManager.ensure_capacity` promises. This file
computes the number of spares, and adjusts them when a length or the sharing of a block changes. It is independent of
transactions: it is called while no reservation is open on the sequence.
"""

from __future__ import annotations

from collections.abc import Callable

from ferrum_rpc.errors import KvBlocksExhausted
from ferrum_rpc.kv.pool import BlockPool
from ferrum_rpc.kv.sequence import SequenceBlocks
from ferrum_rpc.kv.table import blocks_for


class Capacity:
    """Spares of the sequences over ``pool``, in blocks of ``block_size`` tokens. ``withdraw`` is called with each block
    that is to be published no more."""

    def __init__(self, pool: BlockPool, block_size: int, withdraw: Callable[[int], object]) -> None:
        self._pool = pool
        self._block_size = block_size
        self._withdraw = withdraw
        self.promised: dict[SequenceBlocks, None] = {}
        """Those that were promised something, and perhaps some that are promised nothing any more."""

    def begin(self, state: SequenceBlocks, start: int, tokens: int) -> None:
        """Promise ``tokens`` tokens from ``start`` on, for which spares are there."""
        state.promised_from, state.promised_tokens = start, tokens
        if tokens:
            self.promised[state] = None

    def allocate(self, count: int) -> list[int]:
        """``count`` blocks from the pool. Raises `KvBlocksExhausted`, with none allocated, if there are fewer."""
        blocks = self._pool.allocate(count)
        if blocks is None:
            free = self._pool.free_blocks
            raise KvBlocksExhausted(
                f"{count} blocks are needed and {free} are free",
                metadata={"needed_blocks": count, "free_blocks": free},
            )
        return blocks

    def promise(self, state: SequenceBlocks, tokens: int) -> None:
        """Hold spares for the next ``tokens`` tokens, in place of an earlier promise. Raises `KvBlocksExhausted`."""
        wanted = self._spares_for(state, state.length, tokens)
        state.spares += self.allocate(max(0, wanted - len(state.spares)))
        self.begin(state, state.length, tokens)
        self._free_surplus(state, wanted)

    def keep(self, state: SequenceBlocks) -> None:
        """Allocate spares for blocks that have become shared. Raises `KvBlocksExhausted`."""
        wanted = self._spares_for(state, state.promised_from, state.promised_tokens)
        state.spares += self.allocate(max(0, wanted - len(state.spares)))

    def trim(self, state: SequenceBlocks) -> None:
        """Free the spares of blocks that are no longer shared."""
        if state.promised_tokens:
            self._free_surplus(state, self._spares_for(state, state.promised_from, state.promised_tokens))

    def lacking_to_hold(self, state: SequenceBlocks, start: int, table: int, end: int, spares: int) -> int:
        """Blocks that the pool must give so that writes up to ``end`` find theirs, once a step has written from
        ``start`` on and left ``table`` blocks; ``spares``: those that it does not use. What the step gives up comes
        back."""
        size, before = self._block_size, len(state.table)
        given_up = max(0, before - table) - self._pool.count_shared(state.table.view(before)[table:])
        lowest = self._promise_with(state, start, end)[0] // size
        shared = self._pool.count_shared(state.table.view(min(state.shared, start // size))[lowest:])
        return max(0, blocks_for(end, size) - table - given_up + shared - spares)

    def hold(self, state: SequenceBlocks, start: int, end: int) -> None:
        """Promise writes from ``start`` up to ``end`` until `end_hold`, besides what was promised before."""
        state.before_hold = state.promised_from, state.promised_tokens
        self.begin(state, *self._promise_with(state, start, end))

    def undo_hold(self, state: SequenceBlocks, allocated: int) -> None:
        """Undo a hold: free its last ``allocated`` spares."""
        self._pool.release(state.spares[len(state.spares) - allocated :])
        del state.spares[len(state.spares) - allocated :]
        assert state.before_hold is not None  # noqa: S101 - it holds
        (state.promised_from, state.promised_tokens), state.before_hold = state.before_hold, None

    def end_hold(self, state: SequenceBlocks) -> None:
        """End the hold; an earlier promise stays, counted from the lowest length since."""
        if state.before_hold is not None:
            (_, state.promised_tokens), state.before_hold = state.before_hold, None
            if state.promised_tokens:  # which going back may have shortened
                self.resize(state, state.promised_from, state.length)
            else:
                self._free_surplus(state, 0)

    def resize(self, state: SequenceBlocks, lowest: int, length: int) -> None:
        """Set the length, ``lowest`` having been the least on the way, and make the spares fit the promise again.

        Blocks that the sequence gave up are in the pool by now, so that they can come back as spares.
        """
        state.length = length
        state.shared = min(state.shared, len(state.table))
        if not state.promised_tokens:
            return
        state.promised_from = min(state.promised_from, lowest)
        wanted = self._spares_for(state, state.promised_from, state.promised_tokens)
        missing = max(0, wanted - len(state.spares))
        state.spares += self.allocate(min(missing, self._pool.free_blocks))
        while wanted > len(state.spares):  # below where it began, into what a fork shares: promise what there is
            whole = (state.promised_end - 1) // self._block_size * self._block_size
            state.promised_tokens = max(0, whole - state.promised_from)
            wanted = self._spares_for(state, state.promised_from, state.promised_tokens)
        self._free_surplus(state, wanted)

    @staticmethod
    def _promise_with(state: SequenceBlocks, start: int, end: int) -> tuple[int, int]:
        """From where, and of how many tokens, a promise is that covers the present one and writes up to ``end``, once
        ``start`` has been a length."""
        if not state.promised_tokens:
            return start, end - start
        lowest = min(state.promised_from, start)
        return lowest, max(state.promised_tokens, end - lowest)

    def _spares_for(self, state: SequenceBlocks, start: int, tokens: int) -> int:
        """Blocks that the sequence needs beyond its own to be written from ``start`` on, up to ``tokens`` tokens: those
        that it has not, and a copy of each that is shared. It may go back to ``start`` and write all of it again, so
        what a fork published there, and holds no more, is published no more: another that found it would share it."""
        if not tokens:
            return 0
        first, last, have = start // self._block_size, blocks_for(start + tokens, self._block_size), len(state.table)
        absent = max(0, last - have)
        if state.shared <= first:
            return absent
        held = state.table.view(min(last, state.shared))[first:]
        for block in held.tolist():
            if self._pool.has_one_holder(block):
                self._withdraw(block)
        return absent + self._pool.count_shared(held)

    def _free_surplus(self, state: SequenceBlocks, wanted: int) -> None:
        """Free the spares beyond ``wanted``, e.g. when the fork that shared the last block is gone."""
        surplus = state.spares[wanted:]
        del state.spares[wanted:]
        self._pool.release(surplus)
