"""What a fleet reports of executors that differ: the state of the best one, and sums."""

from __future__ import annotations

from dataclasses import fields, replace

from ferrum_rpc.client import Counters, ExecutorState, ExecutorStatus, KvBlocks, MethodCount, Pressure
from ferrum_rpc.client.fleet.merged import merged_pressure, merged_status

LEFT = Pressure(3, 10, 16, queued_items=1, queued_tokens=5, sequences=2, running_items=1, free_slots=1, total_slots=4)
RIGHT = Pressure(4, 8, 32, queued_items=2, queued_tokens=7, sequences=3, running_items=0, free_slots=2, total_slots=6)


def status(state: ExecutorState, pressure: Pressure, number: int, *methods: MethodCount) -> ExecutorStatus:
    counters = Counters(**{each.name: number for each in fields(Counters)})
    blocks = KvBlocks(**{each.name: number for each in fields(KvBlocks)})
    return ExecutorStatus(state, pressure, counters, methods, float(number), number, number, number, blocks)


def test_blocks_of_unlike_sizes_are_counted_in_the_smallest() -> None:
    assert merged_pressure([LEFT]) == LEFT
    both = merged_pressure([LEFT, RIGHT])
    assert (both.free_blocks, both.total_blocks, both.block_size) == (3 + 8, 10 + 16, 16)
    assert (both.queued_items, both.queued_tokens, both.sequences, both.running_items) == (3, 12, 5, 1)
    assert (both.free_slots, both.total_slots) == (3, 10)


def test_the_state_is_that_of_the_best_and_numbers_are_summed() -> None:
    hung = status(ExecutorState.HUNG, LEFT, 2, MethodCount("Decode", 5, 1, 9, 2), MethodCount("Fork", 1, 0, 1, 0))
    serving = status(ExecutorState.SERVING, RIGHT, 3, MethodCount("Decode", 7, 2, 8, 0))
    both = merged_status([hung, serving])
    assert both == replace(
        status(
            ExecutorState.SERVING,
            merged_pressure([LEFT, RIGHT]),
            5,
            MethodCount("Decode", 12, 3, 17, 2),
            MethodCount("Fork", 1, 0, 1, 0),
        ),
        uptime_s=3.0,
    )
    assert merged_status([hung]).state is ExecutorState.HUNG
