"""A stream of tokens: feed, choose, feed what was chosen, until something ends it.

Made of a sequence's own calls, one a token, so that whatever holds for those holds here.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator
from typing import Final, Protocol

from ferrum_rpc.client.answer import Answer
from ferrum_rpc.client.context import Context
from ferrum_rpc.client.sampling import Sampler, Sampling
from ferrum_rpc.core import OutputSpec

GREEDILY: Final = Sampling(temperature=0)


class Fed(Protocol):
    """What `generated` needs of a `Sequence`."""

    @property
    def length(self) -> int:
        """Tokens in the cache."""

    async def prefill(self, tokens: list[int], output: OutputSpec, *, timeout_s: float | None) -> Answer:
        """Feed tokens."""

    async def decode(self, token: int, output: OutputSpec, *, timeout_s: float | None) -> Answer:
        """Feed one token."""


async def generated(
    sequence: Fed,
    context: Context,
    tokens: list[int],
    *,
    most: int | None,
    sampling: Sampling,
    ends: frozenset[int] | None,
    timeout_s: float | None,
) -> AsyncGenerator[int, None]:
    """The tokens that follow ``tokens``: ``most`` of them at most, none of ``ends`` (None: the model's)."""
    info = await context.info(context.deadline(timeout_s))
    sampler = Sampler(sampling, info)
    if ends is None:
        ends = frozenset(info.model.eos_token_ids)
    answer = await sequence.prefill(tokens, sampler.output, timeout_s=timeout_s)
    for count in itertools.count(1):
        token = sampler.pick(answer, request=0, position=answer.length)
        if token in ends:
            return
        yield token
        if count == most or sequence.length >= info.model.max_context:
            return
        answer = await sequence.decode(token, sampler.output, timeout_s=timeout_s)
