"""How the parts of a layer declare their weights.

Each part lists its matrices, its norms and what else it has. All else loops over these lists and knows no part by name:
where the tensors of a checkpoint go (`layout`), what a rank has of them (`shard`), what they take of the memory
(`footprint`), and which of them adapters change (`lora`).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple


class Channels(NamedTuple):
    """Rows or columns: ``units`` of ``width`` channels each, such as heads. Ranks share whole units. ``pairs``: the
    checkpoint has so many first channels of each unit as the neighbours that a rotation pairs. ``behind``: it has so
    many channels before those that are first here."""

    units: int
    width: int = 1
    pairs: int = 0
    behind: int = 0

    @property
    def size(self) -> int:
        """Channels in all."""
        return self.units * self.width


class Cut(enum.Enum):
    """How ranks share a matrix. A rank of those that share ``ROWS`` has some of the outputs; where they share
    ``COLUMNS``, the outputs are summed over the ranks, and the first rank alone adds the bias."""

    NONE = enum.auto()
    ROWS = enum.auto()
    COLUMNS = enum.auto()


@dataclass(frozen=True, slots=True)
class Matrix:
    """A product of a layer: x [.., columns] -> y [.., rows]. ``role``: what it is called within the layer. ``names``:
    the checkpoint's modules, one for each of ``rows``, or the first holds so many as are left over by the others; with
    ``interleaved`` so many each, which must have equally many units, one unit of each in turn. ``adaptable``: adapters
    may change it. ``apart``: the layer holds it in a form of its own, not as the model's other matrices. ``fine``: so
    many of its last outputs move answers most, for their weights, where these are quantized."""

    role: str
    rows: tuple[Channels, ...]
    columns: Channels
    names: tuple[str, ...]
    bias: bool = False
    cut: Cut = Cut.NONE
    adaptable: bool = True
    apart: bool = False
    interleaved: tuple[int, ...] = ()
    fine: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs, inputs."""
        return sum(each.size for each in self.rows), self.columns.size

    def modules(self) -> Iterator[tuple[str, tuple[Channels, ...]]]:
        """The checkpoint's modules with their rows."""
        others = len(self.names) - 1
        counts = self.interleaved or (len(self.rows) - others, *(1,) * others)
        bounds = pairwise(accumulate(counts, initial=0))
        return zip(self.names, [self.rows[first:last] for first, last in bounds], strict=True)


@dataclass(frozen=True, slots=True)
class NormWeights:
    """The parameter of a norm: a row for each unit of all ``channels``. ``names``: the checkpoint's tensors, one for
    each of ``channels``. ``spread``: such a tensor is one row, which serves all of its units."""

    role: str
    channels: tuple[Channels, ...]
    names: tuple[str, ...]
    spread: bool = False

    @property
    def size(self) -> int:
        """Numbers in all."""
        return sum(each.size for each in self.channels)


class Floats(NamedTuple):
    """Numbers that are neither a matrix nor the weights of a model's norm, held in float32 as the checkpoint has them.
    ``name``: the checkpoint's tensor. ``rows``: what its first axis consists of, which ranks share; nothing: all ranks
    have it whole."""

    role: str
    name: str
    shape: tuple[int, ...]
    rows: tuple[Channels, ...] = ()

    @property
    def size(self) -> int:
        """Numbers in all."""
        return math.prod(self.shape)
