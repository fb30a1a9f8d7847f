"""What texts cost that arrive at any time: streams of the scheduler against lockstep batches of the same work.

In lockstep all texts of a batch begin together, have one length, and end together: by single steps,
a frame each, and by runs, all in one frame. No scheduler can do better with the same calls. The streams are those of
`ferrum_rpc.scheduler.Scheduler` in the same process: callers that each submit one text after the other, and begin at
random times. Their rate is that of the time in which all of them are busy; that of the whole round, with its beginning
and its end, stands in a column of its own. All ways take turns, so ratios are of one round, and each has prompts of its
own, which no other one leaves in the prefix cache. Counts of the executor say whether the work is the same: how many
texts a step has, and how many tokens are fed for each that is chosen. The other rounds ask how long the executor has
the sequence of a text that is cancelled, and for fairness: a tenant with one caller against one with many.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from benchmarks import tables
from benchmarks.cases import BUILT_IN, SEED, checkpoint
from benchmarks.engines.grpc import executor
from benchmarks.record import Record, finish, out_of, read_options
from ferrum_rpc.client import BatchResults, Counters, ExecutorClient, Run
from ferrum_rpc.client import Sequence as CachedSequence
from ferrum_rpc.scheduler import Scheduler, TextRequest

STREAMS: Final = (16, 64)
"""Texts at a time."""

STEPS, RUNS, RANDOM = "lockstep, single steps", "lockstep, runs", "streams"
WAYS: Final = (STEPS, RUNS, RANDOM)
RUN_TOKENS: Final = 32
TEXTS_OF_A_CALLER: Final = 2
"""Texts that a caller ends while streams are measured, on average, so that as many begin as end."""

TARGET: Final = 0.9
"""Tokens a second of streams, of those of the faster lockstep, at least."""

TEXTS_OF_A_TENANT: Final = 4
CANCELS: Final = 200
CANCELLED_AT: Final = 48
"""Tokens that a text has when it is cancelled, at most."""

CANCEL_TARGET_MS: Final = 50.0
"""Milliseconds beyond a step until the sequence of a cancelled text is gone, at most."""

FAIR_TARGET: Final = 0.5
"""Share of the tokens that a tenant with one caller gets beside one with many, at least, while it waits for a place."""

Came = Callable[[int], None]
Writer = Callable[[Sequence[int], int, Came], Coroutine[Any, Any, None]]
"""Has a text written: behind a prompt, of so many tokens, whose arrival is told by calls with how many came together.
If it is cancelled, its reader leaves."""

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


@dataclass(frozen=True, slots=True)
class Steps:
    """What the executor did in a time. ``rows``: the texts of a step, on average. ``fed``: tokens that it computed for
    each that it chose. ``busy``: the share of the time that it spent in its steps."""

    rows: float
    fed: float
    busy: float

    @classmethod
    def between(cls, before: Counters, after: Counters, seconds: float) -> Steps:
        """From what was counted before and after ``seconds``."""
        rows = after.rows - before.rows
        fed = after.tokens - before.tokens - (after.cached_tokens - before.cached_tokens)
        return cls(rows / (after.steps - before.steps), fed / rows, (after.forward_s - before.forward_s) / seconds)


@dataclass(slots=True)
class Round:
    """One way's round: tokens a second, those of the ``whole`` of it, what the executor did, and of streams the times
    to the first tokens in seconds, and all ``tokens`` of the round."""

    rate: float
    whole: float
    steps: Steps
    first_s: list[float] = field(default_factory=list)
    tokens: int = 0


async def lockstep(client: ExecutorClient, work: Work, number: int, run_tokens: int) -> Round:
    """One batch. ``run_tokens``: of a run; 0: single steps."""
    limit = (await client.info()).limits.max_batch_tokens // work.prompt
    sequences = [client.sequence() for _ in range(work.streams)]
    texts = [work.text(number * work.streams + at) for at in range(work.streams)]
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
    steps = Steps.between(before, (await client.status()).counters, took)
    await client.release(sequences)
    rate = work.streams * work.tokens / took
    return Round(rate, rate, steps)


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
        steps = Steps.between(before, (await client.status()).counters, took)
    return Round(tokens / took, counted / (time.perf_counter() - opened), steps, found, counted)


async def share(scheduler: Scheduler, work: Work) -> float:
    """The share of the tokens that a tenant with one caller gets while another has `Work.streams` callers, and one text
    at a time runs."""
    counts = {"many": 0, "one": 0}
    done = asyncio.Event()

    async def caller(tenant: str, at: int) -> None:
        number = 0
        while not done.is_set():
            prompt = work.text(10**9 + at * 1000 + number)
            stream = scheduler.submit(
                TextRequest(prompt=prompt, max_tokens=max(4, work.tokens // 8), stop=(), tenant=tenant)
            )
            tokens = await stream.all()
            if not done.is_set():
                counts[tenant] += len(tokens)
            number += 1
            if tenant == "one" and number == TEXTS_OF_A_TENANT:
                done.set()

    await asyncio.gather(*(caller("many", at) for at in range(work.streams)), caller("one", 10**6))
    return counts["one"] / sum(counts.values())


async def cancels(
    client: ExecutorClient, write: Writer, work: Work, count: int, cancelled_at: int = CANCELLED_AT
) -> dict[str, Any]:
    """How long the executor has the sequence of a text that its reader leaves while `Work.streams` others go on: from
    the cancel to the answer of `ExecutorClient.status` that counts its release. The text then has ``cancelled_at``
    tokens at most."""
    dice, others_released, others = random.Random(SEED), 0, list[asyncio.Task[None]]()
    longest = (await client.info()).model.max_context - work.prompt

    async def caller(at: int) -> None:
        nonlocal others_released
        for number in itertools.count(2 * 10**9 + at * 1000):
            await write(work.text(number), longest, lambda _: None)
            others_released += 1

    async def left(number: int) -> float:
        """Milliseconds; 0 if another text ended meanwhile."""
        wanted, reached = dice.randint(1, cancelled_at), asyncio.Event()

        def came(tokens: int) -> None:
            nonlocal wanted
            wanted -= tokens
            if wanted <= 0:
                reached.set()

        text = callers.create_task(write(work.text(3 * 10**9 + number), longest, came))
        await reached.wait()
        ended, released = others_released, (await client.status()).counters.sequences_released
        cancelled = time.perf_counter()
        text.cancel()
        while (await client.status()).counters.sequences_released == released:
            pass
        return 1e3 * (time.perf_counter() - cancelled) if ended == others_released else 0.0

    async with asyncio.TaskGroup() as callers:
        others += [callers.create_task(caller(at)) for at in range(work.streams)]
        first, began, gone_ms = (await client.status()).counters, time.perf_counter(), list[float]()
        for number in itertools.count():
            gone_ms += filter(None, [await left(number)])
            if len(gone_ms) == count:
                break
        last = (await client.status()).counters
        step_ms = 1e3 * (time.perf_counter() - began) / (last.steps - first.steps)
        for each in others:
            each.cancel()
    p50, p99, most = np.percentile(gone_ms, [50, 99, 100])
    return {
        "streams": work.streams,
        "cancels": count,
        "gone_p50_ms": round(float(p50), 2),
        "gone_p99_ms": round(float(p99), 2),
        "gone_max_ms": round(float(most), 2),
        "step_ms": round(step_ms, 2),
        "target": round(step_ms + CANCEL_TARGET_MS, 2),
    }


def shares(rates: Sequence[float], of: Sequence[float]) -> dict[str, float]:
    """The ratios of rates to those of another way in the same rounds."""
    ratios = np.divide(rates, of)
    return {
        name: round(float(find(ratios)), 3) for name, find in (("median", np.median), ("low", np.min), ("high", np.max))
    }


def medians(rounds: Sequence[Round]) -> dict[str, float | None]:
    """Of one way's rounds; of the times to the first tokens the percentiles of all."""

    def median(values: Iterable[float], digits: int) -> float:
        return round(float(np.median(list(values))), digits)

    first = [each for some in rounds for each in some.first_s]
    return {
        "tokens_per_s": median((each.rate for each in rounds), 1),
        "whole_per_s": median((each.whole for each in rounds), 1),
        "rows": median((each.steps.rows for each in rounds), 2),
        "fed": median((each.steps.fed for each in rounds), 3),
        "busy": median((each.steps.busy for each in rounds), 3),
        "first_p50_ms": round(1e3 * float(np.percentile(first, 50)), 1) if first else None,
        "first_p99_ms": round(1e3 * float(np.percentile(first, 99)), 1) if first else None,
    }


def points(taken: dict[tuple[str, int], list[Round]]) -> list[dict[str, Any]]:
    """Medians of the rounds; ``of_lockstep``: of the ratios to the faster lockstep of the same round."""
    found = []
    for (way, texts), rounds in taken.items():
        best = [
            max(pair) for pair in zip(*([each.rate for each in taken[of, texts]] for of in (STEPS, RUNS)), strict=True)
        ]
        ratios = shares([each.rate for each in rounds], best)
        target = TARGET if way == RANDOM else None
        found.append({"way": way, "streams": texts, **medians(rounds), "of_lockstep": ratios, "target": target})
    return found


async def run(options: argparse.Namespace) -> Record:
    """Measure everything and write the file."""
    model = options.model if options.model in BUILT_IN else str(checkpoint(options.model))
    settings = {"model": options.model, **SERVED, "tokens": options.tokens, "prompt": options.prompt}
    settings |= {"run_tokens": RUN_TOKENS, "rounds": options.rounds}
    record = Record(options.name, settings, options.out)
    taken: dict[tuple[str, int], list[Round]] = {}
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        ours = await enter(executor(model, SERVED))
        client = await enter(ExecutorClient(ours.target, session=True, timeout_s=600.0))
        scheduler = await enter(Scheduler(ours.target, run_tokens=RUN_TOKENS, token_budget=options.token_budget))
        write = by_scheduler(scheduler)
        for texts in options.streams:
            work = Work(texts, options.prompt, options.tokens, ours.vocab_size)
            await lockstep(client, Work(texts, options.prompt, 8, ours.vocab_size), 10**5, RUN_TOKENS)
            for number in range(options.rounds):
                for at, (way, run_tokens) in enumerate(((STEPS, 0), (RUNS, RUN_TOKENS))):
                    taken.setdefault((way, texts), []).append(await lockstep(client, work, 2 * number + at, run_tokens))
                spread_s = texts * options.tokens / taken[RUNS, texts][-1].rate
                taken.setdefault((RANDOM, texts), []).append(await streams(client, write, work, number, spread_s))
                print(
                    f"{texts} streams, round {number + 1}: "
                    + ", ".join(f"{way} {taken[way, texts][-1].rate:,.0f} tok/s" for way in WAYS),
                    flush=True,
                )
            record.save(points=points(taken))
        work = Work(options.streams[0], options.prompt, options.tokens, ours.vocab_size)
        if options.cancels:
            record.save(cancels=await cancels(client, write, work, options.cancels))
            async with Scheduler(ours.target, run_tokens=RUN_TOKENS, max_running=1) as narrow:
                record.save(share=round(await share(narrow, work), 3), share_target=FAIR_TARGET)
    return record


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.streams", description="Texts that arrive at any time.")
    parser.add_argument("--model", default="demo", help="demo, identity or a shape of benchmarks/shapes.json (demo)")
    parser.add_argument("--streams", type=int, nargs="+", default=list(STREAMS), help="texts at a time (16 64)")
    parser.add_argument("--tokens", type=int, help="of a text (default: 256)")
    parser.add_argument("--prompt", type=int, help="tokens of a prompt (default: 64)")
    parser.add_argument("--token-budget", type=int, default=512, help="prompt tokens of a step (512)")
    parser.add_argument(
        "--cancels", type=int, help=f"of texts while others go on, and fairness; 0: neither (default: {CANCELS})"
    )
    options = read_options(parser, argv, rounds=3)
    options.cancels = (4 if options.quick else CANCELS) if options.cancels is None else options.cancels
    options.tokens = options.tokens or (16 if options.quick else 256)
    options.prompt = options.prompt or (8 if options.quick else 64)
    options.name = "streams" if options.model in BUILT_IN else f"streams-{options.model}"
    options.out = out_of(options, options.name)
    return options


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, show, save."""

    def show(values: dict[str, Any]) -> None:
        tables.show(tables.streams(values["points"]), "streams")
        if "cancels" in values:
            tables.show(tables.cancels([values["cancels"]]), "cancels")

    finish(run(parse(argv)), show)


if __name__ == "__main__":
    main()
