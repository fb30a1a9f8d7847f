"""A request in the scheduler: plain data that the policy reads and the driver writes.

The known tokens of a request are ``prompt + generated``; the executor holds the first ``cached`` of them and is owed
the rest. Prefill, chunks, decode and recomputation after a preemption all feed owed tokens.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field

from ferrum_rpc.client import CacheMode, Greedy, OutputSpec, Pieces, Sample, Sequence, StreamToken


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
    CANCELLED = "cancelled"
    DEADLINE = "deadline passed"
    ERROR = "error"


@dataclass(slots=True, eq=False)
class Request:
    """One prompt. ``index``: the order of arrival. Of two requests the one with the higher ``priority`` is served first
    and preempted last, then the one with the smaller ``turn`` (`fairness`), then the older one.

    ``output``: how each token is chosen. ``stops``: tokens that end the text and are not part of it, from
    ``min_new_tokens`` on; none of them is chosen before. ``grammar_ends``: tokens that end it at any length, because a
    complete grammar allows nothing else. With ``stops_of_model`` they are the model's end-of-sequence
    tokens. ``adapter``, ``cache_salt`` and ``cache_mode`` are those of its sequences. ``chosen``, if given, is called
    with new tokens and how many of them belong to the text, which are all, or all but a stop token behind them; it
    returns whether the text ends with them.

    ``sequence``: its sequence at an executor, if it has one; ``executor``: the target where it runs or ran last.
    ``computed``: how many tokens have been in the cache, now or before a preemption; ``pieces``: the spans above the
    executor's ``exact_span_tokens`` among them, which give the same bits when they are computed again. ``draft``:
    guessed tokens, to be verified with the one that is owed. ``early_output``: ``output`` without the stops.
    ``rebuilds``: how often it was lost with its executor. ``cached_tokens`` of its prompt were found in the prefix
    cache when it was first admitted; None: not admitted yet. ``stop_token``: the one of ``stops`` that ended the text.
    ``failure``: the error that ended it. ``answered``: when the executor's last answer came, and ``step``: from
    which of its steps.

    ``branches``: requests that continue this one's prompt, which lacks their last token. They become children of its
    sequence once that is in the cache, and this request ends.

    Times are seconds on the scheduler's monotonic clock; 0 stands for not yet.
    """

    index: int
    prompt: tuple[int, ...]
    max_new_tokens: int
    text: str = ""
    output: Greedy | Sample = field(default_factory=Greedy)
    stops: tuple[int, ...] = ()
    stops_of_model: bool = False
    grammar_ends: tuple[int, ...] = ()
    min_new_tokens: int = 0
    adapter: str = ""
    cache_salt: bytes = b""
    cache_mode: CacheMode = CacheMode.DEFAULT
    priority: int = 0
    tenant: str = ""
    turn: float = 0.0
    chosen: Callable[[list[StreamToken], int], bool] | None = None
    branches: tuple[Request, ...] = ()
    generated: list[int] = field(default_factory=list)
    draft: tuple[int, ...] = ()
    early_output: OutputSpec | None = None
    cached: int = 0
    computed: int = 0
    pieces: Pieces = field(default_factory=Pieces)
    sequence: Sequence | None = None
    stage: Stage = Stage.WAITING
    ending: RequestEnd | None = None
    failure: Exception | None = None
    stop_token: int | None = None
    cached_tokens: int | None = None
    answered: float = 0.0
    step: int = 0
    executor: str = ""
    preemptions: int = 0
    rebuilds: int = 0
    failures: int = 0
    arrived: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0

    @property
    def order(self) -> tuple[int, float, int]:
        """Sorts requests: the first one is served first and preempted last."""
        return (-self.priority, self.turn, self.index)

    @property
    def error(self) -> str:
        """The failure in words; empty without one."""
        return getattr(self.failure, "message", str(self.failure or ""))

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
        """The length that it may reach."""
        return len(self.prompt) + self.max_new_tokens

    @property
    def places(self) -> int:
        """How many requests it is, or becomes."""
        return max(1, len(self.branches))

    @property
    def slots(self) -> int:
        """How many slots it needs at a time: its own, until all branches have begun, and theirs."""
        return 1 + len(self.branches)

    @property
    def begins(self) -> bool:
        """Whether its next item makes its sequence."""
        return self.sequence is None or self.sequence.handle is None

    @property
    def decodes(self) -> bool:
        """Whether it owes one generated token."""
        return bool(self.generated) and self.owed == 1

    @property
    def wanted(self) -> int:
        """How many tokens are still to be chosen."""
        return self.max_new_tokens - len(self.generated)

    def chosen_behind(self, known: int) -> int:
        """How many tokens may be chosen in one run behind ``known`` tokens: up to the end of the text, or to the length
        from which on it may stop."""
        early = len(self.prompt) + self.min_new_tokens - known
        return early if early > 0 else self.becomes - known

    def may_stop(self, known: int) -> bool:
        """Whether the token behind ``known`` tokens may be one of ``stops``."""
        return known >= len(self.prompt) + self.min_new_tokens

    def stops_at(self, token: int, known: int) -> bool:
        """Whether a token behind ``known`` tokens ends the text."""
        return token in self.grammar_ends or (token in self.stops and self.may_stop(known))

    def span(self, most: int, exact: int) -> int:
        """How many owed tokens go next, ``most`` at most. 0: they go in a longer span or not exactly. ``exact``: the
        executor's ``exact_span_tokens``, 0 where nothing is promised."""
        return self.pieces.span(self.cached, min(self.owed, most), self.computed, exact)

    def fed(self, count: int, length: int, exact: int) -> None:
        """``count`` owed tokens were fed. ``length`` tokens are in the cache now, with the accepted ones of a draft."""
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
