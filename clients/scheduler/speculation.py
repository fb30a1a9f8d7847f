"""Drafts: guesses of what comes next, which the executor verifies in the step of one token.

A guess costs the executor little and saves trips where it is right. Both kinds are given without probabilities, so that
a text is the same with any drafts and with none: greedy or of its seed.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final, Protocol

from clients.scheduler.request import Request
from ferrum_rpc.client import Capability, ExecutorClient, ExecutorError, ExecutorInfo, Run, SequenceMisuseError
from ferrum_rpc.client import Sequence as CachedSequence

LONGEST_MATCH: Final = 4
FIRST_LENGTH: Final = 4
"""Tokens of a request's first draft."""
REST: Final = 32
"""Tokens by runs, behind a draft of which nothing was right."""
AGAIN: Final = 256
"""Tokens by the faster way, of drafts and runs, until the other is tried again."""
FAILURES: Final = 3
"""Of drafts for one request; then there are no more."""


class Drafter(Protocol):
    """Where guesses come from."""

    async def draft(self, request: Request, most: int) -> list[int]:
        """Up to ``most`` tokens that may follow what is known of the request. Does not raise for want of any."""

    async def forget(self, requests: Iterable[Request]) -> None:
        """These have ended."""


class Lookup:
    """Prompt look-up (Saxena, 2023): what followed the last tokens where they stood before in the same text."""

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
    """The arg-max tokens of a smaller model on an executor of its own, whose sequences follow the requests' texts: what
    was rejected is rolled back with the next tokens that it is fed. Requests draft in the same steps, and where that
    executor offers runs, a draft is one trip."""

    def __init__(self, client: ExecutorClient, info: ExecutorInfo) -> None:
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
        except (ExecutorError, SequenceMisuseError):  # full, out of context, or gone: it goes on without a draft
            self._failures[request.index] += 1
            await self.forget([request])
            return []
        return found

    async def forget(self, requests: Iterable[Request]) -> None:
        gone = [self._sequences.pop(each.index) for each in requests if each.index in self._sequences]
        await asyncio.gather(*(sequence.release() for sequence in gone), return_exceptions=True)

    async def _behind(self, index: int, text: list[int], most: int) -> list[int]:
        """The next tokens behind ``text``, one or more, after feeding what the sequence lacks of it."""
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
    """Drafts of the requests that owe one token, as long as they have been worth it. Where ``runs`` give tokens too, a
    request of whose draft nothing was right rests for `REST` tokens, and whether any drafts are made depends on which
    of both has given tokens faster."""

    def __init__(self, drafter: Drafter, most: int, *, runs: bool = False) -> None:
        self._drafter = drafter
        self._most = most
        self._runs = runs
        self._lengths: dict[int, int] = {}
        self._rests: dict[int, int] = {}
        self._seconds = {True: 0.0, False: 0.0}  # by drafts, by runs
        self._tokens = {True: 0.0, False: 0.0}
        self._since = {True: 0.0, False: 0.0}

    def turn(self) -> tuple[bool, int | None]:
        """Whether it is drafts that give the next tokens, and how many runs may give, before this is asked again. Both
        ways are tried, and the slower again now and then: texts change, and so does what a trip takes."""
        if not self._runs:
            return True, None
        for drafts in (True, False):
            if self._tokens[drafts] < REST:
                return drafts, REST
        drafts = self._pace(drafts=True) <= self._pace(drafts=False)
        left = AGAIN - self._since[not drafts]
        return (drafts, REST if drafts else max(REST, round(left))) if left > 0 else (not drafts, REST)

    def took(self, seconds: float, tokens: float, *, drafts: bool) -> None:
        """So long for so many tokens of each request."""
        self._seconds[drafts] += seconds
        self._tokens[drafts] += tokens
        if self._tokens[drafts] > 4 * REST:  # what was lately counts more
            self._seconds[drafts] /= 2
            self._tokens[drafts] /= 2
        self._since[drafts] = 0
        self._since[not drafts] += tokens

    def _pace(self, *, drafts: bool) -> float:
        return self._seconds[drafts] / self._tokens[drafts]

    async def draft(self, requests: Iterable[Request], max_context: int) -> None:
        """Give each request its draft. It is never longer than what the request may still need."""

        async def one(request: Request) -> None:
            needed = min(request.max_new_tokens - len(request.generated) - 1, max_context - request.known)
            if len(request.generated) < self._rests.get(request.index, 0):
                needed = 0
            most = min(self._lengths.get(request.index, FIRST_LENGTH), self._most, needed)
            request.draft = tuple(await self._drafter.draft(request, most)) if most > 0 else ()

        await asyncio.gather(*map(one, requests))

    def verified(self, request: Request, drafted: int, accepted: int) -> None:
        """Twice as long after a draft that was right, one longer than what was right after one that was not."""
        self._lengths[request.index] = min(2 * drafted if accepted == drafted else accepted + 1, self._most)
        if self._runs and accepted == 0:
            self._rests[request.index] = len(request.generated) + REST

    async def forget(self, requests: Iterable[Request]) -> None:
        """These have ended."""
        await self._drafter.forget(requests)
