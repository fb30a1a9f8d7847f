"""A run of `ferrum-rpc bench` against a server in this process: what is counted, from when, and what is left behind."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from ferrum_rpc.bench.measure import measure
from ferrum_rpc.bench.options import add_flags, workload_from
from ferrum_rpc.bench.stats import Stats
from ferrum_rpc.client import NEVER_RESEND, Answer, ExecutorClient, Item
from ferrum_rpc.errors import ExecutorError, InvalidRequest, KvBlocksExhausted, OutputTooLarge, Reason
from tests.serving import Gate, Served, serve_identity

SMALL = ("--context", "8")


class Recording(ExecutorClient):
    """Notes the tokens of batches."""

    def __init__(self, target: str, **options: Any) -> None:
        super().__init__(target, **options)
        self.fed: list[int] = []

    async def batch_decode(self, items: Iterable[Item], **options: Any) -> list[Answer | ExecutorError]:
        listed = list(items)
        self.fed += [token for item in listed for token in item.tokens]
        return await super().batch_decode(listed, **options)


@asynccontextmanager
async def client_of(served: Served, *flags: str) -> AsyncIterator[tuple[Recording, Any]]:
    """A client for a workload, and the workload. Afterwards the server holds no sequence, and its books agree."""
    parser = argparse.ArgumentParser()
    add_flags(parser)
    workload = workload_from(parser.parse_args([*SMALL, *flags]))
    session = workload.way == "session"
    options = {"session": session, "steps_in_flight": 2 * workload.in_flight, "resend": NEVER_RESEND}
    async with Recording(served.target, **options) as client:
        yield client, workload
    assert served.server.state.handles.records() == []
    await served.check()


async def run(served: Served, *flags: str) -> Stats:
    stats = Stats()
    async with client_of(served, *flags) as (client, workload):
        await measure(client, workload, stats)
    return stats


async def until(true: Callable[[], bool], running: asyncio.Future[None]) -> None:
    """Wait while a run has not come so far. One that has ended raises what it ended with."""
    while not true():
        if running.done():
            running.result()
            raise AssertionError("the run ended before")
        await asyncio.sleep(0.001)


@pytest.mark.parametrize(
    ("flags", "tokens_a_step"),
    [
        (("--batch", "3"), 3),
        (("--batch", "3", "--depth", "2"), 3),
        (("--batch", "3", "--depth", "2", "--way", "session"), 3),
        (("--callers", "4"), 1),
        (("--output", "full"), 1),
        (("--output", "top:4", "--way", "session"), 1),
        (("--rate", "100000", "--callers", "2"), 1),
    ],
)
async def test_every_step_is_counted_once_and_nothing_is_left(flags: tuple[str, ...], tokens_a_step: int) -> None:
    async with serve_identity() as served:
        stats = await run(served, "--steps", "12", "--warmup", "2", *flags)
    assert (stats.attempts, stats.step.count, stats.tokens) == (12, 12, 12 * tokens_a_step)
    assert stats.forward.count == stats.queue.count == 12 and stats.forwards <= 12
    assert not stats.errors and stats.wall_s > 0
    figures, forward = stats.step.milliseconds(), stats.forward.milliseconds()
    assert 0 < forward["p50"] < figures["p50"] <= figures["p99_9"] <= figures["max"]


async def test_warm_up_is_run_and_not_counted() -> None:
    async with serve_identity() as served:
        stats = Stats()
        async with client_of(served, "--steps", "3", "--warmup", "4", "--batch", "2") as (client, workload):
            before = (await client.status()).counters.tokens
            await measure(client, workload, stats)
            ran = (await client.status()).counters.tokens - before
    assert (stats.step.count, stats.tokens, stats.prompt.count, stats.prompt_tokens) == (3, 6, 2, 16)
    assert ran == (8 + 16) + (4 + 3) * 2


@pytest.mark.parametrize(("prompt", "context"), [("5", "11"), ("11", "5"), ("7", "7")])
async def test_steps_begin_at_the_context_whatever_the_prompt_was(prompt: str, context: str) -> None:
    async with serve_identity() as served:
        lengths: list[int] = []

        class Watching(Recording):
            async def batch_decode(self, items: Iterable[Item], **options: Any) -> list[Answer | ExecutorError]:
                answers = await super().batch_decode(items, **options)
                lengths.extend(each.length for each in answers if isinstance(each, Answer))
                return answers

        parser = argparse.ArgumentParser()
        add_flags(parser)
        flags = ("--prompt-tokens", prompt, "--context", context, "--steps", "66", "--warmup", "0")
        stats = Stats()
        async with Watching(served.target) as client:
            await measure(client, workload_from(parser.parse_args(flags)), stats)
    first = int(context) + 1
    assert lengths == [*range(first, first + 64), first, first + 1]
    assert stats.prompt_tokens == int(prompt)


async def test_tokens_are_of_the_vocabulary_never_zero_and_by_the_seed() -> None:
    fed = []
    async with serve_identity(vocab_size=3) as served:
        for seed in ("1", "1", "2"):
            async with client_of(served, "--batch", "4", "--steps", "20", "--seed", seed) as (client, workload):
                await measure(client, workload, Stats())
                fed.append(client.fed)
    assert set(fed[0]) == {1, 2}
    assert fed[0] == fed[1] != fed[2]


async def test_an_open_loop_counts_the_wait_of_every_step_that_a_stall_delays() -> None:
    """One call stalls; the steps that fall due meanwhile wait for the only caller, and their times say so."""
    gate = Gate("forward")
    async with serve_identity(stage=gate) as served:
        stats = Stats()
        flags = ("--callers", "1", "--rate", "500", "--arrivals", "fixed", "--steps", "60", "--warmup", "0")
        async with client_of(served, *flags) as (client, workload):
            running = asyncio.ensure_future(measure(client, workload, stats))
            await until(lambda: stats.attempts > 0, running)
            gate.closed = True
            await asyncio.to_thread(gate.reached.wait, 30)
            answered = stats.step.count
            due = [stats.began + step / 500 for step in range(60)]
            await asyncio.sleep(max(0.0, due[answered + 30] - time.perf_counter()))
            opened = time.perf_counter()
            gate.open()
            await running
    waited = [opened - each for each in due[answered:] if each < opened]
    assert len(waited) >= 30
    assert stats.step.count == 60
    assert stats.step.max >= waited[0]
    assert stats.step.sum >= sum(waited) > 10 * waited[0]  # counted from when each was sent, it were about waited[0]
    assert stats.late.sum >= sum(waited[1:])


async def test_an_open_loop_counts_refusals_apart_and_sends_them_once() -> None:
    """A step holds 16 callers at most and the queue 16 more: of 40 some are refused, at once, again and again."""
    gate = Gate("forward")
    async with serve_identity(stage=gate, kv_blocks=1024, max_queued_items=16) as served:
        stats = Stats()
        flags = ("--callers", "40", "--rate", "1000000", "--steps", "300")
        async with client_of(served, *flags) as (client, workload):
            running = asyncio.ensure_future(measure(client, workload, stats))
            await until(lambda: stats.attempts > 0, running)
            gate.closed = True
            await until(lambda: stats.errors.total() > 0, running)
            gate.open()
            await running
    full = stats.errors[Reason.QUEUE_FULL]
    assert full == stats.errors.total() > 0 and stats.gave_up == 0
    assert stats.attempts == 300 == stats.step.count + full


async def test_a_cancelled_run_leaves_no_sequence_even_with_a_step_in_the_forward_pass() -> None:
    gate = Gate("forward")
    async with serve_identity(stage=gate) as served:
        stats = Stats()
        async with client_of(served, "--batch", "4", "--seconds", "60") as (client, workload):
            running = asyncio.ensure_future(measure(client, workload, stats))
            await until(lambda: stats.attempts > 0, running)
            gate.closed = True
            await asyncio.to_thread(gate.reached.wait, 30)
            running.cancel()
            await asyncio.wait([running])
            gate.open()
    assert running.cancelled() and stats.tokens == 4 * stats.step.count


async def test_a_caller_whose_sequences_are_gone_gives_up_and_says_why() -> None:
    async with serve_identity() as served:
        stats = Stats()
        async with client_of(served, "--callers", "2", "--seconds", "60") as (client, workload):
            running = asyncio.ensure_future(measure(client, workload, stats))
            await until(lambda: stats.attempts > 0, running)
            await client.reset()
            await running
    assert stats.gave_up == 2 and stats.errors.total() == 2
    assert stats.reason is not None and stats.reason.reason is Reason.HANDLE_RELEASED


@pytest.mark.parametrize(
    ("flags", "error", "says"),
    [
        (("--context", "200"), InvalidRequest, "--context"),
        (("--prompt-tokens", "200"), InvalidRequest, "--prompt-tokens"),
        (("--batch", "9"), InvalidRequest, "--batch"),
        (("--callers", "17"), InvalidRequest, "--callers"),
        (("--way", "session", "--depth", "3"), InvalidRequest, "--depth"),
        (("--batch", "8", "--context", "60"), KvBlocksExhausted, "are free"),
        (("--output", "full", "--batch", "8"), OutputTooLarge, "bytes"),
    ],
)
async def test_what_the_executor_cannot_run_is_refused_before_it_begins(
    flags: tuple[str, ...], error: type[ExecutorError], says: str
) -> None:
    limits = {
        "max_batch_items": 8,
        "max_sequences": 16,
        "max_steps_in_flight": 2,
        "max_response_bytes": 1 << 13,
    }
    async with serve_identity(max_context=128, kv_blocks=224, **limits) as served:
        with pytest.raises(error, match=says):
            await run(served, *flags, "--steps", "1")
