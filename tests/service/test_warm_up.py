"""The warm-up takes nobody's share, and nobody's refusal stops the start."""

from __future__ import annotations

import pytest

from ferrum_rpc.errors import QueueFull
from ferrum_rpc.serve import warm_up
from ferrum_rpc.service import control
from tests.serving import serve_identity
from tests.wiring import prefill


@pytest.mark.parametrize(
    "limits",
    [{"max_sequences": 5}, {"max_sequences_per_caller": 2}, {"max_blocks_per_caller": 2}, {"max_sequences": 1}],
)
async def test_it_counts_against_no_limit_and_no_quota(limits: dict[str, int]) -> None:
    async with serve_identity(**limits) as served:
        await prefill(served, [1, 2, 3])
        assert await control.warm_up(served.server.state, 8, 16) == 2
        assert served.server.state.pressure().sequences == 1
        await served.check()


async def test_a_start_goes_on_where_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: object) -> int:
        raise QueueFull("no room")

    monkeypatch.setattr(control, "warm_up", refuse)
    async with serve_identity() as served:
        await warm_up(served.server)
        await prefill(served, [1])
