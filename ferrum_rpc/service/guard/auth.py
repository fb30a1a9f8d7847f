"""Who may call, and who calls: the settings of security as a value, the file of tokens, and the guard of every method.

Default deny: every method needs credentials, but the health check. The guard comes first: a request without credentials
is not parsed. Where none are needed, there is no guard. grpc.aio runs every handler
in a task of its own, so a context variable that is set before the handler belongs to that call.
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
    """Nothing set: plain text, and every caller is `ferrum_rpc.core.ANYBODY`.

    ``tokens``: a file of bearer tokens. ``tls_cert``, ``tls_key``: PEM files, the server's certificate chain and its
    key. ``tls_client_ca``: PEM, who signs the certificates that clients must then show. ``operators``: names of
    certificates that may use ExecutorControl; ``trusted``: of those whose imports all callers may find; with tokens,
    their file has both instead. ``insecure``: listen beyond this machine without any of these. Raises `SecurityError`
    where one needs another.
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
                    f"{role} names certificates, and here they identify no caller: it needs tls_client_ca and no "
                    "tokens, whose file has the roles"
                )

    @property
    def encrypted(self) -> bool:
        """Whether the port speaks TLS."""
        return self.tls_cert is not None

    @property
    def asks(self) -> bool:
        """Whether callers need credentials."""
        return self.tokens is not None or self.tls_client_ca is not None


ARRIVED: Final[ContextVar[float]] = ContextVar("ferrum_arrived", default=0.0)
"""When the event loop took the call, or read the frame, on `time.monotonic`. A call's queueing time begins here: its
own turns of a busy event loop are part of it."""

CALLER: Final[ContextVar[Caller]] = ContextVar("ferrum_caller", default=ANYBODY)
"""Who makes the present call; `ANYBODY` where no credentials are asked for."""


OPERATOR: Final = "operator"
TRUSTED: Final = "trusted"


class TokenFile(WatchedFiles[dict[bytes, Caller]]):
    """The tokens of a file."""

    what = "tokens"

    def __len__(self) -> int:
        return len(self.content)

    def caller(self, token: str) -> Caller | None:
        """Who a token stands for, or None."""
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
    """Callers by the SHA-256 of their token; where more than one is no operator, those share. Raises `SecurityError`
    with the line's number, never with its content."""
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
"""A supervisor or a router must see how the server does, without a secret."""

OPERATOR_SERVICES: Final = frozenset({"ferrum_rpc.executor.v1.ExecutorControl"})
"""Its methods affect every caller."""

AUTHORIZATION: Final = "authorization"
SCHEME: Final = "bearer"


class Guard:
    """Lets a call in, or refuses it, by its headers. A call is from the name of its token, or else of the certificate
    that its connection showed. Where both are asked for, TLS itself has checked the certificate, and the token has the
    name."""

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
        """Make the call's caller known to its handler. Raises `Unauthenticated` or `PermissionDenied`."""
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
