"""Our two sides of the comparison with peers: the runner in this process, and a scheduler's session with a server.

Both take the tokens of a cell as they are given and hand over the arg-max of every row. The scheduler is
`ferrum_rpc.client` as anybody would use it: one `forward` a step on one stream, answers as arrays.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, Protocol

import numpy as np
import torch

from benchmarks.cells import PREFILL, Cell
from benchmarks.inprocess import RunnerThread, check
from benchmarks.process import served
from benchmarks.remote import serve_flags, vocabulary
from benchmarks.sides import Round
from benchmarks.workload import BLOCK_SIZE, LEAD_IN
from ferrum_rpc.client import Answer, ExecutorClient
from ferrum_rpc.client import Sequence as ClientSequence
from ferrum_rpc.client.channel import open_channel
from ferrum_rpc.config import ServeSettings
from ferrum_rpc.core import Greedy, OutputSpec, Positions, SpanResult, Step, StepResult, TokenRows
from ferrum_rpc.core import Span as EngineSpan
from ferrum_rpc.errors import InvalidRequest
from ferrum_rpc.models.linear import select_bytes

REFERENCE: Final = "ours, gRPC session"
INSIDE: Final = "ours, in process"
INT8: Final = "ours with int8 weights, gRPC session"

TIMEOUT_S: Final = 600.0
GREEDY: Final = OutputSpec(Positions.LAST, Greedy())
NOTHING: Final = OutputSpec(Positions.NONE, Greedy())


class Unsupported(RuntimeError):
    """This side does not do that; the reason."""


class Player(Protocol):
    """A side of the comparison."""

    facts: dict[str, Any]
    """What it is: ``name``, ``versions``, and what else it tells."""

    async def prepare(self, cell: Cell) -> None:
        """Make the sequences of ``cell``, and forget earlier ones."""

    async def round(self, cell: Cell, number: int, steps: int) -> Round:
        """``steps`` timed steps of the cell that was prepared; ``number`` tells prefill rounds apart."""


def settings(cells: Sequence[Cell], threads: int) -> dict[str, Any]:
    """Of `ferrum-rpc serve`, for both sides: blocks for the largest cell, and to spare."""
    blocks = max(cell.blocks for cell in cells) + 64
    return {"block_size": BLOCK_SIZE, "kv_blocks": blocks, "threads": threads}


class Inside:
    """The runner in this process."""

    def __init__(self, thread: RunnerThread) -> None:
        self._thread = thread
        self._runner = thread.runner
        self._vocab_size = thread.runner.info.vocab_size
        self._live: list[int] = []
        self._next = 0
        device = thread.runner.device
        self.facts = {"name": INSIDE, "threads": device.threads, "choices": _choices(device.choices)}

    @classmethod
    @asynccontextmanager
    async def open(cls, model: str, cells: Sequence[Cell], threads: int) -> AsyncIterator[Inside]:
        """Load the model."""
        async with RunnerThread.open(model, ServeSettings(**settings(cells, threads))) as thread:
            yield cls(thread)

    async def prepare(self, cell: Cell) -> None:
        """Prefill, a sequence a step."""
        await self._thread.run(lambda: self._prepare(cell))

    async def round(self, cell: Cell, number: int, steps: int) -> Round:
        """The whole round in the runner's thread."""
        run = self._prefill if cell.kind == PREFILL else self._decode
        return await self._thread.run(lambda: run(cell, number, steps))

    def _prepare(self, cell: Cell) -> None:
        self._runner.release(self._live)
        self._live = []
        if cell.kind != PREFILL:
            for prompt in cell.prompts(self._vocab_size):
                check(self._runner.forward(self._creation(prompt, NOTHING)))

    def _decode(self, cell: Cell, _: int, steps: int) -> Round:
        timed = Round()
        for index, fed in enumerate(cell.fed(self._vocab_size, steps).tolist()):
            began = time.perf_counter()
            result = self._runner.forward(
                Step(
                    tuple(
                        EngineSpan(sequence, np.array([token], np.int32), cell.context + index, GREEDY)
                        for sequence, token in zip(self._live, fed, strict=True)
                    )
                )
            )
            timed.tokens = _tokens(result)
            if index >= LEAD_IN:
                timed.step_s.append(time.perf_counter() - began)
        return timed

    def _prefill(self, cell: Cell, number: int, steps: int) -> Round:
        timed = Round()
        for index, prompt in enumerate(cell.fresh(self._vocab_size, number, steps)):
            began = time.perf_counter()
            timed.tokens = _tokens(self._runner.forward(self._creation(prompt, GREEDY)))
            if index:
                timed.step_s.append(time.perf_counter() - began)
            self._runner.release([self._live.pop()])
        return timed

    def _creation(self, prompt: Any, output: OutputSpec) -> Step:
        self._live.append(self._next)
        self._next += 1
        return Step((EngineSpan(self._live[-1], prompt, 0, output, create=True),))


class Session:
    """A scheduler of a server in another process, with a session."""

    def __init__(self, client: ExecutorClient, facts: dict[str, Any], vocab_size: int) -> None:
        self.client = client
        self.facts = facts
        self.vocab_size = vocab_size
        self._sequences: list[ClientSequence] = []

    @classmethod
    @asynccontextmanager
    async def open(
        cls, model: str, cells: Sequence[Cell], threads: int, name: str = REFERENCE, **more: str
    ) -> AsyncIterator[Session]:
        """Start the server, told ``more`` than the settings of all sides, and wait for the model."""
        async with served(*serve_flags(model, settings(cells, threads) | more)) as target:
            async with open_channel(target, None) as channel:
                vocab_size = await vocabulary(channel)
            async with ExecutorClient(target, session=True, timeout_s=TIMEOUT_S) as client:
                device = (await client.info()).device
                facts = {"name": name, "threads": device.threads, "choices": _choices(device.choices)}
                yield cls(client, facts, vocab_size)

    async def prepare(self, cell: Cell) -> None:
        """Prefill, a sequence a step."""
        for sequence in self._sequences:
            await sequence.release()
        self._sequences = []
        if cell.kind != PREFILL:
            for prompt in cell.prompts(self.vocab_size).tolist():
                self._sequences.append(self.client.sequence())
                await self._sequences[-1].prefill(prompt, NOTHING)

    async def round(self, cell: Cell, number: int, steps: int) -> Round:
        """A step is over when its tokens are at hand."""
        return await (self._prefill if cell.kind == PREFILL else self._decode)(cell, number, steps)

    async def _decode(self, cell: Cell, _: int, steps: int) -> Round:
        timed = Round()
        for index, fed in enumerate(cell.fed(self.vocab_size, steps).tolist()):
            began = time.perf_counter()
            back = None if index else cell.context
            pairs = zip(self._sequences, fed, strict=True)
            answers = await self.client.forward([each.item([token], GREEDY, truncate_to=back) for each, token in pairs])
            timed.tokens = [_answer(each).token for each in answers]
            if index >= LEAD_IN:
                timed.step_s.append(time.perf_counter() - began)
                _note(timed, _answer(answers[0]))
        return timed

    async def _prefill(self, cell: Cell, number: int, steps: int) -> Round:
        timed = Round()
        for index, prompt in enumerate(cell.fresh(self.vocab_size, number, steps).tolist()):
            async with self.client.sequence() as sequence:
                began = time.perf_counter()
                answer = await sequence.prefill(prompt, GREEDY)
                timed.tokens = [answer.token]
                if index:
                    timed.step_s.append(time.perf_counter() - began)
                    _note(timed, answer)
        return timed


@asynccontextmanager
async def open_int8(model: str, cells: Sequence[Cell], threads: int) -> AsyncIterator[Session]:
    """`Session.open` with weights rounded to 8 bits. Raises `Unsupported` where the machine has no products of them."""
    try:
        select_bytes(torch.device("cpu"), torch.bfloat16)
    except InvalidRequest as error:
        raise Unsupported(str(error)) from None
    async with Session.open(model, cells, threads, INT8, quantize="int8") as session:
        yield session


def _answer(answer: Answer | Exception) -> Answer:
    if isinstance(answer, Exception):
        raise answer
    return answer


def _note(timed: Round, answer: Answer) -> None:
    assert answer.timing is not None
    timed.forward_s.append(answer.timing.forward_s)
    timed.queue_s.append(answer.timing.queue_s)


def _tokens(result: StepResult) -> list[int]:
    """The greedy rows of every span."""
    check(result)
    found: list[int] = []
    for outcome in result.outcomes:
        assert isinstance(outcome, SpanResult) and outcome.rows is not None
        assert isinstance(outcome.rows.block, TokenRows)
        found.append(int(outcome.rows.block.token_ids[outcome.rows.first]))
    return found


def _choices(choices: Any) -> list[str]:
    return [choice for choice, _ in choices]
