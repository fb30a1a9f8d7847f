"""Sequences that are decoded together: one step in flight, like a scheduler's running batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np

from ferrum_rpc.bench.options import Workload
from ferrum_rpc.client import Answer, ExecutorClient, OutputSpec, Positions, StepTiming
from ferrum_rpc.errors import ExecutorError

GROWTH: Final = 64
"""Tokens by which a sequence outgrows the context before the step that rolls it back in the same call: rolling back at
every step would measure something that no scheduler does."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A step: its number of tokens, the executor's times, and refusals, of single sequences or of the step."""

    tokens: int = 0
    timing: StepTiming | None = None
    errors: list[ExecutorError] = field(default_factory=list)


class Batch:
    """``workload.batch`` sequences. Token ids are 1 to ``vocab_size`` - 1, by ``seed``; zeros are never fed.

    ``salt`` keeps the prompts apart from those of an earlier run in an executor that caches prefixes.
    """

    def __init__(
        self, client: ExecutorClient, workload: Workload, *, vocab_size: int, growth: int, seed: list[int], salt: bytes
    ) -> None:
        self._client = client
        self._workload = workload
        self._output = OutputSpec(Positions.LAST, workload.output)
        self._vocab_size = vocab_size
        self._growth = growth
        self._random = np.random.default_rng(seed)
        self._sequences = [client.sequence(cache_salt=salt) for _ in range(workload.batch)]
        self._next: list[int] | None = None

    def __len__(self) -> int:
        return len(self._sequences)

    async def prefill(self, at: int) -> Answer:
        """Feed a prompt to one sequence."""
        return await self._sequences[at].prefill(self._tokens(self._workload.prompt_tokens), self._output)

    async def settle(self, at: int) -> None:
        """Extend a sequence from its prompt to the context."""
        sequence, context = self._sequences[at], self._workload.context
        if sequence.length < context:
            await sequence.prefill(self._tokens(context - sequence.length), OutputSpec(Positions.NONE))
        elif sequence.length > context:
            await sequence.truncate(context)

    async def step(self) -> Outcome:
        """Decode one token of each sequence. After a refusal of all of them the next step feeds the same tokens, so
        that one with unknown outcome is settled under its request id and never runs twice."""
        if self._next is None:
            self._next = self._tokens(len(self))
        context = self._workload.context
        roll_back = [context if each.length - context >= self._growth else None for each in self._sequences]
        try:
            if self._workload.single:
                answer = await self._sequences[0].decode(self._next[0], self._output, truncate_to=roll_back[0])
                self._next = None
                return Outcome(1, answer.timing)
            results = await self._client.batch_decode(
                [
                    sequence.item([token], self._output, truncate_to=to)
                    for sequence, token, to in zip(self._sequences, self._next, roll_back, strict=True)
                ]
            )
        except ExecutorError as error:
            return Outcome(errors=[error])
        self._next = None
        answers = results.answers()
        return Outcome(len(answers), answers[0].timing if answers else None, results.errors())

    async def release(self) -> None:
        """Release the sequences."""
        for sequence in self._sequences:
            await sequence.release()

    def _tokens(self, count: int) -> list[int]:
        tokens: list[int] = self._random.integers(1, self._vocab_size, count).tolist()
        return tokens
