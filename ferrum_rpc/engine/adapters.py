"""Adapters of the runner: from a folder to the device, a layer at a time between steps.

A load is a row of operations: `open` reads headers, compares them with the model and takes the memory, and each `read`
brings the tensors of one layer. So steps go on meanwhile, in a thread or a process of the engine's own alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from ferrum_rpc.core import AdapterFacts
from ferrum_rpc.engine.assembly.loading import READABLE
from ferrum_rpc.errors import ExecutorError, NotSupported, SequencesExhausted, counted
from ferrum_rpc.models.adapter_config import LowRank, read_adapter
from ferrum_rpc.models.lora import Loras
from ferrum_rpc.weights.adapter import AdapterFiles

TAKEN: Final = "ferrum-rpc adapter"


@dataclass(slots=True, eq=False)
class _Loading:
    """An adapter that is being read: what of it is to come, by layers, and the hash of what has come."""

    files: AdapterFiles
    pieces: Iterator[list[LowRank]]
    digest: Any = field(default_factory=sha256)


class Adapters:
    """The adapters of ``loras``, by number, of the folders in ``root``. ``fingerprint``: the model's. They have ranks
    of up to ``max_rank``, and ``max_bytes`` in all."""

    def __init__(self, root: Path, loras: Loras, fingerprint: bytes, max_rank: int, max_bytes: int) -> None:
        self.root, self.loras, self._fingerprint = root, loras, fingerprint
        self._max_rank, self.max_bytes = max_rank, max_bytes
        self._loading: dict[int, _Loading] = {}
        self._bytes: dict[int, int] = {}

    @property
    def held_bytes(self) -> int:
        """Of all adapters that are loaded, or being loaded."""
        return sum(self._bytes.values())

    def open(self, number: int, name: str) -> AdapterFacts:
        """Begin to load the adapter in the folder ``name``. Raises `AdapterUnknown`, `SequencesExhausted` for want of
        memory, and InvalidRequest and NotSupported for files that are not right; then nothing was allocated."""
        files, adapter = _headers(self.root, name, self.loras.modules, self._max_rank)
        changes = self.loras.changes(adapter)
        wanted, held = self.loras.nbytes(changes), self.held_bytes
        if held + wanted > self.max_bytes:
            raise SequencesExhausted(
                f"the adapter takes {wanted} bytes, and {held} of {self.max_bytes} are taken: "
                "unload others, or raise --adapter-memory",
                metadata={"adapter_memory": self.max_bytes, "needed_bytes": wanted, "held_bytes": held},
            )
        pieces = self.loras.pieces(adapter)
        self._bytes[number] = self.loras.add(number, changes)
        self._loading[number] = _Loading(files, iter(pieces))
        return AdapterFacts(max(each.rank for each in adapter), wanted, len(pieces))

    def find(self, name: str) -> None:
        """Raises `AdapterUnknown` where there is no such folder, and what is wrong with its files."""
        AdapterFiles.open(self.root, name)

    def read(self, number: int) -> bytes | None:
        """Read the next layer. When all have come: the fingerprint of the model with the adapter. Raises InvalidRequest
        for numbers that are not finite."""
        loading = self._loading[number]
        piece = next(loading.pieces, None)
        if piece is None:
            del self._loading[number]
            return sha256(TAKEN.encode() + self._fingerprint + loading.digest.digest()).digest()
        tensors = loading.files.tensors(name for each in piece for name in (each.a, each.b))
        for each in piece:
            for name in (each.a, each.b):
                tensor = tensors[name]
                about = f"{name} {tensor.dtype} {[*tensor.shape]} {each.scale!r}"
                loading.digest.update(about.encode())
                loading.digest.update(_bytes(tensor))
            self.loras.put(number, each, tensors[each.a], tensors[each.b])
        return None

    def drop(self, number: int) -> None:
        """It is no more, or never came to be."""
        self._loading.pop(number, None)
        self._bytes.pop(number, None)
        self.loras.drop(number)


def examine(root: Path, modules: Mapping[str, tuple[int, int]], max_rank: int) -> dict[str, str]:
    """What each adapter in the folders of ``root`` is to a model of these ``modules``, by the headers of its files: its
    rank, or why `Adapters.open` refuses it."""
    found = {}
    for folder in sorted(each for each in root.iterdir() if each.is_dir()):
        try:
            _, adapter = _headers(root, folder.name, modules, max_rank)
            found[folder.name] = f"rank {max(each.rank for each in adapter)}, of {counted(len(adapter), 'module')}"
        except ExecutorError as error:
            found[folder.name] = f"refused: {error.message}"
    return found


def _headers(
    root: Path, name: str, modules: Mapping[str, tuple[int, int]], max_rank: int
) -> tuple[AdapterFiles, list[LowRank]]:
    files = AdapterFiles.open(root, name)
    adapter = read_adapter(files.config, {key: each.shape for key, each in files.entries.items()}, modules, max_rank)
    for key, entry in files.entries.items():
        if entry.dtype not in READABLE:
            raise NotSupported(f"the adapter's tensor {key[:120]!r} is of type {entry.dtype}", field="adapter")
    return files, adapter


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data
