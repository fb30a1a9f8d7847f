"""R26, loop by loop."""

from __future__ import annotations

import pytest

from tests.faults.background import LOOPS, r26_a_background_task_never_dies_silently, survives
from tests.faults.sizes import CI


@pytest.mark.parametrize("name", LOOPS)
async def test_an_exception_does_not_end_it_and_is_counted(name: str) -> None:
    assert await survives(name) == (True, True)


async def test_r26_a_background_task_never_dies_silently() -> None:
    (await r26_a_background_task_never_dies_silently(CI)).check()
