"""Capacity that was promised to a sequence: spare blocks that no other can take.

A remote scheduler admits a sequence when it can be sure that it will finish. `KvManager.ensure_capacity` is that
promise. This file computes how many spares it takes, and fits them again when a length or the sharing of a block
changes. It must not know transactions: it is called while no reservation is open on the sequence.
"""

from __future__ import annotations

from ferrum_rpc.errors import KvBlocksExhausted
from ferrum_rpc.kv.pool import BlockPool
from ferrum_rpc.kv.sequence import SequenceState
from ferrum_rpc.kv.table import blocks_for


class Capacity:
    """Spares of the sequences over ``pool``, in blocks of ``block_size`` tokens."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size

    def take(self, count: int) -> list[int]:
        """``count`` blocks from the pool. Raises `KvBlocksExhausted` where there are fewer; then none is taken."""
        blocks = self._pool.allocate(count)
        if blocks is None:
            free = self._pool.free_blocks
            raise KvBlocksExhausted(
                f"{count} blocks are needed and {free} are free",
                metadata={"needed_blocks": count, "free_blocks": free},
            )
        return blocks

    def promise(self, state: SequenceState, tokens: int) -> None:
        """Hold spares for the next ``tokens`` tokens, in place of an earlier promise. Raises `KvBlocksExhausted`."""
        wanted = self._spares_for(state, state.length, tokens)
        state.spares += self.take(max(0, wanted - len(state.spares)))
        state.promised_from, state.promised_tokens = state.length, tokens
        self._give_back(state, wanted)

    def keep(self, state: SequenceState) -> None:
        """More blocks may have become shared: hold spares for them. Raises `KvBlocksExhausted`."""
        wanted = self._spares_for(state, state.promised_from, state.promised_tokens)
        state.spares += self.take(max(0, wanted - len(state.spares)))

    def trim(self, state: SequenceState) -> None:
        """Blocks may be shared no more: give back the spares that were held for them."""
        if state.promised_tokens:
            self._give_back(state, self._spares_for(state, state.promised_from, state.promised_tokens))

    def resize(self, state: SequenceState, lowest: int, length: int) -> None:
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
        state.spares += self.take(min(missing, self._pool.free_blocks))
        while wanted > len(state.spares):  # below where it began, into what a fork shares: promise what there is
            whole = (state.promised_end - 1) // self._block_size * self._block_size
            state.promised_tokens = max(0, whole - state.promised_from)
            wanted = self._spares_for(state, state.promised_from, state.promised_tokens)
        self._give_back(state, wanted)

    def _spares_for(self, state: SequenceState, start: int, tokens: int) -> int:
        """Blocks that the sequence needs beyond its own to be written from ``start`` on, up to ``tokens`` tokens: those
        that it has not, and a copy of each that is shared. It may go back to ``start`` and write all of it again."""
        if not tokens:
            return 0
        first, last, have = start // self._block_size, blocks_for(start + tokens, self._block_size), len(state.table)
        absent = max(0, last - have)
        if state.shared <= first:
            return absent
        return absent + self._pool.count_shared(state.table.view(min(last, state.shared))[first:])

    def _give_back(self, state: SequenceState, wanted: int) -> None:
        """Spares beyond ``wanted`` are free again, e.g. when the fork that shared the last block is gone."""
        surplus = state.spares[wanted:]
        del state.spares[wanted:]
        self._pool.release(surplus)
