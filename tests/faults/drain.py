"""R5: a drain loses nothing."""

from __future__ import annotations

import asyncio
import signal
import time
from dataclasses import dataclass, field
from typing import Final

import grpc
from grpc_health.v1 import health_pb2

from ferrum_rpc.errors import Reason
from ferrum_rpc.wire.status import error_from_rpc
from tests.faults.figures import Figures, at_least, at_most, exactly
from tests.faults.sizes import Size
from tests.support.process import Dialled, ServerProcess, dialled
from tests.support.raw_session import raw_session
from tests.support.wiring import decode, item, prefill, release

OWNERS: Final = 6
LAME_DUCK_S: Final = 0.4
"""For how long the owners go on after the signal."""
GRACE_S: Final = 20.0
NOT_SERVING_S: Final = 0.1
SECOND_SIGNAL_S: Final = 1.0


@dataclass
class Seen:
    """What the clients of draining servers saw."""

    not_serving_s: list[float] = field(default_factory=list)
    in_flight: int = 0
    failed: list[str] = field(default_factory=list)
    served: int = 0
    """Steps of owned sequences that began after the signal."""
    refused: int = 0
    refused_wrongly: list[str] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)


class Drained:
    """One server under load, from before its signal to its end."""

    def __init__(self, server: ServerProcess, client: Dialled, seen: Seen) -> None:
        self._server = server
        self._client = client
        self._seen = seen
        self._signalled = float("inf")
        self._loaded = 0
        self._asking: asyncio.Future[None] | None = None

    async def run(self) -> None:
        watch = self._client.health_watch()
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        load = [asyncio.ensure_future(each) for each in (*(self._owner() for _ in range(OWNERS)), self._session())]
        self._asking = asyncio.ensure_future(self._newcomer())
        while self._loaded < OWNERS + 1:  # noqa: ASYNC110 - the load tells by counting
            await asyncio.sleep(0.005)
        self._server.signal(signal.SIGTERM)
        self._signalled = time.monotonic()
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        self._seen.not_serving_s.append(time.monotonic() - self._signalled)
        watch.cancel()
        await asyncio.gather(*load, self._asking)
        self._seen.statuses.append(await self._server.ended(GRACE_S + 10))

    def _time_is_over(self) -> bool:
        """Whether owners may leave: not while somebody asks for more, or the server would end in the middle of it."""
        return self._asking is not None and self._asking.done()

    def _ended(self, began: float) -> None:
        if began < self._signalled <= time.monotonic():
            self._seen.in_flight += 1
        elif began >= self._signalled:
            self._seen.served += 1

    async def _owner(self) -> None:
        try:
            handle = await prefill(self._client, [1, 2, 3])
            self._loaded += 1
            while not self._time_is_over():
                began = time.monotonic()
                handle = await decode(self._client, [4], handle, truncate_to=3)
                self._ended(began)
            await release(self._client, handle)
        except grpc.aio.AioRpcError as error:
            self._seen.failed.append(f"{error.code().name} {error.details()}")

    async def _session(self) -> None:
        try:
            async with raw_session(self._client.executor) as stream:
                [result] = await stream.step(item([1, 2, 3]))
                self._loaded += 1
                while not self._time_is_over():
                    began = time.monotonic()
                    results = await stream.step(item([4], result.output.handle, truncate_to=3))
                    if not results or not results[0].HasField("output"):
                        self._seen.failed.append(str(results)[:200])
                        return
                    [result] = results
                    self._ended(began)
                await stream.close()
        except (asyncio.CancelledError, grpc.aio.AioRpcError) as error:
            self._seen.failed.append(f"session: {error!r}")

    async def _newcomer(self) -> None:
        """Asks for a new sequence, again and again; what is refused before the signal is refused wrongly."""
        while time.monotonic() < self._signalled + LAME_DUCK_S:
            try:
                await release(self._client, await prefill(self._client, [5]))
            except grpc.aio.AioRpcError as failure:
                error = error_from_rpc(failure)
                right = (
                    failure.code() is grpc.StatusCode.UNAVAILABLE
                    and error.reason is Reason.DRAINING
                    and error.retry_after_s
                )
                if self._signalled > time.monotonic() or not right:
                    self._seen.refused_wrongly.append(f"{failure.code().name} {failure.details()}")
                self._seen.refused += 1
            await asyncio.sleep(0.01)


async def _second_signal() -> float:
    """Seconds from a second SIGTERM to the end of a server that still owns a sequence."""
    async with dialled("--grace-s", "60") as (server, client):
        await prefill(client, [1])
        server.signal(signal.SIGTERM)
        await server.event("draining")
        began = time.monotonic()
        server.signal(signal.SIGTERM)
        await server.ended(30)
        return time.monotonic() - began


async def r5_a_drain_loses_nothing(size: Size) -> Figures:
    """SIGTERM under load, many times over."""
    seen = Seen()
    for _ in range(size.drains):
        options = (("grpc.enable_retries", 0),)
        async with dialled("--grace-s", str(GRACE_S), options=options) as (server, client):
            await Drained(server, client, seen).run()
    second_s = max([await _second_signal() for _ in range(max(1, size.drains // 10))])
    return Figures(
        "A drain loses nothing",
        at_most("from SIGTERM to NOT_SERVING in a watch", max(seen.not_serving_s), NOT_SERVING_S, "s"),
        at_least("calls in flight at the signal", seen.in_flight, size.drains),
        exactly("calls of owners that failed", len(seen.failed), 0),
        at_least("steps of owned sequences served after the signal", seen.served, size.drains),
        at_least("new sequences refused", seen.refused, size.drains),
        exactly("refused other than UNAVAILABLE, DRAINING, RetryInfo", len(seen.refused_wrongly), 0),
        exactly("ends with status 0", seen.statuses.count(0), size.drains),
        at_most("from a second SIGTERM to the end", second_s, SECOND_SIGNAL_S, "s"),
        facts={"drains": size.drains, "failed": seen.failed[:3], "refused wrongly": seen.refused_wrongly[:3]},
    )
