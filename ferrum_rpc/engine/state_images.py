"""Rows of slots as bytes, and back: states leave this process or come from elsewhere, a piece between two steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ferrum_rpc.attention.recurrent import RecurrentSlot
from ferrum_rpc.core import STATE_TENSORS, StateLengths, StateRows

Content = npt.NDArray[np.uint8]
"""[bytes]"""


class SlotSnapshot:
    """What ``slot`` has now, for a reader that takes it later, in pieces. It shares the slot's tensors, and copies them
    when they are about to change. So it takes no slot, and no copy of a slot that stays as it is."""

    def __init__(self, slot: RecurrentSlot) -> None:
        self.lengths = StateLengths(slot.length, slot.floor, tuple(slot.folded))
        self._slot, self._rows, self._journal = slot, slot.rows, slot.kept()
        self._tensors = {"states": slot.states, "channels": slot.channels, "gates": slot.gates}
        slot.before_change.append(self._copy)

    def read(self, rows: StateRows) -> Content:
        """A copy of those rows."""
        first, last = rows.first, rows.first + rows.rows
        if rows.tensor == "lengths":
            length, floor, folded = self.lengths
            return np.array([length, floor, *folded][first:last], "<u4").view(np.uint8)
        tensor = self._tensors[rows.tensor]
        if rows.tensor == "states":
            found = tensor.flatten(0, 1)[first:last].clone()
        else:
            found = tensor.flatten(0, 1)[_places(self._journal, tensor, first, last)]
        return found.flatten().view(torch.uint8).numpy()

    def close(self) -> None:
        """It is not read any more."""
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
    if rows.tensor == "states":
        places = [*wanted]
        empty = [not lengths.folded[each // heads] for each in wanted]
    else:
        places = _places(journal, tensor, wanted.start, wanted.stop)
        empty = [each % len(journal) < len(journal) - lengths.length for each in wanted]
    content, into = _tensor_of(data, tensor).reshape(len(places), *tensor.shape[2:]), tensor.flatten(0, 1)
    into[places] = content
    into[[place for place, nothing in zip(places, empty, strict=True) if nothing]] = 0.0


def numbers_bytes(layers: int) -> int:
    """Of what `to_file` has besides tensors."""
    return 4 * (2 + layers)


def to_file(slot: RecurrentSlot) -> bytes:
    """An image as one piece of bytes, for `from_file`."""
    snapshot = SlotSnapshot(slot)
    try:
        return b"".join([snapshot.read(each).data for each in _all_rows(slot, snapshot.lengths)])
    finally:
        snapshot.close()


def from_file(content: bytes, slot: RecurrentSlot) -> None:
    """Make ``slot`` what `to_file` had. Raises ValueError if it is not of the slot's shapes."""
    length, floor, *folded = np.frombuffer(content, "<u4", 2 + len(slot.folded)).tolist()
    lengths, at = StateLengths(length, floor, tuple(folded)), numbers_bytes(len(folded))
    for rows in _all_rows(slot, lengths)[1:]:
        size = rows.rows * getattr(slot, rows.tensor)[0, 0].nbytes
        write_rows(slot, lengths, rows, content[at : at + size])
        at += size


def _all_rows(slot: RecurrentSlot, lengths: StateLengths) -> list[StateRows]:
    layers, journal = len(slot.folded), lengths.length - min(lengths.folded) + slot.shape.taps - 1
    counts = 2 + layers, layers * slot.shape.value_heads, layers * journal, layers * journal
    return [StateRows("", name, 0, count) for name, count in zip(STATE_TENSORS, counts, strict=True)]


def _places(journal: Sequence[int], tensor: Tensor, first: int, last: int) -> list[int]:
    """Where rows of a tensor of the journal are, all layers one behind the other. ``journal``: the rows of a layer."""
    count, there = len(journal), tensor.shape[1]
    return [each // count * there + journal[each % count] for each in range(first, last)]


def _tensor_of(data: Content | bytes, like: Tensor) -> Tensor:
    content = np.frombuffer(data, np.uint8)
    if not content.flags.writeable:  # torch wants memory that it may write
        content = content.copy()
    return torch.from_numpy(content).view(like.dtype)
