"""A run of `ferrum-rpc bench` against a server in this process: what is counted, from when, and what is left behind."""

import asyncio
import time
from contextlib import asynccontextmanager

import pytest
import pytest_asyncio

from ferrum_rpc.bench.measure import measure
from ferrum_rpc.bench.stats import Stats
from ferrum_rpc.client import NEVER_RESEND, Answer, ExecutorClient
from ferrum_rpc.errors import InvalidRequest, KvBlocksExhausted, OutputTooLarge, Reason
from tests.support.serving import Gate, serve_identity
from tests.support.states import with_states
from tests.unit.test_bench_cmd_options import workload as workload_of

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served():
    async with serve_identity() as served:
        yield served


class Recording(ExecutorClient):
    """Notes the tokens of batches, and the lengths of their answers."""

    def __init__(self, target, **options):
        super().__init__(target, **options)
        self.fed: list[int] = []
        self.lengths: list[int] = []

    async def batch_decode(self, items, **options):
        listed = list(items)
        self.fed += [token for item in listed for token in item.tokens]
        answers = await super().batch_decode(listed, **options)
        self.lengths += [each.length for each in answers if isinstance(each, Answer)]
        return answers


@asynccontextmanager
async def client_of(served, *flags):
    """A client for a workload, and the workload. Afterwards the server holds no sequence, and its books agree."""
    workload = workload_of("--context", "8", *flags)
    session = workload.way == "session"
    options = {"session": session, "steps_in_flight": 2 * workload.in_flight, "resend": NEVER_RESEND}
    async with Recording(served.target, **options) as client:
        yield client, workload
    assert served.server.state.handles.records() == []
    await served.check()


async def run(served, *flags):
    stats = Stats()
    async with client_of(served, *flags) as (client, workload):
        await measure(client, workload, stats)
    return stats


async def until(true, running):
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
async def test_every_step_is_counted_once_and_nothing_is_left(served, flags, tokens_a_step):
    stats = await run(served, "--steps", "12", "--warmup", "2", *flags)
    assert (stats.attempts, stats.step.count, stats.tokens) == (12, 12, 12 * tokens_a_step)
    assert stats.forward.count == stats.queue.count == 12 and stats.forwards <= 12
    assert not stats.errors and stats.wall_s > 0
    figures, forward = stats.step.milliseconds(), stats.forward.milliseconds()
    assert 0 < forward["p50"] < figures["p50"] <= figures["p99_9"] <= figures["max"]


async def test_warm_up_is_run_and_not_counted(served):
    stats = Stats()
    async with client_of(served, "--steps", "3", "--warmup", "4", "--batch", "2") as (client, workload):
        before = (await client.status()).counters.tokens
        await measure(client, workload, stats)
        ran = (await client.status()).counters.tokens - before
    assert (stats.step.count, stats.tokens, stats.prompt.count, stats.prompt_tokens) == (3, 6, 2, 16)
    assert ran == (8 + 16) + (4 + 3) * 2


@pytest.mark.parametrize(("prompt", "context"), [("5", "11"), ("11", "5"), ("7", "7")])
async def test_steps_begin_at_the_context_whatever_the_prompt_was(served, prompt, context):
    stats = Stats()
    flags = ("--prompt-tokens", prompt, "--context", context, "--steps", "66", "--warmup", "0")
    async with client_of(served, *flags) as (client, workload):
        await measure(client, workload, stats)
    first = int(context) + 1
    assert client.lengths == [*range(first, first + 64), first, first + 1]
    assert stats.prompt_tokens == int(prompt)


async def test_tokens_are_of_the_vocabulary_never_zero_and_by_the_seed():
    fed = []
    async with serve_identity(vocab_size=3) as served:
        for seed in ("1", "1", "2"):
            async with client_of(served, "--batch", "4", "--steps", "20", "--seed", seed) as (client, workload):
                await measure(client, workload, Stats())
                fed.append(client.fed)
    assert set(fed[0]) == {1, 2}
    assert fed[0] == fed[1] != fed[2]


async def test_an_open_loop_counts_the_wait_of_every_step_that_a_stall_delays():
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


async def test_an_open_loop_counts_refusals_apart_and_sends_them_once():
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


async def test_a_cancelled_run_leaves_no_sequence_even_with_a_step_in_the_forward_pass():
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


async def test_a_caller_whose_sequences_are_gone_gives_up_and_says_why(served):
    stats = Stats()
    async with client_of(served, "--callers", "2", "--seconds", "60") as (client, workload):
        running = asyncio.ensure_future(measure(client, workload, stats))
        await until(lambda: stats.attempts > 0, running)
        await client.reset()
        await running
    assert stats.gave_up == 2 and stats.errors.total() == 2
    assert stats.reason is not None and stats.reason.reason is Reason.HANDLE_RELEASED


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def small():
    limits = {"max_batch_items": 8, "max_sequences": 16, "max_steps_in_flight": 2, "max_response_bytes": 1 << 13}
    async with serve_identity(max_context=128, kv_blocks=224, **limits) as served:
        yield served


async def test_sequences_without_a_slot_are_refused_before_it_begins():
    async with serve_identity(made=with_states(3)) as served:
        with pytest.raises(KvBlocksExhausted, match="3 are free"):
            await run(served, "--batch", "4", "--steps", "1")


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
async def test_what_the_executor_cannot_run_is_refused_before_it_begins(small, flags, error, says):
    with pytest.raises(error, match=says):
        await run(small, *flags, "--steps", "1")
