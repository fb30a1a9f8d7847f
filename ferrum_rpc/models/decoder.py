"""The one native decoder: every family of `families` by its `ModelSpec`.

Parameters are plain tensors, fused where the checkpoint has several (q, k, v; gate, up), and filled by `load` one
checkpoint tensor at a time, so that shards stream and memory peaks near one copy of the weights. `fused_ops` computes
what is between the products; `layers` uses both. The decoder does not know sequences, blocks or which rows are sampled:
attention is a callback.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import torch
from torch import Tensor

from ferrum_rpc.core import ModelInfo
from ferrum_rpc.distributed.group import Group
from ferrum_rpc.errors import InvalidRequest
from ferrum_rpc.models.base import Attend, StepInputs
from ferrum_rpc.models.finite import is_finite
from ferrum_rpc.models.four_bits import Nibbles, StoredGroups
from ferrum_rpc.models.fused_ops import FusedOps
from ferrum_rpc.models.fused_ops_choice import select_fused_ops
from ferrum_rpc.models.layers import Layer, NativeLayers, PlainLayers, assemble
from ferrum_rpc.models.layout import TensorPlacement, layout, parameter_count, parameter_shapes
from ferrum_rpc.models.linear import Linear, LinearFactory, PlainLinear
from ferrum_rpc.models.lora import Loras
from ferrum_rpc.models.lora_choice import select_loras
from ferrum_rpc.models.native_linear import NibbleFactory
from ferrum_rpc.models.parts.layer import LayerSpec
from ferrum_rpc.models.rotary import Rotary
from ferrum_rpc.models.shard import WHOLE, Shard
from ferrum_rpc.models.spec import ModelSpec
from ferrum_rpc.models.with_images import adapted_roots
from ferrum_rpc.native import library


class PipelineLinks(NamedTuple):
    """Who of ``group`` sends a stage its rows, and who gets them: ranks of other stages, or None at the ends."""

    group: Group
    before: int | None
    behind: int | None


class ParallelContext(NamedTuple):
    """Which part of a model, the ranks that have the others of its layers, and the stages before and behind it."""

    shard: Shard = WHOLE
    group: Group | None = None
    pipe: PipelineLinks | None = None


SINGLE: Final = ParallelContext()


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """The parts of a decoder whose weights are complete; those that its stage has."""

    embedding: Tensor | None
    layers: PlainLayers
    norm: Tensor | None
    head: Linear | None


class Decoder:
    """A `Model`. ``linear`` says how weight matrices are held (see `models.linear`), ``head`` how that of the head is
    (None: as the others), ``ops`` computes what lies between the products (default: the best of this machine),
    ``parallel`` which part of the model ``spec`` it is. ``held``: how the matrices are held that come in 4 bits
    (`four_bits.held_groups`), and ``linear`` is then a `NibbleFactory`.

    A tied head that is packed keeps a second copy of the embedding: lookups need the plain one.
    """

    waits = False
    sinks = ()
    """No family here has any."""

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        linear: LinearFactory = PlainLinear,
        ops: FusedOps | None = None,
        *,
        head: LinearFactory | None = None,
        parallel: ParallelContext = SINGLE,
        held: Mapping[str, StoredGroups] = {},
    ) -> None:
        shard = parallel.shard
        self.whole = spec
        self.spec = spec = shard.of(spec)
        self.dtype = dtype
        self.device = device
        self.attention_specs = spec.attention_specs
        self._shard = shard
        self._group, self._pipe = parallel.group, parallel.pipe
        self._first_token = shard.tokens(self.whole.vocab_size)[0]
        self._fp32 = torch.promote_types(dtype, torch.float32)
        self._rotary = Rotary(spec.ropes, spec.layers[0].mixer.head_dim, device)
        scale = spec.scales.embedding
        self._embedding_scale = float(torch.tensor(scale).to(dtype)) if spec.scales.rounded else scale
        self._ops = select_fused_ops(spec, dtype, device)[1] if ops is None else ops
        self._linear, self._head_linear = linear, linear if head is None else head
        self._layout = layout(self.whole, shard)
        self._shapes = parameter_shapes(self._layout.values())
        self._missing = set(self._layout)
        self._open = Counter(_module(placement.parameter) for placement in self._layout.values())
        self._held = held
        self._nibbles: dict[str, dict[str, Nibbles]] = {}
        self._parameters: dict[str, Tensor] = {}
        self._linears: dict[str, Linear] = {}
        self._loaded: Loaded | None = None
        self._loras: Loras | None = None

    # --- weights ----------------------------------------------------------------------------------------------------

    def expected_tensors(self) -> dict[str, tuple[int, ...]]:
        return {name: placement.shape for name, placement in self._layout.items()}

    def in_4_bits(self) -> set[str]:
        """Tensors that it takes as `Nibbles`."""
        return {name for name, placement in self._layout.items() if placement.parameter in self._held}

    def load(self, name: str, tensor: Tensor | Nibbles) -> None:
        """Each name once; raises ValueError for another shape, InvalidRequest for numbers that are
        not finite, or do not stay so in the decoder's dtype: they would make answers NaN."""
        self.copy(name, tensor)
        self.settle()

    def copy(self, name: str, tensor: Tensor | Nibbles) -> None:
        """The first half of `load`: after it the tensor is not needed."""
        placement = self._layout[name]
        if tuple(tensor.shape) != placement.shape:
            raise ValueError(f"{name}: shape {tuple(tensor.shape)}, expected {placement.shape}")
        if name not in self._missing:
            raise ValueError(f"{name} is loaded already")
        key = placement.parameter
        if isinstance(tensor, Nibbles):
            if not is_finite(tensor.scales):
                raise InvalidRequest(f"{name} has scales that are NaN or infinite", field="model")
            self._nibbles.setdefault(key, {})[name] = placement.of_nibbles(tensor, self._held[key].size)
        else:
            self._fill(name, placement, tensor)
        self._missing.remove(name)
        self._open[_module(key)] -= 1

    def _fill(self, name: str, placement: TensorPlacement, tensor: Tensor) -> None:
        key = placement.parameter
        if key not in self._parameters:
            dtype = self._fp32 if placement.norm else self.dtype  # a norm's weights are too few to be worth rounding
            self._parameters[key] = torch.empty(self._shapes[key], dtype=dtype, device=self.device)
        rows = self._parameters[key][placement.first : placement.first + placement.rows]
        rows.copy_(placement.of(tensor))
        if not is_finite(rows if rows.dtype == self.dtype else rows.to(self.dtype)):
            kind = str(self.dtype).removeprefix("torch.")
            raise InvalidRequest(f"{name} holds NaN or infinity, or numbers that {kind} cannot hold", field="model")
        if placement.norm and self.spec.norm.offset:
            rows += 1.0

    def settle(self) -> None:
        """The second half: what is complete is packed, which takes as much memory again for a moment."""
        for module in [each for each, tensors in self._open.items() if not tensors]:
            del self._open[module]
            self._seal(module)
        if not self._missing and self._loaded is None:
            self._loaded = self._assemble()

    def _seal(self, module: str) -> None:
        """Once all of its tensors are there, a matrix is handed over and its plain copy dropped."""
        in_4_bits = self._nibbles.pop(f"{module}.weight", {})
        if in_4_bits and f"{module}.weight" not in self._parameters:
            assert isinstance(self._linear, NibbleFactory)  # noqa: S101 - the caller has asked for it
            ordered = sorted(in_4_bits, key=lambda name: self._layout[name].first)
            parts = [in_4_bits[name] for name in ordered]
            numbers, scales, zeros = (torch.cat(each) for each in zip(*parts, strict=True))
            matrix = Nibbles(numbers, scales, zeros if self._held[f"{module}.weight"].zeroed else None)
            self._linears[module] = self._linear.pack(matrix, self._parameters.pop(f"{module}.bias", None))
            return
        for name, part in in_4_bits.items():  # others of this matrix are not
            rows = self._parameters[f"{module}.weight"].narrow(0, self._layout[name].first, part.shape[0])
            rows.copy_(part.floats())
        weight = self._parameters.pop(f"{module}.weight", None)
        if weight is not None:
            made = self._head_linear if module == "head" else self._linear
            self._linears[module] = made(weight, self._parameters.pop(f"{module}.bias", None))
        elif module == "embedding" and self.spec.tied_embeddings and self._shard.last:
            self._linears["head"] = self._head_linear(self._parameters[module], None)
            if not self._shard.first:
                del self._parameters[module]

    def _assemble(self) -> Loaded:
        parameters, linears = self._parameters, self._linears
        made: dict[LayerSpec, FusedOps] = {self.spec.layers[0]: self._ops}
        layers, slot = list[Layer](), 0
        for index, spec in enumerate(self.spec.layers):
            if spec not in made:
                made[spec] = self._ops.of(spec)
            prefix = f"layers.{index}."
            products = tuple(linears[prefix + matrix.role] for matrix in spec.matrices())
            norms = {norm.role: parameters[prefix + norm.role] for norm in spec.norms()}
            layers.append(Layer(spec, made[spec], products, slot, **norms))
            slot += len(products)
        assembled = assemble(layers, self._group)
        return Loaded(parameters.get("embedding"), assembled, parameters.get("norm"), linears.get("head"))

    def take_adapters(self, max_rank: int) -> tuple[str, Loras]:
        whole = replace(self.whole, roots=adapted_roots(self.whole.architecture))
        tables = layout(whole), layout(whole, self._shard)
        reason, self._loras = select_loras(tables[0], self.dtype, self.device, tables[1], max_rank=max_rank)
        return reason, self._loras

    # --- forward ----------------------------------------------------------------------------------------------------

    def forward(self, inputs: StepInputs, attend: Attend | library.AttentionStep) -> Tensor:
        loaded = self._require()
        hidden = self._enter(loaded, inputs)
        delta = loaded.layers.forward(hidden, *self._rotary(inputs.positions), attend, inputs.adapters)
        return self._leave(loaded, hidden, delta)

    @property
    def rowwise(self) -> bool:
        """Only the native products give this."""
        return self.native and (self._loras is None or self._loras.rowwise)

    @property
    def native(self) -> bool:
        return self._loaded is not None and isinstance(self._loaded.layers, NativeLayers)

    def _enter(self, loaded: Loaded, inputs: StepInputs) -> Tensor:
        """Rows for the first layer: of the embedding, or of the stage before."""
        if loaded.embedding is None:
            assert self._pipe is not None and self._pipe.before is not None  # noqa: S101 - a later stage
            hidden = torch.empty((len(inputs.token_ids), self.spec.hidden_size), dtype=self.dtype, device=self.device)
            self._pipe.group.receive(hidden, self._pipe.before)
            return hidden
        if self._group is None:
            hidden = loaded.embedding.index_select(0, inputs.token_ids)
        else:  # a token is one rank's, and 0 the others': their sum is exact
            own = inputs.token_ids - self._first_token
            absent = (own < 0) | (own >= len(loaded.embedding))
            hidden = loaded.embedding.index_select(0, own.masked_fill_(absent, 0))
            hidden.masked_fill_(absent[:, None], 0.0)
            self._group.all_reduce(hidden)
        return hidden if self._embedding_scale == 1.0 else hidden.mul_(self._embedding_scale)

    def _leave(self, loaded: Loaded, hidden: Tensor, delta: Tensor | None) -> Tensor:
        """Behind the last layer: the final norm, or on to the next stage."""
        hidden = self._ops.add_norm(hidden, delta, loaded.norm)
        if self._pipe is not None and self._pipe.behind is not None:
            self._pipe.group.send(hidden, self._pipe.behind)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """The product is computed and rounded in the model's dtype, as transformers does; what follows is float32."""
        logits, scales = self._head.fp32(hidden), self.spec.scales
        if scales.logits != 1.0:
            logits.mul_(scales.logits)
        if scales.logits_cap is not None:
            logits.div_(scales.logits_cap).tanh_().mul_(scales.logits_cap)
        return logits

    def argmax(self, hidden: Tensor) -> Tensor:
        """Rows are written only where they must be: a soft cap, or a scale in float32, may make two logits one."""
        scales = self.spec.scales
        if scales.logits_cap is not None or (scales.logits != 1.0 and self.dtype.itemsize > 2):
            return self.logits(hidden).argmax(dim=-1)
        return self._head.argmax(hidden)

    @property
    def _head(self) -> Linear:
        head = self._require().head
        assert head is not None  # noqa: S101 - only the last stage is asked
        return head

    def _require(self) -> Loaded:
        if self._loaded is None:
            raise RuntimeError(f"{len(self._missing)} weights are not loaded")
        return self._loaded

    # --- facts ------------------------------------------------------------------------------------------------------

    def info(self, name: str) -> ModelInfo:
        spec, attention = self.whole, self.whole.attention_specs[0]
        dtype = str(self.dtype).removeprefix("torch.")
        return ModelInfo(
            name=name,
            architecture=spec.architecture,
            vocab_size=spec.vocab_size,
            max_context=spec.max_context,
            layers=len(spec.layers),
            hidden_size=spec.hidden_size,
            heads=attention.heads,
            kv_heads=attention.kv_heads,
            head_dim=attention.head_dim,
            parameters=parameter_count(spec),
            weight_dtype=dtype,
            kv_dtype=dtype,
            eos_token_ids=spec.eos_token_ids,
            bos_token_id=spec.bos_token_id,
        )


def _module(parameter: str) -> str:
    """The matrix that a parameter belongs to, or the parameter itself."""
    return parameter.removesuffix(".weight").removesuffix(".bias")
