"""The server's side of TLS: certificate files, read anew when they change, so that they rotate without a restart.

gRPC asks for the certificates before every handshake, from threads of its own; connections that stand keep theirs. A
pair that does not fit is never given to gRPC, for it would refuse every handshake.
"""

from __future__ import annotations

import os
import ssl
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import structlog

from ferrum_rpc.service.auth import Security, SecurityError, warn_if_open

Stamps = tuple[tuple[int, int, int], ...]

log = structlog.get_logger("ferrum_rpc.security")


class ServerCertificates:
    """Certificate chain, key, and with mutual TLS the authorities of clients. Raises `SecurityError` when the files
    cannot be used at the start; a change that cannot be used is logged, what was known stays, and ``failed`` is called,
    by whatever thread."""

    def __init__(self, security: Security, failed: Callable[[], object] = lambda: None) -> None:
        if security.tls_cert is None or security.tls_key is None:
            raise SecurityError("TLS needs tls_cert and tls_key")
        self._cert, self._key, self._client_ca = security.tls_cert, security.tls_key, security.tls_client_ca
        self._failed = failed
        self._lock = threading.Lock()
        try:
            self._stamps, self._current = self._read()
        except OSError as error:
            raise SecurityError(f"TLS: {error.filename}: {error.strerror}") from error

    def credentials(self) -> grpc.ServerCredentials:
        """For `grpc.aio.Server.add_secure_port`. With ``tls_client_ca``, a client without a certificate of these
        authorities gets no connection."""
        fetch: Any = self.changed  # None is "no change", which grpc documents and its stubs forget
        return grpc.dynamic_ssl_server_credentials(self._current, fetch, self._client_ca is not None)

    def changed(self) -> grpc.ServerCertificateConfiguration | None:
        """The certificates, if they are others than before. Called by any thread; never raises."""
        with self._lock:
            stamps: Stamps = ()
            try:
                stamps = self._look()
                if stamps == self._stamps:
                    return None
                self._stamps, self._current = self._read()
            except Exception as error:
                if stamps != self._stamps:  # once for each state of the files
                    self._stamps = stamps
                    action = "correct the files; until then the certificates that were read before are used"
                    log.error("certificates_rejected", error=str(error), action=action)
                    self._failed()
                return None
            log.info("certificates_loaded", path=str(self._cert))
            return self._current

    def _paths(self) -> tuple[Path, ...]:
        return (self._cert, self._key) if self._client_ca is None else (self._cert, self._key, self._client_ca)

    def _look(self) -> Stamps:
        status = [os.stat(path) for path in self._paths()]
        return tuple((each.st_mtime_ns, each.st_size, each.st_ino) for each in status)

    def _read(self) -> tuple[Stamps, grpc.ServerCertificateConfiguration]:
        stamps = self._look()
        cert, key, *client_ca = (path.read_bytes() for path in self._paths())
        self._check()
        if self._look() != stamps:
            raise SecurityError("TLS: the files were being written while they were read")
        warn_if_open(self._key, os.stat(self._key).st_mode, "tls_key")
        roots = client_ca[0] if client_ca else None
        return stamps, grpc.ssl_server_certificate_configuration([(key, cert)], roots)

    def _check(self) -> None:
        """That the key is the certificate's and that the authorities are certificates, by OpenSSL."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            # An empty password: OpenSSL would ask the terminal for the one of an encrypted key.
            context.load_cert_chain(self._cert, self._key, password="")
        except (ssl.SSLError, ValueError) as error:
            why = getattr(error, "reason", None) or "not PEM, or encrypted"
            raise SecurityError(
                f"TLS: {self._cert} and {self._key} are no pair of certificate and key: {why}"
            ) from None
        if self._client_ca is not None:
            try:
                context.load_verify_locations(cafile=self._client_ca)
            except ssl.SSLError as error:
                why = error.reason or "not PEM"
                raise SecurityError(f"TLS: {self._client_ca} holds no certificates of authorities: {why}") from None
