"""A run: check that the executor has capacity for it, prefill, warm up, measure. Writes everything into the `Stats`."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Coroutine, Iterable
from dataclasses import replace
from typing import Any, Final

from ferrum_rpc.bench.arrivals import Arrivals
from ferrum_rpc.bench.batch import GROWTH, Batch
from ferrum_rpc.bench.options import Workload
from ferrum_rpc.bench.stats import Stats
from ferrum_rpc.client import ExecutorClient, ExecutorInfo, Pressure
from ferrum_rpc.errors import (
    Cancelled,
    DeadlineExceeded,
    ExecutorError,
    InvalidRequest,
    KvBlocksExhausted,
    QueueFull,
    QuotaExceeded,
    SequenceBusy,
    StepFailed,
)

PASSING: Final = (QueueFull, KvBlocksExhausted, QuotaExceeded, SequenceBusy, StepFailed, DeadlineExceeded, Cancelled)
"""Refusals that leave the sequences alive and may be over at the next step. After any other a caller gives up."""

PAUSE_S: Final = 0.01
"""Pause between a refusal and a closed loop's next step, if the executor requests no other."""

PROMPTS_AT_ONCE: Final = 8
"""Prompts in flight: enough to fill a forward pass without filling an executor's queue."""

TOO_LONG: Final = "sequences of {} tokens: the model's context is {}; lower --context or --prompt-tokens"
TOO_WIDE: Final = "a step of {} sequences: the executor takes {}; lower --batch and raise --depth"
TOO_MANY: Final = "{} sequences: the executor takes {}; lower --batch, --depth or --callers"
TOO_DEEP: Final = "{} steps in flight: a session of this executor has {}; lower --depth and raise --batch"


async def measure(client: ExecutorClient, workload: Workload, stats: Stats) -> None:
    """Run it. Raises the refusal of anything before the first measured step; later ones are counted."""
    info = await client.info()
    growth = fits(workload, info, (await client.status()).pressure)
    salt = os.urandom(16)

    def batch(index: int, shape: Workload = workload) -> Batch:
        seed = [workload.seed, 0, index]
        return Batch(client, shape, vocab_size=info.model.vocab_size, growth=growth, seed=seed, salt=salt)

    stats.phase = "warm-up"
    first = batch(workload.in_flight, replace(workload, batch=1))
    await first.prefill(0)
    await first.release()
    stats.phase = "prefill"
    batches = [batch(index) for index in range(workload.in_flight)]
    await _prefill(batches, stats)
    stats.phase = "warm-up"
    await together(_warm_up(each, workload.warmup) for each in batches)
    stats.phase = "steps"
    stats.began = stats.ended = time.perf_counter()
    arrivals = Arrivals(workload, stats.began)
    await together(_caller(each, arrivals, stats, closed=workload.rate is None) for each in batches)
    stats.unsent = arrivals.unsent
    stats.phase = "done"


def fits(workload: Workload, info: ExecutorInfo, pressure: Pressure) -> int:
    """By how many tokens a sequence may outgrow the context. Raises where the executor cannot run the workload, and
    says what it could run."""
    limits, model, sequences = info.limits, info.model, workload.sequences
    longest = max(workload.context + 1, workload.prompt_tokens)
    in_session = workload.in_flight if workload.way == "session" else 0
    for field, wanted, limit, message in (
        ("context", longest, model.max_context, TOO_LONG),
        ("batch", workload.batch, limits.max_batch_items, TOO_WIDE),
        ("batch", sequences, limits.max_sequences, TOO_MANY),
        ("depth", in_session, limits.max_steps_in_flight, TOO_DEEP),
    ):
        if wanted > limit:
            raise InvalidRequest(message.format(wanted, limit), field=field)
    if model.vocab_size < 2:
        message = "a vocabulary of one token has nothing to feed but zeros: measure another model"
        raise InvalidRequest(message, field="token_ids")
    growth = min(GROWTH, model.max_context - workload.context)
    blocks = -(-max(workload.context + growth, workload.prompt_tokens) // info.block_size)
    if blocks * sequences > pressure.free_blocks:
        raise KvBlocksExhausted(
            f"{sequences} sequences need {blocks} blocks each and {pressure.free_blocks} are free",
            metadata={"needed_blocks": blocks * sequences, "free_blocks": pressure.free_blocks},
        )
    if pressure.total_slots and sequences > pressure.free_slots:
        raise KvBlocksExhausted(
            f"{sequences} sequences need a slot each and {pressure.free_slots} are free",
            metadata={"needed_slots": sequences, "free_slots": pressure.free_slots},
        )
    return growth


async def together(coroutines: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run them all. When one raises, or this is cancelled, the others have ended before it goes on."""
    tasks = [asyncio.ensure_future(each) for each in coroutines]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _prefill(batches: list[Batch], stats: Stats) -> None:
    room, began = asyncio.Semaphore(PROMPTS_AT_ONCE), time.perf_counter()

    async def prompt(batch: Batch, at: int) -> None:
        async with room:
            sent = time.perf_counter()
            answer = await batch.prefill(at)
            now = time.perf_counter()
            stats.prompt.add(now - sent)
            stats.prompt_tokens += answer.length
            stats.cached_tokens += answer.cached_tokens
            stats.prefill_s = now - began

    async def settle(batch: Batch, at: int) -> None:
        async with room:
            await batch.settle(at)

    places = [(batch, at) for batch in batches for at in range(len(batch))]
    await together(prompt(*each) for each in places)
    await together(settle(*each) for each in places)


async def _warm_up(batch: Batch, steps: int) -> None:
    """Steps whose refusals are forgiven where the measured ones' would be counted."""
    for _ in range(steps):
        errors = (await batch.step()).errors
        for error in _lasting(errors):
            raise error
        await _pause(errors)


def _lasting(errors: list[ExecutorError]) -> list[ExecutorError]:
    return [each for each in errors if not isinstance(each, PASSING)]


async def _pause(errors: list[ExecutorError]) -> None:
    if errors:
        await asyncio.sleep(max(each.retry_after_s or PAUSE_S for each in errors))


async def _caller(batch: Batch, arrivals: Arrivals, stats: Stats, *, closed: bool) -> None:
    """Step after step, until there is none or the sequences are lost."""
    while (due := await arrivals.next()) is not None:
        stats.attempts += 1
        sent = time.perf_counter()
        outcome = await batch.step()
        stats.ended = time.perf_counter()
        if outcome.tokens:
            stats.answered(due, sent, outcome.tokens, outcome.timing)
        stats.refused(outcome.errors)
        if lasting := _lasting(outcome.errors):
            stats.gave_up += 1
            stats.reason = lasting[0]
            return
        if closed:
            await _pause(outcome.errors)
