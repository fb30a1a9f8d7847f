"""Lost replies, dead connections, restarts and cancellations: what was sent is applied exactly once, or not at all.

A proxy stands between client and executor. It forwards every call as raw bytes and loses what it is told to lose, so
that the executor is the real one and its answer is what goes missing.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import numpy as np
import pytest

from ferrum_rpc.client import (
    NEVER_RESEND,
    Answer,
    ExecutorClient,
    FullLogits,
    NoSuchRowsError,
    OutputSpec,
    Positions,
    ResendPolicy,
    Sequence,
)
from ferrum_rpc.errors import DeadlineExceeded, InstanceMismatch, SequenceVersionMismatch, TransportError
from ferrum_rpc.executor.v1 import model_executor_pb2
from tests.faults.proxy import proxied as tcp_proxied
from tests.serving import Gate, Served, serve_identity
from tests.wiring import until

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
BOTH_WAYS = pytest.mark.parametrize("session", [False, True], ids=["unary", "session"])
PATIENT = ResendPolicy(times=20, backoff_s=0)
LEASE_CALLS = ("AcquireLease", "KeepAlive", "RevokeLease")


class Proxy(grpc.GenericRpcHandler):
    """Forwards unary calls to ``upstream``. ``faults`` are taken one per call, in order:

    ``""`` forward; ``lose`` forward and lose the answer; ``refuse`` do not forward, fail as a dead connection does;
    ``garble`` forward and drop the answer's last result.
    With ``only`` set, calls of other methods pass untouched; without, those of the lease do, which come when they will.
    """

    def __init__(self, upstream: str) -> None:
        self.faults: deque[str] = deque()
        self.only: str | None = None
        self.code = grpc.StatusCode.INTERNAL  # gRPC's own retries leave it alone: the client's policy is on trial
        self.calls: Counter[str] = Counter()
        self.lost = 0
        self._channel = grpc.aio.insecure_channel(upstream)
        self._old: list[grpc.aio.Channel] = []

    async def switch(self, upstream: str) -> None:
        """From now on another executor answers here, as after a restart."""
        self._old.append(self._channel)
        self._channel = grpc.aio.insecure_channel(upstream)

    async def close(self) -> None:
        for channel in (*self._old, self._channel):
            await channel.close()

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        async def answer(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
            return await self._answer(details.method, request, context)

        return grpc.unary_unary_rpc_method_handler(answer)

    async def _answer(self, method: str, request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        name = method.rpartition("/")[2]
        self.calls[name] += 1
        on_trial = name == self.only or (self.only is None and name not in LEASE_CALLS)
        fault = self.faults.popleft() if self.faults and on_trial else ""
        if fault == "refuse":
            self.lost += 1
            await context.abort(self.code, "connection reset")
        try:
            reply = await self._channel.unary_unary(method)(request, timeout=context.time_remaining())
        except grpc.aio.AioRpcError as error:
            trailing = tuple(error.trailing_metadata() or ())
            await context.abort(error.code(), error.details() or "", trailing)
            raise
        if fault == "lose":
            self.lost += 1
            await context.abort(self.code, "connection reset")
        if fault == "garble":
            response = model_executor_pb2.UnifiedForwardResponse.FromString(reply)
            del response.results[-1]
            return response.SerializeToString()
        return bytes(reply)


@asynccontextmanager
async def proxied(upstream: str) -> AsyncIterator[tuple[Proxy, str]]:
    """A proxy before an executor, and where it listens."""
    proxy = Proxy(upstream)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((proxy,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield proxy, f"127.0.0.1:{port}"
    finally:
        await server.stop(None)
        await proxy.close()


@asynccontextmanager
async def world(
    *, resend: ResendPolicy | None = None, **options: Any
) -> AsyncIterator[tuple[Served, Proxy, ExecutorClient]]:
    """An executor, a proxy before it, and a client of the proxy."""
    async with (
        serve_identity(positional=True, **options) as served,
        proxied(served.target) as (proxy, target),
        ExecutorClient(target, resend=resend or ResendPolicy(backoff_s=0)) as client,
    ):
        await client.info()
        yield served, proxy, client


async def counters(served: Served) -> tuple[int, int]:
    """Sequences that live, and tokens that were fed since the start."""
    return len(served.server.state.handles), served.server.state.engine.counters.tokens


# --- exactly once ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["lose", "refuse"])
@pytest.mark.parametrize("code", [grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE])
async def test_a_call_whose_answer_is_lost_is_applied_once_and_answered(fault: str, code: grpc.StatusCode) -> None:
    async with world() as (served, proxy, client), client.sequence() as sequence:
        proxy.code = code
        for length, call in (
            (8, lambda: sequence.prefill(PROMPT)),
            (9, lambda: sequence.decode(7)),
            (11, lambda: sequence.verify([1, 2])),
        ):
            proxy.faults.append(fault)
            answer = await call()
            assert answer.replayed == (fault == "lose")
            assert answer.length == sequence.length == length
            assert answer.tokens.size
        proxy.faults.append(fault)
        await sequence.truncate(5)
        proxy.faults.append(fault)
        children = await sequence.fork(2)
        assert sequence.length == 5
        assert await counters(served) == (3, 11)
        for each in children:
            await each.release()


async def test_a_batch_whose_answer_is_lost_is_applied_once_and_answered() -> None:
    async with world() as (served, proxy, client):
        sequences = [client.sequence() for _ in range(4)]
        for round_ in range(3):
            proxy.faults.append("lose")
            results = await client.forward([each.item([round_, 7], FullLogits()) for each in sequences])
            assert all(isinstance(each, Answer) and each.replayed for each in results)
            assert [each.length for each in sequences] == [2 * round_ + 2] * 4
        assert await counters(served) == (4, 24)


async def test_a_release_whose_answer_is_lost_is_done() -> None:
    async with world() as (served, proxy, client):
        async with client.sequence() as sequence:
            await sequence.prefill(PROMPT)
            proxy.faults.append("lose")
        assert (await counters(served))[0] == 0


async def play(client: ExecutorClient, seed: int) -> list[Any]:
    """A scheduler's life in small: everything that changes a sequence, and what it saw."""
    dice = random.Random(seed)
    seen: list[Any] = []
    async with client.sequence() as one, client.sequence() as two:
        for sequence in (one, two):
            first = await sequence.prefill([dice.randrange(256) for _ in range(6)])
            seen.append(first.token)
        for _ in range(25):
            sequence = dice.choice((one, two))
            token = dice.randrange(256)
            match dice.randrange(6):
                case 0:
                    seen.append((await sequence.decode(token)).token)
                case 1:
                    seen.append((await sequence.verify([token, 5, 6])).tokens.tolist())
                case 2:
                    await sequence.truncate(dice.randint(1, sequence.length))
                case 3:
                    roll_back = dice.randint(1, sequence.length)
                    seen.append((await sequence.decode(token, truncate_to=roll_back)).token)
                case 4:
                    results = await client.forward([one.item([token]), two.item([token, 9])])
                    seen.append([each.token for each in results if isinstance(each, Answer)])
                case _:
                    [child] = await sequence.fork(at=dice.randint(1, sequence.length))
                    async with child:
                        seen.append((await child.decode(token)).token)
            seen.append((one.length, two.length))
        for sequence in (one, two):
            row = (await sequence.decode(0, FullLogits())).logits[0]
            seen.append(row.round(4).tolist())
    return seen


@pytest.mark.parametrize("seed", range(6))
async def test_a_life_under_loss_is_the_life_without(seed: int) -> None:
    async with world(resend=PATIENT) as (served, proxy, client):
        quiet = await play(client, seed)
        fed = served.server.state.engine.counters.tokens
        dice = random.Random(seed)
        proxy.faults.extend(dice.choices(("", "lose", "refuse"), (4, 3, 3), k=10_000))
        noisy = await play(client, seed)
        proxy.faults.clear()
        assert proxy.lost > 20
        assert noisy == quiet
        assert served.server.state.engine.counters.tokens == 2 * fed, "every token was fed exactly once"
        assert (await counters(served))[0] == 0
        await served.check()


# --- unknown fates --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["lose", "refuse"])
async def test_the_same_line_of_code_again_settles_an_unknown_fate(fault: str) -> None:
    async with world(resend=NEVER_RESEND) as (served, proxy, client), client.sequence() as sequence:
        for length, call in (
            (8, lambda: sequence.prefill(PROMPT)),
            (9, lambda: sequence.decode(7)),
            (4, lambda: sequence.truncate(4)),
            (6, lambda: sequence.verify([1, 2])),
        ):
            before = sequence.length
            proxy.faults.append(fault)
            with pytest.raises(TransportError):
                await call()
            assert sequence.in_doubt
            assert sequence.length == before
            await call()
            assert not sequence.in_doubt
            assert sequence.length == length
        assert await counters(served) == (1, 11)


async def test_another_call_after_an_unknown_fate_never_builds_on_a_wrong_length() -> None:
    async with world(resend=NEVER_RESEND) as (_, proxy, client), client.sequence() as sequence:
        await sequence.prefill(PROMPT)
        proxy.faults.append("lose")
        with pytest.raises(TransportError):
            await sequence.decode(7)
        with pytest.raises(SequenceVersionMismatch) as stale:
            await sequence.decode(8)
        assert stale.value.seq_len == len(PROMPT) + 1
        assert (await sequence.decode(7)).length == len(PROMPT) + 1


async def test_a_batch_of_unknown_fate_is_settled_by_sending_its_items_again() -> None:
    async with world(resend=NEVER_RESEND) as (served, proxy, client):
        sequences = [client.sequence() for _ in range(3)]
        items = [each.item(PROMPT) for each in sequences]
        proxy.faults.append("lose")
        with pytest.raises(TransportError):
            await client.forward(items)
        assert all(each.in_doubt for each in sequences)
        results = await client.forward(items)
        assert all(isinstance(each, Answer) and each.replayed for each in results)
        assert await counters(served) == (3, 24)


@pytest.mark.parametrize("batch", [False, True])
async def test_leaving_a_doubtful_creation_leaves_nothing_behind(batch: bool) -> None:
    async with world(resend=NEVER_RESEND) as (served, proxy, client):
        with pytest.raises(TransportError):
            async with client.sequence() as sequence:
                proxy.faults.append("lose")
                await (client.forward([sequence.item(PROMPT)]) if batch else sequence.prefill(PROMPT))
        assert (await counters(served))[0] == 0
        assert served.server.state.counters.sequences_created == 1


async def test_leaving_a_doubtful_fork_leaves_no_children_behind() -> None:
    async with world(resend=NEVER_RESEND) as (served, proxy, client):
        async with client.sequence() as sequence:
            await sequence.prefill(PROMPT)
            proxy.faults.append("lose")
            with pytest.raises(TransportError):
                await sequence.fork(3)
            assert (await counters(served))[0] == 4
            await sequence.decode(1)
        assert (await counters(served))[0] == 0


async def test_rows_that_the_replay_has_lost_are_computed_again() -> None:
    async with world(replay_bytes=1) as (served, proxy, client), client.sequence() as sequence:
        expected = client.sequence()
        for tokens, positions in (
            (PROMPT, Positions.LAST),
            ([1, 2, 3], Positions.ALL),
            ([4], Positions.LAST),
        ):
            output = OutputSpec(positions, FullLogits())
            truth = await client.forward([expected.item(tokens, output)])
            proxy.faults.append("lose")
            [answer] = await client.forward([sequence.item(tokens, output)])
            assert isinstance(answer, Answer)
            assert isinstance(truth[0], Answer)
            assert answer.replayed
            np.testing.assert_allclose(answer.logits, truth[0].logits, atol=1e-6)
            proxy.faults.append("lose")
            single = await sequence.decode(9, FullLogits())
            assert single.logits.shape == (1, 256)
            await sequence.truncate(expected.length)
        assert sequence.length == expected.length
        await served.check()


async def test_rows_that_cannot_be_computed_again_leave_an_answer_that_says_so_and_a_sequence_that_moved_on() -> None:
    async with world(replay_bytes=1, resend=ResendPolicy(times=1, backoff_s=0)) as (_, proxy, client):
        sequence = client.sequence()
        await sequence.prefill(PROMPT)
        proxy.faults.extend(("lose", "", "refuse", "refuse"))
        answer = await sequence.decode(7)
        assert (answer.length, sequence.length, answer.replayed) == (len(PROMPT) + 1, len(PROMPT) + 1, True)
        with pytest.raises(NoSuchRowsError, match="rows are gone"):
            _ = answer.token


async def test_an_answer_to_other_items_than_were_sent_is_an_error_and_not_a_mix_up() -> None:
    async with world(resend=NEVER_RESEND) as (_, proxy, client):
        sequences = [client.sequence() for _ in range(3)]
        items = [each.item(PROMPT) for each in sequences]
        proxy.faults.append("garble")
        with pytest.raises(TransportError, match="answered 2 other items than the 3"):
            await client.forward(items)
        assert [each.length for each in sequences] == [0, 0, 0]
        assert all(isinstance(each, Answer) and each.replayed for each in await client.forward(items))


# --- retries of gRPC itself -----------------------------------------------------------------------------------------


async def test_unavailable_is_attempted_four_times_and_nothing_else_is_repeated() -> None:
    async with world(resend=NEVER_RESEND) as (_, proxy, client):
        await client.info()
        for code, attempts in (
            (grpc.StatusCode.UNAVAILABLE, 4),
            (grpc.StatusCode.RESOURCE_EXHAUSTED, 1),
            (grpc.StatusCode.DEADLINE_EXCEEDED, 1),
            (grpc.StatusCode.ABORTED, 1),
            (grpc.StatusCode.INTERNAL, 1),
        ):
            proxy.code, proxy.only = code, "Prefill"
            proxy.calls.clear()
            proxy.faults.extend(["refuse"] * 10)
            sequence = client.sequence()
            with pytest.raises(Exception, match="connection reset"):
                await sequence.prefill(PROMPT)
            assert proxy.calls["Prefill"] == attempts, code
            proxy.faults.clear()
            await sequence.release()


async def test_an_executor_that_keeps_failing_is_not_hammered() -> None:
    async with world(resend=NEVER_RESEND) as (_, proxy, client):
        proxy.code, proxy.only = grpc.StatusCode.UNAVAILABLE, "GetStatus"
        proxy.faults.extend(["refuse"] * 1000)
        for _ in range(30):
            with pytest.raises(TransportError):
                await client.status()
        assert proxy.calls["GetStatus"] < 2 * 30, "the throttle ended the retries"


# --- deadlines, cancellation, closing -------------------------------------------------------------------------------


@BOTH_WAYS
async def test_a_deadline_that_passes_during_the_step_leaves_a_fate_that_the_same_call_settles(session: bool) -> None:
    gate = Gate("forward")
    async with (
        serve_identity(stage=gate) as served,
        ExecutorClient(served.target, session=session) as client,
        client.sequence() as sequence,
    ):
        await sequence.prefill(PROMPT)
        with pytest.raises(DeadlineExceeded):
            await (await gate.hold(sequence.decode(7, timeout_s=0.2)))
        assert sequence.in_doubt
        gate.open()
        answer = await sequence.decode(7)
        assert (answer.length, sequence.length) == (len(PROMPT) + 1, len(PROMPT) + 1)
        assert served.server.state.engine.counters.tokens == len(PROMPT) + 1


async def hold_and_cancel(gate: Gate, call: Any) -> None:
    task = await gate.hold(call)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("batch", [False, True])
async def test_a_creation_cancelled_during_its_step_leaves_nothing_behind(batch: bool) -> None:
    gate = Gate("forward")
    async with serve_identity(stage=gate) as served, ExecutorClient(served.target) as client:

        async def create() -> None:
            async with client.sequence() as sequence:
                await (client.forward([sequence.item(PROMPT)]) if batch else sequence.prefill(PROMPT))

        task = await gate.hold(create())
        task.cancel()
        await asyncio.sleep(0)
        gate.open()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await client.status()).pressure.sequences == 0
        assert served.server.state.counters.sequences_created == 1
        await served.check()


@BOTH_WAYS
async def test_a_sequence_goes_on_after_a_cancelled_call(session: bool) -> None:
    gate = Gate("forward")
    async with (
        serve_identity(stage=gate) as served,
        ExecutorClient(served.target, session=session) as client,
        client.sequence() as sequence,
    ):
        await sequence.prefill(PROMPT)
        await hold_and_cancel(gate, sequence.decode(7))
        again = asyncio.ensure_future(sequence.decode(7))
        await asyncio.sleep(0)
        gate.open()
        assert (await again).length == len(PROMPT) + 1
        assert served.server.state.engine.counters.tokens == len(PROMPT) + 1


async def test_a_sequence_is_released_while_the_executor_is_still_at_its_cancelled_call() -> None:
    gate = Gate("forward")
    async with serve_identity(stage=gate) as served, ExecutorClient(served.target) as client:
        sequence = client.sequence()
        await sequence.prefill(PROMPT)
        await hold_and_cancel(gate, sequence.decode(7))
        release = asyncio.ensure_future(sequence.release())
        await asyncio.sleep(0)
        gate.open()
        await release
        other = client.sequence()
        await other.prefill(PROMPT)
        assert (await client.status()).pressure.sequences == 1
        await served.check()


@pytest.mark.parametrize("other", ["decode", "truncate", "fork"])
async def test_the_next_call_waits_for_the_end_of_a_cancelled_one_instead_of_calling_the_sequence_busy(
    other: str,
) -> None:
    gate = Gate("forward")
    async with (
        serve_identity(stage=gate) as served,
        ExecutorClient(served.target) as client,
        client.sequence() as sequence,
    ):
        await sequence.prefill(PROMPT)
        await hold_and_cancel(gate, sequence.decode(7))
        calls: dict[str, Callable[[], Awaitable[object]]] = {
            "decode": lambda: sequence.decode(8),
            "truncate": lambda: sequence.truncate(3),
            "fork": sequence.fork,
        }
        call = asyncio.ensure_future(calls[other]())
        refused = f"{'ModelExecutor/'}{'Decode' if other == 'decode' else other.capitalize() + 'Kv'}"
        methods = served.server.calls.methods
        await until(lambda: any(name.endswith(refused) and count.errors for name, count in methods.items()))
        gate.open()
        with pytest.raises(SequenceVersionMismatch):
            await call
        assert (await sequence.decode(7)).length == len(PROMPT) + 1


@BOTH_WAYS
async def test_closing_the_client_ends_a_call_in_flight_with_an_error_and_not_a_cancellation(session: bool) -> None:
    gate = Gate("forward")
    async with serve_identity(stage=gate) as served:
        client = ExecutorClient(served.target, session=session, release_timeout_s=0.1)
        async with client:
            sequence = client.sequence()
            await sequence.prefill(PROMPT)
            task = await gate.hold(sequence.decode(7))
        with pytest.raises(TransportError, match="closed"):
            await task
        gate.open()


# --- the executor's own end -----------------------------------------------------------------------------------------


async def test_after_a_restart_old_handles_say_so_and_the_rebuilt_sequence_goes_on_the_same() -> None:
    async def generate(sequence: Sequence, token: int, steps: int) -> list[int]:
        out = [token]
        while len(out) <= steps:
            out.append((await sequence.decode(out[-1])).token)
        return out[1:]

    async with (
        serve_identity(positional=True) as first,
        serve_identity(positional=True) as second,
        proxied(first.target) as (proxy, target),
        ExecutorClient(target) as client,
        client.sequence() as whole,
        client.sequence(keep_tokens=True) as careful,
        client.sequence(rebuild=True) as carefree,
    ):
        instance = (await client.info()).instance_id
        token = (await whole.prefill(PROMPT)).token
        expected = await generate(whole, token, 10)
        for sequence in (careful, carefree):
            await sequence.prefill(PROMPT)
            assert await generate(sequence, token, 5) == expected[:5]

        await proxy.switch(second.target)
        with pytest.raises(InstanceMismatch):
            await careful.decode(expected[4])
        await careful.rebuild()
        assert await generate(careful, expected[4], 5) == expected[5:]
        assert await generate(carefree, expected[4], 5) == expected[5:]
        assert (await client.info()).instance_id != instance, "the old facts were forgotten"
        await whole.release()
        assert len(second.server.state.handles) == 2


async def test_leaving_a_sequence_of_a_dead_executor_does_not_hide_the_bodys_own_error() -> None:
    async with serve_identity() as served:
        client = ExecutorClient(served.target, release_timeout_s=0.2)
        await client.__aenter__()
        with pytest.raises(ZeroDivisionError):
            async with client.sequence() as sequence:
                await sequence.prefill(PROMPT)
                await served.server.stop(grace_s=0)
                _ = 1 / 0
    await client.close()


async def test_a_client_that_wants_tls_does_not_speak_to_a_server_without() -> None:
    async with (
        serve_identity() as served,
        ExecutorClient(served.target, credentials=grpc.ssl_channel_credentials(), resend=NEVER_RESEND) as client,
    ):
        with pytest.raises(TransportError):
            await client.info()


@BOTH_WAYS
async def test_a_peer_that_falls_silent_is_noticed_without_any_deadline(session: bool) -> None:
    options: dict[str, Any] = {"timeout_s": None, "keepalive_time_s": 0.2, "keepalive_timeout_s": 0.2}
    async with (
        serve_identity() as served,
        tcp_proxied(served.target) as relay,
        ExecutorClient(relay.target, session=session, resend=NEVER_RESEND, release_timeout_s=0.1, **options) as client,
    ):
        sequence = client.sequence()
        await sequence.prefill(PROMPT)
        relay.weather.silent = True
        began = asyncio.get_running_loop().time()
        async with asyncio.timeout(60):  # the test's own patience; without keepalive this call would never end
            with pytest.raises(TransportError):
                await sequence.decode(1)
        assert asyncio.get_running_loop().time() - began < 10, "promised: 2 * (0.2 + 0.2) + 0.5 s, on an idle machine"
        assert sequence.in_doubt
