"""A GGUF file, or its parts, as a model: its configuration, and its tensors under Hugging Face's names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from ferrum_rpc.errors import InvalidRequest
from ferrum_rpc.weights.entries import TensorEntry, broken
from ferrum_rpc.weights.gguf.architectures import EACH, Architecture
from ferrum_rpc.weights.gguf.blocks import mapped, stored_bytes, tensor_entry
from ferrum_rpc.weights.gguf.changes import change
from ferrum_rpc.weights.gguf.header import Header, TensorInfo, read_header
from ferrum_rpc.weights.gguf.metadata import FACTORS, Factors, architecture, config, hugging_face_name

MAX_FACTORS: Final = 1 << 16


def read_model(files: Sequence[Path]) -> tuple[dict[str, Any], dict[str, TensorEntry]]:
    """``(config, entries)`` of a file, or of all parts of one in their order. Raises InvalidRequest or NotSupported,
    which say what is wrong with it."""
    headers = [read_header(file) for file in files]
    _check_parts(files, headers)
    first, names = headers[0], [name for each in headers for name in each.tensors]
    if len({*names}) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise broken(files[0], f"tensor {twice[:120]!r} is in two of the parts")
    whole = Header(first.metadata, {name: info for each in headers for name, info in each.tensors.items()}, first.size)
    known, factors = architecture(whole), _factors(files, headers)
    try:
        read = config(whole, factors)
    except InvalidRequest as error:
        raise broken(files[0], error.message) from None
    entries: dict[str, TensorEntry] = {}
    for file, header in zip(files, headers, strict=True):
        added = _entries(file, header, known, read)
        if both := entries.keys() & added.keys():
            raise broken(file, f"tensor {min(both)[:120]!r} is there twice")
        entries |= added
    return read, entries


def _check_parts(files: Sequence[Path], headers: Sequence[Header]) -> None:
    """Raise unless these are all parts of one file, in their order."""
    count = headers[0].metadata.get("split.count", 0)
    if len(files) == 1:
        if count not in (0, 1):
            raise broken(files[0], f"is one of {str(count)[:40]} parts by split.count; they are found by their names")
        return
    for index, (file, header) in enumerate(zip(files, headers, strict=True)):
        declared = [header.metadata.get(key) for key in ("split.no", "split.count")]
        if declared != [index, len(files)]:
            said = f"split.no {str(declared[0])[:40]} and split.count {str(declared[1])[:40]}"
            raise broken(file, f"{said} are not those of part {index + 1} of {len(files)}")
    claimed, tensors = headers[0].metadata.get("split.tensors.count"), sum(len(header.tensors) for header in headers)
    if claimed != tensors:
        raise broken(files[0], f"split.tensors.count is {str(claimed)[:40]}, and the parts have {tensors}")


def _factors(files: Sequence[Path], headers: Sequence[Header]) -> Factors:
    found = {}
    for file, header in zip(files, headers, strict=True):
        for name in FACTORS:
            if name in header.tensors:
                entry = tensor_entry(header, file, name, header.tensors[name])
                if entry.dtype != torch.float32 or entry.encoding is not None or entry.nbytes > 4 * MAX_FACTORS:
                    raise broken(file, f"{name} must be a list of float32")
                found[name] = mapped(entry).flatten().clone().numpy()
    return found


def _entries(file: Path, header: Header, known: Architecture, read: dict[str, Any]) -> dict[str, TensorEntry]:
    entries: dict[str, TensorEntry] = {}
    for name, whole in sorted(header.tensors.items(), key=lambda each: each[1].offset):
        for to, info in _matrices(file, name, whole, hugging_face_name(name, known, read["num_hidden_layers"]), read):
            if to in entries:
                raise broken(file, f"tensor {name[:120]!r} is there twice")
            try:
                undone = change(to, info.shape, known, read)
            except InvalidRequest as error:
                raise broken(file, f"tensor {name[:120]!r}: {error.message}") from None
            entries[to] = tensor_entry(header, file, name, info, undone)
    _check_overlap(file, entries)
    return {name: entry for name, entry in entries.items() if name not in FACTORS}


def _matrices(
    file: Path, name: str, info: TensorInfo, to: str, read: dict[str, Any]
) -> Iterator[tuple[str, TensorInfo]]:
    """What a tensor holds, under Hugging Face's name ``to``: itself, or a matrix or bias of each expert."""
    if EACH not in to or to == name:  # another tensor with a star
        yield to, info
        return
    count, *shape = info.shape
    if count != read["num_experts"] or not shape:
        raise broken(file, f"tensor {name[:120]!r}: {[*info.shape]} for {read['num_experts']} experts")
    size = stored_bytes(file, name, info) // count
    for expert in range(count):
        yield to.replace(EACH, str(expert)), TensorInfo(tuple(shape), info.kind, info.offset + expert * size)


def _check_overlap(file: Path, entries: dict[str, TensorEntry]) -> None:
    """Raise if tensors overlap."""
    last, before = 0, ""
    for name, entry in entries.items():
        inner = entry if entry.encoding is None else entry.encoding.parts["blocks"][1]
        if (inner.offset or 0) < last:
            raise broken(file, f"tensors {before[:120]!r} and {name[:120]!r} overlap")
        last, before = (inner.offset or 0) + inner.nbytes, name
