"""How steps follow each other: one in flight for each sequence, by a caller each or on one stream for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from time import perf_counter
from typing import Any

from benchmarks.sides import Round
from ferrum_rpc.executor.v1 import types_pb2


async def in_calls(step: Callable[[int], Awaitable[Any]], depth: int, steps: int) -> Round:
    """A task for each sequence that awaits one step after the other. ``step``: of one sequence; gives its timing."""
    timed = Round()

    async def caller(sequence: int) -> None:
        for _ in range(steps):
            began = perf_counter()
            timing = await step(sequence)
            _note(timed, began, timing)

    began = perf_counter()
    await asyncio.gather(*(caller(sequence) for sequence in range(depth)))
    timed.wall_s = perf_counter() - began
    return timed


async def in_frames(
    send: Callable[[int], Awaitable[None]], receive: Callable[[], Awaitable[tuple[int, Any]]], depth: int, steps: int
) -> Round:
    """One task on one stream: the next step of a sequence is sent when its last one was answered. ``receive``: the
    sequence that was answered, and the step's timing."""
    timed = Round()
    left = [steps] * depth
    sent = [0.0] * depth
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
    timed.step_s.append(perf_counter() - began)
    if isinstance(timing, types_pb2.StepTiming):
        timed.forward_s.append(timing.forward_micros / 1e6)
        timed.queue_s.append(timing.queue_micros / 1e6)
    elif timing is not None:
        timed.forward_s.append(timing.forward_s)
        timed.queue_s.append(timing.queue_s)
