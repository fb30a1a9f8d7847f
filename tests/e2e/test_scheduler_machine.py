"""The scheduler under arrivals, cancels, deadlines, full pools, deaths and drains in any order: no token is lost,
doubled or wrong, and nothing is left at an executor."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest

from ferrum_rpc.client import ExecutorClient
from ferrum_rpc.scheduler import RequestEnd, Scheduler, TextRequest, TokenStream
from tests.support.fleets import identity, several
from tests.support.inside import live_requests
from tests.support.proxy import proxied
from tests.support.scheduling import assert_nothing_is_left, by_the_client, drain, of_one, prompts, sampled
from tests.support.serving import Served

TOKENS = 24
TEXTS = 10
EVENTS = 60


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
    async def write(served: Served) -> list[list[int]]:
        return [await by_the_client(served, text, sampled(at), TOKENS) for at, text in enumerate(prompts(TEXTS))]

    return of_one(write)


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


@pytest.mark.parametrize(("blocks", "seed"), [(40, 0), (40, 1), (512, 2)])
async def test_on_one_executor_no_token_is_lost_doubled_or_wrong(blocks, seed, texts) -> None:
    dice = random.Random(seed)
    async with identity(kv_blocks=blocks) as served, ExecutorClient(served.target) as operator:
        async with Scheduler(served.target, run_tokens=6, token_budget=24) as scheduler:
            await play(Run(scheduler, dice, texts), dice, [operator.reset, operator.reset])
            assert not live_requests(scheduler)
        await assert_nothing_is_left(served)


@pytest.mark.parametrize("seed", range(2))
async def test_on_a_fleet_one_may_die_and_another_drain(seed: int, texts: list[list[int]]) -> None:
    dice = random.Random(seed)
    async with several(3, kv_blocks=64) as served, proxied(served[0].target) as dies:
        targets = [dies.target, served[1].target, served[2].target]
        async with Scheduler(targets, run_tokens=6, token_budget=24) as scheduler:
            await play(Run(scheduler, dice, texts), dice, [dies.kill, lambda: drain(served[1])])
        await assert_nothing_is_left(served[2])
