"""A client of a server in this process, by either of its ways, and an executor that lacks capabilities."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from ferrum_rpc.client import Answer, Capability, ExecutorClient, ExecutorError, Greedy, ResendPolicy, Sample
from ferrum_rpc.client.client import connection_of
from tests.support import lossy
from tests.support.proxy import proxied
from tests.support.serving import Served, serve_identity

PROMPT = [3, 1, 4, 1, 5]
GREEDY = Greedy()
BOTH_WAYS = pytest.mark.parametrize("session", [False, True], ids=["unary", "session"])


@asynccontextmanager
async def connected(
    session: bool = True, *, about: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[tuple[Served, ExecutorClient]]:
    """A server of the identity model, whose rows depend on positions, and a client of it, with the options ``about``.
    At the end the cache and the records of the service must agree."""
    async with (
        serve_identity(**{"kv_blocks": 1024, "positional": True, **options}) as served,
        ExecutorClient(served.target, session=session, **(about or {})) as client,
    ):
        yield served, client
        await served.check()


@asynccontextmanager
async def losing(*, about: dict[str, Any] | None = None, **options: Any) -> AsyncIterator[Any]:
    """A server, a gRPC proxy that loses what it is told to lose, and a client of the proxy, which knows the server."""
    async with (
        serve_identity(**{"positional": True, **options}) as served,
        lossy.proxied(served.target) as (proxy, target),
        ExecutorClient(target, **{"resend": ResendPolicy(backoff_s=0), **(about or {})}) as client,
    ):
        await client.info()
        yield served, proxy, client


@asynccontextmanager
async def restarting(session: bool = True, **about: Any) -> AsyncIterator[Any]:
    """A server and the one that may take its place, a proxy that leads to it, and a client of the proxy."""
    async with (
        serve_identity(positional=True) as first,
        serve_identity(positional=True) as second,
        proxied(first.target) as proxy,
        ExecutorClient(proxy.target, session=session, **about) as client,
    ):
        yield first, second, proxy, client


async def text(
    client: Any, tokens: Sequence[int], count: int | None = None, output: Greedy | Sample = GREEDY, **options: Any
) -> list[int]:
    """What a sequence of its own goes on with behind ``tokens``."""
    async with client.sequence() as sequence:
        return [each async for each in sequence.generate(tokens, max_tokens=count, output=output, **options)]


async def requests(client: ExecutorClient) -> int:
    """Items that the executor was asked for."""
    names = ("Session", "Prefill", "Decode")
    return sum(each.items for each in (await client.status()).methods if each.method.endswith(names))


def raw(answer: Answer | ExecutorError) -> list[Any]:
    """What an answer says of its sequence, and everything in its rows, byte for byte."""
    assert isinstance(answer, Answer), answer
    if answer.rows is None:
        return [answer.length]
    block, span = answer.rows.block, slice(answer.rows.first, answer.rows.first + answer.rows.count)
    return [answer.length, block.kind, *((name, each[span].tobytes()) for name, each in block.columns.items())]


def answers(results: Sequence[Answer | ExecutorError]) -> list[Answer]:
    """The results of a batch of which no item was refused."""
    found = [each for each in results if isinstance(each, Answer)]
    assert len(found) == len(results), results
    return found


def believe(client: ExecutorClient, **facts: Any) -> None:
    """Have ``client``, which has asked for the executor's info, believe something else of it."""
    context = connection_of(client).context
    assert context.known_info is not None
    context.known_info = replace(context.known_info, **facts)


def without(client: ExecutorClient, *missing: Capability) -> None:
    """Have it believe that these capabilities are missing."""
    info = connection_of(client).context.known_info
    assert info is not None
    believe(client, capabilities=info.capabilities - set(missing))
