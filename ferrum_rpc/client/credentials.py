"""What a client shows and whom it trusts, from files: TLS certificates and tokens.

gRPC takes certificates as bytes and says nothing of wrong ones before the first call, and then only that it could not
connect. Here they are read and checked at once.
"""

from __future__ import annotations

import ssl
from pathlib import Path

import grpc

from ferrum_rpc.errors import InvalidRequest

ChannelCredentials = grpc.ChannelCredentials
"""What `tls` makes, by a name that needs no import of gRPC."""


def tls(
    ca: str | Path | None = None, cert: str | Path | None = None, key: str | Path | None = None
) -> ChannelCredentials:
    """Credentials for `ExecutorClient`, from PEM files: whom to trust (none: the authorities that come with gRPC), and
    with mutual TLS the certificate chain to show and its key. Raises `InvalidRequest` that names the file.

    A token beside TLS is sent encrypted; without TLS it is sent as it is, and everybody on the way can read it.
    """
    if (cert is None) != (key is None):
        raise InvalidRequest("a certificate and its key belong together; only one is named", field="cert")
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
        raise InvalidRequest(f"{cert} and {key} are no pair of certificate and key in PEM", field="cert") from None
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
        raise InvalidRequest(f"{path} is no text", field="token") from None
    token = lines[0].strip() if lines else ""
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise InvalidRequest(f"the first line of {path} is no token: one word of printable ASCII", field="token")
    return token


def _bytes(path: str | Path | None) -> bytes | None:
    return None if path is None else Path(path).read_bytes()


def _unreadable(path: object, error: OSError, field: str) -> InvalidRequest:
    return InvalidRequest(f"cannot read {path}: {error.strerror or error}", field=field)
