"""Default deny: every method asks who calls, but the health check.

The guard is the outermost: whoever has no credentials does not even reach the parser. Where nothing is asked of callers
it is not there at all.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from grpc_health.v1 import health

from ferrum_rpc.core import Caller
from ferrum_rpc.errors import PermissionDenied, Unauthenticated
from ferrum_rpc.service.identity import CALLER
from ferrum_rpc.service.rpc import Context
from ferrum_rpc.service.security import Security
from ferrum_rpc.service.supervisor import Background, Supervisor
from ferrum_rpc.service.tokens import TokenFile

OPEN_SERVICES: Final = frozenset({health.SERVICE_NAME})
"""Whoever restarts or routes must see how the server does, without a secret."""

OPERATOR_SERVICES: Final = frozenset({"ferrum_rpc.executor.v1.ExecutorControl"})
"""Changes what every caller sees."""

AUTHORIZATION: Final = "authorization"
SCHEME: Final = "bearer"


class Authenticator:
    """Tells who a call is from: the name of its token, or else of the certificate that its connection showed. Where
    both are asked for, TLS itself has checked the certificate, and the token has the name."""

    def __init__(self, tokens: TokenFile | None, operators: frozenset[str] = frozenset()) -> None:
        self._tokens = tokens
        self._operators = operators

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
        return Caller(name, operator=operator, shares=not operator)


class Guard:
    """Lets a call in, or refuses it, by its headers alone."""

    def __init__(self, authenticator: Authenticator) -> None:
        self._authenticator = authenticator

    def admit(self, service: str, context: Context) -> None:
        """Make the call's caller known to its handler. Raises `Unauthenticated` or `PermissionDenied`."""
        if service in OPEN_SERVICES:
            return
        caller = self._authenticator.caller(context)
        CALLER.set(caller)  # grpc.aio runs every call in a task, and so in a context, of its own
        if service in OPERATOR_SERVICES and not caller.operator:
            raise PermissionDenied("only operators may use this service")


def guard_of(security: Security, supervisor: Supervisor) -> Guard | None:
    """The guard that the settings want; None where callers need no credentials. Raises `SecurityError`."""
    if not security.asks:
        return None
    tokens = None
    if security.tokens is not None:
        tokens = TokenFile(security.tokens, partial(supervisor.count, Background.TOKENS)).watch()
    return Guard(Authenticator(tokens, security.operators))
