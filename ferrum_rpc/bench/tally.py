"""What a run has measured so far. Complete at every moment: a run that is interrupted reports what stands here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from ferrum_rpc.bench.samples import Samples
from ferrum_rpc.core import StepTiming
from ferrum_rpc.errors import ExecutorError


@dataclass(slots=True)
class Prompts:
    """Prefills: times in seconds, from before the first prompt to after the last."""

    tokens: int = 0
    cached_tokens: int = 0
    times: Samples = field(default_factory=Samples)
    wall_s: float = 0.0


@dataclass(slots=True)
class Tally:
    """The measured steps. Times on `time.perf_counter`.

    ``step``: from when it was due (open loop) or sent (closed loop) to its answer; ``late``: from due to sent.
    ``queue`` and ``forward`` are the executor's own; ``rest`` is what they leave of the time from sent to answered:
    wire, protocol and this client. ``forwards``: forward passes, by the share that these tokens had in each.
    ``attempts`` counts refused steps too. ``gave_up``: callers that could not go on, and ``reason`` the last one's.
    ``unsent``: steps that were due before the end and had no free caller.
    """

    phase: str = "connecting"
    prompts: Prompts = field(default_factory=Prompts)
    began: float = 0.0
    ended: float = 0.0
    attempts: int = 0
    tokens: int = 0
    forwards: float = 0.0
    step: Samples = field(default_factory=Samples)
    queue: Samples = field(default_factory=Samples)
    forward: Samples = field(default_factory=Samples)
    rest: Samples = field(default_factory=Samples)
    late: Samples = field(default_factory=Samples)
    errors: Counter[str] = field(default_factory=Counter)
    unsent: int = 0
    gave_up: int = 0
    reason: ExecutorError | None = None

    @property
    def wall_s(self) -> float:
        """Seconds from the begin of the measurement to the last answer."""
        return max(0.0, self.ended - self.began)

    def refused(self, errors: Iterable[ExecutorError]) -> None:
        """Steps, or single sequences of them, that were refused."""
        self.errors.update(str(each.reason) for each in errors)

    def answered(self, due: float, sent: float, tokens: int, timing: StepTiming | None) -> None:
        """A step that gave ``tokens``, at `ended`."""
        self.tokens += tokens
        self.step.add(self.ended - due)
        self.late.add(sent - due)
        if timing is not None:
            self.queue.add(timing.queue_s)
            self.forward.add(timing.forward_s)
            self.rest.add(max(0.0, self.ended - sent - timing.queue_s - timing.forward_s))
            self.forwards += tokens / max(1, timing.sequences)
