"""Adapters by our C kernel (``lora.c``): all adapters of a step in one call for each product, in bfloat16.

A and B lie in panels, as our own products' weights do. What is added to a row does not depend on its neighbours in the
batch, bit for bit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from ferrum_rpc.models.base import StepAdapters
from ferrum_rpc.models.layout import TensorPlacement
from ferrum_rpc.models.lora import AdaptedProduct, AdapterMatrix, Loras, ProductChange
from ferrum_rpc.models.native_linear import COLUMNS
from ferrum_rpc.native import cpu, library

ROWS: Final = np.dtype([("changes", np.uint64), ("first", np.int64), ("count", np.int64)])
"""``struct lora_rows`` of lora.h."""

MOST_ROWS: Final = 24
"""``LORA_ROWS`` there."""

LOT: Final = 4
"""Panels that lie beside each other, vector by vector."""


class NativeAdapted(AdaptedProduct):
    """Panels of A of all parts, and of B of each, in ``room``, which is zero."""

    def __init__(self, change: ProductChange, room: Tensor) -> None:
        self._width = change.size_in
        self.nbytes = room.nbytes
        a, *each_b = _cut(room, _sizes(change))
        self._a = _lots(a, change.size_in)
        self._b = {part: _lots(b, part.rank) for part, b in zip(change.parts, each_b, strict=True)}
        self.struct = library.LoraChange(
            a.data_ptr(), change.size_out, change.size_in, _whole(change.rank), len(change.parts)
        )
        for place, (part, b) in enumerate(zip(change.parts, each_b, strict=True)):
            self.struct.part[place] = library.LoraPart(b.data_ptr(), part.first, part.rows, part.start, part.rank)

    def put(self, part: AdapterMatrix, a: Tensor, b: Tensor) -> None:
        rank, size = part.change.rank, LOT * COLUMNS
        pairs, columns = a.to(torch.bfloat16).view(rank, -1, 2), torch.arange(part.start, part.start + rank)
        for number, lot in enumerate(self._a):
            here = columns // size == number
            place = columns[here] % size
            lot.transpose(1, 2)[place // COLUMNS, place % COLUMNS] = pairs[here]
        padded = F.pad(b.to(torch.bfloat16), (0, part.rank - rank, 0, -part.rows % COLUMNS))
        panels = padded.view(-1, COLUMNS, part.rank // 2, 2).transpose(1, 2)
        for number, lot in enumerate(self._b[part]):
            lot.copy_(panels[number * LOT : number * LOT + LOT])


class NativeLoras(Loras):
    """On a CPU that multiplies bfloat16. Raises OSError where the kernel cannot run."""

    name = "native"
    rowwise = True

    def __init__(
        self,
        table: Mapping[str, TensorPlacement],
        dtype: torch.dtype,
        device: torch.device,
        here: Mapping[str, TensorPlacement] | None = None,
    ) -> None:
        cpu.require(device, dtype, torch.bfloat16)
        super().__init__(table, dtype, here)
        self._library = library.load()
        if not self._library.ferrum_lora_supported():
            raise OSError("the CPU has no avx512_bf16")
        if any(each.local[1] % 2 for each in self._here.values()):
            raise OSError("the model has products of odd width")
        self._structs: dict[int, ctypes.Array[library.LoraChange]] = {}
        self._ranks: dict[int, int] = {}

    def nbytes(self, changes: Sequence[ProductChange]) -> int:
        return 2 * sum(map(_size, changes))

    def add(self, number: int, changes: Sequence[ProductChange]) -> int:
        taken = super().add(number, changes)
        structs = (library.LoraChange * self._slots)()
        for place, each in enumerate(self._adapters[number]):
            if isinstance(each, NativeAdapted):
                structs[place] = each.struct
        self._structs[number] = structs
        self._ranks[number] = max([_whole(each.rank) for each in changes], default=0)
        return taken

    def drop(self, number: int) -> None:
        super().drop(number)
        self._structs.pop(number, None)
        self._ranks.pop(number, None)

    def _adapted(self, changes: Sequence[ProductChange]) -> Sequence[AdaptedProduct]:
        """In one piece, in the order in which a step reads it."""
        room = torch.empty(self.nbytes(changes) // 2, dtype=torch.bfloat16)
        library.prefer_huge_pages(room)
        rooms = _cut(room.zero_(), map(_size, changes))
        return [NativeAdapted(each, own) for each, own in zip(changes, rooms, strict=True)]

    def step(self, spans: Sequence[tuple[int, int, int]], tokens: int) -> StepAdapters:
        parts = [
            (ctypes.addressof(self._structs[number]), at, min(MOST_ROWS, first + count - at))
            for number, first, count in spans
            for at in range(first, first + count, MOST_ROWS)
        ]
        rank = max(self._ranks[number] for number, _, _ in spans)
        return NativeStep(self._library, np.array(parts, dtype=ROWS), tokens, rank)


class NativeStep:
    """A `StepAdapters`."""

    def __init__(self, loaded: ctypes.CDLL, rows: npt.NDArray[np.void], tokens: int, rank: int) -> None:
        self._library = loaded
        self._rows = rows
        self._sums = torch.empty((tokens, rank), dtype=torch.bfloat16)
        self._step = library.LoraStep(rows.ctypes.data, self._sums.data_ptr(), len(rows), rank)
        self.address = ctypes.addressof(self._step)

    def add(self, slot: int, x: Tensor, y: Tensor) -> None:
        """``y`` is contiguous, ``x`` in its last dimension."""
        threads = torch.get_num_threads()
        self._library.ferrum_lora(self.address, slot, x.data_ptr(), x.stride(0), y.data_ptr(), threads)


def _whole(rank: int) -> int:
    """A whole number of panels."""
    return -(-rank // COLUMNS) * COLUMNS


def _sizes(change: ProductChange) -> list[int]:
    """Elements of the panels of A, and of B of each part."""
    each_b = [_whole(part.rows) * part.rank for part in change.parts]
    return [_whole(change.rank) * change.size_in, *each_b]


def _size(change: ProductChange) -> int:
    return sum(_sizes(change))


def _lots(room: Tensor, width: int) -> list[Tensor]:
    """The lots of panels that fill the room: [panels, pairs, 16, 2] each, a view."""
    size = LOT * COLUMNS * width
    lots = [room[first : first + size] for first in range(0, len(room), size)]
    return [lot.view(width // 2, -1, COLUMNS, 2).transpose(0, 1) for lot in lots]


def _cut(room: Tensor, sizes: Iterable[int]) -> list[Tensor]:
    """The parts of a room, one behind the other."""
    ends = list(accumulate(sizes, initial=0))
    return [room[first:last] for first, last in pairwise(ends)]
