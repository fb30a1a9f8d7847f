"""A decoder layer as data: a mixer, an MLP, and the norms around them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal

from ferrum_rpc.models.matrices import Channels, Floats, Matrix, NormWeights
from ferrum_rpc.models.parts.attention import Attention
from ferrum_rpc.models.parts.dense import Dense
from ferrum_rpc.models.parts.experts import Experts
from ferrum_rpc.models.parts.latent import LatentAttention
from ferrum_rpc.models.parts.recurrent import Recurrent


@dataclass(frozen=True, slots=True)
class Norm:
    """How rows are normalized: by their root mean square, or ("layer") by mean and variance. ``bias``: there are biases
    in addition to weights. ``offset``: the checkpoint has the weights minus one."""

    kind: Literal["rms", "layer"] = "rms"
    eps: float = 1e-6
    bias: bool = False
    offset: bool = False

    def weights(self, role: str, name: str, width: int) -> NormWeights:
        """Of rows of ``width``: one row of weights, and one of biases."""
        ends = ("weight", "bias") if self.bias else ("weight",)
        return NormWeights(role, (Channels(1, width),) * len(ends), tuple(f"{name}.{end}" for end in ends))


@dataclass(frozen=True, slots=True)
class NormNames:
    """The checkpoint's names of the norms before and after each half of a layer; None: there is none."""

    before_mixer: str | None = "input_layernorm"
    after_mixer: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """``rope``: which of the model's rotations its heads have; None: none. ``parallel``: mixer and MLP read the same
    row. ``residual``: what is added to the hidden rows is multiplied with it."""

    mixer: Attention | LatentAttention | Recurrent
    mlp: Dense | Experts
    norm: Norm
    norm_names: NormNames
    rope: int | None = 0
    parallel: bool = False
    residual: float = 1.0

    @property
    def plain(self) -> bool:
        """Whether it has attention without gates, and a dense MLP."""
        return isinstance(self.mixer, Attention) and not self.mixer.gated and isinstance(self.mlp, Dense)

    @property
    def in_c(self) -> bool:
        """Whether ``layer.c`` knows its parts."""
        return not isinstance(self.mixer, LatentAttention) and isinstance(self.mlp, Dense)

    def matrices(self) -> tuple[Matrix, ...]:
        """In the order in which a step needs them. The adapters of a matrix are found by its place among those of all
        layers (`layout.TensorPlacement.slot`)."""
        return (*self.mixer.matrices(), *self.mlp.matrices())

    def others(self) -> tuple[Matrix, ...]:
        """Matrices that adapters do not change, so that they need no place among those of all layers."""
        mixing = self.mixer.others() if isinstance(self.mixer, LatentAttention) else ()
        return (*mixing, *self.mlp.others()) if isinstance(self.mlp, Experts) else mixing

    def norms(self) -> tuple[NormWeights, ...]:
        """Those that there are."""
        names = ((role, getattr(self.norm_names, role)) for role in NORMS)
        around = (self.norm.weights(role, name, self.mixer.hidden) for role, name in names if name is not None)
        return (*around, *self.mixer.norms())

    def floats(self) -> tuple[Floats, ...]:
        """What is neither a matrix nor a norm."""
        return (*self.mixer.floats(), *self.mlp.floats()) if isinstance(self.mlp, Experts) else self.mixer.floats()

    def rotated(self) -> tuple[LayerSpec, ...]:
        """The layers whose heads row operations rotate in its place: of latent attention those whose heads are the
        queries, and whose only one is the row that is cached."""
        mixer = self.mixer
        if not isinstance(mixer, LatentAttention):
            return (self,)
        inner = replace(self.norm, eps=mixer.eps)
        return tuple(replace(self, mixer=each, norm=inner) for each in (mixer.queries, mixer.row))

    def share(self, ranks: int) -> LayerSpec:
        """What each of so many ranks has."""
        return replace(self, mixer=self.mixer.share(ranks), mlp=self.mlp.share(ranks))

    def obstacle(self, ranks: int) -> str:
        """Why so many ranks cannot share it; empty if they can."""
        return self.mixer.obstacle(ranks) or self.mlp.obstacle(ranks)


NORMS: Final = ("before_mixer", "after_mixer", "before_mlp", "after_mlp")
"""The fields of `NormNames`, and what the parameters are called."""
