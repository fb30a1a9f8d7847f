"""Where two rules of the contract meet: what docs/contract.md says of each such place, over the wire."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from google.protobuf import duration_pb2

from ferrum_rpc.errors import InvalidRequest, Reason
from ferrum_rpc.executor.v1 import executor_control_pb2, forward_pb2, output_pb2, session_pb2, types_pb2
from ferrum_rpc.wire.status import error_from_rpc, error_from_status
from tests.service.test_session import Stream, opened
from tests.serving import Served, serve_identity
from tests.wiring import item, pb, prefill, refused, top

INVALID = grpc.StatusCode.INVALID_ARGUMENT


async def test_the_limit_on_top_tokens_is_never_above_the_vocabulary() -> None:
    async with serve_identity(vocab_size=100, max_top_tokens=256) as served:
        info = await served.executor.GetInfo(pb.GetInfoRequest())
        assert info.limits.max_top_tokens == 100
        await prefill(served, [1], output=top(100))
        error = await refused(
            served.executor.Prefill(pb.PrefillRequest(item=item([1], output=top(101)))), Reason.INVALID_REQUEST, INVALID
        )
        assert error.metadata["max_top_tokens"] == "100"
    async with serve_identity(vocab_size=100, max_top_tokens=10) as served:
        assert (await served.executor.GetInfo(pb.GetInfoRequest())).limits.max_top_tokens == 10


@pytest.mark.parametrize("nanos", [0, -1])
async def test_a_lease_of_no_time_is_refused_and_one_of_little_is_brought_to_the_bound(
    served: Served, nanos: int
) -> None:
    none = pb.AcquireLeaseRequest(ttl=duration_pb2.Duration(nanos=nanos))
    await refused(served.executor.AcquireLease(none), Reason.INVALID_REQUEST, INVALID)
    limits = (await served.executor.GetInfo(pb.GetInfoRequest())).limits
    little = await served.executor.AcquireLease(pb.AcquireLeaseRequest(ttl=duration_pb2.Duration(nanos=1)))
    default = await served.executor.AcquireLease(pb.AcquireLeaseRequest())
    assert (little.ttl, default.ttl) == (limits.min_lease_ttl, limits.lease_ttl)


@pytest.mark.parametrize("handle_id", [b"", b"x", bytes(23), bytes(25)])
async def test_an_id_that_no_handle_has_is_an_invalid_request_in_every_call(served: Served, handle_id: bytes) -> None:
    """It is not HANDLE_UNKNOWN: prefilling again would not help a caller that mangles what it was given."""
    handle = types_pb2.KvHandle(id=handle_id, seq_len=1, version=1)
    executor = served.executor
    for call in (
        executor.Decode(pb.DecodeRequest(item=item([1], handle))),
        executor.TruncateKv(pb.TruncateKvRequest(handle=handle)),
        executor.ForkKv(pb.ForkKvRequest(handle=handle)),
        executor.Release(pb.ReleaseRequest(handle=handle, any_version=True)),
        executor.ReserveKv(pb.ReserveKvRequest(handle=handle, tokens=1)),
    ):
        await refused(call, Reason.INVALID_REQUEST, INVALID)
    async with opened(served) as stream:
        answer = await stream.ask(release=session_pb2.SessionRelease(handles=[handle]))
        assert [error_from_status(each.error).reason for each in answer.handles.results] == [Reason.INVALID_REQUEST]


async def test_a_sequence_twice_in_a_truncate_frame_is_as_in_two_frames(served: Served) -> None:
    async with opened(served) as stream:
        twice, once = [await stream.prefill([1, 2, 3]) for _ in range(2)]
        frame = session_pb2.SessionTruncate(handles=[twice, twice, once], lengths=[2, 1, 1])
        first, second, third = (await stream.ask(truncate=frame)).handles.results
        assert error_from_status(second.error).reason is Reason.SEQUENCE_BUSY
        assert (first.handle.seq_len, third.handle.seq_len) == (2, 1)
        handle = first.handle
        frame = session_pb2.SessionTruncate(handles=[handle, handle], lengths=[1, 1], request_id="the same")
        results = (await stream.ask(truncate=frame)).handles.results
        assert [each.handle.seq_len for each in results] == [1, 1] and results[0] == results[1]


async def test_a_sequence_twice_in_a_release_frame_is_as_in_two_frames(served: Served) -> None:
    async with opened(served) as stream:
        handle = await stream.prefill([1, 2, 3])
        first, second = (await stream.ask(release=session_pb2.SessionRelease(handles=[handle, handle]))).handles.results
        assert first.handle == handle
        assert error_from_status(second.error).reason is Reason.SEQUENCE_BUSY
        handle = await stream.prefill([1, 2, 3])
        frame = session_pb2.SessionRelease(handles=[handle, handle], any_version=True)
        assert all(each.handle == handle for each in (await stream.ask(release=frame)).handles.results)
        assert (await served.executor.GetStatus(pb.GetStatusRequest())).pressure.sequences == 0


async def test_closing_a_resumed_session_releases_what_it_made_and_the_lease_keeps_the_rest(served: Served) -> None:
    broken = Stream(served)
    lease = (await broken.hello()).lease_id
    before = await broken.prefill([1, 2, 3])
    broken.call.cancel()
    resumed = Stream(served)
    assert (await resumed.hello(lease_id=lease)).lease_id == lease
    made = await resumed.prefill([1, 2, 3])
    goodbye = (await resumed.ask(close=session_pb2.SessionClose(release_sequences=True))).goodbye
    assert goodbye.released_sequences == 1
    decode = pb.DecodeRequest(item=item([1], made))
    await refused(served.executor.Decode(decode), Reason.HANDLE_RELEASED, grpc.StatusCode.NOT_FOUND)
    assert (await served.executor.Decode(pb.DecodeRequest(item=item([1], before)))).output.handle.seq_len == 4
    revoked = await served.executor.RevokeLease(pb.RevokeLeaseRequest(lease_id=lease))
    assert revoked.released_sequences == 1


async def test_one_request_id_in_decode_and_in_forward_verify_is_one_call_if_the_rows_are_the_same(
    served: Served,
) -> None:
    """The name of the call is not its content, but the positions are, and an unset one is ALL in ForwardVerify."""
    executor, everywhere = served.executor, output_pb2.OutputSpec(positions=output_pb2.POSITIONS_ALL)
    handle = await prefill(served, [1, 2, 3])
    named = item([4], handle, request_id="named", output=everywhere)
    first = await executor.Decode(pb.DecodeRequest(item=named))
    again = await executor.ForwardVerify(pb.ForwardVerifyRequest(item=named))
    assert again.output.replayed and again.output.handle == first.output.handle
    unnamed = item([5], first.output.handle, request_id="unnamed")
    second = await executor.Decode(pb.DecodeRequest(item=unnamed))
    verify = executor.ForwardVerify(pb.ForwardVerifyRequest(item=unnamed))
    await refused(verify, Reason.REQUEST_ID_REUSED, INVALID)
    batched = await executor.UnifiedForward(pb.UnifiedForwardRequest(items=[unnamed]))
    assert batched.results[0].output.replayed
    assert batched.results[0].output.handle == second.output.handle


async def test_a_second_drain_can_shorten_the_grace_and_not_prolong_it(served: Served) -> None:
    await prefill(served, [1])

    async def drain(seconds: int) -> executor_control_pb2.DrainResponse:
        grace = duration_pb2.Duration(seconds=seconds)
        return await served.control.Drain(executor_control_pb2.DrainRequest(grace=grace))

    await drain(1000)
    until = served.server.draining._until
    await drain(2000)
    assert served.server.draining._until == until
    await drain(500)
    assert served.server.draining._until < until
    assert not served.server.draining.done.is_set()
    await drain(0)
    async with asyncio.timeout(5):
        await served.server.draining.done.wait()


def long_contents() -> dict[str, tuple[str, str, int, Callable[[Served, int], Any]]]:
    """What a caller may make long: the limit of GetInfo, the field that a refusal names, what the limit is, and a call
    with so much of it."""

    def created(served: Served, **create: Any) -> Any:
        return served.executor.Prefill(pb.PrefillRequest(item=item([1], create=forward_pb2.CreateOptions(**create))))

    def stops(served: Served, count: int) -> Any:
        run = forward_pb2.Run(max_tokens=1, stop_token_ids=[2] * count)
        return served.executor.Prefill(pb.PrefillRequest(item=item([1], request_id="run", run=run)))

    def biased(served: Served, count: int) -> Any:
        sample = output_pb2.SampleOutput(bias=[output_pb2.TokenBias(token_id=1)] * count)
        output = output_pb2.OutputSpec(sample=sample)
        return served.executor.Prefill(pb.PrefillRequest(item=item([1], output=output)))

    async def released(served: Served, count: int) -> Any:
        handle = await prefill(served, [1])
        async with opened(served) as stream:
            frame = session_pb2.SessionRelease(handles=[handle] * count, any_version=True)
            answer = await stream.ask(release=frame)
            if answer.HasField("error"):
                raise error_from_status(answer.error)

    def leased(served: Served, count: int) -> Any:
        return served.executor.AcquireLease(pb.AcquireLeaseRequest(client_name="n" * count))

    def identified(served: Served, count: int) -> Any:
        return served.executor.Prefill(
            pb.PrefillRequest(item=item([1], request_id="é" * (count // 2) + "i" * (count % 2)))
        )

    return {
        "salt": ("max_cache_salt_bytes", "create.cache_salt", 1024, lambda s, n: created(s, cache_salt=b"s" * n)),
        "request id": ("max_request_id_bytes", "request_id", 128, identified),
        "client name": ("max_name_bytes", "client_name", 256, leased),
        "stop ids": ("max_stop_tokens", "run.stop_token_ids", 256, stops),
        "biases": ("max_biases", "output.sample.bias", 512, biased),
        "operations": ("max_operations", "handles", 128, released),
    }


@pytest.mark.parametrize("name", long_contents())
async def test_what_a_caller_may_make_long_has_a_limit_that_getinfo_reports(served: Served, name: str) -> None:
    limit, field, most, call = long_contents()[name]
    assert getattr((await served.executor.GetInfo(pb.GetInfoRequest())).limits, limit) == most
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
    error = await refused(
        served.executor.Prefill(pb.PrefillRequest(item=item([1], create=create))), Reason.INVALID_REQUEST, INVALID
    )
    assert error.field == "create.adapter"
    for call in (
        served.control.LoadAdapter(executor_control_pb2.LoadAdapterRequest(name=name)),
        served.control.UnloadAdapter(executor_control_pb2.UnloadAdapterRequest(name=name)),
    ):
        assert (await refused(call, Reason.INVALID_REQUEST, INVALID)).field == "name"
    stream = Stream(served)
    await stream.send(hello=session_pb2.SessionHello(client_name=name))
    assert await stream.call.code() is INVALID


async def test_a_full_table_of_leases_says_that_it_is_the_leases() -> None:
    async with serve_identity(max_leases=1) as served:
        await served.executor.AcquireLease(pb.AcquireLeaseRequest())
        error = await refused(
            served.executor.AcquireLease(pb.AcquireLeaseRequest()),
            Reason.SEQUENCES_EXHAUSTED,
            grpc.StatusCode.RESOURCE_EXHAUSTED,
        )
        assert error.metadata == {"max_leases": "1"} and error.retry_after_s
        await prefill(served, [1])  # of sequences there are enough
