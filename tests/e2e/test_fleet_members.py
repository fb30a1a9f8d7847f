"""Who is one of a fleet's executors, by names and files too, and which of them gets a new sequence."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from unittest import mock

import pytest

from ferrum_rpc.client import PrefixEvents, PrefixIndex
from ferrum_rpc.client.fleet import Candidate, FleetClient, LongestPrefix, Members, certificate_host, resolving
from ferrum_rpc.client.retry import Deadline
from ferrum_rpc.errors import InvalidRequest, KvBlocksExhausted, TransportError
from tests.support import waiting
from tests.support.fleets import PROMPT, fleet, fleet_of, identity, owner, there_are, until
from tests.support.inside import name_targets
from tests.support.proxy import proxied


class Lookups:
    """Looks names up as ``lookup`` does, and counts it."""

    def __init__(self, lookup: Callable[[str], Awaitable[list[str]]]) -> None:
        self._lookup = lookup
        self._count = 0

    async def __call__(self, name: str) -> list[str]:
        try:
            return await self._lookup(name)
        finally:
            self._count += 1

    async def again(self) -> None:
        """Wait for one that has begun by now, if any, and another behind it."""
        before = self._count
        await waiting.until(lambda: self._count >= before + 2)


async def test_a_prompt_goes_where_its_prefix_is_until_that_executor_is_full() -> None:
    async with fleet() as (one, _):
        prompt = list(range(100, 180))
        async with one.sequence() as first:
            await first.prefill(prompt)
            there = owner(first)
            await waiting.until(lambda: there.index is not None and there.index.match(prompt) >= 76)
            await waiting.until(lambda: there.pressure.free_blocks < there.pressure.total_blocks)
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


@pytest.mark.parametrize(
    ("targets", "target", "expected"),
    [
        (["dns:///executors:50051"], "10.0.0.7:50051", "executors"),
        (["dns:///executors:50051"], "dns:///executors:50051", ""),
        (["gpu-7:50051", "dns:executors:50051"], "gpu-7:50051", ""),
        (["gpu-7:50051", "dns:executors:50051"], "10.0.0.7:50051", "executors"),
        (["dns:///[fd00::7]:50051"], "[fd00::7]:50051", "fd00::7"),
        (["file:targets"], "gpu-7:50051", ""),
    ],
)
def test_an_address_behind_a_name_has_the_certificate_of_the_name(targets, target, expected) -> None:
    assert certificate_host(targets, target) == expected


def candidate(target: str, **known: int) -> Candidate:
    facts = {"cached_tokens": 0, "free_blocks": 100, "total_blocks": 100, "queued_items": 0, "queued_tokens": 0} | known
    return Candidate(target=target, instance_id=target, block_size=4, max_batch_items=64, **facts)


@pytest.mark.parametrize(
    ("left", "right", "chosen"),
    [
        ({}, {}, "left"),
        ({}, {"cached_tokens": 20}, "right"),
        ({"free_blocks": 95}, {}, "right"),
        ({"own_sequences": 1}, {"free_blocks": 97}, "right"),
        ({"own_sequences": 1}, {"free_blocks": 95}, "left"),
        ({"own_sequences": 1, "cached_tokens": 4}, {}, "left"),
        ({"turn": 7}, {"turn": 6}, "right"),
        ({"turn": 7}, {"own_sequences": 1}, "left"),
        ({"queued_items": 3}, {}, "right"),
        ({}, {"cached_tokens": 20, "free_blocks": 40}, "left"),
        ({}, {"cached_tokens": 40, "free_blocks": 15, "queued_items": 40}, "left"),
        ({"cached_tokens": 16, "free_blocks": 5}, {"queued_items": 300}, "right"),
    ],
)
def test_the_longest_prefix_is_weighed_against_room_and_queue(left, right, chosen) -> None:
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

        async def lookup(name: str) -> list[str]:
            assert name == "dns:///executors:50051"
            if found is None:
                raise TransportError("it does not resolve")
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
                await owner(stays).end(TransportError("as if it were"))
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
                await there_are(one, 2)
                path.unlink()
                await lookups.again()
                assert len(one.members.serving) == 2


async def test_one_executor_by_two_names_is_one_and_another_model_is_none() -> None:
    async with (
        identity() as served,
        identity(layers=3) as other,
        proxied(served.target) as proxy,
        fleet_of(served.target, proxy.target, there=1) as one,
        fleet_of(served.target) as two,
    ):
        name_targets(two.members, served.target, other.target)
        await waiting.until(lambda: one.members.troubles and two.members.troubles)
        assert len(one.members.there) == len(two.members.there) == 1
        assert "same executor" in next(iter(one.members.troubles.values())).message
        assert "it serves identity" in two.members.troubles[other.target].message


async def test_where_nobody_answers_it_says_why() -> None:
    async with Members(["127.0.0.1:1"]) as members:
        await waiting.until(lambda: bool(members.troubles))
        with pytest.raises(TransportError, match=r"no executor of 127.0.0.1:1 takes sequences.*refused"):
            await members.some(Deadline.after(0.0))
    with pytest.raises(TransportError, match=r"no executor of 127.0.0.1:1 takes sequences"):
        async with FleetClient(["127.0.0.1:1"], timeout_s=0.05):
            pass
    for targets in ((), ("dns:///nobody",), ("dns:///a:99999",), ("file:",), ("localhost",), ("::1",)):
        with pytest.raises(InvalidRequest) as refusal:
            FleetClient(targets)
        assert refusal.value.field == "targets"


async def test_names_that_lead_nowhere_say_why(tmp_path: Path) -> None:
    path = tmp_path / "targets"
    for lines, words in (
        (None, "it cannot be read: No such file"),
        (b"# nobody\n", "it names no executor"),
        (b"\xff\n", "it is not a text file"),
        (b"localhost\n", "'localhost' is neither host:port"),
    ):
        if lines is not None:
            path.write_bytes(lines)
        with pytest.raises(TransportError, match=words):
            async with FleetClient(f"file:{path}", timeout_s=0.2):
                pass
    unknown = mock.patch.object(resolving.socket, "getaddrinfo", side_effect=OSError(-2, "Name not known"))
    with unknown, pytest.raises(TransportError, match=r"dns:///nobody:1: it does not resolve: Name not known"):
        async with FleetClient("dns:///nobody:1", timeout_s=0.2):
            pass
