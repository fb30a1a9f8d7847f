"""Opening and undoing reservations: the blocks that a write takes, all or none, and their way back.

`KvManager` says which sequence is written where, and commits; this file must not know ids, nor what a prompt is found
by. It is called for reservations that need a block, so seldom while a sequence decodes.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ferrum_rpc.errors import KvBlocksExhausted
from ferrum_rpc.kv.capacity import Capacity
from ferrum_rpc.kv.pool import BlockPool
from ferrum_rpc.kv.prefix import PrefixCache, PrefixHit
from ferrum_rpc.kv.sequence import KvMisuse, Reservation, SequenceBlocks
from ferrum_rpc.kv.table import blocks_for, held_blocks, slots_for

NO_SLOTS: Final = np.zeros(0, dtype=np.int64)
"""What a reservation that only appends overwrites."""


class Reservations:
    """Reservations of blocks of ``pool``, of ``block_size`` tokens each, or of the spares that ``capacity`` keeps for a
    sequence. Where there are none, blocks of ``prefixes`` are written that only one sequence holds."""

    def __init__(self, pool: BlockPool, capacity: Capacity, prefixes: PrefixCache, block_size: int) -> None:
        self._pool, self._capacity, self._prefixes, self._size = pool, capacity, prefixes, block_size

    def open(  # noqa: PLR0917 - once a span: keywords cost time
        self,
        sequence: int,
        state: SequenceBlocks,
        start: int,
        end: int,
        cached: PrefixHit,
        create: bool,
        ahead: int,
        hold: int,
        keep: bool,
    ) -> Reservation:
        """Take the blocks of a reservation that needs any, all or none, and put them into the table."""
        size, table, pool = self._size, state.table, self._pool
        found = cached.blocks  # the null block for those that are not needed
        displaced: list[tuple[int, int]] = []
        idle = pool.free_blocks
        place = start // size
        if found and place < len(table) and table[place] == found[0]:  # it went back into a block of its own, and stays
            place, found = place + 1, found[1:]
        if found:  # the first of them perhaps in place of a block that is full in part
            displaced = [(place, block) for block in table.cut(place)]
            table.extend(found)
        first, before, after = place + len(found), len(table), blocks_for(end, size)
        pool.reuse(found := held_blocks(found))
        idle -= pool.free_blocks  # the found ones that had no other reference
        touched = [(index, table[index]) for index in range(first, min(before, after))]
        published = [each for each in touched if pool.has_one_holder(each[1])]
        replaced = [each for each in touched if not pool.is_writable(each[1]) and each not in published]
        table.make_room(after)
        needed = len(replaced) + max(0, after - before)
        promised = blocks_for(state.promised_end, size)  # what is written beyond must not use up what was promised
        within = sum(index < promised for index, _ in replaced) + max(0, min(after, promised) - before)
        spared = min(within, len(state.spares))
        extra = blocks_for(end + max(ahead, hold), size) - after if create else 0
        if hold and not create:
            extra = self._capacity.lacking_to_hold(state, start, after, end + hold, len(state.spares) - spared)
        available = pool.free_blocks - (needed - spared + extra)
        kept = min(len(published), available) if keep and available > 0 else 0
        replaced = sorted(replaced + published[:kept])
        needed += kept
        overwritten = NO_SLOTS
        if start < state.length:
            skip = [index for index, _ in replaced]
            overwritten = slots_for(table.view(before), start, min(end, state.length), size, skip)
        try:
            allocated = self._capacity.allocate(needed - spared + extra)
        except KvBlocksExhausted:
            if first > place:
                table.cut(place)
                table.extend([block for _, block in displaced])
                pool.release(found)
                # raises, with the numbers before anything was found
                self._capacity.allocate(needed - spared + extra + idle)
            raise
        # From here on nothing fails.
        for _, block in published[kept:]:
            self._prefixes.withdraw(block)
        unspared = len(state.spares) - spared
        fresh = state.spares[unspared:] + allocated[: needed - spared]
        state.spares[unspared:] = allocated[needed - spared :]
        for (index, _), block in zip(replaced, fresh, strict=False):
            table[index] = block
        table.extend(fresh[len(replaced) :])
        # A block that is rewritten from its first slot on needs nothing of the old one.
        partial = start % size and replaced and replaced[0][0] == first
        copies = ((replaced[0][1], fresh[0]),) if partial else ()
        return Reservation(
            sequence,
            start,
            end,
            table.view(after),
            overwritten,
            copies,
            create,
            displaced + replaced,
            fresh,
            spared,
            extra if hold else None,
            found,
            max(0, first * size - start),
            kept=kept,
        )

    def undo(self, state: SequenceBlocks, reservation: Reservation) -> None:
        """Give the blocks of a reservation back, and put those that it replaced into the table again."""
        if reservation.imported_before is not None:
            state.imported_from = reservation.imported_before
        if reservation.held is not None:
            self._capacity.undo_hold(state, reservation.held)
        for index, block in reservation.replaced:
            state.table[index] = block
        state.table.cut(blocks_for(state.length, self._size))
        state.shared = min(state.shared, len(state.table))
        state.spares += reservation.fresh[: reservation.spares_used]
        self._pool.release([*reservation.found, *reservation.fresh[reservation.spares_used :]])

    def open_next(self, sequence: int, state: SequenceBlocks) -> Reservation:
        """Reserve one token behind the open reservation, which appends. Raises `KvBlocksExhausted` if no block was
        promised for it."""
        before, table = state.open, state.table
        if before is None or state.next is not None or before.start < state.length:
            raise KvMisuse(f"no open reservation of sequence {sequence} appends, or a token behind it is reserved")
        start = before.end
        after, fresh = blocks_for(start + 1, self._size), list[int]()
        if after > len(table):
            if not state.spares or state.promised_end <= start:
                free = self._pool.free_blocks
                raise KvBlocksExhausted(
                    f"no block was promised for the token at {start}",
                    metadata={"needed_blocks": 1, "free_blocks": free},
                )
            fresh.append(state.spares.pop())
            table.extend(fresh)
        whole = table.whole[:after]
        state.next = Reservation(sequence, start, start + 1, whole, NO_SLOTS, fresh=fresh, spares_used=len(fresh))
        return state.next

    @staticmethod
    def undo_next(state: SequenceBlocks, reservation: Reservation) -> None:
        """Undo the reservation of one token behind the open one."""
        if state.next is not reservation:
            raise KvMisuse(f"the token behind this reservation of sequence {reservation.sequence} is reserved")
        state.next = None
        if reservation.fresh:
            state.table.cut(len(state.table) - 1)
            state.spares += reservation.fresh
