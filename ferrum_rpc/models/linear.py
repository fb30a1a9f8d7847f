"""Matrix products with resident weights, and the choice of how they are held.

On a CPU the layout of a weight decides the speed: oneDNN reads a weight that it packed once at 31 GB/s on one core
where ``F.linear`` on the plain one reaches 15 (bf16, one row), and makes eight float32 rows 2.6 times as fast
(16.5 against 43 ms). Our own kernel (`native_linear`) does the same for bfloat16 in AMX, AVX-512 and AVX2. With AVX-512
BF16 it is 1.3 times as fast as oneDNN at 8 rows and 1.7 times at 32; with AVX2 it is 3 times as fast as torch at 8, and
oneDNN has no such products. oneDNN's packing entry points are those that torch's own compiler uses; they are not
public. So a probe runs each at start, compares its product with ``F.linear``, and falls back with a reason.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from typing import Final, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ferrum_rpc.models.native_linear import ISAS, ByteFactory, NibbleFactory, PairFactory, QuantizedFactory
from ferrum_rpc.native import cpu
from ferrum_rpc.selection import AUTO, BackendCandidate, Choice, Unsuited, select


class Linear(Protocol):
    """x [..., in] -> x W^T + b [..., out], in the dtype of x."""

    def __call__(self, x: Tensor) -> Tensor:
        """The product, computed in at least float32 and rounded once."""

    def fp32(self, x: Tensor) -> Tensor:
        """The same values as float32."""

    def argmax(self, x: Tensor) -> Tensor:
        """int64 [...]: of each row of the product the column of its largest element, the first of several."""


class LinearFactory(Protocol):
    """How weights are held."""

    def __call__(self, weight: Tensor, bias: Tensor | None, /) -> Linear:
        """The product by ``weight`` [n, k], plus ``bias`` [n]. The caller may drop the weight afterwards."""

    def nbytes(self, n: int, k: int, dtype: torch.dtype, *, bias: bool = False, shared: bool = False) -> int:
        """Bytes that such a product holds. ``shared``: the weight itself is held by others too."""

    def passing(self, dtype: torch.dtype) -> int:
        """Bytes for each number of a result in ``dtype`` that a product takes besides it while it computes."""


BLOCK: Final = 64
"""A multiple of every block in which oneDNN packs rows and columns."""


class TorchLinear(ABC):
    """A product of torch, written as a whole whatever is wanted of it."""

    __slots__ = ("_bias", "_weight")

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """The product, in the dtype of ``x``."""

    def fp32(self, x: Tensor) -> Tensor:
        return self(x).to(torch.float32)

    def argmax(self, x: Tensor) -> Tensor:
        return self(x).argmax(dim=-1)


class PlainLinear(TorchLinear):
    """The weight as it came from the checkpoint. Any device and dtype."""

    __slots__ = ()
    name = "plain"

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)

    @staticmethod
    def nbytes(n: int, k: int, dtype: torch.dtype, *, bias: bool = False, shared: bool = False) -> int:
        return (n * k * (not shared) + n * bias) * dtype.itemsize

    @staticmethod
    def passing(dtype: torch.dtype) -> int:
        return 0


class PackedLinear(TorchLinear):
    """The weight in oneDNN's blocked layout: one layout serves every number of rows. CPU only."""

    __slots__ = ()
    name = "onednn"

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return product

    @staticmethod
    def nbytes(n: int, k: int, dtype: torch.dtype, *, bias: bool = False, shared: bool = False) -> int:
        """Bytes after oneDNN has padded blocks, whose sizes only it knows: measured on small matrices with the same
        remainders."""
        rows, columns = (BLOCK + size % BLOCK for size in (n, k))
        filled_n = _packed_bytes(rows, BLOCK, dtype) // (BLOCK * dtype.itemsize) - rows
        filled_k = _packed_bytes(BLOCK, columns, dtype) // (BLOCK * dtype.itemsize) - columns
        return ((n + filled_n) * (k + filled_k) + n * bias) * dtype.itemsize

    @staticmethod
    def passing(dtype: torch.dtype) -> int:
        """On a CPU that does not multiply bfloat16, oneDNN sums the whole result in float32 and rounds it then."""
        return 4 if dtype == torch.bfloat16 and cpu.bfloat16() is None else 0


@functools.cache
def _packed_bytes(n: int, k: int, dtype: torch.dtype) -> int:
    packed = torch.ops.mkldnn._reorder_linear_weight(torch.zeros((n, k), dtype=dtype), None)
    return int(torch.ops.mkldnn._nbytes(packed))


def select_linear(device: torch.device, dtype: torch.dtype, requested: str = AUTO) -> Choice:
    """``(name, reason, factory)`` for this device and dtype. ``requested``: ``auto``, or what a backend is called:
    ``plain``, ``onednn``, ``native``.

    Raises InvalidRequest for another name, or for one whose probe fails.
    """

    def pairs() -> LinearFactory:
        cpu.require(device, dtype, torch.bfloat16)
        factory = PairFactory()
        _agreeing(factory, dtype)
        if requested == AUTO and factory.isa == ISAS[4]:
            raise Unsuited(f"it multiplies in {factory.isa} here, and torch is faster")
        return factory

    def packed() -> LinearFactory:
        cpu.require(device, dtype, torch.bfloat16, torch.float16, torch.float32)
        return _agreeing(PackedLinear, dtype)

    return select(
        BackendCandidate(PairFactory.name, pairs, "weights in panels, multiplied in {.isa}"),
        BackendCandidate(PackedLinear.name, packed, "oneDNN packs this dtype and the packed product agrees"),
        BackendCandidate(PlainLinear.name, lambda: PlainLinear),
        what="linear backend",
        field="linear_backend",
        requested=requested,
    )


class Quantized(NamedTuple):
    """How quantized weights are held: those of layers, and that of the head."""

    layers: QuantizedFactory
    head: QuantizedFactory


def select_quantized(device: torch.device, dtype: torch.dtype, requested: str) -> Quantized:
    """The factories of ``--quantize int8`` or ``int4``, whose head has 8 bits. Raises InvalidRequest where they cannot
    be used, saying why."""

    def factory(kind: type[QuantizedFactory]) -> QuantizedFactory:
        if device.type == "cpu" and dtype != torch.bfloat16:
            raise Unsuited(f"it computes in bfloat16, not {str(dtype).removeprefix('torch.')}: add --dtype bfloat16")
        cpu.require(device, dtype, torch.bfloat16)
        _agreeing(kind(), torch.bfloat16, 0.02)
        return kind()

    def in_bytes() -> Quantized:
        both = factory(ByteFactory)
        return Quantized(both, both)

    def nibbles() -> Quantized:
        factory(ByteFactory)
        layers = factory(NibbleFactory)
        return Quantized(layers, ByteFactory(layers.space))

    made: Quantized = select(
        BackendCandidate(ByteFactory.name, in_bytes),
        BackendCandidate(NibbleFactory.name, nibbles),
        what="quantize",
        field="quantize",
        requested=requested,
    ).made
    return made


def fast_pairs(device: torch.device) -> PairFactory | None:
    """Our products of bfloat16, if they are right here and not slower than torch's of float32."""
    if device.type != "cpu":
        return None
    try:
        made = PairFactory()
        _agreeing(made, torch.bfloat16)
    except (OSError, Unsuited):
        return None
    return None if made.isa == ISAS[4] else made


def alongside_stored(device: torch.device) -> PairFactory | None:
    """How a model holds what is no integer if its checkpoint's integers are multiplied as they are stored. None: not
    here; the kernels are missing, or slower than products of floats."""
    try:
        if made := fast_pairs(device):
            for kind in (ByteFactory, NibbleFactory):
                _agreeing(kind(), torch.bfloat16, 0.02)
    except Unsuited:
        return None
    return made


def _agreeing(factory: LinearFactory, dtype: torch.dtype, tolerance: float | None = None) -> LinearFactory:
    """``factory``, if a small product of it is right. ``tolerance``: of its root mean square error, relative."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-8, 8, (88, 128), generator=generator).to(dtype)
    weight[:, ::32], weight[:, 1::32] = -8, 7  # so that 4 bits hold them as they are
    bias = torch.randn(88, generator=generator).to(dtype)
    product = factory(weight, bias)
    for rows in (1, 7):
        x = torch.randn((rows, 128), generator=generator).to(dtype)
        expected = F.linear(x.double(), weight.double(), bias.double())
        error = (product(x).double() - expected).norm() / expected.norm()
        if not error < (tolerance or 2 * torch.finfo(dtype).eps):
            raise Unsuited("its product disagrees with F.linear")
    return factory
