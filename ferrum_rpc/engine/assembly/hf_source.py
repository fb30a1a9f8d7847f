"""A model that transformers runs: its facts before its weights are read, and the reading of its weights.

Its own files are read by `weights`, which checks them first; transformers gets tensors, never a path.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ferrum_rpc.engine.assembly.check import check_parity
from ferrum_rpc.engine.assembly.loading import Progress, check_readable, stops_of
from ferrum_rpc.engine.assembly.source import ModelFacts, Reasons, checkpoint_fingerprint
from ferrum_rpc.engine.compute import Compute
from ferrum_rpc.kv.store import KvStore
from ferrum_rpc.models.base import Model
from ferrum_rpc.models.decoder import ParallelContext
from ferrum_rpc.models.hf.describe import HfSpec, describe
from ferrum_rpc.models.hf.model import HfModel, check_fit, load
from ferrum_rpc.weights.checkpoint import Checkpoint
from ferrum_rpc.weights.entries import TensorEntry
from ferrum_rpc.weights.reading import Reader

ROWS = 8
"""Copies of a hidden row that a layer of transformers holds at its peak, with a margin; two more are float32."""


class HfCheckpoint(NamedTuple):
    """A `ModelSource`: a checkpoint that transformers runs. ``longest``: the maximum length that the model supports,
    ``context``: the maximum length that is served."""

    checkpoint: Checkpoint
    spec: HfSpec
    dtype: torch.dtype
    longest: int
    context: int

    def describe(self) -> ModelFacts:
        spec = self.spec
        return ModelFacts(
            self.checkpoint.name,
            spec.architecture,
            self.dtype,
            spec.layers,
            spec.layers,
            self.longest,
            spec.vocab_size,
            spec.modules,
            numbers=self.checkpoint.numbers,
            sources=spec.sources,
            estimated=True,
        )

    def load(self, device: torch.device, progress: Progress | None, parallel: ParallelContext) -> tuple[Model, Reasons]:
        stored = stored_tensors(self.checkpoint, self.dtype, progress)
        return load(self.spec, stored, self.dtype, device, self.context), []

    def fingerprint(self) -> bytes:
        return checkpoint_fingerprint(self.checkpoint, self.checkpoint.entries, self.dtype, "none")

    def check(self, model: Model, compute: Compute, store: KvStore, max_context: int) -> Reasons:
        return [check_parity(cast(HfModel, model), compute, store, max_context)]

    def weight_bytes(self) -> int:
        return self.spec.parameters * self.dtype.itemsize + self.spec.tables_bytes

    def activation_bytes(self, tokens: int, rows: int, attending: int | None) -> int:
        """A conservative estimate: the temporary tensors of transformers are not known."""
        spec, size = self.spec, self.dtype.itemsize
        heads = max((each.heads + 2 * each.kv_heads) * each.head_dim for each in spec.layers)
        experts = getattr(spec.config.get_text_config(decoder=True), "num_experts_per_tok", None) or 1
        token = (ROWS * spec.hidden_size + 2 * heads + 2 * spec.inner_size * experts) * size + 2 * spec.hidden_size * 4
        return tokens * token + (attending or 0) + rows * spec.vocab_size * (2 * size + 4)


def stored_tensors(
    checkpoint: Checkpoint, dtype: torch.dtype, progress: Progress | None = None
) -> dict[str, FileTensor]:
    """All tensors by name, each to be read when transformers asks for it; what is quantized in ``dtype``."""
    count, reader = _Counter(checkpoint.nbytes, progress), Reader()
    return {name: FileTensor(name, entry, reader, dtype, count) for name, entry in checkpoint.entries.items()}


def describe_checkpoint(checkpoint: Checkpoint) -> HfSpec:
    """The description of a checkpoint by transformers, after its headers were checked. Raises what `describe` does."""
    spec = describe(checkpoint.config)
    check_fit(spec, {name: entry.shape for name, entry in checkpoint.entries.items()})
    check_readable(checkpoint, checkpoint.entries)
    return replace(spec, eos_token_ids=stops_of(checkpoint) or spec.eos_token_ids)


class _Counter:
    """Counts the bytes that several threads have read."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._total, self._progress = total, progress
        self._done = 0
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        """Count more bytes."""
        if self._progress is not None:
            with self._lock:
                self._done += count
                self._progress(self._done, self._total)


@dataclass(frozen=True, slots=True, eq=False)
class FileTensor:
    """A tensor in its file; see `models.hf.model.StoredTensor`. ``dtype``: of the model."""

    name: str
    entry: TensorEntry
    reader: Reader
    dtype: torch.dtype
    count: _Counter

    def __getitem__(self, index: Any) -> Tensor:
        tensor = self.reader.read(self.name, self.entry, self.dtype)[index]
        self.count.add(self.entry.nbytes)
        copied = self.entry.dtype != self.dtype and tensor.is_floating_point()  # transformers does, to convert it
        return tensor if copied or self.entry.encoding is not None else tensor.clone()
