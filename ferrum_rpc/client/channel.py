"""The gRPC channel: its credentials, and the client's default retries, keepalive and message limits (promises R7 and
R8).

gRPC takes certificates as bytes and reports invalid ones only with the first call, as a failure to connect. This module
reads and checks them at once.
"""

from __future__ import annotations

import json
import re
import ssl
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import grpc
from grpc_health.v1 import health_pb2

from ferrum_rpc import __version__
from ferrum_rpc.errors import InvalidRequest
from ferrum_rpc.executor.v1 import executor_control_pb2, kv_transfer_pb2, model_executor_pb2

ChannelOption = tuple[str, str | int]

ChannelCredentials = grpc.ChannelCredentials
"""The result of `tls`, under a name that needs no import of gRPC."""

_CONTRACT: Final = [
    service
    for module in (model_executor_pb2, executor_control_pb2, kv_transfer_pb2, health_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
]
SERVICES: Final = tuple(service.full_name for service in _CONTRACT)
STREAMS: Final = tuple(
    (service.full_name, method.name)
    for service in _CONTRACT
    for method in service.methods
    if method.client_streaming or method.server_streaming
)

_WITHOUT_PORTS: Final = ("unix", "unix-abstract", "vsock", "xds")
"""Schemes of gRPC whose targets need name no port."""

_DNS: Final = re.compile(r"dns:(//[^/]*/)?")
_ADDRESS: Final = re.compile(r"(\[[^\[\]]+\]|[^\s:/,\[\]]+):(?P<port>\d{1,5})", re.ASCII)

KEEPALIVE_TIME_S: Final = 10.0
KEEPALIVE_TIMEOUT_S: Final = 5.0


def service_config() -> str:
    """Retries of UNAVAILABLE, the one code that means that nothing was started, or that no server answered, where the
    request id makes a retry safe. At most 4 attempts, exponential backoff (gRPC adds the jitter), throttled to protect
    an executor that is down. Streams are not retried: the session resends what was in flight."""
    retried = {
        "name": [{"service": service} for service in SERVICES],
        "retryPolicy": {
            "maxAttempts": 4,
            "initialBackoff": "0.05s",
            "maxBackoff": "1s",
            "backoffMultiplier": 2,
            "retryableStatusCodes": ["UNAVAILABLE"],
        },
    }
    streams = {"name": [{"service": service, "method": method} for service, method in STREAMS]}
    return json.dumps(
        {"methodConfig": [retried, streams], "retryThrottling": {"maxTokens": 20, "tokenRatio": 0.1}},
        sort_keys=True,
    )


def keepalive_options(time_s: float, timeout_s: float) -> list[ChannelOption]:
    """A silent peer gets a ping after ``time_s`` seconds; the connection is closed ``timeout_s`` later, with or without
    calls in flight, and ends calls and streams. Executors treat more than one ping in five seconds as abuse."""
    if time_s <= 0 or timeout_s <= 0:
        raise ValueError(f"keepalive times must be positive: {time_s}, {timeout_s}")
    timeout_ms = max(1, round(timeout_s * 1000))
    return [
        ("grpc.keepalive_time_ms", max(1, round(time_s * 1000))),
        ("grpc.keepalive_timeout_ms", timeout_ms),
        ("grpc.http2.ping_timeout_ms", timeout_ms),
    ]


def channel_options(overrides: Iterable[ChannelOption] = ()) -> list[ChannelOption]:
    """The defaults, each replaced by the override of the same name."""
    options: dict[str, str | int] = {
        "grpc.service_config": service_config(),
        "grpc.service_config_disable_resolution": 1,
        "grpc.enable_retries": 1,
        # gRPC retries only messages in its buffer: the default of 256 kB is less than one long prompt.
        "grpc.per_rpc_retry_buffer_size": 64 << 20,
        # The executor reports its limits in GetInfo and enforces them; a limit here could only refuse an answer
        # to a step that has already run.
        "grpc.max_receive_message_length": -1,
        "grpc.max_send_message_length": -1,
        "grpc.keepalive_permit_without_calls": 1,
        "grpc.http2.max_pings_without_data": 0,
        # gRPC's own maximum is two minutes: too long to find a restarted executor.
        "grpc.initial_reconnect_backoff_ms": 100,
        "grpc.max_reconnect_backoff_ms": 2_000,
        "grpc.primary_user_agent": f"ferrum-rpc/{__version__}",
    }
    options.update(keepalive_options(KEEPALIVE_TIME_S, KEEPALIVE_TIMEOUT_S))
    options.update(overrides)
    return list(options.items())


def check_target(target: str, field: str = "target") -> None:
    """Raise `InvalidRequest` for a target without a port, for which gRPC would use 443."""
    scheme, _, rest = target.partition(":")
    if scheme in _WITHOUT_PORTS and rest:
        return
    for address in rest.split(",") if scheme in ("ipv4", "ipv6") else [_DNS.sub("", target)]:
        found = _ADDRESS.fullmatch(address)
        if found is None or not 0 < int(found["port"]) < 1 << 16:
            message = f"target {target[:200]!r} is neither host:port, [address]:port, dns:///name:port nor unix:path"
            raise InvalidRequest(message, field=field)


def host_and_port_of(target: str) -> tuple[str, int]:
    """The host and port of a target ``name:port`` or ``dns:///name:port``; no host for targets without DNS (a path)."""
    looked_up = target.partition(":")[0] not in (*_WITHOUT_PORTS, "ipv4", "ipv6")
    found = _ADDRESS.fullmatch(_DNS.sub("", target)) if looked_up else None
    return ("", 0) if found is None else (found[1].strip("[]"), int(found["port"]))


def open_channel(
    target: str, credentials: grpc.ChannelCredentials | None, overrides: Iterable[ChannelOption] = ()
) -> grpc.aio.Channel:
    """A channel to ``target`` (``host:port`` or ``unix:path``). It connects with the first call. Raises
    `InvalidRequest` for a target that is none."""
    check_target(target)
    options = channel_options(overrides)
    if credentials is None:
        return grpc.aio.insecure_channel(target, options=options)
    return grpc.aio.secure_channel(target, credentials, options=options)


# --- credentials ------------------------------------------------------------------------------------------------------


def tls(
    ca: str | Path | None = None, cert: str | Path | None = None, key: str | Path | None = None
) -> ChannelCredentials:
    """Credentials for `ExecutorClient`, from PEM files: the authorities to trust (None: those that come with gRPC), and
    with mutual TLS the certificate chain to show and its key. Raises `InvalidRequest` that names the file.

    A token over TLS is sent encrypted; without TLS it is sent as it is, readable on the way.
    """
    if (cert is None) != (key is None):
        raise InvalidRequest("a certificate and its key must be set together", field="cert")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        if ca is not None:
            context.load_verify_locations(cafile=ca)
    except ssl.SSLError:
        raise InvalidRequest(f"{ca} holds no certificates in PEM", field="ca") from None
    except OSError as error:
        raise _unreadable(ca, error, "ca") from None
    try:
        if cert is not None:
            # An empty password: OpenSSL would ask the terminal for the one of an encrypted key.
            context.load_cert_chain(cert, key, password="")
    except (ssl.SSLError, ValueError):
        raise InvalidRequest(f"{cert} and {key} must be a certificate and its key in PEM", field="cert") from None
    except OSError as error:
        raise _unreadable(f"{cert} or {key}", error, "cert") from None
    return grpc.ssl_channel_credentials(_bytes(ca), _bytes(key), _bytes(cert))


def read_token(path: str | Path) -> str:
    """The token in a file: its first line. Raises `InvalidRequest` that names the file and never shows the token."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError as error:
        raise _unreadable(path, error, "token") from None
    except UnicodeDecodeError:
        raise InvalidRequest(f"{path} is not a text file", field="token") from None
    token = lines[0].strip() if lines else ""
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise InvalidRequest(f"the first line of {path} must be a token: one word of printable ASCII", field="token")
    return token


def _bytes(path: str | Path | None) -> bytes | None:
    return None if path is None else Path(path).read_bytes()


def _unreadable(path: object, error: OSError, field: str) -> InvalidRequest:
    return InvalidRequest(f"cannot read {path}: {error.strerror or error}", field=field)
