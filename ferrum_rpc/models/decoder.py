"""The one native decoder: every family of `families` by its `ModelSpec`.

Parameters are plain tensors, fused where the checkpoint has several (q, k, v; gate, up), and filled by `load` one
checkpoint tensor at a time, so that shards stream and memory peaks near one copy of the weights. What happens between
the products is `fused_ops`; both are put together by `layers`. Sequences, blocks and which
rows are sampled are not known here: attention is a callback.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ferrum_rpc.core import ModelInfo
from ferrum_rpc.errors import InvalidRequest
from ferrum_rpc.models.base import Attend, StepInputs
from ferrum_rpc.models.finite import is_finite
from ferrum_rpc.models.fused_ops import FusedOps
from ferrum_rpc.models.fused_ops_choice import select_fused_ops
from ferrum_rpc.models.layers import Layer, Layers, NativeLayers, put_together
from ferrum_rpc.models.layout import NORMS, half_split, layout, parameter_count, parameter_shapes
from ferrum_rpc.models.linear import Linear, LinearFactory, PlainLinear
from ferrum_rpc.models.lora import Loras
from ferrum_rpc.models.lora_choice import select_loras
from ferrum_rpc.models.rotary import Rotary
from ferrum_rpc.models.spec import ModelSpec
from ferrum_rpc.models.with_images import adapted_roots
from ferrum_rpc.native import library


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """The parts of a decoder whose weights are complete."""

    embedding: Tensor
    layers: Layers
    norm: Tensor
    head: Linear


class Decoder:
    """A `Model`. ``linear`` says how weight matrices are held (see `models.linear`), ``ops`` computes what lies between
    the products (default: the best of this machine).

    A tied head that is packed keeps a second copy of the embedding: lookups need the plain one.
    """

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        linear: LinearFactory = PlainLinear,
        ops: FusedOps | None = None,
    ) -> None:
        self.spec = spec
        self.dtype = dtype
        self.device = device
        self.attention_specs = spec.attention_specs
        self._wide = torch.promote_types(dtype, torch.float32)
        self._rotary = Rotary(spec.ropes, spec.head_dim, device)
        scale = spec.scales.embedding
        self._embedding_scale = float(torch.tensor(scale).to(dtype)) if spec.scales.rounded else scale
        self._ops = select_fused_ops(spec, dtype, device)[1] if ops is None else ops
        self._linear = linear
        self._layout = layout(spec)
        self._shapes = parameter_shapes(self._layout)
        self._missing = set(self._layout)
        self._open = Counter(_module(placement.parameter) for placement in self._layout.values())
        self._parameters: dict[str, Tensor] = {}
        self._linears: dict[str, Linear] = {}
        self._loaded: Loaded | None = None
        self._loras: Loras | None = None

    # --- weights ----------------------------------------------------------------------------------------------------

    def expected_tensors(self) -> dict[str, tuple[int, ...]]:
        return {name: placement.shape for name, placement in self._layout.items()}

    def load(self, name: str, tensor: Tensor) -> None:
        """Each name once; raises ValueError for another shape, InvalidRequest for numbers that are
        not finite, or do not stay so in the decoder's dtype: they would make answers NaN."""
        self.copy(name, tensor)
        self.settle()

    def copy(self, name: str, tensor: Tensor) -> None:
        """The first half of `load`: after it the tensor is not needed."""
        placement = self._layout[name]
        if tuple(tensor.shape) != placement.shape:
            raise ValueError(f"{name}: shape {tuple(tensor.shape)}, expected {placement.shape}")
        if name not in self._missing:
            raise ValueError(f"{name} is loaded already")
        key = placement.parameter
        if key not in self._parameters:
            dtype = self._wide if placement.norm else self.dtype  # a norm's weights are too few to be worth rounding
            self._parameters[key] = torch.empty(self._shapes[key], dtype=dtype, device=self.device)
        if placement.turned:
            tensor = half_split(tensor, placement)
        rows = self._parameters[key][placement.first : placement.first + placement.rows]
        rows.copy_(tensor if placement.spread else tensor.view(placement.extent))
        if not is_finite(rows if rows.dtype == self.dtype else rows.to(self.dtype)):
            kind = str(self.dtype).removeprefix("torch.")
            raise InvalidRequest(f"{name} holds NaN or infinity, or numbers that {kind} cannot hold", field="model")
        if placement.norm and self.spec.norm_offset:
            rows += 1.0
        self._missing.remove(name)
        self._open[_module(key)] -= 1

    def settle(self) -> None:
        """The second half: what is complete is packed, which takes as much memory again for a moment."""
        for module in [each for each, tensors in self._open.items() if not tensors]:
            del self._open[module]
            self._seal(module)
        if not self._missing and self._loaded is None:
            self._loaded = self._assemble()

    def _seal(self, module: str) -> None:
        """Once all of its tensors are there, a matrix is handed over and its plain copy dropped."""
        weight = self._parameters.pop(f"{module}.weight", None)
        if weight is not None:
            self._linears[module] = self._linear(weight, self._parameters.pop(f"{module}.bias", None))
        elif module == "embedding" and self.spec.tied_embeddings:
            self._linears["head"] = self._linear(self._parameters[module], None)

    def _assemble(self) -> Loaded:
        parameters, linears = self._parameters, self._linears
        layers = []
        for prefix in (f"layers.{layer}." for layer in range(self.spec.layers)):
            before_attention, after_attention, before_mlp, after_mlp = (parameters.get(prefix + name) for name in NORMS)
            layers.append(
                Layer(
                    before_attention=before_attention,
                    qkv=linears[prefix + "qkv"],
                    qk_norm=parameters.get(prefix + "qk_norm"),
                    output=linears[prefix + "output"],
                    after_attention=after_attention,
                    before_mlp=before_mlp,
                    gate_up=linears[prefix + "gate_up"],
                    down=linears[prefix + "down"],
                    after_mlp=after_mlp,
                )
            )
        together = put_together(self.spec, layers, self._ops)
        return Loaded(parameters["embedding"], together, parameters["norm"], linears["head"])

    def take_adapters(self) -> tuple[str, Loras]:
        spec = replace(self.spec, roots=adapted_roots(self.spec.architecture))
        reason, self._loras = select_loras(layout(spec), spec.layers, self.dtype, self.device)
        return reason, self._loras

    # --- forward ----------------------------------------------------------------------------------------------------

    def forward(self, inputs: StepInputs, attend: Attend) -> Tensor:
        loaded = self._require()
        layers, adapters = loaded.layers, inputs.adapters
        hidden, delta = self._embed(loaded, inputs), None
        cos, sin = self._rotary(inputs.positions)
        for layer in range(self.spec.layers):
            attended = attend(layer, *layers.before(layer, hidden, delta, cos, sin, adapters))
            delta = layers.after(layer, hidden, attended, adapters)
        return self._ops.add_norm(hidden, delta, loaded.norm)

    @property
    def sinks(self) -> tuple[()]:
        """No family here has any."""
        return ()

    @property
    def rowwise(self) -> bool:
        """Only the native products give this."""
        return self.native and (self._loras is None or self._loras.rowwise)

    @property
    def native(self) -> bool:
        return self._loaded is not None and isinstance(self._loaded.layers, NativeLayers)

    def forward_native(self, inputs: StepInputs, attention: library.AttentionStep) -> Tensor:
        loaded = self._require()
        assert isinstance(loaded.layers, NativeLayers)  # noqa: S101 - the caller checks `native`
        hidden = self._embed(loaded, inputs)
        delta = loaded.layers.run(hidden, *self._rotary(inputs.positions), attention, inputs.adapters)
        return self._ops.add_norm(hidden, delta, loaded.norm)

    def _embed(self, loaded: Loaded, inputs: StepInputs) -> Tensor:
        hidden = loaded.embedding.index_select(0, inputs.token_ids)
        return hidden if self._embedding_scale == 1.0 else hidden.mul_(self._embedding_scale)

    def logits(self, hidden: Tensor) -> Tensor:
        """The product is computed and rounded in the model's dtype, as transformers does; what follows is float32."""
        logits, scales = self._require().head.widened(hidden), self.spec.scales
        if scales.logits != 1.0:
            logits.mul_(scales.logits)
        if scales.logits_cap is not None:
            logits.div_(scales.logits_cap).tanh_().mul_(scales.logits_cap)
        return logits

    def largest(self, hidden: Tensor) -> Tensor:
        """Rows are written only where they must be: a soft cap, or a scale in float32, may make two logits one."""
        scales = self.spec.scales
        if scales.logits_cap is not None or (scales.logits != 1.0 and self.dtype.itemsize > 2):
            return self.logits(hidden).argmax(dim=-1)
        return self._require().head.largest(hidden)

    def _require(self) -> Loaded:
        if self._loaded is None:
            raise RuntimeError(f"{len(self._missing)} weights are not loaded")
        return self._loaded

    # --- facts ------------------------------------------------------------------------------------------------------

    def info(self, name: str) -> ModelInfo:
        spec = self.spec
        dtype = str(self.dtype).removeprefix("torch.")
        return ModelInfo(
            name=name,
            architecture=spec.architecture,
            vocab_size=spec.vocab_size,
            max_context=spec.max_context,
            layers=spec.layers,
            hidden_size=spec.hidden_size,
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            parameters=parameter_count(spec),
            weight_dtype=dtype,
            kv_dtype=dtype,
            eos_token_ids=spec.eos_token_ids,
            bos_token_id=spec.bos_token_id,
        )


def _module(parameter: str) -> str:
    """The matrix that a parameter belongs to, or the parameter itself."""
    return parameter.removesuffix(".weight").removesuffix(".bias")
