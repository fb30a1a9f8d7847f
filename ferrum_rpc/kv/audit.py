"""Does the accounting add up? The invariants of the KV floor, recounted from the holders' side.

Kept apart from the manager so that it shares no shortcut with the code it checks: it reads tables, spares and open
reservations, counts again, and names the first fault that it finds. Costs O(blocks); changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ferrum_rpc.kv.pool import NULL_BLOCK, BlockPool, CacheCorrupt
from ferrum_rpc.kv.prefix import PrefixCache
from ferrum_rpc.kv.sequence import Reservation, SequenceBlocks
from ferrum_rpc.kv.table import blocks_for
from ferrum_rpc.prefix_hash import HASH_BYTES, chained


def check(pool: BlockPool, sequences: Mapping[int, SequenceBlocks], prefixes: PrefixCache, block_size: int) -> None:
    """Raise `CacheCorrupt` unless

    - every block is held as often as its reference count says, and free and held blocks partition the usable ones;
    - no sequence holds a block twice, and none the null block, but in place of blocks behind its window;
    - every table fits its sequence's length, or the open reservation on it;
    - spares, and all blocks that an open reservation writes, have one holder;
    - an idle sequence has the spares that it was promised;
    - the pool keeps what is published, and the hash of every published block of a sequence is that of its tokens;
    - what is published for one caller is in sequences of that caller only, where their content was imported.
    """
    holders = np.zeros(pool.num_blocks, dtype=np.int32)
    for sequence, state in sequences.items():
        _check_size(sequence, state, block_size)
        gone = state.gone if state.open is None else max(state.gone, _first_written(state.open, block_size))
        table = state.table.view(len(state.table)).tolist()
        held = [block for block in table[:gone] if block != NULL_BLOCK] + table[gone:] + state.spares
        if any(table[: state.gone]):
            raise CacheCorrupt(f"sequence {sequence} holds blocks behind its window: {table[: state.gone]}")
        if state.open is not None:
            held += [block for _, block in state.open.replaced]
        if len(set(held)) != len(held):
            raise CacheCorrupt(f"sequence {sequence} holds a block twice: {held}")
        if not all(NULL_BLOCK < block < pool.num_blocks for block in held):
            raise CacheCorrupt(f"sequence {sequence} holds an invalid block: {held}")
        holders[held] += 1
    pool.check(holders, prefixes.published().tolist())
    for sequence, state in sequences.items():
        _check_private(sequence, state, pool, block_size)
        _check_published(sequence, state, prefixes, block_size)


def _first_written(reservation: Reservation, block_size: int) -> int:
    return (reservation.start + reservation.cached) // block_size


def _check_size(sequence: int, state: SequenceBlocks, block_size: int) -> None:
    blocks = blocks_for(state.length, block_size)
    if state.open is not None:
        blocks = max(blocks, blocks_for((state.next or state.open).end, block_size))
    if len(state.table) != blocks:
        raise CacheCorrupt(f"sequence {sequence} of {state.length} tokens has {len(state.table)} blocks, not {blocks}")


def _check_private(sequence: int, state: SequenceBlocks, pool: BlockPool, block_size: int) -> None:
    private = list(state.spares)
    if state.open is not None:
        private += state.open.table[_first_written(state.open, block_size) :].tolist()
    if state.next is not None:
        private += state.next.table[state.next.start // block_size :].tolist()
    for block in private:
        if not pool.is_writable(block):
            raise CacheCorrupt(f"sequence {sequence} is to write block {block}, which is shared")
    if state.open is None and state.promised_tokens:
        table = state.table.view(len(state.table)).tolist()
        places = range(state.promised_from // block_size, blocks_for(state.promised_end, block_size))
        wanted = sum(place >= len(table) or not pool.is_writable(table[place]) for place in places)
        if len(state.spares) < wanted:
            raise CacheCorrupt(f"sequence {sequence} was promised {wanted} spare blocks and has {len(state.spares)}")


def _check_published(sequence: int, state: SequenceBlocks, prefixes: PrefixCache, block_size: int) -> None:
    table = state.table.view(len(state.table)).tolist()
    if state.root is None:
        if any(prefixes.key_of(block) is not None for block in table):
            raise CacheCorrupt(f"sequence {sequence} does not use the prefix cache and has a published block")
        return
    hashes = list(chained(state.root, state.history.upto(state.length), block_size))
    for place, hashed in enumerate(hashes):
        key = prefixes.key_of(table[place]) or hashed
        if key[:HASH_BYTES] != hashed:
            raise CacheCorrupt(f"block {table[place]} of sequence {sequence} is published under another hash")
        if (caller := key[HASH_BYTES:]) and (caller != state.caller or place < state.imported_from // block_size):
            raise CacheCorrupt(f"block {table[place]} of sequence {sequence} has what another caller may have imported")
    if state.chained > len(hashes) or state.chain != [state.root, *hashes][state.chained]:
        raise CacheCorrupt(f"the chain of sequence {sequence} is not that of its first {state.chained} blocks")
