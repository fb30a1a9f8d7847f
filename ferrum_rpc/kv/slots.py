"""Slots for recurrent states as integers: who has which, and checkpoints, the states of a sequence at a length.

A sequence of a model with recurrent layers holds one slot while it lives. A checkpoint may be dropped at any
time: the pool drops the one used longest ago when a slot is needed. So free slots are to checkpoints what free blocks
are to the prefix cache.

This file must not know tokens, blocks or tensors. It belongs to the model thread; `free` may be read from elsewhere.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container

from ferrum_rpc.errors import KvBlocksExhausted
from ferrum_rpc.kv.pool import CacheCorrupt


class SlotPool:
    """The slots ``0 .. total - 1``. Keys of checkpoints are the caller's. ``on_drop``: called with the key and the slot
    of a checkpoint before its slot is given to another; ``dropped`` of them were."""

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ValueError(f"there must be at least one slot, not {total}")
        self.total = total
        self._free = list(reversed(range(total)))
        self._checkpoints: OrderedDict[bytes, int] = OrderedDict()
        self._pinned: dict[bytes, int] = {}
        self.on_drop: Callable[[bytes, int], object] | None = None
        self.dropped = 0

    @property
    def free(self) -> int:
        """Slots that `take` could return."""
        return len(self._free) + len(self._checkpoints) - len(self._pinned)

    @property
    def checkpoints(self) -> int:
        """How many there are."""
        return len(self._checkpoints)

    def take(self, but: Container[bytes] = ()) -> int:
        """A slot without content, and not one of the checkpoints ``but``. Raises `KvBlocksExhausted` (``needed_slots``,
        ``free_slots``) if all are held."""
        if not self._free:
            key = next((each for each in self._checkpoints if each not in self._pinned and each not in but), None)
            if key is None:
                metadata = {"needed_slots": 1, "free_slots": 0}
                raise KvBlocksExhausted(f"all {self.total} slots for recurrent states are held", metadata=metadata)
            return self._drop_for_another(key)
        return self._free.pop()

    def require(self, slots: int) -> None:
        """Raise `KvBlocksExhausted` unless `take` could return so many. No checkpoint is dropped."""
        if slots > self.free:
            metadata = {"needed_slots": slots, "free_slots": self.free}
            raise KvBlocksExhausted(f"{self.free} slots for recurrent states are free, of {slots}", metadata=metadata)

    def give(self, slot: int) -> None:
        """A slot is not needed any more."""
        self._free.append(slot)

    def keep(self, key: bytes, slot: int) -> None:
        """A slot becomes the checkpoint ``key``, unless there is one."""
        if key in self._checkpoints:  # it is of the same tokens, and may be read by a step
            self._checkpoints.move_to_end(key)
            self.give(slot)
        else:
            self._checkpoints[key] = slot

    def __contains__(self, key: bytes) -> bool:
        return key in self._checkpoints

    def find(self, key: bytes) -> int:
        """The slot of a checkpoint that is there, and is used now."""
        self._checkpoints.move_to_end(key)
        return self._checkpoints[key]

    def items(self) -> list[tuple[bytes, int]]:
        """All checkpoints with their slots, those used last at the end."""
        return list(self._checkpoints.items())

    def remove(self, key: bytes) -> int:
        """The slot of a checkpoint that is there, which is one no more: it is the caller's."""
        return self._checkpoints.pop(key)

    def take_over(self, key: bytes) -> int | None:
        """As `remove`, for another content; None: a step reads the checkpoint."""
        if key in self._pinned:
            return None
        return self._drop_for_another(key)

    def pin(self, key: bytes) -> None:
        """Do not drop a checkpoint until `unpin` was called as often."""
        self._pinned[key] = self._pinned.get(key, 0) + 1

    def unpin(self, key: bytes) -> None:
        """See `pin`."""
        self._pinned[key] -= 1
        if not self._pinned[key]:
            del self._pinned[key]

    def drop(self, key: bytes) -> None:
        """Drop a checkpoint if it is there and no step reads it."""
        if key not in self._pinned and (slot := self._checkpoints.pop(key, None)) is not None:
            self.give(slot)

    def clear(self) -> None:
        """Drop all checkpoints that no step reads."""
        for key in list(self._checkpoints):
            self.drop(key)

    def _drop_for_another(self, key: bytes) -> int:
        if self.on_drop is not None:
            self.on_drop(key, self._checkpoints[key])
        self.dropped += 1
        return self._checkpoints.pop(key)

    def check(self, held: list[int]) -> None:
        """Raise `CacheCorrupt` unless every slot is free, ``held``, or a checkpoint, and one of them only."""
        every = sorted([*self._free, *held, *self._checkpoints.values()])
        if every != list(range(self.total)):
            raise CacheCorrupt(f"{self.total} slots, and these are accounted for: {every}")
        if self._pinned:
            raise CacheCorrupt(f"{len(self._pinned)} checkpoints are pinned, and no step is under way")
