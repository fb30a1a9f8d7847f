"""R11 and R12: servers with certificates and tokens, and everything that must not get in."""

from __future__ import annotations

import datetime
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import grpc
import trustme
from google.protobuf import descriptor_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from ferrum_rpc.config import ModelSettings
from ferrum_rpc.engine.assembly.build import build_runner
from ferrum_rpc.errors import Reason
from ferrum_rpc.service.guard.auth import Security
from ferrum_rpc.service.server import ExecutorServer
from ferrum_rpc.service.state import Lifecycle
from tests.faults.figures import Figures, exactly
from tests.faults.sizes import Size
from tests.serving import LIMITS

TIMEOUT_S: Final = 20.0
REFUSED_WITHIN_S: Final = 5.0
"""Of calls that are refused at once: only a stream that is let in waits for it."""

GET_INFO: Final = "/ferrum_rpc.executor.v1.ModelExecutor/GetInfo"
LONG_AGO: Final = datetime.datetime(2001, 1, 1, tzinfo=datetime.UTC)


# --- servers ----------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def secured(security: Security) -> AsyncIterator[ExecutorServer]:
    """An identity server with these settings, on a free port."""
    config = ModelSettings(path="identity", device="cpu", kv_blocks=64, block_size=4)
    server = ExecutorServer(lambda: build_runner(config), LIMITS, host="localhost", security=security)
    await server.start()
    try:
        await server.ready()
        yield server
    finally:
        await server.stop(grace_s=1)


@asynccontextmanager
async def dial(
    target: str, credentials: grpc.ChannelCredentials | None = None, name: str | None = None
) -> AsyncIterator[grpc.aio.Channel]:
    """A connection of its own, without retries. ``name``: the server's, where it is not the target's."""
    options: list[tuple[str, Any]] = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
    if name is not None:
        options.append(("grpc.ssl_target_name_override", name))
    if credentials is None:
        channel = grpc.aio.insecure_channel(target, options=options)
    else:
        channel = grpc.aio.secure_channel(target, credentials, options=options)
    async with channel:
        yield channel


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


# --- certificates -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Authority:
    """A certificate authority and what it signs."""

    ca: trustme.CA

    def server(self, folder: Path, *names: str, expired: bool = False) -> Security:
        """A server with a certificate for these names (``localhost``), whose clients need one of the same authority."""
        not_after = LONG_AGO + datetime.timedelta(days=1) if expired else None
        not_before = LONG_AGO if expired else None
        leaf = self.ca.issue_cert(*(names or ("localhost",)), not_before=not_before, not_after=not_after)
        security = Security(tls_cert=folder / "cert.pem", tls_key=folder / "key.pem", tls_client_ca=folder / "ca.pem")
        write_pair(leaf, folder / "cert.pem", folder / "key.pem")
        self.ca.cert_pem.write_to_path(folder / "ca.pem")
        return security

    def client(self, name: str | None, *, trusts: Authority | None = None, expired: bool = False) -> Any:
        """Credentials of a client with this name; None: one that shows no certificate."""
        roots = (trusts or self).ca.cert_pem.bytes()
        if name is None:
            return grpc.ssl_channel_credentials(roots)
        not_after = LONG_AGO + datetime.timedelta(days=1) if expired else None
        leaf = self.ca.issue_cert(name, not_before=LONG_AGO if expired else None, not_after=not_after)
        return grpc.ssl_channel_credentials(roots, leaf.private_key_pem.bytes(), chain(leaf))


def chain(leaf: trustme.LeafCert) -> bytes:
    return b"".join(each.bytes() for each in leaf.cert_chain_pems)


def write_pair(leaf: trustme.LeafCert, cert: Path, key: Path) -> None:
    cert.write_bytes(chain(leaf))
    key.touch(mode=0o600)
    key.write_bytes(leaf.private_key_pem.bytes())


async def r11_only_the_right_certificates_get_in(size: Size) -> Figures:
    """Dial a server with mutual TLS in every wrong way, and in the right one."""
    ours, foreign = Authority(trustme.CA()), Authority(trustme.CA())
    with TemporaryDirectory() as one, TemporaryDirectory() as two, TemporaryDirectory() as three:
        folder = Path(one)
        async with (
            secured(ours.server(folder)) as server,
            secured(ours.server(Path(two), expired=True)) as expired,
            secured(replace(ours.server(Path(three)), tls_client_ca=None)) as one_sided,
        ):
            wrong: dict[str, tuple[ExecutorServer, Any, str | None]] = {
                "plain text": (server, None, None),
                "plain text, server without client certificates": (one_sided, None, None),
                "no certificate": (server, ours.client(None), None),
                "certificate of a foreign authority": (server, foreign.client("alice", trusts=ours), None),
                "expired certificate": (server, ours.client("alice", expired=True), None),
                "server of a foreign authority": (server, ours.client("alice", trusts=foreign), None),
                "server of another name": (server, ours.client("alice"), "elsewhere.example"),
                "server with an expired certificate": (expired, ours.client("alice"), None),
            }
            accepted = 0
            for each, credentials, name in wrong.values():
                for _ in range(size.refused_dials):
                    async with dial(each.target, credentials, name) as channel:
                        code = await channel.unary_unary(GET_INFO)(b"", timeout=TIMEOUT_S).code()
                        accepted += code is not grpc.StatusCode.UNAVAILABLE
            reached = sum(
                method.calls for each in (server, expired, one_sided) for method in each.calls.methods.values()
            )
            right = 0
            for _ in range(size.refused_dials):
                async with dial(server.target, ours.client("alice")) as channel:
                    right += await channel.unary_unary(GET_INFO)(b"", timeout=TIMEOUT_S) != b""
    return Figures(
        "R11",
        "TLS and mutual TLS",
        (
            exactly("wrong connections accepted", accepted, 0),
            exactly("calls that reached the server", reached, 0),
            exactly("right connections accepted", right, size.refused_dials),
        ),
        {"ways to be wrong": sorted(wrong), "dials of each": size.refused_dials},
    )


# --- methods ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Method:
    """A method as reflection tells it."""

    service: str
    name: str
    requests: bool
    responses: bool

    @property
    def path(self) -> str:
        return f"/{self.service}/{self.name}"

    def call(self, channel: grpc.aio.Channel, request: bytes, metadata: Sequence[tuple[str, str]]) -> Any:
        """Call it with raw bytes."""
        if self.requests:
            make = channel.stream_stream if self.responses else channel.stream_unary
            return make(self.path)(metadata=metadata, timeout=REFUSED_WITHIN_S)
        make = channel.unary_stream if self.responses else channel.unary_unary
        return make(self.path)(request, metadata=metadata, timeout=REFUSED_WITHIN_S)


async def all_methods(channel: grpc.aio.Channel, metadata: Sequence[tuple[str, str]]) -> list[Method]:
    """Every method of every service, asked over the wire."""
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
    stream = stub.ServerReflectionInfo(metadata=metadata)
    await stream.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    methods = []
    for service in [each.name for each in (await stream.read()).list_services_response.service]:
        await stream.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=service))
        for data in (await stream.read()).file_descriptor_response.file_descriptor_proto:
            file = descriptor_pb2.FileDescriptorProto.FromString(data)
            methods += [
                Method(service, each.name, each.client_streaming, each.server_streaming)
                for described in file.service
                if f"{file.package}.{described.name}" == service
                for each in described.method
            ]
    stream.cancel()
    return methods


async def explained(call: Any, reason: Reason, code: grpc.StatusCode) -> bool:
    """Whether a call ends with this code and with ErrorInfo of this reason."""
    if await call.code() is not code:
        return False
    details = dict(await call.trailing_metadata()).get("grpc-status-details-bin", b"")
    status = status_pb2.Status.FromString(details)
    info = error_details_pb2.ErrorInfo()
    return (
        bool(status.details) and status.details[0].Unpack(info) and (info.reason, info.domain) == (reason, "ferrum_rpc")
    )


async def r12_every_method_asks_who_calls(size: Size, seed: int = 0) -> Figures:
    """Call every method, and some that do not exist, without credentials and with wrong ones."""
    dice = random.Random(seed)
    with TemporaryDirectory() as folder:
        tokens = Path(folder) / "tokens"
        tokens.touch(mode=0o600)
        tokens.write_text("root the-operators-token operator\n")
        async with secured(Security(tokens=tokens)) as server, dial(server.target) as channel:
            methods = await all_methods(channel, bearer("the-operators-token"))
            closed = [each for each in methods if each.service != health.SERVICE_NAME]
            closed += [Method(closed[0].service, "Nothing", False, False), Method("no.such.Service", "M", True, True)]
            server.calls.methods.clear()
            tried = refused = 0
            let_in: list[str] = []
            for _ in range(size.refused_dials):
                for method in closed:
                    for metadata in _wrong_credentials(dice):
                        call = method.call(channel, dice.randbytes(dice.randrange(64)), metadata)
                        tried += 1
                        if not await explained(call, Reason.UNAUTHENTICATED, grpc.StatusCode.UNAUTHENTICATED):
                            let_in.append(method.path)
                            break  # a stream that is let in takes all of its time; once is enough
                        refused += 1
            reached = [path for path, count in server.calls.methods.items() if set(count.codes) != {"UNAUTHENTICATED"}]
            counted = sum(count.calls for count in server.calls.methods.values())
            check = next(each for each in methods if each.path == f"/{health.SERVICE_NAME}/Check")
            healthy = await check.call(channel, b"", ()).code() is grpc.StatusCode.OK
            serving = server.state.lifecycle is Lifecycle.SERVING
    return Figures(
        "R12",
        "default deny",
        (
            exactly("calls without credentials refused with a reason", refused, tried),
            exactly("methods with a call that reached a handler", len(reached), 0),
            exactly("refusals counted", counted, tried),
            exactly("health answers without credentials", healthy, 1),
            exactly("still serves", serving, 1),
        ),
        {"methods": len(methods), "calls": tried, "let in": let_in},
    )


def _wrong_credentials(dice: random.Random) -> list[tuple[tuple[str, str], ...]]:
    right = "the-operators-token"
    place = dice.randrange(len(right))
    return [
        (),
        bearer(""),
        bearer(dice.randbytes(16).hex()),
        bearer(right[:place] + dice.choice("!?~") + right[place + 1 :]),
        bearer(right + "x"),
        (("authorization", f"Basic {right}"),),
        (("authorization", right),),
        (("x-authorization", f"Bearer {right}"),),
        (*bearer(right), *bearer("another")),
    ]
