"""R11, R12, and the parts of R1 and R10 that need identities: over the wire, and with real processes."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme

from ferrum_rpc.client import ExecutorClient, tls
from ferrum_rpc.errors import PermissionDenied, Reason, TransportError, Unauthenticated
from ferrum_rpc.executor.v1 import model_executor_pb2_grpc
from ferrum_rpc.service.guard.auth import Security
from tests.faults.figures import hold
from tests.faults.process import environment, serving
from tests.faults.security import (
    GET_INFO,
    TIMEOUT_S,
    Authority,
    all_methods,
    bearer,
    dial,
    explained,
    r11_only_the_right_certificates_get_in,
    r12_every_method_asks_who_calls,
    secured,
    write_pair,
)
from tests.wiring import item, pb


async def test_r11_only_the_right_certificates_get_in() -> None:
    await hold(r11_only_the_right_certificates_get_in)


async def test_r12_every_method_asks_who_calls() -> None:
    await hold(r12_every_method_asks_who_calls)


# --- identities -------------------------------------------------------------------------------------------------------


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    file = tmp_path / "tokens"
    file.touch(mode=0o600)
    file.write_text("alice a-token\nalice a-second-token\nbob b-token\nroot r-token operator\n")
    return file


async def test_r1_a_handle_of_somebody_else_reads_as_unknown_whatever_identifies_them(
    tokens: Path, tmp_path: Path
) -> None:
    ours = Authority(trustme.CA())
    alice, bob = ours.client("alice"), ours.client("bob")
    for security, owner, owner_too, stranger in (
        (Security(tokens=tokens), (None, "a-token"), (None, "a-second-token"), (None, "b-token")),
        (ours.server(tmp_path), (alice, None), (ours.client("alice"), None), (bob, None)),
    ):
        async with secured(security) as server:
            handle = None
            for who, tokens_fed in ((owner, [1, 2, 3]), (owner_too, [4])):
                async with speaking(server.target, *who) as (stub, metadata):
                    fed = pb.PrefillRequest(item=item(tokens_fed, handle))
                    handle = (await stub.Prefill(fed, metadata=metadata)).output.handle
            assert handle is not None and handle.seq_len == 4
            async with speaking(server.target, *stranger) as (stub, metadata):
                for call in (
                    stub.Decode(pb.DecodeRequest(item=item([4], handle)), metadata=metadata),
                    stub.TruncateKv(pb.TruncateKvRequest(handle=handle, length=1), metadata=metadata),
                    stub.ForkKv(pb.ForkKvRequest(handle=handle), metadata=metadata),
                    stub.Release(pb.ReleaseRequest(handle=handle), metadata=metadata),
                ):
                    assert await explained(call, Reason.HANDLE_UNKNOWN, grpc.StatusCode.NOT_FOUND)
            [record] = server.state.handles.records()
            assert record.length == 4


@asynccontextmanager
async def speaking(target: str, credentials: Any, token: str | None) -> AsyncIterator[tuple[Any, Any]]:
    """The executor's stub, and the metadata of its calls."""
    async with dial(target, credentials) as channel:
        yield model_executor_pb2_grpc.ModelExecutorStub(channel), () if token is None else bearer(token)


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
                control = [
                    each for each in await all_methods(channel, alice[1]) if each.service.endswith("ExecutorControl")
                ]
                assert {"Drain", "Reset", "Warmup", "ListSequences"} <= {each.name for each in control}
                for method in control:
                    call = method.call(channel, b"", alice[1])
                    assert await explained(call, Reason.PERMISSION_DENIED, grpc.StatusCode.PERMISSION_DENIED), method
                assert await channel.unary_unary(GET_INFO)(b"", metadata=alice[1])
            if root is not None:
                async with dial(server.target, root[0]) as channel:
                    warmup = next(each for each in control if each.name == "Warmup")
                    assert await warmup.call(channel, b"", root[1]).code() is grpc.StatusCode.OK


# --- rotation ---------------------------------------------------------------------------------------------------------


async def code(target: str, credentials: Any, metadata: Any = ()) -> grpc.StatusCode:
    async with dial(target, credentials) as channel:
        return await channel.unary_unary(GET_INFO)(b"", metadata=metadata, timeout=TIMEOUT_S).code()


async def test_r11_certificates_rotate_without_a_restart(tmp_path: Path) -> None:
    old, new = Authority(trustme.CA()), Authority(trustme.CA())
    files = old.server(tmp_path)
    fine, gone = grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE
    async with secured(files) as server, dial(server.target, old.client("alice")) as standing:
        call = standing.unary_unary(GET_INFO)
        assert await call(b"")
        files.tls_cert.write_text("half a file")  # type: ignore[union-attr]
        assert await code(server.target, old.client("alice")) is fine
        write_pair(new.ca.issue_cert("localhost"), tmp_path / "cert.pem", tmp_path / "key.pem")
        assert await code(server.target, old.client("alice")) is gone  # does not know the new authority
        assert await code(server.target, old.client("alice", trusts=new)) is fine
        assert await code(server.target, new.client("alice")) is gone  # its certificate is still a foreign one
        new.ca.cert_pem.write_to_path(tmp_path / "ca.pem")
        assert await code(server.target, new.client("alice")) is fine
        assert await code(server.target, old.client("alice", trusts=new)) is gone
        assert await call(b"")  # a connection that stands is not cut


async def test_r12_tokens_rotate_without_a_restart(tokens: Path) -> None:
    async with secured(Security(tokens=tokens)) as server:
        assert await code(server.target, None, bearer("b-token")) is grpc.StatusCode.OK
        tokens.write_text("bob the-token-after\n")  # noqa: ASYNC240
        async with asyncio.timeout(TIMEOUT_S):
            while await code(server.target, None, bearer("the-token-after")) is not grpc.StatusCode.OK:
                pass  # the file is looked at once a second
        assert await code(server.target, None, bearer("b-token")) is grpc.StatusCode.UNAUTHENTICATED


# --- metadata ---------------------------------------------------------------------------------------------------------


async def test_r10_oversized_metadata_is_refused_and_the_server_lives_on() -> None:
    async with secured(Security()) as server, dial(server.target) as honest, dial(server.target) as abuser:
        for size in (33 << 10, 1 << 20):
            call = abuser.unary_unary(GET_INFO)(b"", metadata=(("x", "y" * size),), timeout=TIMEOUT_S)
            assert await call.code() in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)
        assert sum(count.calls for count in server.calls.methods.values()) == 0
        assert await honest.unary_unary(GET_INFO)(b"", metadata=(("x", "y" * (8 << 10)),), timeout=TIMEOUT_S)


# --- real processes ---------------------------------------------------------------------------------------------------

SERVE = (sys.executable, "-m", "ferrum_rpc.cli", "serve", "identity", "--log-format", "json", "--port", "0")


async def run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(
        subprocess.run,
        command,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**environment(), **variables},
    )


async def cannot_serve(*flags: str, **variables: str) -> dict[str, Any]:
    """The event of a server that does not start; it ends within seconds with status 1 and no stack."""
    done = await run(*SERVE, *flags, **variables)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    event: dict[str, Any] = json.loads(done.stderr.splitlines()[-1])
    assert event["event"] == "startup_failed" and event["action"]
    return event


async def test_r12_a_server_that_others_could_reach_does_not_start_without_credentials(tmp_path: Path) -> None:
    assert "--insecure" in (await cannot_serve("--host", "0.0.0.0"))["error"]  # noqa: S104
    broken = tmp_path / "tokens"
    broken.write_text("alice\n")
    event = await cannot_serve(FERRUM_TOKENS=str(broken))
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


async def test_the_programs_take_certificates_and_tokens_from_files(tokens: Path, tmp_path: Path) -> None:
    ours = Authority(trustme.CA())
    ours.server(tmp_path)
    write_pair(ours.ca.issue_cert("alice"), tmp_path / "client.pem", tmp_path / "client.key")
    mine = tmp_path / "token"
    mine.write_text("a-token\n")
    shown = (
        "--tls-ca",
        f"{tmp_path}/ca.pem",
        "--tls-cert",
        f"{tmp_path}/client.pem",
        "--tls-key",
        f"{tmp_path}/client.key",
    )
    pair = ("--tls-cert", f"{tmp_path}/cert.pem", "--tls-key", f"{tmp_path}/key.pem")
    flags = ("--host", "localhost", *pair, "--tls-client-ca", f"{tmp_path}/ca.pem", "--tokens", str(tokens))
    async with serving(*flags) as process:
        ask = (sys.executable, "-m", "ferrum_rpc.cli")
        target = ("--target", process.target)
        assert (await run(*ask, "health", *target, *shown)).stdout == "SERVING\n"
        assert (await run(*ask, "info", *target, *shown, "--token-file", str(mine))).returncode == 0
        assert (await run(*ask, "status", *target, *shown, FERRUM_TOKEN="a-token")).returncode == 0  # noqa: S106
        refused = await run(*ask, "info", *target, *shown)
        assert refused.returncode == 1 and "UNAUTHENTICATED" in refused.stderr and "Traceback" not in refused.stderr
        missing = await run(*ask, "info", *target, *shown, "--token-file", "missing")
        assert missing.returncode == 1 and "missing" in missing.stderr and "Traceback" not in missing.stderr
        job = (sys.executable, "-m", "clients.scheduler", *target, *shown, "--prompt", "ab", "--max-new-tokens", "2")
        done = await run(*job, "--plain", "--token-file", str(mine))
        assert done.returncode == 0, done.stderr
        assert (await run(*job, "--plain", "--token-file", "missing")).returncode == 2
