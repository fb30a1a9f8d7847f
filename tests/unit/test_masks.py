"""The table of token masks: what it holds of whom, what goes, and that the engine has what a step names."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from ferrum_rpc.core import ANYBODY, Caller, Sample
from ferrum_rpc.errors import InvalidRequest, QueueFull, StepFailed, TokenMaskUnknown
from ferrum_rpc.service.contents import ON_WAY
from ferrum_rpc.service.masks import MaskTable
from ferrum_rpc.service.quotas import Quotas
from ferrum_rpc.service.records import Resource
from ferrum_rpc.wire.masks import id_of, pack_mask
from tests.support.inside import owners
from tests.support.serving import LIMITS

VOCAB = 70


def words(number: int, vocab: int = VOCAB) -> bytes:
    return pack_mask(np.arange(vocab) % (number + 2) == 0)


class Engine:
    """What the engine has, changed by the commands in their order; ``hold`` keeps their answers back."""

    def __init__(self) -> None:
        self.masks: dict[bytes, bytes] = {}
        self.hold = False
        self.waiting: list = []
        self.commands = 0

    def submit(self, operation) -> None:
        self.commands += 1
        operation.run(self)
        self.waiting.append(operation)
        if not self.hold:
            self.answer()

    def change_masks(self, added, dropped) -> None:
        for each in dropped:
            del self.masks[each]
        for each, content in added:
            assert each not in self.masks
            self.masks[each] = content

    def answer(self, result=None) -> None:
        waiting, self.waiting = self.waiting, []
        for each in waiting:
            each.done(result)


class World:
    def __init__(self, most: int = 8, callers: tuple[str, ...] = ()) -> None:
        self.limits = replace(LIMITS, max_token_masks=most)
        self.quotas = Quotas(self.limits)
        self.engine = Engine()
        self.table = MaskTable(self.limits, self.engine.submit)
        self.accounts = {name: self.quotas.account(Caller(name, shares=True)) for name in callers}
        self.accounts[""] = self.quotas.account(ANYBODY)

    def register(self, number: int, caller: str = "") -> bytes:
        content = words(number)
        self.table.register(self.accounts[caller], id_of(content), content, VOCAB, "words")
        return id_of(content)

    def pin(self, *numbers: int, caller: str = ""):
        ids = tuple(id_of(words(number)) for number in numbers)
        kind = Sample(mask=ids[0]) if len(ids) == 1 else Sample(row_masks=ids)
        return self.table.pin(self.accounts[caller], kind, b"", VOCAB)

    def has(self, number: int, caller: str = "") -> bool:
        try:
            self.table.unpin(self.pin(number, caller=caller))  # and uses it
        except TokenMaskUnknown:
            return False
        return True

    def check(self) -> None:
        held = sum(account.held[Resource.TOKEN_MASKS] for account in self.accounts.values())
        assert held == len(self.table) <= self.limits.max_token_masks
        assert set(self.engine.masks) == {each for owner in owners(self.table) for each in owner.contents}
        for owner in owners(self.table):
            assert owner.contents and list(owner.idle) == [each for each in owner.idle if not owner.contents[each].uses]
            assert len(owner.idle) == sum(not mask.uses for mask in owner.contents.values())


def test_the_mask_that_was_used_least_recently_goes_and_registering_again_is_use() -> None:
    world = World(most=3)
    for number in range(3):
        world.register(number)
    world.register(0)
    assert world.has(1)
    world.register(3)
    assert [world.has(number) for number in (0, 1, 2, 3)] == [True, True, False, True]
    assert world.engine.commands == 4
    world.check()


def test_a_mask_in_use_does_not_go_and_where_none_can_the_refusal_says_when_to_come_back() -> None:
    world = World(most=2)
    for number in range(2):
        world.register(number)
    pinned = world.pin(0, 1, 0)
    with pytest.raises(QueueFull) as caught:
        world.register(2)
    assert caught.value.retry_after_s and caught.value.number("max_token_masks") == 2
    world.table.unpin(pinned)
    world.register(2)
    assert world.has(0) and not world.has(1)
    world.check()


def test_what_is_on_its_way_to_the_engine_is_bounded_and_may_go() -> None:
    world = World(most=2, callers=("a",))
    world.engine.hold = True
    for number in range(ON_WAY):
        world.register(number)
    with pytest.raises(QueueFull, match="on their way") as caught:
        world.register(100)
    assert caught.value.retry_after_s
    assert world.has(ON_WAY - 1) and not world.has(0)
    world.engine.answer()
    world.register(100)
    assert len(world.engine.waiting) == 1
    world.check()
    large = World(most=100, callers=("a", "b"))
    large.engine.hold = True
    for number in range(ON_WAY):  # more than a share of the table
        large.register(number, "a")
    with pytest.raises(QueueFull):
        large.register(100, "a")
    large.register(100, "b")
    large.check()


def test_a_mask_that_the_engine_could_not_take_is_unknown() -> None:
    world = World(callers=("a", "b"))
    world.engine.hold = True
    world.register(0, "a")
    world.register(0, "b")
    pinned = world.pin(0, caller="a")
    world.engine.masks.clear()
    world.engine.answer(StepFailed("no memory"))
    assert not world.has(0, "a") and not world.has(0, "b") and not len(world.table)
    world.table.unpin(pinned)
    world.engine.hold = False
    world.register(0, "a")
    assert world.has(0, "a")
    world.check()


def test_what_another_caller_registered_is_unknown_and_the_engine_has_it_once() -> None:
    world = World(callers=("a", "b"))
    world.register(0, "a")
    with pytest.raises(TokenMaskUnknown) as caught:
        world.pin(0, caller="b")
    with pytest.raises(TokenMaskUnknown) as never:
        world.pin(5, caller="b")
    mine, unknown = caught.value, never.value
    assert (mine.message, mine.field, [*mine.metadata]) == (unknown.message, unknown.field, [*unknown.metadata])
    world.register(0, "b")
    assert world.has(0, "b") and len(world.engine.masks) == 1 and len(world.table) == 2
    world.check()


def test_a_caller_takes_its_own_beyond_its_share_and_others_only_what_they_have_more() -> None:
    world = World(most=8, callers=("a", "b", "c"))
    for number in range(6):
        world.register(number, "a")
    assert [world.has(number, "a") for number in range(6)] == [False, False, True, True, True, True]
    for number in range(10, 14):
        world.register(number, "b")
    assert len(world.table) == 8 and all(world.has(number, "a") for number in range(2, 6))
    for number in range(20, 30):
        world.register(number, "c")
    held = {name: world.accounts[name].held[Resource.TOKEN_MASKS] for name in "abc"}
    assert sorted(held.values()) == [2, 3, 3]
    pinned = [world.pin(number, caller="c") for number in range(20, 30) if world.has(number, "c")]
    for number in range(10, 14):
        world.register(number, "b")
    assert world.accounts["c"].held[Resource.TOKEN_MASKS] == len(pinned) >= 2
    world.check()


def test_random_use_keeps_the_books_and_the_engine_in_step() -> None:
    rng, world = random.Random(3), World(most=12, callers=("a", "b", "c"))
    pinned: list = []
    for _ in range(4000):
        caller, number = rng.choice("abc"), rng.randrange(20)
        world.engine.hold = rng.random() < 0.3
        try:
            match rng.randrange(4):
                case 0:
                    world.register(number, caller)
                case 1:
                    found = world.pin(*[number] * rng.randrange(1, 4), caller=caller)
                    assert all(mask.id in world.engine.masks for mask in found)
                    pinned.append(found)
                case 2 if pinned:
                    world.table.unpin(pinned.pop(rng.randrange(len(pinned))))
                case 3:
                    world.engine.answer()
        except (TokenMaskUnknown, QueueFull):
            pass
        for found in pinned:
            assert all(mask.id in world.engine.masks for mask in found)
        world.check()


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 64, 70])
def test_words_of_another_width_and_masks_of_nothing_are_refused(vocab: int) -> None:
    table, account = World().table, World().accounts[""]

    def register(content: bytes) -> None:
        table.register(account, id_of(content), content, vocab, "words")

    width = -(-vocab // 32)
    for wrong in (0, width - 1, width + 1, 10 * width + 7):
        with pytest.raises(InvalidRequest) as caught:
            register(b"\xff" * 4 * wrong)
        assert caught.value.number("words") == width and caught.value.field == "words"
    beyond = np.zeros(width * 32, bool)
    beyond[vocab:] = True
    with pytest.raises(InvalidRequest, match="at least one token"):
        register(pack_mask(beyond))
    assert not len(table)
    beyond[vocab - 1] = True
    register(pack_mask(beyond))
    assert len(table) == 1


def test_packing_puts_bit_t_into_its_word() -> None:
    allowed = np.zeros(70, bool)
    allowed[[0, 33, 69]] = True
    packed = np.frombuffer(pack_mask(allowed), np.uint32)
    assert packed.tolist() == [1, 2, 32]
    assert pack_mask(packed) == pack_mask(packed.view(np.int32)) == packed.tobytes()
    for wrong in (np.zeros((2, 2), bool), np.zeros(0, bool), np.zeros(3, np.int64), [1, 2], "abc"):
        with pytest.raises(ValueError, match="mask"):
            pack_mask(wrong)
