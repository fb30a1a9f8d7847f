"""Promises about what a server process takes of the machine, and about neighbours, at the size of CI."""

from __future__ import annotations

import pytest

from tests.faults.figures import Promise, hold
from tests.faults.promises import UNDER_LOAD


@pytest.mark.parametrize("promise", UNDER_LOAD, ids=lambda each: each.__name__)
async def test_it_holds(promise: Promise) -> None:
    await hold(promise)
