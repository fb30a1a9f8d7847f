"""What no figure of R1, R10, R11 and R12 says, and needs identities: over the wire, and with real processes."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme

from clients.scheduler.program import main as scheduler
from ferrum_rpc import cli
from ferrum_rpc.client import ExecutorClient, tls
from ferrum_rpc.errors import PermissionDenied, Reason, TransportError, Unauthenticated
from ferrum_rpc.executor.v1 import model_executor_pb2_grpc
from ferrum_rpc.service.guard.auth import Security
from tests.faults.security import GET_INFO, TIMEOUT_S, Authority, call, dial, explained, paths, secured, write_pair
from tests.support.process import serving, started
from tests.support.tokens import bearer, write_tokens
from tests.support.wiring import item, pb

WARMUP = "/ferrum_rpc.executor.v1.ExecutorControl/Warmup"

# --- identities -------------------------------------------------------------------------------------------------------


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    return write_tokens(tmp_path, "alice a-token", "alice a-second-token", "bob b-token", "root r-token operator")


async def test_r1_a_handle_is_of_all_who_have_a_name_and_unknown_to_others(tokens: Path, tmp_path: Path) -> None:
    """By token and by certificate; R1 asks every method about the handles of another token's name."""
    ours = Authority(trustme.CA())
    by_token = [(None, bearer(each)) for each in ("a-token", "a-second-token", "b-token")]
    by_certificate = [(ours.client(each), ()) for each in ("alice", "alice", "bob")]
    for security, callers in ((Security(tokens=tokens), by_token), (ours.server(tmp_path), by_certificate)):
        async with AsyncExitStack() as stack:
            server = await stack.enter_async_context(secured(security))
            calls = []
            for credentials, metadata in callers:
                channel = await stack.enter_async_context(dial(server.target, credentials))
                stub: Any = model_executor_pb2_grpc.ModelExecutorStub(channel)
                calls.append(partial(stub.Prefill, metadata=metadata))
            alice, twin, bob = calls
            handle = (await alice(pb.PrefillRequest(item=item([1, 2, 3])))).output.handle
            handle = (await twin(pb.PrefillRequest(item=item([4], handle)))).output.handle
            refusal = bob(pb.PrefillRequest(item=item([5], handle)))
            assert await explained(refusal, Reason.HANDLE_UNKNOWN, grpc.StatusCode.NOT_FOUND)
            [record] = server.state.handles.records()
            assert record.length == handle.seq_len == 4


@pytest.mark.parametrize("session", [False, True])
async def test_the_client_shows_its_certificate_and_its_token_and_both_are_asked_for(
    tokens: Path, tmp_path: Path, session: bool
) -> None:
    ours = Authority(trustme.CA())
    both = replace(ours.server(tmp_path), tokens=tokens)
    write_pair(ours.ca.issue_cert("machine-7"), tmp_path / "client.pem", tmp_path / "client.key")
    credentials = tls(tmp_path / "ca.pem", tmp_path / "client.pem", tmp_path / "client.key")
    async with secured(both) as server:
        async with ExecutorClient(server.target, credentials=credentials, token="a-token", session=session) as alice:  # noqa: S106
            async with alice.sequence() as sequence:
                await sequence.prefill([1, 2, 3])
                [record] = server.state.handles.records()
                assert record.account.caller.name == "alice"  # the token's name, not the machine's
            with pytest.raises(PermissionDenied):
                await alice.warmup()
        for shown, token, refusal in (
            (credentials, None, Unauthenticated),
            (credentials, "x-token", Unauthenticated),
            (tls(tmp_path / "ca.pem"), "a-token", TransportError),
            (None, "a-token", TransportError),
        ):
            async with ExecutorClient(server.target, credentials=shown, token=token, session=session) as stranger:
                with pytest.raises(refusal):
                    await stranger.info(timeout_s=TIMEOUT_S)
                with pytest.raises(refusal):
                    await stranger.sequence().prefill([1, 2, 3], timeout_s=TIMEOUT_S)
        assert len(server.state.handles) == 0


async def test_only_operators_reach_the_control_service(tokens: Path, tmp_path: Path) -> None:
    ours = Authority(trustme.CA())
    files = ours.server(tmp_path)
    by_certificate = replace(files, operators=frozenset({"root"}))
    for security, alice, root in (
        (Security(tokens=tokens), (None, bearer("a-token")), (None, bearer("r-token"))),
        (by_certificate, (ours.client("alice"), ()), (ours.client("root"), ())),
        (files, (ours.client("alice"), ()), None),
    ):
        async with secured(security) as server:
            async with dial(server.target, alice[0]) as channel:
                control = [each for each in await paths(channel, alice[1]) if "ExecutorControl/" in each]
                assert {WARMUP.replace("Warmup", each) for each in ("Drain", "Reset", "ListSequences")} < {*control}
                for each in control:
                    refusal = call(channel, each, b"", alice[1])
                    assert await explained(refusal, Reason.PERMISSION_DENIED, grpc.StatusCode.PERMISSION_DENIED), each
                assert await channel.unary_unary(GET_INFO)(b"", metadata=alice[1])
            if root is not None:
                async with dial(server.target, root[0]) as channel:
                    warmup = channel.unary_unary(WARMUP)(b"", metadata=root[1], timeout=TIMEOUT_S)
                    assert await warmup.code() is grpc.StatusCode.OK


# --- rotation ---------------------------------------------------------------------------------------------------------


async def code(target: str, credentials: Any, metadata: Any = ()) -> grpc.StatusCode:
    async with dial(target, credentials) as channel:
        return await channel.unary_unary(GET_INFO)(b"", metadata=metadata, timeout=TIMEOUT_S).code()


async def test_r11_certificates_rotate_without_a_restart(tmp_path: Path) -> None:
    old, new = Authority(trustme.CA()), Authority(trustme.CA())
    files = old.server(tmp_path)
    fine, gone = grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE
    async with secured(files) as server, dial(server.target, old.client("alice")) as standing:
        ask = standing.unary_unary(GET_INFO)
        assert await ask(b"")
        assert files.tls_cert is not None
        files.tls_cert.write_text("half a file")
        assert await code(server.target, old.client("alice")) is fine
        write_pair(new.ca.issue_cert("localhost"), tmp_path / "cert.pem", tmp_path / "key.pem")
        assert await code(server.target, old.client("alice")) is gone  # does not know the new authority
        assert await code(server.target, old.client("alice", trusts=new)) is fine
        assert await code(server.target, new.client("alice")) is gone  # its certificate is still a foreign one
        new.ca.cert_pem.write_to_path(tmp_path / "ca.pem")
        assert await code(server.target, new.client("alice")) is fine
        assert await code(server.target, old.client("alice", trusts=new)) is gone
        assert await ask(b"")  # a connection that stands is not cut


async def test_r12_tokens_rotate_without_a_restart(tokens: Path) -> None:
    async with secured(Security(tokens=tokens)) as server:
        assert await code(server.target, None, bearer("b-token")) is grpc.StatusCode.OK
        tokens.write_text("bob the-token-after\n")  # noqa: ASYNC240
        async with asyncio.timeout(TIMEOUT_S):
            while await code(server.target, None, bearer("the-token-after")) is not grpc.StatusCode.OK:  # noqa: ASYNC110
                await asyncio.sleep(0.05)  # the file is looked at once a second
        assert await code(server.target, None, bearer("b-token")) is grpc.StatusCode.UNAUTHENTICATED


# --- metadata ---------------------------------------------------------------------------------------------------------


async def test_r10_oversized_metadata_is_refused_and_the_server_lives_on() -> None:
    async with secured(Security()) as server, dial(server.target) as honest, dial(server.target) as abuser:
        for size in (33 << 10, 1 << 20):
            refusal = abuser.unary_unary(GET_INFO)(b"", metadata=(("x", "y" * size),), timeout=TIMEOUT_S)
            assert await refusal.code() in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)
        assert sum(count.calls for count in server.calls.methods.values()) == 0
        assert await honest.unary_unary(GET_INFO)(b"", metadata=(("x", "y" * (8 << 10)),), timeout=TIMEOUT_S)


# --- real processes ---------------------------------------------------------------------------------------------------


async def cannot_serve(*flags: str) -> dict[str, Any]:
    """The event of a server that does not start; it ends within seconds with status 1 and no stack."""
    server = await started(["serve", "identity", "--log-format", "json", "--port", "0", *flags])
    assert await server.ended() == 1 and not server.other_lines
    event = server.events[-1]
    assert event["event"] == "startup_failed" and event["action"]
    return event


async def test_r12_a_server_that_others_could_reach_does_not_start_without_credentials(tmp_path: Path) -> None:
    assert "--insecure" in (await cannot_serve("--host", "0.0.0.0"))["error"]  # noqa: S104
    event = await cannot_serve("--tokens", str(write_tokens(tmp_path, "alice")))
    assert "line 1" in event["error"]
    async with serving("--host", "0.0.0.0", "--insecure") as process:  # noqa: S104
        assert (await process.event("insecure_mode_enabled"))["action"]
        assert await code(f"127.0.0.1:{process.port}", None) is grpc.StatusCode.OK


async def test_a_unix_socket_has_one_server_and_outlives_a_dead_one(tmp_path: Path) -> None:
    host = f"unix:{tmp_path / 'socket'}"
    async with serving("--host", host) as first:
        assert first.target == host
        assert stat.S_IMODE(os.stat(tmp_path / "socket").st_mode) == 0o600
        assert host in (await cannot_serve("--host", host))["error"]
        assert await code(host, None) is grpc.StatusCode.OK
        await first.kill()
    assert (tmp_path / "socket").exists()
    async with serving("--host", host) as second, ExecutorClient(second.target) as client:
        assert (await client.info()).model.name == "identity"


async def run(main: Callable[[list[str]], int | None], *words: str) -> Any:
    """The exit status of a program that has an event loop of its own, in a thread."""

    def ended() -> Any:
        try:
            return main([*words])
        except SystemExit as end:
            return end.code

    return await asyncio.to_thread(ended)


async def test_the_programs_take_certificates_and_tokens_from_files(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "prepare", lambda: None)  # the environment of this process is not ours
    ours = Authority(trustme.CA())
    ours.server(tmp_path)
    write_pair(ours.ca.issue_cert("alice"), tmp_path / "client.pem", tmp_path / "client.key")
    mine = tmp_path / "token"
    mine.write_text("a-token\n")
    shown = (f"--tls-ca={tmp_path}/ca.pem", f"--tls-cert={tmp_path}/client.pem", f"--tls-key={tmp_path}/client.key")
    pair = ("--tls-cert", f"{tmp_path}/cert.pem", "--tls-key", f"{tmp_path}/key.pem")
    flags = ("--host", "localhost", *pair, "--tls-client-ca", f"{tmp_path}/ca.pem", "--tokens", str(tokens))
    async with serving(*flags) as process:
        shown += ("--target", process.target)
        assert await run(cli.main, "health", *shown) == 0
        assert capsys.readouterr().out == "SERVING\n"
        assert await run(cli.main, "info", *shown, "--token-file", str(mine)) == 0
        monkeypatch.setenv("FERRUM_TOKEN", "a-token")
        assert await run(cli.main, "status", *shown) == 0
        monkeypatch.delenv("FERRUM_TOKEN")
        for flags, says in (((), "UNAUTHENTICATED"), (("--token-file", "missing"), "missing")):
            capsys.readouterr()
            assert await run(cli.main, "info", *shown, *flags) == 1
            told = capsys.readouterr().err
            assert says in told and "Traceback" not in told
        job = (*shown, "--prompt", "ab", "--max-new-tokens", "2", "--plain", "--token-file")
        assert await run(scheduler, *job, str(mine)) == 0
        assert await run(scheduler, *job, "missing") == 2
