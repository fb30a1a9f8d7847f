"""A model before it is loaded: its facts, its memory, and how to load it.

There is one `ModelSource` for each kind of model: `IdentitySource` and `DecoderCheckpoint` here, and `HfCheckpoint` in
`hf_source`. `choose` makes it. No other code depends on the kind.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor

from ferrum_rpc.attention.recurrent_scratch import recurrence_bytes
from ferrum_rpc.config import IDENTITY
from ferrum_rpc.core import AttentionSpec, RecurrentShape
from ferrum_rpc.engine.assembly.loading import Progress, load_model
from ferrum_rpc.engine.compute import Compute
from ferrum_rpc.kv.store import KvStore
from ferrum_rpc.models.base import Model
from ferrum_rpc.models.decoder import ParallelContext
from ferrum_rpc.models.footprint import DecoderBuild, activation_bytes, weight_bytes
from ferrum_rpc.models.identity import IdentityConfig, IdentityModel
from ferrum_rpc.models.layout import LAYERS, layout
from ferrum_rpc.models.lora import modules_of
from ferrum_rpc.models.native_linear import ISAS, QuantizedFactory
from ferrum_rpc.models.parts.experts import Experts
from ferrum_rpc.models.with_images import adapted_roots
from ferrum_rpc.native import library
from ferrum_rpc.weights.checkpoint import Checkpoint

QUANTIZE_NONE: Final = "none"
AS_STORED: Final = "stored"
"""How weights are quantized in memory, besides what was requested."""

REVISION: Final = "scales in float16, one table, mixed bytes, groups of 16, values in bytes"
"""Of what quantized weights are multiplied as: a part of a fingerprint, for keys and values depend on it."""

SAMPLES: Final = 16
SAMPLE_BYTES: Final = 256
"""Of a tensor, in a fingerprint."""

Reasons = list[tuple[str, str]]
"""Choices with their reasons, for the log and for GetInfo."""


class ModelFacts(NamedTuple):
    """``architecture`` as the configuration names it; ``dtype`` of what is computed; ``layers``: the attention layers
    of this rank, ``all_layers`` those of all ranks. ``max_context``: the longest sequence that the model can have.
    ``vocab_size``: that of all ranks. ``modules``: the matrices that adapters can change, by name, with their sizes
    [out, in]. ``sources``: for each layer the one whose keys and values it attends over, itself or an earlier one;
    empty: each layer has its own. ``numbers``: how many weights the checkpoint has; 0: there is none. ``estimated``:
    `ModelSource.activation_bytes` is an estimate. ``recurrent``: the recurrent layers of this rank, ``all_recurrent``
    those of all ranks. ``quantized``: how weights are held that are quantized in memory: int8, int4, or what the
    checkpoint stores (gptq; q4_k,q6_k); none."""

    name: str
    architecture: str
    dtype: torch.dtype
    layers: tuple[AttentionSpec, ...]
    all_layers: tuple[AttentionSpec, ...]
    max_context: int
    vocab_size: int
    modules: Mapping[str, tuple[int, int]]
    sources: tuple[int, ...] = ()
    numbers: int = 0
    estimated: bool = False
    quantized: str = "none"
    recurrent: tuple[RecurrentShape, ...] = ()
    all_recurrent: tuple[RecurrentShape, ...] = ()


class ModelSource(Protocol):
    """One kind of model."""

    def describe(self) -> ModelFacts:
        """Its facts. Reads no weights."""

    def weight_bytes(self) -> int:
        """Bytes of all weights once loaded. Raises InvalidRequest if they cannot be held in this form."""

    def activation_bytes(self, tokens: int, rows: int, attending: int | None) -> int:
        """Bytes of a step of ``tokens`` tokens with logits of ``rows``. ``attending``: bytes that attention allocates
        in a layer in addition to its result; None: the layers call it in C."""

    def load(self, device: torch.device, progress: Progress | None, parallel: ParallelContext) -> tuple[Model, Reasons]:
        """Read the weights; if ranks share the model, the part of ``parallel``."""

    def fingerprint(self) -> bytes:
        """The identity of the model, 32 bytes: executors with equal fingerprints compute the same K and V for the same
        tokens. Moved caches and prefix hashes are valid only for the model with their fingerprint."""

    def check(self, model: Model, compute: Compute, store: KvStore, max_context: int) -> Reasons:
        """Compare the loaded model with its reference over a cache that is not in use yet. Raises NotSupported where
        they differ."""


class IdentitySource(NamedTuple):
    """The identity model, which has no weights."""

    model: IdentityModel

    def describe(self) -> ModelFacts:
        model = self.model
        layers = model.attention_specs
        config = model.config
        return ModelFacts(IDENTITY, IDENTITY, model.dtype, layers, layers, config.max_context, config.vocab_size, {})

    def weight_bytes(self) -> int:
        return 0

    def activation_bytes(self, tokens: int, rows: int, attending: int | None) -> int:
        return 0

    def load(self, device: torch.device, progress: Progress | None, parallel: ParallelContext) -> tuple[Model, Reasons]:
        return self.model, []

    def fingerprint(self) -> bytes:
        return identity_fingerprint(self.model.config)

    def check(self, model: Model, compute: Compute, store: KvStore, max_context: int) -> Reasons:
        return []


@dataclass(frozen=True, slots=True, eq=False)
class DecoderCheckpoint(DecoderBuild):
    """A checkpoint that the native decoder runs."""

    checkpoint: Checkpoint

    def describe(self) -> ModelFacts:
        whole, checkpoint = self.whole, self.checkpoint
        return ModelFacts(
            checkpoint.name,
            whole.architecture,
            self.dtype,
            self.spec.attention_specs,
            whole.attention_specs,
            self.spec.max_context,
            whole.vocab_size,
            modules_of(layout(replace(whole, roots=adapted_roots(whole.architecture)))),
            numbers=checkpoint.numbers,
            estimated=any(isinstance(layer.mlp, Experts) for layer in self.spec.layers),
            quantized=",".join(checkpoint.encodings).lower() if self.quantize == AS_STORED else self.quantize,
            recurrent=self.spec.recurrent_shapes,
            all_recurrent=whole.recurrent_shapes,
        )

    def weight_bytes(self) -> int:
        return weight_bytes(self)

    def activation_bytes(self, tokens: int, rows: int, attending: int | None) -> int:
        shapes = self.spec.recurrent_shapes[:1]
        recurring = max([recurrence_bytes(shape, self.dtype, tokens) for shape in shapes], default=0)
        return activation_bytes(self, tokens, rows, attending, recurring)

    def load(self, device: torch.device, progress: Progress | None, parallel: ParallelContext) -> tuple[Model, Reasons]:
        model = load_model(
            self.checkpoint,
            self.dtype,
            device,
            progress,
            spec=self.whole,
            linear=self.linear,
            head=self.head,
            held=self.held,
            ops=self.ops,
            parallel=parallel,
        )
        if self.quantize == QUANTIZE_NONE:
            return model, []
        names = layout(self.whole, self.shard).values()
        matrices = sum(each.parameter.startswith(LAYERS) and len(each.shape) == 2 for each in names)
        facts = [f"{model.as_stored} of {matrices} matrices of layers as they are stored"] if self.held else []
        if isinstance(self.linear, QuantizedFactory):
            facts = [f"requested, multiplied in {self.linear.isa}", *facts]
            facts.append(f"rounding the weights changed them by {self.linear.error:.2%} (root mean square)")
        else:
            facts.append(f"multiplied in {ISAS[library.load().ferrum_linear_supported(library.NIBBLES)]}")
        if isinstance(self.head, QuantizedFactory) and self.head is not self.linear and self.shard.last:
            facts.append(f"rounding the head's to {self.head.bits} bits by {self.head.error:.2%}")
        return model, [(f"quantize={self.quantize}", "; ".join(facts))]

    def fingerprint(self) -> bytes:
        variant = "long" if any(rope.long for rope in self.spec.ropes) else ""
        quantize = self.quantize if self.quantize == QUANTIZE_NONE else f"{self.quantize}, {REVISION}"
        return checkpoint_fingerprint(self.checkpoint, layout(self.whole), self.dtype, quantize, variant)

    def check(self, model: Model, compute: Compute, store: KvStore, max_context: int) -> Reasons:
        return []


def checkpoint_fingerprint(
    checkpoint: Checkpoint, names: Iterable[str], dtype: torch.dtype, quantize: str, variant: str = ""
) -> bytes:
    """SHA-256 over the configuration, over name, dtype, shape and a sample of the bytes of each of the tensors
    ``names``, and over what is made of them: the dtype that they are computed in, how they are rounded, and which
    ``variant`` of several that one configuration describes.

    A sample is 16 pieces of 256 bytes, spread evenly over the tensor from its first byte to its last; a tensor of up to
    4,096 bytes is taken whole. Of a quantized matrix each stored part is sampled. How tensors are spread over files
    does not matter.
    """
    tensors = {
        name: (str(tensor.dtype), [*tensor.shape], _sample(tensor)) for name, tensor in checkpoint.stored({*names})
    }
    return _digest(checkpoint.config, sorted(tensors.items()), str(dtype), quantize, *([variant] if variant else []))


def identity_fingerprint(config: IdentityConfig) -> bytes:
    """SHA-256 over the configuration of the identity model."""
    return _digest("identity", asdict(config))


def _digest(*parts: Any) -> bytes:
    return sha256(json.dumps(parts, sort_keys=True).encode()).digest()


def _sample(tensor: Tensor) -> str:
    """SHA-256, in hex, of a sample of the tensor's bytes."""
    stored = tensor if tensor.is_contiguous() else tensor.mT  # of experts that are multiplied from the right
    content = stored.reshape(-1).view(torch.uint8)
    last = len(content) - SAMPLE_BYTES
    pieces = [content]
    if len(content) > SAMPLES * SAMPLE_BYTES:
        starts = [last * index // (SAMPLES - 1) for index in range(SAMPLES)]
        pieces = [content[start : start + SAMPLE_BYTES] for start in starts]
    return sha256(b"".join([each.numpy().tobytes() for each in pieces])).hexdigest()
