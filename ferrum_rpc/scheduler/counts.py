"""The counts of a run."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from ferrum_rpc.client import Pressure
from ferrum_rpc.scheduler.request import Request, Stage

MOVES_KEPT: Final = 10_000


@dataclass(slots=True)
class RunCounts:
    """Counts of one run. Times are seconds as the scheduler measures them, so they include the wire. ``left``: requests
    that have not ended. ``moves``: seconds of each of the last moves to another executor."""

    requests: Sequence[Request] = ()
    left: int = 0
    steps: int = 0
    sequences: int = 0
    prompt_tokens: int = 0
    decode_tokens: int = 0
    decode_only_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    executor_seconds: float = 0.0
    wall_seconds: float = 0.0
    preemptions: int = 0
    rebuilds: int = 0
    waits: int = 0
    peak_use: float = 0.0
    trips: int = 0
    drafted: int = 0
    accepted: int = 0
    moves: deque[float] = field(default_factory=lambda: deque(maxlen=MOVES_KEPT))
    moved_tokens: int = 0
    executors_lost: int = 0

    def step(self, *, prompt: int, decode: int, sequences: int, seconds: float, executor_seconds: float) -> None:
        """One forward pass: prompt tokens and decode tokens that it fed. Passes with prompt tokens are prefill time."""
        self.steps += 1
        self.sequences += sequences
        self.prompt_tokens += prompt
        self.decode_tokens += decode
        self.executor_seconds += executor_seconds
        if prompt:
            self.prefill_seconds += seconds
        else:
            self.decode_seconds += seconds
            self.decode_only_tokens += decode

    def drafts(self, *, trips: int, drafted: int, emitted: int) -> None:
        """Count one forward pass: its decodes (``trips``), their draft tokens, and the tokens that came of both."""
        self.trips += trips
        self.drafted += drafted
        self.accepted += emitted - trips

    def moved(self, tokens: int, seconds: float) -> None:
        """A sequence of so many tokens was moved, in so many seconds."""
        self.moves.append(seconds)
        self.moved_tokens += tokens

    def saw(self, pressure: Pressure) -> None:
        """Note the cache use."""
        if pressure.total_blocks:
            self.peak_use = max(self.peak_use, 1 - pressure.free_blocks / pressure.total_blocks)

    @property
    def failed(self) -> list[Request]:
        """Requests that ended with an error."""
        return [each for each in self.requests if each.stage is Stage.FAILED]
