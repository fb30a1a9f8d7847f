"""R16 at the size of CI; and that its scheduler sees what is wrong."""

from __future__ import annotations

import random
from typing import Any

import grpc
import pytest

from ferrum_rpc.errors import Reason
from ferrum_rpc.executor.v1 import executor_control_pb2
from ferrum_rpc.failpoints import Failpoints, parse_failpoints
from tests.faults.crash_points import r16_a_crash_is_survivable
from tests.faults.figures import hold
from tests.faults.process import Dialled
from tests.faults.scripted_client import Counts, ScriptedClient
from tests.serving import Served, serve_identity
from tests.wiring import item, pb, prefill, refused


async def test_r16_a_crash_at_any_point_is_survivable() -> None:
    await hold(r16_a_crash_is_survivable)


async def run_script(served: Served, counts: Counts) -> None:
    await ScriptedClient(Dialled(served.channel), [], random.Random(0), counts).script()


async def test_a_quiet_script_has_no_violation() -> None:
    counts = Counts()
    async with serve_identity(positional=True, kv_blocks=64) as served:
        await run_script(served, counts)
    assert counts.rows == 20 and not counts.wrong and not counts.refusals


async def test_sequences_that_nobody_owns_any_more_are_freed_though_their_release_fails_at_first() -> None:
    failpoints = Failpoints(parse_failpoints("release=error@1;release=oom@2"))
    async with serve_identity(failpoints=failpoints) as served:
        for _ in range(3):
            await prefill(served, [1, 2, 3])
        assert (await served.control.Reset(executor_control_pb2.ResetRequest())).released_sequences == 3
        await served.check()
        cache = served.runner.cache_state()
        assert (cache.sequences, cache.free_blocks) == (0, cache.total_blocks)
    assert failpoints.fired == {"release": 2}


async def test_an_answer_that_is_lost_after_the_commit_is_replayed_to_whoever_asks_again() -> None:
    failpoints = Failpoints(parse_failpoints("before_reply=error@2"))
    async with serve_identity(failpoints=failpoints) as served:
        handle = await prefill(served, [1, 2, 3])
        request = pb.DecodeRequest(item=item([4], handle, request_id="once"))
        await refused(served.executor.Decode(request), Reason.INTERNAL_ERROR, grpc.StatusCode.INTERNAL)
        output = (await served.executor.Decode(request)).output
        assert output.replayed and output.handle.seq_len == 4
        await served.check()


@pytest.mark.parametrize("broken", ["loses a block", "feeds twice"])
async def test_the_scheduler_notices_a_server_that(broken: str) -> None:
    def stage(name: str) -> None:
        if name == "commit" and broken == "loses a block" and not lost:
            lost.append(runner().kv._pool.allocate(1))
            raise RuntimeError("a failed step that keeps a block")
        if name == "truncate" and broken == "feeds twice":
            for keys in runner().store.keys:
                keys.mul_(1.01)

    lost: list[object] = []
    counts = Counts()
    async with serve_identity(positional=True, kv_blocks=64, stage=stage) as served:

        def runner() -> Any:
            return served.runner

        await run_script(served, counts)
    assert counts.wrong
