"""Where two rules of the contract meet: what docs/contract.md says of each such place, over the wire."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from ferrum_rpc.errors import InvalidRequest, Reason
from ferrum_rpc.executor.v1 import executor_control_pb2, forward_pb2, output_pb2, session_pb2
from ferrum_rpc.wire.status import error_from_rpc, error_from_status
from tests.service.test_session import Stream, opened
from tests.support.serving import Served, serve_identity
from tests.support.wiring import item, prefill, reason_of, refused, top


async def test_the_limit_on_top_tokens_is_never_above_the_vocabulary() -> None:
    async with serve_identity(vocab_size=100, max_top_tokens=256) as served:
        info = await served.info()
        assert info.limits.max_top_tokens == 100
        await prefill(served, [1], output=top(100))
        error = await refused(served.prefill([1], output=top(101)), Reason.INVALID_REQUEST)
        assert error.metadata["max_top_tokens"] == "100"
    async with serve_identity(vocab_size=100, max_top_tokens=10) as served:
        assert (await served.info()).limits.max_top_tokens == 10


async def test_a_sequence_twice_in_a_frame_is_as_in_two_frames(served: Served) -> None:
    async with opened(served) as stream:
        twice, once = [await stream.prefill([1, 2, 3]) for _ in range(2)]
        frame = session_pb2.SessionTruncate(handles=[twice, twice, once], lengths=[2, 1, 1])
        first, second, third = (await stream.ask(truncate=frame)).handles.results
        assert reason_of(second) is Reason.SEQUENCE_BUSY
        assert (first.handle.seq_len, third.handle.seq_len) == (2, 1)
        frame = session_pb2.SessionTruncate(handles=[first.handle] * 2, lengths=[1, 1], request_id="the same")
        results = (await stream.ask(truncate=frame)).handles.results
        assert [each.handle.seq_len for each in results] == [1, 1] and results[0] == results[1]
        handle = results[0].handle
        first, second = (await stream.ask(release=session_pb2.SessionRelease(handles=[handle] * 2))).handles.results
        assert first.handle == handle
        assert reason_of(second) is Reason.SEQUENCE_BUSY
        frame = session_pb2.SessionRelease(handles=[third.handle] * 2, any_version=True)
        assert all(each.handle == third.handle for each in (await stream.ask(release=frame)).handles.results)
        assert (await served.status()).pressure.sequences == 0


async def test_closing_a_resumed_session_releases_what_it_made_and_the_lease_keeps_the_rest(served: Served) -> None:
    broken = Stream(served)
    lease = (await broken.hello()).lease_id
    before = await broken.prefill([1, 2, 3])
    broken.call.cancel()
    resumed = Stream(served)
    assert (await resumed.hello(lease_id=lease)).lease_id == lease
    made = await resumed.prefill([1, 2, 3])
    goodbye = await resumed.ask(close=session_pb2.SessionClose(release_sequences=True))
    assert goodbye.goodbye.released_sequences == 1
    await refused(served.decode([1], made), Reason.HANDLE_RELEASED)
    assert (await served.decode([1], before)).output.handle.seq_len == 4
    assert (await served.revoke(lease)).released_sequences == 1


async def test_one_request_id_in_decode_and_in_forward_verify_is_one_call_if_the_rows_are_the_same(served):
    """The name of the call is not its content, but the positions are, and an unset one is ALL in ForwardVerify."""
    handle = await prefill(served, [1, 2, 3])
    named = {"request_id": "named", "output": output_pb2.OutputSpec(positions=output_pb2.POSITIONS_ALL)}
    first = (await served.decode([4], handle, **named)).output.handle
    again = (await served.verify([4], handle, **named)).output
    assert again.replayed and again.handle == first
    second = (await served.decode([5], first, request_id="unnamed")).output.handle
    await refused(served.verify([5], first, request_id="unnamed"), Reason.REQUEST_ID_REUSED)
    [batched] = (await served.unified(item([5], first, request_id="unnamed"))).results
    assert batched.output.replayed and batched.output.handle == second


async def test_a_second_drain_can_shorten_the_grace_and_not_prolong_it(served: Served) -> None:
    await prefill(served, [1])
    ends = []
    for seconds in (1000, 2000, 500):
        await served.drain(seconds)
        ends.append(served.server.draining.ends)
    assert ends[2] < ends[0] == ends[1]
    assert not served.server.draining.done.is_set()
    await served.drain(0)
    await asyncio.wait_for(served.server.draining.done.wait(), 5)


async def released(served: Served, count: int) -> Any:
    handle = await prefill(served, [1])
    async with opened(served) as stream:
        answer = await stream.ask(release=session_pb2.SessionRelease(handles=[handle] * count, any_version=True))
        if answer.HasField("error"):
            raise error_from_status(answer.error)


LONG: dict[str, tuple[str, int, Callable[[Served, int], Any]]] = {
    "max_cache_salt_bytes": ("create.cache_salt", 1024, lambda s, n: s.prefill([1], create={"cache_salt": b"s" * n})),
    "max_request_id_bytes": ("request_id", 128, lambda s, n: s.prefill([1], request_id="é" * (n // 2) + "i" * (n % 2))),
    "max_name_bytes": ("client_name", 256, lambda s, n: s.acquire(client_name="n" * n)),
    "max_stop_tokens": (
        "run.stop_token_ids",
        256,
        lambda s, n: s.prefill([1], request_id="run", run={"max_tokens": 1, "stop_token_ids": [2] * n}),
    ),
    "max_biases": (
        "output.sample.bias",
        512,
        lambda s, n: s.prefill([1], output={"sample": {"bias": [output_pb2.TokenBias(token_id=1)] * n}}),
    ),
    "max_operations": ("handles", 128, released),
}
"""What a caller may make long: the limit of GetInfo, the field that a refusal names, what the limit is, and a call with
so much of it."""


async def test_what_a_caller_may_make_long_has_a_limit_that_getinfo_reports(served: Served) -> None:
    limits = (await served.info()).limits
    for limit, (field, most, call) in LONG.items():
        assert getattr(limits, limit) == most
        await call(served, most)
        with pytest.raises((grpc.aio.AioRpcError, InvalidRequest)) as refusal:
            await call(served, most + 1)
        error = refusal.value if isinstance(refusal.value, InvalidRequest) else error_from_rpc(refusal.value)
        assert isinstance(error, InvalidRequest)
        assert (error.field, error.metadata[limit]) == (field, str(most))


async def test_a_name_that_is_too_long_is_refused_before_it_is_looked_for(served: Served) -> None:
    """Of an adapter, and in `hello`: where names are looked for, one that is not there has another refusal."""
    name = "a" * 257
    create = forward_pb2.CreateOptions(adapter=name)
    assert (await refused(served.prefill([1], create=create), Reason.INVALID_REQUEST)).field == "create.adapter"
    for call in (
        served.control.LoadAdapter(executor_control_pb2.LoadAdapterRequest(name=name)),
        served.control.UnloadAdapter(executor_control_pb2.UnloadAdapterRequest(name=name)),
    ):
        assert (await refused(call, Reason.INVALID_REQUEST)).field == "name"
    stream = Stream(served)
    await stream.send(hello=session_pb2.SessionHello(client_name=name))
    assert await stream.call.code() is grpc.StatusCode.INVALID_ARGUMENT
