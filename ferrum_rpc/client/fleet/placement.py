"""Where a new sequence goes: a choice among executors, of what is known of each. No IO."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

NOISE_BLOCKS: Final = 4
"""Executors whose room differs by no more than this are equal in it."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """An executor that takes new sequences, as its last answer told. Blocks that were promised since to sequences whose
    prompts have not arrived are not ``free_blocks``.

    ``cached_tokens``: tokens of the prompt that its prefix cache has, by its events. ``queued_items``,
    ``queued_tokens``: what waits for a step there. ``max_batch_items``: what a step takes. ``own_sequences``: those
    that this client has there, with those that are being made. ``turn``: when this client chose it last, as a number
    that grows; 0 never.
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
    own_sequences: int = 0
    turn: int = 0

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
    that one is fuller than another by a whole cache. Of those that differ only by a few blocks of room, the one with
    the fewest sequences of this client is chosen, then the one that was chosen longest ago."""

    def choose(self, prompt: Sequence[int], candidates: Sequence[Candidate]) -> Candidate:
        """The one of least cost, or one of those that are as good."""
        tokens = len(prompt)
        best = min(candidates, key=lambda each: self.cost(tokens, each))
        [short, work], used = self._work(tokens, best), self._used(best)
        equals = [
            each
            for each in candidates
            if self._work(tokens, each) <= (short, work)
            and self._used(each) - used <= NOISE_BLOCKS / max(1, each.total_blocks)
        ]
        return min(equals, key=lambda each: (each.own_sequences, each.turn))

    @classmethod
    def cost(cls, tokens: int, candidate: Candidate) -> tuple[bool, float]:
        """Lower is better."""
        short, work = cls._work(tokens, candidate)
        return short, work + cls._used(candidate)

    @staticmethod
    def _work(tokens: int, candidate: Candidate) -> tuple[bool, float]:
        missing = tokens - candidate.cached_tokens
        queue = candidate.queued_items / max(1, candidate.max_batch_items)
        return candidate.blocks(missing) > candidate.free_blocks, missing / max(1, tokens) + queue

    @staticmethod
    def _used(candidate: Candidate) -> float:
        return 1 - candidate.free_blocks / max(1, candidate.total_blocks)
