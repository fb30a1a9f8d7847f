"""Events of prefix caches for the router: blocks with their tokens, parents first, of several executors as of one."""

from __future__ import annotations

import asyncio
import pickle
import random
from typing import Any

import pytest

from ferrum_rpc.client import PrefixEvents, PrefixIndex

blocks = pytest.importorskip("ferrum_rpc.fronts.blocks", reason="smg-grpc-proto is not installed")

SIZE = 4
INDEX = PrefixIndex(b"f" * 32, SIZE)
TEXT = list(range(100, 118))  # four blocks, and what is behind them
HASHES = list(INDEX.hashes(TEXT))


def events(*changes: tuple[bytes, bool], anew: bool = False) -> PrefixEvents:
    return PrefixEvents(1, "i", changes, anew, False)


def stored(*hashes: bytes) -> PrefixEvents:
    return events(*((each, True) for each in hashes))


def removed(*hashes: bytes) -> PrefixEvents:
    return events(*((each, False) for each in hashes))


class Subscriber:
    """What a router knows: the blocks, whose parents it must know."""

    def __init__(self, report: Any) -> None:
        self._opened = report.subscribed()
        self._queue = self._opened.__enter__()
        self.there: dict[int, tuple[int | None, list[int]]] = {}

    def read(self) -> dict[int, tuple[int | None, list[int]]]:
        while not self._queue.empty():
            for event in self._queue.get_nowait():
                match event.WhichOneof("data"):
                    case "cleared":
                        self.there.clear()
                    case "stored":
                        parent = event.stored.parent_block_hash if event.stored.HasField("parent_block_hash") else None
                        assert parent is None or parent in self.there
                        for block in event.stored.blocks:
                            assert block.block_size == SIZE == len(block.token_ids)
                            assert block.block_hash not in self.there
                            self.there[block.block_hash] = (parent, list(block.token_ids))
                    case "removed":
                        for each in event.removed.block_hashes:
                            del self.there[each]
        return self.there


def numbers(*hashes: bytes) -> set[int]:
    return {int.from_bytes(each[:8], "big", signed=True) for each in hashes}


def test_a_block_is_reported_with_its_tokens_once_an_executor_has_it() -> None:
    report = blocks.BlockReport()
    router = Subscriber(report)
    report.learn(INDEX, TEXT)
    assert router.read() == {}
    report.apply("one", stored(*HASHES[:2]))
    first, second = (blocks.number_of(each) for each in HASHES[:2])
    assert router.read() == {first: (None, TEXT[:4]), second: (first, TEXT[4:8])}


def test_a_block_whose_tokens_or_parent_come_later_is_reported_then() -> None:
    report = blocks.BlockReport()
    router = Subscriber(report)
    report.apply("one", stored(HASHES[2], HASHES[1]))
    report.learn(INDEX, TEXT)
    assert router.read() == {}
    report.apply("one", stored(HASHES[0]))
    assert router.read().keys() == numbers(*HASHES[:3])


def test_a_block_of_two_executors_is_there_until_both_have_lost_it() -> None:
    report = blocks.BlockReport()
    report.learn(INDEX, TEXT)
    router = Subscriber(report)
    report.apply("one", stored(*HASHES))
    report.apply("two", stored(*HASHES[:2]))
    report.apply("one", removed(*reversed(HASHES)))
    assert router.read().keys() == numbers(*HASHES[:2])
    report.apply("one", stored(HASHES[2]))
    report.forget("two")
    assert router.read().keys() == numbers(HASHES[2]) or router.read() == {}
    report.forget("one")
    assert router.read() == {}


def test_a_new_beginning_replaces_what_an_executor_had() -> None:
    report = blocks.BlockReport()
    report.learn(INDEX, TEXT)
    router = Subscriber(report)
    report.apply("one", stored(*HASHES))
    report.apply("one", events((HASHES[0], True), anew=True))
    assert router.read().keys() == numbers(HASHES[0])


def test_a_late_subscriber_begins_with_what_is_there_parents_first() -> None:
    report = blocks.BlockReport()
    for number in range(300):
        report.learn(INDEX, [number, *TEXT])
        report.apply("one", stored(*INDEX.hashes([number, *TEXT])))
    early, late = Subscriber(report), Subscriber(report)
    assert len(early.read()) == 1200
    assert late.read() == early.there
    report.apply("one", removed(HASHES[0], *INDEX.hashes([0, *TEXT])))
    assert late.read() == early.read()
    assert len(late.there) == 1196


def test_random_changes_leave_the_router_with_what_the_executors_have() -> None:
    dice, report = random.Random(3), blocks.BlockReport()
    texts = [[number // 3, *TEXT, number] for number in range(12)]
    known, have = set[bytes](), {name: set[bytes]() for name in ("one", "two")}
    router = Subscriber(report)
    for _ in range(3000):
        text = dice.choice(texts)
        hashes = list(INDEX.hashes(text))
        name = dice.choice(list(have))
        match dice.randrange(4):
            case 0:
                report.learn(INDEX, text)
                known |= set(hashes)
            case 1:
                new = hashes[: dice.randint(1, 4)]
                report.apply(name, stored(*new))
                have[name] |= set(new)
            case 2:
                gone = [each for each in hashes[dice.randrange(4) :] if each in have[name]]
                report.apply(name, removed(*reversed(gone)))
                have[name] -= set(gone)
            case 3 if dice.random() < 0.05:
                report.forget(name)
                have[name].clear()
        # without its parent a block may stay unreported, but never be reported while no executor has it
        there = have["one"] | have["two"]
        assert router.read().keys() <= numbers(*(there & known))
    for name in have:
        report.apply(name, events(*((each, True) for text in texts for each in INDEX.hashes(text)), anew=True))
    for text in texts:
        report.learn(INDEX, text)
    assert router.read().keys() == numbers(*(each for text in texts for each in INDEX.hashes(text)))


async def test_messages_are_numbered_and_a_slow_subscriber_is_ended() -> None:
    report = blocks.BlockReport()
    report.learn(INDEX, TEXT)
    batches = report.batches()
    first = await anext(batches)
    assert (first.sequence_number, first.events[0].WhichOneof("data"), first.events[0].event_id) == (1, "cleared", 1)
    report.apply("one", stored(*HASHES[:2]))
    second = await anext(batches)
    assert [each.event_id for each in second.events] == [2, 3]
    assert second.sequence_number == 2
    for _ in range(blocks.UNREAD_BATCHES):
        report.apply("one", removed(HASHES[1]))
        report.apply("one", stored(HASHES[1]))
    with pytest.raises(blocks.SlowSubscriber):
        async with asyncio.timeout(20):
            async for _ in batches:
                pass


def test_the_tokens_of_so_many_blocks_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "KNOWN_BLOCKS", 8)
    report = blocks.BlockReport()
    router = Subscriber(report)
    report.learn(INDEX, TEXT)
    for number in range(2):
        report.learn(INDEX, [number, *TEXT])
    report.apply("one", stored(*HASHES))  # the oldest, which are not known any more
    report.apply("one", stored(*INDEX.hashes([1, *TEXT])))
    assert router.read().keys() == numbers(*INDEX.hashes([1, *TEXT]))

    report, sizes = blocks.BlockReport(), []
    for number in range(20):
        report.learn(INDEX, [number, *TEXT])
        sizes.append(len(pickle.dumps(report)))
    assert max(sizes) <= 1.01 * sizes[1], "two texts have eight blocks"
