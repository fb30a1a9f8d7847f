"""What a running server shows: its numbers under load, its refusals in the log, its calls as spans, and to operators
what each caller holds, and which calls were slow."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
import structlog
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from ferrum_rpc.errors import Reason
from ferrum_rpc.executor.v1 import executor_control_pb2, session_pb2, types_pb2
from ferrum_rpc.service.error_log import ADVICE
from ferrum_rpc.service.metrics import Metrics, registry_of
from ferrum_rpc.service.metrics_server import MetricsServer
from ferrum_rpc.service.telemetry import Tracing
from tests.service.test_session import opened
from tests.support.exposition import Series, fetch, problems, series, value
from tests.support.raw_session import raw_session
from tests.support.serving import Served, gated, serve_identity
from tests.support.wiring import item, pb, prefill, refused, until

SERVICE = "ferrum_rpc.executor.v1.ModelExecutor"
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
IDS = (("x-request-id", "r-7"), ("traceparent", f"00-{TRACE}-{SPAN}-01"))


@contextmanager
def scrapes(served: Served) -> Iterator[Any]:
    """A metrics port beside the server; yields a coroutine function that scrapes it, and has its ``url``."""
    server = served.server
    metrics = MetricsServer(registry_of(Metrics(server.state, server.calls, server.steps)), "127.0.0.1", 0)

    async def scrape() -> Series:
        text = await asyncio.to_thread(fetch, metrics.url)
        assert problems(text) == []
        return series(text)

    scrape.url = metrics.url  # type: ignore[attr-defined]
    try:
        yield scrape
    finally:
        metrics.stop()


@contextmanager
def logged() -> Iterator[list[Any]]:
    """Everything that is logged, whatever the level."""
    before = structlog.get_config()
    structlog.reset_defaults()
    try:
        with structlog.testing.capture_logs() as events:
            yield events
    finally:
        structlog.configure(**before)


# --- metrics ----------------------------------------------------------------------------------------------------------


async def conversation(served: Served, number: int) -> None:
    """1 prefill of 5, 4 decodes (one twice under its request id), a fork, a truncate by 3, 2 releases."""
    handle = await prefill(served, [number, 1, 2, 3, 4])
    for token in range(4):
        request = pb.DecodeRequest(item=item([token], handle, request_id=f"{token}"))
        handle = (await served.executor.Decode(request)).output.handle
    assert (await served.executor.Decode(request)).output.replayed
    child = (await served.fork(handle, count=1)).handles[0]
    handle = (await served.truncate(handle, length=6)).handle
    for each in (handle, child):
        await served.release(each)


async def test_scrapes_under_load_count_what_was_done(served: Served) -> None:
    conversations = 12
    with scrapes(served) as scrape:
        before = await scrape()
        load = asyncio.gather(*(conversation(served, number) for number in range(conversations)))
        during = [before]
        while not load.done():
            during.append(await scrape())
        await load
        unknown = types_pb2.KvHandle(id=served.server.state.handles.instance + bytes(16), seq_len=5, version=1)
        batch = pb.BatchDecodeRequest(items=[item([1], unknown), item([2], await prefill(served, [1]))])
        assert (await served.executor.BatchDecode(batch)).results[0].HasField("error")
        await refused(served.decode([1], unknown), Reason.HANDLE_UNKNOWN)
        after = await scrape()
    assert len(during) > 1
    for earlier, later in zip(during, [*during[1:], after], strict=True):
        for (name, labels), count in earlier.items():
            if name.endswith(("_total", "_bucket", "_count")):
                assert later[name, labels] >= count, name
    assert value(after, "ferrum_sequences") == 1
    assert value(after, "ferrum_sequences_created_total") == 2 * conversations + 1
    assert value(after, "ferrum_sequences_ended_total", cause="released") == 2 * conversations
    assert value(after, "ferrum_step_tokens_total") == 9 * conversations + 2
    assert value(after, "ferrum_tokens_truncated_total") == 3 * conversations
    assert value(after, "ferrum_replays_total") == conversations
    assert value(after, "ferrum_kv_blocks", state="used") == 1
    assert value(after, "ferrum_refusals_total", reason="HANDLE_UNKNOWN") == 2
    assert value(after, "ferrum_queue_items") == value(after, "ferrum_rpcs_in_flight") == 0
    methods = {"Prefill": 1, "Decode": 5, "ForkKv": 1, "TruncateKv": 1, "Release": 2}
    for method, calls in methods.items():
        ok = value(after, "ferrum_rpcs_total", method=f"{SERVICE}/{method}", code="OK")
        assert ok == calls * conversations + (method == "Prefill")
        timed = value(after, "ferrum_rpc_seconds_count", method=f"{SERVICE}/{method}")
        assert timed == ok + (method == "Decode")
    assert value(after, "ferrum_rpcs_total", method=f"{SERVICE}/Decode", code="NOT_FOUND") == 1
    assert value(after, "ferrum_rpcs_total", method=f"{SERVICE}/BatchDecode", code="OK") == 1
    assert value(after, "ferrum_items_total", method=f"{SERVICE}/BatchDecode") == 2
    assert value(after, "ferrum_item_errors_total", method=f"{SERVICE}/BatchDecode") == 1
    steps = served.server.state.engine.counters
    assert value(after, "ferrum_steps_total") == value(after, "ferrum_step_seconds_count") == steps.steps
    assert value(after, "ferrum_step_seconds_sum") == pytest.approx(steps.forward_s)
    assert value(after, "ferrum_step_size_tokens_sum") == value(after, "ferrum_step_tokens_total")


async def test_a_scrape_answers_while_the_event_loop_stands_still(served: Served) -> None:
    with scrapes(served) as scrape:
        assert "ferrum_sequences 0.0" in fetch(scrape.url)  # called on the loop, which does nothing else meanwhile


async def test_nothing_that_a_caller_sends_makes_a_series(served: Served) -> None:
    async def trouble(number: int) -> None:
        name = f"{number:032x}"
        ids = (("x-request-id", name), ("traceparent", f"00-{name}-{SPAN}-01"), (f"x-{name}", name))
        handle = types_pb2.KvHandle(id=served.server.state.handles.instance + number.to_bytes(16, "big"), version=1)
        decode = pb.DecodeRequest(item=item([1], handle, request_id=name, item_id=number))
        await refused(served.executor.Decode(decode, metadata=ids), Reason.HANDLE_UNKNOWN)
        for path in (f"/{SERVICE}/M{number}", f"/s{number}/Decode"):
            with pytest.raises(grpc.aio.AioRpcError):
                await served.channel.unary_unary(path)(b"", metadata=ids)
        with pytest.raises(grpc.aio.AioRpcError):
            await served.channel.unary_unary(f"/{SERVICE}/Decode")(b"\xff" + name.encode(), metadata=ids)

    with scrapes(served) as scrape:
        await trouble(1)
        before = await scrape()
        await asyncio.gather(*(trouble(number) for number in range(2, 21)))
        count = served.server.calls.methods[f"{SERVICE}/Decode"]
        await until(lambda: sum(count.codes.values()) == 40)  # a call is counted when its caller has been answered
        after = await scrape()
    assert set(after) == set(before)
    assert value(after, "ferrum_rpcs_total", method=f"{SERVICE}/Decode", code="NOT_FOUND") == 20
    assert value(after, "ferrum_rpcs_total", method=f"{SERVICE}/Decode", code="INVALID_ARGUMENT") == 20
    assert value(after, "ferrum_rpcs_total", method="unknown", code="UNIMPLEMENTED") == 40


async def test_how_a_call_ended_is_its_code() -> None:
    async with gated() as (served, gate):
        count = served.server.calls.methods[f"{SERVICE}/Prefill"]
        running = await gate.hold(served.prefill([1]))
        late = served.executor.Prefill(pb.PrefillRequest(item=item([2])), timeout=0.3)
        with pytest.raises(grpc.aio.AioRpcError):
            await late
        given_up = served.prefill([3])
        await until(lambda: count.calls == 3)
        given_up.cancel()
        await until(lambda: "CANCELLED" in count.codes)
        gate.open()
        await running
        await until(lambda: sum(count.codes.values()) == 3)
        assert count.codes == {"DEADLINE_EXCEEDED": 1, "CANCELLED": 1, "OK": 1}


async def test_an_open_stream_is_counted_and_not_waited_for(served: Served) -> None:
    calls = served.server.calls
    stream = served.executor.Session()
    await stream.write(session_pb2.SessionRequest(hello=session_pb2.SessionHello(client_revision=2)))
    await stream.read()
    assert (calls.streams, calls.in_flight) == (1, 0)
    await asyncio.wait_for(calls.idle(), 5)
    stream.cancel()
    await until(lambda: calls.streams == 0)
    assert sum(calls.methods[f"{SERVICE}/Session"].codes.values()) == 1


async def test_items_of_a_session_are_timed_until_each_is_answered(served: Served) -> None:
    """Together, one by one, refused, and in a frame that is refused."""
    async with opened(served) as stream:
        for apart in (False, True):
            items = [item([1, each]) for each in range(3)] + [item([])]
            step = await stream.step(*items, apart=apart)
            answered = 0
            while answered < len(items):
                answer = await stream.read()
                assert answer.step_id == step
                answered += len(answer.forward.results)
        both = session_pb2.SessionForward(items=[item([1])], apart=True, all_or_nothing=True)
        assert (await stream.ask(forward=both)).HasField("error")
    with scrapes(served) as scrape:
        found = await scrape()
    count = value(found, "ferrum_items_total", method=f"{SERVICE}/Session")
    assert value(found, "ferrum_session_item_seconds_count") == count == 9
    assert 0 < value(found, "ferrum_session_item_seconds_sum") < 9 * 60


# --- the log ----------------------------------------------------------------------------------------------------------


async def test_a_refused_call_is_one_event_with_its_ids_and_what_to_do(served: Served) -> None:
    with logged() as events:
        call = served.executor.Decode(pb.DecodeRequest(item=item([1, 2])), metadata=IDS)
        error = await refused(call, Reason.INVALID_REQUEST)
    (event,) = [each for each in events if each["event"] == "request_refused"]
    assert (event["reason"], event["message"]) == ("INVALID_REQUEST", error.message)
    assert (event["request_id"], event["trace_id"]) == ("r-7", TRACE)
    assert (event["method"], event["log_level"]) == (f"{SERVICE}/Decode", "info")
    assert event["action"] == ADVICE[Reason.INVALID_REQUEST].action


async def test_each_refused_item_of_a_batch_is_an_event_that_says_which(served: Served) -> None:
    good, gone = await prefill(served, [1]), await prefill(served, [2])
    await served.release(gone)
    with logged() as events:
        request = pb.BatchDecodeRequest(items=[item([1], gone), item([2], good), item([999], good)])
        request.items[2].handle.CopyFrom(await prefill(served, [3]))
        await served.executor.BatchDecode(request, metadata=IDS)
    told = [(each["item"], each["reason"], each["request_id"]) for each in events if each["event"] == "request_refused"]
    assert told == [(0, "HANDLE_RELEASED", "r-7"), (2, "INVALID_REQUEST", "r-7")]


async def test_want_of_room_is_a_warning_with_a_time_to_come_back() -> None:
    async with serve_identity(max_sequences=1) as served:
        await prefill(served, [1])
        with logged() as events, pytest.raises(grpc.aio.AioRpcError) as caught:
            await prefill(served, [2])
        assert [each["log_level"] for each in events if each["event"] == "request_refused"] == ["warning"]
        trailing = dict(caught.value.trailing_metadata() or ())
        assert int(trailing["grpc-retry-pushback-ms"]) > 0
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await prefill(served, [])
        assert "grpc-retry-pushback-ms" not in dict(caught.value.trailing_metadata() or ())


async def test_a_bug_is_an_error_with_its_stack_and_tells_the_caller_nothing(served, monkeypatch):
    def broken() -> None:
        raise RuntimeError("the secret of the machine")

    monkeypatch.setattr(served.server.state, "pressure", broken)
    with logged() as events:
        error = await refused(served.executor.GetStatus(pb.GetStatusRequest(), metadata=IDS), Reason.INTERNAL_ERROR)
    monkeypatch.undo()
    assert "secret" not in error.message
    (event,) = [each for each in events if each["event"] == "request_refused"]
    assert (event["log_level"], event["request_id"]) == ("error", "r-7")
    assert isinstance(event["exc_info"], RuntimeError)


# --- traces -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def spans(served: Served) -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    served.server.calls.tracer = Tracing(provider)
    return exporter


async def test_a_call_is_a_span_below_the_callers_with_its_step(served: Served, spans: InMemorySpanExporter) -> None:
    request = pb.PrefillRequest(item=item([1, 2, 3]))
    answer = await served.executor.Prefill(request, metadata=IDS)
    await until(lambda: len(spans.get_finished_spans()) == 1)
    (span,) = spans.get_finished_spans()
    assert (span.name, span.kind) == (f"{SERVICE}/Prefill", SpanKind.SERVER)
    assert span.parent is not None
    assert span.parent.is_remote
    assert (f"{span.parent.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, SPAN)
    attributes = dict(span.attributes or {})
    assert attributes["rpc.system.name"] == "grpc"
    assert attributes["rpc.method"] == f"{SERVICE}/Prefill"
    assert attributes["rpc.response.status_code"] == "OK"
    assert attributes["ferrum.step"] == answer.timing.step
    assert attributes["ferrum.step_tokens"] == 3
    assert attributes["ferrum.forward_seconds"] == answer.timing.forward_micros / 1e6


async def test_without_a_traceparent_the_log_names_the_trace_that_we_began(served, spans):
    with logged() as events:
        ids = (("traceparent", "00-garbage"),)
        call = served.executor.Decode(pb.DecodeRequest(item=item([1, 2])), metadata=ids)
        await refused(call, Reason.INVALID_REQUEST)
    await until(lambda: len(spans.get_finished_spans()) == 1)
    (span,) = spans.get_finished_spans()
    (event,) = [each for each in events if each["event"] == "request_refused"]
    assert span.parent is None
    assert event["trace_id"] == f"{span.context.trace_id:032x}"
    assert dict(span.attributes or {})["rpc.response.status_code"] == "INVALID_ARGUMENT"
    assert span.status.status_code is StatusCode.UNSET  # the caller's error, not the server's


async def test_a_caller_that_does_not_record_its_trace_makes_no_span(served, spans):
    ids = (("traceparent", f"00-{TRACE}-{SPAN}-00"),)
    await served.executor.GetInfo(pb.GetInfoRequest(), metadata=ids)
    await served.status()
    await until(lambda: len(spans.get_finished_spans()) == 1)
    assert [span.name for span in spans.get_finished_spans()] == [f"{SERVICE}/GetStatus"]


# --- what operators are shown of callers ------------------------------------------------------------------------------


async def test_an_operator_sees_what_callers_hold_and_which_calls_were_slow() -> None:
    async with gated(tokens=("alice a", "bob b", "ops o operator")) as (served, gate):
        alice, bob, ops = map(served.by, "abo")

        async def activity() -> Any:
            return await ops.control.GetActivity(executor_control_pb2.GetActivityRequest())

        assert not (await activity()).callers
        await bob.acquire()
        calls = [each.batch_prefill(item([1] * 20), item([2])) for each in (alice, bob)]
        first = await gate.hold(calls[0])
        await until(lambda: len(served.server.state.quotas.holding()) == 2 and served.server.calls.in_flight == 2)
        held = {each.identity: each for each in (await activity()).callers}
        assert (held["alice"].items, held["bob"].items, held["bob"].leases) == (2, 2, 1)
        gate.open()
        await asyncio.gather(first, calls[1])
        await refused(bob.prefill([1], types_pb2.KvHandle(id=b"?")), Reason.INVALID_REQUEST)
        found = await activity()
        held = {each.identity: (each.sequences, each.blocks, each.items) for each in found.callers if not each.slots}
        assert held == {"alice": (2, 6, 0), "bob": (2, 6, 0)}
        slow = [(each.method.rpartition("/")[2], each.identity, each.code) for each in found.slowest_calls]
        batches = {("BatchPrefill", name, "OK") for name in ("alice", "bob")}
        assert batches | {("Prefill", "bob", "INVALID_ARGUMENT")} <= {*slow}  # in which order, the machine decides
        times = [each.elapsed.ToNanoseconds() for each in found.slowest_calls]
        assert times == sorted(times, reverse=True) and times[-1] > 0
        request = executor_control_pb2.GetActivityRequest()
        await refused(alice.control.GetActivity(request), Reason.PERMISSION_DENIED)


async def test_frames_of_a_session_are_among_the_slowest_calls(served: Served) -> None:
    async with raw_session(served.executor) as session:
        await session.ask(forward=session_pb2.SessionForward(items=[item([1, 2])]))
        both = session_pb2.SessionForward(items=[item([1])], apart=True, all_or_nothing=True)
        assert (await session.ask(forward=both)).HasField("error")
        found = (await served.control.GetActivity(executor_control_pb2.GetActivityRequest())).slowest_calls
    codes = sorted(each.code for each in found if each.method.endswith("/Session"))
    assert codes == ["INVALID_ARGUMENT", "OK"]
