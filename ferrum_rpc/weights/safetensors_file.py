"""One safetensors file, read with suspicion: which tensors it holds and where their bytes are.

The header is parsed here instead of by the library, because a broken file must end in a typed error that says what is
wrong with it, whatever its bytes are: every length, offset, shape and name is checked against the file's real size
before anything is mapped. Format: https://github.com/huggingface/safetensors (8 bytes of header length, little endian;
the header, JSON; the tensors' bytes, without gaps).
"""

from __future__ import annotations

import json
import math
import mmap
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from ferrum_rpc.errors import InvalidRequest

MAX_HEADER_BYTES = 100_000_000
"""The library's own limit."""

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor's dtype, shape and bytes ``start .. end`` within ``file`` (a path)."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    file: Path
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.end - self.start


def broken(file: Path, what: str) -> InvalidRequest:
    """The error that says what is wrong with a file, by its name without folders."""
    return InvalidRequest(f"{file.name}: {what}", field=file.name)


def forbidden(error: PermissionError) -> InvalidRequest:
    """The error that tells what may not be read from what is missing, by its whole path."""
    return InvalidRequest(f"{error.filename}: {error.strerror}: this process may not read it", field="model")


def parse_json(file: Path, content: bytes) -> dict[str, Any]:
    """The JSON object in ``content``. Raises InvalidRequest for anything else, and for a key that occurs twice."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            raise ValueError("a key occurs twice")
        return table

    def no_constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is not JSON")

    try:
        data = json.loads(content.decode("utf-8"), object_pairs_hook=once, parse_constant=no_constant)
    except UnicodeDecodeError:
        raise broken(file, "not UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise broken(file, f"not valid JSON: {str(error)[:120]}") from None
    if not isinstance(data, dict):
        raise broken(file, "not a JSON object")
    return data


def read_entries(file: Path) -> dict[str, TensorEntry]:
    """Every tensor of a safetensors file, by name. Raises InvalidRequest that names the file and what is wrong."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK)  # non-blocking: a FIFO must not hang the start
    except PermissionError as error:
        raise forbidden(error) from None
    except OSError as error:
        raise broken(file, f"cannot be opened: {error.strerror}") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise broken(file, "not a regular file")
        if status.st_size < 8:
            raise broken(file, "too short for a safetensors file")
        length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
        if length > min(MAX_HEADER_BYTES, status.st_size - 8):
            raise broken(file, f"header of {length} bytes in a file of {status.st_size}: truncated or no safetensors")
        header = parse_json(file, os.pread(descriptor, length, 8))
    except OSError as error:
        raise broken(file, f"cannot be read: {error.strerror}") from None
    finally:
        os.close(descriptor)
    header.pop("__metadata__", None)
    base, size = 8 + length, status.st_size - 8 - length
    entries = {name: _entry(file, name, value, base) for name, value in header.items()}
    _check_coverage(file, entries, base, base + size)
    return entries


def _entry(file: Path, name: str, value: object, base: int) -> TensorEntry:
    label = repr(name[:120])
    if not isinstance(value, dict):
        raise broken(file, f"tensor {label}: not a JSON object")
    dtype = DTYPES.get(str(value.get("dtype")))
    if dtype is None:
        raise broken(file, f"tensor {label}: unknown dtype {str(value.get('dtype'))[:40]!r}")
    shape, offsets = _sizes(value.get("shape")), _sizes(value.get("data_offsets"))
    if shape is None or len(shape) > 8:
        raise broken(file, f"tensor {label}: bad shape")
    if offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise broken(file, f"tensor {label}: bad data_offsets")
    if math.prod(shape) * dtype.itemsize != offsets[1] - offsets[0]:
        raise broken(file, f"tensor {label}: {offsets[1] - offsets[0]} bytes do not hold shape {shape} of {dtype}")
    return TensorEntry(dtype, shape, file, base + offsets[0], base + offsets[1])


def _sizes(value: object) -> tuple[int, ...] | None:
    """A list of sizes, or None if it is something else."""
    if isinstance(value, list) and all(type(item) is int and 0 <= item < 2**62 for item in value):
        return tuple(value)
    return None


def _check_coverage(file: Path, entries: dict[str, TensorEntry], base: int, end: int) -> None:
    """The tensors must tile the data: an overlap or a gap means a wrong offset, a short end a truncated file."""
    position = base
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.end > end:
            raise broken(file, f"truncated: tensor {name[:120]!r} ends {entry.end - end} bytes behind the file")
        if entry.start != position:
            raise broken(file, f"tensor {name[:120]!r} leaves a gap or overlaps its neighbour")
        position = entry.end
    if position != end:
        raise broken(file, f"{end - position} bytes behind the last tensor")


def stream(file: Path, entries: dict[str, TensorEntry]) -> Iterator[tuple[str, Tensor]]:
    """``entries`` of one file in the order of their bytes, as tensors that read the mapped file.

    A tensor is meant to be copied before the next is asked for: its pages are then given back, so that what is resident
    does not grow with the file. The mapping is private; nothing ever writes to the file.
    """
    if not any(entry.nbytes for entry in entries.values()):
        yield from ((name, torch.empty(entry.shape, dtype=entry.dtype)) for name, entry in entries.items())
        return
    try:
        with file.open("rb") as handle:
            mapped = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise broken(file, f"cannot be mapped: {error}") from None
    for name, entry in sorted(entries.items(), key=lambda item: item[1].start):
        if entry.end > len(mapped):
            raise broken(file, "became shorter while it was read")
        if not entry.nbytes:
            yield name, torch.empty(entry.shape, dtype=entry.dtype)
            continue
        data = torch.frombuffer(mapped, dtype=torch.uint8, count=entry.nbytes, offset=entry.start)
        if entry.start % entry.dtype.itemsize:
            data = data.clone()  # older writers did not align
        yield name, data.view(entry.dtype).view(entry.shape)
        first = -(-entry.start // mmap.PAGESIZE) * mmap.PAGESIZE
        if hasattr(mapped, "madvise") and entry.end > first:
            mapped.madvise(mmap.MADV_DONTNEED, first, entry.end - first)
