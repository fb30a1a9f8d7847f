"""What texts cost that arrive at any time: streams of the scheduler against lockstep batches of the same work, and
against the same texts by a worker through gRPC and by a router in front of the worker through HTTP.

All ways have the same executor and take turns, so ratios are of one round, and each text has a prompt of its own,
which no other one leaves in the prefix cache. A stream's rate is that of the time in which all callers are busy. Counts
of the executor say whether the work is the same: how many texts a step has, and how many tokens are fed for each that
is chosen. The processor time of every process says where the time goes: on a machine whose cores are all busy, what the
worker, the router and the caller take is missing at the executor.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from typing import Any, Final

import numpy as np

from benchmarks.cases import SEED, model_path
from benchmarks.compare import alternate, median, percentile, shares
from benchmarks.engines.fronts import Came, Writer, worker_and_router
from benchmarks.engines.grpc import connected
from benchmarks.machine import processor_s
from benchmarks.record import Benchmark, Option, Record, shape_of
from benchmarks.table import target
from ferrum_rpc.client import BatchResults, Counters, ExecutorClient, Run
from ferrum_rpc.client import Sequence as CachedSequence
from ferrum_rpc.runtime import choose_loop
from ferrum_rpc.scheduler import Scheduler, TextRequest

TEXTS: Final = (1, 16, 64)  # at a time
STEPS, RUNS, STREAMS = "lockstep, single steps", "lockstep, runs", "streams"
WORKER, ROUTER = "a worker, gRPC", "a router and a worker, HTTP"
WAYS: Final = (STEPS, RUNS, STREAMS, WORKER, ROUTER)
RUN_TOKENS: Final = 32  # as the scheduler has them by default
LONE: Final = 4
"""A text alone is this many times as long as one of several: its round would be over within the host's next stall."""

TEXTS_OF_A_CALLER: Final = 2
"""Texts that a caller ends while streams are measured, on average, so that as many begin as end."""

SHAPE: Final = "qwen3-0.6b"
DIGITS: Final = {"texts a step": 2, "fed a token": 3, "in steps": 3}
SERVED: Final = {"device": "cpu", "kv-blocks": 4096, "lease-ttl-s": 600.0, "max-sequences": 256}


@dataclass(frozen=True, slots=True)
class Work:
    """``streams`` texts at a time, each ``tokens`` long behind a prompt of ``prompt`` tokens of a model's."""

    streams: int
    prompt: int
    tokens: int
    vocab_size: int

    def text(self, number: int) -> list[int]:
        """A prompt that no other one begins like, of printable characters where tokens are bytes."""
        dice = random.Random(SEED * 1_000_003 + number)
        return [dice.randrange(32, 127) % self.vocab_size for _ in range(self.prompt)]


def steps_between(before: Counters, after: Counters, seconds: float) -> dict[str, float]:
    """What the executor did in ``seconds``, by columns of the table."""
    rows = after.rows - before.rows
    fed = after.tokens - before.tokens - (after.cached_tokens - before.cached_tokens)
    busy = (after.forward_s - before.forward_s) / seconds
    return {"texts a step": rows / (after.steps - before.steps), "fed a token": fed / rows, "in steps": busy}


@dataclass(slots=True)
class Round:
    """One way's round: tokens a second, those of the ``whole`` of it, what the executor did, and of streams the times
    to the first tokens in seconds, and all ``tokens`` of the round. ``worked_s``: seconds that the cores worked in it
    for each process."""

    rate: float
    whole: float
    steps: dict[str, float]
    first_s: list[float] = field(default_factory=list)
    tokens: int = 0
    worked_s: Mapping[str, float] = field(default_factory=dict)


Taken = Mapping[tuple[str, int], Sequence[Round]]  # by way and texts at a time


async def lockstep(client: ExecutorClient, work: Work, number: int, run_tokens: int) -> Round:
    """One batch. ``run_tokens``: of a run; 0: single steps."""
    limit = (await client.info()).limits.max_batch_tokens // work.prompt
    sequences = [client.sequence() for _ in range(work.streams)]
    texts = [work.text(1000 * number + at) for at in range(work.streams)]
    before, began = (await client.status()).counters, time.perf_counter()
    results = BatchResults()
    for at in range(0, work.streams, limit):
        items = [each.item(text) for each, text in zip(sequences[at : at + limit], texts[at : at + limit], strict=True)]
        results += await client.forward(items, timeout_s=600.0)
    last, done = [answer.token for answer in results.all_answers()], 1
    while done < work.tokens:
        count = min(run_tokens, work.tokens - done)
        last = await _step(client, sequences, last, Run(count) if count else None)
        done += count or 1
    took = time.perf_counter() - began
    steps = steps_between(before, (await client.status()).counters, took)
    await client.release(sequences)
    tokens = work.streams * work.tokens
    return Round(tokens / took, tokens / took, steps, tokens=tokens)


async def _step(client: ExecutorClient, sequences: list[CachedSequence], last: list[int], run: Run | None) -> list[int]:
    items = [each.item([token], run=run) for each, token in zip(sequences, last, strict=True)]
    return [int(answer.tokens[-1]) for answer in (await client.forward(items, timeout_s=600.0)).all_answers()]


def by_scheduler(scheduler: Scheduler) -> Writer:
    """Texts of a scheduler in this process."""

    async def write(prompt: Sequence[int], tokens: int, came: Came) -> None:
        async with scheduler.submit(TextRequest(prompt=prompt, max_tokens=tokens, stop=())) as stream:
            async for _ in stream:
                came(1)

    return write


async def streams(client: ExecutorClient, write: Writer, work: Work, number: int, spread_s: float) -> Round:
    """Callers that begin within ``spread_s`` seconds and have one text written after the other. Measured from the
    moment at which all are busy, until `TEXTS_OF_A_CALLER` texts of each have ended."""
    dice, numbers = random.Random(SEED + number), itertools.count(10**6 * (number + 1))
    first, all_busy, measured = list[float](), asyncio.Event(), asyncio.Event()
    begun = ended = counted = 0

    async def text() -> None:
        submitted = time.perf_counter()

        def came(tokens: int) -> None:
            nonlocal submitted, counted
            if submitted:
                first.append(time.perf_counter() - submitted)
                submitted = 0.0
            counted += tokens

        await write(work.text(next(numbers)), work.tokens, came)

    async def caller() -> None:
        nonlocal begun, ended
        await asyncio.sleep(dice.random() * spread_s)
        begun += 1
        if begun == work.streams:
            all_busy.set()
        while not measured.is_set():
            await text()
            ended += all_busy.is_set()
            if ended == work.streams * TEXTS_OF_A_CALLER:
                measured.set()

    opened = time.perf_counter()
    async with asyncio.TaskGroup() as callers:
        for _ in range(work.streams):
            callers.create_task(caller())
        await all_busy.wait()
        began, tokens, firsts = time.perf_counter(), counted, len(first)
        before = (await client.status()).counters
        await measured.wait()
        took, tokens, found = time.perf_counter() - began, counted - tokens, first[firsts:]
        steps = steps_between(before, (await client.status()).counters, took)
    return Round(tokens / took, counted / (time.perf_counter() - opened), steps, found, counted)


def medians(rounds: Sequence[Round]) -> dict[str, float | None]:
    """Of one way's rounds, by columns; of the times to the first tokens the percentiles of all."""
    first = [1e3 * each for some in rounds for each in some.first_s]
    worked = [{name: 1e6 * spent / each.tokens for name, spent in each.worked_s.items()} for each in rounds]
    return {
        "tokens/s": median((each.rate for each in rounds), 1),
        "whole round, tokens/s": median((each.whole for each in rounds), 1),
        **{name: median((each.steps[name] for each in rounds), digits) for name, digits in DIGITS.items()},
        "first token, ms": median(first, 1) if first else None,
        "p99": percentile(first, 99, 1) if first else None,
        **{f"{name}, µs": round(median(each[name] for each in worked)) for name in worked[0]},
    }


@dataclass(frozen=True, slots=True)
class Goal:
    """Tokens a second of a ``way``, of those of the fastest way ``of`` the same round, in a ``column``: at least
    ``bound``. ``what``: the end of the target's words."""

    way: str
    of: tuple[str, ...]
    column: str
    bound: float
    what: str


OF_LOCKSTEP: Final = "that arrive at any time, of lockstep, Qwen3-0.6B"
OF_LIBRARY: Final = "of a router and a worker, of the scheduler as a library, Qwen3-0.6B"
GOALS: Final = (
    Goal(STREAMS, (STEPS, RUNS), "of lockstep", 0.9, OF_LOCKSTEP),
    Goal(ROUTER, (STREAMS,), "of the library", 0.95, OF_LIBRARY),
)


def points(taken: Taken, *, shaped: bool) -> list[dict[str, Any]]:
    """Medians of the rounds, and ratios of a round. ``shaped``: the model is that of the targets."""
    found = []
    for (way, texts), rounds in taken.items():
        row: dict[str, Any] = {"way": way, "texts": texts, "target": None}
        for goal in (each for each in GOALS if all((name, texts) in taken for name in each.of)):
            best = np.max([[each.rate for each in taken[name, texts]] for name in goal.of], axis=0)
            row[goal.column] = ratio = shares([each.rate for each in rounds], best.tolist())
            if way == goal.way:
                what = f"{texts} text{'s' * (texts > 1)} {goal.what}" if shaped else ""
                row["target"] = target(what, ratio["median"], goal.bound)
        found.append(row | medians(rounds))
    return found


async def run(options: argparse.Namespace) -> Record:
    """Measure everything and write the file."""
    model, smg = options.model, {WORKER, ROUTER} & {*options.ways}
    told = f"of {options.tokens} tokens behind {options.prompt} each, alone {LONE * options.tokens}"
    router = {"router": f"smg {version('smg')}"} if smg else {}
    record = Record(options, model=model, **SERVED, texts=f"{told}; runs of {RUN_TOKENS}", **router)
    taken: dict[tuple[str, int], list[Round]] = {}
    numbers = itertools.count()
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        ours, client = await enter(connected(model_path(model), SERVED))
        writers = {STREAMS: by_scheduler(await enter(Scheduler(ours.target)))}
        processes = {"executor": ours.pid, "caller": os.getpid()}
        if smg:
            writers[WORKER], writers[ROUTER], more = await enter(worker_and_router(ours.target, model))
            processes |= more

        async def take(way: str, work: Work, spread_s: float, _: int = 0) -> Round:
            before = {name: processor_s(pid) for name, pid in processes.items()}
            if way in writers:
                found = await streams(client, writers[way], work, next(numbers), spread_s)
            else:
                found = await lockstep(client, work, next(numbers), RUN_TOKENS if way == RUNS else 0)
            found.worked_s = {name: processor_s(pid) - before[name] for name, pid in processes.items()}
            return found

        for texts in options.texts:
            work = Work(texts, options.prompt, options.tokens * (LONE if texts == 1 else 1), ours.vocab_size)
            few = replace(work, tokens=min(8, work.tokens))
            pace, *_ = [(await take(way, few, 0.0)).rate for way in options.ways]  # and all are warm
            within_s = texts * work.tokens / pace
            takes = {(way, texts): partial(take, way, work, within_s) for way in options.ways}
            taken |= (await alternate(takes, options.rounds))[0]
            record.put("ways", points(taken, shaped=options.variant == SHAPE))
            print(f"{texts} texts: done", flush=True)
    return record


BENCHMARK: Final = Benchmark(
    "streams",
    run,
    (
        Option("--model", "demo", "demo or a shape of benchmarks/shapes.json"),
        Option("--ways", list(WAYS), "of texts", choices=WAYS),
        Option("--texts", list(TEXTS), "at a time", [2]),
        Option("--tokens", 128, "of a text", 8),
        Option("--prompt", 64, "tokens of a prompt", 16),
    ),
    rounds=3,
    variant=shape_of,
    loop=choose_loop("auto").make,
)
