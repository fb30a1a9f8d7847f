"""A program's mistakes, against a real executor: each is refused by name where it is made, and nothing is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import trustme

from clients.scheduler import program as scheduler
from ferrum_rpc import cli
from ferrum_rpc.client import (
    ExecutorClient,
    Positions,
    Run,
    Sample,
    SelectedTokens,
    Sequence,
    TopTokens,
    sync,
    tls,
)
from ferrum_rpc.client.encryption import FLAGS, HINTS, ask_who_accepts, explained, with_hint
from ferrum_rpc.client.retry import Deadline
from ferrum_rpc.errors import InvalidRequest, TransportError
from tests.faults.security import Authority
from tests.support.clients import BOTH_WAYS, believe
from tests.support.commands import run
from tests.support.serving import Served, serve_identity
from tests.support.wiring import messages

PROMPT = [3, 1, 4, 1, 5]

MISTAKES: list[tuple[Any, str]] = [
    (lambda client, sequence: sequence.prefill(np.array([[1, 2]])), "token_ids"),
    (lambda client, sequence: sequence.prefill([]), "token_ids"),
    (lambda client, sequence: sequence.prefill([1], SelectedTokens([1])), "output.selected_tokens.token_ids"),
    (lambda client, sequence: sequence.prefill([1], chunk=0), "chunk"),
    (lambda client, sequence: sequence.prefill([1], Sample(bias={32: 1.0})), "output.sample.bias"),
    (lambda client, sequence: sequence.decode(1, run=Run(2, "\n")), "run.stop_token_ids"),
    (lambda client, sequence: sequence.decode([1]), "token_ids"),
    (lambda client, sequence: sequence.decode(1 << 40), "token_ids"),
    (lambda client, sequence: sequence.decode(1, truncate_to=-1), "truncate_to"),
    (lambda client, sequence: sequence.decode(1, TopTokens(0)), "output.top_tokens.k"),
    (lambda client, sequence: sequence.verify(1), "token_ids"),
    (lambda client, sequence: sequence.truncate(-1), "length"),
    (lambda client, sequence: sequence.fork(0), "count"),
    (lambda client, sequence: sequence.fork(1, "2"), "at_length"),
    (lambda client, sequence: sequence.reserve(-1), "tokens"),
    (lambda client, sequence: sequence.rebuild(["a"]), "token_ids"),
    (lambda client, sequence: client.forward([[1, 2]]), "items[0]"),
    (lambda client, sequence: client.forward([sequence.item([1]), sequence]), "items[1]"),
    (lambda client, sequence: client.forward(sequence.item([1])), "items"),
    (lambda client, sequence: client.batch_decode(None), "items"),
    (lambda client, sequence: client.warmup(-1), "batch_size"),
    # before they are awaited
    (lambda client, sequence: sequence.item([[1]]), "token_ids"),
    (lambda client, sequence: sequence.item([1], truncate_to=-1), "truncate_to"),
    (lambda client, sequence: sequence.generate([1], stop=["\n"]), "stop"),
    (lambda client, sequence: sequence.generate([1], output=Positions.NONE), "output"),
    (lambda client, sequence: client.sequence(reserve_tokens=-1), "create.reserve_tokens"),
    (lambda client, sequence: client.sequence(cache_salt="salt"), "create"),
    (lambda client, sequence: client.sequence(cache_mode="readonly"), "create"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[Served]:
    async with serve_identity() as served:
        yield served


async def refused(mistake: Any, client: ExecutorClient, sequence: Sequence) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as found:
        made = mistake(client, sequence)
        if hasattr(made, "__await__"):
            await made
    return found.value


@BOTH_WAYS
@pytest.mark.asyncio(loop_scope="module")
async def test_every_mistake_is_refused_at_the_call_and_the_sequence_goes_on(served: Served, session: bool) -> None:
    async with ExecutorClient(served.target, session=session) as client, client.sequence() as sequence:
        await sequence.prefill(PROMPT)
        steps = (await client.status()).counters.steps
        sent = messages(client)
        for number, (mistake, field) in enumerate(MISTAKES):
            before = (sequence.handle, sequence.in_doubt)
            error = await refused(mistake, client, sequence)
            assert error.field == field, number
            assert (sequence.handle, sequence.in_doubt) == before, number
        assert sent == []
        answer = await sequence.decode(9)
        assert answer.length == len(PROMPT) + 1
        assert (await client.status()).counters.steps == steps + 1


@pytest.mark.asyncio(loop_scope="module")
async def test_a_client_and_a_sequence_print_where_they_stand_and_no_secret(served: Served) -> None:
    client = ExecutorClient(served.target, token="a-secret-token")  # noqa: S106 - not one
    assert repr(client) == f"<ExecutorClient {served.target} unary: not open>"
    assert repr(ExecutorClient(served.target, session=True)) == f"<ExecutorClient {served.target} session: not open>"
    async with client:
        assert repr(client) == f"<ExecutorClient {served.target} unary: open>"
        sequence = client.sequence()
        assert repr(sequence) == "<Sequence length=0 version=0>"
        answer = await sequence.prefill(PROMPT)
        assert repr(sequence) == "<Sequence length=5 version=1>"
        secrets = (repr(sequence.handle.id), sequence.handle.id.hex(), "secret")
        for shown in (repr(client), repr(sequence), repr(answer)):
            assert not any(each in shown for each in secrets)
        await sequence.release()
        assert repr(sequence) == "<Sequence length=5 version=1: released>"


@pytest.mark.asyncio(loop_scope="module")
async def test_what_is_beyond_a_known_limit_is_refused_before_it_is_sent(served: Served) -> None:
    """An executor before revision 6 reports 0: then it is asked."""
    async with ExecutorClient(served.target, lease=None) as client:
        info = await client.info()
        sent = messages(client)
        async with client.sequence() as sequence:
            for mistake, field in (
                (lambda: client.sequence(cache_salt=b"s" * 1025), "create.cache_salt"),
                (lambda: client.sequence(adapter="é" * 129), "create.adapter"),
                (lambda: client.acquire_lease(client_name="n" * 257), "client_name"),
                (lambda: sequence.prefill([1], run=Run(2, tuple([2] * 257))), "run.stop_token_ids"),
            ):
                error = await refused(lambda c, s, mistake=mistake: mistake(), client, sequence)
                assert error.field == field and len(error.metadata) == 1
            assert not sent
            believe(client, limits=replace(info.limits, max_cache_salt_bytes=0))
            async with client.sequence(cache_salt=b"s" * 1025) as asked:
                with pytest.raises(InvalidRequest):
                    await asked.prefill([1])
            assert sent


# --- TLS on one side only ---------------------------------------------------------------------------------------------


def typed(*words: str) -> object:
    """The exit status of a command, in a thread without an event loop."""
    try:
        cli.main(words)
    except SystemExit as end:
        return end.code
    return 0


@pytest.mark.parametrize("expected", [True, False], ids=["a port with TLS", "a port without"])
async def test_tls_on_one_side_only_is_said_by_name(expected, tmp_path, capsys) -> None:
    authority = Authority(trustme.CA())
    security = replace(authority.server(tmp_path, "127.0.0.1"), tls_client_ca=None)
    wrong, right = (None, tls(tmp_path / "ca.pem")) if expected else (tls(tmp_path / "ca.pem"), None)
    async with serve_identity(security=security if expected else None) as served:
        async with ExecutorClient(served.target, credentials=right) as client:
            assert (await client.info()).model.name == "identity"
        async with ExecutorClient(served.target, credentials=wrong) as client:
            for ask in (client.info, client.status, client.health):
                with pytest.raises(TransportError, match=r"TLS .* credentials") as caught:
                    await ask()
                reported = {"grpc_code": "UNAVAILABLE", "tls": "expected" if expected else "absent"}
                assert caught.value.metadata == reported

        def in_a_thread() -> None:
            raises = pytest.raises(TransportError, match=r"TLS .* credentials")
            with sync.ExecutorClient(served.target, credentials=wrong) as client, raises:
                client.status()

        await asyncio.to_thread(in_a_thread)
        for command in ("info", "status", "health"):
            flags = () if expected else ("--tls",)
            assert await asyncio.to_thread(typed, command, "--target", served.target, *flags) == 1
            assert ("expects TLS; add --tls" if expected else "no TLS; leave out --tls") in capsys.readouterr().err


REFUSED = "failed to connect to all addresses; last error: UNKNOWN: ipv6:%5B::1%5D:{}: Failed to connect to remote host"


@pytest.mark.parametrize("why", ["untrusted", "name", "expected", "absent"])
async def test_of_a_name_with_several_addresses_the_one_that_accepts_says_why(why, tmp_path, capsys) -> None:
    """gRPC tries ::1 of localhost too, where nobody listens, and often reports that refusal. Here always."""
    name = "another" if why == "name" else "localhost"
    authority, other = Authority(trustme.CA()), tmp_path / "other"
    other.mkdir()
    security = replace(authority.server(tmp_path, name), tls_client_ca=None)
    Authority(trustme.CA()).server(other, name)
    ca = (other if why == "untrusted" else tmp_path) / "ca.pem"
    credentials = None if why == "expected" else tls(ca)
    async with serve_identity(security=None if why == "absent" else security) as served:
        target = f"localhost:{served.target.rpartition(':')[2]}"
        refused = TransportError(f"{REFUSED.format(1)}: Connection refused", metadata={"grpc_code": "UNAVAILABLE"})
        again = partial(ask_who_accepts, target, credentials, ())
        found = await with_hint(refused, Deadline.after(20), encrypted=credentials is not None, again=again)
        assert found.metadata == {"grpc_code": "UNAVAILABLE", "tls": why} and HINTS[why] in found.message
        if why in {"untrusted", "expected"}:  # the one with and the one without TLS, as programs say it
            flags = () if credentials is None else ("--tls-ca", str(ca))
            said = f"cannot reach an executor at {target}: {FLAGS[why]}\n"
            assert await asyncio.to_thread(typed, "status", "--target", target, *flags) == 1
            assert capsys.readouterr().err == f"ferrum-rpc status: TRANSPORT: {said}"
            assert await run(target, "bench", *flags) == 1
            assert capsys.readouterr().err == f"ferrum-rpc bench: TRANSPORT: {said}"
            words = ["--target", target, *flags, "--demo", "--patience", "1", "--plain"]
            assert await asyncio.to_thread(scheduler.main, words) == 1
            assert capsys.readouterr().err == f"error: {said}"


@pytest.mark.parametrize(
    ("of_grpc", "hint", "words"),
    [
        ("x: SSL routines:CERTIFICATE_VERIFY_FAILED: certificate has expired: OK", "expired", "renew it"),
        ("x: SSL routines:CERTIFICATE_VERIFY_FAILED: self signed certificate: OK", "untrusted", "give --tls-ca FILE"),
        ("x: Tls handshake failed: no shared cipher: OK", None, "at here: no shared cipher"),
        ("x: ipv4:1.2.3.4:5: Connection refused (111)", None, "at here: Connection refused (111)"),
    ],
)
async def test_a_failed_handshake_is_said_in_a_few_words(of_grpc: str, hint: str | None, words: str) -> None:
    error = TransportError(of_grpc, metadata={"grpc_code": "UNAVAILABLE"})
    found = await with_hint(error, Deadline.after(20), encrypted=True)
    assert found.metadata.get("tls") == hint
    assert words in explained(found, "here") and "\n" not in explained(found, "here")


@pytest.mark.asyncio(loop_scope="module")
async def test_an_address_that_works_by_now_adds_nothing(served: Served) -> None:
    assert await ask_who_accepts(served.target, None, (), 20) is None
    for nobody in ("localhost:1", "unix:/no/such", "ipv4:127.0.0.1:1"):
        assert await ask_who_accepts(nobody, None, (), 20) is None


async def test_what_else_closes_a_connection_is_not_taken_for_tls() -> None:
    """A port that nobody listens at, one that closes at once, one that speaks something else."""

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"220 ready\r\n")
        await close(reader, writer)

    async def close(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async def ask(port: int) -> None:
        async with ExecutorClient(f"127.0.0.1:{port}") as client:
            with pytest.raises(TransportError) as caught:
                await client.health()
            assert "TLS" not in caught.value.message and "tls" not in caught.value.metadata

    for answers in (close, greet):
        async with await asyncio.start_server(answers, "127.0.0.1") as server:
            await ask(port := server.sockets[0].getsockname()[1])
    await ask(port)


@pytest.mark.parametrize("says", [b"\x15\x03\x03\x00\x02\x02\x28", b"\x16\x03\x03\x00\x7a"])
async def test_an_alert_is_an_answer_of_tls_too(says: bytes) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello = await reader.read(1 << 10)
        assert hello[:2] == b"\x16\x03"
        writer.write(says)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1") as server:
        port = server.sockets[0].getsockname()[1]
        closed = TransportError(f"failed to connect to all addresses; last error: ipv4:127.0.0.1:{port}: Socket closed")
        assert (await with_hint(closed, Deadline.after(20), encrypted=False)).metadata == {"tls": "expected"}
        assert await with_hint(closed, Deadline.after(20), encrypted=True) is closed
        assert await with_hint(closed, Deadline.after(0), encrypted=False) is closed
