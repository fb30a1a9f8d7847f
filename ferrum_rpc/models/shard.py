"""How a decoder is cut: what one rank of several has of every weight.

Ranks that share a layer have some of its heads and some of its MLP's channels each. They multiply the same rows, and
what they found is summed after the attention's output and after the MLP (Shoeybi et al., Megatron-LM, 2019): the hidden
rows are the same everywhere. Where there are fewer KV heads than ranks, several have the same one. Embedding and head
are cut by tokens. Stages have whole layers: the first has the embedding too, the last the final norm and the head.

A rank's `ModelSpec` is a smaller one of the same family. All that the kernels and the cache see is that; the checkpoint
and what is told of the model are of the whole. `layout` says what a rank has of each tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from ferrum_rpc.errors import NotSupported, counted
from ferrum_rpc.models.matrices import Channels
from ferrum_rpc.models.spec import ModelSpec

VOCABULARY_STEP: Final = 64
"""Parts of the vocabulary are multiples of it, but for the last: whole words of token masks, and of the chunks in which
weights are summed (sample.c)."""


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

    def share(self, channels: Channels) -> tuple[int, int]:
        """The first channel that it has of rows or columns which are cut, and the end. Where there are fewer units than
        ranks, several ranks have the same one."""
        first, count = self.rank * channels.units // self.ranks, max(1, channels.units // self.ranks)
        return first * channels.width, (first + count) * channels.width

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
        layers = self.layers(len(spec.layers))
        first, end = self.tokens(spec.vocab_size)
        return replace(
            spec,
            vocab_size=end - first,
            layers=tuple(layer.share(self.ranks) for layer in spec.layers[layers.start : layers.stop]),
        )

    def _check(self, spec: ModelSpec) -> None:
        if obstacle := _obstacle(spec, self.ranks):
            most = min(layer.mixer.heads for layer in spec.layers)
            would_do = ", ".join(str(ranks) for ranks in range(1, most + 1) if not _obstacle(spec, ranks))
            message = f"tensor_parallel {self.ranks}: {obstacle}; of this model it can be {would_do}"
            raise NotSupported(message, field="tensor_parallel")
        if self.stages > (layers := len(spec.layers)):
            why = f"the model has {counted(layers, 'layer')}; of this model it can be {layers} at most"
            raise NotSupported(f"pipeline_parallel {self.stages}: {why}", field="pipeline_parallel")


WHOLE: Final = Shard()


def _obstacle(spec: ModelSpec, ranks: int) -> str:
    """Why so many ranks cannot share each layer; or nothing."""
    for layer in dict.fromkeys(spec.layers):
        if obstacle := layer.obstacle(ranks):
            return obstacle
    last = Shard(ranks - 1, ranks)
    if last.tokens(spec.vocab_size)[0] >= spec.vocab_size:
        each = f"parts of {last.token_width(spec.vocab_size)} tokens, multiples of {VOCABULARY_STEP}"
        return f"vocab_size {spec.vocab_size} is cut into {each}, and the last rank would have none"
    return ""
