"""The server's certificate files for TLS, which rotate without a restart.

gRPC asks for the certificates before every handshake, from threads of its own; existing connections keep theirs. A
certificate and key that do not match are never given to gRPC, because it would refuse every handshake.
"""

from __future__ import annotations

import calendar
import re
import ssl
import time
from collections.abc import Callable
from typing import Any, Final

import grpc
import structlog

from ferrum_rpc.service.guard.auth import Security
from ferrum_rpc.service.guard.watched_file import SecurityError, WatchedFiles

SERVER: Final = "server"
CLIENT_CA: Final = "client_ca"

VERSION: Final = 0xA0
UTC_TIME: Final = 0x17
LONG_LENGTH: Final = 0x80
"""Tags of DER; a length from here on is preceded by the number of its bytes."""

PEM_CERTIFICATE: Final = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)

log = structlog.get_logger("ferrum_rpc.security")


class ServerCertificates(WatchedFiles[grpc.ServerCertificateConfiguration]):
    """Certificate chain, key, and with mutual TLS the authorities of clients. ``expiries``: when the first certificate
    of a file expires, in seconds since 1970, by `SERVER` and `CLIENT_CA`."""

    what = "certificates"

    def __init__(self, security: Security, failed: Callable[[], object] = lambda: None) -> None:
        paths = (security.tls_cert, security.tls_key, security.tls_client_ca)
        self.expiries: dict[str, float] = {}
        super().__init__(*(path for path in paths if path is not None), failed=failed)
        self._given = self.content

    def credentials(self) -> grpc.ServerCredentials:
        """For `grpc.aio.Server.add_secure_port`. With ``tls_client_ca``, clients without a certificate of these
        authorities cannot connect."""
        fetch: Any = self.changed  # None is "no change", which grpc documents and its stubs forget
        return grpc.dynamic_ssl_server_credentials(self.content, fetch, len(self.paths) == 3)

    def changed(self) -> grpc.ServerCertificateConfiguration | None:
        """The certificates, if gRPC does not have them yet. May be called by any thread; never raises."""
        self.refresh()
        if (content := self.content) is self._given:
            return None
        self._given = content
        return content

    def refresh(self) -> bool:
        if changed := super().refresh():
            log.info("certificates_loaded", path=str(self.paths[0]))
        return changed

    def _read(self) -> grpc.ServerCertificateConfiguration:
        before = self._look()
        cert, key, *client_ca = (path.read_bytes() for path in self.paths)
        self._check()
        if self._look() != before:
            raise SecurityError("certificates: the files were being written while they were read")
        self._warn_if_open(self.paths[1])
        ends = {name: earliest_end(pem) for name, pem in zip((SERVER, CLIENT_CA), (cert, *client_ca), strict=False)}
        self.expiries = {name: end for name, end in ends.items() if end is not None}
        return grpc.ssl_server_certificate_configuration([(key, cert)], client_ca[0] if client_ca else None)

    def _check(self) -> None:
        """Check with OpenSSL that the key belongs to the certificate, and that the authorities are certificates."""
        cert, key, *client_ca = self.paths
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            # An empty password: OpenSSL would ask the terminal for the one of an encrypted key.
            context.load_cert_chain(cert, key, password="")
        except (ssl.SSLError, ValueError) as error:
            why = getattr(error, "reason", None) or "not PEM, or encrypted"
            raise SecurityError(f"certificates: {cert} and {key} must be a certificate and its key: {why}") from None
        for path in client_ca:
            try:
                context.load_verify_locations(cafile=path)
            except ssl.SSLError as error:
                why = error.reason or "not PEM"
                raise SecurityError(f"certificates: {path} holds no certificates of authorities: {why}") from None


def earliest_end(pem: bytes) -> float | None:
    """When the first of the certificates in a file expires, in seconds since 1970; None if the date is not in the
    format of RFC 5280."""
    try:
        return min([_end(ssl.PEM_cert_to_DER_cert(each.decode())) for each in PEM_CERTIFICATE.findall(pem)])
    except (ValueError, IndexError):
        return None


def _end(der: bytes) -> float:
    """``notAfter`` of a certificate. `ssl` provides it for authorities and peers, but not for a server's own
    certificate."""
    _, at, _ = _element(der, 0)  # Certificate
    _, at, _ = _element(der, at)  # TBSCertificate
    for _ in range(4 if der[at] == VERSION else 3):  # version, serial number, algorithm, issuer
        _, _, at = _element(der, at)
    _, at, _ = _element(der, at)  # Validity
    _, _, at = _element(der, at)  # notBefore
    tag, first, end = _element(der, at)
    text = der[first:end].decode("ascii")
    if tag == UTC_TIME:  # its years have two digits, and begin with 1950
        text = f"{'20' if text < '50' else '19'}{text}"
    return float(calendar.timegm(time.strptime(text, "%Y%m%d%H%M%SZ")))


def _element(der: bytes, at: int) -> tuple[int, int, int]:
    """The tag of the DER element at ``at``, where its content begins, and where that ends."""
    length, first = der[at + 1], at + 2
    if length >= LONG_LENGTH:
        first += length - LONG_LENGTH
        length = int.from_bytes(der[at + 2 : first])
    return der[at], first, first + length
