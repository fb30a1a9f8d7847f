"""Matrix products by our C kernel (``linear.c``): weights in panels, in bfloat16 or in 8 bits.

Packed once, at load. A product's sums run over the elements in one order, whatever else is in the step: an answer does
not depend on its neighbours in the batch, bit for bit. ``k`` is the width of a row, ``n`` of an output.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from ferrum_rpc.errors import InvalidRequest
from ferrum_rpc.native import library

COLUMNS: Final = 16
"""Of a panel."""

GROUP: Final = 64
"""Elements of a column, or of a row, that share a scale where weights have 8 bits."""

ISAS: Final = {4: "portable C", 8: "AVX2", 16: "AVX-512"}
"""What kernels are compiled for, by the floats of a vector."""

PREPARED: Final = {library.PAIRS: {8: 4}, library.BYTES: {4: 1, 8: 2, 16: 1}}
"""Bytes for each element of a row that a kernel takes to make rows ready: AVX2 reads them widened."""

SLAB: Final = 4096
"""Columns that are packed at a time: what the intermediate copies cost."""

PackedShape = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a tensor of packed weights; panels are [panels, k / together, 16, together]."""


class Workspace:
    """The kernel of this machine and its buffers, which products of one model share; one product at a time."""

    def __init__(self, kind: int) -> None:
        self.library = library.load()
        lanes = self.library.ferrum_linear_supported(kind)
        self.isa, self.prepared = ISAS[lanes], PREPARED[kind].get(lanes, 0)
        self.handle = self.library.ferrum_linears_new()

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self.library.ferrum_linears_free(self.handle)


class NativeLinear:
    """A `Linear` over bfloat16 rows. ``tensors``: panels, scales (of bytes) and bias, as a factory made them."""

    __slots__ = ("_held", "_k", "_matrix", "address", "n", "space")

    def __init__(self, space: Workspace, kind: int, n: int, k: int, tensors: tuple[Tensor | None, ...]) -> None:
        self.space, self.n, self._k = space, n, k
        self._held = tensors
        self._matrix = library.MatrixStruct(
            kind, n, k, *(None if each is None else each.data_ptr() for each in tensors)
        )
        self.address = ctypes.addressof(self._matrix)

    def __call__(self, x: Tensor) -> Tensor:
        return self._product(x, x.new_empty((*x.shape[:-1], self.n)), 0)

    def fp32(self, x: Tensor) -> Tensor:
        return self._product(x, x.new_empty((*x.shape[:-1], self.n), dtype=torch.float32), 1)

    def argmax(self, x: Tensor) -> Tensor:
        """No row is written."""
        rows = self._rows(x)
        ids = torch.empty(x.shape[:-1], dtype=torch.int64)
        status = self.space.library.ferrum_linear_largest(
            self.space.handle,
            self.address,
            rows.data_ptr(),
            rows.stride(0),
            len(rows),
            ids.data_ptr(),
            torch.get_num_threads(),
        )
        return self._checked(status, ids)

    def _rows(self, x: Tensor) -> Tensor:
        rows = x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, x.shape[-1])
        return F.pad(rows, (0, self._k - rows.shape[1])) if rows.shape[1] < self._k else rows

    def _product(self, x: Tensor, out: Tensor, fp32: int) -> Tensor:
        rows = self._rows(x)
        status = self.space.library.ferrum_linear(
            self.space.handle,
            self.address,
            rows.data_ptr(),
            rows.stride(0),
            len(rows),
            out.data_ptr(),
            fp32,
            torch.get_num_threads(),
        )
        return self._checked(status, out)

    @staticmethod
    def _checked(status: int, out: Tensor) -> Tensor:
        if status:
            raise MemoryError("no memory for the matrix product's buffers")
        return out


class _Factory:
    """What both factories share. ``isa``: which of `ISAS` multiplies. ``prepared``: bytes for each element of a row
    that the kernel keeps in addition to the row."""

    def __init__(self, kind: int) -> None:
        self._space = Workspace(kind)
        self.isa, self.prepared = self._space.isa, self._space.prepared

    @staticmethod
    def passing(dtype: torch.dtype) -> int:
        return 0


class PairFactory(_Factory):
    """A `LinearFactory`: bfloat16 weights as they are. Raises OSError where there is no C library."""

    name = "native"

    def __init__(self) -> None:
        super().__init__(library.PAIRS)

    def __call__(self, weight: Tensor, bias: Tensor | None) -> NativeLinear:
        """Pack ``weight`` [n, k]. An odd k is made even by a zero, in every row too; no known model has one."""
        if weight.shape[1] % 2:  # a padding of nothing is a copy
            weight = F.pad(weight, (0, 1))
        n, k = weight.shape
        panels = _allocate(*self._panels(n, k))
        for first, slab in _slabs(weight):
            panels[first : first + len(slab) // COLUMNS] = slab.view(-1, COLUMNS, k // 2, 2).transpose(1, 2)
        return NativeLinear(self._space, library.PAIRS, n, k, (panels, None, _floats(bias)))

    @staticmethod
    def nbytes(n: int, k: int, dtype: torch.dtype, *, bias: bool = False, shared: bool = False) -> int:
        return _size(*PairFactory._panels(n, k + k % 2)) + bias * _size((n,), torch.float32)

    @staticmethod
    def _panels(n: int, k: int) -> PackedShape:
        return (-(-n // COLUMNS), k // 2, COLUMNS, 2), torch.bfloat16


class ByteFactory(_Factory):
    """A `LinearFactory`: weights quantized to 8 bits, every 64 of a column with a scale of their own. Raises OSError
    where there is no C library."""

    def __init__(self) -> None:
        super().__init__(library.BYTES)
        self._squares = torch.zeros(2, dtype=torch.float64)

    @property
    def error(self) -> float:
        """Root mean square of what quantization changed, relative to the weights, over all that were packed."""
        changed, whole = self._squares.tolist()
        return float((changed / whole) ** 0.5) if whole else 0.0

    def __call__(self, weight: Tensor, bias: Tensor | None) -> NativeLinear:
        """Quantize and pack ``weight`` [n, k]. Raises InvalidRequest where k is no multiple of 64."""
        n, k = weight.shape
        panels, scales = (_allocate(*each) for each in self._shapes(n, k))
        for first, slab in _slabs(weight):
            grouped = slab.float().view(len(slab), k // GROUP, GROUP)
            scale = grouped.abs().amax(-1, keepdim=True) / 127.0
            quantized = (grouped / scale.clamp_min(torch.finfo(torch.float32).tiny)).round_()
            self._squares[0] += (quantized * scale - grouped).double().square().sum()
            self._squares[1] += grouped.double().square().sum()
            last = first + len(slab) // COLUMNS
            unsigned = (quantized + 128.0).to(torch.uint8).view(-1, COLUMNS, k // 4, 4)
            panels[first:last] = unsigned.transpose(1, 2)
            scales[first:last] = scale.view(-1, COLUMNS, k // GROUP).transpose(1, 2)
        return NativeLinear(self._space, library.BYTES, n, k, (panels, scales, _floats(bias)))

    @staticmethod
    def nbytes(n: int, k: int, dtype: torch.dtype, *, bias: bool = False, shared: bool = False) -> int:
        """Raises InvalidRequest where k is no multiple of 64."""
        return sum(_size(*each) for each in ByteFactory._shapes(n, k)) + bias * _size((n,), torch.float32)

    @staticmethod
    def _shapes(n: int, k: int) -> tuple[PackedShape, PackedShape]:
        """Of panels and of scales."""
        if k % GROUP:
            raise InvalidRequest(
                f"8-bit weights come in blocks of {GROUP}, and this model, or a rank's part of it, has rows of {k}; "
                "serve it without --quantize int8",
                field="quantize",
            )
        panels = -(-n // COLUMNS)
        return ((panels, k // 4, COLUMNS, 4), torch.uint8), ((panels, k // GROUP, COLUMNS), torch.float32)


def _allocate(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    buffer = torch.empty(shape, dtype=dtype)
    library.prefer_huge_pages(buffer)
    return buffer


def _size(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


def _slabs(weight: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Whole panels' rows of ``weight``, the last filled up with zeros, and the index of their first panel."""
    for first in range(0, len(weight), SLAB):
        slab = weight[first : first + SLAB]
        less = -len(slab) % COLUMNS
        yield first // COLUMNS, F.pad(slab, (0, 0, 0, less)) if less else slab


def _floats(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.to(torch.float32)
