"""A runner of nothing for tests, which does what its spans ask for; as a program, the engine process that has it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from ferrum_rpc.core import CacheState, RowBlock, RowKind, Rows, SpanOutcome, SpanResult, Step, StepResult
from ferrum_rpc.engine.process.child import work
from ferrum_rpc.errors import DeviceLost, ExecutorError, InvalidRequest, KvBlocksExhausted, StepFailed

WAIT, FAIL, DIE, LOSE, LARGE, REFUSE, SPIN, COMPILE, BREAK, EXIT = range(900, 910)
"""What the first token of a span asks for."""

COUNT = 1000
"""From here on a token is answered with the one after it."""

LARGE_SHAPE = (3, 40_000)


class Foreign(Exception):
    """A class that the server does not have."""


class TokenRunner:
    """Answers a span with its first token; see `WAIT` and the others. ``gate``: a pipe in the file system that a step
    waits at, until somebody writes."""

    info: Any = "a model"
    device: Any = "a device"
    depth = 1

    def __init__(self, gate: str) -> None:
        self._gate = Path(gate)
        self._seen: list[tuple[list[int], list[tuple[int, int]]]] = []
        self._given_back: list[int] = []

    ranks = list
    look_every_s = None
    follows = False
    in_stages = False
    constraints = None
    feeding: Any = None
    on_device = True

    def close(self) -> None:
        pass

    def context(self) -> AbstractContextManager[object]:
        return nullcontext()

    def wait(self) -> None:
        """At the gate."""
        self._gate.with_suffix(".reached").write_bytes(b"x")  # a pipe as well: returns once somebody reads
        self._gate.read_bytes()

    def begin(self, step: Step) -> StepResult:
        groups = [(group.start, group.stop) for group in step.atomic]
        self._seen.append(([span.sequence for span in step.spans], groups))
        asked = {int(span.tokens[0]) for span in step.spans}
        if WAIT in asked:
            self.wait()
        if COMPILE in asked:  # a program of that name, which waits at the gate
            subprocess.run([self._gate.with_name("ptxas"), self._gate], stdout=subprocess.DEVNULL, check=True)
        if FAIL in asked:
            raise StepFailed("as asked")
        if DIE in asked:
            os.kill(os.getpid(), signal.SIGKILL)
        for token, error in ((LOSE, DeviceLost), (BREAK, ValueError), (EXIT, SystemExit)):
            if token in asked:
                raise error("as asked")
        first = np.array([span.tokens[0] for span in step.spans], dtype=np.uint32)
        block = RowBlock.of(RowKind.TOKENS, first + (first >= COUNT))
        outcomes: list[SpanOutcome] = []
        for row, span in enumerate(step.spans):
            token = int(span.tokens[0])
            if token == REFUSE:
                outcomes.append(KvBlocksExhausted("as asked", metadata={"needed_blocks": 3}))
            elif token == LARGE:
                logits = np.arange(np.prod(LARGE_SHAPE), dtype=np.float32).reshape(LARGE_SHAPE) + span.sequence
                outcomes.append(SpanResult(span.end, Rows(RowBlock.of(RowKind.LOGITS, logits), 0, LARGE_SHAPE[0])))
            else:
                outcomes.append(SpanResult(span.end, Rows(block, row, 1)))
        return StepResult(tuple(outcomes), 0.001, 2)

    def ready(self, pending: StepResult) -> bool:
        return True

    def finish(self, pending: StepResult) -> StepResult:
        while self._seen[-1][0] == [SPIN]:  # as CUDA's wait for a device that hangs
            pass
        return pending

    def cache_state(self) -> CacheState:
        return CacheState(16, 10, max(0, 10 - len(self._seen)), 1, total_slots=5, free_slots=4)

    def seen(self) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """Sequences and atomic groups of every step."""
        return self._seen

    def end_hold(self, sequences: list[int]) -> None:
        self._given_back += sequences

    def given_back(self) -> list[int]:
        """Sequences whose runs are over."""
        return self._given_back

    def process(self) -> int:
        return os.getpid()

    def refuse(self) -> None:
        raise InvalidRequest("as asked", field="x")

    def bug(self) -> None:
        raise ValueError("as asked")

    def foreign_bug(self) -> None:
        raise Foreign("as asked")


def build(setup: str) -> TokenRunner:
    if not setup:
        raise ExecutorError("no such model")
    return TokenRunner(setup)


if __name__ == "__main__":
    sys.exit(work(build, sys.argv[1:]))
