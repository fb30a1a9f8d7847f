"""A request on its way through the scheduler. Plain data: the policy reads it, the driver writes it.

What is known of a request is ``prompt + generated``; what the executor holds is its first ``cached`` tokens. The
difference is owed. Prefill, a chunk of it, decode, and the recomputation after a preemption are all the same thing:
feeding what is owed.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from ferrum_rpc.client import Sequence
from ferrum_rpc.client.pieces import Pieces


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

    ``sequence``: the one that it has at an executor, while it has one, and ``executor``: the target where it runs, or
    ran last. ``computed``: tokens that have been in the cache, now or before a preemption, and ``pieces`` those that
    were fed in spans above the executor's ``exact_span_tokens``: computed again in the same spans they have the same
    bits. ``draft``: what may come next, to be verified with the one token that it owes.
    ``rebuilds``: how often it was lost with its executor.

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
    pieces: Pieces = field(default_factory=Pieces)
    sequence: Sequence | None = None
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
    def tokens(self) -> list[int]:
        """Prompt and generated text."""
        return [*self.prompt, *self.generated]

    @property
    def known(self) -> int:
        """How many ``tokens`` there are."""
        return len(self.prompt) + len(self.generated)

    @property
    def owed(self) -> int:
        """Known tokens that the executor does not hold. At least one for a request that wants another token."""
        return len(self.prompt) + len(self.generated) - self.cached

    @property
    def becomes(self) -> int:
        """How long it may be at last."""
        return len(self.prompt) + self.max_new_tokens

    @property
    def decodes(self) -> bool:
        """Whether it owes its last token alone."""
        return bool(self.generated) and self.owed == 1

    def span(self, most: int, exact: int) -> int:
        """How many owed tokens go next, ``most`` at most. 0: they go in a longer span or not exactly. ``exact``: the
        executor's ``exact_span_tokens``, 0 where nothing is promised."""
        return self.pieces.span(self.cached, min(self.owed, most), self.computed, exact)

    def fed(self, count: int, length: int, exact: int) -> None:
        """``count`` owed tokens went, and ``length`` are in the cache, what was accepted of a draft among them."""
        self.draft = ()
        if length > self.computed:
            if 0 < exact < count:
                self.pieces.fed(length - count, count, exact)
            self.computed = length
        self.cached = length

    def next_tokens(self, count: int) -> list[int]:
        """The first ``count`` tokens that are owed."""
        start, prompt = self.cached, len(self.prompt)
        if start >= prompt:
            return self.generated[start - prompt : start - prompt + count]
        head = list(self.prompt[start : start + count])
        return head + self.generated[: count - len(head)]
