"""A fleet of executors in this process, and what its tests ask of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from typing import Any
from unittest import mock

from ferrum_rpc.client import ExecutorClient, Greedy, Sample
from ferrum_rpc.client.fleet import FleetClient, FleetSequence, Member
from tests.serving import Gate, Served, serve_identity

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
SAMPLED = Sample(0.9, seed=5)
SESSION = partial(ExecutorClient, session=True)
identity = partial(serve_identity, positional=True, head_dim=64, block_size=4)


def fleet_of(*targets: str, connect: Callable[[str], ExecutorClient] = SESSION, **options: Any) -> FleetClient:
    return FleetClient(targets, connect=connect, look_every_s=0.05, timeout_s=20.0, **options)


async def until(fleet: FleetClient, holds: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not holds():
            await fleet.members.changed(fleet.members.changes)


@asynccontextmanager
async def fleet(count: int = 2, **options: Any) -> AsyncIterator[tuple[FleetClient, list[Served]]]:
    """So many executors, all of them there."""
    async with AsyncExitStack() as stack:
        served = [await stack.enter_async_context(identity()) for _ in range(count)]
        one = await stack.enter_async_context(fleet_of(*(each.target for each in served), **options))
        await until(one, lambda: len(one.members.serving) == count)
        yield one, served


async def alone(target: str, count: int = 24, output: Greedy | Sample = SAMPLED) -> list[int]:
    """The text of one executor."""
    async with ExecutorClient(target) as client, client.sequence() as sequence:
        return [each async for each in sequence.generate(PROMPT, max_tokens=count, output=output, stop=())]


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
        await until(one, lambda: len(one.members.serving) == 2)
        yield one, {first.target: (first, gates[0]), second.target: (second, gates[1])}


def owner(sequence: FleetSequence) -> Member:
    assert sequence.owner is not None
    return sequence.owner


def of(served: Sequence[Served], sequence: FleetSequence) -> Served:
    """The server that has it."""
    return next(each for each in served if each.target == owner(sequence).target)


def foreign(*served: Served) -> int:
    return sum(each.server.state.handles.foreign for each in served)
