"""Names to addresses, for a client that wants to know each executor and not any one behind a name."""

from __future__ import annotations

import asyncio
import re
import socket
from typing import Final

from ferrum_rpc.errors import InvalidRequest

DNS: Final = "dns:"
_NAME: Final = re.compile(r"dns:(?:///)?(?:\[(?P<v6>[^\]]+)\]|(?P<name>[^:/\[\]]+)):(?P<port>\d{1,5})")


def addresses_of(target: str) -> tuple[str, int]:
    """Host and port of ``dns:///name:port``. Raises `InvalidRequest` for anything else."""
    if (found := _NAME.fullmatch(target)) is None or not 0 < int(found["port"]) < 1 << 16:
        raise InvalidRequest(f"{target} is no dns:///name:port", field="targets")
    return found["v6"] or found["name"], int(found["port"])


async def lookup(target: str) -> list[str] | None:
    """The addresses of ``dns:///name:port`` as ``host:port``; None where it does not resolve."""
    host, port = addresses_of(target)
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return None
    hosts = dict.fromkeys(str(address[0]) for *_, address in found)
    return [f"[{each}]:{port}" if ":" in each else f"{each}:{port}" for each in hosts]
