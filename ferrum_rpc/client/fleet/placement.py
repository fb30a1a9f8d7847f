"""Where a new sequence goes: a choice among executors, of what is known of each. No IO."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Candidate:
    """An executor that takes new sequences, as its last answer told. Blocks that were promised since to sequences whose
    prompts have not arrived are not ``free_blocks``.

    ``cached_tokens``: tokens of the prompt that its prefix cache has, by its events. ``queued_items``,
    ``queued_tokens``: what waits for a step there. ``max_batch_items``: what a step takes.
    """

    target: str
    instance_id: str
    cached_tokens: int
    free_blocks: int
    total_blocks: int
    block_size: int
    queued_items: int
    queued_tokens: int
    max_batch_items: int

    def blocks(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-tokens // self.block_size)


class Placement(Protocol):
    """Chooses executors for sequences."""

    def choose(self, prompt: Sequence[int], candidates: Sequence[Candidate]) -> Candidate:
        """One of the ``candidates``, of which there is at least one, for a sequence that begins with ``prompt``; none
        of it is known where the sequence is to be imported."""


class LongestPrefix:
    """The longest known prefix, weighed against free blocks and the queue: what an executor has of the prompt counts as
    its share of it, the cache in use as its share of the cache, the queue as its share of a step, and one that has no
    room for the rest comes after all that have. So a prompt that is wholly cached at one executor goes there unless
    that one is fuller than another by a whole cache."""

    def choose(self, prompt: Sequence[int], candidates: Sequence[Candidate]) -> Candidate:
        """The one of least cost; the first of equals."""
        return min(candidates, key=lambda each: self.cost(len(prompt), each))

    @staticmethod
    def cost(tokens: int, candidate: Candidate) -> tuple[bool, float]:
        """Lower is better."""
        missing = tokens - candidate.cached_tokens
        used = 1 - candidate.free_blocks / max(1, candidate.total_blocks)
        queue = candidate.queued_items / max(1, candidate.max_batch_items)
        return candidate.blocks(missing) > candidate.free_blocks, missing / max(1, tokens) + used + queue
