"""What an attention backend is, and how one is chosen.

A backend writes K and V of a step's new tokens to where the store keeps them, and reads there, by block tables, for
any mix of spans. The choice is made once, at start, by a probe that gives its reason: an operator who finds the slow
path in use needs to know why.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Final, Protocol, runtime_checkable

import torch
from torch import Tensor

from ferrum_rpc.attention import triton_probe
from ferrum_rpc.attention.eight_bits import MAX_MAGNITUDE
from ferrum_rpc.attention.geometry import BatchGeometry
from ferrum_rpc.attention.native_paged import NativePagedAttention, probe
from ferrum_rpc.attention.sinks import Sinks
from ferrum_rpc.attention.torch_paged import TorchPagedAttention
from ferrum_rpc.core import AttentionSpec
from ferrum_rpc.native import library
from ferrum_rpc.selection import AUTO, BackendCandidate, select


class AttentionBackend(Protocol):
    """Paged attention over one store. Constructed with ``(specs, keys, values)``, one entry per layer; ``keys[l]`` and
    ``values[l]`` are [num_blocks, block_size, kv_heads, head_dim], or where that is asked for rows of `eight_bits`.
    ``sinks``: see `Sinks`."""

    name: str

    exact_span_tokens: int
    """Rows of spans of up to so many tokens have the very bits of single ones, whatever the neighbours; or 0."""

    def plan(self, geometry: BatchGeometry) -> Any:
        """Everything that all layers of one step share: tile lists, block ids on the device. Once per step."""

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Put ``key`` and ``value`` [T, kv_heads, head_dim], their last axis dense, into ``slots`` (int64 [T]) of the
        layer. A slot may occur twice only if it is never read (padding in the null block): which of the two
        stays is undefined."""

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

    def draft(self, geometry: BatchGeometry) -> tuple[Any, list[Any]]:
        """The capacity that a step needs, and what is in its sections."""

    def reserve(self, spans: int, tokens: int, blocks: int) -> Any:
        """The capacity of any step up to this size."""

    def fill(self, capacity: Any, geometry: BatchGeometry) -> list[Any]:
        """What is in the sections of ``capacity`` for a step. Raises ValueError where it does not fit."""

    def bind(self, capacity: Any, sections: Sequence[Tensor]) -> Any:
        """The plan that reads ``sections``. Sections of zeros are a plan that does nothing."""

    def warm_up(self) -> None:
        """Compile what any step may launch."""


class Factory(Protocol):
    """What makes a backend over a store."""

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

    ``requested`` is ``auto`` (Triton on CUDA, the native kernel on a CPU, torch where that fails) or a backend's name.
    Raises InvalidRequest where that name does not exist, or its backend cannot be used here.
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
    factory = NativePagedAttention if name == NATIVE else made
    return name, reason, partial(factory, dtype=dtype) if quantized else factory
