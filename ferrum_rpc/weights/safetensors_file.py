"""One safetensors file, read by the library of that name: its tensors and their values.

The library checks a header (its length, each offset, shape and size, and that the tensors tile the file) before it maps
anything. This module adds a typed error for an invalid file, and bounds the memory independently of the file's size.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ferrum_rpc.weights.entries import TensorEntry, broken, open_regular

DTYPES: Final[dict[str, torch.dtype]] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
MAX_DIMENSIONS: Final = 8
MAX_SIZE: Final = 2**62

HEADER_SIZE: Final = 8
"""Bytes of the header's length."""

MAX_HEADER: Final = 100_000_000
"""Maximum bytes of a header that the library accepts."""

MAPPED_BYTES: Final = 8 << 20
"""Bytes of tensors after which a file is mapped again: the pages that were read count as resident until then."""


def read_entries(file: Path) -> dict[str, TensorEntry]:
    """Every tensor of a safetensors file by name, in the order of their bytes. Raises InvalidRequest that names the
    file and what is wrong."""
    open_regular(file).close()  # the library calls every file that it cannot open missing
    opened = _opened(file)
    return {name: _entry(file, name, opened.get_slice(name)) for name in opened.offset_keys()}


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, "pt")
    except (SafetensorError, OSError) as error:
        raise broken(file, f"broken or truncated: {str(error)[:200]!r}") from None


def _entry(file: Path, name: str, tensor: Any) -> TensorEntry:
    dtype, shape = DTYPES.get(tensor.get_dtype()), tuple(tensor.get_shape())
    if dtype is None:
        raise broken(file, f"tensor {name[:120]!r}: unknown dtype {tensor.get_dtype()!r}")
    if len(shape) > MAX_DIMENSIONS or any(size > MAX_SIZE for size in shape):  # torch knows sizes of 63 bits
        raise broken(file, f"tensor {name[:120]!r}: bad shape")
    return TensorEntry(dtype, shape, file)


class MappedFile:
    """Tensors of one mapped file. May be used by any thread.

    Copy a tensor soon: a mapping is dropped with the last of its tensors, so that resident memory does not grow with
    the file. The mapping is private; nothing ever writes to the file.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._lock = Lock()
        self._opened: Any = None
        self._mapped = 0

    def tensor(self, name: str, entry: TensorEntry) -> Tensor:
        """Raises InvalidRequest if the file has changed since its header was read."""
        with self._lock:
            if self._opened is None:
                self._opened = _opened(self._file)
            opened = self._opened
            self._mapped += entry.nbytes
            if self._mapped > MAPPED_BYTES:
                self._opened, self._mapped = None, 0
        try:
            if entry.piece is None:
                tensor: Tensor = opened.get_tensor(name)
            else:
                whole, matrix, first, last, turned = entry.piece
                tensor = opened.get_slice(whole)[matrix, first:last]
                tensor = tensor.mT if turned else tensor
        except SafetensorError as error:
            raise broken(self._file, f"tensor {name[:120]!r} cannot be read: {str(error)[:200]!r}") from None
        if (tensor.dtype, tensor.shape) != (entry.dtype, entry.shape):
            raise broken(self._file, f"tensor {name[:120]!r} changed while it was read")
        if tensor.data_ptr() % entry.dtype.itemsize:  # older writers did not align
            tensor = tensor.contiguous().view(-1).view(torch.uint8).clone().view(entry.dtype).view(entry.shape)
        return tensor


def read(file: Path, entries: Mapping[str, TensorEntry]) -> dict[str, Tensor]:
    """``entries`` of one file, which the library has checked, in memory of their own. Adapters are read by it, while
    steps run: a file that is cut off while it is mapped would end the process, and the library's tensors leave 63 bytes
    each behind (0.8.0). Raises InvalidRequest where the
    file is not as it was when its header was read."""
    found = {}
    with open_regular(file) as handle:
        try:
            size = int.from_bytes(handle.read(HEADER_SIZE), "little")
            header = json.loads(handle.read(min(size, MAX_HEADER)))
            for name, entry in entries.items():
                declared = header[name]
                first, last = declared["data_offsets"]
                if (DTYPES[declared["dtype"]], tuple(declared["shape"]), last - first) != (
                    entry.dtype,
                    entry.shape,
                    entry.nbytes,
                ):
                    raise ValueError("another tensor")
                handle.seek(HEADER_SIZE + size + first)
                content = bytearray(handle.read(entry.nbytes))
                if len(content) != entry.nbytes:
                    raise ValueError("too short")
                found[name] = torch.frombuffer(content, dtype=entry.dtype).view(entry.shape)
        except (ValueError, LookupError, TypeError, RecursionError, OSError):
            raise broken(file, "changed while it was read") from None
    return found
