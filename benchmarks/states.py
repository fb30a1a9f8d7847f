"""What recurrent states cost: verification with rejected drafts beside the same without, truncation, memory, and what a
sequence that is fed again, or moves, does to the steps of others. One runner in this process.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy as np
import torch

from benchmarks.cases import checkpoint
from benchmarks.compare import median, percentile, shares
from benchmarks.memory import resident
from benchmarks.record import Benchmark, Record
from benchmarks.table import target
from ferrum_rpc.attention.recurrent import STEP_TOKENS
from ferrum_rpc.config import ModelSettings
from ferrum_rpc.core import Greedy, OutputSpec, Positions, Span, Step
from ferrum_rpc.engine.assembly.build import build_runner
from ferrum_rpc.engine.operations import TorchRunner
from ferrum_rpc.service.kv_stream import READ_BYTES
from ferrum_rpc.wire.state_stream import rows_of

SHAPE: Final = "qwen3.5-0.8b"
QUICK: Final = "qwen3.5-tiny"
ALL, LAST = OutputSpec(Positions.ALL, Greedy()), OutputSpec(Positions.LAST, Greedy())
DRAFTED: Final = 5
REJECTED: Final = 3
DEEP: Final = 512
"""Tokens that are fed again."""


class Sequences:
    """Sequences of ``length`` random tokens, which nobody else finds."""

    def __init__(self, runner: TorchRunner, count: int, length: int, first: int = 1) -> None:
        self.runner, self.numbers = runner, range(first, first + count)
        self._dice = np.random.default_rng(0)
        for each in self.numbers:
            runner.forward(Step((Span(each, self._tokens(length), 0, LAST, create=True),)))
        self.length = length

    def _tokens(self, count: int) -> Any:
        return self._dice.integers(1, self.runner.info.vocab_size, count).astype(np.int32)

    def step(self, tokens: int, output: OutputSpec) -> None:
        """So many tokens more for each."""
        self.runner.forward(Step(tuple([Span(n, self._tokens(tokens), self.length, output) for n in self.numbers])))
        self.length += tokens

    def cut(self, length: int) -> None:
        for each in self.numbers:
            self.runner.truncate(each, length)
        self.length = length

    def verify(self, rejected: int) -> None:
        """Drafts, of which so many are rejected, and the step after."""
        self.step(DRAFTED, ALL)
        if rejected:
            self.cut(self.length - rejected)
        self.step(1, LAST)

    def release(self) -> None:
        self.runner.release(list(self.numbers))


def milliseconds(run: Callable[[], object]) -> float:
    """How long it takes."""
    began = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - began)


def verified(runner: TorchRunner, count: int, rounds: int) -> dict[str, Any]:
    """Rejected drafts beside accepted ones, in turn; and the truncations between, by themselves."""
    held = Sequences(runner, count, 256)
    for rejected in (0, REJECTED):
        held.verify(rejected)
    pairs = [[milliseconds(partial(held.verify, rejected)) for rejected in (REJECTED, 0)] for _ in range(rounds)]
    held.step(DRAFTED, ALL)
    cut = milliseconds(lambda: held.cut(held.length - REJECTED)) / count
    held.release()
    rejecting, accepting = zip(*pairs, strict=True)
    return {
        "sequences": count,
        "with 3 of 5 rejected, ms": median(rejecting, 2),
        "with none, ms": median(accepting, 2),
        "ratio": shares(rejecting, accepting),
        "a truncation, ms": round(cut, 4),
    }


def held_by(runner: TorchRunner, count: int) -> float:
    """Resident bytes of a sequence that decodes, in states, without its keys and values."""
    Sequences(runner, 1, 40, first=10_000).release()
    before = resident()
    held = Sequences(runner, count, DEEP)
    for _ in range(8):
        held.step(1, LAST)
    took = resident() - before - count * held.length * runner.info.kv_bytes_per_token
    held.release()
    assert runner.states is not None
    states, *_ = runner.states.store.buffers
    return took / count / states[0].nbytes


def beside(runner: TorchRunner, count: int, steps: int) -> dict[str, Any]:
    """Decode steps of many, alone and while another is fed again between them."""
    held, other = Sequences(runner, count, 256), Sequences(runner, 1, DEEP + 8, first=5_000)
    again = Span(other.numbers[0], np.ones(1, np.int32), DEEP, LAST)
    feeding, states = runner.feeding, runner.states
    assert feeding is not None and states is not None
    held.step(1, LAST)
    alone, fed = list[float](), list[float]()
    while len(fed) < steps:
        alone += [milliseconds(partial(held.step, 1, LAST)) for _ in range(8)]
        other.cut(DEEP)
        states.forget_checkpoints()
        while feeding.missing(again):
            fed.append(milliseconds(partial(feeding.feed, [again])) + milliseconds(partial(held.step, 1, LAST)))
        runner.forward(Step((again,)))
        other.length = DEEP + 1
        for tokens in (6, 1):  # so that its states contain more than is left next time
            other.step(tokens, LAST)
    held.release()
    other.release()
    p99, feeding_ms = percentile(alone, 99, 2), percentile(fed, 99, 2)
    return {
        "sequences": count,
        "p99 alone, ms": p99,
        "median alone, ms": median(alone, 2),
        "p99 beside 512 tokens that are fed again, ms": feeding_ms,
        "ratio": round(feeding_ms / p99, 3),
    }


class Move:
    """Exports and imports of a sequence with as long a journal as there is, an operation between two ``steps`` of
    others. ``waits``: milliseconds of each operation; ``between``: of each with the step behind it."""

    def __init__(self, runner: TorchRunner, step: Callable[[], object]) -> None:
        self._runner, self._step = runner, step
        self._source, self._numbers = Sequences(runner, 1, DEEP, first=6_000), itertools.count(7_000)
        for _ in range(2):
            self._source.step(STEP_TOKENS, LAST)
        self.waits, self.between = list[float](), list[float]()

    def _do(self, operation: Callable[..., Any], *arguments: Any) -> Any:
        began = time.perf_counter()
        found = operation(*arguments)
        self.waits.append(1e3 * (time.perf_counter() - began))
        self.between.append(self.waits[-1] + milliseconds(self._step))
        return found

    def run(self) -> None:
        """One export and one import, of the states and without keys and values."""
        runner, copy, came = self._runner, next(self._numbers), next(self._numbers)
        assert runner.info.states is not None
        self._do(runner.begin_export, self._source.numbers[0], copy)
        tokens, moved = runner.token_ids(copy), runner.state_lengths(copy)
        every = rows_of(runner.info.states, moved, READ_BYTES)
        pieces = [(each, self._do(runner.read_states, copy, [each])[0]) for each in every]
        self._do(runner.release, [copy])
        self._do(runner.begin_import, came, tokens, 0, 0, None)
        for rows, data in pieces:
            if rows.tensor != "lengths":
                self._do(runner.write_states, came, moved, [(rows, data)])
        self._do(runner.commit_import, came, moved)
        self._do(runner.release, [came])

    def release(self) -> None:
        self._source.release()


def moved(runner: TorchRunner, count: int, rounds: int) -> dict[str, Any]:
    """What an export and an import do to the decode steps of many."""
    held = Sequences(runner, count, 256)
    held.step(1, LAST)
    move, alone = Move(runner, partial(held.step, 1, LAST)), list[float]()
    for _ in range(rounds):
        alone += [milliseconds(partial(held.step, 1, LAST)) for _ in range(16)]
        move.run()
    for each in (held, move):
        each.release()
    p99, moving_ms = percentile(alone, 99, 2), percentile(move.between, 99, 2)
    return {
        "sequences": count,
        "operations": len(move.waits) // rounds,
        "an operation, ms": median(move.waits, 2),
        "p99 of operations, ms": percentile(move.waits, 99, 2),
        "p99 of steps alone, ms": p99,
        "p99 beside an export and an import, ms": moving_ms,
        "ratio": round(moving_ms / p99, 3),
    }


async def run(options: argparse.Namespace) -> Record:
    """Every part, and a file of it."""
    folder = checkpoint(QUICK if options.quick else SHAPE)
    record = Record(options, model=folder.name, threads=torch.get_num_threads())
    cache: dict[str, Any] = {"kv_blocks": 2048, "state_slots": 40, "max_context": 1024}
    runner = build_runner(ModelSettings(str(folder), device="cpu", dtype="bfloat16", **cache))
    counts, steps, copies = ((1, 2), 16, 2) if options.quick else ((1, 8, 32), 64, 16)  # of sequences
    with runner.context():
        states = held_by(runner, copies)
        points = [verified(runner, count, options.rounds) for count in counts]
        moves = moved(runner, counts[-1], min(options.rounds, 4))
        neighbours = beside(runner, counts[-1], steps)
    most = max(each["ratio"]["median"] for each in points)
    cut = max(each["a truncation, ms"] for each in points)
    record.put(
        "verification",
        points,
        targets=[
            target("Qwen3.5-0.8B, verification of 5 with 3 rejected, of the same with none", most, 1.05, least=False),
            target("a truncation within the last step, ms", cut, 1.0, least=False),
            target("states that a decoding sequence holds", round(states, 3), 1.1, least=False),
            target("p99 beside a sequence that is fed again, of alone", neighbours["ratio"], 2.0, least=False),
            target("p99 beside an export and an import of states, of alone", moves["ratio"], 1.2, least=False),
        ],
    )
    record.put("neighbours", [neighbours])
    record.put("moves", [moves])
    return record


BENCHMARK: Final = Benchmark("states", run, rounds=9)
