"""The memory plan of a model, from the numbers of `size`: what fits, and what to do if it does not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import structlog

from ferrum_rpc.errors import InvalidRequest, counted

log = structlog.get_logger("ferrum_rpc.engine")


class OtherRanks(NamedTuple):
    """The other ``ranks`` of the same model that use the same memory, in total. ``fixed_bytes``: all but weights and
    cache."""

    ranks: int = 0
    weights_bytes: int = 0
    fixed_bytes: int = 0
    kv_bytes_per_token: int = 0
    state_bytes: int = 0


NO_OTHERS: Final = OtherRanks()


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes, blocks and tokens. ``memory_bytes``: free memory before anything is loaded. ``adapters_bytes``: reserved
    for adapters. ``sampling_bytes``: for the rows of the largest step, in addition to its activations;
    ``reserve_bytes``: what stays free on a GPU; both are 0 on a CPU. ``step_tokens``: of the largest step that the
    cache can hold. ``kv_dtype``: the dtype of the cache. ``reason``: of the cache's size, or why it holds no block.
    ``alternative``: flags that fit, if these do not. ``estimated``: the activations are a conservative estimate.
    ``ranks``: how many share the model; except for ``others``, all numbers are those of the first.
    ``state_slots``: slots for the recurrent states of sequences, of ``state_bytes`` each."""

    architecture: str
    device: str
    dtype: str
    quantize: str
    memory_bytes: int
    weights_bytes: int
    adapters_bytes: int
    activations_bytes: int
    sampling_bytes: int
    reserve_bytes: int
    step_tokens: int
    kv_dtype: str
    kv_bytes_per_token: int
    block_size: int
    kv_blocks: int
    max_context: int
    sequence_blocks: int
    reason: str
    alternative: str = ""
    estimated: bool = False
    ranks: int = 1
    others: OtherRanks = NO_OTHERS
    state_slots: int = 0
    state_bytes: int = 0

    @property
    def kv_tokens(self) -> int:
        """Capacity of the cache, in tokens."""
        return self.kv_blocks * self.block_size

    @property
    def kv_bytes(self) -> int:
        """Bytes of all blocks, and of the null block, which holds no tokens."""
        return (self.kv_blocks + 1) * self.block_size * self.kv_bytes_per_token

    @property
    def slots_bytes(self) -> int:
        """Bytes of all slots for states."""
        return self.state_slots * self.state_bytes

    @property
    def full_sequences(self) -> float:
        """How many sequences of the maximum length the cache holds."""
        return self.kv_blocks / self.sequence_blocks

    @property
    def total_bytes(self) -> int:
        """Bytes of everything."""
        return self.weights_bytes + self.adapters_bytes + self.step_bytes + self.kv_bytes + self.slots_bytes

    @property
    def step_bytes(self) -> int:
        """Bytes of the largest step and of the reserve."""
        return self.activations_bytes + self.sampling_bytes + self.reserve_bytes

    @property
    def all_bytes(self) -> int:
        """Bytes of all ranks that use this memory."""
        cache = (self.kv_blocks + 1) * self.block_size * self.others.kv_bytes_per_token
        cache += self.state_slots * self.others.state_bytes
        return self.total_bytes + self.others.weights_bytes + self.others.fixed_bytes + cache

    @property
    def fits(self) -> bool:
        """Whether all of it fits, with a cache of one block at least."""
        return self.kv_blocks > 0 and self.all_bytes <= self.memory_bytes

    @property
    def advice(self) -> str:
        """What to do if it does not fit, or if no sequence can reach the maximum length; empty otherwise."""
        if not self.fits:
            if self.all_bytes <= self.memory_bytes and not self.alternative:
                return self.reason
            weights, step, cache = map(gib, (self.weights_bytes, self.step_bytes, self.kv_bytes + self.slots_bytes))
            weights += " of weights"
            if self.adapters_bytes:
                weights += f" and {gib(self.adapters_bytes)} of adapters"
            parts = f"{weights}, {step} for a step of {self.step_tokens:,} tokens and {cache} of cache"
            if self.others.ranks:
                parts += f", in all {gib(self.all_bytes)} with the other {counted(self.others.ranks, 'rank')} here,"
            better = f"{self.alternative} would fit" if self.alternative else "nor would a smaller step or cache"
            return f"{parts} do not fit {gib(self.memory_bytes)}; {better}"
        if self.full_sequences < 1:
            longer = self.sequence_blocks - self.kv_blocks
            needed = longer * self.block_size * self.kv_bytes_per_token
            of_all = longer * self.block_size * (self.kv_bytes_per_token + self.others.kv_bytes_per_token)
            wider = f", or {gib(needed)} more of cache" if of_all <= self.memory_bytes - self.all_bytes else ""
            return (
                f"the cache holds no sequence of {self.max_context:,} tokens; it would with "
                f"--max-context {self.kv_tokens}{wider}"
            )
        return ""


def gib(count: int) -> str:
    """A readable number of bytes."""
    return f"{count / 2**30:,.2f} GiB" if count >= 2**27 else f"{count / 2**20:,.2f} MiB"


def mib(count: int) -> str:
    """A readable size of a cache."""
    return f"{count / 2**20:.0f} MiB" if count >= 10 << 20 else f"{count / 2**10:.0f} KiB"


def announce(plan: MemoryPlan) -> None:
    """Log the plan of a server that is about to load. Raises InvalidRequest if the weights alone do not fit."""
    if 0 < plan.memory_bytes < plan.weights_bytes + plan.others.weights_bytes:  # 0: it is not known
        raise InvalidRequest(plan.advice, field="model")
    log.info(
        "memory_planned",
        weights_bytes=plan.weights_bytes,
        activations_bytes=plan.activations_bytes,
        **({"sampling_bytes": plan.sampling_bytes, "reserve_bytes": plan.reserve_bytes} if plan.reserve_bytes else {}),
        step_tokens=plan.step_tokens,
        kv_bytes=plan.kv_bytes,
        kv_blocks=plan.kv_blocks,
        **({"state_slots": plan.state_slots, "slots_bytes": plan.slots_bytes} if plan.state_slots else {}),
        memory_bytes=plan.memory_bytes,
        **({"ranks_here": 1 + plan.others.ranks, "all_bytes": plan.all_bytes} if plan.others.ranks else {}),
    )
    if plan.memory_bytes and plan.advice:
        log.warning(
            "memory_plan_tight",
            reason=plan.advice,
            action="look at it with `ferrum-rpc plan`, and set the values that it gives",
        )
