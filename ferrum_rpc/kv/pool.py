"""Physical blocks as integers: which are free, and how many holders each of the others has.

A block may be kept for its content: the pool then holds a reference itself, so that it is not written. If no other
block is free, the pool evicts kept blocks without other references, the one released longest ago first.

This is the lowest file of the KV floor. It exists so that allocation is one obvious thing that can be proved right on
its own: all or nothing, O(1) a block, deterministic. It must not know sequences, tokens, block sizes or tensors.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

NULL_BLOCK = 0
"""The null block: padding points at it, and it is never allocated."""

Int32Array = npt.NDArray[np.int32]
"""Block ids, int32 [n]."""


class CacheCorrupt(RuntimeError):
    """The accounting does not add up: a defect of this program, never of a request. The message names what is wrong."""


class BlockPool:
    """Reference counts over the blocks ``1 .. num_blocks - 1``.

    ``num_blocks`` is what the store allocates, the null block included; ``total_blocks`` is what can be used, one less.

    The free list is a stack (last in, first out): a freed block is the next one handed out, so a small working set
    stays in the caches of the machine, pages of the store that were never needed are never touched, and allocating and
    releasing leaves no trace, which makes rollback easy to check. A fresh pool hands out blocks in ``order`` (a
    permutation of the usable ones; rising by default), so that a test can permute physical blocks.

    Raises ValueError where ``num_blocks`` leaves no usable block or ``order`` is not a permutation.
    """

    on_evict: Callable[[int], object]
    """Called with each kept block that is given away."""

    def __init__(self, num_blocks: int, order: Sequence[int] | None = None) -> None:
        if num_blocks < 2:
            raise ValueError(f"a pool needs the null block and at least one more, not {num_blocks} in total")
        usable = range(1, num_blocks)
        self._order = list(usable if order is None else order)
        if sorted(self._order) != list(usable):
            raise ValueError(f"order must hold each of the blocks 1 to {num_blocks - 1} once")
        self.num_blocks = num_blocks
        self.total_blocks = len(usable)
        self.reset()

    def reset(self) -> None:
        """Every block is free again, and they are handed out in the first order."""
        self._references = np.zeros(self.num_blocks, dtype=np.int32)
        self._free = self._order[::-1]
        self._kept = np.zeros(self.num_blocks, dtype=np.bool_)
        self._idle: OrderedDict[int, None] = OrderedDict()  # kept and without other references, the oldest first

    @property
    def free_blocks(self) -> int:
        """Blocks without other references, including those kept for their content."""
        return len(self._free) + len(self._idle)

    @property
    def idle_blocks(self) -> int:
        """Blocks that are only kept for their content."""
        return len(self._idle)

    def allocate(self, count: int) -> list[int] | None:
        """``count`` free blocks with one reference each, or None (and no change) where there are fewer."""
        if count < 0:
            raise ValueError(f"{count} blocks")
        if count > len(self._free) + len(self._idle):
            return None
        if not count:
            return []
        blocks = self._free[: -count - 1 : -1]
        del self._free[-count:]
        while len(blocks) < count:
            block, _ = self._idle.popitem(last=False)
            self._kept[block] = False
            self.on_evict(block)
            blocks.append(block)
        self._references[blocks] = 1
        return blocks

    def acquire(self, blocks: Int32Array) -> None:
        """One more reference to each of ``blocks``, which are held already and differ from one another."""
        if (self._references[blocks] < 1).any():
            raise CacheCorrupt(f"a free block was to be shared: one of {blocks.tolist()}")
        self._references[blocks] += 1

    def release(self, blocks: Sequence[int] | Int32Array) -> None:
        """One reference less to each of ``blocks``, which differ from one another; those without any are free.

        Of the freed blocks the first is handed out first: `allocate` then `release` leaves no trace.
        """
        if not len(blocks):
            return
        gone = np.asarray(blocks, dtype=np.int32)
        left = self._references[gone] - 1
        if left.min() < 0:
            raise CacheCorrupt(f"a free block was released: one of {gone.tolist()}")
        self._references[gone] = left
        self._free.extend(gone[left == 0][::-1].tolist())
        for block in gone[self._kept[gone] & (left == 1)][::-1].tolist():  # the last of a sequence goes first
            self._idle[block] = None

    # --- blocks that are kept for their content ---------------------------------------------------------------------

    def keep(self, blocks: Sequence[int]) -> None:
        """Keep ``blocks``, which are held and were not kept, for their content."""
        if (self._references[blocks] < 1).any() or self._kept[blocks].any():
            raise CacheCorrupt(f"a block was to be kept that is free, or kept already: one of {[*blocks]}")
        self._kept[blocks] = True
        self._references[blocks] += 1

    def unkeep(self, block: int) -> None:
        """Keep ``block`` no more: its content is about to change, or is to be forgotten."""
        if not self._kept[block]:
            raise CacheCorrupt(f"block {block} was to be kept no more, and is not kept")
        self._kept[block] = False
        self._idle.pop(block, None)
        self.release([block])

    def reuse(self, blocks: Sequence[int]) -> None:
        """One more reference to each of ``blocks``, which are kept and differ from one another."""
        if not blocks:
            return
        if not self._kept[blocks].all():
            raise CacheCorrupt(f"a block was to be used again that is not kept: one of {[*blocks]}")
        for block in blocks:
            self._idle.pop(block, None)
        self._references[blocks] += 1

    def has_one_holder(self, block: int) -> bool:
        """Whether one sequence holds ``block``, and the pool keeps it."""
        return bool(self._kept[block]) and self._references.item(block) == 2

    # --- looking ----------------------------------------------------------------------------------------------------

    def is_writable(self, block: int) -> bool:
        """Whether the holder of ``block`` may write into it: it is the only one, and the content is not kept."""
        return self._references.item(block) == 1

    def count_shared(self, blocks: Int32Array) -> int:
        """How many of ``blocks`` have more than one holder, or are kept."""
        return int((self._references[blocks] > 1).sum())

    def check(self, holders: Int32Array, kept: Sequence[int] = ()) -> None:
        """Raise `CacheCorrupt` unless free, idle and held blocks partition the usable ones, references match
        ``holders``, and ``kept`` are those that are kept.

        ``holders``: int32 [num_blocks], how often each block is held, counted from the holders' side.
        """
        if sorted(kept) != np.flatnonzero(self._kept).tolist():
            raise CacheCorrupt(f"{len(kept)} blocks are published and {int(self._kept.sum())} are kept, or others are")
        idle = np.flatnonzero(self._kept & (holders == 0)).tolist()
        if sorted(self._idle) != idle:
            raise CacheCorrupt(f"the blocks {idle} are only kept, and {sorted(self._idle)} can be given away")
        holders = holders + self._kept
        listed = np.bincount(self._free, minlength=self.num_blocks) if self._free else np.zeros(self.num_blocks, int)
        if listed[NULL_BLOCK] or self._references[NULL_BLOCK] or holders[NULL_BLOCK]:
            raise CacheCorrupt("the null block is in use")
        for block in np.flatnonzero(self._references != holders)[:1].tolist():
            counted, held = self._references.item(block), holders.item(block)
            raise CacheCorrupt(f"block {block} has {counted} references and {held} holders")
        for block in (np.flatnonzero(listed[1:] != (self._references[1:] == 0)) + 1)[:1].tolist():
            held, free = self._references.item(block), listed.item(block)
            raise CacheCorrupt(f"block {block} has {held} references and is {free} times in the free list")
