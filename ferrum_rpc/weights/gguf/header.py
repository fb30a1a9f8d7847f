"""The header of a GGUF file: its metadata and where its tensors lie. Source: ggml's docs/gguf.md, versions 2 and 3.

The file comes from the internet. Nothing is allocated by a count that it claims; every length is compared with what is
left of the header, which is bounded, and every tensor with the size of the file.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ferrum_rpc.errors import InvalidRequest, NotSupported
from ferrum_rpc.weights.entries import broken, open_regular

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
MAX_HEADER: Final = 64 << 20
"""Maximum bytes of a header. The largest vocabularies with their merges take a quarter of it."""

MAX_TEXT: Final = 1 << 16
MAX_ARRAY: Final = 1 << 13
"""Longer texts and arrays (templates, vocabularies) are skipped; only their length is kept."""

MAX_DIMENSIONS: Final = 4

SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TEXT: Final = 8
ARRAY: Final = 9


@dataclass(frozen=True, slots=True)
class Skipped:
    """An array or a text that was skipped."""

    length: int


Value = int | float | bool | str | list[int | float | bool] | Skipped


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """``shape`` is in the order of torch; ``kind`` ggml's number of the type; ``offset`` from the file's beginning."""

    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True, slots=True)
class Header:
    """``size``: of the file, in bytes."""

    metadata: dict[str, Value]
    tensors: dict[str, TensorInfo]
    size: int


def read_header(file: Path) -> Header:
    """Raises InvalidRequest that names the file and what is wrong with it."""
    with open_regular(file) as handle:
        size = os.fstat(handle.fileno()).st_size
        if size < 24:
            raise broken(file, "too short for a GGUF file")
        with mmap.mmap(handle.fileno(), min(size, MAX_HEADER), access=mmap.ACCESS_READ) as content:
            return _Cursor(file, content).header(size)


class _Cursor:
    """Reads sequentially, within the bounds of the header."""

    def __init__(self, file: Path, content: mmap.mmap) -> None:
        self._file = file
        self._content = content
        self._at = 0

    def header(self, size: int) -> Header:
        if self._take(4) != MAGIC:
            raise self._wrong("not a GGUF file")
        version = self._number("I")
        if version not in VERSIONS:
            big = struct.unpack(">I", struct.pack("<I", version))[0]
            what = f"of a big-endian machine (version {big})" if big in VERSIONS else f"of version {version}"
            raise NotSupported(
                f"{self._file.name}: a GGUF file {what} is not supported; supported: little-endian 2 and 3",
                field="model",
            )
        tensors, pairs = self._number("Q"), self._number("Q")
        metadata: dict[str, Value] = {}
        for _ in range(pairs):  # ends with the header, whatever it claims
            key = self._text()
            if key in metadata:
                raise self._wrong(f"key {key[:120]!r} occurs twice")
            metadata[key] = self._value(self._number("I"))
        found: dict[str, TensorInfo] = {}
        for _ in range(tensors):
            name = self._text()
            if name in found:
                raise self._wrong(f"tensor {name[:120]!r} occurs twice")
            found[name] = self._tensor(name)
        start = self._data_start(metadata)
        placed = {name: TensorInfo(info.shape, info.kind, start + info.offset) for name, info in found.items()}
        return Header(metadata, placed, size)

    def _tensor(self, name: str) -> TensorInfo:
        count = self._number("I")
        if not 1 <= count <= MAX_DIMENSIONS:
            raise self._wrong(f"tensor {name[:120]!r} has {count} dimensions")
        shape = tuple(self._number("Q") for _ in range(count))[::-1]
        if 0 in shape or math.prod(shape) >= 2**62:
            raise self._wrong(f"tensor {name[:120]!r}: bad shape")
        return TensorInfo(shape, self._number("I"), self._number("Q"))

    def _data_start(self, metadata: dict[str, Value]) -> int:
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 8 <= alignment <= 1 << 16 or alignment % 8:
            raise self._wrong(f"general.alignment {str(alignment)[:80]} must be a multiple of 8")
        return -(-self._at // alignment) * alignment

    def _value(self, kind: int) -> Value:
        if kind in SCALARS:
            return self._number(SCALARS[kind])
        if kind == TEXT:
            length = self._number("Q")
            return Skipped(self._skip(length)) if length > MAX_TEXT else self._decoded(length)
        if kind != ARRAY:
            raise self._wrong(f"a value of the unknown type {kind}")
        inner, length = self._number("I"), self._number("Q")
        if inner == TEXT:
            for _ in range(length):
                self._skip(self._number("Q"))
            return Skipped(length)
        if inner not in SCALARS:
            raise self._wrong(f"an array of the type {inner}")
        letter = SCALARS[inner]
        content = self._take(length * struct.calcsize(letter))
        return Skipped(length) if length > MAX_ARRAY else list(struct.unpack(f"<{length}{letter}", content))

    def _number(self, letter: str) -> int:
        size = struct.calcsize(f"<{letter}")
        (value,) = struct.unpack(f"<{letter}", self._take(size))
        return value  # type: ignore[no-any-return]  # what the letter says

    def _text(self) -> str:
        length = self._number("Q")
        if length > MAX_TEXT:
            raise self._wrong(f"a name of {length} bytes")
        return self._decoded(length)

    def _decoded(self, length: int) -> str:
        try:
            return self._take(length).decode("utf-8")
        except UnicodeDecodeError:
            raise self._wrong("a text that is not UTF-8") from None

    def _take(self, length: int) -> bytes:
        begin = self._at
        return self._content[begin : begin + self._skip(length)]

    def _skip(self, length: int) -> int:
        if length > len(self._content) - self._at:
            raise self._wrong(f"truncated, or a header of more than {MAX_HEADER >> 20} MiB")
        self._at += length
        return length

    def _wrong(self, what: str) -> InvalidRequest:
        return broken(self._file, what)
