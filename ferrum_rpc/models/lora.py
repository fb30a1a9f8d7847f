"""Adapters of a decoder: low-rank changes of its products, of many adapters and of none in one forward pass.

A product y = W x of an adapted row becomes y + U (D x): D [rank, in] and U [out, rank] are the adapter's, U with its
scale in it. The fused products of the decoder have one D for all matrices that they are made of; each of these adds to
its own rows of y. y is rounded before the sum and after it, U and D to the model's dtype: as a model computes with its
adapters beside its weights, not merged into them.

Of a model that ranks share, each has of U the rows, or of D the columns, that its part of the product has: what it adds
is a part of what ranks sum anyway.

Which sequences use which adapter, and which adapters there are, is decided above; here they have numbers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Final, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ferrum_rpc.errors import InvalidRequest
from ferrum_rpc.models import shard
from ferrum_rpc.models.adapter_config import LowRank
from ferrum_rpc.models.base import Model, StepAdapters
from ferrum_rpc.models.layout import TensorPlacement, half_split

PRODUCTS: Final = ("qkv", "output", "gate_up", "down")
"""The products of a layer, by the names of their parameters."""

QKV, OUTPUT, GATE_UP, DOWN = range(len(PRODUCTS))


class AdapterMatrix(NamedTuple):
    """One matrix of a fused product, as an adapter changes it: the rows ``first .. first + rows`` of the product, and
    the columns ``start .. start + rank`` of D x. Ranks are even."""

    change: LowRank
    first: int
    rows: int
    start: int
    rank: int


class Change(NamedTuple):
    """What an adapter changes of the ``product`` of a ``layer``, which is [out, in]."""

    layer: int
    product: int
    size_in: int
    size_out: int
    parts: tuple[AdapterMatrix, ...]

    @property
    def rank(self) -> int:
        """Of all parts together."""
        return self.parts[-1].start + self.parts[-1].rank


class Adapted(ABC):
    """The tensors of one `Change`."""

    nbytes: int

    @abstractmethod
    def put(self, part: AdapterMatrix, down: Tensor, up: Tensor) -> None:
        """Copy D and the scaled U of a part into place."""


class Loras(ABC):
    """The adapters of one decoder whose parameters are laid out as in ``table``. Of each the changes, by
    ``layer * len(PRODUCTS) + product``. Of one that ranks share: what is here of the tensors of the ``table``, which is
    of the whole, is in ``parts``, with so many ``layers``."""

    name: str
    rowwise: bool
    """Whether a row of an adapter depends on nothing but itself, bit for bit."""

    def __init__(
        self,
        table: Mapping[str, TensorPlacement],
        layers: int,
        dtype: torch.dtype,
        parts: Mapping[str, shard.ShardedTensor] | None = None,
    ) -> None:
        self._layers, self._dtype = layers, dtype
        self._placements: dict[str, TensorPlacement] = {}
        self._parts: dict[str, shard.ShardedTensor] = {}
        self._widths: dict[str, int] = {}
        for name, whole in table.items():
            if not _adaptable(whole):
                continue
            module = name.removesuffix(".weight")
            self._placements[module] = whole
            part = shard.ShardedTensor(whole.shape, whole) if parts is None else parts.get(name)
            if part is not None:
                self._parts[module] = part
                parameter, last = part.placement.parameter, part.placement.first + part.placement.rows
                self._widths[parameter] = max(last, self._widths.get(parameter, 0))
        self._adapters: dict[int, list[Adapted | None]] = {}
        self._places: dict[int, dict[str, tuple[Adapted, AdapterMatrix]]] = {}

    def __len__(self) -> int:
        """Adapters that there are."""
        return len(self._adapters)

    @property
    def modules(self) -> dict[str, tuple[int, int]]:
        """See `modules_of`."""
        return modules_of(self._placements)

    def changes(self, adapter: Sequence[LowRank]) -> list[Change]:
        """What an adapter changes of what is here, product by product in the order of the layers."""
        products: dict[str, list[AdapterMatrix]] = {}
        for each in adapter:
            if each.module not in self._parts:
                continue
            placement = self._parts[each.module].placement
            parts = products.setdefault(placement.parameter, [])
            start = parts[-1].start + parts[-1].rank if parts else 0
            parts.append(AdapterMatrix(each, placement.first, placement.rows, start, each.rank + each.rank % 2))
        found = []
        for parameter, parts in products.items():
            placement = self._parts[parts[0].change.module].placement
            size_in = placement.shape[1]
            found.append(Change(*_placed(placement), size_in, self._widths[parameter], tuple(parts)))
        return sorted(found)

    def pieces(self, adapter: Sequence[LowRank]) -> list[list[LowRank]]:
        """All that an adapter changes, wherever it is, by layers: the same everywhere, and in the same order."""
        ordered = sorted(adapter, key=lambda each: _placed(self._placements[each.module]))
        return [
            list(group) for _, group in groupby(ordered, key=lambda each: _placed(self._placements[each.module])[0])
        ]

    def add(self, number: int, changes: Sequence[Change]) -> int:
        """Make room for an adapter, which is to be `put`. Returns its bytes."""
        adapted: list[Adapted | None] = [None] * (self._layers * len(PRODUCTS))
        places: dict[str, tuple[Adapted, AdapterMatrix]] = {}
        for each, made in zip(changes, self._adapted(changes), strict=True):
            adapted[each.layer * len(PRODUCTS) + each.product] = made
            places.update({part.change.module: (made, part) for part in each.parts})
        self._adapters[number], self._places[number] = adapted, places
        return sum([each.nbytes for each in adapted if each is not None])

    def put(self, number: int, change: LowRank, down: Tensor, up: Tensor) -> None:
        """Copy what is here of D [rank, in] and U [out, rank] into place. Raises InvalidRequest for numbers anywhere
        in them that are not finite, or do not stay so in the model's dtype."""
        scaled = up.to(torch.promote_types(up.dtype, torch.float32)) * change.scale  # rounded once, when stored
        for name, tensor in ((change.down, down), (change.up, scaled)):
            if not tensor.to(self._dtype).isfinite().all():
                raise InvalidRequest(
                    f"{name} holds NaN or infinity, or numbers that the model's type cannot hold", field="adapter"
                )
        if change.module not in self._parts:
            return
        adapted, part = self._places[number][change.module]
        _, placement, cut = self._parts[change.module]
        if cut is not None and cut.axis:
            down = cut.of(down)
        elif cut is not None:
            scaled = cut.of(scaled)
        adapted.put(part, down, half_split(scaled, placement) if placement.turned else scaled)

    def drop(self, number: int) -> None:
        """It is no more; no step uses it."""
        self._adapters.pop(number, None)
        self._places.pop(number, None)

    @abstractmethod
    def nbytes(self, changes: Sequence[Change]) -> int:
        """What `add` would allocate."""

    @abstractmethod
    def step(self, spans: Sequence[tuple[int, int, int]], tokens: int) -> StepAdapters:
        """For a step of so many tokens: ``spans`` are those with an adapter, as (its number, first row, rows)."""

    @abstractmethod
    def _adapted(self, changes: Sequence[Change]) -> Sequence[Adapted]:
        """Room for them, in their order."""


@runtime_checkable
class AdaptableModel(Model, Protocol):
    """A model that can be computed with adapters."""

    def take_adapters(self) -> tuple[str, Loras]:
        """Be ready for them: why as it is, and where they are put. Raises NotSupported."""


def modules_of(table: Mapping[str, TensorPlacement]) -> dict[str, tuple[int, int]]:
    """The matrices of a ``table`` that can be adapted, by their checkpoint names, with their sizes [out, in]."""
    return {
        name.removesuffix(".weight"): (each.shape[0], each.shape[1]) for name, each in table.items() if _adaptable(each)
    }


def _adaptable(placement: TensorPlacement) -> bool:
    return _place(placement) is not None and len(placement.shape) == 2


def _place(placement: TensorPlacement) -> tuple[int, int] | None:
    """Layer and product of a parameter that can be adapted."""
    match placement.parameter.split("."):
        case ["layers", layer, product, "weight"] if product in PRODUCTS:
            return int(layer), PRODUCTS.index(product)
    return None


def _placed(placement: TensorPlacement) -> tuple[int, int]:
    """The same, of one that was found to be."""
    place = _place(placement)
    assert place is not None  # noqa: S101
    return place


# --- torch, on any device -------------------------------------------------------------------------------------------


class TorchAdapted(Adapted):
    """D of all parts [rank, in]; U of all parts, transposed: [rank, out], zero where a part has no rows."""

    def __init__(self, change: Change, dtype: torch.dtype, device: torch.device) -> None:
        self.down = torch.zeros((change.rank, change.size_in), dtype=dtype, device=device)
        self.up = torch.zeros((change.rank, change.size_out), dtype=dtype, device=device)
        self.nbytes = self.down.nbytes + self.up.nbytes

    def put(self, part: AdapterMatrix, down: Tensor, up: Tensor) -> None:
        change, first, rows, start, _ = part
        self.down[start : start + change.rank].copy_(down)
        self.up[start : start + change.rank, first : first + rows].copy_(up.T)


class TorchLoras(Loras):
    """By torch's products, adapter by adapter."""

    name = "torch"
    rowwise = False

    def __init__(
        self,
        table: Mapping[str, TensorPlacement],
        layers: int,
        dtype: torch.dtype,
        device: torch.device,
        parts: Mapping[str, shard.ShardedTensor] | None = None,
    ) -> None:
        super().__init__(table, layers, dtype, parts)
        self._device = device

    def nbytes(self, changes: Sequence[Change]) -> int:
        return sum(each.rank * (each.size_in + each.size_out) for each in changes) * self._dtype.itemsize

    def _adapted(self, changes: Sequence[Change]) -> Sequence[Adapted]:
        return [TorchAdapted(each, self._dtype, self._device) for each in changes]

    def step(self, spans: Sequence[tuple[int, int, int]], tokens: int) -> StepAdapters:
        places: dict[int, list[tuple[int, int]]] = {}
        for number, first, count in spans:
            places.setdefault(number, []).append((first, first + count))
        groups: list[tuple[list[Adapted | None], slice | Tensor]] = []
        for number, ranges in places.items():
            rows: slice | Tensor = slice(*ranges[0])
            if len(ranges) > 1:
                indexes = np.concatenate([np.arange(first, last) for first, last in ranges])
                rows = torch.from_numpy(indexes).to(self._device, non_blocking=True)
            groups.append((self._adapters[number], rows))
        return TorchStep(groups)


class TorchStep:
    """Adapters with their rows. A `StepAdapters`."""

    address = None

    def __init__(self, groups: Sequence[tuple[list[Adapted | None], slice | Tensor]]) -> None:
        self._groups = groups

    def add(self, layer: int, product: int, x: Tensor, y: Tensor) -> None:
        for adapted, rows in self._groups:
            each = adapted[layer * len(PRODUCTS) + product]
            if not isinstance(each, TorchAdapted):
                continue
            if isinstance(rows, slice):
                y[rows].addmm_(F.linear(x[rows], each.down), each.up)
            else:
                low = F.linear(x.index_select(0, rows), each.down)
                y.index_copy_(0, rows, torch.addmm(y.index_select(0, rows), low, each.up))
