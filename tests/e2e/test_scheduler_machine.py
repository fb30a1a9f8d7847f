"""The scheduler under arrivals, cancels, deadlines, full pools, deaths and drains in any order: no token is lost,
doubled or wrong, and nothing is left at an executor."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import AsyncExitStack

import pytest

from ferrum_rpc.client import ExecutorClient, Sample
from ferrum_rpc.scheduler import RequestEnd, Scheduler, TextRequest, TokenStream
from tests.e2e.test_scheduler_fleet import drain, kill
from tests.e2e.test_scheduler_runs import assert_nothing_is_left, identity, prompts
from tests.e2e.test_scheduler_streams import by_the_client
from tests.faults.proxy import TcpProxy, proxied
from tests.serving import Served

TOKENS = 24
TEXTS = 10
EVENTS = 60


def sampled(number: int) -> Sample:
    return Sample(temperature=3.0, seed=100 + number, repetition_penalty=1.3)


def asked(number: int, dice: random.Random) -> TextRequest:
    return TextRequest(
        prompt=prompts(TEXTS)[number],
        max_tokens=TOKENS,
        output=sampled(number),
        stop=(),
        priority=dice.randrange(3),
        tenant=dice.choice("ab"),
        deadline_s=0.05 if dice.random() < 0.1 else None,
    )


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    async def write() -> list[list[int]]:
        async with identity(kv_blocks=512) as served:
            return [await by_the_client(served, text, sampled(at), TOKENS) for at, text in enumerate(prompts(TEXTS))]

    return asyncio.run(write())


class Run:
    """A scheduler with its streams. Each reader compares what it reads with the text that is expected."""

    def __init__(self, scheduler: Scheduler, dice: random.Random, texts: list[list[int]]) -> None:
        self._scheduler, self._dice, self._texts = scheduler, dice, texts
        self._readers: list[asyncio.Task[None]] = []
        self.live: list[TokenStream] = []
        self.complete = 0

    def submit(self) -> None:
        number = self._dice.randrange(TEXTS)
        if self._dice.random() < 0.15:
            wanted = TextRequest(prompt=prompts(TEXTS)[number], max_tokens=TOKENS, output=sampled(number), stop=())
            first, *others = self._scheduler.submit_choices(wanted, 3)
            self._read(first, self._texts[number])
            for each in others:
                self._read(each, None)
        else:
            self._read(self._scheduler.submit(asked(number, self._dice)), self._texts[number])

    def _read(self, stream: TokenStream, expected: list[int] | None) -> None:
        async def read() -> None:
            tokens = [each.token async for each in stream]
            self.live.remove(stream)
            assert stream.end in {RequestEnd.LENGTH, RequestEnd.CANCELLED, RequestEnd.DEADLINE}
            assert tokens == stream.token_ids
            if stream.end is RequestEnd.LENGTH:
                assert len(tokens) == TOKENS
                self.complete += 1
            if expected is not None:
                assert tokens == expected[: len(tokens)]

        self.live.append(stream)
        self._readers.append(asyncio.create_task(read()))

    def cancel(self) -> None:
        if self.live:
            self._dice.choice(self.live).cancel()

    async def end(self) -> None:
        await asyncio.gather(*self._readers)


async def play(run: Run, dice: random.Random, faults: list[Callable[[], object]]) -> None:
    """Events in any order, the ``faults`` among them, with turns of the event loop between."""
    kinds = [run.submit] * 5 + [run.cancel] * 2
    at = dict(zip(sorted(dice.sample(range(10, EVENTS), len(faults))), faults, strict=True))
    for number in range(EVENTS):
        done = at.get(number, dice.choice(kinds))()
        if asyncio.iscoroutine(done):
            await done
        for _ in range(dice.randrange(30)):
            await asyncio.sleep(0)
    await run.end()
    assert run.complete > EVENTS / 4


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("blocks", [40, 512])
async def test_on_one_executor_no_token_is_lost_doubled_or_wrong(
    blocks: int, seed: int, texts: list[list[int]]
) -> None:
    dice = random.Random(seed)
    async with identity(kv_blocks=blocks) as served, ExecutorClient(served.target) as operator:
        async with Scheduler(served.target, run_tokens=6, token_budget=24) as scheduler:
            await play(Run(scheduler, dice, texts), dice, [operator.reset, operator.reset])
            assert not scheduler._live
        await assert_nothing_is_left(served)


@pytest.mark.parametrize("seed", range(3))
async def test_on_a_fleet_one_may_die_and_another_drain(seed: int, texts: list[list[int]]) -> None:
    dice = random.Random(seed)
    async with AsyncExitStack() as stack:
        served: list[Served] = [await stack.enter_async_context(identity(kv_blocks=64)) for _ in range(3)]
        dies: TcpProxy = await stack.enter_async_context(proxied(served[0].target))
        targets = [dies.target, served[1].target, served[2].target]
        async with Scheduler(targets, run_tokens=6, token_budget=24) as scheduler:
            await play(Run(scheduler, dice, texts), dice, [lambda: kill(dies), lambda: drain(served[1])])
        await assert_nothing_is_left(served[2])
