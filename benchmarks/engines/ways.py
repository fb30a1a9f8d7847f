"""The ways to take an empty step: by unary calls and on a stream. Every side of ours, and the echo that it is measured
against, takes the same steps: ``depth`` sequences with one step each in flight, one caller per sequence where calls are
unary, one stream for all of them where there is one.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from time import perf_counter
from typing import Any, Final

from benchmarks.cases import Cell
from benchmarks.compare import Round
from ferrum_rpc.executor.v1 import types_pb2

CONTEXT: Final = 16  # tokens of a sequence when a round begins: its first step rolls it back to them
LEAD_IN: Final = 5
"""Steps of each sequence that are not timed: the roll-back, and some that find the caches as the timed ones do."""

TOKEN: Final = 7


async def in_calls(step: Callable[[int], Awaitable[Any]], depth: int, steps: int) -> Round:
    """A task for each sequence that awaits one step after the other. ``step``: of one sequence; gives its timing."""
    timed = Round()

    async def caller(sequence: int) -> None:
        for _ in range(steps):
            began = perf_counter()
            _note(timed, began, await step(sequence))

    began = perf_counter()
    await asyncio.gather(*(caller(sequence) for sequence in range(depth)))
    timed.wall_s = perf_counter() - began
    return timed


async def in_frames(
    send: Callable[[int], Awaitable[object]], receive: Callable[[], Awaitable[tuple[int, Any]]], depth: int, steps: int
) -> Round:
    """One task on one stream: the next step of a sequence is sent when its last one was answered. ``receive``: the
    sequence that was answered, and the step's timing."""
    timed = Round()
    left, sent = [steps] * depth, [0.0] * depth
    began = perf_counter()
    for sequence in range(depth):
        sent[sequence] = perf_counter()
        await send(sequence)
    for _ in range(depth * steps):
        sequence, timing = await receive()
        _note(timed, sent[sequence], timing)
        left[sequence] -= 1
        if left[sequence]:
            sent[sequence] = perf_counter()
            await send(sequence)
    timed.wall_s = perf_counter() - began
    return timed


def _note(timed: Round, began: float, timing: Any) -> None:
    if isinstance(timing, types_pb2.StepTiming):
        timed.done(timing.forward_micros / 1e6, timing.queue_micros / 1e6, began)
    elif timing is not None:
        timed.done(timing.forward_s, timing.queue_s, began)
    else:
        timed.done(began=began)


class Way(ABC):
    """Steps of sequences that are prefilled once. ``back``: where the next step rolls back to; ``exchange``: the bytes
    of a step's request and answer, where they are kept."""

    exchange = (b"", b"")
    back: int | None = None

    @abstractmethod
    async def prepare(self, cell: Cell) -> None:
        """Make the sequences of a cell, and what else steps of its callers need."""

    @abstractmethod
    async def take(self, depth: int, steps: int) -> Round:
        """``steps`` timed steps of each of ``depth`` sequences."""

    async def turn(self, depth: int, steps: int) -> Round:
        """Roll back, then timed steps: a round of empty ones."""
        self.back = CONTEXT
        await self.take(depth, 1)
        self.back = None
        await self.take(depth, LEAD_IN - 1)
        return await self.take(depth, steps)
