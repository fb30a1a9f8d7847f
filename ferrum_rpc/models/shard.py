"""The sharding of a decoder: each rank's part of every weight.

Tensor-parallel ranks have some of a layer's heads and some of its MLP's channels each. They multiply the same rows, and
their results are summed after the attention's output and after the MLP (Shoeybi et al., Megatron-LM, 2019), so all have
the same hidden rows. If there are fewer KV heads than ranks, several ranks have the same one. Embedding and head are
vocabulary-parallel. Pipeline stages have whole layers: the first also has the embedding, the last the final norm and
the head.

A rank's `ModelSpec` is a smaller one of the same family, which is all that the kernels and the cache use; the
checkpoint and the reported model are the whole. `layout` has a rank's part of each tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from ferrum_rpc.errors import NotSupported, counted
from ferrum_rpc.models.matrices import Channels
from ferrum_rpc.models.parts.recurrent import Recurrent
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
        """The shard of rank ``number`` of all ranks; those of a stage have consecutive numbers."""
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
        """Its layers, of a model of so many. Earlier stages have no more layers than later ones: the last one has the
        head, but no stage waits for it."""
        return range(count * self.stage // self.stages, count * (self.stage + 1) // self.stages)

    def share(self, channels: Channels) -> tuple[int, int]:
        """The first channel that it has of rows or columns which are cut, and the end. Where there are fewer units than
        ranks, several ranks have the same one."""
        first, count = self.rank * channels.units // self.ranks, max(1, channels.units // self.ranks)
        return first * channels.width, (first + count) * channels.width

    def token_width(self, vocab_size: int) -> int:
        """The tokens of each rank; the last one may have fewer."""
        return -(-vocab_size // (self.ranks * VOCABULARY_STEP)) * VOCABULARY_STEP

    def tokens(self, vocab_size: int) -> tuple[int, int]:
        """Its first token, and the end."""
        each = self.token_width(vocab_size)
        return min(vocab_size, self.rank * each), min(vocab_size, (self.rank + 1) * each)

    def of(self, spec: ModelSpec) -> ModelSpec:
        """The spec of its part. Raises NotSupported if the model cannot be sharded so."""
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
            max_ranks = min(each.heads for each in spec.attention_specs)
            would_do = ", ".join(str(ranks) for ranks in range(1, max_ranks + 1) if not _obstacle(spec, ranks))
            message = f"tensor_parallel {self.ranks}: {obstacle}; of this model it can be {would_do}"
            raise NotSupported(message, field="tensor_parallel")
        if self.stages > (layers := len(spec.layers)):
            why = f"the model has {counted(layers, 'layer')}; of this model it can be {layers} at most"
            raise NotSupported(f"pipeline_parallel {self.stages}: {why}", field="pipeline_parallel")
        for stage in range(self.stages):
            own = replace(self, stage=stage).layers(layers)
            if all(isinstance(spec.layers[each].mixer, Recurrent) for each in own):
                why = f"stage {stage} would have no layer with attention"
                raise NotSupported(f"pipeline_parallel {self.stages}: {why}", field="pipeline_parallel")


WHOLE: Final = Shard()


def _obstacle(spec: ModelSpec, ranks: int) -> str:
    """The reason why so many ranks cannot share each layer; empty if they can."""
    for layer in dict.fromkeys(spec.layers):
        if obstacle := layer.obstacle(ranks):
            return obstacle
    last = Shard(ranks - 1, ranks)
    if last.tokens(spec.vocab_size)[0] >= spec.vocab_size:
        each = f"parts of {last.token_width(spec.vocab_size)} tokens, multiples of {VOCABULARY_STEP}"
        return f"vocab_size {spec.vocab_size} is cut into {each}, and the last rank would have none"
    return ""
