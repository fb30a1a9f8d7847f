"""What the sides of a comparison have in common: they run rounds of steps and tell how long each step took."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Round:
    """Seconds of every timed step. ``digest``: of the last step's rows, to show that both sides computed the same.
    ``forward_s`` and ``queue_s``: the server's own timings of the same steps, where there is a server of ours.
    ``wall_s``: of all of them together, where several are in flight at a time. ``tokens``: the arg-max of each of the
    last step's rows, where greedy rows were asked for."""

    step_s: list[float] = field(default_factory=list)
    forward_s: list[float] = field(default_factory=list)
    queue_s: list[float] = field(default_factory=list)
    digest: bytes = b""
    wall_s: float = 0.0
    tokens: list[int] = field(default_factory=list)
