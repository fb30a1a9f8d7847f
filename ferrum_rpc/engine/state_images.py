"""The content of slots as bytes, and back: states that leave this process, or come from elsewhere."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ferrum_rpc.attention.recurrent import RecurrentSlot, SlotImage
from ferrum_rpc.core import StateImage
from ferrum_rpc.core.states import Buffer


def packed(slot: RecurrentSlot) -> StateImage:
    """A copy of what the sequence of ``slot`` needs."""
    image = slot.image(shared=True)
    tensors = (image.states, image.channels, image.gates)
    return StateImage(image.length, image.floor, image.folded, *map(_bytes_of, tensors))


def unpacked(image: StateImage, slot: RecurrentSlot) -> SlotImage:
    """What ``slot`` can load. Before the first token all is zeros, whatever the image says: a sequence that goes back
    to nothing must have nothing of what was imported. Raises ValueError if it is not of the slot's shapes, or has too
    many rows."""
    layers, there = slot.channels.shape[:2]
    rows = image.length - min(image.folded) + slot.shape.taps - 1
    if len(image.folded) != layers or not slot.shape.taps - 1 <= rows <= there:
        raise ValueError(f"the states of {len(image.folded)} layers and {rows} rows do not fit {layers} of {there}")
    states = _tensor_of(image.states, slot.states, slot.states.shape)
    channels, gates = (
        _tensor_of(data, like, (layers, rows, *like.shape[2:]))
        for data, like in ((image.channels, slot.channels), (image.gates, slot.gates))
    )
    states[[layer for layer, folded in enumerate(image.folded) if not folded]] = 0.0
    channels[:, : max(0, slot.shape.taps - 1 - min(image.folded))] = 0.0
    return SlotImage(image.length, image.floor, image.folded, states, channels, gates)


def numbers_bytes(layers: int) -> int:
    """Of what `to_file` has besides tensors."""
    return 4 * (2 + layers)


def to_file(image: StateImage) -> bytes:
    """An image as one piece of bytes, for `from_file`."""
    numbers = np.array([image.length, image.floor, *image.folded], "<u4").tobytes()
    return b"".join((numbers, image.states, image.channels, image.gates))


def from_file(content: bytes, slot: RecurrentSlot) -> SlotImage:
    """What ``slot`` can load of that. Raises ValueError if it is not of the slot's shapes."""
    layers, taps = len(slot.states), slot.shape.taps
    at = numbers_bytes(layers)
    length, floor, *folded = np.frombuffer(content, "<u4", 2 + layers).tolist()
    rows, parts = length - min(folded) + taps - 1, list[bytes]()
    sizes = slot.states.nbytes, slot.channels[:, :rows].nbytes, slot.gates[:, :rows].nbytes
    for size in sizes:
        parts.append(content[at : at + size])
        at += size
    return unpacked(StateImage(length, floor, tuple(folded), *parts), slot)


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def _tensor_of(data: Buffer, like: Tensor, shape: tuple[int, ...]) -> Tensor:
    content = np.frombuffer(data, np.uint8)
    if not content.flags.writeable:  # torch wants memory that it may write
        content = content.copy()
    return torch.from_numpy(content).view(like.dtype).reshape(shape)
