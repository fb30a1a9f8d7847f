"""R8: a dead peer is noticed: by the client without any deadline, and by the server that holds its calls."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from ferrum_rpc.client import NEVER_RESEND, ExecutorClient
from ferrum_rpc.errors import TransportError
from tests.faults.figures import Figures, at_most, exactly
from tests.faults.sizes import Size
from tests.support.process import ServerProcess, dial, serving
from tests.support.proxy import TcpProxy, proxied

TIME_S: Final = 0.4
TIMEOUT_S: Final = 0.3
PROMISED_S: Final = 2 * (TIME_S + TIMEOUT_S) + 0.5
OPTIONS: Final = [
    ("grpc.keepalive_time_ms", round(TIME_S * 1e3)),
    ("grpc.keepalive_timeout_ms", round(TIMEOUT_S * 1e3)),
    ("grpc.http2.ping_timeout_ms", round(TIMEOUT_S * 1e3)),
    ("grpc.use_local_subchannel_pool", 1),
]
PATIENCE_S: Final = 20.0
WATCHERS: Final = 5


async def _client_notices(target: str, fall_silent: Callable[[], None]) -> float:
    """Seconds from the silence until a call without a deadline ends in `TransportError`; the patience where it never
    does."""
    async with ExecutorClient(
        target, timeout_s=None, channel_options=OPTIONS, resend=NEVER_RESEND, release_timeout_s=0.1
    ) as client:
        sequence = client.sequence()
        await sequence.prefill([1, 2, 3])
        fall_silent()
        began = time.monotonic()
        with suppress(TransportError, TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                await sequence.decode(1)
        return time.monotonic() - began


async def _server_notices(server: ServerProcess, proxy: TcpProxy) -> tuple[float, int]:
    """Seconds from the silence of clients with open calls until the server has closed their connections, and how many
    descriptors are left of them."""
    quiet = server.descriptors()
    async with dial(proxy.target) as client, dial(proxy.target) as other:
        watches = [each.health_watch() for each in (client, other) for _ in range(WATCHERS)]
        for watch in watches:
            await watch.read()
        held = server.descriptors()
        assert held > quiet, "the clients are not connected"
        proxy.weather.silent = True
        left, seconds = await server.settled_descriptors(quiet, PATIENCE_S)
        for watch in watches:
            watch.cancel()
    proxy.reset_all()
    proxy.weather.silent = False
    return seconds, max(0, left - quiet)


async def r8_a_dead_peer_is_noticed(size: Size) -> Figures:
    """Silence of the network, a reset, a stopped server process; and a client that the server hears no more."""
    flags = ("--keepalive-time-s", str(TIME_S), "--keepalive-timeout-s", str(TIMEOUT_S))
    silence, reset, stopped, server_side = [], [], [], []
    left = 0
    async with serving(*flags) as server, proxied(server.target) as proxy:
        unconnected = server.descriptors()
        for _ in range(size.silences):

            def fall_silent() -> None:
                proxy.weather.silent = True

            silence.append(await _client_notices(proxy.target, fall_silent))
            proxy.reset_all()
            proxy.weather.silent = False
            reset.append(await _client_notices(proxy.target, proxy.reset_all))
            stopped.append(await _client_notices(server.target, lambda: server.signal(signal.SIGSTOP)))
            server.signal(signal.SIGCONT)
            async with dial(server.target) as again:
                await again.status()
            await server.settled_descriptors(unconnected, PATIENCE_S)  # what the stop left behind is gone
            seconds, descriptors = await _server_notices(server, proxy)
            server_side.append(seconds)
            left += descriptors
        async with dial(server.target) as client:
            await client.status()
    return Figures(
        "A dead peer is noticed",
        at_most("client notices a silent network", max(silence), PROMISED_S, "s"),
        at_most("client notices a reset", max(reset), PROMISED_S, "s"),
        at_most("client notices a stopped server", max(stopped), PROMISED_S, "s"),
        at_most("server notices silent clients", max(server_side), PROMISED_S, "s"),
        exactly("their connections that stay open", left, 0),
        facts={"keepalive time s": TIME_S, "keepalive timeout s": TIMEOUT_S, "rounds": size.silences},
    )
