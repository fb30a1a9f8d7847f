"""The beginning and the end of an executor, as its clients see them: the model loads, and the executor drains."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from ferrum_rpc.client import ExecutorClient, ExecutorInfo, ExecutorState
from ferrum_rpc.client.retry import fate_unknown
from ferrum_rpc.client.session.transport import OPENINGS
from ferrum_rpc.errors import DeadlineExceeded, Draining, Starting, TransportError
from ferrum_rpc.service import state
from tests.support.clients import BOTH_WAYS
from tests.support.serving import Loading, Served, loading, serve_identity
from tests.support.waiting import until


async def counts(client: ExecutorClient) -> dict[str, int]:
    """Calls of each method that the executor has answered."""
    return {each.method.rpartition("/")[2]: each.calls for each in (await client.status()).methods}


async def asked(loads: Loading, method: str, times: int) -> None:
    """Wait until the method was called so often."""
    methods = loads.server.calls.methods
    await until(lambda: sum(each.calls for name, each in methods.items() if name.endswith(f"/{method}")) >= times, 20)


# --- the beginning --------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def grpc_retries_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "RETRY_ELSEWHERE_S", 0.001)


@BOTH_WAYS
async def test_a_client_waits_while_the_model_loads(session: bool) -> None:
    async with loading() as loads, ExecutorClient(loads.server.target, session=session) as client:
        calls = [asyncio.ensure_future(client.info()), asyncio.ensure_future(client.sequence().prefill([1, 2]))]
        await asked(loads, "GetInfo", 10)  # more than gRPC by itself asks
        assert not any(call.done() for call in calls)
        loads.go.set()
        info, answer = await asyncio.gather(*calls)
        assert isinstance(info, ExecutorInfo)
        assert answer.length == 2


async def test_who_gives_up_while_the_model_loads_gives_up_for_itself_alone() -> None:
    async with loading() as loads, ExecutorClient(loads.server.target) as client:
        hasty = asyncio.ensure_future(client.info(timeout_s=0.3))
        await asyncio.sleep(0)
        patient, cancelled = asyncio.ensure_future(client.info()), asyncio.ensure_future(client.info())
        await asked(loads, "GetInfo", 1)
        cancelled.cancel()
        with pytest.raises((Starting, DeadlineExceeded)):  # whichever its deadline meets
            await hasty
        assert not patient.done()
        loads.go.set()
        assert (await patient).model.name == "identity"
        assert cancelled.cancelled() or cancelled.cancelling()


async def test_a_session_waits_while_the_successor_of_its_executor_loads() -> None:
    async with serve_identity() as first, ExecutorClient(first.target, session=True) as client:
        sequence = client.sequence(rebuild=True)
        await sequence.prefill([1, 2])
        await first.server.stop()
        async with loading(first.server.port) as successor:
            call = asyncio.ensure_future(sequence.decode(3))
            await asked(successor, "Session", OPENINGS + 2)  # a session's openings where nobody answers at all
            assert not call.done()
            successor.go.set()
            assert (await call).length == 3


# --- the end --------------------------------------------------------------------------------------------------------


async def drained(served: Served) -> None:
    """Every sequence's time is over, and the port is still open."""
    served.server.drain(0)
    async with asyncio.timeout(10):
        await served.server.draining.done.wait()


@BOTH_WAYS
async def test_a_drain_is_told_at_once_and_is_what_a_closed_port_means_after_it(session: bool) -> None:
    async with (
        serve_identity() as served,
        ExecutorClient(served.target, session=session, release_timeout_s=0.2) as client,
    ):
        sequence = client.sequence()
        await sequence.prefill([1, 2, 3])
        await drained(served)
        for call in (partial(sequence.decode, 4), partial(client.sequence().prefill, [1])):
            with pytest.raises(Draining) as told:
                await call()
            if not session:  # a step may have gone out just before the session's end was read
                assert not fate_unknown(told.value)
                assert told.value.retry_after_s is not None
        assert (await counts(client)).get("Decode", 0) <= 1, "gRPC did not try again where trying cannot help"
        await served.server.stop()
        feeding = partial(sequence.decode, 4), partial(client.sequence().prefill, [1])
        for call in (*feeding, partial(client.forward, [sequence.item([4])]), client.status):
            with pytest.raises(Draining, match="was draining and is gone") as gone:
                await call()
            assert fate_unknown(gone.value), "a lost connection leaves the fate unknown, whatever the reason"
        assert sequence.in_doubt
        assert sequence.length == 3


@pytest.mark.parametrize("how", ["its session ended", "it asked for the drain", "it saw the status"])
async def test_a_client_learns_of_a_drain_in_more_than_one_way(how: str) -> None:
    async with (
        serve_identity() as served,
        ExecutorClient(served.target, session=how == "its session ended", release_timeout_s=0.2) as client,
    ):
        sequence = client.sequence()
        await sequence.prefill([1])
        if how == "it asked for the drain":
            assert await client.drain(0) is ExecutorState.DRAINING
        else:
            await drained(served)
        if how == "it saw the status":
            assert (await client.status()).state is ExecutorState.DRAINING
        await served.server.stop()
        with pytest.raises(Draining, match="is gone"):
            await sequence.decode(2)


async def test_a_successor_at_the_same_address_is_not_draining() -> None:
    async with serve_identity() as first, ExecutorClient(first.target, release_timeout_s=0.2) as client:
        sequence = client.sequence(keep_tokens=True)
        await sequence.prefill([1, 2])
        await drained(first)
        with pytest.raises(Draining):
            await sequence.decode(3)
        await first.server.stop()
        async with loading(first.server.port) as successor:
            successor.go.set()
            await successor.server.ready()
            await sequence.rebuild()
            assert sequence.length == 2
        with pytest.raises(TransportError):
            await sequence.decode(3)
