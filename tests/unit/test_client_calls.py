"""What the client repeats by itself, and what it never does."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import grpc
import pytest

from ferrum_rpc.client import NEVER_RESEND, ExecutorClient, ResendPolicy, channel
from ferrum_rpc.client.context import Context
from ferrum_rpc.client.retry import Deadline, fate_unknown
from ferrum_rpc.errors import (
    ERROR_BY_REASON,
    DeadlineExceeded,
    Draining,
    ExecutorError,
    InternalError,
    InvalidRequest,
    KvBlocksExhausted,
    OutputTooLarge,
    QueueFull,
    Reason,
    TransportError,
)
from ferrum_rpc.executor.v1 import executor_control_pb2, kv_transfer_pb2, model_executor_pb2, types_pb2
from ferrum_rpc.wire.status import CODE_BY_REASON, STATUS_METADATA_KEY, status_from_error

FOREVER = Deadline(None)
AT_ONCE = ResendPolicy(backoff_s=0)


def refusal(reason: Reason) -> grpc.aio.AioRpcError:
    """What the executor's own refusal looks like on the client's side."""
    details = status_from_error(ERROR_BY_REASON[reason]("no")).SerializeToString()
    trailing = grpc.aio.Metadata((STATUS_METADATA_KEY, details))
    return grpc.aio.AioRpcError(CODE_BY_REASON[reason], grpc.aio.Metadata(), trailing, details="no")


def bare(code: grpc.StatusCode) -> grpc.aio.AioRpcError:
    """What gRPC says when nobody answered."""
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details="lost")


class Script:
    """A method that answers by a script and remembers what it was asked."""

    def __init__(self, *outcomes: Any) -> None:
        self.outcomes = list(outcomes)
        self.requests: list[Any] = []
        self.timeouts: list[float | None] = []
        self.metadata: Any = None

    async def __call__(self, request: Any, *, timeout: float | None, metadata: Any) -> Any:  # noqa: ASYNC109
        self.requests.append(request)
        self.timeouts.append(timeout)
        self.metadata = metadata
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome


def client(policy: ResendPolicy = AT_ONCE) -> Context:
    channel = grpc.aio.insecure_channel("localhost:1")
    return Context(channel, metadata=(("authorization", "Bearer t"),), resend=policy, timeout_s=None)


async def mutate(script: Script, policy: ResendPolicy = AT_ONCE, deadline: Deadline = FOREVER) -> Any:
    method: Any = script
    return await client(policy).call(method, "the request", deadline)


async def test_a_request_that_is_too_long_is_refused_before_it_is_sent():
    script, asking = Script("an answer"), client()
    method: Any = script
    request = model_executor_pb2.GetInfoRequest(client_revision=300)
    asking.max_request_bytes = request.ByteSize()
    assert await asking.call(method, request, FOREVER) == "an answer"
    asking.max_request_bytes -= 1
    with pytest.raises(InvalidRequest, match="takes 3 bytes and the executor at most 2") as caught:
        await asking.call(method, request, FOREVER)
    assert (caught.value.field, caught.value.number("max_request_bytes")) == ("request", 2)
    assert script.requests == [request]


@pytest.mark.parametrize(
    ("says", "expected"),
    [
        ("SERVER: Received message larger than max (9 vs. 4)", InvalidRequest),
        ("CLIENT: Received message larger than max (9 vs. 4)", OutputTooLarge),
        ("SERVER: Sent message larger than max (9 vs. 4)", OutputTooLarge),
    ],
)
async def test_what_grpc_itself_finds_too_long_is_the_request_or_the_answer(says, expected):
    metadata = grpc.aio.Metadata()
    error = grpc.aio.AioRpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, metadata, metadata, details=says)
    script = Script(error)
    with pytest.raises(expected) as caught:
        await mutate(script)
    assert len(script.requests) == 1 and not fate_unknown(caught.value)


@pytest.mark.parametrize("name", ["UNAVAILABLE", "INTERNAL", "UNKNOWN", "CANCELLED"])
async def test_a_call_of_unknown_fate_is_sent_again_with_the_same_request(name):
    lost = bare(grpc.StatusCode[name])
    script = Script(lost, "answer")
    assert await mutate(script) == "answer"
    assert script.requests == ["the request"] * 2
    assert script.metadata == (("authorization", "Bearer t"),)
    with pytest.raises(TransportError) as raised:
        await mutate(Script(lost), NEVER_RESEND)
    assert fate_unknown(raised.value)
    told = "UNAVAILABLE" if name == "CANCELLED" else name  # by the executor, as it goes: not this client's own doing
    assert raised.value.metadata["grpc_code"] == told


async def test_it_is_sent_again_as_often_as_the_policy_says_and_then_raised():
    for times in range(4):
        script = Script(*[bare(grpc.StatusCode.UNAVAILABLE)] * 5)
        with pytest.raises(TransportError):
            await mutate(script, ResendPolicy(times=times, backoff_s=0))
        assert len(script.requests) == times + 1


REFUSED = [each for each in Reason if each not in (Reason.TRANSPORT, Reason.INTERNAL_ERROR)]
NO_RIGHT = grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED


@pytest.mark.parametrize(
    ("outcome", "error"),
    [
        *((refusal(each), ERROR_BY_REASON[each]) for each in REFUSED),
        *((bare(each), ExecutorError) for each in NO_RIGHT),
    ],
    ids=map(str, [*REFUSED, *NO_RIGHT]),
)
async def test_a_refusal_and_a_caller_without_the_right_are_never_sent_again(outcome, error):
    script = Script(outcome, "answer")
    with pytest.raises(error):
        await mutate(script)
    assert len(script.requests) == 1


async def test_a_refusal_at_the_door_does_not_hide_that_an_earlier_attempt_may_have_run():
    with pytest.raises(TransportError):
        await mutate(Script(bare(grpc.StatusCode.UNAVAILABLE), refusal(Reason.QUEUE_FULL)))
    with pytest.raises(QueueFull):
        await mutate(Script(refusal(Reason.QUEUE_FULL)))
    with pytest.raises(KvBlocksExhausted):  # a refusal of the item: no attempt ran
        await mutate(Script(bare(grpc.StatusCode.UNAVAILABLE), refusal(Reason.KV_BLOCKS_EXHAUSTED)))


async def test_nothing_is_sent_after_the_callers_deadline():
    script = Script(bare(grpc.StatusCode.DEADLINE_EXCEEDED), "answer")
    with pytest.raises(DeadlineExceeded):
        await mutate(script, deadline=Deadline.after(0))
    assert len(script.requests) == 1
    assert script.timeouts == [0.0]


async def test_an_attempt_gets_its_share_and_never_more_than_what_is_left():
    script = Script(bare(grpc.StatusCode.DEADLINE_EXCEEDED), "answer")
    policy = ResendPolicy(backoff_s=0, attempt_timeout_s=5)
    assert await mutate(script, policy, Deadline.after(1000)) == "answer"
    assert script.timeouts == [5, 5]
    assert Deadline.after(1).remaining(5) <= 1  # type: ignore[operator]


async def test_a_closed_channel_is_an_error_and_not_a_cancellation_of_the_caller():
    with pytest.raises(TransportError):
        await mutate(Script(asyncio.CancelledError()), NEVER_RESEND)


async def test_a_lost_connection_to_an_executor_that_was_draining_says_so_and_its_fate_is_as_unknown():
    calling = client(NEVER_RESEND)

    async def outcome(error: Any) -> ExecutorError:
        method: Any = Script(error)
        with pytest.raises(ExecutorError) as raised:
            await calling.call(method, "the request", FOREVER)
        return raised.value

    lost = bare(grpc.StatusCode.UNAVAILABLE)
    assert isinstance(await outcome(lost), TransportError)
    assert not fate_unknown(await outcome(refusal(Reason.DRAINING)))
    gone = await outcome(lost)
    assert isinstance(gone, Draining)
    assert fate_unknown(gone)
    script = Script(lost, refusal(Reason.DRAINING))
    with pytest.raises(Draining) as raised:
        await mutate(script)
    assert fate_unknown(raised.value), "the first attempt was lost before the second one was told of the drain"
    for reason in (Reason.STARTING, Reason.INSTANCE_MISMATCH):  # another process stands there
        await outcome(refusal(Reason.DRAINING))
        await outcome(refusal(reason))
        assert isinstance(await outcome(lost), TransportError)


async def test_the_callers_own_cancellation_stays_one():
    class Hang(Script):
        async def __call__(self, request: Any, **_: Any) -> Any:
            entered.set()
            await asyncio.Event().wait()

    entered = asyncio.Event()
    task = asyncio.create_task(mutate(Hang()))
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_only_an_answer_of_the_executor_settles_a_fate():
    for reason, cls in ERROR_BY_REASON.items():
        assert fate_unknown(cls("no")) == (reason is Reason.INTERNAL_ERROR)
    for code in ("UNAVAILABLE", "DEADLINE_EXCEEDED", "INTERNAL", "UNKNOWN", "CANCELLED"):
        assert fate_unknown(TransportError("lost", metadata={"grpc_code": code}))
    assert fate_unknown(DeadlineExceeded("late", metadata={"grpc_code": "DEADLINE_EXCEEDED"}))
    assert fate_unknown(InternalError("?"))
    assert fate_unknown(asyncio.CancelledError())


@pytest.mark.parametrize("wrong", [{"times": -1}, {"backoff_s": -1.0}, {"attempt_timeout_s": 0.0}])
def test_a_policy_that_makes_no_sense_is_refused(wrong):
    with pytest.raises(ValueError, match="invalid policy"):
        ResendPolicy(**wrong)


# --- what gRPC does below -------------------------------------------------------------------------------------------


def test_grpc_retries_unavailable_only_at_most_four_attempts_with_backoff_and_throttle():
    config = json.loads(channel.service_config())
    retried = [each for each in config["methodConfig"] if "retryPolicy" in each]
    assert len(retried) == 1
    policy = retried[0]["retryPolicy"]
    assert policy["retryableStatusCodes"] == ["UNAVAILABLE"]
    assert policy["maxAttempts"] <= 4
    assert policy["backoffMultiplier"] > 1
    assert config["retryThrottling"]["maxTokens"] > 0


def test_every_service_of_the_contract_is_retried_and_no_stream_is():
    contract = {
        service.full_name: service
        for module in (model_executor_pb2, executor_control_pb2, kv_transfer_pb2)
        for service in module.DESCRIPTOR.services_by_name.values()
    }
    assert set(contract) <= set(channel.SERVICES)
    streaming = {
        (name, method.name)
        for name, service in contract.items()
        for method in service.methods
        if method.client_streaming or method.server_streaming
    }
    assert streaming <= set(channel.STREAMS)
    plain = [each for each in json.loads(channel.service_config())["methodConfig"] if "retryPolicy" not in each]
    assert {(each["service"], each["method"]) for each in plain[0]["name"]} == set(channel.STREAMS)


def test_a_channel_option_of_the_caller_replaces_the_default_and_leaves_the_others():
    default, changed = dict(channel.channel_options()), dict(channel.channel_options([("grpc.keepalive_time_ms", 1)]))
    assert changed.pop("grpc.keepalive_time_ms") == 1
    assert default.pop("grpc.keepalive_time_ms") != 1
    assert changed == default


@pytest.mark.parametrize(
    ("target", "right"),
    [
        *((each, True) for each in ("localhost:1", "10.0.0.1:65535", "[::1]:5", "a-b.c_d:5", "dns:a:5", "dns:///a:5")),
        *((each, True) for each in ("dns://8.8.8.8/a:5", "unix:here", "unix:///there", "unix-abstract:name")),
        *((each, True) for each in ("ipv4:10.0.0.1:5,10.0.0.2:6", "ipv6:[::1]:5", "xds:///name")),
        *((each, False) for each in ("", "localhost", "10.0.0.1", "::1", "[::1]", "dns:///a", "dns:a", "ipv4:1.2.3.4")),
        *((each, False) for each in ("a:0", "a:65536", "a:http", ":5", "unix:", "http://a:5", "a:5/", "file:x")),
    ],
)
def test_a_target_names_its_port(target, right):
    """gRPC would take 443."""
    if right:
        channel.check_target(target)
        return
    with pytest.raises(InvalidRequest, match="neither host:port") as refusal:
        channel.check_target(target)
    assert refusal.value.field == "target"


async def test_a_client_of_a_target_without_a_port_does_not_open():
    with pytest.raises(InvalidRequest, match="'localhost' is neither"):
        async with ExecutorClient("localhost"):
            pass


def test_how_fast_a_dead_peer_is_noticed_can_be_set_and_makes_sense():
    options = dict(channel.keepalive_options(7.5, 0.5))
    assert options["grpc.keepalive_time_ms"] == 7500
    assert options["grpc.keepalive_timeout_ms"] == options["grpc.http2.ping_timeout_ms"] == 500
    for wrong in ((0, 1), (1, 0), (-1, 1)):
        with pytest.raises(ValueError, match="positive"):
            channel.keepalive_options(*wrong)


def test_the_default_channel_notices_a_dead_peer_and_takes_any_answer():
    options = dict(channel.channel_options())
    time_ms, timeout_ms = int(options["grpc.keepalive_time_ms"]), int(options["grpc.keepalive_timeout_ms"])
    assert 0 < 2 * (time_ms + timeout_ms) <= 30_000, "within the default lease"
    assert time_ms > 5_000, "the executor takes more frequent pings for abuse"
    assert options["grpc.keepalive_permit_without_calls"] == 1
    assert int(options["grpc.http2.ping_timeout_ms"]) > 0
    assert options["grpc.max_receive_message_length"] == options["grpc.max_send_message_length"] == -1


async def test_the_pressure_of_an_executor_that_still_loads_is_not_kept():
    """It has no cache yet, and no size of a block: what is planned by that would be divided by zero."""
    known = client()
    full = known.note_pressure(types_pb2.KvPressure(free_blocks=3, total_blocks=9, block_size=16))
    assert known.note_pressure(types_pb2.KvPressure()).total_blocks == 0
    assert known.pressure == full
