"""Drafts: guessed tokens, which the executor verifies in the step that decodes one token.

A guess costs the executor little and saves round trips if it is right. Drafts have no probabilities, so a text does not
depend on them: it is the greedy one, or that of its seed.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final, Protocol

from ferrum_rpc.client import Capability, ExecutorError, ExecutorInfo, ModelClient, Run, SequenceMisuseError
from ferrum_rpc.client import Sequence as CachedSequence
from ferrum_rpc.scheduler.request import Request

LONGEST_MATCH: Final = 4
FIRST_LENGTH: Final = 4
"""Tokens of a request's first draft."""
REST: Final = 32
"""Tokens that a request decodes by runs after a draft of which no token was accepted."""
AGAIN: Final = 256
"""Tokens by the faster of drafts and runs until the other is tried again."""
FAILURES: Final = 3
"""Failed drafts of a request after which it gets no more."""


class Drafter(Protocol):
    """A source of drafts."""

    async def draft(self, request: Request, most: int) -> list[int]:
        """Up to ``most`` tokens that may follow the request's tokens; none if there is no guess."""

    async def forget(self, requests: Iterable[Request]) -> None:
        """Requests have ended: free what was kept for them."""


class Lookup:
    """Prompt look-up (Saxena, 2023): the tokens that followed an earlier occurrence of the last tokens."""

    async def draft(self, request: Request, most: int) -> list[int]:
        return looked_up(request.tokens, most)

    async def forget(self, requests: Iterable[Request]) -> None:
        pass


def looked_up(text: Sequence[int], most: int, *, shortest: int = 1, longest: int = LONGEST_MATCH) -> list[int]:
    """Up to ``most`` tokens that followed the latest earlier occurrence of the longest end of ``text``, of ``shortest``
    to ``longest`` tokens."""
    for length in range(min(longest, len(text) - 1), shortest - 1, -1):
        end = list(text[-length:])
        for at in range(len(text) - length - 1, -1, -1):
            if text[at] == end[0] and list(text[at : at + length]) == end:
                return list(text[at + length : at + length + most])
    return []


class DraftModel:
    """The argmax tokens of a smaller model on another executor, which has a sequence for each request. Rejected tokens
    are rolled back when the next ones are fed. Requests draft in the same steps, and with runs a draft is one round
    trip."""

    def __init__(self, client: ModelClient, info: ExecutorInfo) -> None:
        self._client = client
        self._most = info.limits.max_run_tokens if Capability.RUN in info.capabilities else 1
        self._sequences: dict[int, CachedSequence] = {}
        self._failures: Counter[int] = Counter()

    async def draft(self, request: Request, most: int) -> list[int]:
        text = request.tokens
        if self._failures[request.index] >= FAILURES:
            return []
        try:
            found = await self._behind(request.index, text, most)
            while len(found) < most:
                found += await self._behind(request.index, text + found, most - len(found))
        except (ExecutorError, SequenceMisuseError):  # full, out of context, or gone: decode without a draft
            self._failures[request.index] += 1
            await self.forget([request])
            return []
        return found

    async def forget(self, requests: Iterable[Request]) -> None:
        gone = [self._sequences.pop(each.index) for each in requests if each.index in self._sequences]
        await asyncio.gather(*(sequence.release() for sequence in gone), return_exceptions=True)

    async def _behind(self, index: int, text: list[int], most: int) -> list[int]:
        """One or more next tokens of ``text``, after feeding the part of it that the sequence lacks."""
        sequence, run = self._sequences.get(index), Run(min(most, self._most)) if self._most > 1 else None
        if sequence is None:
            sequence = self._sequences[index] = self._client.sequence(keep_tokens=True)
            return [*map(int, (await sequence.prefill(text, run=run)).tokens)]
        held = sequence.tokens
        same = next((at for at, pair in enumerate(zip(held, text, strict=False)) if pair[0] != pair[1]), len(held))
        same = min(same, len(text) - 1)
        results = await self._client.forward([sequence.item(text[same:], truncate_to=same, run=run)])
        [answer] = results.all_answers()
        return [*map(int, answer.tokens)]


class Speculation:
    """Drafts for the requests that owe one token, while drafts pay. With ``runs``, a request whose draft was rejected
    whole gets none for `REST` tokens, and drafts are made only while they yield tokens faster than runs."""

    def __init__(self, drafter: Drafter, most: int, *, runs: bool = False) -> None:
        self._drafter = drafter
        self._most = most
        self._runs = runs
        self._lengths: dict[int, int] = {}
        self._rests: dict[int, int] = {}
        self._known: set[Request] = set()
        self._seconds = {True: 0.0, False: 0.0}  # by drafts, by runs
        self._tokens = {True: 0.0, False: 0.0}
        self._since = {True: 0.0, False: 0.0}

    def turn(self) -> tuple[bool, int | None]:
        """Whether the next tokens come by drafts, and how many may come by runs before the next turn. Both ways are
        tried, and the slower one again now and then, because texts and round-trip times change."""
        if not self._runs:
            return True, None
        for drafts in (True, False):
            if self._tokens[drafts] < REST:
                return drafts, REST
        drafts = self._pace(drafts=True) <= self._pace(drafts=False)
        left = AGAIN - self._since[not drafts]
        return (drafts, REST if drafts else max(REST, round(left))) if left > 0 else (not drafts, REST)

    def took(self, seconds: float, tokens: float, *, drafts: bool) -> None:
        """Note how long ``tokens`` of each request took."""
        self._seconds[drafts] += seconds
        self._tokens[drafts] += tokens
        if self._tokens[drafts] > 4 * REST:  # recent tokens count more
            self._seconds[drafts] /= 2
            self._tokens[drafts] /= 2
        self._since[drafts] = 0
        self._since[not drafts] += tokens

    def _pace(self, *, drafts: bool) -> float:
        return self._seconds[drafts] / self._tokens[drafts]

    async def draft(self, requests: Iterable[Request], max_context: int) -> None:
        """Set the draft of each request, no longer than what the request may still need."""
        requests = list(requests)
        await self.forget([each for each in self._known if each.ending is not None])
        self._known.update(requests)

        async def one(request: Request) -> None:
            needed = min(request.max_new_tokens - len(request.generated) - 1, max_context - request.known)
            if len(request.generated) < max(self._rests.get(request.index, 0), request.min_new_tokens):
                needed = 0
            most = min(self._lengths.get(request.index, FIRST_LENGTH), self._most, needed)
            request.draft = tuple(await self._drafter.draft(request, most)) if most > 0 else ()

        await asyncio.gather(*map(one, requests))

    def verified(self, request: Request, drafted: int, accepted: int) -> None:
        """Set the length of the next draft: twice as long after one that was accepted whole, else one more than was
        accepted."""
        self._lengths[request.index] = min(2 * drafted if accepted == drafted else accepted + 1, self._most)
        if self._runs and accepted == 0:
            self._rests[request.index] = len(request.generated) + REST

    async def forget(self, requests: Iterable[Request]) -> None:
        """Requests have ended: free what was kept for them."""
        requests = list(requests)
        self._known.difference_update(requests)
        for request in requests:
            self._lengths.pop(request.index, None)
            self._rests.pop(request.index, None)
        await self._drafter.forget(requests)
