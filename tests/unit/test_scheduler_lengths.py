"""How long the next runs of a scheduler are, when they are sent (those of many requests together), and in which order
their answers are taken."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, cast

import pytest

from ferrum_rpc.client import Item, OutputSpec, Run, RunPace, Sequence
from ferrum_rpc.client.state import SequenceState
from ferrum_rpc.core import HandleRef, StepTiming
from ferrum_rpc.executor.v1 import forward_pb2
from ferrum_rpc.scheduler.counts import RunCounts
from ferrum_rpc.scheduler.policy import PlannedFeed, Pool
from ferrum_rpc.scheduler.request import Request
from ferrum_rpc.scheduler.runs import Flights, InFlight, SentFeed, in_step, next_due


@pytest.mark.parametrize("most", [1, 2, 3, 5, 31, 32, 64])
def test_runs_end_at_the_same_steps_wherever_they_begin(most: int) -> None:
    half = max(1, most // 2)
    for step in range(3 * most):
        length = in_step(step, most)
        assert most - half < length <= most
        assert (step + length) % half == 0
        assert in_step(step + length, most) > most - most % half - 1, "the next ones are as long as they can be"


def in_flight(item: Item) -> SentFeed:
    request = Request(0, (1, 2, 3), 100, answered=50.0)
    return SentFeed(PlannedFeed(request, 1), item, cast(Sequence, None), decodes=True, completes=True, known=4)


@pytest.mark.parametrize("trip_s", [0.0005, 0.01, 0.3])
@pytest.mark.parametrize("step_s", [0.0002, 0.004, 0.2])
def test_the_next_run_waits_for_others_while_its_executor_does_not_wait_for_it(trip_s: float, step_s: float) -> None:
    state, output = SequenceState(forward_pb2.CreateOptions()), OutputSpec()
    prompt = state.item(1, [1, 2, 3], output, None, Run(1))
    follower = state.item_behind(prompt, 2, [], output, run=Run(32), max_context=1000)
    pace = RunPace()
    pace.note(trip_s + 8 * step_s, StepTiming(1, 1, 1, 0.0, 8 * step_s), 8)
    due, half_over = next_due(in_flight(follower), pace), 50.0 + 16 * step_s
    assert due < half_over - 2 * trip_s
    assert due > half_over - 2 * trip_s - 0.01, "as many as can be share a frame"
    assert next_due(in_flight(prompt), pace) == 0.0, "it ends with the next step"
    assert next_due(in_flight(follower), RunPace()) == 0.0


def test_what_is_in_flight_takes_blocks_and_a_slot_of_each_sequence_that_it_makes() -> None:
    made, unborn = [cast(Any, SequenceState(forward_pb2.CreateOptions())) for _ in range(2)]
    made.handle = HandleRef(b"made", 4, 1)
    in_flight = InFlight()
    pool = Pool(free=10, total=20, block_size=4, slots=3)
    in_flight.sent(made, 4, 12)
    assert in_flight.free(pool) == replace(pool, free=8)
    in_flight.sent(unborn, 0, 3)
    in_flight.sent(unborn, 3, 4)
    assert in_flight.free(pool) == replace(pool, free=7, slots=2)
    assert in_flight.free(replace(pool, slots=0)).slots == 0
    trunk = Request(0, (1, 2, 3), 8, branches=(Request(1, (1, 2, 3, 4), 8), Request(2, (1, 2, 3, 4), 8)))
    assert in_flight.others(pool, [trunk], 0, 0).slots == 2


async def test_the_answer_of_a_follower_waits_for_that_of_the_item_before_it() -> None:
    answers = dict[Item, asyncio.Future[Any]]()

    class Port:
        def send(self, items: list[Item], run: RunCounts) -> asyncio.Future[Any]:
            return answers.setdefault(items[0], asyncio.get_running_loop().create_future())

    state, output, request = SequenceState(forward_pb2.CreateOptions()), OutputSpec(), Request(0, (1, 2, 3), 100)
    request.sequence = cast(Any, state)
    first = state.item(1, [1, 2, 3], output, None, Run(4))
    second = state.item_behind(first, 2, [], output, run=Run(4), max_context=1000)
    changed = asyncio.Event()
    flights = Flights(cast(Any, Port()), RunCounts(), InFlight(), changed)
    for item, count in ((first, 3), (second, 1)):
        flights.call([flights.sent(PlannedFeed(request, count), item, 4, 0)])
    for item, landed in ((second, []), (first, [first, second])):
        answers[item].set_result(None)
        await changed.wait()
        changed.clear()
        assert [flight.sent[0].item for flight in flights.land()] == landed
    assert not flights
