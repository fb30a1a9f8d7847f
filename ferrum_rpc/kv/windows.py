"""Blocks behind a sliding window: which a sequence still needs, and what it can be continued with when they are gone.

If every layer has a window, no later token attends to what lies behind the longest of them. A sequence then gives up
the blocks that lie behind it: those that are published go to the prefix cache, where they are found until their place
is needed. The first entries of its table are the null block, ``SequenceBlocks.gone`` of them. A few tokens more than a
window are kept, so that a short way back costs nothing.

A sequence that goes back further takes up what the prefix cache still has of its tokens. If a whole window before the
new length is not there, it goes back to the last place that has one, or to its beginning, and owes the tokens between
(``SequenceBlocks.owed_to``): they are fed again before it is used (`engine.feeding`).

What makes a place usable is the same for a sequence that goes back and for a prompt that is looked up
(`PrefixCache.find`): the blocks of one window before it, and not those before them.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from ferrum_rpc.errors import KvBlocksExhausted
from ferrum_rpc.kv.capacity import Capacity
from ferrum_rpc.kv.pool import NULL_BLOCK, BlockPool
from ferrum_rpc.kv.prefix import PrefixCache
from ferrum_rpc.kv.sequence import NEVER, SequenceBlocks
from ferrum_rpc.kv.table import blocks_for, held_blocks
from ferrum_rpc.prefix_hash import chained


class Window(NamedTuple):
    """A query sees the last ``tokens`` positions, its own among them, in the layer that sees most. To go back by up to
    ``free`` tokens of the last step costs nothing."""

    tokens: int
    free: int

    @property
    def kept(self) -> int:
        """How many tokens of a sequence stay, at most, besides those of a step."""
        return self.tokens - 1 + self.free


IN_TIER: Final = -1
"""In place of a block that the second tier has."""


class Content(NamedTuple):
    """What can be had of the first tokens of a sequence: the ``blocks`` of ``length`` of them, the null block for each
    that is not needed. From the position ``imported_from`` on, what the prefix cache has of them was imported."""

    length: int
    blocks: list[int]
    imported_from: int


class Windows:
    """The blocks that sequences need of ``pool``, of ``size`` tokens each, where every layer has a window."""

    def __init__(self, pool: BlockPool, prefixes: PrefixCache, capacity: Capacity, size: int, window: Window) -> None:
        self._pool, self._prefixes, self._capacity, self._size = pool, prefixes, capacity, size
        self._seen, self._free = window.tokens - 1, window.free
        prefixes.first_kept = self.first_kept

    def first_needed(self, length: int) -> int:
        """The first block that a token at the position ``length`` attends to."""
        return max(0, length - self._seen) // self._size

    def first_kept(self, length: int) -> int:
        """The first block that a sequence of ``length`` tokens keeps, and that a prompt of as many needs to be
        found."""
        return max(0, length - self._seen - self._free) // self._size

    def first_sent(self, length: int, sent_from: int) -> int:
        """The first block that a sequence of ``length`` tokens keeps if its cache comes from elsewhere, at the earliest
        from the token ``sent_from`` on."""
        return min(self.first_needed(length), max(self.first_kept(length), blocks_for(sent_from, self._size)))

    def lacks(self, state: SequenceBlocks, length: int) -> bool:
        """Whether the sequence lacks anything that a token at the position ``length`` attends to."""
        return length > state.length or self.first_needed(length) < state.gone

    def missing(self, state: SequenceBlocks, start: int, *, fork: bool) -> int:
        """See `KvManager.missing`."""
        if state.open is not None or start > state.known:
            return 0
        if start > state.length:
            return start - state.length
        return max(1, start) if not fork and self.lacks(state, start) else 0

    def refusal(self, state: SequenceBlocks, start: int) -> KvBlocksExhausted:
        """Of a span that begins at ``start``, or what reads so many tokens, when something is missing and cannot be fed
        again."""
        free, missing = self._pool.free_blocks, self.missing(state, start, fork=False)
        return KvBlocksExhausted(
            f"up to {missing} tokens must be fed again first, and no block is free for that",
            metadata={"needed_blocks": free + 1, "free_blocks": free},
        )

    def drop(self, state: SequenceBlocks) -> None:
        """Give up what lies behind the window. What a promise covers stays: the sequence may go back there."""
        gone = self.first_kept(state.unpromised)
        if gone <= state.gone:
            return
        blocks = state.table.clear(state.gone, gone)
        state.gone = gone
        self._pool.release(held_blocks(blocks))

    def find(self, state: SequenceBlocks, length: int, *, tier: bool = False) -> Content:
        """The most that the sequence and the prefix cache have of the first ``length`` tokens of ``state``, with what
        the second ``tier`` has (`IN_TIER`) or without. The block in which those end may have more of the sequence's
        tokens."""
        size, table = self._size, state.table
        last, own_end = blocks_for(length, size), len(table)
        hashes = (
            chained(state.root, state.history.upto(min(state.known, last * size)), size) if state.root else iter(())
        )
        blocks, since, usable, first = list[int](), 0, 0, 0
        imported = list[int]()
        for place in range(last):
            hashed, end = next(hashes, None), min(length, (place + 1) * size)
            block = NULL_BLOCK
            if state.gone <= place < own_end and state.length >= end:
                block = table[place]
            elif hashed is not None:
                found = self._prefixes.block_of(hashed, state.caller)
                if found is not None:
                    block, own = found
                    imported += [place] if own else []
                elif tier and self._prefixes.in_tier(hashed, state.caller):
                    block = IN_TIER
            if block == NULL_BLOCK and state.gone <= place < own_end:
                block, end = table[place], state.length  # it is full in part
            blocks.append(block)
            if block == NULL_BLOCK:
                since = place + 1
            elif since <= self.first_needed(end):
                usable, first = end, max(since, self.first_kept(end))
            if end < min(length, (place + 1) * size):
                since = place + 1
        blocks = [NULL_BLOCK] * first + blocks[first : blocks_for(usable, size)]
        from_others = [place * size for place in imported if first <= place < len(blocks)]
        return Content(usable, blocks, min(from_others, default=NEVER))

    def to_fetch(self, state: SequenceBlocks, start: int) -> range:
        """Between which places the second tier has blocks that a span needs, which is to begin at ``start``, or that
        leave less to be fed again before it. Empty: none."""
        if state.root is None or not self.missing(state, start, fork=False):
            return range(0)
        found = self.find(state, start, tier=True)
        needed = self.first_needed(found.length)
        places = [place for place, block in enumerate(found.blocks) if block == IN_TIER and place >= needed]
        return range(places[0], places[-1] + 1) if places else range(0)

    # --- going back, when something is lacked -----------------------------------------------------------------------

    def take_up(self, state: SequenceBlocks, start: int) -> bool:
        """Have what can be had of the tokens before ``start``, where a span is to begin; the sequence owes the rest of
        its tokens. Returns whether it has other blocks now."""
        content, known = self.find(state, start), state.known
        if content.length == state.length:
            return False
        self._replace(state, content, known)
        state.owed_to = known
        return True

    def go_back(self, state: SequenceBlocks, length: int) -> bool:
        """Forget the tokens from ``length`` on, and have what can be had of the others; the sequence owes the rest.
        Returns whether it has other blocks now."""
        before = state.length
        if length < before:
            self._replace(state, self.find(state, length), length)
        else:
            self._capacity.resize(state, length, before)
        state.owed_to = length
        return length < before

    def fork(self, parent: SequenceBlocks, at: int) -> SequenceBlocks:
        """A fork of the first ``at`` tokens of ``parent``, which has what can be had of them. What it lacks is fed
        again for it alone. Raises `KvBlocksExhausted` as `KvManager.fork` does."""
        content, forked = self.find(parent, at), parent.forked(at)
        forked.owed_to = at
        own = set(held_blocks(parent.table.whole.tolist()))
        has = held_blocks(content.blocks)
        of_parent = [block for block in has if block in own]
        self._pool.acquire(np.array(of_parent, np.int32))
        self._pool.reuse([block for block in has if block not in own])
        before = parent.shared
        try:
            if of_parent:
                parent.shared = max(before, len(content.blocks))
                self._capacity.keep(parent)
        except KvBlocksExhausted:
            parent.shared = before
            self._pool.release(has)
            raise
        self._begin_with(forked, content)
        return forked

    def _replace(self, state: SequenceBlocks, content: Content, lowest: int) -> None:
        """The sequence has this content now, of its own tokens, in place of what it had. ``lowest``: the length that it
        goes back to."""
        had, has = held_blocks(state.table.cut(0)), held_blocks(content.blocks)
        own = set(had)
        self._pool.reuse([block for block in has if block not in own])
        own.difference_update(has)
        self._pool.release([block for block in had if block in own])
        self._begin_with(state, content)
        self._capacity.resize(state, lowest, content.length)

    def _begin_with(self, state: SequenceBlocks, content: Content) -> None:
        """``state``, whose table is empty, has references to the blocks of this content."""
        state.table.extend(content.blocks)
        state.gone = len(content.blocks) - len(held_blocks(content.blocks))
        state.length, state.shared = content.length, len(content.blocks)
        self._prefixes.went_back(state, content.length)
        state.imported_from = min(state.imported_from, content.imported_from)
