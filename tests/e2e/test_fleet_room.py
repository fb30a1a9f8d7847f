"""A fleet of unlike executors: contexts of several lengths, and one that is full by the number of its sequences."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from unittest import mock

import pytest

from ferrum_rpc.client import ExecutorClient
from ferrum_rpc.client.fleet import FleetClient, FleetSequence, Member, Members
from ferrum_rpc.errors import ContextLengthExceeded, ExecutorError, SequencesExhausted, TransportError
from tests.support import waiting
from tests.support.clients import BOTH_WAYS
from tests.support.fleets import (
    PROMPT,
    SAMPLED,
    Largest,
    Lowest,
    all_is_freed,
    alone,
    driven,
    fleet,
    fleet_of,
    hanging,
    identity,
    moving,
    of,
    owner,
    there_are,
    until,
)
from tests.support.inside import name_targets
from tests.support.proxy import proxied
from tests.support.serving import Gate, Served
from tests.support.states import with_states

SHORT, LONG = 16, 64


@asynccontextmanager
async def unlike(*contexts: int, session: bool = True) -> AsyncIterator[tuple[FleetClient, list[Served]]]:
    """Executors of these contexts, of which the first that may be chosen is."""
    async with AsyncExitStack() as stack:
        served = [await stack.enter_async_context(identity(max_context=each)) for each in contexts]
        one = await stack.enter_async_context(fleet_of(served[0].target, placement=Lowest(), session=session))
        for count in range(2, len(served) + 1):
            name_targets(one.members, *(each.target for each in served[:count]))
            await there_are(one, count)
        yield one, served


async def text(fleet: FleetClient, sequence: FleetSequence, how: str, count: int = 24) -> list[int]:
    """So many tokens, and nobody knows beforehand how many."""
    if not how.startswith("stream"):
        return await driven(fleet, sequence, how, count)
    found = list[int]()
    stop = range(1000, 10_000) if "single" in how else ()  # more than a run takes
    async for token in sequence.generate(PROMPT, output=SAMPLED, stop=stop):
        found.append(token)
        if len(found) == count:
            break
    return found


@pytest.mark.parametrize(
    ("how", "session", "moves"),
    [
        ("stream", True, True),
        ("stream", False, False),
        ("stream of single steps", False, True),
        ("stream of single steps", True, False),
        ("calls", True, True),
        ("calls", False, False),
        ("items", False, True),
        ("items", True, False),
    ],
)
async def test_a_text_that_outgrows_its_executors_context_goes_on_where_there_is_more(session, moves, how) -> None:
    async with unlike(SHORT, LONG, session=session) as (one, (short, long)):
        expected = await alone(long.target)
        sequence = one.sequence()
        with moving(moves):
            assert await text(one, sequence, how) == expected
        assert owner(sequence).target == long.target
        assert long.server.state.counters.sequences_imported == moves
        await sequence.release()
        await all_is_freed(short, long)


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
        for prompt, most, reserve, there in (
            (8, 9, 0, short),  # the last token is not fed
            (8, 10, 0, long),
            (SHORT, 1, 0, short),
            (SHORT + 1, 1, 0, long),
            (8, None, 0, short),
            (8, None, 9, long),
            (8, 1000, 0, long),
        ):
            async with (
                one.sequence(reserve_tokens=reserve) as sequence,
                aclosing(sequence.generate([1] * prompt, max_tokens=most, stop=())) as stream,
            ):
                await anext(stream)
                assert of((short, long), sequence) is there
        async with one.sequence() as sequence:
            with pytest.raises(ContextLengthExceeded, match=f"has {LONG + 1} tokens.*at most {LONG}") as refusal:
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
            name_targets(one.members, *(each.target for each in served), another.target)
            await until(one, lambda: another.target in {each.target for each in one.members.serving})
            found.append((await sequence.decode(found[-1], SAMPLED)).token)
            assert owner(sequence).target == another.target, "not the first that may be chosen, but one that holds it"
            assert another.server.state.counters.sequences_imported == 1
            await owner(sequence).end(TransportError("as if it were"))
            name_targets(one.members, *(each.target for each in served))
            with pytest.raises(TransportError, match=f"takes a sequence of 21 tokens .{long.target}: it drains"):
                await sequence.decode(found[-1], SAMPLED, timeout_s=0.2)
            name_targets(one.members, short.target)
            with pytest.raises(ContextLengthExceeded, match="has 21 tokens"):
                await sequence.decode(found[-1], SAMPLED)
        assert found == expected[:14]
        await one.release([sequence, brief])


async def test_a_text_that_ends_early_because_the_longer_context_is_gone_says_so() -> None:
    async with unlike(SHORT, LONG) as (one, (short, long)):
        expected = await alone(long.target)
        sequence, found = one.sequence(), list[int]()
        with pytest.raises(ContextLengthExceeded, match=f"at most {SHORT}, and the one of {LONG} that it began on"):
            async for token in sequence.generate(PROMPT, max_tokens=24, output=SAMPLED, stop=()):
                found.append(token)
                if len(found) == 1:
                    assert owner(sequence).target == long.target
                    name_targets(one.members, short.target)
                    await owner(sequence).end(TransportError("as if it were"))
        assert found == expected[: SHORT - len(PROMPT) + 1]
        await sequence.release()


@pytest.mark.parametrize(
    ("limit", "how", "session"),
    [
        ("max_sequences", "stream", True),
        ("max_sequences", "calls", False),
        ("max_sequences", "items", True),
        ("max_sequences_per_caller", "stream", False),
        ("max_sequences_per_caller", "calls", True),
        ("max_sequences_per_caller", "items", False),
    ],
)
async def test_who_is_full_by_number_is_passed_over(limit: str, how: str, session: bool) -> None:
    async with (
        identity(kv_blocks=1024, **{limit: 2}) as small,
        identity(kv_blocks=64) as large,
        fleet_of(small.target, large.target, placement=Largest(), session=session) as one,
    ):
        with mock.patch("ferrum_rpc.client.fleet.member.FULL_S", 60.0):
            sequences = [one.sequence() for _ in range(6)]
            for each in sequences:
                assert len(await text(one, each, how, 2)) == 2
            assert {of((small, large), each).target for each in sequences} == {small.target, large.target}
            assert len(small.server.state.handles) == 2
            [member] = [each for each in one.members.there if each.target == small.target]
            assert member.full
            async with ExecutorClient(small.target) as client, client.sequence() as another:
                if limit == "max_sequences":
                    with pytest.raises(SequencesExhausted):
                        await another.prefill(PROMPT)
        await one.release(sequences)


async def test_who_has_no_slot_is_passed_over_before_it_refuses() -> None:
    async with (
        identity(kv_blocks=1024, made=with_states(2)) as small,
        identity(kv_blocks=512, made=with_states(9)) as large,
        fleet_of(small.target, large.target, placement=Largest()) as one,
    ):
        sequences = [one.sequence() for _ in range(5)]
        with mock.patch.object(Members, "look", mock.AsyncMock()):  # what was promised since its last answer counts
            await asyncio.gather(*(each.prefill(PROMPT) for each in sequences))
        assert [len(each.server.state.handles) for each in (small, large)] == [2, 3]
        assert small.server.state.counters.kv_exhausted == 0
        assert one.pressure is not None and (one.pressure.free_slots, one.pressure.total_slots) == (6, 11)
        member = one.members.serving[0]
        free = member.candidate((), ()).free_blocks
        member.promise(5)
        assert member.candidate((), ()).free_blocks == free - 5
        await one.release(sequences)


@contextmanager
def refusals() -> Iterator[asyncio.Queue[tuple[str, ExecutorError]]]:
    """Who refused what, as it happens."""
    seen: asyncio.Queue[tuple[str, ExecutorError]] = asyncio.Queue()
    refused = Member.refused

    def note(member: Member, error: ExecutorError) -> None:
        seen.put_nowait((member.target, error))
        refused(member, error)

    with mock.patch.object(Member, "refused", note):
        yield seen


@pytest.mark.parametrize(("how", "session"), [("stream", True), ("calls", False), ("items", True), ("items", False)])
async def test_each_that_could_hold_a_sequence_is_asked_once_and_the_refusal_is_raised(how: str, session: bool) -> None:
    async with (
        identity(max_context=SHORT) as short,
        identity(max_context=LONG, max_sequences=1) as first,
        identity(max_context=LONG, max_sequences=1) as second,
        fleet_of(short.target, first.target, second.target, placement=Lowest(), session=session) as one,
        ExecutorClient(first.target) as other,
        ExecutorClient(second.target) as another,
    ):
        held = [each.sequence() for each in (other, another)]
        for each in held:
            await each.prefill(PROMPT)
        prompt = [1] * (SHORT + 1)
        # As where others fill them between two answers: nothing that is known says that they are full.
        with mock.patch.object(Member, "full", property(lambda member: False)), refusals() as seen:
            sequence = one.sequence()
            if how == "items":
                [refusal] = await one.forward([sequence.item(prompt, SAMPLED)])
            else:
                with pytest.raises(SequencesExhausted) as raised:
                    if how == "calls":
                        await sequence.prefill(prompt)
                    else:
                        await anext(sequence.generate(prompt, max_tokens=4))
                refusal = raised.value
            assert isinstance(refusal, SequencesExhausted) and refusal.retry_after_s
            asked = Counter(seen.get_nowait()[0] for _ in range(seen.qsize()))
            assert asked == {first.target: 1, second.target: 1}
            await held[1].release()
            await sequence.prefill(prompt)
            assert owner(sequence).target == second.target
            await sequence.release()
        await held[0].release()


@BOTH_WAYS
async def test_a_text_that_must_move_stays_until_there_is_a_place_for_it(session: bool) -> None:
    async with (
        identity(max_context=SHORT) as short,
        identity(max_context=LONG, max_sequences=1) as long,
        fleet_of(short.target, long.target, placement=Lowest(), session=session) as one,
        ExecutorClient(long.target) as other,
    ):
        expected = await alone(long.target)
        await (held := other.sequence()).prefill(PROMPT)
        sequence, found = one.sequence(), list[int]()
        with pytest.raises(SequencesExhausted):
            async for token in sequence.generate(PROMPT, output=SAMPLED, stop=(), timeout_s=3.0):
                found.append(token)
        assert found == expected[: SHORT - len(PROMPT) + 1]
        assert owner(sequence).target == short.target and sequence.length == SHORT
        with refusals() as seen:
            stream = sequence.generate(found[-1:], max_tokens=24 - len(found), output=SAMPLED, stop=())
            rest = asyncio.ensure_future(anext(stream))
            assert (await seen.get())[0] == long.target
            await held.release()
            found += [await rest, *[token async for token in stream]]
        assert found == expected and owner(sequence).target == long.target
        assert long.server.state.counters.sequences_imported == 1
        await sequence.release()


@pytest.mark.parametrize(
    ("away", "how"),
    [
        *(("hangs", how) for how in ("prompt", "stream", "stream of single steps", "items")),
        ("is gone", "prompt"),
        ("is gone", "stream"),
        ("has not come", "prompt"),
    ],
)
async def test_a_longer_context_that_is_away_for_a_while_is_waited_for(away: str, how: str) -> None:
    gate, waits, changed = Gate("forward"), asyncio.Event(), Members.changed

    async def waiting_for(members: Members, since: int) -> int:
        waits.set()
        return await changed(members, since)

    async with (
        identity(max_context=SHORT) as short,
        identity(max_context=LONG, stage=gate) as long,
        proxied(long.target) as proxy,
        AsyncExitStack() as hang,
    ):
        expected = await alone(long.target)
        if away == "has not come":
            proxy.kill()
        there = 1 if away == "has not come" else 2
        async with fleet_of(short.target, proxy.target, placement=Lowest(), there=there) as one:
            if away == "hangs":
                hang.enter_context(hanging(long, gate))
            elif away == "is gone":
                proxy.kill()
            await until(one, lambda: [each.target for each in one.members.serving] == [short.target])
            sequence = one.sequence()
            with pytest.raises(TransportError, match=f"takes a sequence of {SHORT + 1} tokens .{proxy.target}: "):
                await one.sequence().prefill([1] * (SHORT + 1), timeout_s=0.05)
            with mock.patch.object(Members, "changed", waiting_for):
                reached = sequence.prefill([1] * (SHORT + 1)) if how == "prompt" else text(one, sequence, how)
                work, first = asyncio.ensure_future(reached), asyncio.ensure_future(waits.wait())
                await asyncio.wait({work, first}, return_when=asyncio.FIRST_COMPLETED)
                assert waits.is_set() and not work.done(), work
                if away == "hangs":
                    await hang.aclose()
                else:
                    proxy.lead_to(long.target)
                found = await work
                assert found.length == SHORT + 1 if how == "prompt" else found == expected
            assert owner(sequence).target == proxy.target
            await sequence.release()
            await waiting.until(lambda: not len(short.server.state.handles) and not len(long.server.state.handles))


async def test_a_text_raises_where_the_longer_context_stays_away_and_a_known_short_one_is_not_waited_for() -> None:
    async with (
        identity(max_context=SHORT) as short,
        identity(max_context=LONG) as long,
        proxied(long.target) as proxy,
        fleet_of(short.target, proxy.target, placement=Lowest()) as one,
    ):
        expected = await alone(long.target)
        proxy.kill()
        await there_are(one, 1)
        sequence, found = one.sequence(), list[int]()
        with pytest.raises(TransportError, match=f"takes a sequence of {SHORT + 1} tokens"):
            async for token in sequence.generate(PROMPT, output=SAMPLED, stop=(), timeout_s=1.0):
                found.append(token)
        assert found == expected[: SHORT - len(PROMPT) + 1] and sequence.length == SHORT
        with pytest.raises(ContextLengthExceeded):
            await one.sequence().prefill([1] * (LONG + 1))
        await sequence.release()


@pytest.mark.parametrize("count", [8, 3])
async def test_sequences_that_begin_together_are_shared_out_evenly(count: int) -> None:
    async with fleet(3) as (one, _):
        sequences = [one.sequence() for _ in range(count)]
        await asyncio.gather(*(each.prefill([at, 1]) for at, each in enumerate(sequences)))
        shares = Counter(owner(each).target for each in sequences)
        assert sorted(shares.values()) == ([2, 3, 3] if count == 8 else [1, 1, 1])
        await one.release(sequences[:-1])
        await one.release(sequences)
