"""The tensors of a checkpoint, one after the other: as stored, or decoded from stored parts."""

from __future__ import annotations

from pathlib import Path
from threading import Lock

import torch
from torch import Tensor

from ferrum_rpc.models.stored_integers import Integers
from ferrum_rpc.weights.entries import Encoding, TensorEntry
from ferrum_rpc.weights.gguf.blocks import mapped
from ferrum_rpc.weights.safetensors_file import MappedFile


class Reader:
    """What it has read of each file stays mapped up to a bound; see `MappedFile`. Any thread may ask."""

    def __init__(self) -> None:
        self._files: dict[Path, MappedFile] = {}
        self._lock = Lock()

    def read(self, name: str, entry: TensorEntry, dtype: torch.dtype = torch.float32) -> Tensor:
        """A tensor: a stored one reads the mapped file, a quantized one is decoded to a new tensor in ``dtype``."""
        if entry.encoding is None:
            return mapped(entry) if entry.offset is not None else self._file(entry.file).tensor(name, entry)
        return entry.encoding.matrix(self._parts(entry.encoding), entry.shape, dtype)

    def integers(self, entry: TensorEntry) -> Integers | None:
        """A matrix of small integers as it is stored. None: it must be decoded."""
        encoding = entry.encoding
        if encoding is None or encoding.integers is None or encoding.form is None:
            return None
        made = encoding.integers(self._parts(encoding))
        if made is not None and made.order is not None and not encoding.form.ordered:
            return None  # its configuration says that no index orders the columns: nothing expects one
        return made

    def _parts(self, encoding: Encoding) -> dict[str, Tensor]:
        return {role: self.read(*part) for role, part in encoding.parts.items()}

    def _file(self, file: Path) -> MappedFile:
        with self._lock:
            if file not in self._files:
                self._files[file] = MappedFile(file)
            return self._files[file]
