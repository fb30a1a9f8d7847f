"""`Sequence.stream` over a fleet: no answer is lost or doubled, and none loses its log-probabilities, wherever the
sequence goes; and a fleet in a program without asyncio."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, nullcontext
from dataclasses import replace
from typing import Any

import pytest

from ferrum_rpc.client import Answer, ExecutorClient, FinishReason, RowLogprobs, StreamToken, sync
from ferrum_rpc.client.fleet.sync import FleetClient as SyncFleet
from ferrum_rpc.errors import InvalidRequest, NotSupported
from tests.e2e.test_fleet_room import unlike
from tests.support.clients import text
from tests.support.fleets import PROMPT, SAMPLED, SESSION, another, behind_proxies, fleet, moving, of, owner, several
from tests.support.proxy import proxied

OUTPUT = replace(SAMPLED, logprob=True, logprobs=RowLogprobs(3, (7, 200)))
Seen = list[tuple[object, ...]]


def facts(each: StreamToken) -> tuple[object, ...]:
    """Everything of a token but how it travelled."""
    assert each.top_logprobs is not None and each.selected_logprobs is not None
    top = each.top_logprobs.token_ids.tolist(), each.top_logprobs.logprobs.tolist()
    return each.token, each.logprob, top, each.selected_logprobs.tolist(), each.finish_reason


async def alone(target: str, count: int) -> Seen:
    """The text of one executor."""
    async with ExecutorClient(target) as client, client.sequence() as sequence:
        return [facts(each) async for each in sequence.stream(PROMPT, max_tokens=count, output=OUTPUT, stop=())]


@pytest.mark.parametrize("moves", [True, False], ids=["moves", "is rebuilt"])
async def test_a_stream_goes_on_where_its_sequence_is_taken(moves: bool) -> None:
    async with fleet() as (one, served):
        expected = await alone(served[0].target, 60)
        sequence, found, homes = one.sequence(), Seen(), set[str]()
        with moving(moves):
            async for each in sequence.stream(PROMPT, max_tokens=60, output=OUTPUT, stop=()):
                found.append(facts(each))
                homes.add(owner(sequence).target)
                if len(found) in (5, 17, 40):
                    with nullcontext() if moves else pytest.raises(NotSupported):
                        await sequence.migrate(another(one, sequence))
        assert found == expected and len(homes) == 1 + moves
        await sequence.release()


async def test_a_stream_that_outgrows_its_context_says_where_it_ends() -> None:
    async with unlike(24, 40) as (one, (short, long)):
        async with one.sequence() as sequence:
            stream = sequence.stream(PROMPT, output=OUTPUT, stop=())
            found = [facts(await anext(stream))]
            assert of((short, long), sequence) is short
            found += [facts(each) async for each in stream]
            assert of((short, long), sequence) is long
            assert sequence.length == 40
        assert found == await alone(long.target, 100)
        assert found[-1][-1] is FinishReason.CONTEXT and len(found) == 40 - len(PROMPT) + 1


async def test_executors_die_in_the_middle_of_streams() -> None:
    options: Any = {"max_tokens": 60, "output": OUTPUT, "stop": list(range(16)), "min_tokens": 40}
    async with several(3) as served, behind_proxies(*served) as (one, proxies):
        async with ExecutorClient(served[0].target) as client, client.sequence() as single:
            expected = [facts(each) async for each in single.stream(PROMPT, **options)]
        assert len(expected) > 40 and len({each[0] for each in expected}) > 5

        async def text(number: int) -> Seen:
            sequence, found = one.sequence(), Seen()
            async for each in sequence.stream(PROMPT, **options):
                found.append(facts(each))
                if number == 0 and len(found) in (7, 31):
                    proxies[owner(sequence).target].kill()
            assert sequence.length == len(PROMPT) + len(found) - 1
            await sequence.release()
            return found

        assert await asyncio.gather(*map(text, range(6))) == [expected] * 6
        assert len(one.members.there) == 1


# --- without asyncio --------------------------------------------------------------------------------------------------


async def test_an_executor_dies_while_a_thread_reads_a_text() -> None:
    loop = asyncio.get_running_loop()

    def read() -> None:
        with SyncFleet(list(proxies), connect=SESSION, look_every_s=0.05, timeout_s=20.0) as fleet:
            while len(fleet.members.serving) < 3:
                assert fleet.score(PROMPT).tokens.tolist() == PROMPT[1:]
            sequence, others, found = fleet.sequence(), [fleet.sequence() for _ in range(6)], list[int]()
            answers = fleet.batch_prefill([each.item(PROMPT) for each in others])
            for token in sequence.generate(PROMPT, max_tokens=40, output=SAMPLED, stop=()):
                found.append(token)
                if len(found) == 6:
                    loop.call_soon_threadsafe(proxies[sequence.owner.target].kill)
            killed = {each.target for each in fleet.members.there} ^ proxies.keys()
            assert found == expected[:40] and sequence.owner.target not in killed and len(killed) == 1
            to = another(fleet, sequence)
            sequence.migrate(to)
            [child] = sequence.fork()
            assert sequence.owner is child.owner is to
            for each in (sequence, child):
                assert list(each.generate(found[-1:], max_tokens=20, output=SAMPLED, stop=())) == expected[40:]
            again = fleet.batch_decode([each.item([1]) for each in others])
            assert len({each.token for each in again if isinstance(each, Answer)}) == 1
            assert all(isinstance(each, Answer) for each in [*answers, *again])
            assert fleet.truncate([(each, 4) for each in others]) == [None] * 6
            assert fleet.release([sequence, child, *others]) == [None] * 8

    async with several(3) as served, AsyncExitStack() as stack:
        every = [await stack.enter_async_context(proxied(each.target)) for each in served]
        proxies = {each.target: each for each in every}
        async with ExecutorClient(served[0].target) as client:
            expected = await text(client, PROMPT, 60, SAMPLED, stop=())
        await asyncio.to_thread(read)


def test_executors_of_a_fleet_share_its_event_loop() -> None:
    with pytest.raises(InvalidRequest, match="connect must make"):
        SyncFleet(["127.0.0.1:1"], connect=sync.ExecutorClient)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="FleetClient"):
        SyncFleet(["127.0.0.1:1"]).score(PROMPT)
