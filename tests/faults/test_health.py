"""What the health service does that no figure of R19 says."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ferrum_rpc.errors import Reason
from ferrum_rpc.executor.v1 import info_pb2
from ferrum_rpc.failpoints import Failpoints, parse_failpoints
from ferrum_rpc.service.health import HealthService
from ferrum_rpc.service.metrics import Metrics, registry_of
from ferrum_rpc.service.server import SERVICES
from ferrum_rpc.wire.info import LIVENESS
from tests.faults.health import NOT_SERVING, SERVING, Watcher
from tests.support.process import dial, serving
from tests.support.serving import serve_identity
from tests.support.waiting import until
from tests.support.wiring import decode, prefill, refused

LIMIT_S = 30.0


async def test_a_server_whose_device_hangs_ends_when_it_is_told_to() -> None:
    async with serving("--failpoints", "before_forward=hang", "--grace-s", "0.2") as server:
        async with dial(server.target) as client:
            call = asyncio.ensure_future(prefill(client, [1]))
            await server.event("failpoint_fired")
            server.signal(signal.SIGTERM)
            await server.ended(LIMIT_S)
            assert isinstance((await asyncio.gather(call, return_exceptions=True))[0], grpc.aio.AioRpcError)
        assert server.count("engine_abandoned") == 1


async def test_a_hang_is_one_state_everywhere_and_hides_a_drain() -> None:
    failpoints = Failpoints(parse_failpoints("before_forward=hang@2"))
    async with serve_identity(failpoints=failpoints) as served:
        server, health = served.server, served.health
        metrics = registry_of(Metrics(server.state, server.calls, server.steps))

        async def states() -> tuple[str, str, int, int]:
            """By GetStatus, by the metrics, and by health: of the whole server, and whether it lives."""
            status = await served.status()
            shown = (each for family in metrics.collect() for each in family.samples if each.value == 1)
            [metric] = [each.labels["state"] for each in shown if each.name == "ferrum_executor_state"]
            checks = [health.Check(health_pb2.HealthCheckRequest(service=name)) for name in ("", LIVENESS)]
            ready, live = [(await each).status for each in checks]
            return info_pb2.ExecutorState.Name(status.state).rpartition("_")[2].lower(), metric, ready, live

        assert await states() == ("serving", "serving", SERVING, SERVING)
        streams = [health.Watch(health_pb2.HealthCheckRequest(service=name)) for name in ("", LIVENESS, *SERVICES)]
        assert {(await each.read()).status for each in streams} == {SERVING}
        handle = await prefill(served, [1, 2])
        call = asyncio.ensure_future(decode(served, [3], handle))
        assert {(await each.read()).status for each in streams} == {NOT_SERVING}
        assert await states() == ("hung", "hung", NOT_SERVING, NOT_SERVING)
        server.drain(60.0)
        assert await states() == ("hung", "hung", NOT_SERVING, NOT_SERVING)
        await refused(prefill(served, [1]), Reason.DRAINING, grpc.StatusCode.UNAVAILABLE)
        failpoints.release()
        assert (await call).seq_len == 3
        await until(lambda: server.health.live)
        assert await states() == ("draining", "draining", NOT_SERVING, SERVING)
        await served.check()


@asynccontextmanager
async def board_alone() -> AsyncIterator[tuple[HealthService, Any, list[bool]]]:
    """A board that nobody but the test tells anything, a stub that asks it, and whether it is to say that it serves."""
    well = [True]
    board = HealthService(lambda: well[0], lambda: well[0], SERVICES)
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(board, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield board, health_pb2_grpc.HealthStub(channel), well
    await server.stop(0)


async def test_a_watcher_that_leaves_takes_nobody_along_and_one_that_comes_late_hears_the_present() -> None:
    async with board_alone() as (board, health, well):
        board.update()
        stays, leaves = Watcher(health), Watcher(health)
        await stays.until(SERVING)
        await leaves.until(SERVING)
        leaves.reading.cancel()
        await asyncio.gather(leaves.reading, return_exceptions=True)
        well[0] = False
        board.update()
        await stays.until(NOT_SERVING)
        await Watcher(health).until(NOT_SERVING)
        well[0] = True
        board.update()
        await stays.until(SERVING)
        assert stays.alarms() == 1


async def test_a_service_that_is_not_here_is_unknown() -> None:
    async with board_alone() as (_, health, _):
        request = health_pb2.HealthCheckRequest(service="nobody")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health.Check(request)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        unknown = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        assert (await health.Watch(request).read()).status == unknown


async def test_a_watch_does_not_hold_up_the_end_of_the_server() -> None:
    async with asyncio.timeout(LIMIT_S):
        async with serve_identity() as served:
            watcher = Watcher(served.health)
            await watcher.until(SERVING)
            await served.server.stop(grace_s=3600)
            await watcher.until(NOT_SERVING)
            await watcher.reading
