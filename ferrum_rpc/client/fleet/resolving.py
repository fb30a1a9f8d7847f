"""Names to addresses, for a client that wants to know each executor and not any one behind a name."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from ferrum_rpc.client.channel import check_target
from ferrum_rpc.errors import InvalidRequest, TransportError

FILE: Final = "file:"
NAMED: Final = ("dns:", FILE)
"""What targets begin with that stand for any number of executors."""
_NAME: Final = re.compile(r"dns:(?:///)?(?:\[(?P<v6>[^\]]+)\]|(?P<name>[^:/\[\]]+)):(?P<port>\d{1,5})")
MOST_BYTES: Final = 1 << 20
"""Of a file of targets."""


def check(target: str) -> None:
    """Raise `InvalidRequest` for a target that cannot be one."""
    if target.startswith(FILE):
        if target == FILE:
            raise InvalidRequest("file:PATH must name a file of targets, one per line", field="targets")
    elif target.startswith(NAMED):
        host_and_port(target)
    else:
        check_target(target, "targets")


def host_and_port(target: str) -> tuple[str, int]:
    """Of ``dns:///name:port``. Raises `InvalidRequest`."""
    if (found := _NAME.fullmatch(target)) is None or not 0 < int(found["port"]) < 1 << 16:
        raise InvalidRequest(f"{target} must be dns:///name:port", field="targets")
    return found["v6"] or found["name"], int(found["port"])


def certificate_host(targets: Iterable[str], target: str) -> str:
    """The host that the certificate of the executor at ``target`` is for, if that is an address that a
    ``dns:///name:port`` of ``targets`` resolved to: the value of the channel option ``grpc.ssl_target_name_override``.
    Empty for a target that is one of ``targets``, or a line of a file."""
    names = [] if target in (listed := list(targets)) else [each for each in listed if each.startswith("dns:")]
    return host_and_port(names[0])[0] if names else ""


async def lookup(target: str) -> list[str]:
    """The targets behind ``dns:///name:port``, or in the lines of ``file:PATH``. Raises `TransportError` where no one
    can say now."""
    if target.startswith(FILE):
        return await asyncio.to_thread(_lines, Path(target[len(FILE) :]))
    host, port = host_and_port(target)
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise TransportError(f"it does not resolve: {error.strerror or error}") from None
    hosts = dict.fromkeys(str(address[0]) for *_, address in found)
    return [f"[{each}]:{port}" if ":" in each else f"{each}:{port}" for each in hosts]


def _lines(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            text = file.read(MOST_BYTES).decode()
    except OSError as error:
        raise TransportError(f"it cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise TransportError("it is not a text file") from None
    return [line for each in text.splitlines() if (line := each.strip()) and not line.startswith("#")]
