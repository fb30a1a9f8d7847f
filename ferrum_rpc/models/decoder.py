"""The one native decoder: every family of `families` by its `ModelSpec`.

Parameters are plain tensors, fused where the checkpoint has several (q, k, v; gate, up), and filled by `load` one
checkpoint tensor at a time, so that shards stream and memory peaks near one copy of the weights. `fused_ops` computes
what is between the products; `layers` uses both. The decoder does not know sequences, blocks or which rows are sampled:
attention and recurrence are callbacks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, NamedTuple

import torch
from torch import Tensor

from ferrum_rpc.core import ModelInfo
from ferrum_rpc.distributed.group import Group
from ferrum_rpc.errors import InvalidRequest
from ferrum_rpc.models.base import Attend, Recur, RecurInC, StepInputs
from ferrum_rpc.models.expert_rows import ExpertRouter, ExpertRows
from ferrum_rpc.models.finite import is_finite
from ferrum_rpc.models.fused_ops import FusedOps
from ferrum_rpc.models.fused_ops_choice import select_fused_ops
from ferrum_rpc.models.latent_rows import LatentLifts, LatentWeights, of_own
from ferrum_rpc.models.layers import Layer, MixedLayers, NativeLayers, PlainLayers, assemble
from ferrum_rpc.models.layout import (
    EMBEDDED,
    LAYERS,
    NOTHING_HELD,
    Held,
    TensorPlacement,
    layout,
    parameter_count,
    parameter_shapes,
)
from ferrum_rpc.models.linear import Linear, LinearFactory, PlainLinear
from ferrum_rpc.models.lora import Loras
from ferrum_rpc.models.lora_choice import select_loras
from ferrum_rpc.models.native_linear import NativeLinear, NibbleFactory, PanelFactory, StoredFactory
from ferrum_rpc.models.parts.experts import Experts
from ferrum_rpc.models.parts.latent import LatentAttention
from ferrum_rpc.models.parts.layer import LayerSpec
from ferrum_rpc.models.parts.recurrent import Recurrent
from ferrum_rpc.models.recurrent_rows import RecurrentWeights
from ferrum_rpc.models.rotary import Rotary
from ferrum_rpc.models.shard import WHOLE, Shard
from ferrum_rpc.models.spec import ModelSpec
from ferrum_rpc.models.stored_integers import Integers
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

    embedding: Tensor | NativeLinear | None
    layers: PlainLayers
    norm: Tensor | None
    head: Linear | None


class Decoder:
    """A `RecurrentModel`. ``linear`` says how weight matrices are held (see `models.linear`), ``head`` how that of the
    head is (None: as the others), ``ops`` computes what lies between the products (default: the best of this machine),
    ``parallel`` which part of the model ``spec`` it is. ``held``: the matrices that stay as they are stored
    (`layout.held_parts`), and ``linear`` is then a `PanelFactory`.

    A tied head in panels is the embedding too: look-ups read the panels.
    """

    sinks: Sequence[Tensor | None] = ()

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
        held: Held = NOTHING_HELD,
    ) -> None:
        shard = parallel.shard
        self.whole = spec
        self.spec = spec = shard.of(spec)
        self.dtype = dtype
        self.device = device
        self.attention_specs = spec.attention_specs
        self.recurrent_shapes = spec.recurrent_shapes
        self._shard = shard
        self._group, self._pipe = parallel.group, parallel.pipe
        self._first_token = shard.tokens(self.whole.vocab_size)[0]
        self._fp32 = torch.promote_types(dtype, torch.float32)
        self._rotary = Rotary(spec.ropes, spec.attention.head_dim, device)
        scale = spec.scales.embedding
        self._embedding_scale = float(torch.tensor(scale).to(dtype)) if spec.scales.rounded else scale
        self._ops = select_fused_ops(spec, dtype, device)[1] if ops is None else ops
        self._linear, self._head_linear = linear, linear if head is None else head
        self._layout = layout(self.whole, shard)
        self._shapes = parameter_shapes(self._layout.values())
        self._missing = set(self._layout)
        self._open = Counter(_module(placement.parameter) for placement in self._layout.values())
        self._complete: list[str] = []
        self._held = held
        self._integers: dict[str, Integers] = {}
        self.as_stored = 0
        """Matrices of layers of the checkpoint that are held as it stores them."""
        self._parameters: dict[str, Tensor] = {}
        self._linears: dict[str, Linear] = {}
        self._apart = {
            f"{LAYERS}{index}.{matrix.role}": layer
            for index, layer in enumerate(spec.layers)
            for matrix in layer.others()
            if matrix.apart
        }
        self._fine = {
            f"{LAYERS}{index}.{matrix.role}": matrix.fine
            for index, layer in enumerate(spec.layers)
            for matrix in layer.matrices()
        }
        self._lifts: dict[str, LatentLifts] = {}
        self._routers: dict[str, ExpertRouter] = {}
        self._embedding: Tensor | NativeLinear | None = None
        self._loaded: Loaded | None = None
        self._loras: Loras | None = None

    # --- weights ----------------------------------------------------------------------------------------------------

    def expected_tensors(self) -> dict[str, tuple[int, ...]]:
        return {name: placement.shape for name, placement in self._layout.items()}

    def as_integers(self) -> set[str]:
        """Tensors that it takes as `Integers`."""
        return {name for parts in self._held.values() for part in parts if part.form for name in part.names}

    def load(self, name: str, tensor: Tensor | Integers) -> None:
        """Each name once; raises ValueError for another shape, InvalidRequest for numbers that are
        not finite, or do not stay so in the decoder's dtype: they would make answers NaN."""
        self.copy(name, tensor)
        self.settle()

    def copy(self, name: str, tensor: Tensor | Integers) -> None:
        """The first half of `load`: after it the tensor is not needed."""
        placement = self._layout[name]
        if tuple(tensor.shape) != placement.shape:
            raise ValueError(f"{name}: shape {tuple(tensor.shape)}, expected {placement.shape}")
        if name not in self._missing:
            raise ValueError(f"{name} is loaded already")
        key = placement.parameter
        if isinstance(tensor, Integers):
            if not is_finite(tensor.extremes):
                what = "scales that are NaN or infinite, or too large for numbers of float32"
                raise InvalidRequest(f"{name} has {what}", field="model")
            (form,) = (part.form for part in self._held[key] if name in part.names)
            assert form is not None  # noqa: S101 - `as_integers` has it
            self._integers[name] = placement.of_integers(tensor, form.group)
        else:
            self._fill(name, placement, tensor)
        self._missing.remove(name)
        self._open[module := _module(key)] -= 1
        if not self._open[module]:
            self._complete.append(module)

    def _fill(self, name: str, placement: TensorPlacement, tensor: Tensor) -> None:
        key = placement.parameter
        if key not in self._parameters:
            dtype = self._fp32 if placement.fp32 else self.dtype  # such weights are too few to be worth rounding
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
        while self._complete:
            self._seal(self._complete.pop())
        if not self._missing and self._loaded is None:
            self._loaded = self._assemble()

    def _seal(self, module: str) -> None:
        """Once all of its tensors are there, a matrix is handed over and its plain copy dropped."""
        if module == EMBEDDED:
            self._seal_embedding()
        elif module in self._apart:
            weight, mixer = self._parameters.pop(f"{module}.weight"), self._apart[module].mixer
            if module.endswith("router"):
                bias = self._parameters.pop(f"{module}.bias", None)
                self._routers[module] = ExpertRouter(weight, self._linear, bias)
            else:
                assert isinstance(mixer, LatentAttention)  # noqa: S101 - no other mixer has such a matrix
                self._lifts[module] = LatentLifts(mixer, weight, of_own(self._linear))
        elif f"{module}.weight" in self._held or f"{module}.weight" in self._parameters:
            factory = self._head_linear if module == "head" else self._linear
            self._linears[module] = self._product(f"{module}.weight", f"{module}.bias", factory)

    def _seal_embedding(self) -> None:
        """The table for look-ups, and the product of a tied head."""
        tied = self.spec.tied_embeddings and self._shard.last
        if EMBEDDED in self._held or (tied and isinstance(self._head_linear, PanelFactory)):
            made = self._product(EMBEDDED, "", self._head_linear)
            assert isinstance(made, NativeLinear)  # noqa: S101 - of a `PanelFactory`
            table: Tensor | NativeLinear = made
        else:
            table = self._parameters.pop(EMBEDDED)
        if tied:
            self._linears["head"] = self._head_linear(table, None) if isinstance(table, Tensor) else table
        self._embedding = table if self._shard.first else None

    def _product(self, key: str, of_bias: str, factory: LinearFactory) -> Linear:
        """The product of a matrix, some parts of which may be held as they are stored."""
        weight, bias = (self._parameters.pop(each, None) for each in (key, of_bias))
        if key not in self._held:
            assert weight is not None  # noqa: S101 - it is complete
            fine = self._fine.get(_module(key), 0)
            return factory(weight, bias, fine) if isinstance(factory, NibbleFactory) else factory(weight, bias)
        assert isinstance(factory, PanelFactory)  # noqa: S101 - the caller has asked for it
        first, made = 0, list[NativeLinear]()
        for part in self._held[key]:
            last = first + part.rows
            own = None if bias is None else bias[first:last]
            integers = {name: self._integers.pop(name) for name in part.names if name in self._integers}
            if len(integers) == len(part.names):
                made.append(StoredFactory(factory.space)(Integers.joined([*integers.values()]), own))
                self.as_stored += len(integers) * key.startswith(LAYERS)
            else:
                assert weight is not None  # noqa: S101 - see `_fill`
                for name, each in integers.items():  # their neighbours cannot be held so
                    weight.narrow(0, self._layout[name].first, each.shape[0]).copy_(each.floats())
                plain = factory(weight[first:last], own)
                assert isinstance(plain, NativeLinear)  # noqa: S101 - of a `PanelFactory`
                made.append(plain)
            first = last
        return NativeLinear.joined(made)

    def _assemble(self) -> Loaded:
        parameters, linears = self._parameters, self._linears
        made: dict[LayerSpec, FusedOps] = {self.spec.layers[0]: self._ops}
        layers, slot, sinks = list[Layer](), 0, list[Tensor | None]()
        for index, spec in enumerate(self.spec.layers):
            for each in (spec, *spec.rotated()):
                if each not in made:
                    made[each] = self._ops.of(each)
            prefix = f"layers.{index}."
            products = tuple(linears[prefix + matrix.role] for matrix in spec.matrices())
            norms = {norm.role: parameters[prefix + norm.role] for norm in spec.norms()}
            floats = {each.role: parameters.pop(prefix + each.role) for each in spec.floats()}  # some are copied
            if not isinstance(spec.mixer, Recurrent):
                sinks.append(floats.pop("sinks", None))
            recurrent = latent = experts = None
            if isinstance(spec.mixer, Recurrent):
                recurrent = RecurrentWeights.of(**floats)
            if isinstance(spec.mixer, LatentAttention):
                queries, row = (made[each] for each in spec.rotated())
                of_latents = norms.pop("latent_norm"), norms.pop("query_norm", None)
                latent = LatentWeights(self._lifts[f"{prefix}lifts"], queries, row, *of_latents)
            if isinstance(spec.mlp, Experts):
                gate_ups, downs = (
                    [linears[f"{prefix}{expert}.{role}"] for expert in range(spec.mlp.count)]
                    for role in ("gate_up", "down")
                )
                router = self._routers[f"{prefix}router"]
                experts = ExpertRows(spec.mlp, router, floats.get("choice"), gate_ups, downs)
            mlp = len(spec.mixer.matrices())
            layers.append(
                Layer(
                    spec,
                    made[spec],
                    products,
                    slot,
                    recurrent=recurrent,
                    latent=latent,
                    experts=experts,
                    mlp=mlp,
                    **norms,
                )
            )
            slot += len(products)
        self.sinks = sinks if any(each.sinks for each in self.attention_specs) else ()
        assembled = assemble(layers, self._group)
        return Loaded(self._embedding, assembled, parameters.get("norm"), linears.get("head"))

    def take_adapters(self, max_rank: int) -> tuple[str, Loras]:
        whole = replace(self.whole, roots=adapted_roots(self.whole.architecture))
        tables = layout(whole), layout(whole, self._shard)
        reason, self._loras = select_loras(tables[0], self.dtype, self.device, tables[1], max_rank=max_rank)
        return reason, self._loras

    # --- forward ----------------------------------------------------------------------------------------------------

    def forward(
        self, inputs: StepInputs, attend: Attend | library.AttentionStep, recur: Recur | RecurInC | None = None
    ) -> Tensor:
        loaded = self._require()
        hidden = self._enter(loaded, inputs)
        layers = loaded.layers
        run = partial(layers.forward, recur=recur) if isinstance(layers, MixedLayers) else layers.forward
        # the rotations are no variables, for they must not live longer than the layers need them
        delta = run(hidden, *self._rotary(inputs.positions), attend, inputs.adapters)
        return self._leave(loaded, hidden, delta)

    @property
    def rowwise(self) -> bool:
        """Only the native products and row operations give this."""
        loaded = self._loaded
        return loaded is not None and loaded.layers.rowwise and (self._loras is None or self._loras.rowwise)

    @property
    def waits(self) -> bool:
        """Experts do: the host must know how many rows each has."""
        return any(isinstance(layer.mlp, Experts) for layer in self.spec.layers)

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
            hidden = _looked_up(loaded.embedding, inputs.token_ids)
        else:  # a token is one rank's, and 0 the others': their sum is exact
            own = inputs.token_ids - self._first_token
            absent = (own < 0) | (own >= self._shapes[EMBEDDED][0])
            hidden = _looked_up(loaded.embedding, own.masked_fill_(absent, 0))
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
            latent=attention.latent is not None,
            eos_token_ids=spec.eos_token_ids,
            bos_token_id=spec.bos_token_id,
        )


def _looked_up(table: Tensor | NativeLinear, ids: Tensor) -> Tensor:
    return table.index_select(0, ids) if isinstance(table, Tensor) else table.rows(ids)


def _module(parameter: str) -> str:
    """The matrix that a parameter belongs to, or the parameter itself."""
    return parameter.removesuffix(".weight").removesuffix(".bias")
