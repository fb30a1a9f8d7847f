"""A TCP proxy that does what networks do: delays, silence, reset connections."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Final

LINGER_0: Final = struct.pack("ii", 1, 0)
"""SO_LINGER with no time: closing sends RST instead of FIN."""


@dataclass
class Weather:
    """What happens to the bytes, each way. Change it at any time."""

    delay_s: float = 0.0
    """Each chunk waits at most this long, evenly distributed; the order is kept."""
    resets: float = 0.0
    """Share of chunks that are lost with their connection."""
    silent: bool = False
    """Bytes are read and vanish; nothing is closed. New connections are accepted and get no answer."""


class _Pipe:
    """One relayed connection."""

    def __init__(self, client: asyncio.StreamWriter, server: asyncio.StreamWriter | None) -> None:
        self.client = client
        self.server = server

    def reset(self) -> None:
        for each in (self.client, self.server):
            if each is not None:
                peer: socket.socket = each.get_extra_info("socket")
                with suppress(OSError):
                    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_0)
                each.transport.abort()


class TcpProxy:
    """Relays TCP to ``upstream`` (``host:port``, settable: a restarted server may have another port)."""

    def __init__(self, upstream: str, seed: int = 0) -> None:
        self.upstream = upstream
        self.weather = Weather()
        self.target = ""
        self.connections = 0
        self.lost_connections = 0
        self._dice = random.Random(seed)
        self._pipes: set[_Pipe] = set()

    def reset_all(self) -> None:
        """Every connection ends with RST, both ways."""
        for pipe in list(self._pipes):
            pipe.reset()
            self.lost_connections += 1

    def lead_to(self, upstream: str) -> None:
        """As if another server had taken the place of the first."""
        self.upstream = upstream
        self.reset_all()

    def kill(self) -> None:
        """As if the server had died: from now on connections are refused."""
        self.lead_to("127.0.0.1:1")

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Relay a connection until it ends."""
        self.connections += 1
        pipe = _Pipe(writer, None)
        self._pipes.add(pipe)
        try:
            if self.weather.silent:
                while await reader.read(1 << 16):
                    pass
                return
            host, _, port = self.upstream.rpartition(":")
            up_reader, pipe.server = await asyncio.open_connection(host, int(port))
            async with asyncio.TaskGroup() as ways:
                ways.create_task(self._pump(reader, pipe.server, pipe))
                ways.create_task(self._pump(up_reader, writer, pipe))
        except (OSError, ExceptionGroup):
            pipe.reset()
        finally:
            self._pipes.discard(pipe)
            for each in (pipe.client, pipe.server):
                if each is not None:
                    each.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pipe: _Pipe) -> None:
        while data := await reader.read(1 << 16):
            weather = self.weather
            if weather.delay_s:
                await asyncio.sleep(self._dice.random() * weather.delay_s)
            if weather.silent:
                continue
            if weather.resets and self._dice.random() < weather.resets:
                self.lost_connections += 1
                pipe.reset()
                return
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof() and not writer.transport.is_closing():
            writer.write_eof()


@asynccontextmanager
async def proxied(upstream: str, seed: int = 0) -> AsyncIterator[TcpProxy]:
    """A proxy before a server; ``proxy.target`` is where clients dial."""
    proxy = TcpProxy(upstream, seed)
    tasks: set[asyncio.Task[None]] = set()

    def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(proxy.accept(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(accepted, "127.0.0.1", 0)
    proxy.target = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield proxy
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
