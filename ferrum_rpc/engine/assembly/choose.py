"""Choices made before a weight is read, each with its reason: device, model backend, dtype, matrix products, attention.

`size` computes the memory that they need, `build` makes a runner of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import torch

from ferrum_rpc.attention.backend import NATIVE, TRITON, Factory, select_backend
from ferrum_rpc.attention.eight_bits import FP8, SCALE_BYTES, row_width
from ferrum_rpc.attention.native_paged import takes_long_spans
from ferrum_rpc.attention.recurrent import STEP_TOKENS, RecurrentKernels
from ferrum_rpc.attention.recurrent_choice import select_recurrence
from ferrum_rpc.attention.recurrent_steps import slot_bytes
from ferrum_rpc.attention.torch_paged import TorchPagedAttention
from ferrum_rpc.config import IDENTITY, ModelSettings
from ferrum_rpc.core import NO_KERNELS, AttentionSpec, RecurrentShape, StateTensors
from ferrum_rpc.engine.assembly.hf_source import HfCheckpoint, describe_checkpoint
from ferrum_rpc.engine.assembly.loading import Progress, choose_dtype, read_spec, stored_parts, with_single_experts
from ferrum_rpc.engine.assembly.source import (
    AS_STORED,
    QUANTIZE_NONE,
    DecoderCheckpoint,
    IdentitySource,
    ModelFacts,
    ModelSource,
    Reasons,
)
from ferrum_rpc.engine.ranks.world import refuse_ranks
from ferrum_rpc.errors import InvalidRequest, NotSupported
from ferrum_rpc.kv.store import CacheSpec
from ferrum_rpc.kv.windows import Window
from ferrum_rpc.models.base import Model
from ferrum_rpc.models.config_keys import UnknownKey
from ferrum_rpc.models.decoder import SINGLE, ParallelContext
from ferrum_rpc.models.fused_ops_choice import select_fused_ops
from ferrum_rpc.models.hf.describe import HfSpec
from ferrum_rpc.models.identity import IdentityConfig, IdentityModel
from ferrum_rpc.models.layout import Held
from ferrum_rpc.models.linear import LinearFactory, alongside_stored, fast_pairs, select_linear, select_quantized
from ferrum_rpc.models.shard import WHOLE, Shard
from ferrum_rpc.models.spec import ModelSpec
from ferrum_rpc.native import library
from ferrum_rpc.usage import ISA_VARIABLE, masked_isa
from ferrum_rpc.weights.checkpoint import Checkpoint

BACKEND_NATIVE: Final = "native"
HF: Final = "hf"
QUANTIZE_AUTO: Final = "auto"
NO_MORE: Final = "the model's maximum: max_position_embeddings of its configuration"
QUANTIZE_INT8: Final = "int8"
QUANTIZE_INT4: Final = "int4"

ROUNDED: Final = {"int8": torch.int8, "fp8": FP8}
"""``--kv-dtype`` -> the dtype of the cache, one of `eight_bits`."""

FP8_CAPABILITY: Final = (8, 9)
"""The first compute capability that converts to and from fp8 (e4m3), as the kernels do."""


T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Choices:
    """What ``config`` means on this machine. ``facts`` are those of ``source``. ``cache``: what each attention layer
    keeps per token, if it is its own. ``max_context``: the model's, or less if less is set. ``attention``: the
    backend's name and its factory. ``elsewhere``: the device is not in this machine. ``kernels``: what advances the
    states of recurrent layers on a GPU. ``reasons``: choice -> reason."""

    config: ModelSettings
    device: torch.device
    source: ModelSource
    facts: ModelFacts
    cache: list[CacheSpec]
    max_context: int
    attention: tuple[str, Factory]
    elsewhere: bool
    kernels: RecurrentKernels | None
    reasons: tuple[tuple[str, str], ...]

    def load(self, progress: Progress | None = None, parallel: ParallelContext = SINGLE) -> tuple[Model, Reasons]:
        """See `ModelSource.load`."""
        return self.source.load(self.device, progress, parallel)

    @property
    def slot_bytes(self) -> int:
        """Cache bytes per token, of all layers."""
        return sum(layer.slot_bytes for layer in self._kept(self.cache))

    @property
    def slot_bytes_of_all(self) -> int:
        """As `slot_bytes`, of all ranks, each head once."""
        layers = cache_layers(self.facts.all_layers, self.facts.dtype, self.config.kv_dtype)
        return sum(layer.slot_bytes for layer in self._kept(layers))

    @property
    def kv_shapes(self) -> tuple[tuple[int, int], ...]:
        """`ModelInfo.kv_shapes`."""
        shapes = tuple((each.kv_heads, each.head_dim) for each in self._kept(self.facts.all_layers))
        return () if len({*shapes}) == 1 and len(shapes) == len(self.facts.all_layers) else shapes

    @property
    def window(self) -> Window | None:
        """The longest window of all layers, if each of them has one and sequences can be longer."""
        windows = [each.window for each in self.facts.all_layers if each.window is not None]
        if not windows or self.facts.all_recurrent or len(windows) < len(self.facts.all_layers):
            return None
        window = Window(max(windows), STEP_TOKENS)
        return window if sum(window) <= self.max_context else None

    def _kept(self, layers: Sequence[T]) -> list[T]:
        """Those that keep keys and values of their own."""
        sources = self.facts.sources or range(len(layers))
        return [layer for index, layer in enumerate(layers) if sources[index] == index]

    @property
    def state_bytes(self) -> int:
        """Bytes of a slot: the states of a sequence and their journal."""
        return _slot_bytes(self.facts.recurrent, self.facts.dtype)

    @property
    def state_bytes_of_all(self) -> int:
        """As `state_bytes`, of all ranks, each head once."""
        return _slot_bytes(self.facts.all_recurrent, self.facts.dtype)

    @property
    def state_tensors(self) -> StateTensors | None:
        """What such a slot is made of, on all ranks together; None: the model keeps no states."""
        layers, dtype = self.facts.all_recurrent, self.facts.dtype
        if not layers:
            return None
        own, wide = (str(each).removeprefix("torch.") for each in (dtype, torch.promote_types(dtype, torch.float32)))
        return StateTensors(layers[0], len(layers), own, wide, STEP_TOKENS)

    @property
    def attends_in_c(self) -> bool:
        """Whether attention is computed in C, for spans of any length."""
        facts = self.facts
        known = not facts.estimated and self.attention[0] == NATIVE
        return known and all(takes_long_spans(facts.dtype, each.head_dim) for each in set(facts.layers))


def _slot_bytes(layers: Sequence[RecurrentShape], dtype: torch.dtype) -> int:
    return sum(slot_bytes(layers[0], len(layers), dtype)) if layers else 0


def choose(
    config: ModelSettings, *, elsewhere: bool = False, rank: int = 0, device: torch.device | None = None
) -> Choices:
    """Raises typed errors that say what to do. ``elsewhere``: the device is not in this machine, and is assumed to run
    every kernel. ``rank``: the rank whose part is chosen, if ranks share the model. ``device``: that of the rank, of
    the kind in ``config``; None: the first."""
    reasons: Reasons = []
    first = _choose_device(config.device, reasons, elsewhere)
    device = first if device is None else device
    check_kv_dtype(config.kv_dtype, device, elsewhere=elsewhere)
    if device.type == "cpu":
        _check_kernels(reasons)
    elif not elsewhere:
        reasons.append(fix_products())
    source: ModelSource
    if config.path == IDENTITY:
        source = _choose_identity(config, torch.device("cpu") if elsewhere else device, reasons)
    else:
        source = _choose_checkpoint(config, device, reasons, elsewhere, rank)
    facts = source.describe()
    if config.adapter_dir is not None:
        _check_adapters(config.adapter_dir, facts)
    longest = facts.max_context
    max_context = longest if config.max_context is None else min(longest, config.max_context)
    if config.max_context is not None:
        reason = "requested" if config.max_context <= longest else f"{config.max_context} requested, {NO_MORE}"
        reasons.append((f"max_context={max_context}", reason))
    factory: Factory
    if elsewhere:
        name, reason, factory = TRITON, "the backend for such a device", TorchPagedAttention
    else:
        cached = ROUNDED.get(config.kv_dtype)
        name, reason, factory = select_backend(device, facts.layers, facts.dtype, config.attention, cached)
    reasons.append((f"attention={name}", reason))
    kernels: RecurrentKernels | None = None
    if facts.recurrent and device.type != "cpu" and not elsewhere:
        by, reason, kernels = select_recurrence(facts.recurrent[0], facts.dtype, device)
        reasons.append((f"recurrence={by}", reason))
    cache = cache_layers(facts.layers, facts.dtype, config.kv_dtype)
    attention = name, factory
    if shared := sum(source != layer for layer, source in enumerate(facts.sources)):
        share = f"{shared} of {len(cache)} layers attend over keys and values of a layer before them, and keep none"
        reasons.append(("shared_kv=stored once", share))
    return Choices(config, device, source, facts, cache, max_context, attention, elsewhere, kernels, tuple(reasons))


def check_kv_dtype(kv_dtype: str, device: torch.device, *, elsewhere: bool = False) -> None:
    """Raise InvalidRequest if ``device`` does not support ``--kv-dtype``, before a model is loaded. ``elsewhere``: the
    device is not in this machine, and is assumed to support it."""
    if kv_dtype == "int8" and device.type != "cpu":
        raise InvalidRequest(f"kv_dtype int8 needs a CPU, not {device.type}; use fp8", field="kv_dtype")
    if kv_dtype == "fp8" and device.type != "cuda":
        raise InvalidRequest(f"kv_dtype fp8 needs CUDA, not {device.type}; use int8", field="kv_dtype")
    if kv_dtype == "fp8" and not elsewhere:
        capability = torch.cuda.get_device_capability(device)
        if capability < FP8_CAPABILITY:
            found, required = (".".join(map(str, each)) for each in (capability, FP8_CAPABILITY))
            raise InvalidRequest(f"kv_dtype fp8 needs compute capability {required}, not {found}", field="kv_dtype")


def cache_layers(layers: Sequence[AttentionSpec], dtype: torch.dtype, kv_dtype: str) -> list[CacheSpec]:
    """What each layer of a model in ``dtype`` keeps per token. Raises InvalidRequest if its heads cannot be
    quantized."""
    if kv_dtype in ROUNDED:
        for spec in layers:
            if spec.head_dim % SCALE_BYTES:
                raise InvalidRequest(
                    f"a cache in {kv_dtype} needs heads of a multiple of {SCALE_BYTES}, not of {spec.head_dim}",
                    field="kv_dtype",
                )
        dtype = ROUNDED[kv_dtype]
    return [
        CacheSpec(spec.kv_heads, row_width(spec.head_dim, dtype), dtype, pairs=spec.latent is None) for spec in layers
    ]


def _choose_device(requested: str, reasons: Reasons, elsewhere: bool) -> torch.device:
    available = elsewhere or torch.cuda.is_available()
    if requested == "cuda" and not available:
        raise InvalidRequest("device cuda is not available: torch finds no CUDA device", field="device")
    if requested != "auto":
        reason = "requested"
    else:
        reason = "a CUDA device is there" if available else "torch finds no CUDA device"
    kind = requested if requested != "auto" else ("cuda" if available else "cpu")
    reasons.append((f"device={kind}", reason))
    return torch.device(kind, 0) if kind == "cuda" else torch.device(kind)


def fix_products() -> tuple[str, str]:
    """Make matrix products on CUDA sum in float32, as `Linear` promises, and keep float32 inputs from being rounded to
    TF32. Returns the choice and its reason.

    By default torch lets cuBLAS add partial sums of a split product in bfloat16 or float16, which is the usual form of
    a product of a few rows. The switches are the process's, so they are set where CUDA is chosen.
    """
    products = torch.backends.cuda.matmul
    products.allow_bf16_reduced_precision_reduction = False
    products.allow_fp16_reduced_precision_reduction = False
    products.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    return "products=float32 sums", "torch's default adds parts of a product in bfloat16; TF32 is off"


def _check_kernels(reasons: Reasons) -> None:
    """Report once that the C library is missing: every part that would use it falls back to a slower implementation.
    Also report a CPU that is used as a lesser one."""
    if isa := masked_isa():
        reasons.append((f"isa={isa}", f"{ISA_VARIABLE} hides what else the CPU has"))
    try:
        library.load()
    except OSError as error:
        costs = "a step takes several times as long, and recomputed rows have other bits (exact_span_tokens is 0)"
        reasons.append((NO_KERNELS, f"torch computes everything: {costs}. The C library: {error}"))


def _check_adapters(folder: Path, facts: ModelFacts) -> None:
    if not folder.is_dir():
        raise InvalidRequest(f"adapter_dir must be a folder, not {folder}", field="adapter_dir")
    if not facts.modules:
        message = f"{facts.architecture} takes no adapters, for it has no linear layers; serve it without --adapter-dir"
        raise NotSupported(message, field="adapter_dir")


def _choose_identity(config: ModelSettings, device: torch.device, reasons: Reasons) -> IdentitySource:
    if config.quantize not in (QUANTIZE_AUTO, QUANTIZE_NONE):
        raise InvalidRequest("the identity model has no weights to quantize", field="quantize")
    refuse_ranks(config, "the identity model")
    prefix = "identity_"
    given = {name.removeprefix(prefix): value for name, value in vars(config).items() if name.startswith(prefix)}
    reasons.append(("dtype=float32", "the identity model has no other"))
    return IdentitySource(IdentityModel(IdentityConfig(**given), device))


def _choose_checkpoint(
    config: ModelSettings, device: torch.device, reasons: Reasons, elsewhere: bool, rank: int
) -> ModelSource:
    """The native decoder, or transformers if the decoder does not support the configuration."""
    checkpoint, obstacle = Checkpoint.open(config.path), None
    requested = config.model_backend
    if requested != HF:
        try:
            ours = with_single_experts(checkpoint)
            spec = read_spec(ours)
            _check_cache(config, spec, device)
        except UnknownKey:
            raise
        except NotSupported as error:
            if requested == BACKEND_NATIVE:
                raise
            obstacle = error
        else:
            reason = "requested" if requested == BACKEND_NATIVE else "the faster backend"
            alone = "; images are not served" if spec.roots.images else ""
            reasons.append((f"model={BACKEND_NATIVE}", reason + alone))
            return _choose_decoder(config, ours, spec, device, reasons, elsewhere=elsewhere, rank=rank)
    try:
        described = describe_checkpoint(checkpoint)
    except (InvalidRequest, NotSupported) as error:
        if obstacle is None:
            raise
        raise type(error)(
            f"{obstacle.message}; nor through transformers: {error.message}", field=error.field
        ) from error
    reasons.append((f"model={HF}", "requested" if obstacle is None else f"{BACKEND_NATIVE}: {obstacle.message}"))
    return _choose_hf(config, checkpoint, described, device, reasons)


def _check_cache(config: ModelSettings, spec: ModelSpec, device: torch.device) -> None:
    """Raise NotSupported for what cannot be done yet with recurrent states, or with a cache of latents."""
    latent = any(each.latent for each in spec.attention_specs)
    if not spec.recurrent_shapes and not latent:
        return
    for asked, what in (
        (device.type != "cpu" and config.ranks > 1, f"by several ranks on {device.type}"),
        (config.pipeline_parallel > 1 and not latent, "in stages of a pipeline"),
        (config.kv_dtype in ROUNDED and latent, f"with a cache in {config.kv_dtype}"),
    ):
        if asked:
            kind = "latent attention" if latent else "recurrent layers"
            raise NotSupported(f"{spec.architecture} has {kind}, and is not served {what} yet", field="model")


def _choose_dtype(
    config: ModelSettings,
    checkpoint: Checkpoint,
    spec: ModelSpec | HfSpec,
    device: torch.device,
    reasons: Reasons,
    *,
    quantize: str = QUANTIZE_NONE,
) -> torch.dtype:
    """The dtype to compute in. Also reports peculiarities of the checkpoint, and how its weights are stored."""
    if checkpoint.config.get("auto_map"):
        reasons.append(("auto_map=ignored", "code that a checkpoint brings is never run"))
    if beyond := [str(each) for each in spec.eos_token_ids if each >= spec.vocab_size]:
        named = ",".join(beyond[:8])
        reasons.append((f"eos_token_id={named}", f"not among the model's {spec.vocab_size} tokens: no text ends there"))
    ours = None if isinstance(spec, HfSpec) else fast_pairs
    dtype, reason = choose_dtype(config.dtype, checkpoint.dtype, device, ours)
    if quantize == AS_STORED and dtype != torch.bfloat16:
        dtype, reason = torch.bfloat16, "rows meet integers in it; --dtype float32 expands them"
    on_request = quantize != QUANTIZE_NONE and device.type == "cpu"
    if on_request and config.dtype == "auto" and checkpoint.dtype == torch.bfloat16 != dtype:
        dtype, reason = (
            torch.bfloat16,
            "the checkpoint is bfloat16, and products of quantized weights are computed in it",
        )
    reasons.append((f"dtype={str(dtype).removeprefix('torch.')}", reason))
    if kinds := checkpoint.encodings:
        become = "stay so where our kernel can hold them" if quantize == AS_STORED else "become numbers of that dtype"
        reason = f"{checkpoint.nbytes / 2**20:.0f} MiB are stored so, and {become} while they load"
        reasons.append((f"weights={','.join(kinds).lower()}", reason))
    return dtype


def _choose_decoder(
    config: ModelSettings,
    checkpoint: Checkpoint,
    spec: ModelSpec,
    device: torch.device,
    reasons: Reasons,
    *,
    elsewhere: bool,
    rank: int,
) -> DecoderCheckpoint:
    quantize: str = config.quantize
    unstored = None
    if quantize == QUANTIZE_AUTO:
        if config.dtype == "auto" and stored_parts(checkpoint, spec, WHOLE):
            unstored = alongside_stored(device)
        quantize = QUANTIZE_NONE if unstored is None else AS_STORED
    dtype = _choose_dtype(config, checkpoint, spec, device, reasons, quantize=quantize)
    whole, ops = spec.for_context(config.max_context), None
    shard = Shard.at(rank, config.tensor_parallel, config.pipeline_parallel)
    spec = shard.of(whole)
    if spec.ropes[0].kind == "longrope":
        reason = f"its factors are those of {spec.ropes[0].context} tokens, whatever a sequence's length"
        reasons.append(("rope=longrope", reason))
    if not elsewhere:
        reason, ops = select_fused_ops(spec, dtype, device)
        reasons.append((f"rows={ops.name}", reason))
    linear: LinearFactory
    head: LinearFactory
    held: Held = {}
    if unstored is not None:
        linear, held = unstored, stored_parts(checkpoint, whole, shard)
        head = linear
    elif quantize != QUANTIZE_NONE:
        linear, head = select_quantized(device, dtype, quantize)
        held = stored_parts(checkpoint, whole, shard, (linear.bits,))
    else:
        name, reason, linear = select_linear(device, dtype)
        head = linear
        reasons.append((f"linear={name}", reason))
    return DecoderCheckpoint(spec, whole, shard, dtype, linear, head, ops, checkpoint, held=held, quantize=quantize)


def _choose_hf(
    config: ModelSettings, checkpoint: Checkpoint, spec: HfSpec, device: torch.device, reasons: Reasons
) -> HfCheckpoint:
    dtype = _choose_dtype(config, checkpoint, spec, device, reasons)
    refuse_ranks(config, f"{spec.architecture}, which transformers runs,")
    if config.quantize not in (QUANTIZE_AUTO, QUANTIZE_NONE):
        raise NotSupported(
            f"quantize: weights of {spec.architecture}, which transformers runs, cannot be quantized", field="quantize"
        )
    longest = spec.max_context if config.max_context is None else spec.longest
    context = longest if config.max_context is None else min(longest, config.max_context)
    if spec.scaling:
        kinds = ", ".join(spec.scaling)
        reasons.append((f"rope={kinds}", f"its factors are those of {context} tokens, whatever a sequence's length"))
    return HfCheckpoint(checkpoint, spec, dtype, longest, context)
