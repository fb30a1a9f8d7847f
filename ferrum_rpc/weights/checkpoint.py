"""A model on disk: its configuration and its tensors, from one file or many shards.

A model is a folder with safetensors, or a GGUF file; other formats run code when they are opened. Nothing outside the
folder is read: shard names come from an untrusted index file, so they must be plain names, and links must stay inside
(the blobs of the Hugging Face cache that a snapshot folder belongs to count as inside). Everything is checked by
reading headers; a checkpoint that opens is complete, and `Checkpoint.tensors` then streams it. A quantized matrix is
one entry, and is dequantized when it is streamed. This module does not know which tensors a model needs.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from ferrum_rpc.errors import InvalidRequest, NotSupported, listed
from ferrum_rpc.models.stored_integers import Integers
from ferrum_rpc.weights.entries import TensorEntry, broken, forbidden, open_regular
from ferrum_rpc.weights.gguf.model import read_model
from ferrum_rpc.weights.quantized import decoded_entries
from ferrum_rpc.weights.reading import Reader
from ferrum_rpc.weights.safetensors_file import read_entries

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
LONGEST_NAME = 255
"""Bytes of a file's name, which file systems allow."""
MAX_JSON_BYTES = 64 << 20
GGUF = ".gguf"
PART = re.compile(r"(.+)-[0-9]{5}-of-([0-9]{5})\.gguf", re.IGNORECASE)
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
TAG = "__float__"
TAGGED = {"Infinity": float("inf"), "-Infinity": float("-inf"), "NaN": float("nan")}
"""The key under which transformers 5 writes numbers that JSON does not have: ``{"__float__": "Infinity"}``."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """``config`` and ``generation_config`` are parsed and unchecked but for how weights are quantized; ``entries`` are
    all tensors by name."""

    name: str
    config: dict[str, Any]
    generation_config: dict[str, Any]
    entries: dict[str, TensorEntry]

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """Read the headers of the model ``path``: a folder, or a GGUF file.

        Raises InvalidRequest that names the file and what is wrong with it, NotSupported for a folder with pickled
        weights only, and for weights that are quantized in a way that is not read.
        """
        try:
            folder = Path(path).resolve(strict=True)
            is_folder = folder.is_dir()
        except PermissionError as error:
            raise forbidden(error) from None
        except (OSError, RuntimeError, ValueError):
            raise InvalidRequest(f"model folder {Path(path).name!r} does not exist", field="model") from None
        if not is_folder:
            if Path(path).suffix.lower() != GGUF:  # a cache of files may link to a name without one
                raise InvalidRequest(f"{folder.name!r} is neither a folder nor a GGUF file", field="model")
            return cls(Path(path).name, *_of_gguf(_parts(Path(path)) or [folder]))
        config = read_json(folder, CONFIG)
        files = _only_gguf(folder)
        if files:
            return cls(_name(folder), *_of_gguf(files))
        if config is None:
            raise InvalidRequest(f"{CONFIG} is missing from model folder {folder.name!r}", field=CONFIG)
        generation = read_json(folder, GENERATION_CONFIG) or {}
        return cls(_name(folder), config, generation, decoded_entries(config, _entries(folder)))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, as they are stored."""
        return sum(entry.nbytes for entry in self.entries.values())

    @property
    def numbers(self) -> int:
        """The same once all tensors are dequantized."""
        return sum(math.prod(entry.shape) for entry in self.entries.values())

    @property
    def dtype(self) -> torch.dtype:
        """The floating-point type of most bytes."""
        sizes: dict[torch.dtype, int] = {}
        for entry in self.entries.values():
            if entry.dtype.is_floating_point:
                sizes[entry.dtype] = sizes.get(entry.dtype, 0) + entry.nbytes
        return max(sizes, key=sizes.__getitem__) if sizes else torch.float32

    @property
    def encodings(self) -> tuple[str, ...]:
        """How its matrices are quantized: of a GGUF file its types, those of most bytes first, else the one
        ``quant_method``. Nothing where none is."""
        sizes: dict[str, int] = {}
        for entry in self.entries.values():
            if entry.encoding is not None and len(entry.shape) > 1:
                kind = entry.encoding.kind or str(self.config["quantization_config"]["quant_method"])
                sizes[kind] = sizes.get(kind, 0) + entry.nbytes
        return tuple(sorted(sizes, key=sizes.__getitem__, reverse=True))

    def weights(
        self, names: Collection[str], dtype: torch.dtype, as_integers: Collection[str]
    ) -> Iterator[tuple[str, Tensor | Integers]]:
        """Like `tensors`, but those of ``as_integers`` as they are stored, where that is possible."""
        for entries in self._files(names):
            reader = Reader()
            for name, entry in entries.items():
                held = reader.integers(entry) if name in as_integers else None
                yield name, reader.read(name, entry, dtype) if held is None else held

    def tensors(
        self, names: Collection[str] | None = None, dtype: torch.dtype = torch.float32
    ) -> Iterator[tuple[str, Tensor]]:
        """Stream ``names`` (None: all), file by file in the order of their bytes: as they are stored, what is quantized
        as numbers in ``dtype``.

        Copy a tensor before asking for the next: it may read the mapped file. Raises KeyError for a name that is
        absent, InvalidRequest for parts that contradict each other.
        """
        for entries in self._files(names):
            reader = Reader()
            for name, entry in entries.items():
                yield name, reader.read(name, entry, dtype)

    def stored(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Stream the stored tensors of ``names``: like `tensors`, but each part of a quantized matrix separately, under
        a name that identifies it."""
        for entries in self._files(names):
            reader = Reader()
            for name, entry in entries.items():
                if entry.encoding is None:
                    yield name, reader.read(name, entry)
                    continue
                for role, (part, stored) in entry.encoding.parts.items():
                    yield f"{name} {entry.encoding.kind} {role}", reader.read(part, stored)

    def _files(self, names: Collection[str] | None) -> Iterator[dict[str, TensorEntry]]:
        """``names`` (None: all) with their entries, file by file."""
        wanted = self.entries.keys() if names is None else set(names)
        if absent := wanted - self.entries.keys():
            raise KeyError(min(absent))
        files: dict[Path, dict[str, TensorEntry]] = {}
        for name, entry in self.entries.items():
            if name in wanted:
                files.setdefault(entry.file, {})[name] = entry
        for file in sorted(files):
            yield files[file]


def _name(folder: Path) -> str:
    """The name of the model: for a snapshot in the Hugging Face cache the repository, not the commit."""
    if folder.parent.name == "snapshots":
        return folder.parent.parent.name.removeprefix("models--").replace("--", "/", 1)
    return folder.name


def _of_gguf(files: list[Path]) -> tuple[dict[str, Any], dict[str, Any], dict[str, TensorEntry]]:
    config, entries = read_model(files)
    return config, {}, entries


def _parts(file: Path) -> list[Path]:
    """The parts of a model, in their order, if ``file`` is one by its name; else none. Raises InvalidRequest if one is
    missing."""
    match = PART.fullmatch(file.name)
    if match is None:
        return []
    stem, count, folder = match[1], int(match[2]), file.parent.resolve()
    really = file.resolve().parent  # of a cache: its links lead to one folder
    parts = []
    for number in range(1, count + 1):  # ends with the first that is missing, whatever the name claims
        name = f"{stem}-{number:05d}-of-{match[2]}{file.suffix}"
        part = inside(folder, name, really)
        if part is None:
            raise InvalidRequest(f"{file.name} is one of {count} parts, and {name} is missing", field="model")
        parts.append(part)
    return parts


def _only_gguf(folder: Path) -> list[Path]:
    """The GGUF file of a folder without safetensors, or its parts; none if there is none. Raises InvalidRequest if
    there are several files."""
    try:
        files = os.listdir(folder)
    except OSError:  # may be entered, but not listed
        return []
    names = sorted(name for name in files if name.lower().endswith(GGUF))
    if not names or SINGLE in files or INDEX in files:
        return []
    parts = _parts(folder / names[0])
    if parts and [part.name for part in parts] == names:
        return parts
    if len(names) > 1:
        shown = f"{names[0]}, {names[1]}{', ...' if len(names) > 2 else ''}"
        raise InvalidRequest(
            f"model folder {folder.name!r} has {len(names)} GGUF files ({shown}): name one of them", field="model"
        )
    file = inside(folder, names[0])
    return parts or ([file] if file is not None else [])


def _entries(folder: Path) -> dict[str, TensorEntry]:
    single = inside(folder, SINGLE)
    if single is not None:
        return read_entries(single)
    index = read_json(folder, INDEX)
    if index is not None:
        return _sharded(folder, index)
    pickled = sorted(file.name for pattern in PICKLED for file in folder.glob(pattern))
    if pickled:
        raise NotSupported(
            f"model folder {folder.name!r} has pickled weights only ({pickled[0]}), and opening those runs code: "
            "convert them once, where you trust them, with from_pretrained and save_pretrained of transformers",
            field="model",
        )
    others = sorted(file.name for file in folder.glob("*.safetensors"))
    other_files = (
        f", only {listed('other safetensors files', others)}: {INDEX} would say what is in each" if others else ""
    )
    raise InvalidRequest(f"model folder {folder.name!r} has neither {SINGLE} nor {INDEX}{other_files}", field="model")


def _sharded(folder: Path, index: dict[str, Any]) -> dict[str, TensorEntry]:
    """Every tensor of every shard that the index names; each must be where the index says, and only there."""
    where = folder / INDEX
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise broken(where, "weight_map is missing or empty")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not _is_plain(shard) or not shard.endswith(".safetensors"):
            raise broken(where, f"tensor {name[:120]!r}: {str(shard)[:120]!r} is not the name of a safetensors file")
    entries: dict[str, TensorEntry] = {}
    for shard in sorted(set(weight_map.values())):
        file = inside(folder, shard)
        if file is None:
            raise broken(where, f"shard {shard[:120]!r} is missing")
        found = read_entries(file)
        twice = sorted(entries.keys() & found.keys())
        if twice:
            raise broken(where, f"tensor {twice[0][:120]!r} is in {entries[twice[0]].file.name} and in {file.name}")
        entries |= found
    for name, shard in weight_map.items():
        if name not in entries:
            raise broken(where, f"tensor {name[:120]!r} is not in {shard[:120]}")
        if entries[name].file.name != shard:
            raise broken(where, f"tensor {name[:120]!r} is in another shard than {shard[:120]}")
    return entries


def _is_plain(name: str) -> bool:
    plain = name.isprintable() and not name.startswith(".") and not set(name) & set('/\\:*?"<>|')
    return plain and 0 < len(name.encode()) <= LONGEST_NAME


def inside(folder: Path, name: str, also: Path | None = None) -> Path | None:
    """The path of a file of the folder, or None if there is none. Raises InvalidRequest for a link to elsewhere but
    ``also``, another folder, or to nothing."""
    try:
        real = (folder / name).resolve(strict=True)
    except PermissionError as error:
        raise forbidden(error) from None
    except (OSError, RuntimeError, ValueError):
        if (folder / name).is_symlink():
            raise broken(folder / name, "is a link that leads nowhere: fetch the model again") from None
        return None
    blobs = folder.parent.parent / "blobs" if folder.parent.name == "snapshots" else folder
    if real.parent not in (folder, blobs, also):
        raise broken(folder / name, "is a link that leads out of its folder")
    return folder / name


def read_json(folder: Path, name: str) -> dict[str, Any] | None:
    """The JSON object in a file of the folder, or None if there is no such file. Raises InvalidRequest."""
    file = inside(folder, name)
    if file is None:
        return None
    try:
        with open_regular(file) as handle:
            content = handle.read(MAX_JSON_BYTES + 1)
    except OSError as error:
        raise broken(file, f"cannot be read: {error.strerror}") from None
    if len(content) > MAX_JSON_BYTES:
        raise broken(file, f"larger than {MAX_JSON_BYTES} bytes")
    return _parse_json(file, content)


def _parse_json(file: Path, content: bytes) -> dict[str, Any]:
    """The JSON object in ``content``, with the numbers that transformers tags. Raises InvalidRequest for anything else,
    and for a key that occurs twice."""

    def once(pairs: list[tuple[str, Any]]) -> Any:
        table = dict(pairs)
        if len(table) != len(pairs):
            raise ValueError("a key occurs twice")
        tagged = table.get(TAG) if len(table) == 1 else None
        return TAGGED.get(tagged, table) if isinstance(tagged, str) else table

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
