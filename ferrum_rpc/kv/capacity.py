"""Room that was promised to a sequence: spare blocks that nobody else can take.

A remote scheduler admits a sequence when it knows that it can finish. `KvManager.ensure_capacity` is that promise, and
this file keeps it: how many spares it takes, and that they fit again whenever a length or a sharing changes. It must
not know transactions: it is asked when no reservation is open on the sequence.
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
        wanted = self._spares_for(state, state.length + tokens)
        state.spares += self.take(max(0, wanted - len(state.spares)))
        state.promised_from, state.promised_tokens = state.length, tokens
        self._give_back(state, wanted)

    def keep(self, state: SequenceState) -> None:
        """The last block may have become shared: hold one more spare if so. Raises `KvBlocksExhausted`."""
        wanted = self._spares_for(state, state.promised_end)
        state.spares += self.take(max(0, wanted - len(state.spares)))

    def resize(self, state: SequenceState, lowest: int, length: int) -> None:
        """Set the length, ``lowest`` having been the least on the way, and make the spares fit the promise again.

        Blocks that the sequence gave up are in the pool by now, so that they can come back as spares.
        """
        state.length = length
        if not state.promised_tokens:
            return
        state.promised_from = min(state.promised_from, lowest)
        wanted = self._spares_for(state, state.promised_end)
        missing = max(0, wanted - len(state.spares))
        state.spares += self.take(min(missing, self._pool.free_blocks))
        self._give_back(state, wanted)
        if len(state.spares) < wanted:  # what was given up still belongs to a fork: promise no more than there is
            blocks = len(state.table) + len(state.spares) - self._must_copy_last(state)
            state.promised_tokens = max(0, blocks * self._block_size - state.promised_from)

    def _spares_for(self, state: SequenceState, end: int) -> int:
        """Blocks that the sequence needs beyond its own to be written from its length up to ``end``."""
        if end <= state.length:
            return 0
        return blocks_for(end, self._block_size) - len(state.table) + self._must_copy_last(state)

    def _must_copy_last(self, state: SequenceState) -> bool:
        """Whether the next token goes into a block that is shared."""
        partial = state.length % self._block_size != 0
        return partial and not self._pool.is_writable(state.table[len(state.table) - 1])

    def _give_back(self, state: SequenceState, wanted: int) -> None:
        """Spares beyond ``wanted`` are free again, e.g. when the fork that shared the last block is gone."""
        surplus = state.spares[wanted:]
        del state.spares[wanted:]
        self._pool.release(surplus)
