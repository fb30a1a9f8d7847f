"""How a peer is driven: a line of JSON in, a line of JSON out. Runs in the peer's own environment: the standard library
is all it may import.

    {"do": "decode", "tokens": [[one of each sequence], ...], "lead_in": 2}  -> {"ok": {"step_s": [...], "last": [...]}}

The jobs are the methods of a `Peer`. ``step_s`` is of the steps after the first ``lead_in``; ``last`` are the arg-max
tokens of the last step, to see that all engines compute the same model. What a peer cannot do is
``{"unsupported": reason}``, anything else that it raises ``{"error": text}``.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from time import perf_counter
from typing import Any, Final, Protocol, TextIO, TypeVar

T = TypeVar("T")

Timed = tuple[list[float], list[int]]  # seconds of the timed steps, and the arg-max tokens of the last one


Before = Callable[[], None] | None
JOBS: Final = ("open", "prepare", "decode", "prefill")  # methods of a `Peer`


class Unsupported(Exception):
    """This engine does not do that."""


class Peer(Protocol):
    """An engine."""

    def open(self, model: str, threads: int, options: dict[str, Any]) -> dict[str, Any]:
        """Load ``model``; facts about what was loaded, `name` and `versions` among them."""

    def prepare(self, prompts: list[list[int]], room: int) -> None:
        """Sequences that hold ``prompts`` and will grow by ``room`` tokens at most; earlier ones are forgotten."""

    def decode(self, tokens: list[list[int]], lead_in: int) -> Timed:
        """A step that feeds each entry of ``tokens``, from where `prepare` ended."""

    def prefill(self, prompts: list[list[int]], lead_in: int) -> Timed:
        """A new sequence for each prompt, each forgotten when the next one begins."""


def timed(step: Callable[[T], list[int]], inputs: Iterable[T], lead_in: int, before: Before = None) -> Timed:
    """Steps over the inputs, and what comes ``before`` each and is not timed."""
    step_s: list[float] = []
    last: list[int] = []
    for each in inputs:
        if before is not None:
            before()
        began = perf_counter()
        last = step(each)
        step_s.append(perf_counter() - began)
    return step_s[lead_in:], last


def run(peer: Peer) -> None:
    """Answer lines until there are no more. What libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    serve(peer, sys.stdin, answers)


def serve(peer: Peer, jobs: TextIO, answers: TextIO) -> None:
    """The same between any two streams."""
    for line in jobs:
        answer: dict[str, Any]
        try:
            answer = {"ok": _do(peer, json.loads(line))}
        except Unsupported as reason:
            answer = {"unsupported": str(reason)}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _do(peer: Peer, job: dict[str, Any]) -> dict[str, Any]:
    name = job.pop("do")
    if name not in JOBS:
        raise ValueError(f"no such job: {name!r}")
    found = getattr(peer, name)(**job)
    if isinstance(found, tuple):
        return dict(zip(("step_s", "last"), found, strict=True))
    return found or {}
