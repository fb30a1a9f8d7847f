"""Whether a call failed because one side speaks TLS and the other does not.

gRPC does not say so. To a client without TLS a port with TLS closes the connection, as a process does that ends: so the
port is asked, once, with the first message of a TLS handshake. A client with TLS reads the other case in OpenSSL's
error: what came back is no TLS record.
"""

from __future__ import annotations

import asyncio
import re
from contextlib import suppress
from typing import Final
from urllib.parse import unquote

from ferrum_rpc.client.retry import Deadline
from ferrum_rpc.errors import ExecutorError, TransportError

METADATA: Final = "tls"
"""Set in the metadata of a `TransportError` to one of `HINTS`."""

HINTS: Final = {
    "expected": "the port expects TLS and this client has none: pass credentials=tls(...)",
    "absent": "the port has no TLS and this client asks for it: leave out credentials",
}

ANSWERS_WITHIN_S: Final = 1.0
_CLOSED: Final = re.compile(
    r"failed to connect .*\bipv[46]:(?P<host>\S+):(?P<port>\d+): .*(closed|reset by peer)$", re.I
)
_NO_TLS: Final = "WRONG_VERSION_NUMBER"
_RECORDS: Final = {b"\x15\x03", b"\x16\x03"}
"""How an alert and a handshake message begin."""


async def with_hint(error: ExecutorError, deadline: Deadline, *, encrypted: bool) -> ExecutorError:
    """The error, with one of `HINTS` where that is why. ``encrypted``: the client has TLS."""
    if not isinstance(error, TransportError):
        return error
    found = None
    if encrypted:
        found = "absent" if _NO_TLS in error.message else None
    elif (closed := _CLOSED.search(error.message)) is not None:
        host = unquote(closed["host"]).strip("[]")
        if await speaks_tls(host, int(closed["port"]), deadline.remaining(ANSWERS_WITHIN_S)):
            found = "expected"
    if found is None:
        return error
    return TransportError(f"{error.message} ({HINTS[found]})", metadata={**error.metadata, METADATA: found})


async def speaks_tls(host: str, port: int, timeout_s: float | None) -> bool:
    """Whether the port answers the beginning of a TLS handshake with a TLS record."""
    import ssl  # a client without TLS needs it here alone

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing).do_handshake()
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(outgoing.read())
                return await reader.readexactly(2) in _RECORDS
            finally:
                writer.close()
    except (OSError, TimeoutError, asyncio.IncompleteReadError):
        return False
