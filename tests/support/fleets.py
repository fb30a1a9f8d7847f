"""A fleet of executors in this process, and what its tests ask of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest

from ferrum_rpc.client import Answer, ExecutorClient, Greedy, Sample
from ferrum_rpc.client.fleet import Candidate, FleetClient, FleetSequence, Member
from ferrum_rpc.client.fleet.resolving import NAMED
from ferrum_rpc.errors import NotSupported
from tests.support import waiting
from tests.support.clients import text
from tests.support.proxy import TcpProxy, proxied
from tests.support.serving import Gate, Served, serve_identity

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
SAMPLED = Sample(0.9, seed=5)
SESSION = partial(ExecutorClient, session=True)
identity = partial(serve_identity, positional=True, head_dim=64, block_size=4)


class Lowest:
    """Always the one that was there first."""

    def choose(self, prompt: Sequence[int], candidates: Sequence[Candidate]) -> Candidate:
        return candidates[0]


class Largest:
    """Always the one of most blocks."""

    def choose(self, prompt: Sequence[int], candidates: Sequence[Candidate]) -> Candidate:
        return max(candidates, key=lambda each: each.total_blocks)


async def until(fleet: FleetClient, holds: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not holds():
            await fleet.members.changed(fleet.members.changes)


async def there_are(fleet: FleetClient, count: int) -> None:
    """Wait until so many accept sequences."""
    await until(fleet, lambda: len(fleet.members.serving) == count)


@asynccontextmanager
async def fleet_of(
    *targets: str, session: bool = True, there: int | None = None, **options: Any
) -> AsyncIterator[FleetClient]:
    """A fleet, once each of its targets is a member, or so many are ``there``."""
    connect = partial(ExecutorClient, session=session)
    async with FleetClient(targets, connect=connect, look_every_s=0.05, timeout_s=20.0, **options) as one:
        if there is not None or not targets[0].startswith(NAMED):
            await there_are(one, len(targets) if there is None else there)
        yield one


@asynccontextmanager
async def several(count: int, **options: Any) -> AsyncIterator[list[Served]]:
    """So many executors."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(identity(**options)) for _ in range(count)]


@asynccontextmanager
async def fleet(count: int = 2, **options: Any) -> AsyncIterator[tuple[FleetClient, list[Served]]]:
    """So many executors, all of them there."""
    async with several(count) as served, fleet_of(*(each.target for each in served), **options) as one:
        yield one, served


@asynccontextmanager
async def behind_proxies(*upstreams: Served, **options: Any) -> AsyncIterator[tuple[FleetClient, dict[str, TcpProxy]]]:
    """A fleet whose executors may die: each is known by the address of a proxy."""
    async with AsyncExitStack() as stack:
        proxies = [await stack.enter_async_context(proxied(each.target)) for each in upstreams]
        one = await stack.enter_async_context(fleet_of(*(each.target for each in proxies), **options))
        yield one, {each.target: each for each in proxies}


async def alone(target: str, count: int = 24, output: Greedy | Sample = SAMPLED) -> list[int]:
    """The text of one executor."""
    async with ExecutorClient(target) as client:
        return await text(client, PROMPT, count, output, stop=())


@contextmanager
def hanging(served: Served, gate: Gate) -> Iterator[None]:
    """Its model thread stands still in its next step, and is known to hang at once."""
    gate.closed = True
    try:
        with mock.patch.object(served.server.state.engine, "hang_reason", lambda now: "asleep"):
            yield
    finally:
        gate.open()


@asynccontextmanager
async def two_that_may_hang(**options: Any) -> AsyncIterator[tuple[FleetClient, dict[str, tuple[Served, Gate]]]]:
    """Two executors and what makes each hang, by their targets."""
    gates = Gate("forward"), Gate("forward")
    async with (
        identity(stage=gates[0]) as first,
        identity(stage=gates[1]) as second,
        fleet_of(first.target, second.target, **options) as one,
    ):
        yield one, {first.target: (first, gates[0]), second.target: (second, gates[1])}


def moving(moves: bool) -> AbstractContextManager[Any]:
    """Whether caches can move from one executor to another."""
    return mock.patch("ferrum_rpc.client.transfer.check_offered", side_effect=None if moves else NotSupported("no"))


def owner(sequence: FleetSequence) -> Member:
    assert sequence.owner is not None
    return sequence.owner


def another(fleet: FleetClient, sequence: FleetSequence) -> Member:
    """One that accepts sequences, and does not have this one."""
    return next(each for each in fleet.members.serving if each is not sequence.owner)


def of(served: Sequence[Served], sequence: FleetSequence) -> Served:
    """The server that has it."""
    return next(each for each in served if each.target == owner(sequence).target)


async def all_is_freed(*served: Served) -> None:
    """Wait until no executor has a sequence. None may have been asked for one of another executor."""
    await waiting.until(lambda: not any(len(each.server.state.handles) for each in served))
    assert not any(each.server.state.handles.foreign for each in served)


WAYS = pytest.mark.parametrize(("how", "session"), [("stream", True), ("calls", False), ("items", True)])
"""How a program asks for tokens, and by what its client sends."""


async def driven(
    fleet: FleetClient,
    sequence: FleetSequence,
    how: str,
    count: int = 24,
    got: Callable[[int], Awaitable[object] | None] = lambda number: None,
) -> list[int]:
    """So many tokens behind `PROMPT`, by a stream, by calls or by items.

    ``got`` is called after each token with how many there are, and awaited if it returns a coroutine.
    """
    found = list[int]()

    async def note(token: int) -> None:
        found.append(token)
        if (awaited := got(len(found))) is not None:
            await awaited

    if how == "stream":
        async for token in sequence.generate(PROMPT, max_tokens=count, output=SAMPLED, stop=()):
            await note(token)
    while len(found) < count:
        fed = found[-1:] or PROMPT
        if how == "calls":
            answer: Any = await sequence.prefill(fed, SAMPLED)
        else:
            [answer] = await fleet.forward([sequence.item(fed, SAMPLED)])
        assert isinstance(answer, Answer), answer
        await note(answer.token)
    return found
