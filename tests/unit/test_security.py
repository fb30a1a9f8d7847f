"""Tokens, certificates, bind rules and the guard, each alone. Over the wire: tests/faults/test_security.py."""

from __future__ import annotations

import asyncio
import dataclasses
import fcntl
import os
import socket
import ssl
import stat
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from cryptography import x509
from structlog.testing import capture_logs

from ferrum_rpc.client import read_token, tls
from ferrum_rpc.core import ANYBODY, Caller
from ferrum_rpc.errors import InvalidRequest, Unauthenticated
from ferrum_rpc.service.guard.auth import CALLER, Guard, Security, TokenFile, parse
from ferrum_rpc.service.guard.bind import PortInUse, address, check_bind, is_loopback, open_port
from ferrum_rpc.service.guard.tls import ServerCertificates
from ferrum_rpc.service.guard.watched_file import SecurityError
from ferrum_rpc.service.registry import Registry
from ferrum_rpc.service.rpc import CallLog
from ferrum_rpc.service.supervisor import BackgroundTask
from tests.support.serving import LIMITS, serve_identity
from tests.support.wiring import until

MUTUAL = {"tls_cert": Path("c"), "tls_key": Path("k"), "tls_client_ca": Path("a")}


@pytest.mark.parametrize(
    "settings",
    [
        *({name: path} for name, path in MUTUAL.items()),
        {"operators": frozenset({"root"})},
        {"trusted": frozenset({"mover"})},
        {"operators": frozenset({"root"}), "tokens": Path("t"), **MUTUAL},
    ],
)
def test_half_a_setting_is_an_error_and_not_no_security(settings):
    with pytest.raises(SecurityError):
        Security(**settings)


# --- tokens -----------------------------------------------------------------------------------------------------------


def test_a_token_file_has_names_comments_roles_and_several_tokens_of_one_name(tmp_path):
    file = tmp_path / "tokens"
    roles = ("", " operator", " trusted", " trusted operator")
    rooted = "".join(f"  root token-{number}{each}\n" for number, each in enumerate(roles))
    file.write_text(f"# schedulers\n\nalice first-token\nalice second-token\n{rooted}")
    tokens = TokenFile(file)
    assert tokens.caller("first-token") == tokens.caller("second-token") == Caller("alice", operator=False, shares=True)
    for number, role in enumerate(roles):
        operator, trusted = "operator" in role, "trusted" in role
        found = tokens.caller(f"token-{number}")
        assert found == Caller("root", operator=operator, shares=not operator, trusted=trusted)
    for wrong in ("", "first", "first-token ", "alice", "#", "\udcff", "operator"):
        assert tokens.caller(wrong) is None


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("alice", 1),
        ("# x\nalice secret-token admin", 2),
        ("alice secret-token operator twice", 1),
        ("alice secret-token trusted operator trusted", 1),
        ("a secret-token\nb secret-token", 2),
        ("alice secret-tokén", 1),
        ("alice secret-token\x07", 1),
    ],
)
def test_a_wrong_line_is_named_by_its_number_and_never_shown(text, line):
    with pytest.raises(SecurityError, match=f"line {line}:") as caught:
        parse(text, "the file")
    assert "secret-tok" not in str(caught.value)


def test_a_file_that_cannot_be_used_stops_the_start(tmp_path):
    with pytest.raises(SecurityError, match="No such file"):
        TokenFile(tmp_path / "missing")
    (tmp_path / "empty").write_text("# nobody yet\n")
    with pytest.raises(SecurityError, match="no token"):
        TokenFile(tmp_path / "empty")
    (tmp_path / "binary").write_bytes(b"alice \xff\xfe-secret\n")
    with pytest.raises(SecurityError, match="not a text file") as caught:
        TokenFile(tmp_path / "binary")
    assert caught.value.__cause__ is None and "secret" not in str(caught.value)


def test_tokens_rotate_when_the_file_changes_and_a_broken_file_changes_nothing(tmp_path):
    file = tmp_path / "tokens"
    file.write_text("alice old-token\n")
    tokens = TokenFile(file)
    replace(file, "alice old-token\nalice new-token\n")
    tokens.refresh()
    assert tokens.caller("new-token") == tokens.caller("old-token") == Caller("alice", operator=False)
    for broken in ("alice", "", None):
        if broken is None:
            file.unlink()
        else:
            replace(file, broken)
        with capture_logs() as logs:
            for _ in range(3):
                tokens.refresh()
                assert tokens.caller("old-token") is not None
        assert [each["event"] for each in logs] == ["tokens_rejected"] and logs[0]["action"]
    replace(file, "alice new-token\n")
    tokens.refresh()
    assert tokens.caller("old-token") is None and tokens.caller("new-token") is not None


def replace(file: Path, text: str) -> None:
    """As careful programs do: the new file is whole when it gets the name."""
    fresh = file.with_name("fresh")
    fresh.write_text(text)
    fresh.replace(file)


def test_a_secret_that_others_can_read_or_write_is_told_at_the_start_and_when_it_was_written(tmp_path):
    file = tmp_path / "tokens"
    file.write_text("alice a-token\n")
    for mode in (0o600, 0o640, 0o604, 0o620, 0o602, 0o700):
        told = ["secret_file_permissions"] * (mode not in {0o600, 0o700})
        file.chmod(mode)
        with capture_logs() as logs:
            known = TokenFile(file)
        assert [each["event"] for each in logs] == told
        replace(file, f"alice a-token\n# {mode}\n")
        file.chmod(mode)
        with capture_logs() as logs:
            known.refresh()
        assert [each["event"] for each in logs] == [*told, "tokens_loaded"]
        assert "a-token" not in str(logs)


# --- certificates -----------------------------------------------------------------------------------------------------


def write_pair(leaf: trustme.LeafCert, cert: Path, key: Path) -> None:
    cert.write_bytes(b"".join(each.bytes() for each in leaf.cert_chain_pems))
    key.write_bytes(leaf.private_key_pem.bytes())
    key.chmod(0o600)


@pytest.fixture
def files(tmp_path):
    """A server's certificate, and the authority of its clients."""
    security = Security(tls_cert=tmp_path / "cert", tls_key=tmp_path / "key", tls_client_ca=tmp_path / "ca")
    authority = trustme.CA()
    write_pair(authority.issue_cert("localhost"), tmp_path / "cert", tmp_path / "key")
    authority.cert_pem.write_to_path(tmp_path / "ca")
    return security


def test_certificates_are_read_again_when_a_file_changes_and_only_then(files):
    certificates = ServerCertificates(files)
    assert certificates.changed() is None
    write_pair(trustme.CA().issue_cert("localhost"), files.tls_cert, files.tls_key)
    assert certificates.changed() is not None
    assert certificates.changed() is None
    trustme.CA().cert_pem.write_to_path(files.tls_client_ca)
    assert certificates.changed() is not None


def test_a_refresh_that_no_handshake_asked_for_takes_no_rotation_away_from_the_next_one(files):
    certificates = ServerCertificates(files)
    write_pair(trustme.CA().issue_cert("localhost"), files.tls_cert, files.tls_key)
    with capture_logs() as logs:
        assert certificates.refresh()
        assert certificates.changed() is certificates.content
    assert certificates.changed() is None
    assert [each["event"] for each in logs] == ["certificates_loaded"]


@pytest.mark.parametrize("years", [1, 40])  # the format of the time changes in 2050
def test_the_end_of_the_first_certificate_of_a_file_is_known_and_follows_a_rotation(files, years):
    authority = trustme.CA()
    first, later = (
        authority.issue_cert("localhost", not_after=datetime.now(UTC) + timedelta(days=365 * years + more))
        for more in (3, 9)
    )
    certificates = ServerCertificates(files)
    before = dict(certificates.expiries)
    write_pair(later, files.tls_cert, files.tls_key)
    files.tls_cert.write_bytes(files.tls_cert.read_bytes() + first.cert_chain_pems[0].bytes())
    assert certificates.refresh()
    ends = x509.load_pem_x509_certificate(first.cert_chain_pems[0].bytes()).not_valid_after_utc
    assert certificates.expiries == {"server": ends.timestamp(), "client_ca": before["client_ca"]}
    authorities = x509.load_pem_x509_certificates(files.tls_client_ca.read_bytes())
    assert before["client_ca"] == min(each.not_valid_after_utc for each in authorities).timestamp()


@pytest.mark.parametrize("which", ["tls_cert", "tls_key", "tls_client_ca"])
@pytest.mark.parametrize("content", [b"", b"garbage", b"another", None])
def test_a_pair_that_does_not_fit_stops_the_start_and_never_replaces_one_that_does(files, which, content):
    if (which, content) == ("tls_client_ca", b"another"):
        content = b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"
    elif content == b"another":
        leaf = trustme.CA().issue_cert("other")
        content = leaf.private_key_pem.bytes() if which == "tls_key" else leaf.cert_chain_pems[0].bytes()
    certificates = ServerCertificates(files)
    path: Path = getattr(files, which)
    before = path.read_bytes()
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with capture_logs() as logs:
        assert certificates.changed() is None
        assert certificates.changed() is None
    assert [each["event"] for each in logs] == ["certificates_rejected"] and logs[0]["action"]
    with pytest.raises(SecurityError, match="certificates: "):
        ServerCertificates(files)
    path.write_bytes(before)
    assert certificates.changed() is not None


async def test_what_a_server_cannot_use_of_its_files_is_counted(files, tmp_path, monkeypatch):
    """By the look at the tokens, and by the thread of gRPC's that asks for certificates before a handshake."""
    monkeypatch.setattr("ferrum_rpc.service.server.FILES_EVERY_S", 0.001)
    (tmp_path / "tokens").write_text("alice a-token\n")
    async with serve_identity(security=dataclasses.replace(files, tokens=tmp_path / "tokens")) as served:
        failures = served.server.state.supervisor.failures
        assert (failures[BackgroundTask.TOKENS], failures[BackgroundTask.CERTIFICATES]) == (0, 0)
        replace(tmp_path / "tokens", "alice a-token\nbob\n")  # logged when it is written, not at the next call
        await until(lambda: failures[BackgroundTask.TOKENS] == 1)
        files.tls_cert.write_text("no certificate")
        anybody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        anybody.check_hostname, anybody.verify_mode = False, ssl.CERT_NONE
        for _ in range(2):
            with suppress(OSError):  # a client without a certificate; the server asked for its own before
                await asyncio.open_connection("127.0.0.1", served.server.port, ssl=anybody)
        assert failures[BackgroundTask.CERTIFICATES] == 1
        assert (failures[BackgroundTask.TOKENS], failures[BackgroundTask.CALLBACK]) == (1, 0)


# --- where to listen --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "localhost", "unix:/run/ferrum"])
def test_this_machine_needs_no_credentials(host):
    assert is_loopback(host)
    with capture_logs() as logs:
        check_bind(host, Security())
    assert logs == []


@pytest.mark.parametrize(
    "host",
    ["0.0.0.0", "::", "10.0.0.7", "executor", "localhost.example", "", "127.0.0.1.example", "::ffff:0.0.0.0"],  # noqa: S104
)
def test_other_machines_are_let_in_by_credentials_or_by_saying_so(host):
    with pytest.raises(SecurityError, match="insecure"):
        check_bind(host, Security())
    for security, event in (
        (Security(insecure=True), "insecure_mode_enabled"),
        (Security(tokens=Path("t")), "tokens_not_encrypted"),
        (Security(tls_cert=Path("c"), tls_key=Path("k")), "credentials_not_required"),
        (Security(tokens=Path("t"), tls_cert=Path("c"), tls_key=Path("k")), None),
        (Security(tls_client_ca=Path("a"), tls_cert=Path("c"), tls_key=Path("k")), None),
    ):
        with capture_logs() as logs:
            check_bind(host, security)
        assert [each["event"] for each in logs] == ([] if event is None else [event])
        assert all(each["action"] for each in logs)


def test_an_address_is_what_a_client_dials():
    assert address("::1", 5) == "[::1]:5"
    assert address("localhost", 5) == "localhost:5"
    assert address("unix:run/x", 5) == "unix:run/x"
    assert address("unix:///run/x", 5) == "unix:/run/x"


async def test_a_unix_socket_is_of_its_user_and_never_taken_from_a_living_server(tmp_path):
    path = tmp_path / "socket"
    first, second = grpc.aio.server(), grpc.aio.server()
    mask = os.umask(0)
    try:
        assert open_port(first, f"unix:{path}", 7, Security()) == 0
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert os.umask(0) == 0
    finally:
        os.umask(mask)
    inode = path.stat().st_ino
    with pytest.raises(PortInUse, match="another process has it"):
        open_port(second, f"unix:{path}", 0, Security())
    assert path.stat().st_ino == inode
    await first.stop(None)


async def test_what_a_dead_server_left_is_taken_over_and_a_file_is_not(tmp_path):
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
        dead.listen()
    server = grpc.aio.server()
    assert open_port(server, f"unix:{path}", 0, Security()) == 0
    await server.stop(None)
    file = tmp_path / "file"
    file.write_text("precious")
    for place in (file, tmp_path / "no" / "folder", tmp_path / ("x" * 120)):
        with pytest.raises(PortInUse, match="cannot listen on unix:"):
            open_port(grpc.aio.server(), f"unix:{place}", 0, Security())
    assert file.read_text() == "precious"


async def test_whoever_locks_the_sockets_folder_hinders_nobody_and_a_held_place_is_named(tmp_path):
    path = tmp_path / "socket"
    folder = os.open(tmp_path, os.O_RDONLY)  # any user may who can read it
    fcntl.flock(folder, fcntl.LOCK_EX)
    server = grpc.aio.server()
    bound = asyncio.to_thread(open_port, server, f"unix:{path}", 0, Security())
    assert await asyncio.wait_for(bound, 30) == 0
    os.close(folder)
    lock = path.with_name("socket.lock")
    assert stat.S_IMODE(lock.stat().st_mode) == 0o600, "nobody else may open it, and so lock it"
    await server.stop(None)
    with lock.open("r+") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(PortInUse, match=r"another process holds .*socket\.lock"):
            open_port(grpc.aio.server(), f"unix:{path}", 0, Security())
    lock.unlink()
    lock.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PortInUse, match=r"socket\.lock"):
        open_port(grpc.aio.server(), f"unix:{path}", 0, Security())
    assert not (tmp_path / "elsewhere").exists()


# --- the guard --------------------------------------------------------------------------------------------------------


def signed(content: bytes) -> bytes:
    return content + CALLER.get().name.encode()


async def echo(request: bytes, _: Any) -> bytes:
    return signed(request)


async def twice(request: bytes, _: Any) -> AsyncIterator[bytes]:
    for _ in range(2):
        yield signed(request)


async def gather(requests: AsyncIterator[bytes], _: Any) -> bytes:
    return signed(b"".join([each async for each in requests]))


async def mirror(requests: AsyncIterator[bytes], context: Any) -> None:
    async for each in requests:
        await context.write(signed(each))


async def test_every_kind_of_handler_knows_its_caller_and_refuses_the_others(tmp_path):
    (tmp_path / "tokens").write_text("alice a-token\nbob b-token\n")
    server = grpc.aio.server()
    calls = CallLog()
    table = Registry(calls, Guard(TokenFile(tmp_path / "tokens")), LIMITS)
    table.add_registered_method_handlers(
        "s",
        {
            "UU": grpc.unary_unary_rpc_method_handler(echo),
            "US": grpc.unary_stream_rpc_method_handler(twice),
            "SU": grpc.stream_unary_rpc_method_handler(gather),
            "SS": grpc.stream_stream_rpc_method_handler(mirror),
        },
    )
    server.add_generic_rpc_handlers((table,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:

        def all_kinds(requests: Any, *metadata: tuple[str, str]) -> list[Any]:
            return [
                channel.unary_unary("/s/UU")(b"q", metadata=metadata),
                channel.unary_stream("/s/US")(b"q", metadata=metadata),
                channel.stream_unary("/s/SU")(requests, metadata=metadata),
                channel.stream_stream("/s/SS")(requests, metadata=metadata),
            ]

        for name, token in ((b"alice", "a-token"), (b"bob", "b-token")):
            one, two, three, four = all_kinds([b"q", b"r"], ("authorization", f"Bearer {token}"))
            assert (await one, await three) == (b"q" + name, b"qr" + name)
            assert [each async for each in two] == [b"q" + name] * 2
            assert [each async for each in four] == [b"q" + name, b"r" + name]
        for wrong in (
            [],
            [("authorization", "Bearer ")],
            [("authorization", "Bearer c-token")],
            [("authorization", "Basic a-token")],
            [("authorization", "a-token")],
            [("authorization", "Bearer a-token"), ("authorization", "Bearer b-token")],
        ):
            for call in all_kinds(None, *wrong):
                assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
    assert CALLER.get() == ANYBODY
    assert {method.errors for method in calls.methods.values()} == {6}
    await server.stop(None)


class Connection:
    """A call's context, of a connection whose certificate has these names."""

    def __init__(self, *names: bytes) -> None:
        self.names = names

    def peer_identities(self) -> tuple[bytes, ...]:
        return self.names


def test_a_certificates_first_name_is_the_identity_and_one_without_is_nobody():
    guard = Guard(None, frozenset({"root"}))
    spiffe = b"spiffe://cluster/alice"
    assert guard.caller(Connection(spiffe, b"root")) == Caller(spiffe.decode(), operator=False, shares=True)
    assert guard.caller(Connection(b"root")) == Caller("root", operator=True)
    guard = Guard(None, trusted=frozenset({"mover"}))
    assert guard.caller(Connection(b"mover")) == Caller("mover", operator=False, shares=True, trusted=True)
    assert not guard.caller(Connection(b"another")).trusted
    for names in ((), (b"",), (b"", b"root"), (b"\xff",), (b"root\xff",)):
        with pytest.raises(Unauthenticated, match="certificate"):
            guard.caller(Connection(*names))


def test_a_handler_that_could_not_be_guarded_is_not_registered():
    table = Registry(CallLog(), Guard(None), LIMITS)
    with pytest.raises(TypeError, match="must be an async handler"):
        plain = grpc.unary_unary_rpc_method_handler(lambda request, _: request)
        table.add_registered_method_handlers("s", {"M": plain})


# --- the client -------------------------------------------------------------------------------------------------------


def test_a_client_is_told_which_file_is_wrong_before_it_calls(files, tmp_path):
    assert isinstance(tls(files.tls_client_ca, files.tls_cert, files.tls_key), grpc.ChannelCredentials)
    garbage = tmp_path / "garbage"
    garbage.write_text("garbage")
    for arguments, names in (
        ((garbage,), "garbage"),
        ((tmp_path / "missing",), "missing"),
        ((None, files.tls_cert), "must be set together"),
        ((None, files.tls_cert, garbage), "must be a certificate and its key"),
        ((None, garbage, tmp_path / "missing"), "missing"),
    ):
        with pytest.raises(InvalidRequest, match=names):
            tls(*arguments)


def test_a_token_file_of_a_client_holds_one_word(tmp_path):
    file = tmp_path / "token"
    file.write_text(" the-token\n")
    assert read_token(file) == "the-token"
    for text in ("", "\nthe-token", "alice the-token", "the-tokén"):
        file.write_text(text)
        with pytest.raises(InvalidRequest, match="token") as caught:
            read_token(file)
        assert "the-tok" not in str(caught.value)
    with pytest.raises(InvalidRequest, match="No such file"):
        read_token(tmp_path / "missing")


def test_the_variable_of_clients_does_not_pass_for_the_setting_of_servers(monkeypatch):
    from ferrum_rpc.config import load_settings
    from ferrum_rpc.serve import _security

    monkeypatch.setenv("FERRUM_TOKEN", "a-token")
    with capture_logs() as logs:
        assert _security(load_settings("identity", {})) == Security()
    assert [each["event"] for each in logs] == ["token_variable_ignored"] and "a-token" not in str(logs)
    monkeypatch.setenv("FERRUM_TOKENS", "/run/tokens")
    with capture_logs() as logs:
        assert _security(load_settings("identity", {"tls_cert": "c", "tls_key": "k"})) == Security(
            tokens=Path("/run/tokens"), tls_cert=Path("c").absolute(), tls_key=Path("k").absolute()
        )
    assert logs == []
    monkeypatch.delenv("FERRUM_TOKENS")
    tls = {"tls_cert": "c", "tls_key": "k", "tls_client_ca": "a"}
    settings = load_settings("identity", tls | {"operators": "root, ops ,", "trusted": "a,b"})
    assert (_security(settings).operators, _security(settings).trusted) == ({"root", "ops"}, {"a", "b"})
