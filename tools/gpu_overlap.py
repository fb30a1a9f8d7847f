"""What beginning a step while the device computes the one before it is worth: two batches of callers that alternate.

Each batch asks for its next step when it has its answers, as a scheduler with two halves of its sequences does. Both
sides run the same engine (queue, model thread, runner) over the same model and the same cached tokens; only the number
of steps that may be under way differs. Needs what the engine needs (structlog).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from statistics import median
from typing import Any, Final

import numpy as np

from ferrum_rpc.attention.geometry import Int32Array
from ferrum_rpc.core import DeviceInfo, Greedy, OutputSpec, Positions, Span, SpanOutcome, SpanResult, TokenRows
from ferrum_rpc.engine.runner import TorchRunner
from ferrum_rpc.engine.thread import ModelThread
from ferrum_rpc.engine.work import Command, Operation, Submission
from ferrum_rpc.kv.manager import KvManager
from tools.gpu_world import BLOCK_SIZE, LEAD_IN, World, ratios

SIDES: Final = {"off": 1, "on": 2}
GREEDY: Final = OutputSpec(Positions.LAST, Greedy())


def overlap_cell(world: World, batch: int, context: int, *, rounds: int, steps: int, least: float) -> dict[str, Any]:
    """Seconds a step of two alternating batches of ``batch`` sequences with ``context`` tokens, overlap on and off in
    turn; the cache is theirs from here on. Passed: off takes ``least`` times as long as on, with the same tokens."""
    seconds, tokens = asyncio.run(_measure(world, batch, context, rounds, steps))
    gain = ratios(seconds["off"], seconds["on"])
    same = np.array_equal(tokens["off"], tokens["on"])
    return {
        "name": f"overlap, two batches of {batch} @ {context + 1} in turn",
        "passed": same and median(gain) >= least,
        "same_tokens": same,
        "off_over_on": gain,
        "target": least,
        "seconds": {side: median(each) for side, each in seconds.items()},
    }


def runner_of(world: World) -> TorchRunner:
    """The engine's books around a world's model; its cache belongs to them from now on."""
    return TorchRunner(
        world.model,
        KvManager(world.blocks + 1, BLOCK_SIZE),
        world.store,
        world.compute.attention,
        info=world.model.info("gpu-check"),
        device=DeviceInfo(world.device.type, str(world.device), 0, 1, world.compute.attention.name),
        compute=world.compute,
    )


async def _measure(
    world: World, batch: int, context: int, rounds: int, steps: int
) -> tuple[dict[str, list[float]], dict[str, Int32Array]]:
    """Seconds a step of each round, and all tokens of the last, of each side."""
    runner = runner_of(world)
    ready: asyncio.Future[object] = asyncio.get_running_loop().create_future()

    def failed(error: BaseException) -> None:
        if not ready.done():  # later its callers hear of it
            ready.set_exception(error)

    thread = ModelThread(
        lambda: runner,
        loop=asyncio.get_running_loop(),
        max_step_items=batch,
        max_step_tokens=8192,
        on_ready=ready.set_result,
        on_failed=failed,
    )
    thread.start()
    await ready
    halves = [_Batch(thread, range(first, first + batch), context, world.config["vocab_size"]) for first in (0, batch)]
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    tokens: dict[str, Int32Array] = {}
    try:
        await _ask(thread, lambda runner: _fill(runner, 2 * batch, context))
        for _ in range(rounds):
            for side, depth in SIDES.items():
                await _ask(thread, lambda runner, depth=depth: setattr(runner, "depth", depth))
                await asyncio.gather(*(half.run(LEAD_IN) for half in halves))
                began = time.perf_counter()
                found = await asyncio.gather(*(half.run(steps) for half in halves))
                seconds[side].append((time.perf_counter() - began) / (2 * steps))
                tokens[side] = np.concatenate(found)
                for half in halves:
                    half.begin_anew()
                for sequence in range(2 * batch):
                    await _ask(thread, Command("truncate", (sequence, context)))
    finally:
        await thread.stop()
    return seconds, tokens


def _fill(runner: TorchRunner, sequences: int, context: int) -> None:
    """Sequences of whatever stands in the cache."""
    for sequence in range(sequences):
        runner.kv.commit(runner.kv.reserve(sequence, 0, context, create=True))


async def _ask(thread: ModelThread, run: Any) -> None:
    done: asyncio.Future[object] = asyncio.get_running_loop().create_future()
    thread.operate(Operation(run, done.set_result))
    if isinstance(answer := await done, BaseException):
        raise answer


class _Batch:
    """Sequences that step together, each fed what it answered."""

    def __init__(self, thread: ModelThread, sequences: Sequence[int], context: int, vocabulary: int) -> None:
        self._thread, self._sequences, self._context = thread, sequences, context
        self._first = np.random.default_rng(sequences[0]).integers(0, vocabulary, len(sequences)).astype(np.int32)
        self.begin_anew()

    def begin_anew(self) -> None:
        """At the length and with the tokens of the beginning."""
        self._length, self._fed = self._context, self._first

    async def run(self, steps: int) -> Int32Array:
        """The tokens of ``steps`` steps, one after the other."""
        found = []
        for _ in range(steps):
            self._fed = await self._step()
            self._length += 1
            found.append(self._fed)
        return np.concatenate(found)

    async def _step(self) -> Int32Array:
        answer: asyncio.Future[tuple[SpanOutcome, ...]] = asyncio.get_running_loop().create_future()
        spans = tuple(
            Span(sequence, self._fed[row : row + 1], self._length, GREEDY)
            for row, sequence in enumerate(self._sequences)
        )
        self._thread.submit(Submission(spans, lambda outcomes, timing: answer.set_result(outcomes)))
        fed = np.empty(len(spans), dtype=np.int32)
        for row, outcome in enumerate(await answer):
            if not isinstance(outcome, SpanResult):
                raise outcome
            assert outcome.rows is not None and isinstance(outcome.rows.block, TokenRows)
            fed[row] = outcome.rows.block.token_ids[outcome.rows.first]
        return fed
