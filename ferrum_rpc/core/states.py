"""The recurrent states of a sequence on their way to a file or another executor: numbers and rows, without torch."""

from __future__ import annotations

from typing import Final, NamedTuple

STATE_TENSORS: Final = ("lengths", "states", "channels", "gates")
"""Of an image, in the order in which they move. ``lengths`` are the numbers of `StateLengths`."""


class StateLengths(NamedTuple):
    """The lengths of the states of a sequence, as its slot has them: see `attention.recurrent.RecurrentSlot`. They say
    how many rows its tensors have (`StateTensors.row_count`)."""

    length: int
    floor: int
    folded: tuple[int, ...]


class MovedStates(NamedTuple):
    """What moves with a sequence. ``slot``: what it goes on from; None: the tokens since the ``checkpoint`` are fed
    again, or all of them."""

    slot: StateLengths | None = None
    checkpoint: StateLengths | None = None


class StateRows(NamedTuple):
    """Rows of a tensor of an image, a field of `MovedStates`: the ``first`` of them, and how many. A row is a number of
    ``lengths``, a head of ``states`` [key_dim, value_dim], or a token of ``channels`` [channels] or ``gates``
    [2, value_heads]; those of the first layer come first."""

    image: str
    tensor: str
    first: int
    rows: int

    @property
    def name(self) -> str:
        """That of the tensor in a layout."""
        return f"{self.image}.{self.tensor}"
