"""Opening the port: where a server may listen without credentials, TCP and unix sockets, and detection of another
server.

Any program that can reach an executor can use the model and read the cache. The executor is therefore reachable from
this machine only, unless TLS or tokens are set, or a setting says that the network is trusted.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import grpc
import structlog

from ferrum_rpc.service.guard.auth import Security
from ferrum_rpc.service.guard.tls import ServerCertificates
from ferrum_rpc.service.guard.watched_file import SecurityError

UNIX: Final = "unix:"
LOCK_TRIES: Final = 25
LOCK_WAIT_S: Final = 0.02
"""Between two attempts: half a second for a server that binds, which takes milliseconds."""

log = structlog.get_logger("ferrum_rpc.security")


class PortInUse(RuntimeError):
    """Another process listens on the port, or on the unix socket."""


def socket_path(host: str) -> Path | None:
    """The path of ``unix:path`` or ``unix:///path``; None for any other ``host``."""
    if not host.startswith(UNIX):
        return None
    path = host.removeprefix(UNIX)
    return Path(path.removeprefix("//") if path.startswith("///") else path)


def address(host: str, port: int) -> str:
    """The address that gRPC binds and a client dials: ``host:port``, ``[v6]:port`` or ``unix:path``."""
    path = socket_path(host)
    if path is not None:
        return f"{UNIX}{path}"
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to it. False for host names except ``localhost``: they may resolve to any
    address."""
    if host == "localhost" or socket_path(host) is not None:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_bind(host: str, security: Security) -> None:
    """Raise `SecurityError` if other machines could connect without credentials, and log configurations that are
    allowed but weak."""
    if is_loopback(host):
        return
    if not security.encrypted and not security.asks:
        if not security.insecure:
            raise SecurityError(
                f"{host} can be reached from other machines, and neither TLS nor tokens are set: any client there "
                "could use the model and read the cache; set --tls-cert and --tls-key, or --tokens, or listen on "
                "127.0.0.1, or set --insecure if the network itself is trusted"
            )
        log.warning("insecure_mode_enabled", host=host, action="let only the schedulers reach this address")
    elif not security.encrypted:
        log.warning("tokens_not_encrypted", host=host, action="set --tls-cert and --tls-key: tokens can be overheard")
    elif not security.asks:
        log.warning(
            "credentials_not_required", host=host, action="set --tokens or --tls-client-ca: TLS admits every caller"
        )


def open_port(
    server: grpc.aio.Server, host: str, port: int, security: Security, certificates: ServerCertificates | None = None
) -> int:
    """Bind and listen, with TLS where there are ``certificates``; connections wait until the server starts. Returns the
    port, 0 for a unix socket. Raises `PortInUse` and `SecurityError`."""
    check_bind(host, security)
    path = socket_path(host)
    target = address(host, port)
    try:
        with contextlib.nullcontext() if path is None else _place(path):
            if certificates is None:
                bound = server.add_insecure_port(target)
            else:
                bound = server.add_secure_port(target, certificates.credentials())
    except RuntimeError as error:
        if isinstance(error, PortInUse):
            raise
        why = "another process has the port, or the address is not of this machine"
        if path is not None:
            why = "the folder does not exist or may not be written, or the path is longer than 107 bytes"
        raise PortInUse(f"cannot listen on {target}: {why}") from error
    return bound if path is None else 0


@contextlib.contextmanager
def _place(path: Path) -> Iterator[None]:
    """Hold the path of a unix socket while it is bound, accessible to this user only.

    gRPC unlinks any socket that it finds there, including that of a running server. So the path is probed first, and a
    file next to the socket is locked meanwhile, against a server that starts at the same time. Only this user may open
    the lock file, because anyone who can open a file can lock it. The file stays, because a lock on a removed file
    excludes no one.
    """
    lock = path.with_name(f"{path.name}.lock")
    try:
        held = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise PortInUse(f"cannot listen on {UNIX}{path}: {lock}: {error.strerror}") from error
    try:
        if not _locked(held):
            why = f"another process holds {lock}; unless that is a starting server, end it"
            raise PortInUse(f"cannot listen on {UNIX}{path}: {why}")
        if _in_use(path):
            raise PortInUse(f"cannot listen on {UNIX}{path}: another process has it")
        before = os.umask(0o177)  # the socket is made with mode 0600; a chmod later would leave a gap
        try:
            yield
        finally:
            os.umask(before)
    finally:
        os.close(held)


def _locked(held: int) -> bool:
    """Lock an open file. A server that starts at the same time holds the lock for an instant."""
    for _ in range(LOCK_TRIES):
        with contextlib.suppress(BlockingIOError):  # it is locked: try again
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(LOCK_WAIT_S)
    return False


def _in_use(path: Path) -> bool:
    """Whether the path holds anything but the socket of a server that has ended."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            return True
    except FileNotFoundError:
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return False
        except OSError:  # its queue is full, or it is another user's: it is in use
            return True
    return True
