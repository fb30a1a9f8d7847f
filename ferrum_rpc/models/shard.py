"""How a decoder is cut: what one rank of several has of every weight.

Ranks that share a layer have some of its heads and some of its MLP's channels each. They multiply the same rows, and
what they found is summed after the attention's output and after the MLP (Shoeybi et al., Megatron-LM, 2019): the hidden
rows are the same everywhere. Where there are fewer KV heads than ranks, several have the same one. Embedding and head
are cut by tokens. Stages have whole layers: the first has the embedding too, the last the final norm and the head.

A rank's `ModelSpec` is a smaller one of the same family. All that the kernels and the cache see is that; the checkpoint
and what is told of the model are of the whole.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import torch
from torch import Tensor

from ferrum_rpc.errors import NotSupported, counted
from ferrum_rpc.models.layout import TensorPlacement, layout
from ferrum_rpc.models.spec import ModelSpec

VOCABULARY_STEP: Final = 64
"""Parts of the vocabulary are multiples of it, but for the last: whole words of token masks, and of the chunks in which
weights are summed (sample.c)."""

Ranges = list[tuple[int, int]]


class TensorSlice(NamedTuple):
    """The ``ranges`` of a checkpoint tensor's ``axis`` that a rank has. ``absent``: another rank adds it, and here
    zeros do."""

    axis: int
    ranges: tuple[tuple[int, int], ...]
    absent: bool = False

    def of(self, tensor: Tensor) -> Tensor:
        """The part; a view where it is one range."""
        if self.absent:
            return torch.zeros_like(tensor)
        parts = [tensor.narrow(self.axis, first, end - first) for first, end in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.axis)


class ShardedTensor(NamedTuple):
    """Where a checkpoint tensor of ``shape`` goes on a rank. ``cut``: what it has of it; None: all."""

    shape: tuple[int, ...]
    placement: TensorPlacement
    cut: TensorSlice | None = None


@dataclass(frozen=True, slots=True)
class Shard:
    """``rank`` of the ``ranks`` that share the layers of ``stage``, one of ``stages``."""

    rank: int = 0
    ranks: int = 1
    stage: int = 0
    stages: int = 1

    @classmethod
    def at(cls, number: int, ranks: int, stages: int) -> Shard:
        """Of all ranks together the one with this ``number``: those of a stage stand next to each other."""
        return cls(number % ranks, ranks, number // ranks, stages)

    @property
    def first(self) -> bool:
        """Whether it has the embedding."""
        return self.stage == 0

    @property
    def last(self) -> bool:
        """Whether it has the head."""
        return self.stage == self.stages - 1

    def layers(self, count: int) -> range:
        """Its layers, of a model of so many. Earlier stages have no more than later ones: the last has the head, but
        is not waited for."""
        return range(count * self.stage // self.stages, count * (self.stage + 1) // self.stages)

    def token_width(self, vocab_size: int) -> int:
        """How many tokens each rank has, but for the last, which may have fewer."""
        return -(-vocab_size // (self.ranks * VOCABULARY_STEP)) * VOCABULARY_STEP

    def tokens(self, vocab_size: int) -> tuple[int, int]:
        """The first of its tokens, and the end."""
        each = self.token_width(vocab_size)
        return min(vocab_size, self.rank * each), min(vocab_size, (self.rank + 1) * each)

    def of(self, spec: ModelSpec) -> ModelSpec:
        """The spec of what it has. Raises NotSupported where the model cannot be cut so."""
        if self.ranks == self.stages == 1:
            return spec
        self._check(spec)
        layers = self.layers(spec.layers)
        first, end = self.tokens(spec.vocab_size)
        return replace(
            spec,
            vocab_size=end - first,
            heads=spec.heads // self.ranks,
            kv_heads=max(1, spec.kv_heads // self.ranks),
            intermediate_size=spec.intermediate_size // self.ranks,
            layers=len(layers),
            windows=spec.windows[layers.start : layers.stop],
            layer_ropes=spec.layer_ropes[layers.start : layers.stop],
        )

    def parts(self, spec: ModelSpec) -> dict[str, ShardedTensor]:
        """By checkpoint name, what it has of the model ``spec``."""
        whole = layout(spec)
        if self.ranks == self.stages == 1:
            return {name: ShardedTensor(placement.shape, placement) for name, placement in whole.items()}
        layers, parts = self.layers(spec.layers), dict[str, ShardedTensor]()
        for name, placement in layout(self.of(spec)).items():
            if not self.has(placement.parameter, spec):
                continue
            source = _of_layer(name, f"{spec.roots.body}layers.", layers.start)
            of_whole = whole[source]
            parts[source] = ShardedTensor(of_whole.shape, placement, self._cut(spec, of_whole))
        return parts

    def _check(self, spec: ModelSpec) -> None:
        if obstacle := _obstacle(spec, self.ranks):
            would_do = ", ".join(str(ranks) for ranks in range(1, spec.heads + 1) if not _obstacle(spec, ranks))
            message = f"tensor_parallel {self.ranks}: {obstacle}; of this model it can be {would_do}"
            raise NotSupported(message, field="tensor_parallel")
        if self.stages > spec.layers:
            why = f"the model has {counted(spec.layers, 'layer')}; of this model it can be {spec.layers} at most"
            raise NotSupported(f"pipeline_parallel {self.stages}: {why}", field="pipeline_parallel")

    def has(self, parameter: str, spec: ModelSpec) -> bool:
        """Whether it reads a parameter of the model of ``spec``; a tied head is made of the embedding."""
        if parameter == "embedding":
            return self.first or (self.last and spec.tied_embeddings)
        return self.last or parameter.startswith("layers.")

    def _cut(self, spec: ModelSpec, source: TensorPlacement) -> TensorSlice | None:
        """Of a tensor of the whole model."""
        if self.ranks == 1:
            return None
        parameter = source.parameter
        role = parameter.removeprefix("layers.").partition(".")[2] if parameter.startswith("layers.") else parameter
        query, key, inner = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.intermediate_size
        kv_head = self.rank * spec.kv_heads // self.ranks
        first, end = kv_head * spec.head_dim, (kv_head + max(1, spec.kv_heads // self.ranks)) * spec.head_dim
        match role:
            case "output.bias" | "down.bias":
                return TensorSlice(0, (), absent=True) if self.rank else None
            case "embedding" | "head.weight":
                return TensorSlice(0, (self.tokens(spec.vocab_size),))
            case "output.weight":
                return TensorSlice(1, (self._share(query),))
            case "down.weight":
                return TensorSlice(1, (self._share(inner),))
            case "qkv.weight" | "qkv.bias":
                rows = [self._share(query), (query + first, query + end), (query + key + first, query + key + end)]
                return _within(source, rows)
            case "qk_norm" if not source.spread:
                return TensorSlice(0, (self._share(query) if source.first == 0 else (first, end),))
            case "gate_up.weight" | "gate_up.bias":
                first, end = self._share(inner)
                return _within(source, [(first, end), (inner + first, inner + end)] if spec.gated else [(first, end)])
        return None

    def _share(self, size: int) -> tuple[int, int]:
        return self.rank * size // self.ranks, (self.rank + 1) * size // self.ranks


WHOLE: Final = Shard()


def _obstacle(spec: ModelSpec, ranks: int) -> str:
    """Why so many ranks cannot share each layer; or nothing."""
    for name, size in (("num_attention_heads", spec.heads), ("intermediate_size", spec.intermediate_size)):
        if size % ranks:
            return f"{name} {size} is no multiple of it"
    if spec.kv_heads % ranks and ranks % spec.kv_heads:
        return f"num_key_value_heads {spec.kv_heads} is no multiple of it, nor the other way round"
    last = Shard(ranks - 1, ranks)
    if last.tokens(spec.vocab_size)[0] >= spec.vocab_size:
        each = f"parts of {last.token_width(spec.vocab_size)} tokens, multiples of {VOCABULARY_STEP}"
        return f"vocab_size {spec.vocab_size} is cut into {each}, and the last rank would have none"
    return ""


def _within(source: TensorPlacement, rows: Ranges) -> TensorSlice:
    """Those of a fused parameter's ``rows`` that a tensor of it has, as rows of that tensor."""
    low, high = source.first, source.first + source.rows
    return TensorSlice(
        0, tuple((max(first, low) - low, min(end, high) - low) for first, end in rows if first < high and end > low)
    )


def _of_layer(name: str, prefix: str, first: int) -> str:
    """The name of a tensor in the whole model, of which ``first`` layers come before."""
    if not name.startswith(prefix):
        return name
    layer, _, rest = name.removeprefix(prefix).partition(".")
    return f"{prefix}{int(layer) + first}.{rest}"
