"""What R16 does not measure; and that its scheduler sees what is wrong."""

from __future__ import annotations

import random
from typing import Any

import pytest

from ferrum_rpc.failpoints import Failpoints, parse_failpoints
from tests.faults.scripted_client import Counts, ScriptedClient
from tests.support.inside import pool_of
from tests.support.process import Dialled
from tests.support.serving import serve_identity
from tests.support.wiring import prefill


async def test_sequences_that_nobody_owns_any_more_are_freed_though_their_release_fails_at_first() -> None:
    failpoints = Failpoints(parse_failpoints("release=error@1;release=oom@2"))
    async with serve_identity(failpoints=failpoints) as served:
        for _ in range(3):
            await prefill(served, [1, 2, 3])
        assert (await served.reset()).released_sequences == 3
        await served.check()
        cache = served.runner.cache_state()
        assert (cache.sequences, cache.free_blocks) == (0, cache.total_blocks)
    assert failpoints.fired == {"release": 2}


@pytest.mark.parametrize("broken", ["is quiet", "loses a block", "feeds twice"])
async def test_the_scheduler_notices_a_server_that(broken: str) -> None:
    def stage(name: str) -> None:
        if name == "commit" and broken == "loses a block" and not lost:
            lost.append(pool_of(runner().kv).allocate(1))
            raise RuntimeError("a failed step that keeps a block")
        if name == "truncate" and broken == "feeds twice":
            for keys in runner().store.keys:
                keys.mul_(1.01)

    lost: list[object] = []
    counts = Counts()
    async with serve_identity(positional=True, kv_blocks=64, stage=stage) as served:

        def runner() -> Any:
            return served.runner

        await ScriptedClient(Dialled(served.channel), [], random.Random(0), counts).script()
    if broken == "is quiet":
        assert counts.rows == 20 and not counts.wrong and not counts.refusals
    else:
        assert counts.wrong
