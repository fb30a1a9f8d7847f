"""The reason of a failed connection if it is TLS: only one side uses it, or the server's certificate is refused.

gRPC does not report that. A port with TLS closes the connection of a client without TLS, as a process that ends does:
so the port gets, once, the first message of a TLS handshake. A client with TLS finds the reason in OpenSSL's error. If
a name has several addresses, gRPC reports the one that failed last, which may be one without a listener: then the
address that accepts a connection is called separately.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Final
from urllib.parse import unquote

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub

from ferrum_rpc.client.channel import ChannelCredentials, ChannelOption, host_and_port_of, open_channel
from ferrum_rpc.client.retry import Deadline
from ferrum_rpc.errors import ExecutorError, TransportError
from ferrum_rpc.wire.status import error_from_rpc

METADATA: Final = "tls"
"""Set in the metadata of a `TransportError` to one of `HINTS`."""

HINTS: Final = {
    "expected": "the port expects TLS and this client has none: pass credentials=tls(...)",
    "absent": "the port has no TLS and this client asks for it: leave out credentials",
    "expired": "the server's certificate has expired: renew it on the server",
    "name": "the server's certificate is for another name than the target's: use a name that is in it, or set the "
    "channel option grpc.ssl_target_name_override",
    "untrusted": "the server's certificate is not trusted: pass credentials=tls(ca) with the authority that signed it",
}

FLAGS: Final = {
    "expected": "the port expects TLS; add --tls, or --tls-ca FILE",
    "absent": "the port has no TLS; leave out --tls and --tls-ca, --tls-cert and --tls-key",
    "expired": HINTS["expired"],
    "name": "the server's certificate is for another name; give a target with a name that is in it",
    "untrusted": "the server's certificate is not trusted; give --tls-ca FILE, the authority that signed it",
}
"""The same for users of the command line."""

ANSWERS_WITHIN_S: Final = 1.0
_CLOSED: Final = re.compile(
    r"failed to connect .*\bipv[46]:(?P<host>\S+):(?P<port>\d+): .*(closed|reset by peer)$", re.I
)
_REFUSED: Final = "Failed to connect to remote host"
_HANDSHAKE: Final = {
    "WRONG_VERSION_NUMBER": "absent",
    "certificate has expired": "expired",
    "CERTIFICATE_VERIFY_FAILED": "untrusted",
    "Hostname Verification Check failed": "name",
}
"""Patterns of gRPC's message of a failed handshake; the first match counts."""
_RECORDS: Final = {b"\x15\x03", b"\x16\x03"}
"""The first bytes of an alert and of a handshake message."""

Again = Callable[[float | None], Awaitable[ExecutorError | None]]
"""Calls the address that accepts connections, within so many seconds: `ask_who_accepts`."""


def in_words(error: ExecutorError, hints: dict[str, str] = HINTS) -> str:
    """Why a call failed, in a few words: one of ``hints``, or the last of gRPC's chain of reasons, which is the root
    cause."""
    if not unreachable(error):
        return error.message
    found = error.metadata.get(METADATA)
    return hints[found] if found in hints else error.message.removesuffix(": OK").rpartition(": ")[2]


def explained(error: ExecutorError, target: str = "") -> str:
    """The message of a program about a failed call to ``target``: one line, with the options of the command line.
    Without a target it is the reason alone."""
    words = in_words(error, FLAGS)
    return f"cannot reach an executor at {target}: {words}" if target and unreachable(error) else words


def unreachable(error: ExecutorError) -> bool:
    """Whether gRPC reported that there is no connection."""
    return isinstance(error, TransportError) and error.metadata.get("grpc_code") == "UNAVAILABLE"


async def with_hint(
    error: ExecutorError, deadline: Deadline, *, encrypted: bool, again: Again | None = None
) -> ExecutorError:
    """The error, with one of `HINTS` if that is the reason. ``encrypted``: the client has TLS."""
    if not isinstance(error, TransportError):
        return error
    if again is not None and _REFUSED in error.message:
        error = await again(deadline.remaining(ANSWERS_WITHIN_S)) or error
    found = None
    if encrypted:
        found = next((hint for words, hint in _HANDSHAKE.items() if words in error.message), None)
    elif (closed := _CLOSED.search(error.message)) is not None:
        host = unquote(closed["host"]).strip("[]")
        if await speaks_tls(host, int(closed["port"]), deadline.remaining(ANSWERS_WITHIN_S)):
            found = "expected"
    if found is None:
        return error
    return TransportError(f"{error.message} ({HINTS[found]})", metadata={**error.metadata, METADATA: found})


async def ask_who_accepts(
    target: str,
    credentials: ChannelCredentials | None,
    options: Iterable[ChannelOption],
    timeout_s: float | None,
) -> ExecutorError | None:
    """Why a call fails at the first address of ``target`` that accepts connections. None if none accepts, or if the
    call is answered."""
    host, port = host_and_port_of(target)
    if not host:
        return None
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(host, port)
            family, peer = writer.get_extra_info("socket").family, writer.get_extra_info("peername")[0]
            writer.close()
            address = f"ipv6:[{peer}]:{port}" if family == socket.AF_INET6 else f"ipv4:{peer}:{port}"
            named = [("grpc.ssl_target_name_override", host), *options, ("grpc.enable_retries", 0)]
            async with open_channel(address, credentials, named) as channel:
                await HealthStub(channel).Check(HealthCheckRequest(), timeout=timeout_s)
    except grpc.aio.AioRpcError as failure:
        error = error_from_rpc(failure)
        return error if unreachable(error) else None
    except (OSError, TimeoutError):
        pass
    return None


async def speaks_tls(host: str, port: int, timeout_s: float | None) -> bool:
    """Whether the port answers the beginning of a TLS handshake with a TLS record."""
    import ssl  # a client without TLS needs it only here

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
