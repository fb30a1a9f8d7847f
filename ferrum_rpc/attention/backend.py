"""The interface of attention backends, and the choice of one.

A backend writes K and V of a step's new tokens into the store's blocks, and reads them by block tables, for any mix of
spans. A probe chooses the backend once, at start, and logs the reason, so that an operator can see why a slow path is
in use.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

import torch
from torch import Tensor

from ferrum_rpc.attention import triton_probe
from ferrum_rpc.attention.eight_bits import MAX_MAGNITUDE
from ferrum_rpc.attention.geometry import BatchGeometry
from ferrum_rpc.attention.latent import LatentPagedAttention
from ferrum_rpc.attention.native_paged import NativePagedAttention, probe
from ferrum_rpc.attention.sinks import Sinks
from ferrum_rpc.attention.torch_paged import TorchPagedAttention
from ferrum_rpc.attention.varlen_prompts import select_prompts
from ferrum_rpc.core import AttentionSpec
from ferrum_rpc.native import library
from ferrum_rpc.selection import AUTO, BackendCandidate, select

if TYPE_CHECKING:
    from ferrum_rpc.native.triton_heads import CacheRows


class AttentionBackend(Protocol):
    """Paged attention over one store. Constructed with ``(specs, keys, values)``, one entry per layer; ``keys[l]`` and
    ``values[l]`` are [num_blocks, block_size, kv_heads, head_dim], or in a quantized cache rows of `eight_bits`.
    ``sinks``: see `Sinks`."""

    name: str

    exact_span_tokens: int
    """Spans of up to so many tokens have the same bits as single tokens, whatever the rest of the step; or 0."""

    def plan(self, geometry: BatchGeometry) -> Any:
        """What all layers of a step share: tile lists, block ids on the device. Called once per step."""

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Put ``key`` and ``value`` [T, kv_heads, head_dim], their last axis dense, into ``slots`` (int64 [T]) of the
        layer. A slot may occur twice only if it is never read (padding in the null block): which value stays is
        undefined."""

    def attend(self, layer: int, query: Tensor, plan: Any) -> Tensor:
        """Causal attention of ``query`` [T, heads, head_dim] over each row's own sequence; the same shape and dtype.
        The step's K and V of the layer are written.

        Row r of span s sees the positions ``0 .. starts[s] + r`` of that sequence, or the last ``window`` of them.
        """


@runtime_checkable
class NativeAttention(AttentionBackend, Protocol):
    """A backend whose kernels C code can call, without Python between two layers."""

    def native_step(self, plan: Any) -> library.AttentionStep | None:
        """`write` and `attend` of a step for every layer, where the kernels take all of its spans and the cache is
        bfloat16; else None. Points into ``plan`` and this backend: the caller keeps both alive."""


@runtime_checkable
class StagedAttention(AttentionBackend, Protocol):
    """A backend whose plans are sections of integers, which the caller sends. A *capacity* is how large a plan is:
    ``sizes`` of it are the integers (int32) of its sections, the block tables last. See `TritonPagedAttention`."""

    def rows(self, layer: int, slots: Tensor) -> CacheRows:
        """Where `write` puts K and V, for operations that write them in its place."""

    def draft(self, geometry: BatchGeometry) -> tuple[Any, list[Any]]:
        """The capacity that a step needs, and the sections of its plan."""

    def reserve(self, spans: int, tokens: int, blocks: int) -> Any:
        """The capacity of any step up to this size."""

    def fill(self, capacity: Any, geometry: BatchGeometry) -> list[Any]:
        """The sections of ``capacity`` for a step. Raises ValueError if the step does not fit."""

    def bind(self, capacity: Any, sections: Sequence[Tensor]) -> Any:
        """The plan that reads ``sections``. Sections of zeros make a plan without work."""

    def attend_new(self, layer: int, query: Tensor, key: Tensor, value: Tensor, plan: Any) -> Tensor:
        """As `attend`, with ``key`` and ``value`` [T, kv_heads, head_dim] of the step itself: plans of `draft` may need
        them."""

    def warm_up(self) -> None:
        """Compile all kernels that a step may launch."""


class Factory(Protocol):
    """Constructs a backend over a store."""

    def __call__(
        self, specs: Sequence[AttentionSpec], keys: list[Tensor], values: list[Tensor], /, *, sinks: Sinks = ()
    ) -> AttentionBackend:
        """See `AttentionBackend`."""


NATIVE: Final = NativePagedAttention.name
TORCH: Final = TorchPagedAttention.name
TRITON: Final = "triton"


def select_backend(
    device: torch.device,
    specs: Sequence[AttentionSpec],
    dtype: torch.dtype,
    requested: str = AUTO,
    cached: torch.dtype | None = None,
) -> tuple[str, str, Factory]:
    """``(name, reason, factory)`` of the backend for ``device``, these layers, queries of ``dtype``, and a cache of it
    or, where ``cached`` says so, of one of `eight_bits`.

    ``requested`` is ``auto`` (Triton on CUDA, with the kernel of `select_prompts` for whole prompts; the native kernel
    on a CPU; torch if these fail) or a backend's name, which then computes every span. Raises InvalidRequest if that
    name does not exist, or its backend cannot be used here.
    """

    cached = cached or dtype
    quantized = cached in MAX_MAGNITUDE
    native = BackendCandidate(
        NATIVE, lambda: probe(specs, device, dtype, quantized), "K and V are read in place with {}"
    )
    triton = BackendCandidate(
        TRITON,
        lambda: triton_probe.probe(device, specs, dtype, cached),
        "one kernel for every span, K and V read in place",
    )
    plain = BackendCandidate(TORCH, lambda: TorchPagedAttention, f"exact block gather and SDPA on {device.type}")
    fast = (native, triton) if requested != AUTO else (triton,) if device.type == "cuda" else (native,)
    name, reason, made = select(*fast, plain, what="attention backend", field="attention_backend", requested=requested)
    if name == TRITON and requested == AUTO:
        by, why, prompts = select_prompts(device, specs, dtype, cached)
        reason += f"; whole prompts by {by} ({why})"
        made = partial(made, prompts=prompts)
    factory = NativePagedAttention if name == NATIVE else made
    if any(spec.latent is not None for spec in specs):
        return name, f"{reason}; a token has one row, which is key and value", partial(LatentPagedAttention, factory)
    return name, reason, partial(factory, dtype=dtype) if quantized else factory
