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

GROUP: Final = 4
"""Panels of a group: they lie alternately, vector by vector."""


class NativeAdapted(AdaptedProduct):
    """Panels of A of all parts, and of B of each, in ``buffer``, which is zero."""

    def __init__(self, change: ProductChange, buffer: Tensor) -> None:
        self.change, self.nbytes = change, buffer.nbytes
        a, *each_b = _cut(buffer, _sizes(change))
        self._a = _groups(a, change.size_in)
        self._b = {part: _groups(b, part.rank) for part, b in zip(change.parts, each_b, strict=True)}
        self.struct = library.LoraChange(
            a.data_ptr(), change.size_out, change.size_in, _align_up(change.rank), len(change.parts)
        )
        for place, (part, b) in enumerate(zip(change.parts, each_b, strict=True)):
            self.struct.part[place] = library.LoraPart(b.data_ptr(), part.first, part.rows, part.start, part.rank)

    def put(self, part: AdapterMatrix, a: Tensor, b: Tensor) -> None:
        rank, size = part.change.rank, GROUP * COLUMNS
        pairs, columns = a.to(torch.bfloat16).view(rank, -1, 2), torch.arange(part.start, part.start + rank)
        for number, group in enumerate(self._a):
            here = columns // size == number
            place = columns[here] % size
            group.transpose(1, 2)[place // COLUMNS, place % COLUMNS] = pairs[here]
        padded = F.pad(b.to(torch.bfloat16), (0, part.rank - rank, 0, -part.rows % COLUMNS))
        panels = padded.view(-1, COLUMNS, part.rank // 2, 2).transpose(1, 2)
        for number, group in enumerate(self._b[part]):
            group.copy_(panels[number * GROUP : number * GROUP + GROUP])


class NativeLoras(Loras):
    """On a CPU with AVX-512 BF16 or AVX2. Raises OSError where the kernel cannot run."""

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
        super().__init__(table, dtype, device, here)
        self._library = library.load()
        self._lanes: int = self._library.ferrum_lora_lanes()
        if not self._lanes:
            raise OSError("the CPU has no AVX2")
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
        self._ranks[number] = max([_align_up(each.rank) for each in changes], default=0)
        return taken

    def drop(self, number: int) -> None:
        super().drop(number)
        self._structs.pop(number, None)
        self._ranks.pop(number, None)

    def _adapted(self, changes: Sequence[ProductChange]) -> Sequence[AdaptedProduct]:
        """In one piece, in the order in which a step reads it."""
        buffer = torch.empty(self.nbytes(changes) // 2, dtype=torch.bfloat16)
        library.prefer_huge_pages(buffer)
        buffers = _cut(buffer.zero_(), map(_size, changes))
        return [NativeAdapted(each, own) for each, own in zip(changes, buffers, strict=True)]

    def step(self, spans: Sequence[tuple[int, int, int]], tokens: int) -> StepAdapters:
        parts = [
            (ctypes.addressof(self._structs[number]), at, min(MOST_ROWS, first + count - at))
            for number, first, count in spans
            for at in range(first, first + count, MOST_ROWS)
        ]
        rank = max(self._ranks[number] for number, _, _ in spans)
        return NativeStep(self._library, np.array(parts, dtype=ROWS), tokens, rank, self._lanes)


class NativeStep:
    """A `StepAdapters`."""

    def __init__(self, loaded: ctypes.CDLL, rows: npt.NDArray[np.void], tokens: int, rank: int, lanes: int) -> None:
        self._library = loaded
        self._rows = rows
        self._sums = torch.empty((tokens, rank), dtype=torch.bfloat16)
        self._step = library.LoraStep(rows.ctypes.data, self._sums.data_ptr(), len(rows), rank, lanes)
        self.address = ctypes.addressof(self._step)

    def add(self, slot: int, x: Tensor, y: Tensor) -> None:
        """``y`` is contiguous, ``x`` in its last dimension."""
        threads = torch.get_num_threads()
        self._library.ferrum_lora(self.address, slot, x.data_ptr(), x.stride(0), y.data_ptr(), threads)


def _align_up(columns: int) -> int:
    """To a whole number of panels."""
    return -(-columns // COLUMNS) * COLUMNS


def _sizes(change: ProductChange) -> list[int]:
    """Elements of the panels of A, and of B of each part."""
    each_b = [_align_up(part.rows) * part.rank for part in change.parts]
    return [_align_up(change.rank) * change.size_in, *each_b]


def _size(change: ProductChange) -> int:
    return sum(_sizes(change))


def _groups(buffer: Tensor, width: int) -> list[Tensor]:
    """The groups of panels that fill the buffer: [panels, pairs, 16, 2] each, a view."""
    size = GROUP * COLUMNS * width
    groups = [buffer[first : first + size] for first in range(0, len(buffer), size)]
    return [group.view(width // 2, -1, COLUMNS, 2).transpose(0, 1) for group in groups]


def _cut(buffer: Tensor, sizes: Iterable[int]) -> list[Tensor]:
    """The parts of a buffer, one behind the other."""
    ends = list(accumulate(sizes, initial=0))
    return [buffer[first:last] for first, last in pairwise(ends)]
