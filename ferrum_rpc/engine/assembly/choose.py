"""What is chosen before a weight is read: the device, the dtype, who multiplies, who attends; each with its reason.

`build` makes a runner of it, `size` says what that takes of the memory.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple

import torch

from ferrum_rpc.attention.backend import NATIVE, TRITON, Factory, select_backend
from ferrum_rpc.attention.native_paged import takes_long_spans
from ferrum_rpc.attention.torch_paged import TorchPagedAttention
from ferrum_rpc.config import IDENTITY, ModelSettings
from ferrum_rpc.core import NO_KERNELS, AttentionSpec
from ferrum_rpc.engine.assembly.hf_source import Borrowed, describe_checkpoint
from ferrum_rpc.engine.assembly.kv_rounding import ROUNDED, cache_layers, check_kv_dtype
from ferrum_rpc.engine.assembly.loading import Progress, choose_dtype, load_model, read_spec
from ferrum_rpc.engine.ranks.world import refuse_ranks
from ferrum_rpc.errors import InvalidRequest, NotSupported
from ferrum_rpc.kv.store import CacheSpec
from ferrum_rpc.models.base import Model
from ferrum_rpc.models.config_keys import UnknownKey
from ferrum_rpc.models.decoder import SINGLE, ParallelContext
from ferrum_rpc.models.footprint import Making, activation_bytes, weight_bytes
from ferrum_rpc.models.fused_ops import FusedOps
from ferrum_rpc.models.fused_ops_choice import select_fused_ops
from ferrum_rpc.models.hf.describe import HfSpec
from ferrum_rpc.models.identity import IdentityConfig, IdentityModel
from ferrum_rpc.models.layout import layout
from ferrum_rpc.models.linear import LinearFactory, select_bytes, select_linear
from ferrum_rpc.models.lora import modules_of
from ferrum_rpc.models.shard import Shard
from ferrum_rpc.models.spec import ModelSpec
from ferrum_rpc.models.with_images import adapted_roots
from ferrum_rpc.native import library
from ferrum_rpc.weights.checkpoint import Checkpoint

BACKEND_NATIVE: Final = "native"
HF: Final = "hf"
QUANTIZE_NONE: Final = "none"
NO_MORE: Final = "the model has no more: max_position_embeddings of its configuration says so"
QUANTIZE_INT8: Final = "int8"


class Pretrained(NamedTuple):
    """A model with weights. ``ops`` is None for a device that is not in this machine. ``whole``: the model of which
    ``making`` is this rank's part."""

    checkpoint: Checkpoint
    making: Making
    ops: FusedOps | None
    whole: ModelSpec

    @property
    def architecture(self) -> str:
        """As its configuration names it."""
        return self.making.spec.architecture

    @property
    def dtype(self) -> torch.dtype:
        """Of what is computed."""
        return self.making.dtype

    @property
    def layers(self) -> tuple[AttentionSpec, ...]:
        """What its attention layers are."""
        return self.making.spec.attention_specs

    @property
    def tensor_names(self) -> Collection[str]:
        """Those of the checkpoint that it is made of."""
        return layout(self.whole).keys()

    @property
    def modules(self) -> dict[str, tuple[int, int]]:
        """The matrices that adapters can change, by name, with their sizes [out, in]."""
        return modules_of(layout(replace(self.whole, roots=adapted_roots(self.whole.architecture))))

    def weight_bytes(self) -> int:
        """Of all weights once they are loaded. Raises InvalidRequest where they cannot be held so."""
        return weight_bytes(self.making)

    def activation_bytes(self, tokens: int, rows: int, attending: int) -> int:
        """Of a step; see `models.footprint.activation_bytes`."""
        return activation_bytes(self.making, tokens, rows, attending=attending)

    def load(self, device: torch.device, progress: Progress | None, parallel: ParallelContext = SINGLE) -> Model:
        """Read the weights."""
        _, dtype, linear, *_ = self.making
        return load_model(
            self.checkpoint, dtype, device, progress, spec=self.whole, linear=linear, ops=self.ops, parallel=parallel
        )


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """A model whose weights are not read yet, or one that has none. ``layers``: what its attention layers are,
    ``cache`` what they keep of a token.
    ``max_context``: the model's, or less where less was asked for. ``attention``: the backend's name and what makes it.
    ``choices``: what was chosen -> why."""

    device: torch.device
    dtype: torch.dtype
    model: IdentityModel | Pretrained | Borrowed
    layers: tuple[AttentionSpec, ...]
    cache: list[CacheSpec]
    max_context: int
    attention: tuple[str, Factory]
    choices: tuple[tuple[str, str], ...]

    @property
    def slot_bytes(self) -> int:
        """What a token takes of the cache of all layers."""
        return sum(layer.slot_bytes for layer in self.cache)

    def load(self, progress: Progress | None = None, parallel: ParallelContext = SINGLE) -> Model:
        """The model with its weights; of one that ranks share, the part of ``parallel``."""
        if isinstance(self.model, Pretrained):
            return self.model.load(self.device, progress, parallel)
        return self.model if isinstance(self.model, IdentityModel) else self.model.load(self.device, progress)

    @property
    def copied_bytes(self) -> int:
        """Of `slot_bytes`, those of layers that attend over another layer's keys and values: each keeps its own."""
        return sum(self.cache[layer].slot_bytes for layer in _copied(self.model))

    @property
    def slot_bytes_of_all(self) -> int:
        """As `slot_bytes`, of the whole model where ranks share it: what each has, once."""
        if not isinstance(self.model, Pretrained):
            return self.slot_bytes
        one = self.cache[0]
        return sum(replace(one, kv_heads=layer.kv_heads).slot_bytes for layer in self.model.whole.attention_specs)

    @property
    def elsewhere(self) -> bool:
        """Whether it is planned for a device that is not in this machine."""
        return isinstance(self.model, Pretrained) and self.model.ops is None


def choose_parts(config: ModelSettings, *, elsewhere: bool = False, rank: int = 0) -> Parts:
    """Raises typed errors that say what to do. ``elsewhere``: the device is not in this machine, and taken to be able
    to run every kernel. ``rank``: of those that share the model, whose part it is."""
    choices: list[tuple[str, str]] = []
    device = _choose_device(config.device, choices, elsewhere)
    check_kv_dtype(config.kv_dtype, device, elsewhere=elsewhere)
    if device.type == "cpu":
        _check_kernels(choices)
    model: IdentityModel | Pretrained | Borrowed
    if config.path == IDENTITY:
        if config.quantize != QUANTIZE_NONE:
            raise InvalidRequest("the identity model has no weights to be rounded", field="quantize")
        refuse_ranks(config, "the identity model")
        model = IdentityModel(_identity(config), torch.device("cpu") if elsewhere else device)
        choices.append(("dtype=float32", "the identity model has no other"))
        dtype, layers, most = model.dtype, model.attention_specs, model.config.max_context
    else:
        model, most = _choose_pretrained(config, device, choices, elsewhere, rank)
        dtype, layers = model.dtype, model.layers
    if config.adapter_dir is not None:
        _check_adapters(config.adapter_dir, model)
    max_context = most if config.max_context is None else min(most, config.max_context)
    if config.max_context is not None:
        reason = "requested" if config.max_context <= most else f"{config.max_context} requested, {NO_MORE}"
        choices.append((f"max_context={max_context}", reason))
    factory: Factory
    if elsewhere:
        name, reason, factory = TRITON, "what such a device runs", TorchPagedAttention
    else:
        name, reason, factory = select_backend(device, layers, dtype, config.attention, ROUNDED.get(config.kv_dtype))
    choices.append((f"attention={name}", reason))
    if isinstance(model, Pretrained) and name == NATIVE and takes_long_spans(dtype, layers[0].head_dim):
        model = model._replace(making=model.making._replace(attends=True))
    cache = cache_layers(layers, dtype, config.kv_dtype)
    parts = Parts(device, dtype, model, layers, cache, max_context, (name, factory), tuple(choices))
    if copied := _copied(model):
        share = f"{len(copied)} of {len(layers)} layers attend over keys and values of a layer before them"
        cost = f"{share}; each keeps its own, {parts.copied_bytes} of the cache's {parts.slot_bytes} bytes of a token"
        parts = replace(parts, choices=(*parts.choices, ("shared_kv=copied", cost)))
    return parts


def _copied(model: IdentityModel | Pretrained | Borrowed) -> tuple[int, ...]:
    return model.spec.copied if isinstance(model, Borrowed) else ()


def _check_adapters(folder: Path, model: IdentityModel | Pretrained | Borrowed) -> None:
    if not folder.is_dir():
        raise InvalidRequest(f"adapter_dir {folder} is no folder", field="adapter_dir")
    if isinstance(model, IdentityModel) or (isinstance(model, Borrowed) and not model.modules):
        name = IDENTITY if isinstance(model, IdentityModel) else model.architecture
        message = f"{name} takes no adapters, for it has no linear layers; serve it without --adapter-dir"
        raise NotSupported(message, field="adapter_dir")


def _choose_device(requested: str, choices: list[tuple[str, str]], elsewhere: bool) -> torch.device:
    available = elsewhere or torch.cuda.is_available()
    if requested == "cuda" and not available:
        raise InvalidRequest("device cuda was asked for and torch finds no CUDA device", field="device")
    if requested != "auto":
        reason = "requested"
    else:
        reason = "a CUDA device is there" if available else "torch finds no CUDA device"
    kind = requested if requested != "auto" else ("cuda" if available else "cpu")
    choices.append((f"device={kind}", reason))
    return torch.device(kind)


def _check_kernels(choices: list[tuple[str, str]]) -> None:
    """Say once what it costs that the C library is not there: every part that would use it has a slower way, and takes
    it."""
    try:
        library.load()
    except OSError as error:
        costs = "a step takes several times as long, and what is computed again has other bits (exact_span_tokens is 0)"
        choices.append((NO_KERNELS, f"torch computes everything: {costs}. The C library: {error}"))


def _choose_pretrained(
    config: ModelSettings, device: torch.device, choices: list[tuple[str, str]], elsewhere: bool, rank: int
) -> tuple[Pretrained | Borrowed, int]:
    """Who runs a model folder, and the longest sequence."""
    checkpoint = Checkpoint.open(config.path)
    spec = _choose_decoder(checkpoint, config.model_backend, choices)
    if checkpoint.config.get("auto_map"):
        choices.append(("auto_map=ignored", "code that a checkpoint brings is never run"))
    if beyond := [str(each) for each in spec.eos_token_ids if each >= spec.vocab_size]:
        named = ",".join(beyond[:8])
        choices.append((f"eos_token_id={named}", f"not among the model's {spec.vocab_size} tokens: no text ends there"))
    dtype, reason = choose_dtype(config.dtype, checkpoint.dtype, device)
    choices.append((f"dtype={str(dtype).removeprefix('torch.')}", reason))
    if kinds := checkpoint.encodings:
        reason = f"{checkpoint.nbytes / 2**20:.0f} MiB are stored so, and become numbers of that dtype while they load"
        choices.append((f"weights={','.join(kinds).lower()}", reason))
    if isinstance(spec, HfSpec):
        return _choose_borrowed(config, checkpoint, spec, dtype, choices)
    whole, ops = spec.for_context(config.max_context), None
    shard = Shard.at(rank, config.tensor_parallel, config.pipeline_parallel)
    spec = shard.of(whole)
    if spec.ropes[0].kind == "longrope":
        reason = f"its factors are those of {spec.ropes[0].context} tokens, whatever a sequence's length"
        choices.append(("rope=longrope", reason))
    if not elsewhere:
        reason, ops = select_fused_ops(spec, dtype, device)
        choices.append((f"rows={ops.name}", reason))
    linear: LinearFactory
    if config.quantize == QUANTIZE_INT8:
        linear = select_bytes(device, dtype)
    else:
        name, reason, linear = select_linear(device, dtype)
        choices.append((f"linear={name}", reason))
    return Pretrained(checkpoint, Making(spec, dtype, linear, type(ops), shard=shard), ops, whole), spec.max_context


def _choose_decoder(checkpoint: Checkpoint, requested: str, choices: list[tuple[str, str]]) -> ModelSpec | HfSpec:
    """What the configuration is to the native decoder, or where that does not serve it, to transformers."""
    obstacle = None
    if requested != HF:
        try:
            spec = read_spec(checkpoint)
        except UnknownKey:
            raise
        except NotSupported as error:
            if requested == BACKEND_NATIVE:
                raise
            obstacle = error
        else:
            reason = "requested" if requested == BACKEND_NATIVE else "the fast one"
            alone = "; images are not served" if spec.roots.images else ""
            choices.append((f"model={BACKEND_NATIVE}", reason + alone))
            return spec
    try:
        borrowed = describe_checkpoint(checkpoint)
    except (InvalidRequest, NotSupported) as error:
        if obstacle is None:
            raise
        raise type(error)(
            f"{obstacle.message}; nor through transformers: {error.message}", field=error.field
        ) from error
    choices.append((f"model={HF}", "requested" if obstacle is None else f"{BACKEND_NATIVE}: {obstacle.message}"))
    return borrowed


def _choose_borrowed(
    config: ModelSettings, checkpoint: Checkpoint, spec: HfSpec, dtype: torch.dtype, choices: list[tuple[str, str]]
) -> tuple[Borrowed, int]:
    refuse_ranks(config, f"{spec.architecture}, which transformers runs,")
    if config.quantize != QUANTIZE_NONE:
        raise NotSupported(
            f"quantize: weights of {spec.architecture}, which transformers runs, are not rounded", field="quantize"
        )
    most = spec.max_context if config.max_context is None else spec.longest
    context = most if config.max_context is None else min(most, config.max_context)
    if spec.scaling:
        kinds = ", ".join(spec.scaling)
        choices.append((f"rope={kinds}", f"its factors are those of {context} tokens, whatever a sequence's length"))
    return Borrowed(checkpoint, spec, dtype, context), most


def _identity(config: ModelSettings) -> IdentityConfig:
    prefix = "identity_"
    given = {name.removeprefix(prefix): value for name, value in vars(config).items() if name.startswith(prefix)}
    return IdentityConfig(**given)
