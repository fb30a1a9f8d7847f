"""Authentication: the security settings as a value, the tokens file, and the guard of every method.

The default is to deny: every method but the health check needs credentials. The guard runs first, so a request without
credentials is not parsed. If no credentials are configured, there is no guard. grpc.aio runs every handler in a task of
its own, so a context variable set before the handler belongs to that call.
"""

from __future__ import annotations

import hashlib
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import structlog
from grpc_health.v1 import health

from ferrum_rpc.core import ANYBODY, Caller
from ferrum_rpc.errors import PermissionDenied, Unauthenticated
from ferrum_rpc.service.guard.watched_file import SecurityError, WatchedFiles
from ferrum_rpc.service.trace_context import Context

log = structlog.get_logger("ferrum_rpc.security")


@dataclass(frozen=True, slots=True)
class Security:
    """The security settings. By default the port is plain text, and every caller is `ferrum_rpc.core.ANYBODY`.

    ``tokens``: a file of bearer tokens. ``tls_cert``, ``tls_key``: PEM files of the server's certificate chain and its
    key. ``tls_client_ca``: PEM file of the authorities that must have signed the clients' certificates. ``operators``:
    names of certificates that may use ExecutorControl. ``trusted``: names of certificates whose imports all callers may
    find. With tokens, their file defines both roles instead. ``insecure``: listen beyond this machine without any of
    these. Raises `SecurityError` if a setting needs another one.
    """

    tokens: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    operators: frozenset[str] = frozenset()
    trusted: frozenset[str] = frozenset()
    insecure: bool = False

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise SecurityError("tls_cert and tls_key must be set together")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise SecurityError("tls_client_ca needs tls_cert and tls_key: there is no mutual TLS without TLS")
        for role, names in (("operators", self.operators), ("trusted", self.trusted)):
            if names and (self.tls_client_ca is None or self.tokens is not None):
                raise SecurityError(
                    f"{role} names client certificates: it needs tls_client_ca and no tokens; with tokens, set the "
                    "roles in their file"
                )

    @property
    def encrypted(self) -> bool:
        """Whether the port uses TLS."""
        return self.tls_cert is not None

    @property
    def asks(self) -> bool:
        """Whether callers need credentials."""
        return self.tokens is not None or self.tls_client_ca is not None


ARRIVED: Final[ContextVar[float]] = ContextVar("ferrum_arrived", default=0.0)
"""When the event loop accepted the call, or read the frame, on `time.monotonic`. A call's queueing time begins here and
so includes its own turns of a busy event loop."""

CALLER: Final[ContextVar[Caller]] = ContextVar("ferrum_caller", default=ANYBODY)
"""The caller of the current call; `ANYBODY` without authentication."""


OPERATOR: Final = "operator"
TRUSTED: Final = "trusted"


class TokenFile(WatchedFiles[dict[bytes, Caller]]):
    """The callers of a tokens file."""

    what = "tokens"

    def __len__(self) -> int:
        return len(self.content)

    def caller(self, token: str) -> Caller | None:
        """The caller of a token, or None."""
        return self.content.get(_digest(token))

    def refresh(self) -> bool:
        if changed := super().refresh():
            log.info("tokens_loaded", path=str(self.paths[0]), tokens=len(self))
        return changed

    def _read(self) -> dict[bytes, Caller]:
        [path] = self.paths
        try:
            callers = parse(path.read_bytes().decode(), str(path))
        except UnicodeDecodeError:
            raise SecurityError(f"tokens: {path} is not a text file") from None  # the error would show the bytes
        self._warn_if_open(path)
        return callers


def parse(text: str, where: str) -> dict[bytes, Caller]:
    """Callers by the SHA-256 of their token. If more than one of them is not an operator, these share the limits.
    Raises `SecurityError` with the line's number, never with its content."""
    callers: dict[bytes, Caller] = {}
    for number, line in enumerate(text.splitlines(), 1):
        parts = line.split()
        if not parts or parts[0].startswith("#"):
            continue
        name, token, roles = parts[0], "".join(parts[1:2]), parts[2:]
        if not token or len(set(roles)) < len(roles) or not {OPERATOR, TRUSTED}.issuperset(roles):
            usage = f"`name token`, and behind it {OPERATOR}, {TRUSTED}, or both"
            raise SecurityError(f"tokens: {where}, line {number}: write {usage}")
        if not (token.isascii() and token.isprintable()):
            raise SecurityError(
                f"tokens: {where}, line {number}: a token must be printable ASCII: it travels in a header"
            )
        if _digest(token) in callers:
            raise SecurityError(f"tokens: {where}, line {number}: the token must differ from those of earlier lines")
        callers[_digest(token)] = Caller(name, operator=OPERATOR in roles, trusted=TRUSTED in roles)
    if not callers:
        raise SecurityError(f"tokens: {where} holds no token; no caller would be admitted")
    if len({each.name for each in callers.values() if not each.operator}) > 1:
        return {digest: replace(each, shares=not each.operator) for digest, each in callers.items()}
    return callers


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="surrogateescape")).digest()


OPEN_SERVICES: Final = frozenset({health.SERVICE_NAME})
"""Services without authentication: a supervisor or a router must see the server's state without a secret."""

OPERATOR_SERVICES: Final = frozenset({"ferrum_rpc.executor.v1.ExecutorControl"})
"""Services for operators: their methods affect every caller."""

AUTHORIZATION: Final = "authorization"
SCHEME: Final = "bearer"


class Guard:
    """Admits or refuses a call by its headers. The caller is identified by its token, or else by the certificate of its
    connection. With both, TLS has already checked the certificate, and the token identifies the caller."""

    def __init__(
        self,
        tokens: TokenFile | None,
        operators: frozenset[str] = frozenset(),
        trusted: frozenset[str] = frozenset(),
    ) -> None:
        self._tokens = tokens
        self._operators = operators
        self._trusted = trusted

    def admit(self, service: str, context: Context) -> None:
        """Set the caller for the call's handler. Raises `Unauthenticated` or `PermissionDenied`."""
        if service in OPEN_SERVICES:
            return
        caller = self.caller(context)
        CALLER.set(caller)  # grpc.aio runs every call in a task, and so in a context, of its own
        if service in OPERATOR_SERVICES and not caller.operator:
            raise PermissionDenied("only operators may use this service")

    def caller(self, context: Context) -> Caller:
        """Raises `Unauthenticated`."""
        return self._by_certificate(context) if self._tokens is None else self._by_token(context, self._tokens)

    @staticmethod
    def _by_token(context: Context, tokens: TokenFile) -> Caller:
        given = [value for key, value in context.invocation_metadata() or () if key == AUTHORIZATION]
        if len(given) != 1:
            raise Unauthenticated("send one `authorization: Bearer <token>` with the call")
        scheme, _, token = str(given[0]).partition(" ")
        caller = tokens.caller(token.strip()) if scheme.lower() == SCHEME else None
        if caller is None:
            raise Unauthenticated("the call's token is not accepted")
        return caller

    def _by_certificate(self, context: Context) -> Caller:
        names = tuple(context.peer_identities() or ())  # alternative names, or where there are none the common name
        try:
            name = names[0].decode() if names else ""
        except UnicodeDecodeError:  # replacing what is no text would give two certificates one name
            name = ""
        if not name:
            raise Unauthenticated(
                "the client's certificate has no subject alternative name and no common name in UTF-8"
            )
        operator = name in self._operators
        return Caller(name, operator=operator, shares=not operator, trusted=name in self._trusted)
