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
    FINISHED = "finished"
    FAILED = "failed"


class Ending(enum.Enum):
    """Why a request's text ended."""

    STOP = "end of text"
    LENGTH = "length"
    CONTEXT = "context full"
    POOL = "cache too small for more"
    ERROR = "error"


@dataclass(slots=True, eq=False)
class Request:
    """One prompt. ``index`` is the order of arrival: the older is served first and preempted last.

    Times are seconds on the scheduler's monotonic clock; 0 stands for not yet.
    """

    index: int
    prompt: tuple[int, ...]
    max_new_tokens: int
    text: str = ""
    generated: list[int] = field(default_factory=list)
    cached: int = 0
    stage: Stage = Stage.WAITING
    ending: Ending | None = None
    error: str = ""
    preemptions: int = 0
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

    def next_tokens(self, count: int) -> list[int]:
        """The first ``count`` tokens that are owed."""
        start, prompt = self.cached, len(self.prompt)
        if start >= prompt:
            return self.generated[start - prompt : start - prompt + count]
        head = list(self.prompt[start : start + count])
        return head + self.generated[: count - len(head)]
