"""A fleet of unlike executors: contexts of several lengths, and one that is full by the number of its sequences."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest

from ferrum_rpc.client import Answer, ExecutorClient
from ferrum_rpc.client.fleet import Candidate, FleetClient, FleetSequence
from ferrum_rpc.errors import ContextLengthExceeded, NotSupported, QuotaExceeded, SequencesExhausted
from tests.e2e.fleets import PROMPT, SAMPLED, alone, fleet_of, foreign, identity, of, owner, until
from tests.faults import waiting
from tests.serving import Served

SHORT, LONG = 16, 64
WAYS = pytest.mark.parametrize("session", [True, False], ids=["session", "unary"])


class Lowest:
    """Always the one that was there first."""

    def choose(self, prompt: Sequence[int], candidates: Sequence[Candidate]) -> Candidate:
        return candidates[0]


class Largest:
    """Always the one of most blocks."""

    def choose(self, prompt: Sequence[int], candidates: Sequence[Candidate]) -> Candidate:
        return max(candidates, key=lambda each: each.total_blocks)


@asynccontextmanager
async def unlike(*contexts: int, session: bool = True) -> AsyncIterator[tuple[FleetClient, list[Served]]]:
    """Executors of these contexts, of which the first that may be chosen is."""
    async with AsyncExitStack() as stack:
        served = [await stack.enter_async_context(identity(max_context=each)) for each in contexts]
        connect = partial(ExecutorClient, session=session)
        one = await stack.enter_async_context(fleet_of(served[0].target, placement=Lowest(), connect=connect))
        for count in range(2, len(served) + 1):
            one.members._listed("", [each.target for each in served[:count]])
            await until(one, lambda wanted=count: len(one.members.serving) == wanted)  # type: ignore[misc]
        yield one, served


async def text(fleet: FleetClient, sequence: FleetSequence, how: str, count: int = 24) -> list[int]:
    """So many tokens, and nobody knows beforehand how many."""
    found = list[int]()
    if how.startswith("stream"):
        stop = range(1000, 10_000) if "single" in how else ()  # more than a run takes
        async for token in sequence.generate(PROMPT, output=SAMPLED, stop=stop):
            found.append(token)
            if len(found) == count:
                return found
    while len(found) < count:
        fed = found[-1:] or PROMPT
        if how == "calls":
            answer: Any = await sequence.prefill(fed, SAMPLED)
        else:
            [answer] = await fleet.forward([sequence.item(fed, SAMPLED)])
        assert isinstance(answer, Answer), answer
        found.append(answer.token)
    return found


@WAYS
@pytest.mark.parametrize("moves", [True, False], ids=["moves", "is rebuilt"])
@pytest.mark.parametrize("how", ["stream", "stream of single steps", "calls", "items"])
async def test_a_text_that_outgrows_its_executors_context_goes_on_where_there_is_more(
    session: bool, moves: bool, how: str
) -> None:
    async with unlike(SHORT, LONG, session=session) as (one, (short, long)):
        expected = await alone(long.target)
        sequence = one.sequence()
        with (
            mock.patch("ferrum_rpc.client.transfer.check_offered", side_effect=None if moves else NotSupported("no")),
        ):
            assert await text(one, sequence, how) == expected
        assert owner(sequence).target == long.target
        assert long.server.state.counters.sequences_imported == moves
        await sequence.release()
        await waiting.until(lambda: not len(short.server.state.handles) and not len(long.server.state.handles))
        assert foreign(short, long) == 0


async def test_texts_that_outgrow_a_context_at_the_same_time_all_move() -> None:
    async with unlike(SHORT, LONG) as (one, (_, long)):
        expected = await alone(long.target)
        sequences = [one.sequence() for _ in range(12)]
        found = await asyncio.gather(*(text(one, each, "stream") for each in sequences))
        assert found == [expected] * len(sequences)
        assert long.server.state.counters.sequences_imported == len(sequences)
        await one.release(sequences)


async def test_a_sequence_goes_where_all_that_it_may_become_has_room() -> None:
    async with unlike(SHORT, LONG) as (one, (short, long)):

        async def goes(prompt: int, most: int | None, reserve: int = 0) -> Served:
            async with one.sequence(reserve_tokens=reserve) as sequence:
                stream = sequence.generate([1] * prompt, max_tokens=most, stop=())
                await anext(stream)
                found = of((short, long), sequence)
                await stream.aclose()
            return found

        for prompt, most, reserve, there in (
            (8, 9, 0, short),  # the last token is not fed
            (8, 10, 0, long),
            (SHORT, 1, 0, short),
            (SHORT + 1, 1, 0, long),
            (8, None, 0, short),
            (8, None, 9, long),
            (8, 1000, 0, long),
        ):
            assert await goes(prompt, most, reserve) is there
        async with one.sequence() as sequence:
            with pytest.raises(ContextLengthExceeded, match=f"has {LONG + 1} tokens.*more than {LONG}") as refusal:
                await sequence.prefill([1] * (LONG + 1))
            assert refusal.value.metadata["max_context"] == str(LONG)
            [answer] = await one.forward([sequence.item([1] * (LONG + 1))])
            assert isinstance(answer, ContextLengthExceeded)
            await sequence.prefill([1] * 3)
            with pytest.raises(ContextLengthExceeded):
                await sequence.prefill([1] * LONG)
            assert sequence.length == 3, "it is as it was"


async def test_who_drains_or_dies_leaves_its_sequences_to_those_whose_context_holds_them() -> None:
    async with unlike(LONG, SHORT) as (one, served):
        long, short = served
        expected = await alone(long.target)
        sequence, brief = one.sequence(), one.sequence()
        found = await text(one, sequence, "calls", 12)
        await brief.generate(PROMPT, max_tokens=2).__anext__()
        members = {each.target: each for each in one.members.there}
        with pytest.raises(ContextLengthExceeded, match=f"has 19 tokens, and the context there is {SHORT}"):
            await sequence.migrate(members[short.target])
        await members[long.target].client.drain(60.0)
        await until(one, lambda: members[long.target].draining)
        found.append((await sequence.decode(found[-1], SAMPLED)).token)
        assert owner(sequence).target == long.target, "nobody else has room for it, and it is still served"
        await brief.decode(1)
        assert owner(brief).target == short.target
        async with identity(max_context=LONG) as another:
            one.members._listed("", [*(each.target for each in served), another.target])
            await until(one, lambda: another.target in {each.target for each in one.members.serving})
            found.append((await sequence.decode(found[-1], SAMPLED)).token)
            assert owner(sequence).target == another.target, "not the first that may be chosen, but one that holds it"
            assert another.server.state.counters.sequences_imported == 1
            await owner(sequence).end("as if it were")
            one.members._listed("", [each.target for each in served])
            with pytest.raises(ContextLengthExceeded, match="has 21 tokens"):
                await sequence.decode(found[-1], SAMPLED)
        assert found == expected[:14]
        await one.release([sequence, brief])


async def test_a_text_that_ends_early_because_the_longer_context_is_gone_says_so() -> None:
    async with unlike(SHORT, LONG) as (one, (short, long)):
        expected = await alone(long.target)
        sequence, found = one.sequence(), list[int]()
        with pytest.raises(ContextLengthExceeded, match=f"more than {SHORT}, and the one of {LONG} that it began with"):
            async for token in sequence.generate(PROMPT, max_tokens=24, output=SAMPLED, stop=()):
                found.append(token)
                if len(found) == 1:
                    assert owner(sequence).target == long.target
                    one.members._listed("", [short.target])
                    await owner(sequence).end("as if it were")
        assert found == expected[: SHORT - len(PROMPT) + 1]
        await sequence.release()


@WAYS
@pytest.mark.parametrize("how", ["stream", "calls", "items"])
@pytest.mark.parametrize(
    ("limit", "refusal"),
    [({"max_sequences": 2}, SequencesExhausted), ({"max_sequences_per_caller": 2}, QuotaExceeded)],
    ids=["sequences", "quota"],
)
async def test_who_is_full_by_number_is_passed_over(
    limit: dict[str, int], refusal: type[Exception], how: str, session: bool
) -> None:
    connect = partial(ExecutorClient, session=session)
    async with (
        identity(kv_blocks=1024, **limit) as small,
        identity(kv_blocks=64) as large,
        fleet_of(small.target, large.target, placement=Largest(), connect=connect) as one,
    ):
        await until(one, lambda: len(one.members.serving) == 2)
        with mock.patch("ferrum_rpc.client.fleet.member.FULL_S", 60.0):
            sequences = [one.sequence() for _ in range(6)]
            for each in sequences:
                assert len(await text(one, each, how, 2)) == 2
            assert {of((small, large), each).target for each in sequences} == {small.target, large.target}
            assert len(small.server.state.handles) == 2
            [member] = [each for each in one.members.there if each.target == small.target]
            assert member.full
            async with ExecutorClient(small.target) as client, client.sequence() as another:
                if refusal is SequencesExhausted:
                    with pytest.raises(refusal):
                        await another.prefill(PROMPT)
        await one.release(sequences)
