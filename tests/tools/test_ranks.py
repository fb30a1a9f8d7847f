"""What `benchmarks.ranks` measures of steps that overlap: callers behind the engine's queue."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from benchmarks.cases import DECODE, LEAD_IN, PREFILL, SHAPES, Cell, write_checkpoint
from benchmarks.compare import Unsupported
from benchmarks.engines.inprocess import Inside
from benchmarks.engines.looped import Looped


async def test_callers_behind_the_queue_compute_what_one_does(tmp_path: Path) -> None:
    folder = str(write_checkpoint(tmp_path / "tiny", SHAPES["tiny"]))
    one, two = Cell(DECODE, 4, 8, most=4), Cell(DECODE, 4, 8, most=4, callers=2)
    assert [one.name, two.name] == ["decode b4 @8", "decode b2+b2 @8"]
    async with AsyncExitStack() as stack:
        inside = await stack.enter_async_context(Inside.open(folder, [one], 1))
        looped = await stack.enter_async_context(Looped.open(folder, [one, two], 1))
        rounds = []
        for player, cell in ((inside, one), (looped, one), (looped, two)):
            await player.prepare(cell)
            rounds.append(await player.round(cell, 0, 3))
        with pytest.raises(Unsupported):
            await looped.prepare(Cell(PREFILL, 1, 8))
        steps = looped._engine.counters.steps - 4  # a prefill each
    assert len(rounds[0].last) == 4 and all(each.last == rounds[0].last for each in rounds)
    assert all(len(each.step_s) == 3 and min(each.step_s) > 0 for each in rounds)
    assert LEAD_IN + 3 + LEAD_IN + 3 <= steps <= 3 * (LEAD_IN + 3)
