"""What a model takes of a memory, before any of its weights is read: weights, the largest step, and the cache.

The cache gets a share of what the weights leave. `size_cache` is the one place that says how large it is: `make_plan`
asks it with the weights' size as computed, `build` with the memory that is free once they are loaded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Final, NamedTuple

import torch

from ferrum_rpc.attention.backend import NATIVE, TORCH
from ferrum_rpc.attention.torch_paged import scratch_bytes
from ferrum_rpc.config import IDENTITY, SETTINGS, ModelSettings
from ferrum_rpc.engine.assembly.choose import QUANTIZE_INT8, Parts, Pretrained, choose_parts
from ferrum_rpc.engine.assembly.hf_source import Borrowed
from ferrum_rpc.engine.assembly.plan import MemoryPlan, Others, mib
from ferrum_rpc.errors import ExecutorError, InvalidRequest, counted
from ferrum_rpc.models.footprint import THREAD_BYTES
from ferrum_rpc.models.identity import IdentityModel
from ferrum_rpc.sampling.rows import HEAD_ROWS

CPU_SHARE: Final = 0.25
CPU_MOST: Final = 4 << 30
CUDA_SHARE: Final = 0.85

PROCESS_BYTES: Final = 170 << 20
"""What another rank takes beside its part of the model: pages of Python and torch that are its own (163 MiB)."""

LEAST_STEP: Final = 256
"""Tokens below which no smaller step or cache is proposed."""


class LargestStep(NamedTuple):
    """Tokens of a step, and how many of them are asked for logits at once."""

    tokens: int = SETTINGS["max_batch_tokens"].default
    sequences: int = SETTINGS["max_batch_items"].default


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


def make_plan(
    parts: Parts, config: ModelSettings, largest: LargestStep, memory: int, here: int | None = None
) -> MemoryPlan:
    """What ``parts``, the first rank's, take of ``memory`` free bytes, and settings that fit where these do not.
    ``here``: how many ranks take of it; None: all, of the memory of a CPU, and on GPUs each of its own."""
    if here is None:
        here = config.ranks if parts.device.type == "cpu" else 1
    plan = _plan(parts, config, largest, memory, here)
    no_block = not plan.kv_blocks and config.kv_memory is not None and plan.all_bytes <= memory
    if not plan.fits and not no_block:
        for alternative, other in _alternatives(parts, config, largest, memory, here):
            if other.fits:
                return replace(plan, alternative=alternative)
    return plan


def _plan(parts: Parts, config: ModelSettings, largest: LargestStep, memory: int, here: int) -> MemoryPlan:
    model, others = parts.model, _others(parts, config, here)
    weights, architecture = _weight_bytes(parts), IDENTITY
    if not isinstance(model, IdentityModel):
        architecture = model.architecture
    adapters = adapter_bytes(config)
    of_others = sum(count * (_weight_bytes(each) + PROCESS_BYTES) for each, count in others)
    block_bytes, left = parts.slot_bytes * config.block_size, max(0, (memory - weights - of_others) // here - adapters)
    try:
        blocks, reason = size_cache(config, block_bytes, parts.max_context, parts.device.type, left)
    except InvalidRequest as error:
        blocks, reason = 0, error.message
    held = blocks * config.block_size or parts.max_context
    tokens = min(largest.tokens, held)
    step = tokens, min(tokens, largest.sequences), min(parts.max_context, held)
    return MemoryPlan(
        architecture=architecture,
        device=parts.device.type,
        dtype=str(parts.dtype).removeprefix("torch."),
        quantize=config.quantize,
        memory_bytes=memory,
        weights_bytes=weights,
        adapters_bytes=adapters,
        activations_bytes=_activations(parts, *step),
        step_tokens=tokens,
        kv_dtype=str(parts.cache[0].dtype).removeprefix("torch.") if config.kv_dtype == "auto" else config.kv_dtype,
        kv_bytes_per_token=parts.slot_bytes,
        block_size=config.block_size,
        kv_blocks=blocks,
        max_context=parts.max_context,
        reason=reason,
        estimated=isinstance(model, Borrowed),
        ranks=config.ranks,
        others=Others(
            ranks=here - 1,
            weights_bytes=sum(count * _weight_bytes(each) for each, count in others),
            fixed_bytes=sum(count * (PROCESS_BYTES + adapters + _activations(each, *step)) for each, count in others),
            kv_bytes_per_token=sum(count * each.slot_bytes for each, count in others),
        ),
        kv_copied_bytes_per_token=parts.copied_bytes,
    )


def _others(parts: Parts, config: ModelSettings, here: int) -> list[tuple[Parts, int]]:
    """What the ranks beside the first have, and how many have it: of a stage, none has more than its first."""
    width = config.tensor_parallel
    stages = Counter(rank // width for rank in range(1, here))
    return [
        (choose_parts(config, elsewhere=parts.elsewhere, rank=stage * width) if stage else parts, count)
        for stage, count in stages.items()
    ]


def _weight_bytes(parts: Parts) -> int:
    return 0 if isinstance(parts.model, IdentityModel) else parts.model.weight_bytes()


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


def _alternatives(
    parts: Parts, config: ModelSettings, largest: LargestStep, memory: int, here: int
) -> Iterator[tuple[str, MemoryPlan]]:
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
                plan = _plan(parts, other, largest._replace(tokens=tokens), memory, here)
            except InvalidRequest:  # its rows cannot be rounded
                break
            yield _flags(dtype, step), plan
            slot_bytes = plan.kv_bytes_per_token + plan.others.kv_bytes_per_token
            left = memory - plan.all_bytes + (plan.kv_blocks + 1) * plan.block_size * slot_bytes
            blocks = left // (plan.block_size * slot_bytes) - 1
            held = blocks * plan.block_size
            if held >= min(LEAST_STEP, plan.max_context):
                context = f"--max-context {held}" if held < plan.max_context else ""
                smaller = replace(other, kv_memory=None, kv_blocks=blocks)
                plan = _plan(parts, smaller, largest._replace(tokens=tokens), memory, here)
                yield _flags(dtype, step, f"--kv-blocks {blocks}", context), plan
            tokens //= 2


def _flags(*given: str) -> str:
    return " ".join(filter(None, given))
