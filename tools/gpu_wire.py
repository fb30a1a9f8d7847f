"""gRPC against in process, on one runner: what the service floor and the wire cost a decode step of a large batch.

The server is here, with its event loop and its model thread; the scheduler is `gpu_wire_client` in a process of its
own. The other side calls the same runner in the model thread, with no queue and no wire. Sides alternate. Needs what
the server needs (grpc, structlog and others); where that is missing, importing this says what.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import structlog

from ferrum_rpc.core import Greedy, Limits, OutputSpec, Positions, Span, SpanResult, Step
from ferrum_rpc.engine.runner import TorchRunner
from ferrum_rpc.service.operations import CacheOperations
from ferrum_rpc.service.server import ExecutorServer
from tools.gpu_overlap import runner_of
from tools.gpu_world import LEAD_IN, World

ROOT = Path(__file__).resolve().parent.parent


def wire_cell(world: World, batch: int, context: int, *, rounds: int, steps: int, share: float) -> dict[str, Any]:
    """Steps a second of ``batch`` sequences with ``context`` tokens through gRPC, over those of the runner itself. The
    cache is the server's from here on."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    seconds = asyncio.run(_measure(world, batch, context, rounds, steps))
    ratio = [mine / theirs for mine, theirs in zip(seconds["in process"], seconds["grpc"], strict=True)]
    return {
        "name": f"gRPC against in process, batch {batch} @ {context}, greedy",
        "passed": median(ratio) >= share,
        "ratio": median(ratio),
        "target": share,
        "ratios": ratio,
        "seconds": {side: median(each) for side, each in seconds.items()},
    }


async def _measure(world: World, batch: int, context: int, rounds: int, steps: int) -> dict[str, list[float]]:
    limits = Limits(
        max_batch_items=256,
        max_batch_tokens=8192,
        max_top_tokens=1,
        max_selected_tokens=1,
        max_request_bytes=16 << 20,
        max_response_bytes=16 << 20,
        max_sequences=4 * batch,
        max_queued_items=4096,
        max_queued_tokens=1 << 18,
        replay_bytes=1 << 20,
    )
    server = ExecutorServer(partial(runner_of, world), limits)
    await server.start()
    client = None
    try:
        await server.ready()
        arguments = (server.target, batch, context, steps, LEAD_IN, world.config["vocab_size"])
        client = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tools.gpu_wire_client",
            *map(str, arguments),
            cwd=ROOT,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        operations = CacheOperations(server.books)
        inside = _Inside(batch, context, steps, world.config["vocab_size"])
        await operations._between_steps(inside.prefill)
        found: dict[str, list[float]] = {"grpc": [], "in process": []}
        assert client.stdin is not None and client.stdout is not None
        for _ in range(rounds):
            await operations._between_steps(inside.round)
            found["in process"].append(median(inside.seconds))
            client.stdin.write(b"go\n")
            line = await client.stdout.readline()
            if not line:
                raise RuntimeError("the client ended; its error is above")
            found["grpc"].append(median(json.loads(line)))
        await operations._between_steps(inside.release)
        client.stdin.close()
        await client.wait()
        return found
    finally:
        if client is not None and client.returncode is None:
            client.kill()
        await server.stop(grace_s=0)


class _Inside:
    """The runner's own side: sequences that the service floor does not know."""

    FIRST = 1 << 40

    def __init__(self, batch: int, context: int, steps: int, vocabulary: int) -> None:
        self._sequences = range(self.FIRST, self.FIRST + batch)
        self._context, self._steps = context, steps
        self._tokens = np.random.default_rng(2).integers(0, vocabulary, (batch, context)).astype(np.int32)
        self.seconds: list[float] = []

    def prefill(self, runner: TorchRunner) -> None:
        """Make the sequences, a step each."""
        for sequence, prompt in zip(self._sequences, self._tokens, strict=True):
            self._run(runner, (Span(sequence, prompt, 0, OutputSpec(Positions.NONE), create=True),))

    def round(self, runner: TorchRunner) -> None:
        """Roll back, then step."""
        greedy = OutputSpec(Positions.LAST, Greedy())
        seconds = []
        for index in range(LEAD_IN + self._steps):
            began = time.perf_counter()
            fed = self._tokens[:, index % self._context]
            self._run(
                runner,
                tuple(
                    Span(sequence, fed[number : number + 1], self._context + index, greedy)
                    for number, sequence in enumerate(self._sequences)
                ),
            )
            seconds.append(time.perf_counter() - began)
        self.seconds = seconds[LEAD_IN:]

    def release(self, runner: TorchRunner) -> None:
        """Give their blocks back."""
        runner.release(self._sequences)

    @staticmethod
    def _run(runner: TorchRunner, spans: tuple[Span, ...]) -> None:
        for outcome in runner.forward(Step(spans)).outcomes:
            if not isinstance(outcome, SpanResult):
                raise outcome
