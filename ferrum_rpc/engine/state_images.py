"""Rows of slots as bytes, and back: states leave this process or come from elsewhere, a piece between two steps.

`SlotImages` is how `engine.states` does that. With several ranks, `engine.ranks.images` takes its place.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ferrum_rpc.attention.recurrent import RecurrentSlot
from ferrum_rpc.core import STATE_TENSORS, StateLengths, StateRows, StateTensors

Content = npt.NDArray[np.uint8]
"""[bytes]"""


class Snapshot(Protocol):
    """What a slot had, for a reader that takes it later, in pieces."""

    lengths: StateLengths

    def read(self, rows: StateRows) -> Content:
        """A copy of those rows."""

    def close(self) -> None:
        """It is not read any more."""


class SlotSnapshot(Snapshot):
    """What ``slot`` has now, for a reader that takes it later, in pieces. It shares the slot's tensors, and copies them
    when they are about to change. So it takes no slot, and no copy of a slot that stays as it is."""

    def __init__(self, slot: RecurrentSlot) -> None:
        self.lengths = StateLengths(slot.length, slot.floor, tuple(slot.folded))
        self._slot, self._rows, self._journal = slot, slot.rows, slot.kept()
        self._tensors = {"states": slot.states, "channels": slot.channels, "gates": slot.gates}
        slot.before_change.append(self._copy)

    def read(self, rows: StateRows) -> Content:
        first, last = rows.first, rows.first + rows.rows
        if rows.tensor == "lengths":
            length, floor, folded = self.lengths
            return np.array([length, floor, *folded][first:last], "<u4").view(np.uint8)
        tensor = self._tensors[rows.tensor]
        there = tensor.flatten(0, 1)
        where = slice(first, last) if rows.tensor == "states" else _places(self._journal, tensor, first, last)
        return _bytes(there)[where].flatten() if there.is_cpu else _bytes(there[where]).flatten()

    def close(self) -> None:
        if self._copy in self._slot.before_change:
            self._slot.before_change.remove(self._copy)

    def _copy(self) -> None:
        states, *journal = self._tensors.values()
        copies = states.clone(), *(each[:, : self._rows].clone() for each in journal)
        self._tensors = dict(zip(self._tensors, copies, strict=True))


def write_rows(slot: RecurrentSlot, lengths: StateLengths, rows: StateRows, data: Content | bytes) -> None:
    """Make ``slot`` one of these ``lengths``, with those rows of a tensor. Before the first token all is zeros,
    whatever comes: a sequence that goes back to nothing must have nothing of what was imported. Raises ValueError, and
    writes nothing, if they do not fit the slot."""
    if len(lengths.folded) != len(slot.folded):
        raise ValueError(f"the states are of {len(lengths.folded)} layers, not {len(slot.folded)}")
    slot.become(*lengths)
    tensor: Tensor = {"states": slot.states, "channels": slot.channels, "gates": slot.gates}[rows.tensor]
    journal, heads, wanted = slot.kept(), slot.shape.value_heads, range(rows.first, rows.first + rows.rows)
    into = tensor.flatten(0, 1)
    where: slice | list[int]
    if rows.tensor == "states":
        where, empty = slice(wanted.start, wanted.stop), [not lengths.folded[each // heads] for each in wanted]
    else:
        where = _places(journal, tensor, wanted.start, wanted.stop)
        empty = [each % len(journal) < len(journal) - lengths.length for each in wanted]
    content = np.frombuffer(data, np.uint8).reshape(rows.rows, *tensor.shape[2:-1], -1)
    if any(empty):
        content = content.copy()
        content[empty] = 0
    if content.shape[-1] != tensor.shape[-1] * tensor.itemsize:
        raise ValueError(f"{rows.rows} rows of {rows.tensor} have not {content.nbytes} bytes")
    if into.is_cpu:
        _bytes(into)[where] = content
    else:
        into[where] = _tensor_of(content, into)


def numbers_bytes(layers: int) -> int:
    """Of the lengths, with which a file of `SlotImages` begins."""
    return 4 * (2 + layers)


class SlotImages:
    """Images of slots whose states have these ``tensors``."""

    def __init__(self, tensors: StateTensors) -> None:
        self.tensors = tensors
        own, wide = (getattr(torch, each).itemsize for each in (tensors.dtype, tensors.wide_dtype))
        shape = tensors.shape
        self.row_bytes: dict[str, int] = {
            "states": shape.key_dim * shape.value_dim * wide,
            "channels": shape.channels * own,
            "gates": 2 * shape.value_heads * wide,
        }
        """Bytes of a row of `StateRows`."""
        self.numbers_bytes = numbers_bytes(tensors.layers)

    def snapshot(self, slot: RecurrentSlot) -> Snapshot | None:
        """What ``slot`` has now. None: no image can have it."""
        return SlotSnapshot(slot)

    def write(self, slot: RecurrentSlot, lengths: StateLengths, rows: StateRows, data: Content | bytes) -> None:
        """See `write_rows`."""
        write_rows(slot, lengths, rows, data)

    def to_file(self, slot: RecurrentSlot) -> bytes | None:
        """An image as one piece of bytes: the lengths, and the tensors one behind the other. None: see `snapshot`."""
        snapshot = self.snapshot(slot)
        if snapshot is None:
            return None
        try:
            numbers = StateRows("", STATE_TENSORS[0], 0, self.tensors.row_count(STATE_TENSORS[0], snapshot.lengths))
            every = [numbers, *self.pieces(snapshot.lengths, sys.maxsize)]
            return b"".join([snapshot.read(each).data for each in every])
        finally:
            snapshot.close()

    def lengths_of(self, numbers: bytes) -> StateLengths | None:
        """Those with which a file begins, of which these are the first `numbers_bytes`. None: there are too few, or no
        image can have them."""
        if len(numbers) != self.numbers_bytes:
            return None
        length, floor, *folded = np.frombuffer(numbers, "<u4").tolist()
        return StateLengths(length, floor, tuple(folded)) if max(folded) <= floor <= length else None

    def file_bytes(self, lengths: StateLengths) -> int:
        """Of `to_file`."""
        rows = self.pieces(lengths, sys.maxsize)
        return self.numbers_bytes + sum([each.rows * self.row_bytes[each.tensor] for each in rows])

    def pieces(self, lengths: StateLengths, most: int) -> Iterator[StateRows]:
        """All rows of tensors of an image in their order in a file, at most ``most`` bytes at a time, or one row."""
        for name in STATE_TENSORS[1:]:
            rows, step = self.tensors.row_count(name, lengths), max(1, most // self.row_bytes[name])
            for first in range(0, rows, step):
                yield StateRows("", name, first, min(step, rows - first))


def _places(journal: Sequence[int], tensor: Tensor, first: int, last: int) -> list[int]:
    """Where rows of a tensor of the journal are, all layers one behind the other. ``journal``: the rows of a layer."""
    count, there = len(journal), tensor.shape[1]
    return [each // count * there + journal[each % count] for each in range(first, last)]


def _bytes(tensor: Tensor) -> Content:
    """The bytes of a tensor, uint8 [..., bytes of its last axis]: the memory itself where it is the host's. What is
    copied of that, numpy copies in this thread. torch has all threads do a part, which takes long if others have the
    cores."""
    content: Content = tensor.view(torch.uint8).cpu().numpy()
    return content


def _tensor_of(content: Content, like: Tensor) -> Tensor:
    if not content.flags.writeable:  # torch wants memory that it may write
        content = content.copy()
    return torch.from_numpy(content).view(like.dtype).to(like.device)
