"""Checkpoints of states as files of the second tier: written when their slots are needed, and read a piece at a time.

A checkpoint has the size of a state, and steps wait for each operation. So one that comes back is read and written to
its slot by several operations, between which the steps of others run. Meanwhile no request finds it, and its slot
counts as free: it is a checkpoint under a key of its own, which is dropped if another needs the slot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Final, NamedTuple

from ferrum_rpc.core import StateLengths, StateRows
from ferrum_rpc.engine.states import States
from ferrum_rpc.errors import KvBlocksExhausted
from ferrum_rpc.kv.tiers import KEY_BYTES, STATES, BlockFiles, FileReader

PIECE_BYTES: Final = 2 << 20
"""What one operation reads of a checkpoint, about: a step waits for it."""

ARRIVING: Final = b"a"
"""What the key of a checkpoint begins with until all of it has come."""


class _Arriving(NamedTuple):
    """A checkpoint that comes: its key and its file, its lengths, and the pieces that are still to be read."""

    key: bytes
    file: FileReader
    lengths: StateLengths
    pieces: Iterator[StateRows]


class CheckpointFiles:
    """The checkpoints of ``states`` in ``tier``. Keys are those of `KvManager.checkpoint_key`."""

    def __init__(self, states: States, tier: BlockFiles) -> None:
        self._states, self._tier = states, tier
        self._arriving: _Arriving | None = None
        states.pool.on_drop = self._save

    def __contains__(self, key: bytes) -> bool:
        """Whether there is a file of it."""
        return STATES + key in self._tier

    def _save(self, key: bytes, slot: int) -> None:
        """Save a checkpoint whose slot is needed, unless only one sequence could find it."""
        if len(key) in KEY_BYTES:
            self._tier.write_states(STATES + key, partial(self._states.content_of, slot))

    def kept(self) -> list[tuple[bytes, Callable[[], bytes | None]]]:
        """All checkpoints that others may find, with what reads them, those used last first."""
        kept = [each for each in reversed(self._states.pool.items()) if len(each[0]) in KEY_BYTES]
        return [(STATES + key, partial(self._states.content_of, slot)) for key, slot in kept]

    def read(self, key: bytes) -> bool:
        """Read the next piece of a checkpoint that is not in memory; what came of another one is given up. True: go on;
        if its file cannot be used, it is no longer one of the tier. False: it is in memory now, or there is no slot for
        it."""
        if self._arriving is not None and self._arriving.key != key:
            self.close()
        try:
            if self._arriving is None:
                self._arriving = self._begin(key)
            if self._arriving is None:
                return key not in self
            return self._read(self._arriving)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give up what has not come as a whole."""
        arriving, self._arriving = self._arriving, None
        if arriving is not None:
            arriving.file.close()
            self._states.pool.drop(ARRIVING + arriving.key)

    def _begin(self, key: bytes) -> _Arriving | None:
        """Open its file, and have a slot for it. None: it cannot be used, or there is no slot."""
        file, images, pool = self._tier.reader(STATES + key), self._states.images, self._states.pool
        if file is None:
            return None
        size, lengths = file.left, images.lengths_of(file.read(images.numbers_bytes))
        if lengths is None or size != images.file_bytes(lengths):
            file.lose("it is of another shape")
            return None
        try:
            pool.keep(ARRIVING + key, pool.take())
        except BaseException as error:
            file.close()
            if isinstance(error, KvBlocksExhausted):
                return None
            raise
        return _Arriving(key, file, lengths, images.pieces(lengths, PIECE_BYTES))

    def _read(self, arriving: _Arriving) -> bool:
        key, file, lengths, pieces = arriving
        images, pool = self._states.images, self._states.pool
        if ARRIVING + key not in pool:  # another needed its slot
            self.close()
            return False
        rows = next(pieces)
        size = rows.rows * images.row_bytes[rows.tensor]
        content = file.read(size)
        if len(content) == size:
            images.write(self._states.store.slots[pool.find(ARRIVING + key)], lengths, rows, content)
            if file.left:
                return True
        right = file.end()
        if right:
            pool.keep(key, pool.remove(ARRIVING + key))
        self.close()
        return not right
