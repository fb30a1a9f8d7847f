"""R26, loop by loop."""

from __future__ import annotations

import pytest

from tests.failing import Injected, failing
from tests.faults.background import LOOPS, r26_a_background_task_never_dies_silently, survives
from tests.faults.figures import hold


@pytest.mark.parametrize("name", LOOPS)
async def test_an_exception_does_not_end_it_and_is_counted(name: str) -> None:
    assert await survives(name) == (True, True)


async def test_r26_a_background_task_never_dies_silently() -> None:
    await hold(r26_a_background_task_never_dies_silently)


class Loop:
    async def run(self) -> int:
        return 7


async def test_a_fault_that_is_over_leaves_a_coroutine_function_as_it_was() -> None:
    """Or R26 would try a loop that is never run again: its coroutine was never awaited, which is an error here."""
    with failing(Loop, "run"):
        with pytest.raises(Injected):
            await Loop().run()
        assert await Loop().run() == 7
