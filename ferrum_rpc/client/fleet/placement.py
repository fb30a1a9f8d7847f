"""The placement of new sequences: a choice among executors by their last known state. No IO."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

NOISE_BLOCKS: Final = 4
"""Executors whose room differs by no more than this are equal in it."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """An executor that accepts new sequences, as of its last answer. ``free_blocks`` does not include blocks counted
    since for sequences whose prompts have not arrived.

    ``cached_tokens``: tokens of the prompt in its prefix cache, by its events. ``queued_items``, ``queued_tokens``: the
    work that waits for a step there. ``max_batch_items``: the maximum of a step. ``own_sequences``: this client's
    sequences there, including those being created. ``turn``: a growing number that orders this client's choices; 0:
    never chosen.
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
        """The number of blocks for so many tokens."""
        return -(-tokens // self.block_size)


class Placement(Protocol):
    """Chooses executors for sequences."""

    def choose(self, prompt: Sequence[int], candidates: Sequence[Candidate]) -> Candidate:
        """One of the ``candidates``, of which there is at least one, for a sequence that begins with ``prompt``; none
        of it is known where the sequence is to be imported."""


class LongestPrefix:
    """The longest known prefix, weighed against free blocks and the queue: the cached part of the prompt counts as a
    fraction of the prompt, the cache in use as a fraction of the cache, the queue as a fraction of a step, and an
    executor without capacity for the rest comes last. So a fully cached prompt goes to its executor, unless that one is
    fuller than another by a whole cache. Among executors that differ only by a few free blocks, the one with the fewest
    sequences of this client is chosen, then the one that was chosen longest ago."""

    def choose(self, prompt: Sequence[int], candidates: Sequence[Candidate]) -> Candidate:
        """The one of least cost, or one of those of about the same cost."""
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
