"""The prefix cache: full blocks by the hash of their tokens, so that a known prompt is not computed twice.

A block is found by a hash of its tokens and of all tokens before them (`prefix_hash`). Sequences of different salts
never find each other's blocks. The hash has 128 bits and is cryptographic, so collisions cannot be constructed: a hit
is not compared with the tokens.

Imported content cannot be verified, nor can what is computed from it. Such a block is published only for the caller
that imported it: the block's key, in memory and in the tier, is the hash followed by the digest of the caller's name.
So one hash may have several blocks, a computed one and one for each importing caller; a sequence prefers the computed
one.

`KvManager` says when a sequence has grown, gone back, or is promised nothing any more; `BlockPool` keeps a published
block until its place is needed. Blocks found by their chained hashes are from vLLM's automatic prefix caching.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple, Protocol, TypeVar

import numpy as np

from ferrum_rpc.core import BlockChange, PrefixUse, TokenArray
from ferrum_rpc.kv.pool import NULL_BLOCK, BlockPool, Int32Array
from ferrum_rpc.kv.sequence import NEVER, KvMisuse, SequenceBlocks
from ferrum_rpc.prefix_hash import HASH_BYTES, chained, root_of

MOST_CHANGES: Final = 1 << 16
"""Changes that wait to be taken; beyond, they are forgotten, and there is nothing to take."""


Content = TypeVar("Content")


class Tier(Protocol):
    """The destination of evicted blocks; see `tiers.BlockFiles`."""

    def read(self, key: bytes) -> bytes | None:
        """The content of a block, or None."""

    def hashes(self) -> list[bytes]:
        """The keys of all blocks that are there."""

    def __contains__(self, key: bytes) -> bool:
        """Whether there is a block, or states, of this key."""


class PrefixHit(NamedTuple):
    """The published ``blocks`` of a prompt. From the position ``imported_from`` on their content was imported, or
    computed from what was. If the model keeps states, they end at a ``checkpoint``, by its key, and the prompt is
    published up to the position ``known``."""

    blocks: list[int]
    imported_from: int = NEVER
    known: int = 0
    checkpoint: bytes = b""


class PrefixCache:
    """The published blocks of ``pool``, of ``block_size`` tokens of the model ``fingerprint``: by key, and their keys.
    A block is published once, and a key has one block. A key is a hash, or for what one caller alone may find, the hash
    and the caller's digest. ``evicted`` blocks were given away, after ``evicted_s`` seconds here in all; with a
    ``tier`` they wait in ``leaving``, with their keys, until they are saved: before anything is written. ``changed``
    is another number whenever something was published, or is no more. ``has_checkpoint``: whether there are states
    behind a block, by its key; None: the model keeps none. ``first_kept``: from which block on a prompt of a length is
    needed, where every layer has a window; None: all of it is."""

    def __init__(self, pool: BlockPool, block_size: int, fingerprint: bytes) -> None:
        self._pool = pool
        self._size = block_size
        self._fingerprint = fingerprint
        self._blocks: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        self._parents: dict[int, bytes] = {}
        self._adapters: dict[int, str] = {}  # of blocks that were computed with one
        self._changes: list[BlockChange] | None = None  # no watcher
        self.tier: Tier | None = None
        self.leaving: list[tuple[int, bytes]] = []
        self.changed = 0
        self.has_checkpoint: Callable[[bytes], bool] | None = None
        self.first_kept: Callable[[int], int] | None = None
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
        state.caller = use.caller
        if use.imported_from is not None:
            if not use.caller:
                raise KvMisuse("imported content needs a caller: it would be published for everybody")
            state.imported_from = use.imported_from

    def find(self, state: SequenceBlocks, prompt: TokenArray, needed: int = 0) -> PrefixHit:
        """The published blocks of ``prompt`` behind the sequence's tokens, the block in which those end among them.
        Memory only: what the tier has, `fetch` has published before. For a sequence that uses the cache. ``needed``:
        the first block that is; those before count as found."""
        if self.first_kept is not None:
            return self._find_window(state, prompt, self.first_kept, needed)
        found, imported_from = list[int](), NEVER
        checkpoint, usable, first = b"", 0, state.length // self._size
        _, hashes = self._hashes_behind(state, state.length, prompt)
        for place, hashed in enumerate(hashes, first):
            key, block = hashed, self._blocks.get(hashed)
            if block is None:  # most are there
                key, block = _first_of(self._blocks.get, hashed, state.caller)
                if block is None:
                    break
            if key is not hashed and imported_from == NEVER:
                imported_from = place * self._size
            found.append(block)
            if self.has_checkpoint is not None and self.has_checkpoint(key):
                checkpoint, usable = key, len(found)
        if self.has_checkpoint is None:
            return PrefixHit(found, imported_from)
        known, end = (first + len(found)) * self._size, (first + usable) * self._size
        return PrefixHit(found[:usable], imported_from if imported_from < end else NEVER, known, checkpoint)

    def _find_window(
        self, state: SequenceBlocks, prompt: TokenArray, first_kept: Callable[[int], int], needed: int
    ) -> PrefixHit:
        """As `find`, where every layer has a window. A hit needs the blocks from `first_kept` on, and not those before,
        which were given up first and so are evicted first: they are the null block. A sequence that was promised
        blocks skips none, because it may go back into them."""
        found, imported_from, usable = list[int](), NEVER, 0
        size, first, since = self._size, state.length // self._size, state.gone
        _, hashes = self._hashes_behind(state, state.length, prompt)
        for place, hashed in enumerate(hashes, first):
            if place < needed:
                found.append(NULL_BLOCK)
                usable = len(found)
                continue
            there = self.block_of(hashed, state.caller)
            if there is None:
                if state.promised_tokens:
                    break
                since = place + 1
                found.append(NULL_BLOCK)
                continue
            block, own = there
            if own and imported_from == NEVER:
                imported_from = place * size
            found.append(block)
            if since <= max(needed, first_kept((place + 1) * size)):
                usable = len(found)
        end = (first + usable) * size
        skipped = needed if state.promised_tokens else max(needed, min(first_kept(end) - first, usable))
        blocks = [NULL_BLOCK] * skipped + found[skipped:usable]
        return PrefixHit(blocks, imported_from if imported_from < end else NEVER)

    def block_of(self, hashed: bytes, caller: bytes) -> tuple[int, bool] | None:
        """The block of a hash that a caller may find, and whether it is for this one alone."""
        key, block = _first_of(self._blocks.get, hashed, caller)
        return None if block is None else (block, key is not hashed)

    def in_tier(self, hashed: bytes, caller: bytes) -> bool:
        """Whether the tier has the block of a hash that a caller may find."""
        return self.tier is not None and (hashed in self.tier or (bool(caller) and hashed + caller in self.tier))

    def key_at(self, state: SequenceBlocks, length: int) -> bytes:
        """The key of what the first ``length`` tokens of a sequence that uses the cache leave: a whole number of
        blocks."""
        blocks = length // self._size
        key, done = (state.chain, state.chained) if state.chained <= blocks else (state.root or b"", 0)
        for hashed in chained(key, state.history.upto(length)[done * self._size :], self._size):
            key = hashed
        return key if length < state.imported_from else key + state.caller

    def reach(
        self, state: SequenceBlocks, start: int, prompt: TokenArray, there: Callable[[bytes], bool]
    ) -> tuple[int, bytes]:
        """How many blocks behind the first ``start`` tokens memory and tier have of ``prompt``, up to the last one
        behind which a checkpoint is ``there``, and its key; (0, b""): none is. For a sequence that uses the cache."""
        reach, found = 0, b""
        _, hashes = self._hashes_behind(state, start, prompt)
        for count, hashed in enumerate(hashes, 1):
            keys = (hashed, hashed + state.caller)
            key = next((each for each in keys if each in self._blocks), None)
            if key is None and self.tier is not None:
                key = next((each for each in keys if each in self.tier), None)
            if key is None:
                break
            if there(key):
                reach, found = count, key
        return reach, found

    def fetch(
        self, state: SequenceBlocks, start: int, prompt: TokenArray, max_blocks: int, reach: int | None = None
    ) -> list[tuple[int, bytes]]:
        """Publish blocks for what the tier has of ``prompt`` behind the first ``start`` tokens of the sequence and
        behind what is published: up to ``max_blocks``, as long as blocks are free, and of the first ``reach`` alone.
        Returns them with their content, which must be written to them. For a sequence that uses the cache."""
        pool = self._pool
        held, fetched = list[int](), list[tuple[int, bytes]]()
        parent, hashes = self._hashes_behind(state, start, prompt)
        for hashed in itertools.islice(hashes, reach):
            key, block = _first_of(self._blocks.get, hashed, state.caller)
            if block is not None:
                pool.reuse([block])
            else:
                content = None
                if self.tier is not None and len(fetched) < max_blocks:
                    key, content = _first_of(self.tier.read, hashed, state.caller)
                allocated = None if content is None else pool.allocate(1)
                if content is None or allocated is None:
                    break
                [block] = allocated
                self._publish(state, [(block, key, parent)])
                fetched.append((block, content))
            held.append(block)
            parent = hashed
        pool.release(held)
        return fetched

    def _hashes_behind(self, state: SequenceBlocks, start: int, prompt: TokenArray) -> tuple[bytes, Iterator[bytes]]:
        """The hashes of the full blocks of ``prompt`` behind the first ``start`` tokens of the sequence, from the block
        on in which those end. Before them, the hash of the block ahead of it (b"": there is none)."""
        assert state.root is not None  # noqa: S101 - it uses the cache
        first = start // self._size
        done, parent = (state.chained, state.chain) if state.chained <= first else (0, state.root)
        own = state.history.upto(start)[done * self._size :]
        hashes = chained(parent, np.concatenate([own, prompt]) if len(own) else prompt, self._size)
        for _ in range(first - done):
            parent = next(hashes)
        return parent if first else b"", hashes

    def publish(self, state: SequenceBlocks) -> None:
        """Publish the blocks that are full and not promised. For a sequence that has reached ``publish_at``. What was
        imported, or computed from that, is published for its caller, unless a computed block of the same tokens is
        there."""
        size = self._size
        blocks_for_all = state.imported_from // size
        blocks = state.unpromised // size
        added = []
        for hashed in chained(state.chain, state.history.upto(blocks * size)[state.chained * size :], size):
            block = state.table[state.chained]
            key = hashed if state.chained < blocks_for_all else hashed + state.caller
            there = block == NULL_BLOCK or block in self._keys or hashed in self._blocks
            if not there and (key is hashed or key not in self._blocks):
                added.append((block, key, state.chain if state.chained else b""))
            state.chain, state.chained = hashed, state.chained + 1
        if added:
            self._publish(state, added)
        state.shared = max(state.shared, state.chained)
        state.publish_at = (state.chained + 1) * size

    def _publish(self, state: SequenceBlocks, added: Sequence[tuple[int, bytes, bytes]]) -> None:
        """Publish blocks that have what the sequence would compute: (block, key, hash of the block before it)."""
        now, blocks = time.monotonic(), list[int]()
        for block, key, parent in added:
            self._blocks[key], self._keys[block], self._parents[block] = block, key, parent
            self._since[block] = now
            blocks.append(block)
        if state.adapter:
            self._adapters.update(dict.fromkeys(blocks, state.adapter))
        self._pool.keep(blocks)
        self.changed += 1
        if self._changes is not None:
            self._note(list(map(self._stored, blocks)))

    def went_back(self, state: SequenceBlocks, length: int) -> None:
        """The sequence had ``length`` tokens, or has them now: its chain is no longer. Without anything that was
        imported, what it computes from now on is for everybody. States are of all tokens before, and may go back: what
        is computed from them stays the caller's until the sequence is empty."""
        if length <= state.imported_from:
            of_states = self.has_checkpoint is not None and length and state.imported_from != NEVER
            state.imported_from = length if of_states else NEVER
        first = length // self._size
        if state.root is None or first >= state.chained:
            return
        state.chained, state.chain = 0, state.root
        for count in range(first, 0, -1):
            key = self._keys.get(state.table[count - 1])
            if key is not None:
                state.chained, state.chain = count, key[:HASH_BYTES]
                break
        state.publish_at = (state.chained + 1) * self._size

    # --- a block ----------------------------------------------------------------------------------------------------

    def withdraw(self, block: int) -> None:
        """Publish ``block`` no more: the one sequence that holds it will write there."""
        self._forget(block)
        self._pool.unkeep(block)

    def key_of(self, block: int) -> bytes | None:
        """The key of a published block."""
        return self._keys.get(block)

    def take_leaving(self) -> list[tuple[int, bytes]]:
        """The blocks of ``leaving``, whose content the caller saves before anything is written."""
        leaving, self.leaving = self.leaving, []
        return leaving

    def published(self) -> Int32Array:
        """All published blocks, in no order, int32 [n]."""
        return np.fromiter(self._keys, np.int32, len(self._keys))

    def blocks(self) -> list[tuple[int, bytes]]:
        """The published blocks with their keys."""
        return list(self._keys.items())

    def forget(self) -> None:
        """Unpublish all blocks: those that no sequence holds are empty then."""
        blocks = self.published().tolist()
        self.clear()
        for block in blocks:
            self._pool.unkeep(block)

    def clear(self) -> None:
        """Forget all blocks, before the pool is reset."""
        self._blocks.clear()
        self._keys.clear()
        self._parents.clear()
        self._adapters.clear()
        self.leaving.clear()
        self.changed += 1
        if self._changes is not None:
            self._note([BlockChange(b"", None), *self._parked()])

    # --- for others -------------------------------------------------------------------------------------------------

    def watch(self) -> list[BlockChange]:
        """What is published. From now on changes are kept, for `take_changes`."""
        self._changes = []
        return list(map(self._stored, self._keys)) + self._parked()

    def take_changes(self) -> list[BlockChange] | None:
        """The changes since the last call, in order. None: they are not known, call `watch` again."""
        changes = self._changes
        if changes is not None:
            self._changes = []
        return changes

    def note_tier(self, key: bytes, *, there: bool) -> None:
        """Note that a block entered or left the tier."""
        self.changed += 1
        if self._changes is not None and key not in self._blocks:
            self._note([_gone(key, parked=there)])

    def _stored(self, block: int) -> BlockChange:
        key, adapter = self._keys[block], self._adapters.get(block, "")
        return BlockChange(key[:HASH_BYTES], self._parents[block], adapter=adapter, caller=key[HASH_BYTES:])

    def _parked(self) -> list[BlockChange]:
        """What the tier alone has."""
        parked = [] if self.tier is None else [each for each in self.tier.hashes() if each not in self._blocks]
        return [_gone(key, parked=True) for key in parked]

    def _note(self, changes: list[BlockChange]) -> None:
        assert self._changes is not None  # noqa: S101 - there is a watcher
        self._changes += changes
        if len(self._changes) > MOST_CHANGES:
            self._changes = None

    def _evict(self, block: int) -> None:
        self.evicted += 1
        self.evicted_s += time.monotonic() - self._since[block]
        if self.tier is not None:
            self.leaving.append((block, self._keys[block]))
        self._forget(block)

    def _forget(self, block: int) -> None:
        key = self._keys.pop(block)
        del self._blocks[key], self._parents[block]
        self._adapters.pop(block, None)
        self.changed += 1
        if self._changes is not None:
            self._note([_gone(key, parked=self.tier is not None and key in self.tier)])


def _first_of(look: Callable[[bytes], Content | None], hashed: bytes, caller: bytes) -> tuple[bytes, Content | None]:
    """What is there for everybody under a hash, or else for the ``caller`` (its digest), and its key."""
    found = look(hashed)
    if found is None and caller:
        key = hashed + caller
        if (found := look(key)) is not None:
            return key, found
    return hashed, found


def _gone(key: bytes, *, parked: bool = False) -> BlockChange:
    """Note that the block of a key is no longer published."""
    return BlockChange(key[:HASH_BYTES], None, parked, caller=key[HASH_BYTES:])
