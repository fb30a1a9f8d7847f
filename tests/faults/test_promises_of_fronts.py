"""Promises with a front between client and executor, at the size of CI."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.faults.figures import hold
from tests.faults.front_callers import r22_a_front_holds_nothing_of_the_dead, r30_no_caller_stops_a_front
from tests.faults.fronts import r15_a_front_leaks_nothing, r31_a_front_loses_no_token

MISSING = [each for each in ("smg", "smg_grpc_proto", "openai") if find_spec(each) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")


async def test_r15_a_front_leaks_nothing() -> None:
    await hold(r15_a_front_leaks_nothing)


async def test_r22_a_front_holds_nothing_of_the_dead() -> None:
    await hold(r22_a_front_holds_nothing_of_the_dead)


async def test_r30_no_caller_stops_a_front() -> None:
    await hold(r30_no_caller_stops_a_front)


async def test_r31_a_front_loses_no_token() -> None:
    await hold(r31_a_front_loses_no_token)
