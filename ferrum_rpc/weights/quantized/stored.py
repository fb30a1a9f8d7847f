"""The stored tensors of a quantized checkpoint, and which of them are parts of a matrix.

A scheme selects parts by name; their dtypes and shapes are checked here, from headers alone. A tensor that no scheme
selects keeps its own entry, so that a part without its matrix is found when tensors are compared with the model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Final

import torch
from torch import Tensor

from ferrum_rpc.errors import InvalidRequest, NotSupported
from ferrum_rpc.models.stored_integers import IntegerFormat
from ferrum_rpc.weights.entries import AsIntegers, Decode, Encoding, TensorEntry
from ferrum_rpc.weights.safetensors_file import MappedFile

FLOATS: Final = (torch.float32, torch.bfloat16, torch.float16)
"""Types of scales."""

MAX_SMALL: Final = 4096
"""Bytes of a tensor that is read with the headers."""


class QuantizedTensors:
    """``dtype``: the type of most unquantized numbers, else bfloat16."""

    def __init__(self, entries: dict[str, TensorEntry]) -> None:
        self._entries = entries
        self._made: dict[str, tuple[str, TensorEntry]] = {}
        self._used: set[str] = set()
        sizes = {torch.bfloat16: 0}
        for entry in entries.values():
            if entry.dtype in FLOATS:
                sizes[entry.dtype] = sizes.get(entry.dtype, 0) + entry.nbytes * (len(entry.shape) > 1)
        self.dtype = max(sizes, key=sizes.__getitem__)

    def modules(self, role: str) -> list[str]:
        """Every module with a tensor of that role."""
        return [name.removesuffix(f".{role}") for name in self._entries if name.endswith(f".{role}")]

    def get(self, module: str, role: str) -> TensorEntry | None:
        """The entry of a part, or None."""
        return self._entries.get(f"{module}.{role}")

    def part(self, module: str, role: str) -> tuple[str, TensorEntry]:
        """The name and the entry of a part that is there."""
        name = f"{module}.{role}"
        return name, self._entries[name]

    def shape(self, module: str, role: str, dtypes: Collection[torch.dtype]) -> tuple[int, ...]:
        """The shape of a part that must be of one of these dtypes."""
        return self._entry(module, role, dtypes).shape

    def matrix(self, module: str, role: str, dtypes: Collection[torch.dtype]) -> tuple[int, int]:
        """The shape of a part that must be a matrix of one of these dtypes."""
        shape = self.shape(module, role, dtypes)
        if len(shape) != 2 or 0 in shape:
            raise wrong(module, f"{role} must be a matrix, not of shape {[*shape]}")
        return shape[0], shape[1]

    def expect(
        self, module: str, role: str, dtypes: Collection[torch.dtype], shapes: Iterable[tuple[int, ...]]
    ) -> None:
        """Raise unless there is such a part, with one of these dtypes and shapes."""
        entry, expected = self._entry(module, role, dtypes), list(shapes)
        if entry.shape not in expected:
            shown = " or ".join(str([*shape]) for shape in expected)
            raise wrong(module, f"{role} has the shape {[*entry.shape]}, expected {shown}")

    def small(self, module: str, role: str) -> Tensor:
        """The values of a part of a few bytes."""
        name = f"{module}.{role}"
        entry = self._entries[name]
        if entry.nbytes > MAX_SMALL:
            raise wrong(module, f"{role} has {entry.nbytes} bytes, expected {MAX_SMALL} at most")
        return MappedFile(entry.file).tensor(name, entry).clone()

    def make(
        self,
        module: str,
        parts: Collection[str],
        shape: tuple[int, ...],
        decode: Decode,
        multiple: int = 1,
        *,
        name: str = "weight",
        form: IntegerFormat | None = None,
        integers: AsIntegers | None = None,
        expert: Callable[[int], Encoding] | None = None,
    ) -> None:
        """Make an entry ``name`` of ``module`` from these parts, the first of them the largest. ``form``, ``integers``
        and ``expert``: see `Encoding`."""
        names = {role: f"{module}.{role}" for role in parts}
        taken = {role: (name, self._entries[name]) for role, name in names.items()}
        first, main = next(iter(taken.values()))
        weight = f"{module}.{name}"
        if weight in self._entries and weight not in names.values():
            raise wrong(module, f"{name} must not be there together with its parts")
        encoding = Encoding(taken, decode, multiple, form=form, integers=integers, expert=expert)
        self._made[first] = (weight, TensorEntry(self.dtype, shape, main.file, encoding=encoding))
        self._used.update(names.values())

    def drop(self, roles: Collection[str]) -> None:
        """Leave out every tensor of these roles, which do not describe weights."""
        self._used.update(name for name in self._entries if name.rpartition(".")[2] in roles)

    def decoded(self) -> dict[str, TensorEntry]:
        """The entries that were made and those that no scheme selected, in the order of their bytes."""
        return dict(self._ordered())

    def _ordered(self) -> Iterator[tuple[str, TensorEntry]]:
        for name, entry in self._entries.items():
            if name in self._made:
                yield self._made[name]
            elif name not in self._used:
                yield name, entry

    def _entry(self, module: str, role: str, dtypes: Collection[torch.dtype]) -> TensorEntry:
        entry = self.get(module, role)
        if entry is None:
            raise wrong(module, f"{role} is missing")
        if entry.dtype not in dtypes:
            shown = " or ".join(str(each).removeprefix("torch.") for each in dtypes)
            raise wrong(module, f"{role} is {str(entry.dtype).removeprefix('torch.')}, expected {shown}")
        return entry


def wrong(module: str, what: str) -> InvalidRequest:
    """The error for parts of a module's matrix that do not fit."""
    return InvalidRequest(f"{module[:160]}: {what}", field="model")


def not_supported(field: str, found: object, supported: str) -> NotSupported:
    """The error for a variant of a scheme. ``supported``: the variants that can be read."""
    return NotSupported(f"{field}: {str(found)[:80]!r} is not supported; supported: {supported}", field=field)
