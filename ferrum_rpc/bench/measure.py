"""A run: check that the executor has room for it, prefill, warm up, measure. Writes everything into the `Tally`."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Coroutine, Iterable, Iterator
from dataclasses import replace
from typing import Any, Final

from ferrum_rpc.bench.group import GROWTH, Group, Outcome
from ferrum_rpc.bench.options import Workload
from ferrum_rpc.bench.tally import Tally
from ferrum_rpc.bench.turns import Turns, turns
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
"""Between a refusal and a closed loop's next step, where the executor asks for no other pause."""

PROMPTS_AT_ONCE: Final = 8
"""Prompts in flight: enough to fill a forward pass, and no queue of an executor is full of them."""


async def measure(client: ExecutorClient, workload: Workload, tally: Tally) -> None:
    """Run it. Raises the refusal of anything before the first measured step; later ones are counted."""
    info = await client.info()
    growth = fits(workload, info, (await client.status()).pressure)
    salt = os.urandom(16)

    def group(index: int, shape: Workload = workload) -> Group:
        seed = [workload.seed, 0, index]
        return Group(client, shape, vocab_size=info.model.vocab_size, growth=growth, seed=seed, salt=salt)

    tally.phase = "warm-up"
    first = group(workload.groups, replace(workload, batch=1))
    await first.prefill(0)
    await first.release()
    tally.phase = "prefill"
    groups = [group(index) for index in range(workload.groups)]
    await _prefill(groups, tally)
    tally.phase = "warm-up"
    await together(_warm_up(each, workload.warmup) for each in groups)
    tally.phase = "steps"
    tally.began = tally.ended = time.perf_counter()
    hand_out = turns(workload, tally.began)
    await together(_caller(each, hand_out, tally, closed=workload.rate is None) for each in groups)
    tally.unsent = hand_out.unsent
    tally.phase = "done"


def fits(workload: Workload, info: ExecutorInfo, pressure: Pressure) -> int:
    """By how many tokens a sequence may outgrow the context. Raises where the executor cannot run the workload, and
    says what it could run."""
    for field, message in _objections(workload, info):
        raise InvalidRequest(message, field=field)
    growth = min(GROWTH, info.model.max_context - workload.context)
    blocks = -(-max(workload.context + growth, workload.prompt_tokens) // info.block_size)
    if blocks * workload.sequences > pressure.free_blocks:
        raise KvBlocksExhausted(
            f"{workload.sequences} sequences need {blocks} blocks each and {pressure.free_blocks} are free",
            metadata={"needed_blocks": blocks * workload.sequences, "free_blocks": pressure.free_blocks},
        )
    return growth


def _objections(workload: Workload, info: ExecutorInfo) -> Iterator[tuple[str, str]]:
    limits, model = info.limits, info.model
    longest = max(workload.context + 1, workload.prompt_tokens)
    if model.vocab_size < 2:
        yield "token_ids", "a vocabulary of one token has nothing to feed but zeros: measure another model"
    if longest > model.max_context:
        yield (
            "context",
            f"sequences of {longest} tokens: the model's context is {model.max_context}; lower --context or "
            "--prompt-tokens",
        )
    if workload.batch > limits.max_batch_items:
        yield (
            "batch",
            f"a step of {workload.batch} sequences: the executor takes {limits.max_batch_items}; lower --batch and "
            "raise --depth",
        )
    if workload.sequences > limits.max_sequences:
        yield (
            "batch",
            f"{workload.sequences} sequences: the executor takes {limits.max_sequences}; lower --batch, --depth or "
            "--callers",
        )
    if workload.way == "session" and workload.groups > limits.max_steps_in_flight:
        yield (
            "depth",
            f"{workload.groups} steps in flight: a session of this executor has {limits.max_steps_in_flight}; lower "
            "--depth and raise --batch",
        )


async def together(coroutines: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run them all. When one raises, or this is cancelled, the others have ended before it goes on."""
    tasks = [asyncio.ensure_future(each) for each in coroutines]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _prefill(groups: list[Group], tally: Tally) -> None:
    room, prompts, began = asyncio.Semaphore(PROMPTS_AT_ONCE), tally.prompts, time.perf_counter()

    async def prompt(group: Group, at: int) -> None:
        async with room:
            sent = time.perf_counter()
            answer = await group.prefill(at)
            now = time.perf_counter()
            prompts.times.add(now - sent)
            prompts.tokens += answer.length
            prompts.cached_tokens += answer.cached_tokens
            prompts.wall_s = now - began

    async def settle(group: Group, at: int) -> None:
        async with room:
            await group.settle(at)

    places = [(group, at) for group in groups for at in range(len(group))]
    await together(prompt(*each) for each in places)
    await together(settle(*each) for each in places)


async def _warm_up(group: Group, steps: int) -> None:
    """Steps whose refusals are forgiven where the measured ones' would be counted."""
    for _ in range(steps):
        errors = (await _step(group)).errors
        for error in _lasting(errors):
            raise error
        await _pause(errors)


async def _step(group: Group) -> Outcome:
    """A step; what refused it as a whole counts as a refusal of it."""
    try:
        return await group.step()
    except ExecutorError as error:
        return Outcome(0, None, [error])


def _lasting(errors: list[ExecutorError]) -> list[ExecutorError]:
    return [each for each in errors if not isinstance(each, PASSING)]


async def _pause(errors: list[ExecutorError]) -> None:
    if errors:
        await asyncio.sleep(max(each.retry_after_s or PAUSE_S for each in errors))


async def _caller(group: Group, hand_out: Turns, tally: Tally, *, closed: bool) -> None:
    """Step after step, until there is none or the sequences are lost."""
    while (due := await hand_out.next()) is not None:
        tally.attempts += 1
        sent = time.perf_counter()
        outcome = await _step(group)
        tally.ended = time.perf_counter()
        if outcome.tokens:
            tally.answered(due, sent, outcome.tokens, outcome.timing)
        tally.refused(outcome.errors)
        if lasting := _lasting(outcome.errors):
            tally.gave_up += 1
            tally.reason = lasting[0]
            return
        if closed:
            await _pause(outcome.errors)
