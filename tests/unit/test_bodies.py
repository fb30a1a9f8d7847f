"""Slots for request bodies: bounded in all and by connection, and a slow body gives way to those that wait."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from ferrum_rpc.core import ANYBODY, Caller
from ferrum_rpc.errors import InvalidRequest, QueueFull
from ferrum_rpc.service.guard import bodies as bodies_module
from ferrum_rpc.service.guard.bodies import Bodies


class Call:
    """A call of a connection, whose body comes when it is told to."""

    def __init__(self, bodies: Bodies, peer: str, caller: Caller = ANYBODY) -> None:
        self._peer = peer
        self.body: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.reading = asyncio.Event()
        self.task = asyncio.create_task(bodies.read(self, caller))  # type: ignore[arg-type]

    def peer(self) -> str:
        return self._peer

    async def read(self) -> Any:
        self.reading.set()
        return await self.body


async def settled() -> None:
    """Let whatever can run, run."""
    for _ in range(8):
        await asyncio.sleep(0)


async def read_all(body: bytes, *calls: Call) -> list[bytes]:
    """What each has read, once those have their ``body`` that had none."""
    for call in calls:
        if not call.body.done():
            call.body.set_result(body)
    return await asyncio.gather(*(call.task for call in calls))


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies_module, "TIMEOUT_S", 3600.0)


async def test_one_connection_has_its_share_and_the_others_have_theirs() -> None:
    bodies = Bodies(4, 2)
    mine = [Call(bodies, "a") for _ in range(5)]
    yours = [Call(bodies, "b") for _ in range(2)]
    await settled()
    assert [call.reading.is_set() for call in (*mine, *yours)] == [True, True, False, False, False, True, True]
    late = Call(bodies, "c")
    await settled()
    assert not late.reading.is_set() and bodies.under_way == 4
    mine[0].body.set_result(b"x")  # its connection waits first, and then the other one
    await settled()
    assert mine[2].reading.is_set() and not late.reading.is_set()
    mine[1].body.set_result(b"x")
    await settled()
    assert late.reading.is_set() and not mine[3].reading.is_set()
    assert await read_all(b"y", *mine, *yours, late) == [b"x", b"x", *[b"y"] * 6]
    assert bodies.under_way == 0
    await fresh(bodies, 4)


async def test_a_caller_who_goes_gives_its_slot_or_its_turn_back() -> None:
    bodies = Bodies(2, 2)
    calls = [Call(bodies, "a") for _ in range(5)]
    await settled()
    calls[2].task.cancel()  # while it waits
    calls[0].body.set_result(b"x")
    await asyncio.sleep(0)
    calls[3].task.cancel()  # perhaps just when it has got its slot
    calls[1].task.cancel()  # while it reads
    await settled()
    assert calls[4].reading.is_set() and bodies.under_way == 1
    calls[4].body.set_result(b"z")
    results = await asyncio.gather(*(call.task for call in calls), return_exceptions=True)
    assert [type(each) for each in results] == [bytes, *[asyncio.CancelledError] * 3, bytes]
    await fresh(bodies, 2)


async def test_a_slow_body_is_refused_when_others_wait_and_only_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies_module, "TIMEOUT_S", 0.0)
    bodies = Bodies(1, 1)
    slow = Call(bodies, "a")
    await settled()
    assert not slow.task.done()
    honest = Call(bodies, "b")
    with pytest.raises(QueueFull):
        await slow.task
    assert slow.task.cancelling() == 0
    await honest.reading.wait()
    honest.body.set_result(b"x")
    assert await honest.task == b"x"
    await fresh(bodies, 1)


async def test_a_body_that_has_come_is_not_late_however_long_the_loop_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop was busy for longer than the patience; what came meanwhile is noticed some turns later."""
    monkeypatch.setattr(bodies_module, "TIMEOUT_S", 0.0)
    bodies = Bodies(1, 1)
    first, second = Call(bodies, "a"), Call(bodies, "b")
    loop = asyncio.get_running_loop()
    await first.reading.wait()
    loop.call_soon(loop.call_soon, first.body.set_result, b"x")  # two turns from now
    assert await first.task == b"x"
    second.body.set_result(b"y")
    assert await second.task == b"y"


ALICE, BOB = Caller("alice", operator=False, shares=True), Caller("bob", operator=False, shares=True)


async def test_one_of_several_callers_has_its_share_however_many_connections_it_has(monkeypatch) -> None:
    bodies, timers = Bodies(4, 1, 2), list[Any]()
    monkeypatch.setattr(asyncio.get_running_loop(), "call_later", lambda delay, call: timers.append(call))
    many = [Call(bodies, f"a{number}", ALICE) for number in range(6)]
    await settled()
    assert [call.reading.is_set() for call in many] == [True, True, *[False] * 4]
    few = [Call(bodies, f"b{number}", BOB) for number in range(3)]
    await settled()
    assert [call.reading.is_set() for call in few] == [True, True, False]
    timers[0]()  # nobody has had its time
    many[0].body.set_result(b"")
    await settled()
    assert many[2].reading.is_set() and not few[2].reading.is_set(), "bob is at his share"
    few[0].body.set_result(b"")
    await settled()
    assert few[2].reading.is_set() and not many[3].reading.is_set()
    await read_all(b"", *many, *few)
    slots = bodies._slots
    assert not slots._held and not slots.waiting
    await fresh(bodies, 4)


async def test_who_waits_for_its_own_share_has_no_others_body_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies_module, "TIMEOUT_S", 0.0)
    bodies = Bodies(4, 1, 2)
    slow = Call(bodies, "b", BOB)
    first = [Call(bodies, f"a{number}", ALICE) for number in range(2)]
    await settled()
    waits = Call(bodies, "a2", ALICE)
    for call in first:
        with pytest.raises(QueueFull):
            await call.task
    await waits.reading.wait()
    assert not slow.task.done(), "it is slow, and in nobody's way"
    assert await read_all(b"x", slow, waits) == [b"x", b"x"]
    await fresh(bodies, 4)


async def test_a_call_without_a_body_is_refused() -> None:
    call = Call(Bodies(1, 1), "a")
    call.body.set_result(grpc.aio.EOF)
    with pytest.raises(InvalidRequest):
        await call.task


async def fresh(bodies: Bodies, slots: int) -> None:
    """Every slot is free again."""
    calls = [Call(bodies, f"fresh {index}") for index in range(slots)]
    await settled()
    assert bodies.under_way == slots
    await read_all(b"", *calls)
