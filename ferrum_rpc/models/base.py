"""The interface between the engine and a model: the native decoder, the identity model, and any of
transformers.

A model turns a step's `StepInputs` into hidden rows, and hidden rows into logits. It calls ``attend`` once per layer,
in order, with that layer's query, key and value. Where K and V are kept and what a row sees of them is not known here.
Of a layer that keeps a state instead, it calls ``recur``. Both count the layers of their kind alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ferrum_rpc.core import AttentionSpec, ModelInfo, RecurrentShape
from ferrum_rpc.models.latent_rows import LatentLifts
from ferrum_rpc.native import library

if TYPE_CHECKING:
    from ferrum_rpc.native.triton_heads import CacheRows

ONE_CALL_TOKENS: Final = 256
"""Layers with states run in one call for at most so many tokens: C keeps its buffers, and for more the time between
layers does not count (8 ms of a step of 32 sequences of Qwen3.5-0.8B, whatever their tokens)."""

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""``attend(layer, query [T, heads, head_dim], key [T, kv_heads, head_dim], value [T, kv_heads, head_dim])`` stores K
and V of the step's tokens and returns the attention output [T, heads, head_dim]. All in the model's dtype."""


Recur = Callable[[int, Tensor, Tensor, Tensor, Tensor], Tensor]
"""``recur(layer, weight [channels, taps], channels [T, channels], log_decay [T, value_heads], beta [T, value_heads])``
advances the states of the step's sequences by its tokens and returns what these read of them [T, value_heads,
value_dim]. ``channels`` and the result are in the model's dtype, the others in float32 or wider."""


class RecurInC(Protocol):
    """In place of `Recur`: what C needs to advance the states of all sequences of a step."""

    def jobs(self) -> npt.NDArray[np.int64]:
        """A ``struct recurrent_job`` (recurrent.h) in each row of [recurrent layers, sequences, 9]."""

    def advanced(self) -> None:
        """C has advanced them, in some layers or in all."""


@dataclass(frozen=True, slots=True, eq=False)
class LatentAttend:
    """An `Attend` over a cache of latents. ``latent(layer, query [T, heads, key_dim], row [T, 1, width], lifts)``
    stores the rows of the step's tokens and returns the attention output [T, heads, value_dim]; ``lifts`` make keys and
    values of rows. A call attends to the rows themselves."""

    latent: Callable[[int, Tensor, Tensor, LatentLifts], Tensor]
    both: Attend

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.both(layer, query, key, value)


@dataclass(frozen=True, slots=True, eq=False)
class CacheAttend:
    """An `Attend` whose model may write K and V itself, if an operation of its own has them: ``rows(layer)`` says
    where, and after that ``stored`` attends. A call writes and attends."""

    rows: Callable[[int], CacheRows]
    stored: Attend
    both: Attend

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.both(layer, query, key, value)


class StepAdapters(Protocol):
    """The adapters of a step, each with its rows."""

    @property
    def address(self) -> int | None:
        """Where a `NativeModel` finds them in C (``struct lora_step`` of lora.h); None: it cannot use them there."""

    def add(self, slot: int, x: Tensor, y: Tensor) -> None:
        """Add to ``y`` [T, out], in place, what the adapters change of the product of ``x`` [T, in] that has this
        ``slot`` (`layout.TensorPlacement`)."""


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """What a forward pass reads of a step's T packed tokens, on the model's device.

    token_ids  int64 [T]
    positions  int64 [T]: each token's position in its sequence
    adapters   of those tokens whose sequences have one; None: none has
    """

    token_ids: Tensor
    positions: Tensor
    adapters: StepAdapters | None = None


class Model(Protocol):
    """A causal language model over packed tokens."""

    @property
    def dtype(self) -> torch.dtype:
        """Element type of weights, hidden rows and the KV cache."""

    @property
    def device(self) -> torch.device:
        """Where it runs."""

    @property
    def attention_specs(self) -> tuple[AttentionSpec, ...]:
        """One per layer with attention."""

    @property
    def sinks(self) -> Sequence[Tensor | None]:
        """For every layer its heads' sinks [heads], or None where its spec has none; empty where none has any."""

    @property
    def rowwise(self) -> bool:
        """Whether, attention aside, a row depends on nothing but itself, bit for bit: not on how many there are."""

    @property
    def native(self) -> bool:
        """Whether it is a `NativeModel` that runs its layers in C with the weights that it was given."""

    @property
    def waits(self) -> bool:
        """Whether its layers may wait for the device, so that a step cannot be recorded."""

    def info(self, name: str) -> ModelInfo:
        """What a scheduler must know of the model, under the operator's ``name``."""

    def forward(self, inputs: StepInputs, attend: Attend) -> Tensor:
        """Hidden rows [T, hidden] after the final norm."""

    def argmax(self, hidden: Tensor) -> Tensor:
        """int64 [R]: of each row of `logits` the token of its largest element, the first of several."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits float32 [R, vocab] of hidden rows [R, hidden]; where ranks share the head, those of its own tokens, as
        `argmax` is that of these."""


class RecurrentModel(Model, Protocol):
    """A model that may have recurrent layers."""

    @property
    def recurrent_shapes(self) -> tuple[RecurrentShape, ...]:
        """One per recurrent layer, all the same."""

    def forward(self, inputs: StepInputs, attend: Attend, recur: Recur | None = None) -> Tensor:
        """``recur`` must be given if there are recurrent layers."""


class NativeModel(Model, Protocol):
    """A model that may be able to run its layers in C, attention and recurrence included."""

    def forward(
        self, inputs: StepInputs, attend: Attend | library.AttentionStep, recur: Recur | RecurInC | None = None
    ) -> Tensor:
        """Both may be in C where it is `native`: then a step is one call, with the same bits."""
