"""The recurrent states of a sequence on their way to a file or another executor: numbers and bytes, without torch."""

from __future__ import annotations

from typing import NamedTuple

Buffer = bytes | bytearray


class StateImage(NamedTuple):
    """The states of a sequence at a length, as its slot has them: see `attention.recurrent.SlotImage`. The last three
    are the elements of tensors in their order: ``states`` [layers, value_heads, key_dim, value_dim], ``channels``
    [layers, rows, channels], ``gates`` [layers, rows, 2, value_heads]. `StateTensors.rows` says how many rows."""

    length: int
    floor: int
    folded: tuple[int, ...]
    states: Buffer
    channels: Buffer
    gates: Buffer


class MovedStates(NamedTuple):
    """What moves with a sequence. ``slot``: what it goes on from; None: the tokens since the ``checkpoint`` are fed
    again, or all of them."""

    slot: StateImage | None = None
    checkpoint: StateImage | None = None
