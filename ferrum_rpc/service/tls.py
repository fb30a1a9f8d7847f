"""The server's side of TLS: its certificate files, which rotate without a restart.

gRPC asks for the certificates before every handshake, from threads of its own; connections that stand keep theirs. A
pair that does not fit is never given to gRPC, for it would refuse every handshake.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from typing import Any

import grpc
import structlog

from ferrum_rpc.service.auth import Security
from ferrum_rpc.service.watched_file import SecurityError, WatchedFiles

log = structlog.get_logger("ferrum_rpc.security")


class ServerCertificates(WatchedFiles[grpc.ServerCertificateConfiguration]):
    """Certificate chain, key, and with mutual TLS the authorities of clients."""

    what = "certificates"

    def __init__(self, security: Security, failed: Callable[[], object] = lambda: None) -> None:
        paths = (security.tls_cert, security.tls_key, security.tls_client_ca)
        super().__init__(*(path for path in paths if path is not None), failed=failed)

    def credentials(self) -> grpc.ServerCredentials:
        """For `grpc.aio.Server.add_secure_port`. With ``tls_client_ca``, a client without a certificate of these
        authorities gets no connection."""
        fetch: Any = self.changed  # None is "no change", which grpc documents and its stubs forget
        return grpc.dynamic_ssl_server_credentials(self.content, fetch, len(self.paths) == 3)

    def changed(self) -> grpc.ServerCertificateConfiguration | None:
        """The certificates, if they are others than before. Called by any thread; never raises."""
        if not self.refresh():
            return None
        log.info("certificates_loaded", path=str(self.paths[0]))
        return self.content

    def _read(self) -> grpc.ServerCertificateConfiguration:
        before = self._look()
        cert, key, *client_ca = (path.read_bytes() for path in self.paths)
        self._check()
        if self._look() != before:
            raise SecurityError("certificates: the files were being written while they were read")
        self._warn_if_open(self.paths[1])
        return grpc.ssl_server_certificate_configuration([(key, cert)], client_ca[0] if client_ca else None)

    def _check(self) -> None:
        """That the key is the certificate's and that the authorities are certificates, by OpenSSL."""
        cert, key, *client_ca = self.paths
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            # An empty password: OpenSSL would ask the terminal for the one of an encrypted key.
            context.load_cert_chain(cert, key, password="")
        except (ssl.SSLError, ValueError) as error:
            why = getattr(error, "reason", None) or "not PEM, or encrypted"
            raise SecurityError(f"certificates: {cert} and {key} are no pair of certificate and key: {why}") from None
        for path in client_ca:
            try:
                context.load_verify_locations(cafile=path)
            except ssl.SSLError as error:
                why = error.reason or "not PEM"
                raise SecurityError(f"certificates: {path} holds no certificates of authorities: {why}") from None
