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
from grpc_health.v1 import health

from ferrum_rpc.errors import Reason
from ferrum_rpc.service.guard.auth import Security
from ferrum_rpc.service.server import ExecutorServer
from ferrum_rpc.service.state import Lifecycle
from ferrum_rpc.wire.status import error_from_status
from tests.faults.any_bytes import explanation, methods_by_reflection, path
from tests.faults.figures import Figures, exactly
from tests.faults.sizes import Size
from tests.support.serving import serve_identity
from tests.support.tokens import bearer, token_file

TIMEOUT_S: Final = 20.0
REFUSED_WITHIN_S: Final = 5.0
"""Of calls that are refused at once: only a stream that is let in waits for it."""

GET_INFO: Final = "/ferrum_rpc.executor.v1.ModelExecutor/GetInfo"
LONG_AGO: Final = datetime.datetime(2001, 1, 1, tzinfo=datetime.UTC)
EXPIRED: Final = {"not_before": LONG_AGO, "not_after": LONG_AGO + datetime.timedelta(days=1)}


# --- servers ----------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def secured(security: Security) -> AsyncIterator[ExecutorServer]:
    """An identity server with these settings, whose certificate may name its host."""
    async with serve_identity(security=security, host="localhost") as served:
        yield served.server


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


# --- certificates -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Authority:
    """A certificate authority and what it signs."""

    ca: trustme.CA

    def server(self, folder: Path, *names: str, expired: bool = False) -> Security:
        """A server with a certificate for these names (``localhost``), whose clients need one of the same authority."""
        leaf = self.ca.issue_cert(*(names or ("localhost",)), **(EXPIRED if expired else {}))
        security = Security(tls_cert=folder / "cert.pem", tls_key=folder / "key.pem", tls_client_ca=folder / "ca.pem")
        write_pair(leaf, folder / "cert.pem", folder / "key.pem")
        self.ca.cert_pem.write_to_path(folder / "ca.pem")
        return security

    def client(self, name: str | None, *, trusts: Authority | None = None, expired: bool = False) -> Any:
        """Credentials of a client with this name; None: one that shows no certificate."""
        roots = (trusts or self).ca.cert_pem.bytes()
        if name is None:
            return grpc.ssl_channel_credentials(roots)
        leaf = self.ca.issue_cert(name, **(EXPIRED if expired else {}))
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
        "TLS and mutual TLS",
        exactly("wrong connections accepted", accepted, 0),
        exactly("calls that reached the server", reached, 0),
        exactly("right connections accepted", right, size.refused_dials),
        facts={"ways to be wrong": sorted(wrong), "dials of each": size.refused_dials},
    )


# --- methods ----------------------------------------------------------------------------------------------------------


async def paths(channel: grpc.aio.Channel, metadata: Sequence[tuple[str, str]]) -> list[str]:
    """The path of every method of every service, asked over the wire."""
    return list(map(path, await methods_by_reflection(channel, metadata)))


def call(channel: grpc.aio.Channel, method: str, request: bytes, metadata: Sequence[tuple[str, str]]) -> Any:
    """Call a method with raw bytes, whatever its kind: on the wire one message is a stream of them."""
    return channel.unary_stream(method)(request, metadata=metadata, timeout=REFUSED_WITHIN_S)


async def explained(call: Any, reason: Reason, code: grpc.StatusCode) -> bool:
    """Whether a call ends with this code and with ErrorInfo of this reason."""
    status = explanation(await call.trailing_metadata())
    return await call.code() is code and status is not None and error_from_status(status).reason is reason


async def r12_every_method_asks_who_calls(size: Size, seed: int = 0) -> Figures:
    """Call every method, and some that do not exist, without credentials and with wrong ones."""
    dice = random.Random(seed)
    with token_file("root the-operators-token operator") as tokens:
        async with secured(Security(tokens=tokens)) as server, dial(server.target) as channel:
            methods = await paths(channel, bearer("the-operators-token"))
            closed = [each for each in methods if not each.startswith(f"/{health.SERVICE_NAME}/")]
            closed += [closed[0].rpartition("/")[0] + "/Nothing", "/no.such.Service/M"]
            server.calls.methods.clear()
            tried = refused = 0
            let_in: list[str] = []
            for _ in range(size.refused_dials):
                for method in closed:
                    for metadata in _wrong_credentials(dice):
                        refusal = call(channel, method, dice.randbytes(dice.randrange(64)), metadata)
                        tried += 1
                        if not await explained(refusal, Reason.UNAUTHENTICATED, grpc.StatusCode.UNAUTHENTICATED):
                            let_in.append(method)
                            break  # a stream that is let in takes all of its time; once is enough
                        refused += 1
            reached = [each for each, count in server.calls.methods.items() if set(count.codes) != {"UNAUTHENTICATED"}]
            counted = sum(count.calls for count in server.calls.methods.values())
            check = channel.unary_unary(f"/{health.SERVICE_NAME}/Check")
            healthy = await check(b"", timeout=TIMEOUT_S).code() is grpc.StatusCode.OK
            serving = server.state.lifecycle is Lifecycle.SERVING
    return Figures(
        "default deny",
        exactly("calls without credentials refused with a reason", refused, tried),
        exactly("methods with a call that reached a handler", len(reached), 0),
        exactly("refusals counted", counted, tried),
        exactly("health answers without credentials", healthy, 1),
        exactly("still serves", serving, 1),
        facts={"methods": len(methods), "calls": tried, "let in": let_in},
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
