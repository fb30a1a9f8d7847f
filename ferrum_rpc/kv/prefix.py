"""Which full blocks hold which tokens, so that a prompt that was seen is not computed twice.

A block is found by a hash of its tokens and of all before them (`prefix_hash`). Sequences of different salts never find
each other's blocks. The hash has 128 bits and is cryptographic, so that no prompt can be made whose hash is another's:
a hit is not checked against the tokens.

`KvManager` says when a sequence has grown, gone back, or is promised nothing any more; `BlockPool` keeps a published
block until its place is needed. Blocks found by their chained hashes are from vLLM's automatic prefix caching.
"""

from __future__ import annotations

import time
from typing import Final, Protocol

import numpy as np

from ferrum_rpc.core import BlockChange, PrefixUse, TokenArray
from ferrum_rpc.kv.pool import BlockPool, Int32Array
from ferrum_rpc.kv.sequence import NEVER, SequenceBlocks
from ferrum_rpc.prefix_hash import chained, root_of

MOST_CHANGES: Final = 1 << 16
"""Changes that wait to be taken; beyond, they are forgotten, and there is nothing to take."""


class Tier(Protocol):
    """Where blocks go that must leave, and come from; see `tiers.BlockFiles`."""

    def read(self, hashed: bytes) -> bytes | None:
        """The content of a block, or None."""

    def hashes(self) -> list[bytes]:
        """Of all blocks that are there."""


class PrefixCache:
    """The published blocks of ``pool``, of ``block_size`` tokens of the model ``fingerprint``: by hash, and their
    hashes. A block is published once, and a hash has one block. ``evicted`` blocks were given away, after ``evicted_s``
    seconds here in all; with a ``tier`` they wait in ``leaving``, with their hashes, until they are saved: before
    anything is written."""

    def __init__(self, pool: BlockPool, block_size: int, fingerprint: bytes) -> None:
        self._pool = pool
        self._size = block_size
        self._fingerprint = fingerprint
        self._blocks: dict[bytes, int] = {}
        self._hashes: dict[int, bytes] = {}
        self._parents: dict[int, bytes] = {}
        self._adapters: dict[int, str] = {}  # of blocks that were computed with one
        self._changes: list[BlockChange] | None = None  # nobody watches
        self.tier: Tier | None = None
        self.leaving: list[tuple[int, bytes]] = []
        self._since = [0.0] * pool.num_blocks
        self.evicted = 0
        self.evicted_s = 0.0
        pool.on_evict = self._evict

    # --- a sequence -------------------------------------------------------------------------------------------------

    def begin(self, state: SequenceBlocks, use: PrefixUse) -> None:
        """A new sequence finds blocks here, and publishes its own where it is to."""
        state.root = state.chain = root_of(use.fingerprint or self._fingerprint, use.salt, use.adapter)
        state.adapter = use.adapter
        state.publish_at = self._size if use.publishes else NEVER

    def find(self, state: SequenceBlocks, prompt: TokenArray) -> tuple[list[int], list[bytes]]:
        """The published blocks with the tokens that the sequence has of its last block, where that is not full, and
        those of ``prompt`` behind them; and the content of what the tier has behind those. For a sequence that uses the
        cache."""
        size, length = self._size, state.length
        first = length // size
        chain = state.chain
        for hashed in chained(chain, state.history.upto(length)[state.chained * size :], size):
            chain = hashed
        rest = state.history.upto(length)[first * size :]
        found: list[int] = []
        loaded: list[bytes] = []
        for hashed in chained(chain, np.concatenate([rest, prompt]) if len(rest) else prompt, size):
            block = None if loaded else self._blocks.get(hashed)
            if block is not None:
                found.append(block)
                continue
            if self.tier is None or not (found or loaded or not len(rest)) or len(loaded) == self._pool.free_blocks:
                break
            content = self.tier.read(hashed)
            if content is None:
                break
            loaded.append(content)
        return found, loaded

    def fetch(self, state: SequenceBlocks, prompt: TokenArray, most: int) -> list[tuple[int, bytes]]:
        """Publish blocks for what the tier has of ``prompt`` behind what is published: up to ``most``, of those that
        are free. Returns them with their content, which must be written there. For a sequence that uses the cache."""
        size, length, pool = self._size, state.length, self._pool
        parent = state.chain if state.chained else b""
        held, fetched = list[int](), list[tuple[int, bytes]]()
        tokens = np.concatenate([state.history.upto(length)[state.chained * size :], prompt])
        for place, hashed in enumerate(chained(state.chain, tokens, size), state.chained):
            block = self._blocks.get(hashed)
            if place < length // size:  # the sequence's own
                parent = hashed
                continue
            if block is not None:
                pool.reuse([block])
            else:
                content = None if self.tier is None or len(fetched) == most else self.tier.read(hashed)
                taken = None if content is None else pool.allocate(1)
                if content is None or taken is None:
                    break
                [block] = taken
                self._blocks[hashed], self._hashes[block], self._parents[block] = block, hashed, parent
                self._since[block] = time.monotonic()
                if state.adapter:
                    self._adapters[block] = state.adapter
                pool.keep(taken)
                fetched.append((block, content))
                if self._changes is not None:
                    self._note([self._stored(block)])
            held.append(block)
            parent = hashed
        pool.release(held)
        return fetched

    def publish(self, state: SequenceBlocks) -> None:
        """Publish the blocks that are full and not promised. For a sequence that has reached ``publish_at``."""
        size = self._size
        blocks = (state.promised_from if state.promised_tokens else state.length) // size
        added = []
        for hashed in chained(state.chain, state.history.upto(blocks * size)[state.chained * size :], size):
            block = state.table[state.chained]
            if hashed not in self._blocks and block not in self._hashes:
                self._blocks[hashed], self._hashes[block] = block, hashed
                self._parents[block] = state.chain if state.chained else b""
                added.append(block)
            state.chain, state.chained = hashed, state.chained + 1
        if added:
            now = time.monotonic()
            for block in added:
                self._since[block] = now
            if state.adapter:
                self._adapters.update(dict.fromkeys(added, state.adapter))
            self._pool.keep(added)
            if self._changes is not None:
                self._note(list(map(self._stored, added)))
        state.shared = max(state.shared, state.chained)
        state.publish_at = (state.chained + 1) * size

    def went_back(self, state: SequenceBlocks, length: int) -> None:
        """The sequence had ``length`` tokens, or has them now: its chain is no longer."""
        first = length // self._size
        if state.root is None or first >= state.chained:
            return
        state.chained, state.chain = 0, state.root
        for count in range(first, 0, -1):
            hashed = self._hashes.get(state.table[count - 1])
            if hashed is not None:
                state.chained, state.chain = count, hashed
                break
        state.publish_at = (state.chained + 1) * self._size

    # --- a block ----------------------------------------------------------------------------------------------------

    def withdraw(self, block: int) -> None:
        """Publish ``block`` no more: the one sequence that holds it will write there."""
        self._forget(block)
        self._pool.let_go(block)

    def hash_of(self, block: int) -> bytes | None:
        """The hash of a published block."""
        return self._hashes.get(block)

    def published(self) -> Int32Array:
        """All published blocks, in no order, int32 [n]."""
        return np.fromiter(self._hashes, np.int32, len(self._hashes))

    def blocks(self) -> list[tuple[int, bytes]]:
        """The published blocks with their hashes."""
        return list(self._hashes.items())

    def clear(self) -> None:
        """Forget all; the pool forgets them too."""
        self._blocks.clear()
        self._hashes.clear()
        self._parents.clear()
        self._adapters.clear()
        self.leaving.clear()
        if self._changes is not None:
            self._note([BlockChange(b"", None)])

    # --- for others -------------------------------------------------------------------------------------------------

    def watch(self) -> list[BlockChange]:
        """What is published. From now on changes are kept, for `take_changes`."""
        self._changes = []
        there = list(map(self._stored, self._hashes))
        parked = [] if self.tier is None else [each for each in self.tier.hashes() if each not in self._blocks]
        return there + [BlockChange(hashed, None, parked=True) for hashed in parked]

    def take_changes(self) -> list[BlockChange] | None:
        """What has changed since it was asked last, in its order. None: that is not known, `watch` again."""
        changes = self._changes
        if changes is not None:
            self._changes = []
        return changes

    def note_tier(self, hashed: bytes, *, there: bool) -> None:
        """The tier has a block now, or no more."""
        if self._changes is not None and hashed not in self._blocks:
            self._note([BlockChange(hashed, None, there)])

    def _stored(self, block: int) -> BlockChange:
        return BlockChange(self._hashes[block], self._parents[block], adapter=self._adapters.get(block, ""))

    def _note(self, changes: list[BlockChange]) -> None:
        assert self._changes is not None  # noqa: S101 - somebody watches
        self._changes += changes
        if len(self._changes) > MOST_CHANGES:
            self._changes = None

    def _evict(self, block: int) -> None:
        self.evicted += 1
        self.evicted_s += time.monotonic() - self._since[block]
        if self.tier is not None:
            self.leaving.append((block, self._hashes[block]))
        self._forget(block)

    def _forget(self, block: int) -> None:
        hashed = self._hashes.pop(block)
        del self._blocks[hashed], self._parents[block]
        self._adapters.pop(block, None)
        if self._changes is not None:
            self._note([BlockChange(hashed, None)])
