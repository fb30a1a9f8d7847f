"""The tensors of a checkpoint before any is read: names, shapes, and how stored bytes become numbers.

A quantized matrix is stored as several tensors (integers, scales, zero points). Here it is one entry, under the name
and in the shape of the matrix, with an `Encoding` that decodes the parts a few rows at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

import torch
from torch import Tensor

from ferrum_rpc.errors import InvalidRequest
from ferrum_rpc.models.stored_integers import IntegerFormat, Integers

Decode = Callable[[Mapping[str, Tensor], int, int], Tensor]
"""``decode(parts, first, last)``: rows ``first`` to ``last`` of the matrix, float32 [last - first, width]."""

AsIntegers = Callable[[Mapping[str, Tensor]], Integers | None]
"""The matrix of stored parts as it is multiplied, without its scales. None: its groups are not of equal size."""

CHUNK: Final = 1 << 20
"""Numbers that are decoded at once: temporaries take a few times 4 MiB, however large the matrix is."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor's dtype and shape, and the path of its file. ``offset``: where its bytes begin, in a file that is read
    without a library. With an ``encoding``, ``dtype`` is what the matrix counts as where a dtype to compute in is
    chosen, and ``file`` has its largest part. ``piece``: what it
    is of a larger tensor of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    file: Path
    offset: int | None = None
    encoding: Encoding | None = None
    piece: TensorPiece | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of what is stored."""
        if self.encoding is not None:
            return sum(entry.nbytes for _, entry in self.encoding.parts.values())
        return math.prod(self.shape) * self.dtype.itemsize


class TensorPiece(NamedTuple):
    """Rows ``first`` to ``last`` of the matrix number ``matrix`` of the stored tensor ``name`` [matrices, rows, ..], or
    ``turned``: its rows are the columns of the entry."""

    name: str
    matrix: int
    first: int
    last: int
    turned: bool = False


@dataclass(frozen=True, slots=True)
class Encoding:
    """``parts``: by role, the stored name and the entry of each. Rows are decoded from a multiple of ``multiple`` on.
    ``kind``: what the bytes alone do not determine. ``form`` and ``integers``: of a matrix that our kernel can hold as
    it is stored. ``expert``: of the matrices of all experts, which are multiplied from the right, that of one by its
    number, which is multiplied from the left like all others."""

    parts: dict[str, tuple[str, TensorEntry]]
    decode: Decode
    multiple: int = 1
    kind: str = ""
    form: IntegerFormat | None = None
    integers: AsIntegers | None = None
    expert: Callable[[int], Encoding] | None = None

    def matrix(self, parts: Mapping[str, Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """``dtype`` ``shape``: the complete matrix, each number rounded once."""
        rows, width = shape[0], math.prod(shape[1:])
        made = torch.empty(shape, dtype=dtype)
        step = max(1, CHUNK // (width * self.multiple)) * self.multiple
        for first in range(0, rows, step):
            last = min(first + step, rows)
            made[first:last] = self.decode(parts, first, last).view(last - first, *shape[1:])
        return made


def broken(file: Path, what: str) -> InvalidRequest:
    """The error for an invalid file, by its name without folders."""
    return InvalidRequest(f"{file.name}: {what}", field=file.name)


def forbidden(error: PermissionError) -> InvalidRequest:
    """The error for a file without read permission, as opposed to a missing one, by its complete path."""
    return InvalidRequest(f"{error.filename}: {error.strerror}: this process may not read it", field="model")


def open_regular(file: Path) -> BinaryIO:
    """Open a regular file; opening a FIFO would hang the start. Raises InvalidRequest that names the file."""
    try:
        if not file.is_file():
            raise broken(file, "not a regular file")
        return file.open("rb")
    except PermissionError as error:
        raise forbidden(error) from None
    except OSError as error:
        raise broken(file, f"cannot be opened: {error.strerror}") from None
