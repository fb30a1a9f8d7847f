"""Attention of whole prompts by torch's `varlen_attn_out` (FlashAttention), and whether it can be used here.

A prompt from position 0 attends to nothing but its own keys, which the projection has just made: no block table is
needed. Torch's FlashAttention 2 is expected to be 1.3 times as fast there as our kernel, FlashAttention 3 and 4 (wheels
of their own) 1.8 times; no GPU has measured it yet. Spans behind a cache need block tables, which torch 2.13 supports
with FlashAttention 3 only; they stay with our kernel, and so do layers with soft caps or sinks, and 8-bit caches, whose
tokens must have the same values in their own step as in later ones.

Activating FlashAttention 3 or 4 replaces ``aten::_flash_attention_forward`` for the whole process: `F.sdpa` of models
that transformers runs uses it too. This file can be imported if torch lacks the function, as torch 2.11 may.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ferrum_rpc.attention.torch_paged import TOLERANCE
from ferrum_rpc.core import AttentionSpec
from ferrum_rpc.selection import BackendCandidate, Choice, Unsuited, select

OURS: Final = "ours"

WHEELS: Final = {"FA3": ("flash_attn_interface", (9,)), "FA4": ("flash_attn.cute", (9, 10))}
"""By torch's name of an implementation: its module, and the major compute capabilities that torch uses it for."""

LENGTHS: Final = (70, 1, 130)
"""Prompts of the small step."""


class PromptAttention(Protocol):
    """Causal attention of packed prompts over their own keys."""

    def __call__(
        self, out: Tensor, heads: tuple[Tensor, Tensor, Tensor], ends: Tensor, longest: int, spec: AttentionSpec
    ) -> None:
        """Write attention to ``out`` [T, heads, head_dim], of ``heads``: query [T, heads, head_dim], key and value
        [T, kv_heads, head_dim]. Prompt i owns the rows ``ends[i] .. ends[i + 1]`` (int32, on the device), ``longest``
        at most."""


@dataclass(frozen=True, slots=True)
class VarlenAttention:
    """A `PromptAttention`: torch's ``function``."""

    function: Any

    def __call__(
        self, out: Tensor, heads: tuple[Tensor, Tensor, Tensor], ends: Tensor, longest: int, spec: AttentionSpec
    ) -> None:
        behind = -1 if spec.window is None else spec.window - 1  # tokens before its own that a query sees
        window, grouped = (behind, 0), spec.heads != spec.kv_heads
        options = {"scale": spec.scale, "window_size": window, "enable_gqa": grouped}
        self.function(out, *heads, ends, ends, longest, longest, **options)


def select_prompts(
    device: torch.device, specs: Sequence[AttentionSpec], dtype: torch.dtype, cached: torch.dtype
) -> Choice:
    """What computes whole prompts for layers of ``specs``, queries in ``dtype``, and a cache in ``cached``: ``made`` is
    a `PromptAttention`, or None for our kernel. Each is tried on ``device`` with small prompts for every kind of
    layer."""
    if (why := _obstacle(device, specs, dtype, cached)) is not None:
        return Choice(OURS, why, None)
    wheels = [
        BackendCandidate(name, partial(_of_wheel, name, device, specs, dtype), "varlen_attn_out of its wheel")
        for name in WHEELS
    ]
    torchs = BackendCandidate("FA2", partial(_checked, device, specs, dtype), "varlen_attn_out of torch")
    ours = BackendCandidate(OURS, lambda: None)
    return select(*wheels, torchs, ours, what="attention of prompts", field="attention_backend")


def _obstacle(
    device: torch.device, specs: Sequence[AttentionSpec], dtype: torch.dtype, cached: torch.dtype
) -> str | None:
    if device.type != "cuda":
        return f"varlen_attn_out needs CUDA, not {device.type}"
    if cached != dtype:
        return "an 8-bit cache is read as it is written"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"varlen_attn_out does not support {str(dtype).removeprefix('torch.')}"
    if any(spec.softcap is not None or spec.sinks for spec in specs):
        return "varlen_attn_out has no soft caps and no sinks"
    return None


def _of_wheel(name: str, device: torch.device, specs: Sequence[AttentionSpec], dtype: torch.dtype) -> PromptAttention:
    module, capabilities = WHEELS[name]
    major, _ = torch.cuda.get_device_capability(device)
    if major not in capabilities:
        raise Unsuited(f"not for compute capability {major}")
    try:
        found = find_spec(module)
    except ModuleNotFoundError:  # of the package that it would be in
        found = None
    if found is None:
        raise Unsuited(f"{module} is not installed")
    attention: Any = import_module("torch.nn.attention")
    attention.activate_flash_attention_impl(name)
    try:
        return _checked(device, specs, dtype)
    except BaseException:
        attention.restore_flash_attention_impl()
        raise


def _checked(device: torch.device, specs: Sequence[AttentionSpec], dtype: torch.dtype) -> PromptAttention:
    try:
        made = VarlenAttention(import_module("torch.nn.attention.varlen").varlen_attn_out)
    except (ImportError, AttributeError) as error:
        raise Unsuited(f"torch {torch.__version__} has no varlen_attn_out") from error
    check_prompts(made, device, specs, dtype)
    return made


def check_prompts(
    attention: PromptAttention, device: torch.device, specs: Sequence[AttentionSpec], dtype: torch.dtype
) -> None:
    """Raise `Unsuited` if small prompts differ from float32 arithmetic by more than our kernel may, in any layer."""
    generator = torch.Generator().manual_seed(0)
    ends = torch.tensor([0, *LENGTHS]).cumsum(0)
    for spec in dict.fromkeys(specs):
        small = spec if spec.window is None else replace(spec, window=min(spec.window, 24))
        rows = int(ends[-1]), spec.heads + 2 * spec.kv_heads, spec.head_dim
        fused = torch.randn(rows, generator=generator).to(dtype)
        out = torch.full((rows[0], spec.heads, spec.head_dim), float("nan"), dtype=dtype, device=device)
        attention(out, _heads(fused.to(device), spec), ends.to(device, torch.int32), max(LENGTHS), small)
        exact = [_dense(small, each.float()) for each in fused.split_with_sizes(LENGTHS)]
        error = float((out.cpu().float() - torch.cat(exact)).abs().max())
        if not error <= TOLERANCE[dtype]:  # so that NaN fails too
            tolerance = f"{TOLERANCE[dtype]:.0e}"
            raise Unsuited(f"small prompts differ from float32 arithmetic by {error:.1e}, more than {tolerance}")


def _heads(fused: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor, Tensor]:
    """Views of a projection's output, as in a step."""
    query, key, value = fused.split_with_sizes((spec.heads, spec.kv_heads, spec.kv_heads), 1)
    return query, key, value


def _dense(spec: AttentionSpec, fused: Tensor) -> Tensor:
    """Attention of one prompt [T, heads, head_dim], by torch on the CPU."""
    distance = torch.arange(len(fused))[:, None] - torch.arange(len(fused))
    seen = (distance >= 0) & (distance < (spec.window or len(fused)))
    query, key, value = (each.transpose(0, 1) for each in _heads(fused, spec))
    found = F.scaled_dot_product_attention(query, key, value, seen, scale=spec.scale, enable_gqa=True)
    return found.transpose(0, 1)
