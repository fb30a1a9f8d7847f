"""The engine's queue and thread as a server has them, with callers on this process's event loop: no service floor, no
wire. Steps of several callers overlap here as far as they do in a server.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from time import perf_counter
from typing import Any, Final

import numpy as np

from benchmarks.cases import LEAD_IN, NOTHING, PREFILL, Cell, settings
from benchmarks.compare import Round, Unsupported
from benchmarks.engines.grpc import facts, last_rows
from ferrum_rpc.building import build
from ferrum_rpc.config import SETTINGS, ModelSettings
from ferrum_rpc.core import Rows, Span, SpanOutcome, SpanResult
from ferrum_rpc.engine.api import Runner, Submission
from ferrum_rpc.engine.thread import ModelThread

LOOPED: Final = "ours, in process, behind its queue"


class Looped:
    """An engine, and callers with `Cell.batch` sequences between them, who each send a step when the last is
    answered."""

    def __init__(self, engine: ModelThread, runner: Runner) -> None:
        self._engine, self._vocab_size = engine, runner.info.vocab_size
        self._live: list[int] = []
        self._context = 0
        self.facts = facts(LOOPED, runner.device)

    @classmethod
    @asynccontextmanager
    async def open(cls, model: str, cells: Sequence[Cell], threads: int, **more: Any) -> AsyncIterator[Looped]:
        """Load the model as `ferrum-rpc serve` does; ``more`` are settings of it."""
        loading = ModelSettings(model, **settings(cells, threads), **more)
        ready: asyncio.Future[Runner] = asyncio.get_running_loop().create_future()

        def failed(error: BaseException) -> None:
            if not ready.done():
                ready.set_exception(error)

        engine = ModelThread(
            partial(build, loading),
            loop=asyncio.get_running_loop(),
            max_step_items=SETTINGS["max_batch_items"].default,
            max_step_tokens=SETTINGS["max_batch_tokens"].default,
            on_ready=ready.set_result,
            on_failed=failed,
        )
        engine.start()
        try:
            yield cls(engine, await ready)
        finally:
            await engine.stop()

    async def prepare(self, cell: Cell) -> None:
        if cell.kind == PREFILL or self._context not in (0, cell.context):
            raise Unsupported("it decodes sequences of one length")
        self._context = cell.context
        for prompt in cell.prompts(self._vocab_size)[len(self._live) :]:
            self._live.append(len(self._live))
            await self._forward([Span(self._live[-1], prompt, 0, NOTHING, create=True)])

    async def round(self, cell: Cell, number: int, steps: int) -> Round:
        """Steps of all callers, each with a part of the sequences: one has ended when the last of them is answered."""
        fed = cell.fed(self._vocab_size, steps)[:, :, None]
        size = cell.batch // cell.callers
        ended = np.zeros((cell.callers, len(fed)))

        async def call(turn: int) -> list[Any]:
            mine = range(turn * size, (turn + 1) * size)
            for index, tokens in enumerate(fed):
                start = cell.context + index  # the first step rolls back
                rows = await self._forward([Span(self._live[each], tokens[each], start, cell.spec) for each in mine])
                ended[turn, index] = perf_counter()
            return [last_rows(each.block)[each.first] for each in rows if each is not None]

        last = await asyncio.gather(*map(call, range(cell.callers)))
        seconds = np.diff(ended.max(axis=0))[LEAD_IN - 1 :]
        return Round(step_s=seconds.tolist(), last=[token for each in last for token in each])

    async def _forward(self, spans: Sequence[Span]) -> list[Rows | None]:
        answered: asyncio.Future[tuple[SpanOutcome, ...]] = asyncio.get_running_loop().create_future()
        self._engine.submit(Submission(tuple(spans), lambda outcomes, timing: answered.set_result(outcomes)))
        rows = []
        for outcome in await answered:
            if not isinstance(outcome, SpanResult):
                raise outcome
            rows.append(outcome.rows)
        return rows
