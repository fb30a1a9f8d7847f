"""Promises that need a server process to kill, stop and drain, at the size of CI."""

from __future__ import annotations

import pytest

from tests.faults.exactly_once import r2_under_packet_loss
from tests.faults.figures import Promise, hold
from tests.faults.promises import OF_PROCESSES
from tests.support.netns import missing


@pytest.mark.parametrize("promise", OF_PROCESSES, ids=lambda each: each.__name__)
async def test_it_holds(promise: Promise) -> None:
    await hold(promise)


@pytest.mark.root
@pytest.mark.skipif(missing() is not None, reason=str(missing()))
async def test_r2_under_packet_loss() -> None:
    await hold(r2_under_packet_loss)
