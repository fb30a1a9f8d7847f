"""What was recorded of the servers of every schema revision: it is still read, and what was asked is still answered."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.message import Message
from google.rpc import status_pb2

from ferrum_rpc.errors import Reason
from ferrum_rpc.executor.v1 import forward_pb2, model_executor_pb2_grpc, output_pb2, session_pb2, types_pb2
from ferrum_rpc.wire.info import SCHEMA_REVISION
from ferrum_rpc.wire.rows import rows_from_proto
from ferrum_rpc.wire.status import error_from_rpc, error_from_status
from tests.support.identity_oracle import identity_logits
from tests.support.raw_session import raw_session
from tests.support.recorded import Call, conversations, file_of, parsed, recorded, walk
from tests.support.serving import serve_identity
from tests.support.wiring import full, item, pb, refused, top

REVISIONS = range(1, SCHEMA_REVISION + 1)
PROMPT = [3, 1, 4]
DIFFER = {
    *("blocks", "counters", "device", "instance_id", "lease_id", "methods", "pressure", "timing", "ttl"),
    *("expires", "info", "capabilities", "limits", "model", "schema_revision", "minimum_client_revision", "server"),
}
"""Fields that are another server's own."""


def best(tokens: list[int]) -> int:
    return int(identity_logits(tokens, [len(tokens) - 1])[0].argmax())


def token(answer: Any, output: Any) -> int:
    rows = rows_from_proto(answer.row_blocks)[output.rows.block]["token_ids"]
    return int(rows[output.rows.first])


async def basics(target: str, revision: int) -> None:
    """A scheduler's ordinary calls, which every revision answers alike."""
    async with grpc.aio.insecure_channel(target) as channel:
        executor = model_executor_pb2_grpc.ModelExecutorStub(channel)
        assert (await executor.GetInfo(pb.GetInfoRequest())).schema_revision == revision
        lease = ""
        if revision > 1:
            lease = (await executor.AcquireLease(pb.AcquireLeaseRequest(client_name="recorded"))).lease_id
        create = forward_pb2.CreateOptions(lease_id=lease)
        made = await executor.Prefill(pb.PrefillRequest(item=item(PROMPT, create=create, request_id="made")))
        assert token(made, made.output) == best(PROMPT)
        again = await executor.Prefill(pb.PrefillRequest(item=item(PROMPT, create=create, request_id="made")))
        assert again.output.replayed and again.output.handle == made.output.handle
        answer = await executor.Decode(pb.DecodeRequest(item=item([1], made.output.handle)))
        handle = answer.output.handle
        assert token(answer, answer.output) == best([*PROMPT, 1])
        stale = executor.Decode(pb.DecodeRequest(item=item([2], made.output.handle)))
        await refused(stale, Reason.SEQUENCE_VERSION_MISMATCH)
        [child] = (await executor.ForkKv(pb.ForkKvRequest(handle=handle, count=1, at_length=3))).handles
        kinds = [
            full(),
            top(3),
            output_pb2.OutputSpec(selected_tokens=output_pb2.SelectedTokensOutput(token_ids=[7, 5])),
            output_pb2.OutputSpec(greedy=output_pb2.GreedyOutput(logprob=True)),
        ]
        items = [item([9], handle, output=kinds[0]), item([9, 8], child, output=kinds[1])]
        items += [item(PROMPT, create=create, output=kind) for kind in kinds[2:]]
        batch = await executor.UnifiedForward(pb.UnifiedForwardRequest(items=[*items, item([1], types_pb2.KvHandle())]))
        *outputs, bad = batch.results
        assert error_from_status(bad.error).reason in {Reason.INVALID_REQUEST, Reason.HANDLE_UNKNOWN}
        handle, child = (each.output.handle for each in outputs[:2])
        rolled = await executor.TruncateKv(pb.TruncateKvRequest(handle=handle, length=3))
        verified = await executor.ForwardVerify(pb.ForwardVerifyRequest(item=item([1, 2], rolled.handle)))
        assert verified.output.rows.count == 2 and verified.output.handle.seq_len == 5
        await executor.ReserveKv(pb.ReserveKvRequest(handle=child, tokens=9))
        await executor.Release(pb.ReleaseRequest(handle=child))
        await refused(executor.Decode(pb.DecodeRequest(item=item([2], child))), Reason.HANDLE_RELEASED)
        if revision == 1:  # leases and sessions are offered since
            return
        await executor.KeepAlive(pb.KeepAliveRequest(lease_id=lease))
        async with raw_session(executor, lease_id=lease) as stream:
            frame = session_pb2.SessionForward(items=[item([4], verified.output.handle), item(PROMPT)])
            forward = (await stream.ask(forward=frame)).forward
            first, second = (each.output.handle for each in forward.results)
            assert token(forward, forward.results[0].output) == best([*PROMPT, 1, 2, 4])
            back = session_pb2.SessionTruncate(handles=[first, first], lengths=[2, 1])
            results = (await stream.ask(truncate=back)).handles.results
            assert [each.WhichOneof("result") for each in results] == ["handle", "error"]
            fork = session_pb2.SessionFork(handle=second, count=1)
            [branch] = (await stream.ask(fork=fork)).handles.results
            await stream.ask(release=session_pb2.SessionRelease(handles=[branch.handle]))
            await stream.ask(close=session_pb2.SessionClose(release_sequences=True))
        await executor.RevokeLease(pb.RevokeLeaseRequest(lease_id=lease))


@pytest.mark.parametrize("revision", REVISIONS)
async def test_a_client_is_answered_as_recorded(revision: int) -> None:
    async with recorded(revision, "basics") as target:
        await basics(target, revision)


# --- the other way round: what an older client sends ------------------------------------------------------------------


class Renamed:
    """Replaces the handles and leases that the recorded server gave by those of another, and compares the rest."""

    def __init__(self) -> None:
        self._names: dict[Any, Any] = {}

    def asks(self, request: Message) -> Message:
        for each in walk(request):
            if isinstance(each, types_pb2.KvHandle):
                each.id = self._names.get(each.id, each.id)
            elif (lease := getattr(each, "lease_id", "")) in self._names and lease:
                each.lease_id = self._names[lease]  # type: ignore[attr-defined]
        return request

    def compare(self, then: Message, now: Message, where: str) -> None:
        """All that ``then`` says ``now`` says."""
        if isinstance(then, types_pb2.KvHandle) and isinstance(now, types_pb2.KvHandle):
            self._names[then.id] = now.id
            assert (then.seq_len, then.version) == (now.seq_len, now.version), where
            return
        if getattr(then, "lease_id", ""):
            self._names[then.lease_id] = now.lease_id  # type: ignore[attr-defined]
        if then.DESCRIPTOR.full_name == "google.rpc.Status":
            reasons = [error_from_status(each).reason for each in (then, now)]  # type: ignore[arg-type]
            assert reasons[0] is reasons[1], where
            return
        if isinstance(then, types_pb2.Tensor) and then.dtype == types_pb2.D_TYPE_F32:
            assert isinstance(now, types_pb2.Tensor) and (now.dtype, now.shape) == (then.dtype, then.shape), where
            found = [np.frombuffer(each.data, np.float32) for each in (then, now)]
            np.testing.assert_allclose(found[1], found[0], rtol=0, atol=1e-5, err_msg=where)
            return
        for described, value in then.ListFields():
            if described.name in DIFFER:
                continue
            other, name = getattr(now, described.name), f"{where}.{described.name}"
            if described.message_type is None:
                assert value == other, name
                continue
            for one, two in zip(value, other, strict=True) if described.is_repeated else ((value, other),):
                self.compare(one, two, name)


async def ask(channel: grpc.aio.Channel, call: Call, renamed: Renamed) -> None:
    stream = channel.stream_stream(call.method)()
    try:
        for way, content in call.events:
            message = parsed(call.method, way, content)
            if way == "in":
                await stream.write(renamed.asks(message).SerializeToString())
                continue
            answer = await stream.read()
            assert answer is not grpc.aio.EOF, call.method
            if not call.method.endswith("/GetInfo"):  # another server
                renamed.compare(message, parsed(call.method, "out", answer), call.method)
        await stream.done_writing()
        if call.code:
            await stream.read()
        code, reason = await stream.code(), None
    except grpc.aio.AioRpcError as error:
        code, reason = error.code(), error_from_rpc(error).reason
    assert code.value[0] == call.code, call.method
    if call.code:
        assert reason is error_from_status(status_pb2.Status.FromString(call.details)).reason


@pytest.fixture
async def channel() -> AsyncIterator[grpc.aio.Channel]:
    async with serve_identity() as served, grpc.aio.insecure_channel(served.target) as channel:
        yield channel


@pytest.mark.parametrize("revision", REVISIONS)
async def test_what_an_older_client_sends_is_answered_as_it_was(channel: grpc.aio.Channel, revision: int) -> None:
    renamed = Renamed()
    for call in conversations(revision)["basics"]:
        await ask(channel, call, renamed)


@pytest.mark.parametrize("revision", REVISIONS)
def test_every_recorded_message_is_read(revision: int) -> None:
    assert file_of(revision).stat().st_size < 1 << 20
    for name, calls in conversations(revision).items():
        for call in calls:
            for way, content in call.events:
                message = parsed(call.method, way, content)
                assert type(message).FromString(message.SerializeToString()) == message, (name, call.method)
