"""Threads wait a moment awake, unless somebody said otherwise."""

from __future__ import annotations

import pytest

from ferrum_rpc.native.library import mapped_runtimes
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


def test_the_runtime_is_found_in_a_folder_with_spaces_in_its_name() -> None:
    maps = "\n".join(
        (
            "7f0d2a000000-7f0d2a021000 rw-p 00000000 00:00 0 ",
            "7f0d2b000000-7f0d2b008000 r--p 00000000 fe:00 1180  /my own/check out/torch.libs/libgomp-a34b.so.1.0.0",
            "7f0d2b008000-7f0d2b02c000 r-xp 00008000 fe:00 1180    /usr/lib/libomp.so",
            "7f0d2c000000-7f0d2c001000 r--p 00000000 fe:00 1181  /my own/check out/torch/libgomp-users.txt",
            "7f0d2d000000-7f0d2d001000 r--p 00000000 fe:00 1182  /gone/libgomp.so.1 (deleted)",
        )
    )
    assert mapped_runtimes(maps) == ["/my own/check out/torch.libs/libgomp-a34b.so.1.0.0", "/usr/lib/libomp.so"]
