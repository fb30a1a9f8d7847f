"""`Sequence.stream` over a fleet: no answer is lost or doubled, and none loses its log-probabilities, wherever the
sequence goes."""

from __future__ import annotations

import asyncio
import signal
from contextlib import AsyncExitStack
from dataclasses import replace
from unittest import mock

import pytest

from ferrum_rpc.client import ExecutorClient, FinishReason, NotSupported, RowLogprobs, StreamToken, sync
from ferrum_rpc.client.fleet import FleetClient
from tests.e2e.fleets import PROMPT, SAMPLED, SESSION, fleet, of, owner, until
from tests.e2e.test_fleet_room import unlike
from tests.faults.process import ServerProcess, serving

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
    async with fleet(2) as (one, served):
        expected = await alone(served[0].target, 60)
        sequence, found, homes = one.sequence(), Seen(), set[str]()
        with mock.patch("ferrum_rpc.client.transfer.check_offered", side_effect=None if moves else NotSupported("no")):
            async for each in sequence.stream(PROMPT, max_tokens=60, output=OUTPUT, stop=()):
                found.append(facts(each))
                homes.add(owner(sequence).target)
                if len(found) in (5, 17, 40):
                    [to] = [each for each in one.members.serving if each is not sequence.owner]
                    if moves:
                        await sequence.migrate(to)
                    else:
                        with pytest.raises(NotSupported):
                            await sequence.migrate(to)
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


@pytest.mark.parametrize("least", [0, 40])
async def test_executors_are_killed_in_the_middle_of_streams(least: int) -> None:
    """By SIGKILL, at whatever they do then; half of the readers are threads."""

    def read(executors: dict[str, ServerProcess], stop: list[int]) -> None:
        options = {"max_tokens": 60, "output": OUTPUT, "stop": stop, "min_tokens": least}
        with sync.ExecutorClient(next(iter(executors))) as client, client.sequence() as single:
            expected = [facts(each) for each in single.stream(PROMPT, **options)]  # type: ignore[arg-type]
        assert len(expected) > 30
        assert len({each[0] for each in expected}) > 5

        async def texts() -> None:
            async with FleetClient(list(executors), connect=SESSION, look_every_s=0.05, timeout_s=20.0) as one:
                await until(one, lambda: len(one.members.serving) == len(executors))
                kill_at = iter((7, 31))

                async def text(number: int) -> Seen:
                    sequence, found = one.sequence(), Seen()
                    async for each in sequence.stream(PROMPT, **options):  # type: ignore[arg-type]
                        found.append(facts(each))
                        if number == 0 and len(found) in (7, 31):
                            next(kill_at)
                            executors[owner(sequence).target].signal(signal.SIGKILL)
                    assert sequence.length == len(PROMPT) + len(found) - 1
                    await sequence.release()
                    return found

                assert await asyncio.gather(*map(text, range(6))) == [expected] * 6
                assert next(kill_at, None) is None and len(one.members.there) == len(executors) - 2

        asyncio.run(texts())

    async with AsyncExitStack() as stack:
        processes = await asyncio.gather(
            *(stack.enter_async_context(serving("--identity-positional")) for _ in range(3))
        )
        await asyncio.to_thread(read, {each.target: each for each in processes}, [] if not least else list(range(16)))
