"""Several executors as one: no token changes when a sequence's owner drains, restarts or dies, or it is moved."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import pytest

from ferrum_rpc.client import Answer, SequenceMisuseError
from ferrum_rpc.client.fleet import Member
from ferrum_rpc.errors import DeadlineExceeded, InvalidRequest, KvBlocksExhausted, TransportError
from tests.support import waiting
from tests.support.fleets import (
    PROMPT,
    SAMPLED,
    WAYS,
    Largest,
    all_is_freed,
    alone,
    another,
    driven,
    fleet,
    fleet_of,
    hanging,
    identity,
    moving,
    of,
    owner,
    there_are,
    two_that_may_hang,
    until,
)
from tests.support.proxy import proxied
from tests.support.transfers import overflow


@WAYS
async def test_what_comes_back_at_the_same_address_is_another_executor(session: bool, how: str) -> None:
    async with identity() as first, identity() as second, proxied(first.target) as proxy:
        expected = await alone(first.target)
        async with fleet_of(proxy.target, session=session) as one:
            sequence = one.sequence()
            found = await driven(
                one, sequence, how, got=lambda number: proxy.lead_to(second.target) if number == 6 else None
            )
            assert found == expected
            assert owner(sequence).info.instance_id == second.server.state.handles.instance_id
            await sequence.release()
        handles = second.server.state.handles
        assert len(handles) == 0 and not (session and handles.foreign)


@pytest.mark.parametrize("moves", [True, False])
async def test_sequences_of_a_draining_executor_move_with_their_cache_or_are_computed_elsewhere(moves: bool) -> None:
    async with fleet() as (one, served):
        expected = await alone(served[0].target)
        sequence, sampled = one.sequence(), list[int]()
        sampled.append((await sequence.prefill(PROMPT, SAMPLED)).token)
        source = of(served, sequence)
        [other] = [each for each in served if each is not source]
        fed = other.server.state.engine.counters.tokens
        with moving(moves):
            await owner(sequence).client.drain(60.0)
            while len(sampled) < 24:
                if moves:
                    sampled.append((await sequence.decode(sampled[-1], SAMPLED)).token)
                else:
                    [answer] = await one.forward([sequence.item(sampled[-1:], SAMPLED)])
                    assert isinstance(answer, Answer)
                    sampled.append(answer.token)
        assert sampled == expected and owner(sequence).target == other.target
        assert other.server.state.counters.sequences_imported == moves
        assert not moves or other.server.state.engine.counters.tokens - fed == 23
        async with one.sequence() as newcomer:
            await newcomer.prefill(PROMPT)
            assert owner(newcomer).target == other.target
        await sequence.release()
        await all_is_freed(*served)


@WAYS
async def test_a_sequence_goes_where_its_scheduler_sends_it_and_nothing_is_computed_twice(session, how) -> None:
    async with fleet(session=session) as (one, served):
        expected = await alone(served[0].target)
        before = sum(each.server.state.engine.counters.tokens for each in served)
        sequence = one.sequence()

        async def got(number: int) -> None:
            if number % 6 == 0:
                other = another(one, sequence)
                await sequence.migrate(other)
                await sequence.migrate(other)  # it is there
                assert owner(sequence) is other

        assert await driven(one, sequence, how, got=got) == expected
        assert [each.server.state.counters.sequences_imported for each in served] == [2, 2]
        if how != "stream":  # which is ahead of its program
            assert sum(each.server.state.engine.counters.tokens for each in served) - before == len(PROMPT) + 23
        await sequence.release()
        await all_is_freed(*served)


async def test_what_was_lost_is_fed_where_its_scheduler_sends_it() -> None:
    async with fleet(3) as (one, served):
        expected = await alone(served[0].target, 2)
        for chosen in range(2):
            async with one.sequence() as sequence:
                token = (await sequence.prefill(PROMPT, SAMPLED)).token
                await owner(sequence).end(TransportError("as if it were"))
                to = [each for each in one.members.serving if each is not sequence.owner][chosen]
                await sequence.migrate(to)
                assert owner(sequence) is to and sequence.length == len(PROMPT)
                assert [token, (await sequence.decode(token, SAMPLED)).token] == expected
            await there_are(one, 3)


async def test_a_cache_that_is_not_finite_is_computed_anew_where_it_goes() -> None:
    async with fleet() as (one, served), one.sequence() as sequence:
        token = (await sequence.prefill(PROMPT, SAMPLED)).token
        source = of(served, sequence)
        [record] = source.server.state.handles.records()
        await overflow(source, record)
        [other] = [each for each in served if each is not source]
        before = other.server.state.engine.counters.tokens
        await sequence.migrate(another(one, sequence))
        assert owner(sequence).target == other.target and not other.server.state.unnamed
        assert other.server.state.engine.counters.tokens - before == len(PROMPT)
        assert other.server.state.counters.sequences_imported == 0
        assert [token, (await sequence.decode(token, SAMPLED)).token] == await alone(served[0].target, 2)


async def test_who_cannot_go_elsewhere_stays_as_it_is() -> None:
    async with (
        identity(kv_blocks=2) as small,
        identity() as large,
        fleet_of(large.target, small.target, placement=Largest()) as one,
    ):
        members = {each.target: each for each in one.members.serving}
        sequence = one.sequence()
        with pytest.raises(SequenceMisuseError, match="nothing was fed"):
            await sequence.migrate(members[small.target])
        expected = await alone(large.target, 3)
        sampled = [(await sequence.prefill(PROMPT, SAMPLED)).token]
        assert owner(sequence) is members[large.target]
        sampled.append((await sequence.decode(sampled[-1], SAMPLED)).token)
        with pytest.raises(KvBlocksExhausted):
            await sequence.migrate(members[small.target])
        await members[small.target].client.drain(60.0)
        async with fleet_of(large.target) as two:
            for target in (members[small.target], two.members.serving[0]):
                with pytest.raises(InvalidRequest, match="does not accept sequences"):
                    await sequence.migrate(target)
        sampled.append((await sequence.decode(sampled[-1], SAMPLED)).token)
        assert sampled == expected and owner(sequence) is members[large.target]
        await sequence.release()
        assert len(small.server.state.handles) == 0


@WAYS
async def test_who_hangs_for_too_long_loses_its_sequences_and_frees_them_before_it_is_used_again(session, how) -> None:
    async with two_that_may_hang(session=session, hung_patience_s=0.3) as (one, every):
        hang = ExitStack()
        expected = await alone(next(iter(every)))
        sequence, hung = one.sequence(), list[Member]()

        def got(number: int) -> None:
            if number == 6:
                hung.append(owner(sequence))
                hang.enter_context(hanging(*every[hung[0].target]))

        found = await driven(one, sequence, how, got=got)
        [old] = hung
        assert found == expected and owner(sequence) is not old
        served, _ = every[old.target]
        assert len(served.server.state.handles) == 1
        hang.close()
        await there_are(one, 2)
        assert len(served.server.state.handles) == 0
        again = next(each for each in one.members.serving if each.target == old.target)
        assert again is not old and again.info.instance_id == old.info.instance_id
        await sequence.migrate(again)
        await sequence.release()
        await all_is_freed(*(each for each, _ in every.values()))


@pytest.mark.parametrize("drains", [False, True])
async def test_who_hangs_for_a_while_gets_nothing_new_and_keeps_what_it_has(drains: bool) -> None:
    async with two_that_may_hang(hung_patience_s=60.0) as (one, every):
        hang = ExitStack()
        expected = await alone(next(iter(every)), 3)
        sequence = one.sequence()
        found = [(await sequence.prefill(PROMPT, SAMPLED)).token]
        member = owner(sequence)
        served, gate = every[member.target]
        [other] = [each for each, _ in every.values() if each is not served]
        before = other.server.state.counters.sequences_created
        hang.enter_context(hanging(served, gate))
        await there_are(one, 1)
        assert member.hung and "hung" in repr(member)
        if drains:
            served.server.drain(60.0)
        stays = asyncio.create_task(sequence.decode(found[0], SAMPLED))
        async with one.sequence() as newcomer:
            await newcomer.prefill(PROMPT)
            assert owner(newcomer).target == other.target
        assert not stays.done() and other.server.state.counters.sequences_imported == 0
        hang.close()
        found.append((await stays).token)
        await until(one, lambda: not member.hung)
        found.append((await sequence.decode(found[-1], SAMPLED)).token)
        assert found == expected
        created = other.server.state.counters.sequences_created - before
        assert created == 1 + drains, "moved with its cache, or not at all"
        assert other.server.state.counters.sequences_imported == drains
        await sequence.release()


@pytest.mark.parametrize("how", ["calls", "items"])
async def test_a_call_whose_deadline_passes_at_one_that_hangs_goes_elsewhere_when_it_is_made_again(how: str) -> None:
    async with two_that_may_hang(hung_patience_s=60.0) as (one, every):
        hang = ExitStack()
        expected = await alone(next(iter(every)), 3)
        sequence = one.sequence()
        found = [(await sequence.prefill(PROMPT, SAMPLED)).token]
        hung = owner(sequence)
        served, gate = every[hung.target]
        hang.enter_context(hanging(served, gate))
        await until(one, lambda: hung.hung)

        async def decode(timeout_s: float | None = None) -> Answer:
            if how == "calls":
                return await sequence.decode(found[-1], SAMPLED, timeout_s=timeout_s)
            [answer] = await one.forward([sequence.item(found[-1:], SAMPLED)], timeout_s=timeout_s)
            if isinstance(answer, DeadlineExceeded):
                raise answer
            assert isinstance(answer, Answer)
            return answer

        with pytest.raises(DeadlineExceeded):
            await decode(0.2)
        assert sequence.length == len(PROMPT)
        while len(found) < 3:
            found.append((await decode()).token)
        assert found == expected and owner(sequence) is not hung
        hang.close()
        await until(one, lambda: hung.serving)
        await waiting.until(lambda: not len(served.server.state.handles))
        await sequence.release()
