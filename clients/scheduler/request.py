"""A request on its way through the scheduler. Plain data: the policy reads it, the driver writes it.

What is known of a request is ``prompt + generated``; what the executor holds is its first ``cached`` tokens. The
difference is owed. Prefill, a chunk of it, decode, and the recomputation after a preemption are all the same thing:
feeding what is owed.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class Stage(enum.Enum):
    """Where a request stands."""

    WAITING = "waiting"
    RUNNING = "running"
    MOVING = "moving"
    FINISHED = "finished"
    FAILED = "failed"


class RequestEnd(enum.Enum):
    """Why a request's text ended."""

    STOP = "end of text"
    LENGTH = "length"
    CONTEXT = "context full"
    POOL = "cache too small for more"
    ERROR = "error"


@dataclass(slots=True, eq=False)
class Request:
    """One prompt. ``index`` is the order of arrival: the older is served first and preempted last.

    ``computed``: tokens that have been in the cache, now or before a preemption; ``long``: where spans above the
    executor's ``exact_span_tokens`` began, and of how many tokens they were. Computed again in the same spans, and in
    short ones between them, they have the same bits. ``draft``: what may come next, to be verified with the one token
    that it owes.

    ``executor``: the target where it runs, or ran last. ``rebuilds``: times that it was lost with its executor.

    Times are seconds on the scheduler's monotonic clock; 0 stands for not yet.
    """

    index: int
    prompt: tuple[int, ...]
    max_new_tokens: int
    text: str = ""
    generated: list[int] = field(default_factory=list)
    draft: tuple[int, ...] = ()
    cached: int = 0
    computed: int = 0
    long: list[tuple[int, int]] = field(default_factory=list)
    stage: Stage = Stage.WAITING
    ending: RequestEnd | None = None
    error: str = ""
    executor: str = ""
    preemptions: int = 0
    rebuilds: int = 0
    failures: int = 0
    arrived: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0

    @property
    def known(self) -> int:
        """Tokens of prompt and generated text."""
        return len(self.prompt) + len(self.generated)

    @property
    def owed(self) -> int:
        """Known tokens that the executor does not hold. At least one for a request that wants another token."""
        return self.known - self.cached

    def span(self, most: int, exact: int) -> int:
        """How many owed tokens go next, ``most`` at most. 0: they go in a longer span or not exactly. ``exact``: the
        executor's ``exact_span_tokens``, 0 where nothing is promised."""
        start, count = self.cached, min(self.owed, most)
        if exact == 0 or start >= self.computed:
            return count
        for first, fed in self.long:
            if first == start:
                return fed if fed <= count else 0
            if first > start:
                return min(count, exact, first - start)
        return min(count, exact, self.computed - start)

    def fed(self, count: int, length: int, exact: int) -> None:
        """``count`` owed tokens went, and ``length`` are in the cache, what was accepted of a draft among them."""
        self.draft = ()
        if length > self.computed:
            if 0 < exact < count:
                self.long.append((length - count, count))
            self.computed = length
        self.cached = length

    def next_tokens(self, count: int) -> list[int]:
        """The first ``count`` tokens that are owed."""
        start, prompt = self.cached, len(self.prompt)
        if start >= prompt:
            return self.generated[start - prompt : start - prompt + count]
        head = list(self.prompt[start : start + count])
        return head + self.generated[: count - len(head)]
