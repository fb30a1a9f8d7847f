"""The runner in this process, as an in-process engine would drive it. No queue, no service floor, no wire.

The loop has a thread of its own, because the runner's inference mode and torch's thread count belong to a thread, and
this process's event loop must not be it. The whole round runs in that thread: no step waits for a hand-over.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from time import perf_counter
from typing import Any, Final, TypeVar

import numpy as np

from benchmarks.cases import LEAD_IN, MASK, NOTHING, PREFILL, Cell, Tokens, mask_words, settings
from benchmarks.compare import Round
from benchmarks.engines.grpc import facts, last_rows
from ferrum_rpc.building import build
from ferrum_rpc.config import ModelSettings
from ferrum_rpc.core import FullLogits, Greedy, OutputSpec, Positions, RowDType, Rows, Run, Span, SpanResult, Step
from ferrum_rpc.engine.operations import TorchRunner

INSIDE: Final = "ours, in process"

T = TypeVar("T")


def forward(runner: TorchRunner, spans: Sequence[Span]) -> list[SpanResult]:
    """One step. Raises what a span of it ended with."""
    found = []
    for outcome in runner.forward(Step(tuple(spans))).outcomes:
        if not isinstance(outcome, SpanResult):
            raise outcome
        found.append(outcome)
    return found


class Inside:
    """A runner, the thread that it belongs to, and the sequences of a cell: numbered from ``first`` on, and with those
    adapters in turn."""

    def __init__(
        self, runner: TorchRunner, pool: ThreadPoolExecutor, adapters: Sequence[int] = (0,), first: int = 0
    ) -> None:
        self.runner, self._pool = runner, pool
        self._adapters, self._first = adapters, first
        self._vocab_size = runner.info.vocab_size
        self._live: list[int] = []
        self._context = 0
        self._next = first
        self.facts = facts(INSIDE, runner.device, runner.info)

    @classmethod
    @asynccontextmanager
    async def open(
        cls, model: str, cells: Sequence[Cell], threads: int, device: str = "cpu", **more: Any
    ) -> AsyncIterator[Inside]:
        """Load the model as `ferrum-rpc serve` does; ``more`` are settings of it."""
        loading = ModelSettings(model, **settings(cells, threads, device), **more)
        with ThreadPoolExecutor(1, thread_name_prefix="in-process") as pool:
            runner = await asyncio.get_running_loop().run_in_executor(pool, build, loading)
            assert isinstance(runner, TorchRunner)
            side = cls(runner, pool)
            await side._run(partial(runner.change_masks, [(MASK, mask_words(runner.info.vocab_size))], []))
            try:
                yield side
            finally:
                runner.close()
            del runner, side
        gc.collect()

    def beside(self, adapters: Sequence[int], first: int) -> Inside:
        return Inside(self.runner, self._pool, adapters, first)

    async def load_adapters(self, name: str, count: int) -> None:
        """Load the adapter of this name so many times, with the numbers from 1 on."""

        def load() -> None:
            for number in range(1, count + 1):
                self.runner.open_adapter(number, name)
                while self.runner.read_adapter(number) is None:
                    pass

        await self._run(load)

    async def prepare(self, cell: Cell) -> None:
        await self._run(lambda: self._prepare(cell))

    async def round(self, cell: Cell, number: int, steps: int) -> Round:
        """The whole round in the runner's thread."""
        return await self._run(lambda: self._round(cell, number, steps))

    async def runs(self, cell: Cell, steps: int, *, following: bool) -> list[float]:
        """Seconds of each of so many steps of greedy runs of a decode cell's sequences, which are prepared. A step
        begins when the tokens of the one before it have been read; if it is ``following``, which the runner must be
        able to, while that one is in flight."""
        return await self._run(lambda: self._runs(cell, steps, following))

    async def logits(self, tokens: Tokens, rows: int) -> Any:
        """Float32 [rows, vocab] behind the last ``rows`` of a new sequence's ``tokens``, which are fed in one piece."""
        return await self._run(lambda: self._logits(tokens, rows))

    async def _run(self, call: Callable[[], T]) -> T:
        def within() -> T:
            with self.runner.context():
                return call()

        return await asyncio.get_running_loop().run_in_executor(self._pool, within)

    def _release(self) -> None:
        self.runner.release(self._live)
        self._live = []

    def _logits(self, tokens: Tokens, rows: int) -> Any:
        self._release()
        self._context = 0
        self._forward([self._creation(tokens[:-rows], NOTHING)])
        every = OutputSpec(Positions.ALL, FullLogits(RowDType.F32))
        [last] = self._forward([Span(self._live[-1], tokens[-rows:], len(tokens) - rows, every)])
        found = last.block["logits"].copy()
        self._release()
        return found

    def _prepare(self, cell: Cell) -> None:
        if cell.kind == PREFILL or cell.context != self._context:
            self._release()
        self._context = cell.context
        if cell.kind != PREFILL:
            for prompt in cell.prompts(self._vocab_size)[len(self._live) :]:
                self._forward([self._creation(prompt, NOTHING)])

    def _round(self, cell: Cell, number: int, steps: int) -> Round:
        timed, output = Round(), cell.spec
        if cell.kind == PREFILL:
            for _, prompt in timed.steps(cell.fresh(self._vocab_size, number, steps), 1):
                rows = self._forward([self._creation(prompt, output)])
                timed.done()
                self._release()
        else:
            drafted = cell.fed(self._vocab_size, steps)[:, :, None].repeat(cell.rows, axis=2)
            for index, fed in timed.steps(drafted, LEAD_IN):
                start = cell.context + index  # the first step rolls back, and every one of drafts
                spans = [
                    Span(each, token, start, output, adapter=self._adapter(each))
                    for each, token in zip(self._live, fed, strict=False)
                ]
                rows = self._forward(spans)
                timed.done()
        timed.last = last_rows(rows)
        return timed

    def _runs(self, cell: Cell, steps: int, following: bool) -> list[float]:
        output, runner = OutputSpec(Positions.LAST, Greedy()), self.runner
        fed, live = cell.fed(self._vocab_size, 1)[0], self._live[: cell.batch]
        spans = [
            Span(each, token, cell.context, output, run=Run(steps + LEAD_IN), adapter=self._adapter(each))
            for each, token in zip(live, fed[:, None], strict=True)  # the first step rolls back
        ]
        pending, ended = runner.begin(Step(tuple(spans))), list[float]()
        for at in range(cell.context + 1, cell.context + steps + LEAD_IN):
            spans = [Span(each, np.zeros(1, np.int32), at, output, adapter=self._adapter(each)) for each in live]
            if following:
                behind = runner.begin(Step(tuple(spans), (), ((),) * len(spans)))
            for span, outcome in zip(spans, runner.finish(pending).outcomes, strict=True):
                assert isinstance(outcome, SpanResult) and outcome.rows is not None
                if not following:
                    span.tokens[0] = outcome.rows.block["token_ids"][outcome.rows.first]
            pending = behind if following else runner.begin(Step(tuple(spans)))
            ended.append(perf_counter())
        runner.finish(pending)
        runner.end_hold(live)
        return np.diff(ended).tolist()

    def _creation(self, prompt: Any, output: OutputSpec) -> Span:
        self._live.append(self._next)
        self._next += 1
        return Span(self._live[-1], prompt, 0, output, create=True, adapter=self._adapter(self._live[-1]))

    def _adapter(self, sequence: int) -> int:
        return self._adapters[(sequence - self._first) % len(self._adapters)]

    def _forward(self, spans: Sequence[Span]) -> list[Rows]:
        """The rows of a step."""
        return [each.rows for each in forward(self.runner, spans) if each.rows]
