"""Promises that servers of this process can be held to, at the size of CI. `make soak` tries harder."""

from __future__ import annotations

import pytest

from tests.faults.figures import Promise, hold
from tests.faults.promises import IN_PROCESS


@pytest.mark.parametrize("promise", IN_PROCESS, ids=lambda each: each.__name__)
async def test_it_holds(promise: Promise) -> None:
    await hold(promise)
