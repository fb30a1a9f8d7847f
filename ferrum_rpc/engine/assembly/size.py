"""The memory that a model needs, before any weight is read: weights, the largest step, and the cache.

The cache gets a share of what is left: on a CPU by the weights, on a GPU, which has no other use, by the weights and
all that a step needs besides (`StepBytes`). `size_cache` alone decides its size: `make_plan` calls it with the weights'
size as computed, `build` with the memory that is free once they are loaded, and on a GPU with a step that was measured
(`measure`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Final, NamedTuple

import torch

from ferrum_rpc.attention.backend import NATIVE, TORCH
from ferrum_rpc.attention.latent import scratch_bytes as latent_bytes
from ferrum_rpc.attention.torch_paged import scratch_bytes
from ferrum_rpc.config import SETTINGS, ModelSettings
from ferrum_rpc.core import blocks_held
from ferrum_rpc.engine.assembly.choose import QUANTIZE_INT4, QUANTIZE_INT8, Choices, choose
from ferrum_rpc.engine.assembly.plan import MemoryPlan, OtherRanks, mib
from ferrum_rpc.errors import ExecutorError, InvalidRequest, counted
from ferrum_rpc.models.footprint import THREAD_BYTES
from ferrum_rpc.sampling.rows import HEAD_ROWS

CPU_SHARE: Final = 0.25
CPU_MOST: Final = 4 << 30
CUDA_SHARE: Final = 0.97
"""Fraction of what weights, step and reserve leave; the rest is for the allocator's rounding."""

CUDA_RESERVE: Final = 600 << 20
"""Memory of a GPU that is neither weights nor tensors of a step: the context (some 500 MiB, of which the part is not
counted that it has before the weights are loaded), cuBLAS's workspaces (32 MiB a stream), captured graphs and their
outputs, the partial sums of split attention (16 MiB). Estimated; `python3 -m benchmarks.gpu first-light` measures."""

SAMPLING_BYTES: Final = 24
"""Bytes per logit of the rows that are sampled at once, in addition to the logit: weights and their filtered copy in
float32, sums of them in float64 and their scan. 20 were counted on a CPU's tensors without filters.
`sampling.triton_sample` takes none of them. Where torch sorts for top-k and top-p it takes 52 and the sort's own
buffers, which `measure` finds."""

PROCESS_BYTES: Final = 170 << 20
"""Bytes of another rank in addition to its part of the model: private pages of Python and torch (163 MiB)."""

LEAST_SLOTS: Final = 2

LEAST_STEP: Final = 256
"""Tokens below which no smaller step or cache is proposed."""


class LargestStep(NamedTuple):
    """Tokens of a step, and the maximum number of rows of logits at once."""

    tokens: int = SETTINGS["max_batch_tokens"].default
    sequences: int = SETTINGS["max_batch_items"].default


class StepBytes(NamedTuple):
    """Memory of a GPU that the cache leaves for the largest step: its ``activations`` (with logits), the ``sampling``
    of its rows, and the ``reserve``. ``measured``: whether a step has run."""

    activations: int = 0
    sampling: int = 0
    reserve: int = 0
    measured: bool = False

    @property
    def total(self) -> int:
        """The sum."""
        return self.activations + self.sampling + self.reserve

    def at_least(self, measured: int) -> StepBytes:
        """The same, with ``measured`` bytes for activations and sampling if these are more than was computed."""
        return self._replace(activations=max(self.activations, measured - self.sampling), measured=True)


def step_bytes(choices: Choices, largest: LargestStep) -> StepBytes:
    """The computed sizes for any step of up to ``largest``; 0 on a CPU, whose cache has a smaller share."""
    if choices.device.type == "cpu":
        return StepBytes()
    activations = _activations(choices, *largest, choices.max_context)
    return StepBytes(activations, _sampling(choices, largest), CUDA_RESERVE)


def size_states(config: ModelSettings, slot_bytes: int, left: int, step: StepBytes) -> int:
    """The slots for states of ``slot_bytes`` each, if the weights leave ``left`` bytes; ``step``: see `step_bytes`.
    Raises InvalidRequest if there is no room for two: one for a sequence, and one for its next chunk."""
    if not slot_bytes:
        return 0
    if config.state_slots is not None:
        return config.state_slots
    budget = _budget(config, left, step)
    slots = min(budget // 2 // slot_bytes, 2 * config.max_sequences)
    if slots < LEAST_SLOTS:
        raise InvalidRequest(
            f"half of a kv memory of {budget} bytes holds fewer than {LEAST_SLOTS} slots of {slot_bytes} bytes for "
            "states; raise --kv-memory, or set --state-slots",
            field="kv_memory",
        )
    return slots


def size_cache(
    config: ModelSettings, block_bytes: int, max_context: int, left: int, step: StepBytes, *, states: int = 0
) -> tuple[int, str]:
    """Returns ``(blocks, reason)``, without the null block. ``left``: bytes that the weights leave; ``step``: see
    `step_bytes`; ``states``: bytes of all slots. Raises InvalidRequest if there is room for no block."""
    if config.kv_blocks is not None:
        return config.kv_blocks, "requested"
    budget = _budget(config, left, step)
    if config.kv_memory is not None:
        reason = "requested"
    elif step.total:
        known = "measured" if step.measured else "computed"
        parts = f"{mib(step.activations)} of activations ({known}), {mib(step.sampling)} of sampling"
        reason = f"{CUDA_SHARE:.0%} of what weights and the largest step leave of the device memory; "
        reason += f"the step: {parts}, {mib(step.reserve)} in reserve"
        if budget < block_bytes:
            raise InvalidRequest(
                f"{mib(left)} of device memory without the weights leave no block of {block_bytes} bytes besides the "
                f"largest step ({parts}, {mib(step.reserve)} in reserve); lower --max-batch-tokens",
                field="max_batch_tokens",
            )
    else:
        reason = f"{CPU_SHARE:.0%} of the free memory, at most {CPU_MOST >> 30} GiB"
    if states:
        budget, reason = max(0, budget - states), f"{reason}, less the states"
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


def _budget(config: ModelSettings, left: int, step: StepBytes) -> int:
    """Bytes of blocks and slots."""
    if config.kv_memory is not None:
        return config.kv_memory
    return int(max(0, left - step.total) * CUDA_SHARE) if step.total else min(int(left * CPU_SHARE), CPU_MOST)


def adapter_bytes(config: ModelSettings) -> int:
    """Bytes reserved for adapters."""
    return 0 if config.adapter_dir is None else config.adapter_memory


def make_plan(choices: Choices, largest: LargestStep, memory: int, here: int | None = None) -> MemoryPlan:
    """The plan of ``choices``, which are the first rank's, in ``memory`` free bytes, with settings that fit if these do
    not. ``here``: how many ranks use that memory; None: all on a CPU, one on each GPU."""
    config = choices.config
    if here is None:
        here = config.ranks if choices.device.type == "cpu" else 1
    plan = _plan(choices, config, largest, memory, here)
    no_block = not plan.kv_blocks and config.kv_memory is not None and plan.all_bytes <= memory
    if not plan.fits and not no_block:
        for alternative, other in _alternatives(choices, largest, memory, here):
            if other.fits:
                return replace(plan, alternative=alternative)
    return plan


def _plan(choices: Choices, config: ModelSettings, largest: LargestStep, memory: int, here: int) -> MemoryPlan:
    """``config``: that of ``choices``, or the same with another cache."""
    facts, others = choices.facts, _others(choices, here)
    weights, adapters = choices.source.weight_bytes(), adapter_bytes(config)
    of_others = [(each, count, each.source.weight_bytes()) for each, count in others]
    taken = weights + sum(count * (size + PROCESS_BYTES) for _, count, size in of_others)
    block_bytes, left = choices.slot_bytes * config.block_size, max(0, (memory - taken) // here - adapters)
    reserved = step_bytes(choices, largest)
    slots = 0
    try:
        slots = size_states(config, choices.state_bytes, left, reserved)
        states = slots * choices.state_bytes
        blocks, reason = size_cache(config, block_bytes, choices.max_context, left, reserved, states=states)
    except InvalidRequest as error:
        blocks, reason = 0, error.message
    held = blocks * config.block_size or choices.max_context
    tokens = min(largest.tokens, held)
    step = tokens, min(tokens, largest.sequences), min(choices.max_context, held)
    return MemoryPlan(
        architecture=facts.architecture,
        device=choices.device.type,
        dtype=str(facts.dtype).removeprefix("torch."),
        quantize=facts.quantized,
        memory_bytes=memory,
        weights_bytes=weights,
        adapters_bytes=adapters,
        activations_bytes=_activations(choices, *step),
        sampling_bytes=reserved.sampling,
        reserve_bytes=reserved.reserve,
        step_tokens=tokens,
        kv_dtype=str(choices.cache[0].dtype).removeprefix("torch.") if config.kv_dtype == "auto" else config.kv_dtype,
        kv_bytes_per_token=choices.slot_bytes,
        block_size=config.block_size,
        kv_blocks=blocks,
        max_context=choices.max_context,
        sequence_blocks=_sequence_blocks(choices, config.block_size, tokens),
        reason=reason,
        estimated=facts.estimated,
        ranks=config.ranks,
        others=OtherRanks(
            ranks=here - 1,
            weights_bytes=sum(count * size for _, count, size in of_others),
            fixed_bytes=sum(count * (PROCESS_BYTES + adapters + _activations(each, *step)) for each, count in others),
            kv_bytes_per_token=sum(count * each.slot_bytes for each, count in others),
            state_bytes=sum(count * each.state_bytes for each, count in others),
        ),
        state_slots=slots,
        state_bytes=choices.state_bytes,
    )


def _sequence_blocks(choices: Choices, block_size: int, tokens: int) -> int:
    """The most blocks that a sequence of the maximum length holds, in a step of ``tokens`` tokens."""
    longest, window = choices.max_context, choices.window
    return blocks_held(longest - min(tokens, longest), longest, block_size, None if window is None else window.kept)


def _others(choices: Choices, here: int) -> list[tuple[Choices, int]]:
    """The shares of the other ranks, and how many have each: in a stage, no rank has more than its first."""
    width = choices.config.tensor_parallel
    stages = Counter(rank // width for rank in range(1, here))
    return [
        (choose(choices.config, elsewhere=choices.elsewhere, rank=stage * width) if stage else choices, count)
        for stage, count in stages.items()
    ]


def _activations(choices: Choices, tokens: int, sequences: int, context: int) -> int:
    """Bytes of a step of ``tokens`` tokens, the last of a sequence of ``context``, with logits of ``sequences``
    rows."""
    facts, kept, passing = choices.facts, 0, 0
    if not facts.numbers:
        return 0
    if any(each.latent for each in facts.layers):
        longest = min(tokens, context)
        passing = max(latent_bytes(each, facts.dtype, longest, context) for each in set(facts.layers))
    elif choices.attention[0] == TORCH or (choices.attention[0] == NATIVE and not choices.attends_in_c):
        longest = min(tokens, context)
        pairs = set(zip(facts.layers, choices.cache, strict=True))
        scratch = {
            (each.window, each.softcap, each.sinks): scratch_bytes(each, facts.dtype, own.slot_bytes, longest, context)
            for each, own in pairs
        }.values()
        kept = max(each.gathered for each in scratch) + sum(each.mask for each in scratch)
        passing = max(each.passing for each in scratch)
    if choices.device.type == "cpu":
        kept += torch.get_num_threads() * THREAD_BYTES * max(each.head_dim for each in facts.layers)
    attending = None if choices.attends_in_c else passing
    return kept + choices.source.activation_bytes(tokens, min(sequences, HEAD_ROWS), attending)


def _sampling(choices: Choices, largest: LargestStep) -> int:
    """Bytes of the rows that `sampling.rows` samples at once, for this rank's part of the vocabulary."""
    logits = -(-choices.facts.vocab_size // choices.config.tensor_parallel) * min(*largest, HEAD_ROWS)
    return SAMPLING_BYTES * logits


def _alternatives(choices: Choices, largest: LargestStep, memory: int, here: int) -> Iterator[tuple[str, MemoryPlan]]:
    """Flags that need less memory, and their plans: a smaller cache, then smaller steps, then smaller weights."""
    config = choices.config
    for dtype, other in (
        ("", config),
        ("--quantize int8", replace(config, quantize=QUANTIZE_INT8)),
        ("--quantize int4", replace(config, quantize=QUANTIZE_INT4)),
        ("--dtype bfloat16", replace(config, dtype="bfloat16")),
        ("--dtype bfloat16 --quantize int8", replace(config, dtype="bfloat16", quantize=QUANTIZE_INT8)),
        ("--dtype bfloat16 --quantize int4", replace(config, dtype="bfloat16", quantize=QUANTIZE_INT4)),
    ):
        if dtype:
            if other == config or not choices.facts.numbers:
                continue
            try:
                choices = choose(other, elsewhere=choices.elsewhere)
            except ExecutorError:  # not on this device
                continue
        tokens = largest.tokens
        while tokens >= min(LEAST_STEP, largest.tokens):
            step = "" if tokens == largest.tokens else f"--max-batch-tokens {tokens}"
            try:
                plan = _plan(choices, other, largest._replace(tokens=tokens), memory, here)
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
                plan = _plan(choices, smaller, largest._replace(tokens=tokens), memory, here)
                yield _flags(dtype, step, f"--kv-blocks {blocks}", context), plan
            tokens //= 2


def _flags(*given: str) -> str:
    return " ".join(filter(None, given))
