"""Peers that choose their next tokens themselves: an engine with a loop of steps over all of its requests.

The tokens that such a peer is given only say how many steps it takes; the work of a step is the same. Its prompts are
prefilled at the start of every round, untimed, and a step's time is that between two tokens of every sequence. A
prefill is timed from the request to its first token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from time import perf_counter
from typing import Final

from benchmarks.engines.peers.lines import Timed, timed

BEFORE: Final = 32  # tokens that a sequence may have before the last one has its first: prompts take several steps


class Generating(ABC):
    """A peer by three calls of its engine."""

    @abstractmethod
    def begin(self, prompts: Sequence[list[int]], tokens: int) -> None:
        """A greedy request of each prompt for ``tokens`` new tokens, whatever they are."""

    @abstractmethod
    def step(self) -> list[list[int]]:
        """A step of the engine: the new tokens of each request, in the order of the prompts."""

    @abstractmethod
    def end(self) -> None:
        """Forget all requests."""

    def prepare(self, prompts: list[list[int]], room: int) -> None:
        """The engine prefills at the start of every round."""
        self._prompts, self._room = prompts, room

    def decode(self, tokens: list[list[int]], lead_in: int) -> Timed:
        """As many steps in which every sequence gets a token."""
        self._start(self._prompts, self._room + BEFORE)
        step_s: list[float] = []
        began = perf_counter()
        while len(step_s) < len(tokens):
            found = [len(each) for each in self.step()]
            if any(found):
                step_s.append((ended := perf_counter()) - began)
                began = ended
                if set(found) != {1}:
                    raise RuntimeError(f"tokens of a step: {found}")
        self.end()
        return step_s[lead_in:], []  # tokens of its own are no answer to ours

    def prefill(self, prompts: list[list[int]], lead_in: int) -> Timed:
        """One request after the other; each ends with its first token."""
        return timed(lambda prompt: self._start([prompt], 1), prompts, lead_in, self.end)

    def _start(self, prompts: Sequence[list[int]], tokens: int) -> list[int]:
        """Requests until each has a token; the first ones."""
        first: dict[int, int] = {}
        self.begin(prompts, tokens)
        while len(first) < len(prompts):
            for index, found in enumerate(self.step()):
                if found:
                    first.setdefault(index, found[0])
        return [first[index] for index in range(len(prompts))]
