"""Where every checkpoint tensor goes: Hugging Face names to fused parameters, of the whole model or of a rank's shard.

The decoder multiplies once where the checkpoint has q, k and v, or gate and up; so a checkpoint tensor is a range of
rows of a parameter. The table is computed from what the layers declare (`matrices`), before anything is allocated: a
checkpoint that does not fit is refused for the price of reading its headers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import count
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from ferrum_rpc.models.matrices import Channels, Cut, Floats, Matrix, NormWeights
from ferrum_rpc.models.shard import WHOLE, Shard
from ferrum_rpc.models.spec import ModelSpec
from ferrum_rpc.models.stored_integers import SUPER_GROUP, IntegerFormat, Integers

Shape = tuple[int, ...]
Ranges = tuple[tuple[int, int], ...]

LAYERS: Final = "layers."
EMBEDDING: Final = "embed_tokens.weight"
"""Below the root of the body."""

EMBEDDED: Final = "embedding"
HEAD: Final = "head.weight"
"""Parameters outside layers."""


class Slice(NamedTuple):
    """The ``ranges`` of an ``axis`` of a tensor. None: another rank has it, and zeros are added here."""

    axis: int
    ranges: Ranges


@dataclass(frozen=True, slots=True)
class TensorPlacement:
    """A checkpoint tensor of ``shape`` becomes the rows of ``parameter`` from ``first`` on, which have the shape
    ``local``: what the ``cut`` takes of it, or None, all. Where one row of a norm serves several heads, it becomes
    each of them. ``unit``: its rows, where a rotation pairs them. ``fp32``: it is held in float32; ``norm``: it is the
    weights of a norm. ``layer`` and ``slot``: of a layer's matrix, and its place among the matrices of all layers that
    are here. ``apart``: see `Matrix`. ``turns``: its rows are units of these widths in turn, and those of one kind are
    side by side here."""

    parameter: str
    shape: Shape
    first: int
    local: Shape
    cut: Slice | None = None
    unit: Channels | None = None
    fp32: bool = False
    norm: bool = False
    adaptable: bool = False
    layer: int = 0
    slot: int = 0
    apart: bool = False
    turns: tuple[int, ...] = ()

    @property
    def rows(self) -> int:
        """How many it fills."""
        return self.local[0]

    def of(self, tensor: Tensor) -> Tensor:
        """What is here of the checkpoint's tensor, as it is stored: broadcast over the rows where one serves all."""
        if self.cut is not None and not self.cut.ranges:
            return torch.zeros_like(tensor)
        part = self.along(0 if self.cut is None else self.cut.axis, tensor)
        return part if part.shape == self.local[-1:] else part.reshape(self.local)

    def of_integers(self, matrix: Integers, group: int) -> Integers:
        """What is here of a matrix of small integers, in groups of ``group`` columns."""
        matrix = matrix.regrouped(group)
        held = {"numbers": 1, "scales": group, "zeros": group, "factors": SUPER_GROUP}
        parts: dict[str, Any] = {
            name: self.along(0, each) for name in held if (each := getattr(matrix, name)) is not None
        }
        if self.cut is not None and self.cut.axis == 1:
            ((first, last),) = self.cut.ranges
            parts = {name: each[:, first // held[name] : last // held[name]] for name, each in parts.items()}
        return matrix._replace(**parts)

    def columns(self) -> list[int]:
        """Where the columns of a matrix begin and end that are here."""
        if self.cut is None or self.cut.axis == 0:
            return [0, self.shape[1]]
        return [bound for each in self.cut.ranges for bound in each]

    def along(self, axis: int, tensor: Tensor) -> Tensor:
        """The rows (``axis`` 0) or columns that are here of a tensor that has those of the checkpoint's. Rows that a
        rotation pairs are reordered: the kernels pair channel i with i + half, so channels 0, 1, 2, 3 .. become 0, 2 ..
        1, 3 .. So are rows that are first here and not there (`Channels.behind`), and those of several kinds that take
        turns."""
        if self.cut is not None and self.cut.axis == axis:
            parts = [tensor.narrow(axis, first, end - first) for first, end in self.cut.ranges]
            tensor = parts[0] if len(parts) == 1 else torch.cat(parts, axis)
        if axis == 0 and self.turns:
            # rows that are stored as columns take four times as long if they are not turned first
            units = tensor.contiguous().view(-1, sum(self.turns), *tensor.shape[1:])
            return torch.cat([each.flatten(0, 1) for each in units.split_with_sizes(self.turns, 1)])
        if axis or self.unit is None or not (self.unit.pairs or self.unit.behind):
            return tensor
        units, first = tensor.view(-1, self.unit.width, *tensor.shape[1:]), self.unit.behind
        last = first + self.unit.pairs
        paired = units[:, first:last:2], units[:, first + 1 : last : 2]
        return torch.cat((*paired, units[:, last:], units[:, :first]), 1).view(tensor.shape)


def layout(spec: ModelSpec, shard: Shard = WHOLE) -> dict[str, TensorPlacement]:
    """By its checkpoint name, every tensor that the decoder needs of the model ``spec``; of a rank's ``shard``, those
    that it reads."""
    table, (low, high) = {}, shard.tokens(spec.vocab_size)
    cut = Slice(0, ((low, high),)) if shard.ranks > 1 else None
    tokens = (spec.vocab_size, spec.hidden_size), 0, (high - low, spec.hidden_size), cut
    if shard.first or (shard.last and spec.tied_embeddings):  # a tied head is made of the embedding
        table[embedding_name(spec)] = TensorPlacement(EMBEDDED, *tokens)
    if shard.last:
        table.update(_norm(spec.norm.weights("norm", f"{spec.roots.body}norm", spec.hidden_size), "", "", shard))
        if not spec.tied_embeddings:
            table[head_name(spec)] = TensorPlacement(HEAD, *tokens)
    slots = count()
    for layer, source in enumerate(shard.layers(len(spec.layers))):
        prefix, checkpoint = f"{LAYERS}{layer}.", f"{spec.roots.body}layers.{source}."
        for norm in spec.layers[source].norms():
            table.update(_norm(norm, prefix, checkpoint, shard))
        for floats in spec.layers[source].floats():
            table[checkpoint + floats.name] = _floats(floats, prefix, shard)
        for matrix in spec.layers[source].matrices():
            table.update(_matrix(matrix, prefix, checkpoint, shard, layer, next(slots)))
        for matrix in spec.layers[source].others():
            table.update(_matrix(matrix, prefix, checkpoint, shard, layer, 0))
    return table


def embedding_name(spec: ModelSpec) -> str:
    """What the checkpoint calls the embedding."""
    return spec.roots.body + EMBEDDING


def head_name(spec: ModelSpec) -> str:
    """What the checkpoint calls a head of its own."""
    return f"{spec.roots.head}weight"


@dataclass(frozen=True, slots=True)
class HeldPart:
    """``rows`` of a fused parameter, which the checkpoint tensors ``names`` fill in this order. ``form``: how our
    kernel holds them as they are stored; None: as the model's other matrices."""

    names: tuple[str, ...]
    rows: int
    form: IntegerFormat | None


Held = Mapping[str, tuple[HeldPart, ...]]
"""By parameter, its parts. A parameter that is not here has none that is held as it is stored."""

NOTHING_HELD: Final[Held] = MappingProxyType({})


def held_parts(placements: Mapping[str, TensorPlacement], stored: Mapping[str, IntegerFormat]) -> Held:
    """The matrices, the embedding among them, that our kernel holds as they are ``stored``. Neighbours of one format
    are one part."""
    found: dict[str, list[HeldPart]] = {}
    for name, placement in sorted(placements.items(), key=lambda each: each[1].first):
        if len(placement.shape) == 1 or placement.apart:
            continue
        form = stored[name].fitting(placement.columns()) if name in stored else None
        if form is not None and form.ordered and placement.cut is not None and placement.cut.axis == 1:
            form = None  # the columns of a rank are not those of whole groups
        parts = found.setdefault(placement.parameter, [])
        if parts and parts[-1].form == form and (form is None or not form.ordered):
            before = parts.pop()
            parts.append(HeldPart((*before.names, name), before.rows + placement.rows, form))
        else:
            parts.append(HeldPart((name,), placement.rows, form))
    return {name: tuple(parts) for name, parts in found.items() if any(part.form is not None for part in parts)}


def parameter_shapes(placements: Iterable[TensorPlacement]) -> dict[str, Shape]:
    """The shape of every parameter that the placements fill."""
    shapes: dict[str, Shape] = {}
    for placement in placements:
        rows, *rest = placement.local
        known = shapes.get(placement.parameter, (0,))
        shapes[placement.parameter] = (max(known[0], placement.first + rows), *rest)
    return shapes


def parameter_count(spec: ModelSpec) -> int:
    """Weights of the model, a tied head counted once."""
    return sum(math.prod(placement.shape) for placement in layout(spec).values())


def _norm(norm: NormWeights, prefix: str, checkpoint: str, shard: Shard) -> Iterator[tuple[str, TensorPlacement]]:
    first = 0
    for name, channels in zip(norm.names, norm.channels, strict=True):
        low, high = shard.share(channels)
        local = (high - low) // channels.width, channels.width
        cut = None if norm.spread or high - low == channels.size else Slice(0, ((low, high),))
        shape = (channels.width if norm.spread else channels.size,)
        yield (
            checkpoint + name,
            TensorPlacement(prefix + norm.role, shape, first, local, cut, channels, fp32=True, norm=True),
        )
        first += local[0]


def _floats(floats: Floats, prefix: str, shard: Shard) -> TensorPlacement:
    parameter, shape = prefix + floats.role, floats.shape
    if shard.ranks == 1 or not floats.rows:
        return TensorPlacement(parameter, shape, 0, shape, fp32=True)
    ranges = _ranges(floats.rows, shard)
    local = sum(last - first for first, last in ranges), *shape[1:]
    return TensorPlacement(parameter, shape, 0, local, Slice(0, ranges), fp32=True)


def _ranges(rows: Iterable[Channels], shard: Shard) -> Ranges:
    """What a rank has of rows of each kind, one kind behind the other."""
    ranges, height = [], 0
    for channels in rows:
        low, high = shard.share(channels)
        ranges.append((height + low, height + high))
        height += channels.size
    return tuple(ranges)


def _in_turn(rows: tuple[Channels, ...]) -> tuple[Channels, ...]:
    """Rows of several kinds whose units take turns, as units of all kinds."""
    return (Channels(rows[0].units, sum(each.width for each in rows)),)


def _matrix(  # noqa: PLR0917
    matrix: Matrix, prefix: str, checkpoint: str, shard: Shard, layer: int, slot: int
) -> Iterator[tuple[str, TensorPlacement]]:
    by_rows, by_columns = (matrix.cut is cut and shard.ranks > 1 for cut in (Cut.ROWS, Cut.COLUMNS))
    width, first = matrix.columns.size, 0
    columns = shard.share(matrix.columns) if by_columns else (0, width)
    for name, held in matrix.modules():
        height = sum(channels.size for channels in held)
        ranges = _ranges(_in_turn(held) if matrix.interleaved else held, shard) if by_rows else ((0, height),)
        rows = sum(high - low for low, high in ranges)
        cut = of_bias = Slice(0, ranges) if by_rows else None
        if by_columns:
            cut, of_bias = Slice(1, (columns,)), Slice(0, ()) if shard.rank else None
        local = rows, columns[1] - columns[0]
        unit = held[0] if len(held) == 1 else None
        turns = tuple(channels.width for channels in held) if matrix.interleaved else ()
        place = partial(
            TensorPlacement, first=first, unit=unit, layer=layer, slot=slot, apart=matrix.apart, turns=turns
        )
        parameter, module = prefix + matrix.role, checkpoint + name
        yield (
            f"{module}.weight",
            place(f"{parameter}.weight", (height, width), local=local, cut=cut, adaptable=matrix.adaptable),
        )
        if matrix.bias:
            yield f"{module}.bias", place(f"{parameter}.bias", (height,), local=local[:1], cut=of_bias)
        first += rows
