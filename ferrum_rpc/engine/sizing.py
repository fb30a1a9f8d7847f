"""What a model takes of a memory, before any of its weights is read: weights, the largest step, and the cache.

The cache gets a share of what the weights leave. `size_cache` is the one place that says how large it is: `make_plan`
asks it with the weights' size as computed, `engine.build` with the memory that is free once they are loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import structlog
import torch

from ferrum_rpc.attention.backend import NATIVE, TORCH
from ferrum_rpc.attention.torch_paged import scratch_bytes
from ferrum_rpc.config import SETTINGS, ModelSettings
from ferrum_rpc.engine.choices import IDENTITY, QUANTIZE_INT8, Parts, Pretrained, choose_parts
from ferrum_rpc.engine.hf_model import Borrowed
from ferrum_rpc.errors import ExecutorError, InvalidRequest, counted
from ferrum_rpc.models.footprint import THREAD_BYTES
from ferrum_rpc.models.identity import IdentityModel
from ferrum_rpc.sampling.rows import HEAD_ROWS

log = structlog.get_logger("ferrum_rpc.engine")

CPU_SHARE: Final = 0.25
CPU_MOST: Final = 4 << 30
CUDA_SHARE: Final = 0.85

LEAST_STEP: Final = 256
"""Tokens below which no smaller step or cache is proposed."""


class LargestStep(NamedTuple):
    """Tokens of a step, and how many of them are asked for logits at once."""

    tokens: int = SETTINGS["max_batch_tokens"].default
    sequences: int = SETTINGS["max_batch_items"].default


@dataclass(frozen=True, slots=True)
class Plan:
    """Bytes, blocks and tokens. ``memory_bytes``: what is free before anything is loaded. ``adapters_bytes``: what is
    kept for them. ``step_tokens``: of the largest step that the cache can hold. ``kv_dtype``: what keys and values are
    kept as. ``reason``: of the cache's size, or why it holds no block. ``alternative``: flags that fit, where these do
    not. ``estimated``: activations are, on the safe side. ``ranks``: how many share the model; all else is of the first
    of them alone."""

    architecture: str
    device: str
    dtype: str
    quantize: str
    memory_bytes: int
    weights_bytes: int
    adapters_bytes: int
    activations_bytes: int
    step_tokens: int
    kv_dtype: str
    kv_bytes_per_token: int
    block_size: int
    kv_blocks: int
    max_context: int
    reason: str
    alternative: str = ""
    estimated: bool = False
    ranks: int = 1

    @property
    def kv_tokens(self) -> int:
        """Tokens that the cache holds."""
        return self.kv_blocks * self.block_size

    @property
    def kv_bytes(self) -> int:
        """Of all blocks, and of the null block, which holds no tokens."""
        return (self.kv_blocks + 1) * self.block_size * self.kv_bytes_per_token

    @property
    def full_sequences(self) -> float:
        """Sequences of the longest length that the cache holds."""
        return self.kv_blocks / -(-self.max_context // self.block_size)

    @property
    def total_bytes(self) -> int:
        """Of everything."""
        return self.weights_bytes + self.adapters_bytes + self.activations_bytes + self.kv_bytes

    @property
    def fits(self) -> bool:
        """Whether all of it fits, with a cache of one block at least."""
        return self.kv_blocks > 0 and self.total_bytes <= self.memory_bytes

    @property
    def advice(self) -> str:
        """What to do where it does not fit, or where no sequence can become as long as it may; or nothing."""
        if not self.fits:
            if self.total_bytes <= self.memory_bytes and not self.alternative:
                return self.reason
            weights, step, cache = map(gib, (self.weights_bytes, self.activations_bytes, self.kv_bytes))
            weights += " of weights"
            if self.adapters_bytes:
                weights += f" and {gib(self.adapters_bytes)} of adapters"
            parts = f"{weights}, {step} for a step of {self.step_tokens:,} tokens and {cache} of cache"
            better = f"{self.alternative} would fit" if self.alternative else "nor would a smaller step or cache"
            return f"{parts} do not fit {gib(self.memory_bytes)}; {better}"
        if self.full_sequences < 1:
            longer = -(-self.max_context // self.block_size) - self.kv_blocks
            needed = longer * self.block_size * self.kv_bytes_per_token
            wider = f", or {gib(needed)} more of cache" if needed <= self.memory_bytes - self.total_bytes else ""
            return (
                f"the cache holds no sequence of {self.max_context:,} tokens; it would with "
                f"--max-context {self.kv_tokens}{wider}"
            )
        return ""


def gib(count: int) -> str:
    """A number of bytes, for people."""
    return f"{count / 2**30:,.2f} GiB" if count >= 2**27 else f"{count / 2**20:,.2f} MiB"


def mib(count: int) -> str:
    """The size of a cache, for people."""
    return f"{count / 2**20:.0f} MiB" if count >= 10 << 20 else f"{count / 2**10:.0f} KiB"


def size_cache(config: ModelSettings, block_bytes: int, max_context: int, device: str, left: int) -> tuple[int, str]:
    """``(blocks, reason)``, the null block not counted; ``left``: bytes that the weights leave. Raises InvalidRequest
    where that is no block."""
    if config.kv_blocks is not None:
        return config.kv_blocks, "requested"
    if config.kv_memory is not None:
        budget, reason = config.kv_memory, "requested"
    elif device == "cuda":
        budget = int(left * CUDA_SHARE)
        reason = f"{CUDA_SHARE:.0%} of the device memory that the weights left"
    else:
        budget = min(int(left * CPU_SHARE), CPU_MOST)
        reason = f"{CPU_SHARE:.0%} of the free memory, at most {CPU_MOST >> 30} GiB"
    useful = config.max_sequences * -(-max_context // config.block_size)
    blocks = min(budget // block_bytes, useful)
    if blocks == useful:
        reason += f"; {counted(config.max_sequences, 'sequence')} of {max_context} tokens need no more"
        if config.kv_memory is not None:
            reason = f"{mib(config.kv_memory)} {reason}"
    if blocks < 1:
        raise InvalidRequest(
            f"kv memory of {budget} bytes holds no block of {block_bytes} bytes; raise --kv-memory",
            field="kv_memory",
        )
    return blocks, reason


def adapter_bytes(config: ModelSettings) -> int:
    """Memory that is kept for adapters."""
    return 0 if config.adapter_dir is None else config.adapter_memory


def make_plan(parts: Parts, config: ModelSettings, largest: LargestStep, memory: int) -> Plan:
    """What ``parts`` take of ``memory`` free bytes, and settings that fit where these do not."""
    plan = _plan(parts, config, largest, memory)
    no_block = not plan.kv_blocks and config.kv_memory is not None and plan.total_bytes <= memory
    if not plan.fits and not no_block:
        for alternative, other in _alternatives(parts, config, largest, memory):
            if other.fits:
                return replace(plan, alternative=alternative)
    return plan


def announce(plan: Plan) -> None:
    """Log the plan of a server that is about to load. Raises InvalidRequest where the weights alone do not fit."""
    if 0 < plan.memory_bytes < plan.weights_bytes:  # 0: it is not known
        raise InvalidRequest(plan.advice, field="model")
    log.info(
        "plan",
        weights_bytes=plan.weights_bytes,
        activations_bytes=plan.activations_bytes,
        step_tokens=plan.step_tokens,
        kv_bytes=plan.kv_bytes,
        kv_blocks=plan.kv_blocks,
        memory_bytes=plan.memory_bytes,
    )
    if plan.memory_bytes and plan.advice:
        log.warning(
            "plan_is_tight", reason=plan.advice, action="look at it with `ferrum-rpc plan`, and set what it says"
        )


def _plan(parts: Parts, config: ModelSettings, largest: LargestStep, memory: int) -> Plan:
    model = parts.model
    weights, architecture = 0, IDENTITY
    if not isinstance(model, IdentityModel):
        weights, architecture = model.weight_bytes(), model.architecture
    adapters = adapter_bytes(config)
    block_bytes, left = parts.slot_bytes * config.block_size, max(0, memory - weights - adapters)
    try:
        blocks, reason = size_cache(config, block_bytes, parts.max_context, parts.device.type, left)
    except InvalidRequest as error:
        blocks, reason = 0, error.message
    held = blocks * config.block_size or parts.max_context
    tokens = min(largest.tokens, held)
    return Plan(
        architecture=architecture,
        device=parts.device.type,
        dtype=str(parts.dtype).removeprefix("torch."),
        quantize=config.quantize,
        memory_bytes=memory,
        weights_bytes=weights,
        adapters_bytes=adapters,
        activations_bytes=_activations(parts, tokens, min(tokens, largest.sequences), min(parts.max_context, held)),
        step_tokens=tokens,
        kv_dtype=str(parts.cache[0].dtype).removeprefix("torch.") if config.kv_dtype == "auto" else config.kv_dtype,
        kv_bytes_per_token=parts.slot_bytes,
        block_size=config.block_size,
        kv_blocks=blocks,
        max_context=parts.max_context,
        reason=reason,
        estimated=isinstance(model, Borrowed),
        ranks=config.ranks,
    )


def _activations(parts: Parts, tokens: int, sequences: int, context: int) -> int:
    """Of a step of ``tokens`` tokens, the last of a sequence of ``context``, that wants logits of ``sequences``."""
    model, name = parts.model, parts.attention[0]
    if isinstance(model, IdentityModel):
        return 0
    kept = passing = 0
    attends = isinstance(model, Pretrained) and model.making.attends
    if name == TORCH or (name == NATIVE and not attends):
        longest = min(tokens, context)
        pairs = set(zip(parts.layers, parts.cache, strict=True))
        scratch = {
            (each.window, each.softcap, each.sinks): scratch_bytes(each, parts.dtype, own.slot_bytes, longest, context)
            for each, own in pairs
        }.values()
        kept = max(each.gathered for each in scratch) + sum(each.mask for each in scratch)
        passing = max(each.passing for each in scratch)
    if parts.device.type == "cpu":
        kept += torch.get_num_threads() * THREAD_BYTES * max(each.head_dim for each in parts.layers)
    return kept + model.activation_bytes(tokens, min(sequences, HEAD_ROWS), passing)


def _alternatives(parts: Parts, config: ModelSettings, largest: LargestStep, memory: int) -> Iterator[tuple[str, Plan]]:
    """Flags that take less, and their plans: a smaller cache, then smaller steps, then smaller weights."""
    for dtype, other in (
        ("", config),
        ("--quantize int8", replace(config, quantize=QUANTIZE_INT8)),
        ("--dtype bfloat16", replace(config, dtype="bfloat16")),
        ("--dtype bfloat16 --quantize int8", replace(config, dtype="bfloat16", quantize=QUANTIZE_INT8)),
    ):
        if dtype:
            if other == config or isinstance(parts.model, IdentityModel):
                continue
            try:
                parts = choose_parts(other, elsewhere=parts.elsewhere)
            except ExecutorError:  # not on this device
                continue
        tokens = largest.tokens
        while tokens >= min(LEAST_STEP, largest.tokens):
            step = "" if tokens == largest.tokens else f"--max-batch-tokens {tokens}"
            try:
                plan = _plan(parts, other, largest._replace(tokens=tokens), memory)
            except InvalidRequest:  # its rows cannot be rounded
                break
            yield _flags(dtype, step), plan
            left = memory - plan.weights_bytes - plan.adapters_bytes - plan.activations_bytes
            blocks = left // (plan.block_size * plan.kv_bytes_per_token) - 1
            held = blocks * plan.block_size
            if held >= min(LEAST_STEP, plan.max_context):
                context = f"--max-context {held}" if held < plan.max_context else ""
                smaller = replace(other, kv_memory=None, kv_blocks=blocks)
                plan = _plan(parts, smaller, largest._replace(tokens=tokens), memory)
                yield _flags(dtype, step, f"--kv-blocks {blocks}", context), plan
            tokens //= 2


def _flags(*given: str) -> str:
    return " ".join(filter(None, given))
