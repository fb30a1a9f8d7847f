"""An adapter's folder on disk, as the PEFT library writes it: its configuration and its tensors.

The rules of a model's folder (`checkpoint`) apply: only safetensors are read, and nothing outside the folder, which is
in a folder that the operator has named. This module does not interpret an adapter's tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from ferrum_rpc.errors import AdapterUnknown, InvalidRequest, NotSupported
from ferrum_rpc.weights.checkpoint import inside, read_json
from ferrum_rpc.weights.entries import TensorEntry
from ferrum_rpc.weights.safetensors_file import read, read_entries

CONFIG: Final = "adapter_config.json"
TENSORS: Final = "adapter_model.safetensors"
PICKLED: Final = "adapter_model.bin"


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """``config`` is parsed and unchecked; ``entries`` are all tensors by name."""

    config: dict[str, Any]
    entries: dict[str, TensorEntry]

    @classmethod
    def open(cls, root: Path, name: str) -> AdapterFiles:
        """Read the headers of the adapter in the folder ``name`` of ``root``. Raises `AdapterUnknown` if there is no
        such folder, InvalidRequest that names the file and the problem, and NotSupported for pickled weights.
        """
        unknown = AdapterUnknown(f"the executor's adapter folder has no folder {name[:80]!r}", field="name")
        try:
            if name in ("", ".", "..") or not set(name).isdisjoint("/\\\0"):
                raise unknown
            base = root.resolve(strict=True)
            folder = (base / name).resolve(strict=True)
        except (OSError, RuntimeError, ValueError):
            raise unknown from None
        if folder.parent != base:
            raise InvalidRequest("the adapter's folder is a link that leads out of the adapter folder", field="name")
        if not folder.is_dir():
            raise unknown
        config = read_json(folder, CONFIG)
        if config is None:
            raise InvalidRequest(f"{CONFIG} is missing from the adapter's folder", field=CONFIG)
        file = inside(folder, TENSORS)
        if file is None:
            if inside(folder, PICKLED) is not None:
                message = f"{PICKLED} is pickled, and opening it runs code: save the adapter as {TENSORS}"
                raise NotSupported(message, field=PICKLED)
            raise InvalidRequest(f"{TENSORS} is missing from the adapter's folder", field=TENSORS)
        return cls(config, read_entries(file))

    def tensors(self, names: Iterable[str]) -> dict[str, Tensor]:
        """The tensors of these ``names``, in memory of their own."""
        wanted = {name: self.entries[name] for name in names}
        [file] = {entry.file for entry in wanted.values()}
        return read(file, wanted)
