"""A hostile HTTP/2 connection: calls that announce a message and never end it, as fast as the server's windows let.

Frames are made with hyperframe and hpack: a client library would send the whole message or none of it.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from hyperframe.frame import DataFrame, Frame, HeadersFrame, PingFrame, RstStreamFrame, SettingsFrame, WindowUpdateFrame

from tests.faults.abuser import FRAME_BYTES, PREFACE, headers

WINDOW: Final = 65_535
INITIAL_WINDOW: Final = 4
"""The setting's number."""


@dataclass(slots=True)
class Body:
    """What is still to be sent of a call's message, and how much of it now."""

    left: int
    window: int
    begun: bool = False


class SlowBodies:
    """One connection with so many ``streams`` to ``path``, each with all but the last byte of a message of ``size``. A
    stream that the server ends is opened again."""

    def __init__(
        self, host: str, port: int, path: str, streams: int, size: int, *, metadata: Iterable[tuple[str, str]] = ()
    ) -> None:
        self._host, self._port = host, port
        self._streams, self._size = streams, size
        self._window, self._initial = WINDOW, WINDOW
        self.open: dict[int, Body] = {}
        self._next = 1
        self._headers = headers(path, *metadata)

    async def run(self) -> None:
        """Until it is cancelled, or the server has had enough."""
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            writer.write(PREFACE + SettingsFrame(0).serialize())
            while True:
                writer.write(self._more())
                await writer.drain()
                head = await reader.readexactly(9)
                frame, length = Frame.parse_frame_header(memoryview(head))
                frame.parse_body(memoryview(await reader.readexactly(length)))
                writer.write(self._heard(frame))
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.transport.abort()

    def _more(self) -> bytes:
        """What may be sent now."""
        out = []
        while len(self.open) < self._streams:
            out.append(HeadersFrame(self._next, data=self._headers, flags=["END_HEADERS"]).serialize())
            self.open[self._next] = Body(self._size - 1, self._initial)
            self._next += 2
        for stream, body in self.open.items():
            while (count := min(body.left, body.window - 5, self._window - 5, FRAME_BYTES - 5)) > 0:
                prefix = b"" if body.begun else b"\0" + struct.pack(">I", self._size)
                data = prefix + bytes(count)
                out.append(DataFrame(stream, data=data).serialize())
                body.begun = True
                body.left -= count
                body.window -= len(data)
                self._window -= len(data)
        return b"".join(out)

    def _heard(self, frame: Frame) -> bytes:
        match frame:
            case SettingsFrame() if "ACK" not in frame.flags:
                initial = frame.settings.get(INITIAL_WINDOW, self._initial)
                for body in self.open.values():
                    body.window += initial - self._initial
                self._initial = initial
                return SettingsFrame(0, flags=["ACK"]).serialize()
            case WindowUpdateFrame(stream_id=0):
                self._window += frame.window_increment
            case WindowUpdateFrame() if frame.stream_id in self.open:
                self.open[frame.stream_id].window += frame.window_increment
            case PingFrame() if "ACK" not in frame.flags:
                return PingFrame(0, opaque_data=frame.opaque_data, flags=["ACK"]).serialize()
            case RstStreamFrame():
                self.open.pop(frame.stream_id, None)
            case HeadersFrame() if "END_STREAM" in frame.flags and self.open.pop(frame.stream_id, None):
                return RstStreamFrame(frame.stream_id, error_code=8).serialize()
            case _:
                pass
        return b""
