"""Matrix products by our C kernel (``linear.c``): weights in panels, in bfloat16, in 8 bits or in 4.

Packed once, at load. A product's sums run over the elements in one order, whatever else is in the step: an answer does
not depend on its neighbours in the batch, bit for bit. ``k`` is the width of a row, ``n`` of an output.
"""

from __future__ import annotations

import ctypes
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ferrum_rpc.errors import InvalidRequest
from ferrum_rpc.models.stored_integers import SUPER_GROUP, Code, IntegerFormat, Integers
from ferrum_rpc.native import library

CODES: Final = {Code.MXFP4: library.MXFP4, Code.IQ4: library.IQ4}
"""What ``enum kind`` of linear.h calls them."""

COLUMNS: Final = 16
"""Of a panel."""

GROUP_OF_8_BITS: Final = 64
GROUP_OF_4_BITS: Final = 32
"""Elements of a column, or of a row, that share a scale."""

MIXED_TWICE: Final = 16.0
"""What a number is multiplied by if it is mixed twice."""

ISAS: Final = {4: "portable C", 8: "AVX2", 16: "AVX-512", 32: "AMX"}
"""What kernels are compiled for, by the number that the library has for it: the floats of a vector, or 32."""

UNPACKED_BYTES: Final = 4 * 512 * 64
"""Of 4-bit panels that are multiplied as bytes (``linear.c``): by AVX-512 and AMX, and those of IQ4 by AVX2."""

JOB_ROWS: Final = 240
SUM_BYTES: Final = 4 * 64
"""The most rows of a job, and what a thread keeps of each: sums of 64 columns (``linear.c``)."""

SLAB: Final = 4096
"""Columns that are packed at a time: what the intermediate copies cost."""

PackedShape = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a tensor of packed weights; panels are [panels, k / together, 16, together]."""


class Workspace:
    """The kernels of this machine and their buffers, which products of one model share; one product at a time."""

    def __init__(self) -> None:
        self.library = library.load()
        self.handle = self.library.ferrum_linears_new()
        self.experts = self.library.ferrum_experts_new(self.handle)

    def __del__(self) -> None:
        if getattr(self, "experts", None):
            self.library.ferrum_experts_free(self.experts)
        if getattr(self, "handle", None):
            self.library.ferrum_linears_free(self.handle)

    def mixed(self, numbers: Tensor) -> Tensor:
        """Mix float32 ``numbers``, dense groups of `GROUP_OF_8_BITS`, in place (``simd.h``)."""
        self.library.ferrum_mix(numbers.data_ptr(), numbers.numel() // GROUP_OF_8_BITS, torch.get_num_threads())
        return numbers


class Panels(NamedTuple):
    """A packed matrix [n, k], as ``struct matrix`` of linear.h describes it."""

    kind: int
    n: int
    k: int
    held: Tensor
    scales: Tensor | None = None
    zeros: Tensor | None = None
    factors: Tensor | None = None
    order: Tensor | None = None
    group: int = 0
    factor: float = 1.0
    mixed: bool = False

    @property
    def row_factor(self) -> float:
        """`factor` of the numbers that C multiplies: of MXFP4 they are twice as large."""
        return self.factor / 2 if self.kind == library.MXFP4 else self.factor


class NativeLinear:
    """A `Linear` over bfloat16 rows. ``following``: parts whose columns come next in its output."""

    width: int
    address: int
    __slots__ = ("_following", "_held", "_k", "_matrix", "address", "space", "width")

    def __init__(
        self, space: Workspace, panels: Panels, bias: Tensor | None, following: Sequence[NativeLinear] = ()
    ) -> None:
        self.space, self._k = space, panels.k
        self.width = panels.n + sum(each.width for each in following)
        bias = None if bias is None else bias.to(torch.float32)
        self._held, self._following = (panels, bias), following
        tensors = panels.held, panels.scales, panels.zeros, panels.factors, bias, panels.order
        pointers = [None if each is None else each.data_ptr() for each in tensors]
        behind = following[0].address if following else None
        self._matrix = library.MatrixStruct(
            *panels[:3], panels.group, self.width, panels.mixed, panels.row_factor, *pointers, behind
        )
        self.address = ctypes.addressof(self._matrix)

    @classmethod
    def joined(cls, parts: Sequence[NativeLinear]) -> NativeLinear:
        """One product of ``parts``, whose outputs lie one after the other."""
        made: NativeLinear | None = None
        for each in reversed(parts):
            panels, bias = each._held
            made = cls(each.space, panels, bias, () if made is None else (made,))
        assert made is not None  # noqa: S101 - there is a part
        return made

    def __call__(self, x: Tensor) -> Tensor:
        return self._product(x, x.new_empty((*x.shape[:-1], self.width)), 0)

    def fp32(self, x: Tensor) -> Tensor:
        return self._product(x, x.new_empty((*x.shape[:-1], self.width), dtype=torch.float32), 1)

    def exact(self, x: Tensor) -> Tensor:
        """The product as float32, which is not rounded to bfloat16 before."""
        return self._product(x, x.new_empty((*x.shape[:-1], self.width), dtype=torch.float32), 2)

    def rows(self, ids: Tensor) -> Tensor:
        """bfloat16 [T, k]: rows of W, as ``ids`` int64 [T] name them. Of a product of one part."""
        panels, _ = self._held
        panel, column = ids // COLUMNS, ids % COLUMNS
        numbers = panels.held[panel, :, column]  # [T, vectors, together]
        if panels.scales is None:
            return numbers.flatten(1)
        bits = 8 if panels.kind == library.BYTES else 4
        if bits == 4:
            numbers = torch.stack((numbers & 15, numbers >> 4), -2)
        zeros, factors = (None if each is None else each[panel, :, column] for each in (panels.zeros, panels.factors))
        factors = None if factors is None else factors.view(len(ids), factors.shape[1] // 2, 2)
        scales = panels.scales[panel, :, column]
        code = next((code for code, kind in CODES.items() if kind == panels.kind), None)
        found = Integers(bits, numbers.flatten(1), scales, zeros, factors, panels.order, code).floats()
        if panels.mixed:
            found = self.space.mixed(found).mul_(1 / MIXED_TWICE)
        return found.mul_(panels.factor).to(torch.bfloat16)

    def argmax(self, x: Tensor) -> Tensor:
        """No row is written. Of a product of one part."""
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


class NativeHeads:
    """Small products of one part each, one of each head, in one call."""

    def __init__(self, products: Sequence[NativeLinear]) -> None:
        self._products, self._space = products, products[0].space
        self._addresses = (ctypes.c_void_p * len(products))(*(each.address for each in products))

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """Write to ``out`` [T, heads, n] the products of ``x`` [T, heads, k], both bfloat16 with a dense last axis."""
        status = self._space.library.ferrum_linear_heads(
            self._space.handle,
            ctypes.addressof(self._addresses),
            len(self._products),
            x.data_ptr(),
            x.stride(0),
            x.stride(1),
            len(x),
            out.data_ptr(),
            out.stride(0),
            out.stride(1),
            torch.get_num_threads(),
        )
        if status:
            raise MemoryError("no memory for the buffers of heads' products")


class RowBytes(NamedTuple):
    """What the kernel keeps of a row besides it: its ``numbers`` as they are made ready, and its ``scales`` and
    sums."""

    numbers: int
    scales: int

    def beside(self, other: RowBytes) -> RowBytes:
        """Of two products of one list."""
        return RowBytes(self.numbers + other.numbers, self.scales + other.scales)


class PanelFactory:
    """A `LinearFactory` of our kernel. ``space``: None: one of its own. ``isa``: which of `ISAS` multiplies.
    ``row_bytes``: what the kernel keeps of a row of k elements in addition to it; ``thread_bytes``: of a thread. Raises
    OSError where there is no C library."""

    kind: ClassVar[int]
    group: ClassVar[int] = 0

    def __init__(self, space: Workspace | None = None) -> None:
        self.space = Workspace() if space is None else space
        self.isa = ISAS[self.space.library.ferrum_linear_supported(self.kind)]

    def row_bytes(self, k: int) -> RowBytes:
        return _row_bytes(self.kind, k, self.group)

    @property
    def thread_bytes(self) -> int:
        return _thread_bytes(self.kind)

    @staticmethod
    def passing(dtype: torch.dtype) -> int:
        return 0


class PairFactory(PanelFactory):
    """bfloat16 weights as they are."""

    name = "native"
    kind = library.PAIRS

    def __call__(self, weight: Tensor, bias: Tensor | None) -> NativeLinear:
        """Pack ``weight`` [n, k]. An odd k is made even by a zero, in every row too; no known model has one."""
        if weight.shape[1] % 2:  # a padding of nothing is a copy
            weight = F.pad(weight, (0, 1))
        n, k = weight.shape
        panels = _allocate(*self._panels(n, k))
        for first, slab in _slabs(weight):
            panels[first : first + len(slab) // COLUMNS] = slab.view(-1, COLUMNS, k // 2, 2).transpose(1, 2)
        return NativeLinear(self.space, Panels(self.kind, n, k, panels), bias)

    @staticmethod
    def nbytes(n: int, k: int, dtype: torch.dtype, *, bias: bool = False, shared: bool = False) -> int:
        return _size(*PairFactory._panels(n, k + k % 2)) + bias * _size((n,), torch.float32)

    @staticmethod
    def _panels(n: int, k: int) -> PackedShape:
        return (-(-n // COLUMNS), k // 2, COLUMNS, 2), torch.bfloat16


def _packed(numbers: Tensor, bits: int) -> Tensor:
    """Of uint8 [panels, 16, k]: the panels' bytes, [panels, vectors, 16, 4]."""
    if bits == 8:
        return numbers.view(*numbers.shape[:2], -1, 4).transpose(1, 2)
    halves = numbers.view(*numbers.shape[:2], -1, 2, 4).transpose(1, 2)  # [panels, eights, 16, 2, 4]
    return halves[..., 0, :] | (halves[..., 1, :] << 4)


class QuantizedFactory(PanelFactory, ABC):
    """Weights quantized in groups of a column, each with a scale of its own. ``name``: that of ``--quantize``."""

    name: ClassVar[str]
    bits: ClassVar[int]
    mixed: ClassVar[bool] = False

    def __init__(self, space: Workspace | None = None) -> None:
        super().__init__(space)
        self._squares = torch.zeros(2, dtype=torch.float64)

    @property
    def error(self) -> float:
        """Root mean square of what quantization changed, relative to the weights, over all that were packed."""
        changed, whole = self._squares.tolist()
        return float((changed / whole) ** 0.5) if whole else 0.0

    def __call__(self, weight: Tensor, bias: Tensor | None) -> NativeLinear:
        """Quantize and pack ``weight`` [n, k]. Raises InvalidRequest where k is no multiple of the group."""
        n, k = weight.shape
        panels, *of_groups = (_allocate(*each) for each in self._shapes(n, k))
        factor = self._factor(weight)
        for first, slab in _slabs(weight):
            grouped = self._grouped(slab)
            quantized, *found, changed = self._quantize(grouped, factor)
            squares = torch.stack((changed, grouped.square().sum(dtype=torch.float64)))
            self._squares += squares / MIXED_TWICE if self.mixed else squares
            last = first + len(slab) // COLUMNS
            panels[first:last] = _packed(quantized.view(-1, COLUMNS, k), self.bits)
            for made, each in zip(of_groups, found, strict=True):
                made[first:last] = each.view(-1, COLUMNS, k // self.group).transpose(1, 2)
        scales, zeros = of_groups if len(of_groups) > 1 else (*of_groups, None)
        made_panels = Panels(self.kind, n, k, panels, scales, zeros, group=self.group, factor=factor, mixed=self.mixed)
        return NativeLinear(self.space, made_panels, bias)

    def nbytes(self, n: int, k: int, dtype: torch.dtype, *, bias: bool = False, shared: bool = False) -> int:
        """Raises InvalidRequest where k is no multiple of the group."""
        return sum(_size(*each) for each in self._shapes(n, k)) + bias * _size((n,), torch.float32)

    def _shapes(self, n: int, k: int) -> list[PackedShape]:
        """Of panels, and of what each group has."""
        if k % self.group:
            raise InvalidRequest(
                f"{self.bits}-bit weights come in blocks of {self.group}, and this model, or a rank's part of it, has "
                f"rows of {k}; serve it without --quantize {self.name}",
                field="quantize",
            )
        panels, together = -(-n // COLUMNS), 32 // self.bits
        held = ((panels, k // together, COLUMNS, 4), torch.uint8)
        return [held, *(((panels, k // self.group, COLUMNS), each) for each in self._of_groups)]

    _of_groups: ClassVar[tuple[torch.dtype, ...]]
    """What each group has: a scale, and the number that stands for 0 if it is not the same for all."""

    def _grouped(self, slab: Tensor) -> Tensor:
        """float32 [n, groups, group]: what is quantized of ``slab`` [n, k]."""
        return slab.float().view(len(slab), -1, self.group)

    @staticmethod
    @abstractmethod
    def _factor(weight: Tensor) -> float:
        """Of all scales of a matrix."""

    @abstractmethod
    def _quantize(self, grouped: Tensor, factor: float) -> tuple[Tensor, ...]:
        """Of float32 [n, groups, group]: unsigned numbers, uint8; `_of_groups`, [n, groups] each; and the sum of
        squares that it changed."""


class ByteFactory(QuantizedFactory):
    """8 bits: a scale in float16 for every 64 weights of a column, about their largest magnitude over 127. Both sides
    are mixed before they are rounded (``simd.h``): a large element is then a part of 16, and the others keep more of
    their bits."""

    name, bits, kind, group, mixed = "int8", 8, library.BYTES, GROUP_OF_8_BITS, True
    _of_groups = (torch.float16,)

    @staticmethod
    def _factor(weight: Tensor) -> float:
        return _power_of_two(weight, 18)  # mixed ones are 16 times as large at most

    def _grouped(self, slab: Tensor) -> Tensor:
        copied = slab.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        return self.space.mixed(copied).view(len(slab), -1, self.group)

    def _quantize(self, grouped: Tensor, factor: float) -> tuple[Tensor, ...]:
        scale = (grouped.abs().amax(-1, keepdim=True) / (127.0 * factor)).half()
        stored = scale.float() * factor
        quantized = (grouped / stored.clamp_min(torch.finfo(torch.float32).tiny)).round_().clamp_(-127.0, 127.0)
        changed = (quantized * stored).sub_(grouped).square_().sum(dtype=torch.float64)
        return (quantized + 128.0).to(torch.uint8), scale, changed


class NibbleFactory(QuantizedFactory):
    """4 bits: a scale in float16 and the number that stands for 0, in a byte, for every 32 weights of a column: 4.75
    bits a weight (``quantize.c``)."""

    name, bits, kind, group = "int4", 4, library.NIBBLES, GROUP_OF_4_BITS
    _of_groups = (torch.float16, torch.uint8)

    def __init__(self, space: Workspace | None = None) -> None:
        super().__init__(space)
        self._bytes = ByteFactory(self.space)
        self._bytes._squares = self._squares

    def __call__(self, weight: Tensor, bias: Tensor | None, fine: int = 0) -> NativeLinear:
        """``fine``: the last so many rows have 8 bits, where blocks of these divide k."""
        n, k = weight.shape
        if not fine or k % self._bytes.group:
            return super().__call__(weight, bias)
        first, last = (None, None) if bias is None else (bias[: n - fine], bias[n - fine :])
        return NativeLinear.joined((super().__call__(weight[: n - fine], first), self._bytes(weight[n - fine :], last)))

    def nbytes(
        self, n: int, k: int, dtype: torch.dtype, *, bias: bool = False, shared: bool = False, fine: int = 0
    ) -> int:
        if not fine or k % self._bytes.group:
            return super().nbytes(n, k, dtype, bias=bias)
        return super().nbytes(n - fine, k, dtype, bias=bias) + self._bytes.nbytes(fine, k, dtype, bias=bias)

    def row_bytes(self, k: int, *, fine: bool = False) -> RowBytes:
        own = super().row_bytes(k)
        return own.beside(self._bytes.row_bytes(k)) if fine and not k % self._bytes.group else own

    @staticmethod
    def _factor(weight: Tensor) -> float:
        return _power_of_two(weight, 12)

    def _quantize(self, grouped: Tensor, factor: float) -> tuple[Tensor, ...]:
        groups = grouped.shape[:2]
        numbers, zeros = torch.empty(grouped.shape, dtype=torch.uint8), torch.empty(groups, dtype=torch.uint8)
        scales, changed = torch.empty(groups), torch.empty(groups)
        made = (each.data_ptr() for each in (numbers, scales, zeros, changed))
        self.space.library.ferrum_quantize(
            grouped.data_ptr(), groups.numel(), self.group, *made, torch.get_num_threads()
        )
        return numbers, (scales / factor).half(), zeros, changed.sum(dtype=torch.float64)


class StoredFactory:
    """Matrices of small integers as a checkpoint stores them."""

    def __init__(self, space: Workspace) -> None:
        self._space = space

    def __call__(self, matrix: Integers, bias: Tensor | None) -> NativeLinear:
        """Pack it. Its groups are those of `GROUPS`."""
        (n, k), kind = matrix.shape, _kind_of(matrix.form)
        more = (0, 0, 0, -n % COLUMNS)
        packed = _packed(F.pad(matrix.numbers, more).view(-1, COLUMNS, k), matrix.bits)
        held = _allocate(tuple(packed.shape), torch.uint8)
        held.copy_(packed)

        def by_panel(each: Tensor) -> Tensor:
            return F.pad(each, more).view(len(held), COLUMNS, -1).mT.contiguous()

        factor, scales, factors = 1.0, matrix.scales, None
        if matrix.factors is not None:
            factors = by_panel(matrix.factors.flatten(1))
        elif kind != library.MXFP4:
            factor = 1.0 if scales.dtype == torch.float16 else _power_of_two(scales, 15)
            scales = (scales.to(torch.float32) / factor).half()
        scales, zeros = by_panel(scales), None if matrix.zeros is None else by_panel(matrix.zeros)
        made = Panels(kind, n, k, held, scales, zeros, factors, matrix.order, matrix.group, factor)
        return NativeLinear(self._space, made, bias)

    @staticmethod
    def nbytes(n: int, k: int, form: IntegerFormat, *, bias: bool = False, shared: bool = False) -> int:
        """Bytes that a matrix of this format holds."""
        of_groups = k // form.group * (1 if form.code is Code.MXFP4 else 2 if form.factored else 2 + form.zeroed)
        of_supers = k // SUPER_GROUP * 4 if form.factored else 0
        columns = -(-n // COLUMNS) * COLUMNS
        return columns * (k * form.bits // 8 + of_groups + of_supers) + form.ordered * 4 * k + bias * 4 * n

    @staticmethod
    def row_bytes(k: int, form: IntegerFormat) -> RowBytes:
        """See `PanelFactory`."""
        return _row_bytes(_kind_of(form), k, form.group)

    @staticmethod
    def thread_bytes(form: IntegerFormat) -> int:
        """See `PanelFactory`."""
        return _thread_bytes(_kind_of(form))


def _kind_of(form: IntegerFormat) -> int:
    """What ``enum kind`` of linear.h calls it."""
    if form.code is not None:
        return CODES[form.code]
    return library.FACTORED if form.factored else library.NIBBLES if form.bits == 4 else library.BYTES


def _row_bytes(kind: int, k: int, group: int) -> RowBytes:
    prepared: int = library.load().ferrum_linear_prepared(kind)
    return RowBytes(k * prepared, k // group * 8 if group else 0)


def _thread_bytes(kind: int) -> int:
    lanes = library.load().ferrum_linear_supported(kind)
    unpacked = kind not in (library.PAIRS, library.BYTES) and lanes >= (8 if kind == library.IQ4 else 16)
    return UNPACKED_BYTES if unpacked else 0


def _allocate(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    buffer = torch.empty(shape, dtype=dtype)
    library.prefer_huge_pages(buffer)
    return buffer


def _power_of_two(numbers: Tensor, exponent: int) -> float:
    """By which the largest of them becomes one of that exponent: float16 then has some 28 octaves below it."""
    largest = float(numbers.abs().amax()) if numbers.numel() else 0.0
    return 2.0 ** max(math.frexp(largest)[1] - exponent, -100) if largest else 1.0


def _size(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


def _slabs(weight: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Whole panels' rows of ``weight``, the last filled up with zeros, and the index of their first panel."""
    for first in range(0, len(weight), SLAB):
        slab = weight[first : first + SLAB]
        less = -len(slab) % COLUMNS
        yield first // COLUMNS, F.pad(slab, (0, 0, 0, less)) if less else slab
