"""A sequence's blocks in order, kept so that one more token costs the same at length 100 and at length 100,000.

A Python list would have to be converted to an array at every step. This is the array: it grows by doubling, and the
step planner reads it in place. It must not know the pool or references.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ferrum_rpc.kv.pool import NULL_BLOCK, Int32Array

_SMALLEST = 8


class BlockTable:
    """A growable int32 array: entry ``i`` is the block of the positions ``i * block_size .. (i + 1) * block_size``."""

    __slots__ = ("_entries", "_size", "_whole")

    def __init__(self, blocks: Int32Array | None = None) -> None:
        self._entries = np.empty(_SMALLEST, dtype=np.int32)
        self._size = 0
        self._whole: Int32Array | None = None
        if blocks is not None:
            self.make_room(len(blocks))
            self._entries[: len(blocks)] = blocks
            self._size = len(blocks)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self._size:
            raise IndexError(f"entry {index} of a table of {self._size}")
        return self._entries.item(index)

    def __setitem__(self, index: int, block: int) -> None:
        if not 0 <= index < self._size:
            raise IndexError(f"entry {index} of a table of {self._size}")
        self._entries[index] = block

    def view(self, count: int) -> Int32Array:
        """The first ``count`` entries, int32 [count], not copied: it shows what is set later, until the table grows."""
        return self._entries[:count]

    @property
    def whole(self) -> Int32Array:
        """`view` of all entries, kept until their number changes: a decode reads it at every token."""
        if self._whole is None:
            self._whole = self._entries[: self._size]
        return self._whole

    def make_room(self, count: int) -> None:
        """Prepare storage for ``count`` entries, so that `extend` up to there cannot fail. Amortised O(1) an entry."""
        if count > len(self._entries):
            grown = np.empty(max(count, 2 * len(self._entries)), dtype=np.int32)
            grown[: self._size] = self._entries[: self._size]
            self._entries, self._whole = grown, None

    def extend(self, blocks: Sequence[int]) -> None:
        """Append ``blocks``."""
        size = self._size + len(blocks)
        self.make_room(size)
        self._entries[self._size : size] = blocks
        self._size, self._whole = size, None

    def clear(self, first: int, last: int) -> list[int]:
        """Set the entries ``first .. last`` to the null block, and return what they were."""
        cleared: list[int] = self._entries[first:last].tolist()
        self._entries[first:last] = NULL_BLOCK
        return cleared

    def cut(self, count: int) -> list[int]:
        """Drop the entries from ``count`` on and return them; none where there are no more than ``count``."""
        if count >= self._size:
            return []
        dropped: list[int] = self._entries[count : self._size].tolist()
        self._size, self._whole = count, None
        return dropped


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that ``tokens`` tokens fill, the last one perhaps in part."""
    return -(-tokens // block_size)


def held_blocks(blocks: Sequence[int]) -> list[int]:
    """The ``blocks`` of a table without those that are gone."""
    return [block for block in blocks if block != NULL_BLOCK]


def slots_for(
    table: Int32Array, start: int, end: int, block_size: int, skip: Sequence[int] = ()
) -> npt.NDArray[np.int64]:
    """The slots (``block * block_size + offset``) of the positions ``start .. end``, int64 [n].

    ``table`` covers at least ``end`` positions; those in its entries ``skip`` are left out. O(end - start), however
    long the table is.
    """
    positions = np.arange(start, end, dtype=np.int64)
    if skip:
        positions = positions[~np.isin(positions // block_size, skip)]
    return table[positions // block_size] * np.int64(block_size) + positions % block_size
