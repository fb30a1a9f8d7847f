"""Adapters of a decoder: low-rank changes of its products, of many adapters and of none in one forward pass.

A product y = W x of an adapted row becomes y + B (A x): A [rank, in] and B [out, rank] are the adapter's, B with its
scale in it. The fused products of the decoder have one A for all matrices that they are made of; each of these adds to
its own rows of y. y is rounded before the sum and after it, A and B to the model's dtype: as a model computes with its
adapters in addition to its weights, not merged into them.

If ranks share a model, each has the rows of B, or the columns of A, that its part of the product has. What it adds is
then a part of the sum that the ranks compute anyway.

The engine decides which sequences use which adapter. Here adapters are numbers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from ferrum_rpc.errors import InvalidRequest
from ferrum_rpc.models.adapter_config import LowRank
from ferrum_rpc.models.base import Model, StepAdapters
from ferrum_rpc.models.layout import TensorPlacement, parameter_shapes
from ferrum_rpc.sampling.transfer import to_device


class AdapterMatrix(NamedTuple):
    """One matrix of a fused product, as an adapter changes it: the rows ``first .. first + rows`` of the product, and
    the columns ``start .. start + rank`` of A x. Ranks are even."""

    change: LowRank
    first: int
    rows: int
    start: int
    rank: int


class ProductChange(NamedTuple):
    """What an adapter changes of the product with this ``slot`` (`layout.TensorPlacement`), which is [out, in]."""

    slot: int
    size_in: int
    size_out: int
    parts: tuple[AdapterMatrix, ...]

    @property
    def rank(self) -> int:
        """Of all parts together."""
        return self.parts[-1].start + self.parts[-1].rank


class AdaptedProduct(ABC):
    """The tensors of a ``change``."""

    change: ProductChange
    nbytes: int

    @abstractmethod
    def put(self, part: AdapterMatrix, a: Tensor, b: Tensor) -> None:
        """Copy A and the scaled B of a part into place."""


Int64Array = npt.NDArray[np.int64]


class StagedAdapters(ABC):
    """A `StepAdapters` that reads its rows from device memory, to which they can be sent with the other integers of a
    step. Otherwise it sends them itself."""

    address: int | None = None

    @abstractmethod
    def arrays(self, *, recorded: bool) -> Sequence[Int64Array]:
        """What is sent. ``recorded``: for a step that `Loras.reserve` has described, of which these are the beginning;
        the rest must be zero."""

    @abstractmethod
    def bind(self, sections: Sequence[Tensor]) -> StepAdapters:
        """It reads these ``sections``, to which the arrays are sent before it runs."""

    @abstractmethod
    def add(self, slot: int, x: Tensor, y: Tensor) -> None:
        """See `StepAdapters`."""


class Loras(ABC):
    """The adapters of one decoder whose tensors are placed as in ``table``. If ranks share the decoder, ``table``
    describes the whole, and ``here`` this rank's shard."""

    name: str
    rowwise: bool
    """Whether a row of an adapter depends on nothing but itself, bit for bit."""

    def __init__(
        self,
        table: Mapping[str, TensorPlacement],
        dtype: torch.dtype,
        device: torch.device,
        here: Mapping[str, TensorPlacement] | None = None,
    ) -> None:
        here = table if here is None else here
        self._dtype, self._device = dtype, device
        self.modules = modules_of(table)
        self._table, self._here = _adaptable(table), _adaptable(here)
        self._shapes = parameter_shapes(here.values())
        self._slots = 1 + max([each.slot for each in here.values()], default=-1)
        self._adapters: dict[int, list[AdaptedProduct | None]] = {}

    def __len__(self) -> int:
        """The number of adapters."""
        return len(self._adapters)

    def changes(self, adapter: Sequence[LowRank]) -> list[ProductChange]:
        """The products of this shard that an adapter changes, in the order of the layers."""
        products: dict[int, list[AdapterMatrix]] = {}
        for each in adapter:
            if (placement := self._here.get(each.module)) is None:
                continue
            parts = products.setdefault(placement.slot, [])
            start = parts[-1].start + parts[-1].rank if parts else 0
            parts.append(AdapterMatrix(each, placement.first, placement.rows, start, each.rank + each.rank % 2))
        found = []
        for slot, parts in sorted(products.items()):
            size_out, size_in = self._shapes[self._here[parts[0].change.module].parameter]
            found.append(ProductChange(slot, size_in, size_out, tuple(parts)))
        return found

    def pieces(self, adapter: Sequence[LowRank]) -> list[list[LowRank]]:
        """The matrices that an adapter changes, by layers: the same on all ranks, in the same order."""
        ordered = sorted(adapter, key=lambda each: self._table[each.module].slot)
        return [list(group) for _, group in groupby(ordered, key=lambda each: self._table[each.module].layer)]

    def add(self, number: int, changes: Sequence[ProductChange]) -> int:
        """Allocate an adapter, whose matrices `put` fills. Returns its bytes."""
        adapted: list[AdaptedProduct | None] = [None] * self._slots
        for each in self._adapted(changes):
            adapted[each.change.slot] = each
        self._adapters[number] = adapted
        return sum([each.nbytes for each in adapted if each is not None])

    def put(self, number: int, change: LowRank, a: Tensor, b: Tensor) -> None:
        """Copy this shard's part of A [rank, in] and B [out, rank] into place. Raises InvalidRequest if any of their
        numbers is not finite in the model's dtype."""
        scaled = b.to(torch.promote_types(b.dtype, torch.float32)) * change.scale  # rounded once, when stored
        for name, tensor in ((change.a, a), (change.b, scaled)):
            if not tensor.to(self._dtype).isfinite().all():
                raise InvalidRequest(
                    f"{name} holds NaN or infinity, or numbers that the model's type cannot hold", field="adapter"
                )
        if (placement := self._here.get(change.module)) is not None:
            adapted = self._adapters[number][placement.slot]
            assert adapted is not None  # noqa: S101 - `add` has allocated it
            part = next(each for each in adapted.change.parts if each.change == change)
            adapted.put(part, placement.along(1, a), placement.along(0, scaled))

    def drop(self, number: int) -> None:
        """Free an adapter that no later step uses."""
        self._adapters.pop(number, None)

    @abstractmethod
    def nbytes(self, changes: Sequence[ProductChange]) -> int:
        """The bytes that `add` would allocate."""

    @abstractmethod
    def step(self, spans: Sequence[tuple[int, int, int]], tokens: int) -> StepAdapters:
        """The adapters of a step of ``tokens`` rows. ``spans``: those with an adapter, as (its number, first row,
        rows)."""

    def reserve(self, tokens: int) -> StagedAdapters | None:
        """Any step of up to so many tokens with any adapters, which can be recorded before they are known and loaded.
        None: such steps cannot be recorded."""
        return None

    @abstractmethod
    def _adapted(self, changes: Sequence[ProductChange]) -> Sequence[AdaptedProduct]:
        """Allocate them, in their order."""


class AdaptableModel(Model, Protocol):
    """A model that can be computed with adapters."""

    def take_adapters(self, max_rank: int) -> tuple[str, Loras]:
        """Prepare for adapters of ranks up to ``max_rank``: the reason of the choice, and what holds them. Raises
        NotSupported."""


def modules_of(table: Mapping[str, TensorPlacement]) -> dict[str, tuple[int, int]]:
    """The matrices of a ``table`` that can be adapted, by their checkpoint names, with their sizes [out, in]."""
    return {module: (each.shape[0], each.shape[1]) for module, each in _adaptable(table).items()}


def _adaptable(table: Mapping[str, TensorPlacement]) -> dict[str, TensorPlacement]:
    """By the names of their modules."""
    return {name.removesuffix(".weight"): each for name, each in table.items() if each.adaptable}


# --- torch, on any device -------------------------------------------------------------------------------------------


class TorchAdapted(AdaptedProduct):
    """A of all parts [rank, in]; B of all parts, transposed: [rank, out], zero where a part has no rows."""

    def __init__(self, change: ProductChange, dtype: torch.dtype, device: torch.device) -> None:
        self.change = change
        self.a = torch.zeros((change.rank, change.size_in), dtype=dtype, device=device)
        self.b = torch.zeros((change.rank, change.size_out), dtype=dtype, device=device)
        self.nbytes = self.a.nbytes + self.b.nbytes

    def put(self, part: AdapterMatrix, a: Tensor, b: Tensor) -> None:
        change, first, rows, start, _ = part
        self.a[start : start + change.rank].copy_(to_device(a, self.a.device))
        self.b[start : start + change.rank, first : first + rows].copy_(to_device(b, self.b.device).T)


class TorchLoras(Loras):
    """Torch's products, one adapter after the other."""

    name = "torch"
    rowwise = False

    def nbytes(self, changes: Sequence[ProductChange]) -> int:
        return sum(each.rank * (each.size_in + each.size_out) for each in changes) * self._dtype.itemsize

    def _adapted(self, changes: Sequence[ProductChange]) -> Sequence[AdaptedProduct]:
        return [TorchAdapted(each, self._dtype, self._device) for each in changes]

    def step(self, spans: Sequence[tuple[int, int, int]], tokens: int) -> StepAdapters:
        places: dict[int, list[tuple[int, int]]] = {}
        for number, first, count in spans:
            places.setdefault(number, []).append((first, first + count))
        groups: list[tuple[list[AdaptedProduct | None], slice | Tensor]] = []
        for number, ranges in places.items():
            rows: slice | Tensor = slice(*ranges[0])
            if len(ranges) > 1:
                indexes = np.concatenate([np.arange(first, last) for first, last in ranges])
                rows = to_device(torch.from_numpy(indexes), self._device)
            groups.append((self._adapters[number], rows))
        return TorchStep(groups)


class TorchStep:
    """A `StepAdapters`: of each adapter its products and its rows."""

    address = None

    def __init__(self, groups: Sequence[tuple[list[AdaptedProduct | None], slice | Tensor]]) -> None:
        self._groups = groups

    def add(self, slot: int, x: Tensor, y: Tensor) -> None:
        for adapted, rows in self._groups:
            each = adapted[slot]
            if not isinstance(each, TorchAdapted):
                continue
            if isinstance(rows, slice):
                y[rows].addmm_(F.linear(x[rows], each.a), each.b)
            else:
                low = F.linear(x.index_select(0, rows), each.a)
                y.index_copy_(0, rows, torch.addmm(y.index_select(0, rows), low, each.b))
