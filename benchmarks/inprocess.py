"""Side A: the runner in this process, as an in-process engine would drive it. No queue, no service floor, no wire.

The loop has a thread of its own, because the runner's inference mode and torch's thread count belong to a thread, and
this process's event loop must not be it. The whole round runs in that thread: no step waits for a hand-over.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TypeVar

import numpy as np

from benchmarks.sides import Round
from benchmarks.workload import LEAD_IN, Workload, digest, output_spec
from ferrum_rpc.building import build
from ferrum_rpc.config import ServeSettings
from ferrum_rpc.core import OutputSpec, Positions, Span, SpanResult, Step, StepResult
from ferrum_rpc.engine.runner import TorchRunner

T = TypeVar("T")


class RunnerThread:
    """A runner and the thread that it belongs to."""

    def __init__(self, runner: TorchRunner, pool: ThreadPoolExecutor) -> None:
        self.runner = runner
        self._pool = pool

    @classmethod
    @asynccontextmanager
    async def open(cls, path: str, settings: ServeSettings) -> AsyncIterator[RunnerThread]:
        """Load the model as `ferrum-rpc serve` does."""
        with ThreadPoolExecutor(1, thread_name_prefix="in-process") as pool:
            runner = await asyncio.get_running_loop().run_in_executor(pool, build, path, settings)
            assert isinstance(runner, TorchRunner)
            thread = cls(runner, pool)
            del runner
            yield thread
            del thread
        gc.collect()

    async def run(self, call: Callable[[], T]) -> T:
        """``call`` in the thread, within the runner's context."""

        def within() -> T:
            with self.runner.context():
                return call()

        return await asyncio.get_running_loop().run_in_executor(self._pool, within)


class InProcess:
    """Drives a runner step by step."""

    def __init__(self, workload: Workload, thread: RunnerThread) -> None:
        self.runner = thread.runner
        self._workload = workload
        self._thread = thread
        self._tokens = workload.tokens(self.runner.info.vocab_size)

    @classmethod
    @asynccontextmanager
    async def open(cls, workload: Workload, threads: int) -> AsyncIterator[InProcess]:
        """Load the model, and prefill every sequence."""
        settings = ServeSettings(**workload.settings, threads=threads)
        async with RunnerThread.open(workload.path, settings) as thread:
            side = cls(workload, thread)
            await thread.run(side._prefill)
            yield side
            del side

    async def round(self, batch: int, output: str, steps: int) -> Round:
        """Roll back, then ``steps`` timed decode steps of the first ``batch`` sequences."""
        return await self._thread.run(lambda: self._round(batch, output_spec(output), steps))

    def _prefill(self) -> None:
        nothing = OutputSpec(Positions.NONE)
        for number, prompt in enumerate(self._workload.prompts(self.runner.info.vocab_size)):
            check(self.runner.forward(Step((Span(number, prompt, 0, nothing, create=True),))))

    def _round(self, batch: int, output: OutputSpec, steps: int) -> Round:
        timed = Round()
        for index in range(LEAD_IN + steps):
            fed = self._tokens[index, :batch].tolist()
            began = time.perf_counter()
            start = self._workload.context + index
            spans = tuple(Span(number, np.array([token], np.int32), start, output) for number, token in enumerate(fed))
            result = self.runner.forward(Step(spans))
            ended = time.perf_counter()
            check(result)
            if index >= LEAD_IN:
                timed.step_s.append(ended - began)
        last = result.outcomes[0]
        assert isinstance(last, SpanResult) and last.rows is not None
        timed.digest = digest(last.rows.block)
        return timed


def check(result: StepResult) -> None:
    """Raise what refused a span."""
    for outcome in result.outcomes:
        if not isinstance(outcome, SpanResult):
            raise outcome
