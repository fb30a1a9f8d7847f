"""Threads wait a moment awake, unless somebody said otherwise."""

from __future__ import annotations

import pytest

from ferrum_rpc.openmp import SPINS, wait_briefly, waits


def test_nobody_said_anything():
    environment: dict[str, str] = {}
    assert waits(environment) == "libgomp's default"
    wait_briefly(environment)
    assert environment == {"GOMP_SPINCOUNT": str(SPINS)}
    assert str(SPINS) in waits(environment)


@pytest.mark.parametrize("said", [{"OMP_WAIT_POLICY": "ACTIVE"}, {"GOMP_SPINCOUNT": "0"}], ids=str)
def test_somebody_did(said):
    environment = dict(said)
    wait_briefly(environment)
    assert environment == said
