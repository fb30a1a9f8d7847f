"""Several executors as one: who gets a sequence, and that no token changes when its owner drains, restarts or dies."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from ferrum_rpc.client import (
    Answer,
    ExecutorClient,
    Greedy,
    PrefixEvents,
    PrefixIndex,
    Sample,
    SequenceMisuseError,
)
from ferrum_rpc.client.fleet import Candidate, FleetClient, FleetSequence, LongestPrefix, Member, Members, resolving
from ferrum_rpc.client.retry import Deadline
from ferrum_rpc.errors import InstanceMismatch, InvalidRequest, KvBlocksExhausted, TransportError
from tests.faults import waiting
from tests.faults.proxy import proxied
from tests.serving import Served, serve_identity

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


class Lookups:
    """Looks names up as ``lookup`` does, and counts it."""

    def __init__(self, lookup: Callable[[str], Awaitable[list[str] | None]]) -> None:
        self._lookup = lookup
        self._count = 0

    async def __call__(self, name: str) -> list[str] | None:
        found = await self._lookup(name)
        self._count += 1
        return found

    async def again(self) -> None:
        """Wait for one that has begun by now, if any, and another behind it."""
        before = self._count
        await waiting.until(lambda: self._count >= before + 2)


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


def owner(sequence: FleetSequence) -> Member:
    assert sequence.owner is not None
    return sequence.owner


def of(served: Sequence[Served], sequence: FleetSequence) -> Served:
    """The server that has it."""
    return next(each for each in served if each.target == owner(sequence).target)


def foreign(*served: Served) -> int:
    return sum(each.server.state.handles.foreign for each in served)


@pytest.mark.parametrize("session", [True, False], ids=["session", "unary"])
@pytest.mark.parametrize("how", ["stream", "calls", "items"])
async def test_what_comes_back_at_the_same_address_is_another_executor(session: bool, how: str) -> None:
    async with identity() as first, identity() as second, proxied(first.target) as proxy:
        expected = await alone(first.target)

        def restart() -> None:
            proxy.upstream = second.target
            proxy.reset_all()

        async with fleet_of(proxy.target, connect=partial(ExecutorClient, session=session)) as one:
            sequence, found = one.sequence(), list[int]()
            if how == "stream":
                async for token in sequence.generate(PROMPT, max_tokens=24, output=SAMPLED, stop=()):
                    found.append(token)
                    if len(found) == 6:
                        restart()
            else:
                while len(found) < 24:
                    fed = found[-1:] or PROMPT
                    if how == "calls":
                        answer: Any = await sequence.prefill(fed, SAMPLED)
                    else:
                        [answer] = await one.forward([sequence.item(fed, SAMPLED)])
                    assert isinstance(answer, Answer)
                    found.append(answer.token)
                    if len(found) == 6:
                        restart()
            assert found == expected
            assert owner(sequence).info.instance_id == second.server.state.handles.instance_id
            await sequence.release()
        if session:
            assert foreign(second) == 0
        assert len(second.server.state.handles) == 0


async def test_sequences_of_a_draining_executor_move_with_their_cache() -> None:
    async with fleet() as (one, served):
        expected = await alone(served[0].target)
        sequence, sampled = one.sequence(), list[int]()
        sampled.append((await sequence.prefill(PROMPT, SAMPLED)).token)
        source = of(served, sequence)
        [other] = [each for each in served if each is not source]
        fed = other.server.state.engine.counters.tokens
        await owner(sequence).client.drain(60.0)
        while len(sampled) < 24:
            sampled.append((await sequence.decode(sampled[-1], SAMPLED)).token)
        assert sampled == expected and owner(sequence).target == other.target
        assert other.server.state.counters.sequences_imported == 1
        assert other.server.state.engine.counters.tokens - fed == 23
        async with one.sequence() as newcomer:
            await newcomer.prefill(PROMPT)
            assert owner(newcomer).target == other.target
        await sequence.release()
        assert foreign(*served) == 0 and len(source.server.state.handles) == 0


@pytest.mark.parametrize("session", [True, False], ids=["session", "unary"])
@pytest.mark.parametrize("how", ["stream", "calls", "items"])
async def test_a_sequence_goes_where_its_scheduler_sends_it_and_nothing_is_computed_twice(
    session: bool, how: str
) -> None:
    async with fleet(connect=partial(ExecutorClient, session=session)) as (one, served):
        expected = await alone(served[0].target)
        before = sum(each.server.state.engine.counters.tokens for each in served)
        sequence, found = one.sequence(), list[int]()

        async def got(token: int) -> None:
            found.append(token)
            if len(found) % 6 == 0:
                [other] = [each for each in one.members.serving if each is not sequence.owner]
                await sequence.migrate(other)
                await sequence.migrate(other)  # it is there
                assert owner(sequence) is other

        if how == "stream":
            async for token in sequence.generate(PROMPT, max_tokens=24, output=SAMPLED, stop=()):
                await got(token)
        while len(found) < 24:
            fed = found[-1:] or PROMPT
            if how == "calls":
                answer: Any = await sequence.prefill(fed, SAMPLED)
            else:
                [answer] = await one.forward([sequence.item(fed, SAMPLED)])
            await got(answer.token)
        assert found == expected
        assert [each.server.state.counters.sequences_imported for each in served] == [2, 2]
        if how != "stream":  # which is ahead of its program
            assert sum(each.server.state.engine.counters.tokens for each in served) - before == len(PROMPT) + 23
        await sequence.release()
        await waiting.until(lambda: not any(len(each.server.state.handles) for each in served))
        assert foreign(*served) == 0


async def test_what_was_lost_is_fed_where_its_scheduler_sends_it() -> None:
    async with fleet(3) as (one, served):
        expected = await alone(served[0].target, 2)
        for chosen in range(2):
            async with one.sequence() as sequence:
                token = (await sequence.prefill(PROMPT, SAMPLED)).token
                await owner(sequence).end("as if it were")
                to = [each for each in one.members.serving if each is not sequence.owner][chosen]
                await sequence.migrate(to)
                assert owner(sequence) is to and sequence.length == len(PROMPT)
                assert [token, (await sequence.decode(token, SAMPLED)).token] == expected
            await until(one, lambda: len(one.members.serving) == 3)


async def test_who_cannot_go_elsewhere_stays_as_it_is() -> None:
    class Largest:
        def choose(self, prompt: Sequence[int], candidates: Sequence[Candidate]) -> Candidate:
            return max(candidates, key=lambda each: each.total_blocks)

    async with (
        identity(kv_blocks=2) as small,
        identity() as large,
        fleet_of(large.target, small.target, placement=Largest()) as one,
    ):
        await until(one, lambda: len(one.members.serving) == 2)
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
        async with fleet_of(large.target) as another:
            for target in (members[small.target], another.members.serving[0]):
                with pytest.raises(InvalidRequest, match="takes no sequences"):
                    await sequence.migrate(target)
        sampled.append((await sequence.decode(sampled[-1], SAMPLED)).token)
        assert sampled == expected and owner(sequence) is members[large.target]
        await sequence.release()
        assert len(small.server.state.handles) == 0


async def test_where_caches_cannot_move_a_draining_executors_sequences_are_computed_elsewhere() -> None:
    async with fleet() as (one, served):
        expected = await alone(served[0].target)
        sequence, sampled = one.sequence(), list[int]()
        sampled.append((await sequence.prefill(PROMPT, SAMPLED)).token)
        source = of(served, sequence)
        with mock.patch("ferrum_rpc.client.transfer.check_offered", side_effect=InvalidRequest("no")):
            await owner(sequence).client.drain(60.0)
            while len(sampled) < 24:
                [answer] = await one.forward([sequence.item(sampled[-1:], SAMPLED)])
                assert isinstance(answer, Answer)
                sampled.append(answer.token)
        assert sampled == expected and of(served, sequence) is not source
        await sequence.release()
        assert foreign(*served) == 0


async def test_the_items_of_a_batch_have_outcomes_of_their_own_over_all_owners() -> None:
    async with AsyncExitStack() as stack:
        served = [await stack.enter_async_context(identity()) for _ in range(3)]
        proxies = [await stack.enter_async_context(proxied(each.target)) for each in served]
        one = await stack.enter_async_context(fleet_of(*(each.target for each in proxies)))
        await until(one, lambda: len(one.members.serving) == 3)
        elsewhere = await stack.enter_async_context(identity())  # whoever has seen the prompt would get them all
        expected = await alone(elsewhere.target, 2, Greedy())
        sequences = [one.sequence(rebuild=at % 2 == 0) for at in range(12)]
        first = await one.forward([each.item(PROMPT) for each in sequences])
        assert [each.token for each in first if isinstance(each, Answer)] == [expected[0]] * 12
        assert {owner(each).target for each in sequences} == {each.target for each in proxies}
        with pytest.raises(InvalidRequest, match="one owner"):
            await one.forward([each.item([1]) for each in sequences], all_or_nothing=True)
        mates = [each for each in sequences if owner(each) is owner(sequences[0])]
        wrong = sequences[3].item([999_999])

        dead = next(each for each in proxies if each.target == owner(sequences[0]).target)
        dead.upstream = "127.0.0.1:1"
        dead.reset_all()
        items = [each.item([expected[0]]) if each is not sequences[3] else wrong for each in sequences]
        results = await one.forward(items)
        for sequence, result in zip(sequences, results, strict=True):
            if sequence is sequences[3]:
                assert isinstance(result, InvalidRequest | TransportError)
            elif sequence in mates and sequence not in sequences[::2]:
                assert isinstance(result, TransportError)
                with pytest.raises(InstanceMismatch, match=dead.target):
                    await sequence.decode(expected[0])
                await sequence.rebuild(PROMPT)
                assert (await sequence.decode(expected[0])).token == expected[1]
            else:
                assert isinstance(result, Answer) and result.token == expected[1]
        assert dead.target not in {owner(each).target for each in sequences if each.owner}
        assert await one.truncate([(each, 4) for each in sequences[::2]]) == [None] * 6
        [child] = await sequences[0].fork()
        grandchild = child.child()
        [left, right] = await one.forward([child.item([7]), grandchild.item([8])])
        assert isinstance(left, Answer) and isinstance(right, Answer)
        assert await one.release([*sequences, child, grandchild]) == [None] * 14


@pytest.mark.parametrize("session", [True, False], ids=["session", "unary"])
async def test_batches_over_three_executors_of_which_two_die_are_those_of_one(session: bool) -> None:
    connect = partial(ExecutorClient, session=session)

    async def batches(
        client: ExecutorClient | FleetClient, death: Callable[[Sequence[Any]], None] = lambda _: None
    ) -> list[Any]:
        """Outcomes of batches of every kind, with a death before the second and one before the third."""
        sequences, scored = [client.sequence() for _ in range(9)], Greedy(logprob=True)
        outcomes = await client.batch_prefill([each.item([*PROMPT, at], scored) for at, each in enumerate(sequences)])
        for kind in range(3):
            tokens = [each.token if isinstance(each, Answer) else 9 for each in outcomes[-9:]]
            tokens[5] = 999_999
            if kind < 2:
                death(sequences)
            if kind == 1:
                rollbacks = [(each, 3 + at % 4) for at, each in enumerate(sequences)]
                assert await client.truncate(rollbacks) == [None] * 9
            items = [each.item([token], scored) for each, token in zip(sequences, tokens, strict=True)]
            outcomes += await client.batch_decode(items)
        assert [each.length for each in sequences] == [3 + at % 4 + 2 * (at != 5) for at in range(9)]
        assert await client.release(sequences) == [None] * 9
        outcomes.append(await client.score(PROMPT, first=3))
        return [
            (each.tokens.tolist(), each.logprobs.tolist(), each.length) if isinstance(each, Answer) else type(each)
            for each in outcomes
        ]

    async with AsyncExitStack() as stack:
        served = [await stack.enter_async_context(identity()) for _ in range(3)]
        proxies = [await stack.enter_async_context(proxied(each.target)) for each in served]
        one = await stack.enter_async_context(fleet_of(*(each.target for each in proxies), connect=connect))
        await until(one, lambda: len(one.members.serving) == 3)

        def death(sequences: Sequence[FleetSequence]) -> None:
            [dead] = [each for each in proxies if each.target == owner(sequences[0]).target]
            dead.upstream = "127.0.0.1:1"
            dead.reset_all()

        found = await batches(one, death)
        assert len(one.members.there) == 1
        async with identity() as alone, connect(alone.target) as client:
            assert found == await batches(client)


async def test_a_prompt_goes_where_its_prefix_is_until_that_executor_is_full() -> None:
    async with fleet() as (one, _):
        prompt = list(range(100, 180))
        async with one.sequence() as first:
            await first.prefill(prompt)
            there = owner(first)
            await waiting.until(lambda: there.index is not None and there.index.match(prompt) >= 76)
            await waiting.until(
                lambda: there.pressure is not None and there.pressure.free_blocks < there.pressure.total_blocks
            )
            other = one.sequence()
            await other.prefill([1, 2, 3])
            assert owner(other) is not there, "the emptier one"
            like = one.sequence()
            assert (await like.prefill([*prompt, 1])).cached_tokens == 80
            assert owner(like) is there
            async with one.sequence(cache_salt=b"another's") as salted:
                await salted.prefill([*prompt, 1])
                assert owner(salted) is not there
            await one.release([other, like])


async def test_placement_is_whoever_chooses() -> None:
    class ByFirstToken:
        def choose(self, prompt: Sequence[int], candidates: Sequence[Candidate]) -> Candidate:
            return sorted(candidates, key=lambda each: each.target)[prompt[0] % len(candidates)]

    async with fleet(placement=ByFirstToken()) as (one, served):
        targets = sorted(each.target for each in served)
        for first in range(4):
            async with one.sequence() as sequence:
                await sequence.prefill([first, 9])
                assert owner(sequence).target == targets[first % 2]


async def test_what_an_executor_refuses_for_want_of_room_is_placed_anew() -> None:
    class InTurn:
        def __init__(self) -> None:
            self.turn = itertools.count()

        def choose(self, prompt: Sequence[int], candidates: Sequence[Candidate]) -> Candidate:
            assert len(candidates) == 2
            return sorted(candidates, key=lambda each: each.total_blocks)[next(self.turn) % 2]

    async with (
        identity(kv_blocks=8) as small,
        identity() as large,
        fleet_of(small.target, large.target, placement=InTurn()) as one,
    ):
        await until(one, lambda: len(one.members.serving) == 2)
        for item in (False, True):
            sequence, refused = one.sequence(), 0
            while sequence.length == 0:
                try:
                    if item:
                        [answer] = await one.forward([sequence.item(range(60))])
                        refused += isinstance(answer, KvBlocksExhausted)
                    else:
                        await sequence.prefill(range(60))
                except KvBlocksExhausted:
                    refused += 1
            assert refused <= 1 and owner(sequence).target == large.target
            await sequence.release()


def candidate(target: str, **known: int) -> Candidate:
    facts = {"cached_tokens": 0, "free_blocks": 100, "total_blocks": 100, "queued_items": 0, "queued_tokens": 0} | known
    return Candidate(target=target, instance_id=target, block_size=4, max_batch_items=64, **facts)


@pytest.mark.parametrize(
    ("left", "right", "chosen"),
    [
        ({}, {}, "left"),
        ({}, {"cached_tokens": 20}, "right"),
        ({"free_blocks": 99}, {}, "right"),
        ({"queued_items": 3}, {}, "right"),
        ({}, {"cached_tokens": 20, "free_blocks": 40}, "left"),
        ({}, {"cached_tokens": 40, "free_blocks": 15, "queued_items": 40}, "left"),
        ({"cached_tokens": 16, "free_blocks": 5}, {"queued_items": 300}, "right"),
    ],
)
def test_the_longest_prefix_is_weighed_against_room_and_queue(
    left: dict[str, int], right: dict[str, int], chosen: str
) -> None:
    found = LongestPrefix().choose([0] * 40, [candidate("left", **left), candidate("right", **right)])
    assert found.target == chosen


def test_an_index_forgets_what_entered_first() -> None:
    index = PrefixIndex(b"f" * 32, 4, most=3)
    hashes = list(index.hashes(range(30)))
    index.apply(PrefixEvents(1, "i", tuple((each, True) for each in hashes), anew=True, gap=False))
    assert len(index) == 3 and index.found(hashes) == 0 and index.found(hashes[-3:]) == 12


async def test_a_name_is_resolved_again_and_again() -> None:
    async with identity() as first, identity() as second:
        found: list[str] | None = [first.target]

        async def lookup(name: str) -> list[str] | None:
            assert name == "dns:///executors:50051"
            return found

        with mock.patch("ferrum_rpc.client.fleet.members.lookup", lookups := Lookups(lookup)):
            async with fleet_of("dns:///executors:50051", resolve_every_s=0.05) as one:
                stays = one.sequence()
                await stays.prefill(PROMPT)
                found = None  # it does not resolve for a while
                await lookups.again()
                assert len(one.members.serving) == 1
                found = [second.target]
                await until(one, lambda: [each.target for each in one.members.serving] == [second.target])
                await stays.decode(1)
                assert owner(stays).target == first.target, "it is served as long as its owner answers"
                async with one.sequence() as newcomer:
                    await newcomer.prefill(PROMPT)
                    assert owner(newcomer).target == second.target
                await owner(stays).end("as if it were")
                await stays.decode(1)
                assert owner(stays).target == second.target
                await stays.release()
                await until(one, lambda: len(one.members.there) == 1)


async def test_localhost_resolves() -> None:
    async with identity() as served, fleet_of(f"dns:///localhost:{served.target.rpartition(':')[2]}") as one:
        assert [each.info.instance_id for each in one.members.there] == [served.server.state.handles.instance_id]


async def test_a_file_of_targets_is_read_again_and_again(tmp_path: Path) -> None:
    async with identity() as first, identity() as second:
        path = tmp_path / "targets"
        path.write_text(f"# two\n{first.target}\n")
        with mock.patch("ferrum_rpc.client.fleet.members.lookup", lookups := Lookups(resolving.lookup)):
            async with fleet_of(f"file:{path}", resolve_every_s=0.05) as one:
                path.write_text(f"{first.target}\n\n {second.target}\n")
                await until(one, lambda: len(one.members.serving) == 2)
                path.unlink()
                await lookups.again()
                assert len(one.members.serving) == 2


async def test_one_executor_by_two_names_is_one_and_another_model_is_none() -> None:
    async with (
        identity() as served,
        identity(layers=3) as other,
        proxied(served.target) as proxy,
        fleet_of(served.target, proxy.target) as one,
        fleet_of(served.target) as two,
    ):
        two.members._listed("", [served.target, other.target])
        await waiting.until(lambda: one.members.troubles and two.members.troubles)
        assert len(one.members.there) == len(two.members.there) == 1
        assert "same executor" in next(iter(one.members.troubles.values())).message
        assert "it serves identity" in two.members.troubles[other.target].message


async def test_masks_are_registered_where_they_are_needed() -> None:
    async with fleet() as (one, _):
        mask = np.zeros(one.info.model.vocab_size, bool)
        mask[[17]] = True
        output = Greedy(mask=await one.register_token_mask(mask))
        sequences = [one.sequence() for _ in range(4)]
        answers = await one.forward([each.item(PROMPT, output) for each in sequences])
        assert [each.token for each in answers if isinstance(each, Answer)] == [17] * 4
        assert len({owner(each) for each in sequences}) == 2
        await one.release(sequences)


async def test_where_nobody_answers_it_says_why() -> None:
    async with Members(["127.0.0.1:1"]) as members:
        await waiting.until(lambda: bool(members.troubles))
        with pytest.raises(TransportError, match=r"no executor of 127.0.0.1:1 takes sequences.*refused"):
            await members.some(Deadline.after(0.0))
    with pytest.raises(TransportError, match=r"no executor of 127.0.0.1:1 takes sequences"):
        async with FleetClient(["127.0.0.1:1"], timeout_s=0.05):
            pass
    for targets in ((), ("dns:///nobody",), ("dns:///a:99999",), ("file:",)):
        with pytest.raises(InvalidRequest):
            FleetClient(targets)
