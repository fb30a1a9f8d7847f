"""What the server asks of its callers and shows to them: the settings of security as one value.

Knows rules between settings, and no file's content: `tokens` and `tls` read the files.
"""

from __future__ import annotations

import stat
from dataclasses import dataclass
from pathlib import Path

import structlog

log = structlog.get_logger("ferrum_rpc.security")


class SecurityError(RuntimeError):
    """A setting of security, or a file that it names, is wrong; the server does not start. The message names it and
    never holds a secret."""


@dataclass(frozen=True, slots=True)
class Security:
    """Nothing set: plain text, and every caller is `ferrum_rpc.core.ANYBODY`.

    ``tokens``: a file of bearer tokens. ``tls_cert``, ``tls_key``: PEM files, the server's certificate chain and its
    key. ``tls_client_ca``: PEM, who signs the certificates that clients must then show. ``operators``: names of
    certificates that may use ExecutorControl; with tokens, their file says so instead. ``insecure``: listen beyond this
    machine without any of these. Raises `SecurityError` where one needs another.
    """

    tokens: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    operators: frozenset[str] = frozenset()
    insecure: bool = False

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise SecurityError("tls_cert and tls_key belong together; only one of them is set")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise SecurityError("tls_client_ca needs tls_cert and tls_key: there is no mutual TLS without TLS")
        if self.operators and (self.tls_client_ca is None or self.tokens is not None):
            raise SecurityError(
                "operators names certificates, and here they identify nobody: it needs tls_client_ca and no tokens, "
                "whose file says who is an operator"
            )

    @property
    def encrypted(self) -> bool:
        """Whether the port speaks TLS."""
        return self.tls_cert is not None

    @property
    def asks(self) -> bool:
        """Whether callers need credentials."""
        return self.tokens is not None or self.tls_client_ca is not None


def warn_if_open(path: Path, mode: int, what: str) -> None:
    """A secret that other users of the machine can read or write is logged, not refused: in a container there may be
    none."""
    others = stat.S_IRGRP | stat.S_IWGRP | stat.S_IROTH | stat.S_IWOTH
    if mode & others:
        action = f"chmod go-rw {path}"
        log.warning("secret_is_open", what=what, path=str(path), mode=f"{stat.S_IMODE(mode):04o}", action=action)
