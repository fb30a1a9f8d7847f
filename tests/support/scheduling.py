"""The scheduler's driver and router on servers of this process, and texts by hand to compare theirs with."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest

from ferrum_rpc.client import ExecutorClient, Greedy, ResendPolicy, Sample
from ferrum_rpc.client.fleet import Member, Members
from ferrum_rpc.config import ModelSettings
from ferrum_rpc.scheduler.counts import RunCounts
from ferrum_rpc.scheduler.driver import Driver
from ferrum_rpc.scheduler.policy import Budget
from ferrum_rpc.scheduler.queues import Observer
from ferrum_rpc.scheduler.request import Request, RequestEnd, Stage
from ferrum_rpc.scheduler.router import Router
from ferrum_rpc.scheduler.speculation import Drafter
from tests.support.clients import text
from tests.support.fleets import identity
from tests.support.serving import Served, serve_model

GREEDY = Greedy()
BUDGET = Budget(tokens=64, items=32, running=8, headroom=8)
DEMO = Path(__file__).parents[2] / "ferrum_rpc_demo" / "demo"
NEW_TOKENS = 16
Result = TypeVar("Result")


class Watcher(Observer):
    """Remembers what an observer is told."""

    def __init__(self) -> None:
        self.tokens: list[tuple[int, int]] = []
        self.stages: list[tuple[int, Stage]] = []
        self.on_token: Callable[[], None] = lambda: None

    def token(self, request: Request, token: int) -> None:
        self.tokens.append((request.index, token))
        self.on_token()

    def changed(self, request: Request) -> None:
        self.stages.append((request.index, request.stage))


class At(Watcher):
    """Does something when so many tokens have come in all."""

    def __init__(self, acts: dict[int, Callable[[], Any]]) -> None:
        super().__init__()
        self._acts = acts
        self.doing: list[asyncio.Future[Any]] = []
        self.on_token = self._act

    def _act(self) -> None:
        act = self._acts.pop(len(self.tokens), None)
        if act is not None:
            self.do(act)

    def do(self, act: Callable[[], Any]) -> None:
        if asyncio.iscoroutine(done := act()):
            self.doing.append(asyncio.ensure_future(done))


def prompts(count: int, seed: int = 0, longest: int = 40) -> list[list[int]]:
    dice = random.Random(seed)
    return [[dice.randrange(256) for _ in range(dice.randint(1, longest))] for _ in range(count)]


def requests(texts: Sequence[Sequence[int]], new_tokens: int = NEW_TOKENS) -> list[Request]:
    return [Request(at, tuple(text), new_tokens) for at, text in enumerate(texts)]


def sampled_by(work: list[Request], sampling: Greedy | Sample, stop: Collection[int]) -> None:
    """Have all of them sampled alike, with a seed of their own each."""
    for each in work:
        seeded = isinstance(sampling, Sample) and sampling.seed is not None
        each.output = replace(sampling, seed=(sampling.seed << 32) + each.index) if seeded else sampling
        each.stops = tuple(sorted(stop))


async def schedule(
    target: str,
    work: list[Request],
    *,
    budget: Budget = BUDGET,
    sampling: Greedy | Sample = GREEDY,
    resend: ResendPolicy = ResendPolicy(backoff_s=0),  # noqa: B008
    stop: Collection[int] = (),
    watcher: Watcher | None = None,
    patience_s: float = 30.0,
    session: bool = False,
    run_tokens: int = 0,
    max_delay_s: float | None = None,
    drafter: Drafter | None = None,
) -> RunCounts:
    sampled_by(work, sampling, stop)
    async with ExecutorClient(target, resend=resend, session=session) as client:
        await client.info()
        driver = Driver(
            client,
            client.executors[0],
            budget=budget,
            observer=watcher or Watcher(),
            patience_s=patience_s,
            drafter=drafter,
            run_tokens=run_tokens,
            max_delay_s=max_delay_s,
            chains=session,
        )
        run = await driver.run(work)
    assert run.executor_seconds <= run.prefill_seconds + run.decode_seconds
    return run


async def one_at_a_time(target: str, texts: Sequence[Sequence[int]], new_tokens: int = NEW_TOKENS) -> list[list[int]]:
    """Greedy generation by hand: the reference."""
    out = []
    async with ExecutorClient(target) as client:
        for text in texts:
            async with client.sequence() as sequence:
                tokens = [(await sequence.prefill(text)).token]
                while len(tokens) < new_tokens:
                    tokens.append((await sequence.decode(tokens[-1])).token)
                out.append(tokens)
    return out


async def assert_nothing_is_left(served: Served) -> None:
    assert len(served.server.state.handles) == 0
    await served.check()
    state = served.server.state.engine.cache
    assert state.free_blocks == state.total_blocks


@asynccontextmanager
async def emptied(**options: Any) -> AsyncIterator[Served]:
    """As `identity`: nothing may be left there in the end."""
    async with identity(**options) as served:
        yield served
        await assert_nothing_is_left(served)


SHAPES: dict[str, tuple[int, Budget]] = {
    "a roomy pool": (512, BUDGET),
    "one at a time": (512, Budget(tokens=64, items=32, running=1)),
    "a token a step": (512, Budget(tokens=1, items=32, running=8)),
    "chunks of five": (512, Budget(tokens=5, items=32, running=8)),
    "two items a step": (512, Budget(tokens=64, items=2, running=8)),
    "a pool for three": (40, BUDGET),
    "a pool for one": (15, BUDGET),
    "a pool for one, in chunks": (15, Budget(tokens=7, items=32, running=8, headroom=0)),
    "no headroom at all": (30, Budget(tokens=64, items=32, running=12, headroom=0)),
}
SAMPLED = Sample(temperature=3.0, seed=5, repetition_penalty=1.3)
"""The identity model's greedy tokens soon repeat; these do not."""


def sampled(number: int) -> Sample:
    """As `SAMPLED`, with another seed for each number."""
    return replace(SAMPLED, seed=100 + number)


STOP = frozenset({7, 99, 200})


@asynccontextmanager
async def demo(**options: Any) -> AsyncIterator[Served]:
    if not (DEMO / "model.safetensors").is_file():
        pytest.skip("the demo model has not been built")
    settings = {"device": "cpu", "dtype": "float32", **options}
    async with serve_model(ModelSettings(path=str(DEMO), **settings)) as served:
        yield served


Texts = list[tuple[list[int], RequestEnd | None]]


async def fleet(
    decode: Iterable[str],
    prefill: Iterable[str],
    work: list[Request],
    *,
    budget: Budget = BUDGET,
    sampling: Greedy | Sample = SAMPLED,
    watcher: Watcher | None = None,
    patience_s: float = 30.0,
    run_tokens: int = 0,
    session: bool = True,
    stop: frozenset[int] = STOP,
    hung_patience_s: float = 10.0,
    timeout_s: float = 60.0,
) -> RunCounts:
    sampled_by(work, sampling, stop)
    connect = partial(ExecutorClient, session=session, timeout_s=timeout_s, release_timeout_s=min(5.0, timeout_s))

    def driver(member: Member, prompts: bool) -> Driver:
        return Driver(
            member.client,
            member,
            budget=budget,
            observer=watcher or Watcher(),
            run_tokens=0 if prompts else run_tokens,
            chains=session,
        )

    async with AsyncExitStack() as stack:
        roles = [
            await stack.enter_async_context(
                Members(
                    targets, connect=connect, look_every_s=0.02, resolve_every_s=0.02, hung_patience_s=hung_patience_s
                )
            )
            for targets in (decode, prefill)
            if targets
        ]
        for members in roles:
            while not members.named or len(members.there) < len(members.named):
                await members.changed(members.changes)
        run = await Router(driver, *roles, patience_s=patience_s).run(work)
        await assert_released(roles)
        return run


async def assert_released(roles: Iterable[Members]) -> None:
    """Nothing is left of a run at any executor while the connections are still open."""
    for member in [member for members in roles for member in members.serving]:
        await member.client.status()
        assert member.client.pressure is not None and member.client.pressure.sequences == 0, member.target


def texts(work: list[Request]) -> Texts:
    return [(each.generated, each.ending) for each in work]


async def drain(served: Served) -> None:
    async with ExecutorClient(served.target) as client:
        await client.drain(30.0)


async def by_the_client(served: Served, prompt: list[int], output: Greedy | Sample, max_tokens: int = 24) -> list[int]:
    async with ExecutorClient(served.target) as client:
        return await text(client, prompt, max_tokens, output, stop=())


def of_one(write: Callable[[Served], Awaitable[Result]]) -> Result:
    """What ``write`` gives with one executor that has room for everything, in an event loop of its own: what a module's
    tests compare theirs with."""

    async def written() -> Result:
        async with identity(kv_blocks=512) as served:
            return await write(served)

    return asyncio.run(written())


async def scheduled(served: Served, work: list[Request], **how: Any) -> Texts:
    """The texts of requests, by `schedule`."""
    await schedule(served.target, work, **how)
    return texts(work)
