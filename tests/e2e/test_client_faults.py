"""Lost replies, dead connections, restarts and cancellations: what was sent is applied exactly once, or not at all.

A proxy stands between client and executor. It forwards every call as raw bytes and loses what it is told to lose, so
that the executor is the real one and its answer is what goes missing.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

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
from tests.support.clients import BOTH_WAYS, losing, restarting, text
from tests.support.lives import counters, play
from tests.support.proxy import proxied as tcp_proxied
from tests.support.serving import Gate, Served, serve_identity
from tests.support.states import with_states
from tests.support.wiring import until

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
PATIENT = ResendPolicy(times=20, backoff_s=0)
ONCE = {"resend": NEVER_RESEND}


# --- exactly once ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
async def test_a_life_under_loss_is_the_life_without(seed: int) -> None:
    async with losing(about={"resend": PATIENT}) as (served, proxy, client):
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
    async with losing(about=ONCE) as (served, proxy, client), client.sequence() as sequence:
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
    async with losing(about=ONCE) as (_, proxy, client), client.sequence() as sequence:
        await sequence.prefill(PROMPT)
        proxy.faults.append("lose")
        with pytest.raises(TransportError):
            await sequence.decode(7)
        with pytest.raises(SequenceVersionMismatch) as stale:
            await sequence.decode(8)
        assert stale.value.seq_len == len(PROMPT) + 1
        assert (await sequence.decode(7)).length == len(PROMPT) + 1


@pytest.mark.parametrize(
    ("fault", "words"), [("lose", "connection reset"), ("garble", "answered 2 other items than the 3")]
)
async def test_a_batch_of_unknown_fate_is_settled_by_sending_its_items_again(fault: str, words: str) -> None:
    async with losing(about=ONCE) as (served, proxy, client):
        sequences = [client.sequence() for _ in range(3)]
        items = [each.item(PROMPT) for each in sequences]
        proxy.faults.append(fault)
        with pytest.raises(TransportError, match=words):
            await client.forward(items)
        assert [(each.in_doubt, each.length) for each in sequences] == [(True, 0)] * 3
        results = await client.forward(items)
        assert all(isinstance(each, Answer) and each.replayed for each in results)
        assert await counters(served) == (3, 24)


@pytest.mark.parametrize("batch", [False, True])
async def test_leaving_a_doubtful_creation_leaves_nothing_behind(batch: bool) -> None:
    async with losing(about=ONCE) as (served, proxy, client):
        with pytest.raises(TransportError):
            async with client.sequence() as sequence:
                proxy.faults.append("lose")
                await (client.forward([sequence.item(PROMPT)]) if batch else sequence.prefill(PROMPT))
        assert (await counters(served))[0] == 0
        assert served.server.state.counters.sequences_created == 1


async def test_leaving_a_doubtful_fork_leaves_no_children_behind() -> None:
    async with losing(about=ONCE) as (served, proxy, client):
        async with client.sequence() as sequence:
            await sequence.prefill(PROMPT)
            proxy.faults.append("lose")
            with pytest.raises(TransportError):
                await sequence.fork(3)
            assert (await counters(served))[0] == 4
            await sequence.decode(1)
        assert (await counters(served))[0] == 0


async def test_rows_that_the_replay_has_lost_are_computed_again() -> None:
    made = with_states(9)
    async with losing(replay_bytes=1, made=made) as (served, proxy, client), client.sequence() as sequence:
        expected = client.sequence()
        for tokens, positions in ((PROMPT, Positions.LAST), ([1, 2, 3], Positions.ALL), ([4], Positions.LAST)):
            output = OutputSpec(positions, FullLogits())
            truth = await client.forward([expected.item(tokens, output)])
            proxy.faults.append("lose")
            [answer] = await client.forward([sequence.item(tokens, output)])
            assert answer.replayed
            np.testing.assert_allclose(answer.logits, truth[0].logits, atol=1e-6)
            proxy.faults.append("lose")
            single = await sequence.decode(9, FullLogits())
            assert single.logits.shape == (1, 256)
            await sequence.truncate(expected.length)
        assert sequence.length == expected.length
        proxy.faults.append("lose")
        [answer] = (await client.forward([sequence.item([7], truncate_to=3)])).all_answers()
        assert answer.replayed and answer.recomputed_tokens == 3, "those of the first time"
        await served.check()


async def test_rows_that_cannot_be_computed_again_leave_an_answer_that_says_so_and_a_sequence_that_moved_on() -> None:
    async with losing(replay_bytes=1, about={"resend": ResendPolicy(times=1, backoff_s=0)}) as (_, proxy, client):
        sequence = client.sequence()
        await sequence.prefill(PROMPT)
        proxy.faults.extend(("lose", "", "refuse", "refuse"))
        answer = await sequence.decode(7)
        assert (answer.length, sequence.length, answer.replayed) == (len(PROMPT) + 1, len(PROMPT) + 1, True)
        with pytest.raises(NoSuchRowsError, match="rows are gone"):
            _ = answer.token


# --- deadlines, cancellation, closing -------------------------------------------------------------------------------


@asynccontextmanager
async def held(
    session: bool = False, timeout_s: float | None = None
) -> AsyncIterator[tuple[Gate, Served, ExecutorClient, Sequence]]:
    """A sequence whose decode was given up while the executor is at its step: cancelled, or by its deadline."""
    gate = Gate("forward")
    async with (
        serve_identity(stage=gate) as served,
        ExecutorClient(served.target, session=session) as client,
        client.sequence() as sequence,
    ):
        await sequence.prefill(PROMPT)
        task = await gate.hold(sequence.decode(7, timeout_s=timeout_s))
        if timeout_s is None:
            task.cancel()
        with pytest.raises(asyncio.CancelledError if timeout_s is None else DeadlineExceeded):
            await task
        yield gate, served, client, sequence


@BOTH_WAYS
@pytest.mark.parametrize("timeout_s", [None, 0.2], ids=["cancelled", "deadline"])
async def test_a_call_that_was_given_up_during_its_step_is_settled_by_the_same_call(session, timeout_s) -> None:
    async with held(session, timeout_s) as (gate, served, _, sequence):
        assert sequence.in_doubt
        again = asyncio.ensure_future(sequence.decode(7))
        await asyncio.sleep(0)
        gate.open()
        assert (await again).length == sequence.length == len(PROMPT) + 1
        assert served.server.state.engine.counters.tokens == len(PROMPT) + 1


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


async def test_a_sequence_is_released_while_the_executor_is_still_at_its_cancelled_call() -> None:
    async with held() as (gate, served, client, sequence):
        release = asyncio.ensure_future(sequence.release())
        await asyncio.sleep(0)
        gate.open()
        await release
        await client.sequence().prefill(PROMPT)
        assert (await client.status()).pressure.sequences == 1
        await served.check()


@pytest.mark.parametrize("other", ["decode", "truncate", "fork"])
async def test_the_next_call_waits_for_the_end_of_a_cancelled_one_instead_of_calling_the_sequence_busy(other) -> None:
    async with held() as (gate, served, _, sequence):
        calls: dict[str, tuple[str, Callable[[], Awaitable[object]]]] = {
            "decode": ("Decode", lambda: sequence.decode(8)),
            "truncate": ("TruncateKv", lambda: sequence.truncate(3)),
            "fork": ("ForkKv", sequence.fork),
        }
        refused, made = calls[other]
        call, methods = asyncio.ensure_future(made()), served.server.calls.methods
        await until(lambda: any(name.endswith(f"/{refused}") and count.errors for name, count in methods.items()))
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


@BOTH_WAYS
async def test_after_a_restart_old_handles_say_so_and_the_rebuilt_sequence_goes_on_the_same(session: bool) -> None:
    async with (
        restarting(session) as (_, second, proxy, client),
        client.sequence() as lost,
        client.sequence(keep_tokens=True) as sequence,
    ):
        instance = (await client.info()).instance_id
        expected = await text(client, PROMPT, 10)
        for each in (lost, sequence):
            await each.prefill(PROMPT)
        proxy.lead_to(second.target)
        with pytest.raises(InstanceMismatch):
            await sequence.decode(expected[0])
        await sequence.rebuild()
        assert [each async for each in sequence.generate(expected[:1], max_tokens=9)] == expected[1:]
        assert (await client.info()).instance_id != instance, "the old facts were forgotten"
        await lost.release()
        assert len(second.server.state.handles) == 1


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


async def test_a_peer_that_falls_silent_is_noticed_by_a_session_without_any_deadline() -> None:
    options: dict[str, Any] = {"timeout_s": None, "keepalive_time_s": 0.2, "keepalive_timeout_s": 0.2}
    async with (
        serve_identity() as served,
        tcp_proxied(served.target) as relay,
        ExecutorClient(relay.target, session=True, resend=NEVER_RESEND, release_timeout_s=0.1, **options) as client,
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
