"""Independent callers meet in one forward pass, and the event loop never waits for the device."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.serving import Gate, serve_identity
from tests.wiring import item, pb, prefill, until

CALLERS = 64


async def test_64_independent_unary_decoders_take_far_fewer_than_64_steps_a_round() -> None:
    # 128 layers: a step of some milliseconds, as the steps of real models are.
    async with serve_identity(kv_blocks=CALLERS * 4, layers=128) as served:
        handles = [await prefill(served, [1, index]) for index in range(CALLERS)]
        rounds = 10
        before = served.server.state.engine.counters.steps

        async def scheduler(handle: Any) -> None:
            for _ in range(rounds):
                answer = await served.executor.Decode(pb.DecodeRequest(item=item([7], handle)))
                handle = answer.output.handle
            assert handle.seq_len == 2 + rounds

        await asyncio.gather(*(scheduler(handle) for handle in handles))
        steps = served.server.state.engine.counters.steps - before
        assert steps <= rounds * CALLERS / 4, f"{steps} steps for {rounds} rounds of {CALLERS} callers"
        await served.check()


async def test_what_piles_up_during_a_step_is_the_next_step() -> None:
    gate = Gate("forward")
    async with serve_identity(stage=gate) as served:
        handles = [await prefill(served, [1, index]) for index in range(8)]
        held = await gate.hold(served.executor.Prefill(pb.PrefillRequest(item=item([1]))))
        waiting = [
            asyncio.ensure_future(served.executor.Decode(pb.DecodeRequest(item=item([7], handle))))
            for handle in handles
        ]
        await until(lambda: served.server.state.engine.queued_items == len(handles))
        pressure = (await served.executor.GetStatus(pb.GetStatusRequest())).pressure
        assert (pressure.queued_items, pressure.queued_tokens) == (8, 8)
        gate.open()
        timings = [(await each).timing for each in waiting]
        first = (await held).timing.step
        assert {timing.step for timing in timings} == {first + 1}
        assert {timing.step_sequences for timing in timings} == {8}


async def test_a_batch_is_never_split_when_it_does_not_fit_beside_others() -> None:
    gate = Gate("forward")
    async with serve_identity(stage=gate, max_batch_tokens=16) as served:
        held = await gate.hold(served.executor.Prefill(pb.PrefillRequest(item=item([1]))))
        batch = pb.UnifiedForwardRequest(items=[item([1] * 5), item([2] * 5)])
        waiting = []
        for count in range(1, 4):
            waiting.append(asyncio.ensure_future(served.executor.UnifiedForward(batch)))
            await until(lambda count=count: served.server.state.engine.queued_items == 2 * count)
        gate.open()
        await held
        answers = [await each for each in waiting]
        assert [answer.timing.step for answer in answers] == [2, 3, 4]
        assert {answer.timing.step_sequences for answer in answers} == {2}
