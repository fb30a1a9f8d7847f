"""What every engine is asked to do: the cells of the comparison, their tokens, and where they are to be.

A cell is one kind of step at one size. Its tokens come from fixed seeds and are chosen beforehand, so that every side
runs the same steps whatever it answers; greedy means that the arg-max of every row is taken and handed over. Prompts of
prefill rounds are never used twice: a cache of prefixes has nothing to find.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from benchmarks.workload import BLOCK_SIZE, LEAD_IN, SEED

PREFILL: Final = "prefill"
DECODE: Final = "decode"

Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Cell:
    """``batch`` sequences of ``context`` tokens that take a step (decode), or ``context`` tokens of a new one
    (prefill). ``target`` and ``goal``: tokens a second through gRPC, of performance work; nothing passes or fails.
    ``most``: timed steps of a round, at most."""

    kind: Literal["prefill", "decode"]
    batch: int
    context: int
    target: float | None = None
    goal: float | None = None
    most: int = 48

    @property
    def name(self) -> str:
        """``decode b8 @256``."""
        return f"prefill {self.context}" if self.kind == PREFILL else f"decode b{self.batch} @{self.context}"

    @property
    def tokens_per_step(self) -> int:
        """What a step counts for."""
        return self.context if self.kind == PREFILL else self.batch

    @property
    def blocks(self) -> int:
        """Blocks of the cache that its sequences take at their longest, a spare each for copies."""
        tokens = self.context if self.kind == PREFILL else self.context + LEAD_IN + self.most
        return self.batch * (-(-tokens // BLOCK_SIZE) + 1)

    def prompts(self, vocab_size: int) -> Tokens:
        """What the sequences hold before a decode round, int32 [batch, context]."""
        return self._draw(0, 0, vocab_size, (self.batch, self.context))

    def fed(self, vocab_size: int, steps: int) -> Tokens:
        """What is fed in a decode round, its untimed steps first: int32 [LEAD_IN + steps, batch]."""
        return self._draw(1, 0, vocab_size, (LEAD_IN + self.most, self.batch))[: LEAD_IN + steps]

    def fresh(self, vocab_size: int, number: int, steps: int) -> Tokens:
        """The prompts of prefill round ``number``, an untimed one first: int32 [1 + steps, context]."""
        return self._draw(2, number, vocab_size, (1 + steps, self.context))

    def _draw(self, stream: int, number: int, vocab_size: int, shape: tuple[int, int]) -> Tokens:
        seed = (SEED, stream, number, self.batch, self.context)
        return np.random.default_rng(seed).integers(0, vocab_size, shape, dtype=np.int32)


CELLS: Final = (
    Cell(PREFILL, 1, 512, target=1200, goal=1800),
    Cell(DECODE, 1, 512, target=14.5, goal=22),
    Cell(DECODE, 8, 256, target=90, goal=130),
    Cell(DECODE, 32, 256, target=180, goal=240),
)
"""Of the Qwen3-0.6B shape, bfloat16, on two cores."""

QUICK_CELLS: Final = (Cell(PREFILL, 1, 24, most=4), Cell(DECODE, 1, 24, most=4), Cell(DECODE, 3, 8, most=4))
"""Of the ``tiny`` shape: does everything run?"""
