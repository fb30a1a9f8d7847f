"""Metrics, refusals in the log, and request ids, each without a server: the units behind `tests/service`."""

from __future__ import annotations

import logging
import re
import select
import shutil
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.parse
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from wsgiref.simple_server import make_server

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as TheirHistogram

from ferrum_rpc.config import ModelSettings, ServeSettings
from ferrum_rpc.core import CacheState, RankState, StepTiming
from ferrum_rpc.engine.api import EngineCounters
from ferrum_rpc.errors import ERROR_BY_REASON, InvalidRequest, QueueFull, Reason
from ferrum_rpc.service import metrics_server, telemetry
from ferrum_rpc.service.error_log import ADVICE, BURST, ErrorLog
from ferrum_rpc.service.guard.bind import PortInUse
from ferrum_rpc.service.health import HealthService
from ferrum_rpc.service.meters import POWERS, SECONDS, Histogram, StepMeter
from ferrum_rpc.service.metrics import Metrics, registry_of
from ferrum_rpc.service.metrics_server import MAX_CONNECTIONS, MetricsServer, _Quiet, _Server
from ferrum_rpc.service.rpc import CallLog
from ferrum_rpc.service.state import ServerState
from ferrum_rpc.service.telemetry import TracingError, connect
from ferrum_rpc.service.trace_context import ids_of, is_traceparent, request_id_of, traceparent_of
from ferrum_rpc.wire.status import CODE_BY_REASON
from tests.support.exposition import OPENMETRICS, fetch, openmetrics_families, problems, series, value

ROOT = Path(__file__).parents[2]
METHOD = "ferrum_rpc.executor.v1.ModelExecutor/Decode"


def context(*metadata: tuple[str, str]) -> Any:
    return SimpleNamespace(invocation_metadata=lambda: metadata)


def observed() -> tuple[ServerState, CallLog, StepMeter, CollectorRegistry]:
    """The books of a server in which every family has a sample."""
    state, calls, steps = ServerState(ServeSettings(model=ModelSettings("identity")).limits()), CallLog(), StepMeter()
    thread: Any = SimpleNamespace(
        cache=CacheState(
            block_size=16,
            total_blocks=100,
            free_blocks=60,
            sequences=0,
            total_slots=9,
            free_slots=5,
            checkpoints=3,
            checkpoints_dropped=11,
        ),
        counters=EngineCounters(),
        queued_items=3,
        queued_tokens=40,
        ranks=[RankState(True, 1 << 20, 1 << 30), RankState(False, 2 << 20)],
    )
    state.engine = thread
    count = calls.methods[METHOD]
    count.items, count.codes["OK"] = 2, 2
    count.seconds.observe(0.5)
    steps.observe(StepTiming(1, 2, 20, 0.0, 0.01), [0.001, 0.002])
    metrics = Metrics(state, calls, steps, {"before_reply": 1}, expiries=lambda: {"server": 2e9})
    metrics.health = HealthService(lambda: True, lambda: True, ()).gauges
    return state, calls, steps, registry_of(metrics)


@pytest.fixture
def scraped() -> Any:
    server = MetricsServer(observed()[-1], "127.0.0.1", 0)
    yield server
    server.stop()


# --- the exposition ---------------------------------------------------------------------------------------------------


def test_a_scrape_keeps_the_rules_of_prometheus(scraped: MetricsServer) -> None:
    text = fetch(scraped.url)
    assert problems(text) == []
    families = openmetrics_families(fetch(scraped.url, OPENMETRICS))
    assert len(families) == len(set(families)) > 30
    assert {name.partition("_")[0] for name in families} == {"ferrum", "process"}


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("# TYPE a_total counter\na_total 1", "no HELP"),
        ("# HELP a b\n# TYPE a counter\na_total 1", "end in _total"),
        ("# HELP a_total b\n# TYPE a_total gauge\na_total 1", "end in _total"),
        ("# HELP a_ms b\n# TYPE a_ms gauge\na_ms 1", "base unit"),
        ("# HELP seconds_a b\n# TYPE seconds_a gauge\nseconds_a 1", "end in its unit"),
        ("# HELP a_count b\n# TYPE a_count gauge\na_count 1", "suffix of a histogram"),
        ("# HELP a b\n# TYPE a gauge\na 1\n# TYPE a gauge", "declared twice"),
        ("a 1", "no TYPE"),
    ],
)
def test_the_rules_find_what_breaks_them(line: str, what: str) -> None:
    assert any(what in each for each in problems(line + "\n"))


def test_promtool_agrees(scraped: MetricsServer) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool on PATH")
    done = subprocess.run(
        [promtool, "check", "metrics"], input=fetch(scraped.url), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def port_of(server: MetricsServer) -> Any:
    return urllib.parse.urlsplit(server.url).port


def connection(server: MetricsServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port_of(server)), timeout=30)


def test_connections_that_come_at_once_wait_their_turn() -> None:
    """Before anybody takes one: what does not fit into the system's queue would try again after a second."""
    server = make_server("127.0.0.1", 0, lambda *_: [], _Server, _Quiet)
    clients = [socket.socket() for _ in range(64)]
    try:
        for client in clients:
            client.setblocking(False)
            client.connect_ex(server.server_address)
        poll = select.poll()
        for client in clients:
            poll.register(client, select.POLLOUT)
        assert len(poll.poll(0)) == len(clients)
    finally:
        for each in (*clients, server):
            (each.close if isinstance(each, socket.socket) else each.server_close)()


def test_whoever_holds_connections_open_holds_up_nobody_and_no_thread_for_long(scraped: MetricsServer) -> None:
    before = threading.active_count()
    held = [connection(scraped) for _ in range(MAX_CONNECTIONS + 40)]
    try:
        held[-1].sendall(b"GET /metr")
        assert series(fetch(scraped.url))
        assert held[0].recv(1) == b"", "the oldest had to go"
        held[-1].sendall(b"ics HTTP/1.0\r\n\r\n")
        assert held[-1].recv(5) == b"HTTP/"
        assert threading.active_count() - before <= MAX_CONNECTIONS + 1
    finally:
        for each in held:
            each.close()


def test_a_request_that_comes_byte_by_byte_has_its_end(scraped: MetricsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "REQUEST_TIMEOUT_S", 0.3)
    with connection(scraped) as slow, suppress(ConnectionError):
        slow.settimeout(0.02)
        for _ in range(1500):
            with suppress(TimeoutError):
                slow.sendall(b"G")
                if slow.recv(1) == b"":
                    return
        raise AssertionError("it goes on for ever")


@pytest.mark.parametrize(
    ("name", "labels", "expected"),
    [
        ("kv_blocks", {"state": "free"}, 60),
        ("kv_blocks", {"state": "used"}, 40),
        ("kv_slots", {"state": "free"}, 2),
        ("kv_slots", {"state": "cached"}, 3),
        ("kv_slots", {"state": "used"}, 4),
        ("checkpoints_dropped_total", {}, 11),
        ("kv_slots_limit", {}, 9),
        ("executor_state", {"state": "starting"}, 1),
        ("failpoints_fired_total", {"name": "before_reply"}, 1),
        ("rank_alive", {"rank": "0"}, 1),
        ("rank_alive", {"rank": "1"}, 0),
        ("rank_resident_memory_bytes", {"rank": "1"}, 2 << 20),
        ("rank_device_memory_bytes", {"rank": "0"}, 1 << 30),
        ("certificate_expiry_timestamp_seconds", {"file": "server"}, 2e9),
        ("health", {"check": "ready"}, 1),
        ("health", {"check": "live"}, 1),
        ("step_seconds_count", {}, 1),
        ("step_size_tokens_sum", {}, 20),
        ("queue_seconds_count", {}, 2),  # a submission waits for itself, and a step counts once
        ("queue_seconds_sum", {}, 0.003),
    ],
)
def test_each_figure_is_that_of_the_books(name: str, labels: dict[str, str], expected: float) -> None:
    assert observed()[-1].get_sample_value(f"ferrum_{name}", labels) == pytest.approx(expected)


def test_one_state_holds_and_a_rank_without_a_gpu_has_no_memory_of_one(scraped: MetricsServer) -> None:
    found = series(fetch(scraped.url))
    assert sum(each for (name, _), each in found.items() if name == "ferrum_executor_state") == 1
    assert ("ferrum_rank_device_memory_bytes", frozenset({("rank", "1")})) not in found


def test_whatever_the_server_bounds_has_its_limit(scraped: MetricsServer) -> None:
    """A gauge without a limit is named here, with the reason."""
    unbounded = {
        *("build_info", "executor_state", "health", "certificate_expiry_timestamp_seconds", "rank_alive"),  # no counts
        *("kv_block_tokens", "rank_resident_memory_bytes", "rank_device_memory_bytes"),  # the machine's
        *("adapter_sequences", "parked_sequences", "unfinished_imports", "unfinished_import_blocks"),  # parts of others
        *("rpcs_in_flight", "streams"),  # of each connection
    }
    histograms = {"step_size_tokens", "step_size_sequences"}
    text = fetch(scraped.url)
    gauges = {name.removeprefix("ferrum_") for name in re.findall(r"^# TYPE (ferrum_\S+) gauge", text, re.MULTILINE)}
    bounded = {name.removesuffix("_limit") for name in gauges if name.endswith("_limit")}
    assert {name for name in gauges if not name.endswith("_limit")} == unbounded | bounded - histograms
    assert histograms < bounded
    found, limits = series(text), observed()[0].limits
    assert value(found, "ferrum_queue_items") / value(found, "ferrum_queue_items_limit") == 3 / limits.max_queued_items
    assert value(found, "ferrum_kv_blocks_limit") == 100
    assert value(found, "ferrum_kv_tier_bytes_limit") == value(found, "ferrum_adapters_limit") == 0, "there are none"


def test_an_event_loop_that_stands_still_is_not_live(monkeypatch: pytest.MonkeyPatch) -> None:
    health = HealthService(lambda: False, lambda: True, ())
    assert health.gauges() == {"ready": 0, "live": 1}
    health.update()
    assert health.gauges() == {"ready": 0, "live": 1}
    monkeypatch.setattr("ferrum_rpc.service.health.STALE_S", 0.0)
    assert health.gauges() == {"ready": 0, "live": 0}


def test_every_metric_is_explained_and_what_is_explained_is_there(scraped: MetricsServer) -> None:
    text = (ROOT / "docs" / "operations.md").read_text("utf-8")
    tables = re.findall(r"^\| (?:metric|limit) \|.*\n\|---.*\n((?:\|.*\n)+)", text, re.MULTILINE)
    rows = [row for table in tables for row in table.splitlines()]
    explained = {name for row in rows for name in re.findall(r"`(ferrum_\w+)`", row.split("|")[1])}
    served = set(re.findall(r"^# TYPE (ferrum_\S+)", fetch(scraped.url), re.MULTILINE)) | {"ferrum_model_info"}
    assert sorted(served - explained) == [] and sorted(explained - served) == []


def test_two_servers_of_one_process_have_numbers_of_their_own() -> None:
    state, _, _, first = observed()
    _, _, _, second = observed()
    state.counters.sequences_created = 7
    assert first.get_sample_value("ferrum_sequences_created_total") == 7
    assert second.get_sample_value("ferrum_sequences_created_total") == 0


def test_a_metrics_port_that_is_taken_is_named_and_after_stop_it_is_closed() -> None:
    server = MetricsServer(observed()[-1], "127.0.0.1", 0)
    assert fetch(server.url)
    with pytest.raises(PortInUse, match=str(port_of(server))):
        MetricsServer(CollectorRegistry(), "127.0.0.1", port_of(server))
    server.stop()
    with pytest.raises(urllib.error.URLError):
        fetch(server.url)


@pytest.mark.parametrize("bounds", [SECONDS, POWERS], ids=["seconds", "powers"])
def test_our_histogram_says_what_the_official_one_says(bounds: tuple[float, ...]) -> None:
    ours, registry = Histogram(bounds), CollectorRegistry()
    theirs = TheirHistogram("a_seconds", "b", buckets=bounds, registry=registry)
    for each in [0.0, 1e-5, 1.1e-5, 2.5e-5, 0.003, 0.01, 1.0, 59.9, 60.0, 61.0, 1e6]:
        ours.observe(each)
        theirs.observe(each)
    buckets, total = ours.snapshot()
    for (bound, count), exact in zip(buckets, (*bounds, float("inf")), strict=True):
        assert float(bound) == pytest.approx(exact)
        label = "+Inf" if exact == float("inf") else str(float(exact))
        assert count == registry.get_sample_value("a_seconds_bucket", {"le": label})
    assert total == registry.get_sample_value("a_seconds_sum")


# --- refusals in the log ----------------------------------------------------------------------------------------------


def test_every_reason_says_what_an_operator_should_do() -> None:
    assert set(ADVICE) == set(Reason) == set(ERROR_BY_REASON) == set(CODE_BY_REASON)
    for reason, advice in ADVICE.items():
        assert len(advice.action) > 10, reason
        assert advice.level in ("info", "warning", "error")
    loud = {reason for reason, advice in ADVICE.items() if advice.level == "error"}
    assert loud >= {Reason.INTERNAL_ERROR, Reason.DEVICE_LOST, Reason.STEP_FAILED}
    assert ADVICE[Reason.INVALID_REQUEST].level == "info"
    assert "the message says" in ADVICE[Reason.HANDLE_RELEASED].action, "a reset or a disk may have ended it too"
    capacity = (Reason.KV_BLOCKS_EXHAUSTED, Reason.SEQUENCES_EXHAUSTED, Reason.QUOTA_EXCEEDED, Reason.QUEUE_FULL)
    assert {ADVICE[reason].level for reason in capacity} == {"warning"}


def test_a_refusal_is_one_event_that_names_the_request_and_is_not_long(logs: list[Any]) -> None:
    trace = "0af7651916cd43dd8448eb211c80319c"
    metadata = (("x-request-id", "r-7"), ("traceparent", f"00-{trace}-b7ad6b7169203331-01"))
    ErrorLog().note(METHOD, InvalidRequest("x" * 10_000, field="items"), context(*metadata), item=3)
    (event,) = logs
    assert event.pop("action") == ADVICE[Reason.INVALID_REQUEST].action
    assert event == {
        "event": "request_refused",
        "log_level": "info",
        "reason": "INVALID_REQUEST",
        "method": METHOD,
        "message": "x" * 300,
        "item": 3,
        "request_id": "r-7",
        "trace_id": trace,
        "caller": "",
    }


def test_a_flood_of_refusals_is_told_in_few_events_and_counted_in_full(logs: list[Any]) -> None:
    now = 0.0
    refusals = ErrorLog(lambda: now)

    def full(times: int) -> None:
        for _ in range(times):
            refusals.note(METHOD, QueueFull("full"), context())

    full(1000)
    assert len(logs) == BURST
    refusals.note(METHOD, InvalidRequest("other"), context())
    assert logs.pop()["reason"] == "INVALID_REQUEST"  # another reason has a budget of its own
    now = 1.0
    full(2)
    assert len(logs) == BURST + 1
    assert logs[-1]["suppressed"] == 1000 - BURST
    now = 2.0
    full(1)
    assert logs[-1]["suppressed"] == 1
    now = 1000.0
    full(100)
    assert len(logs) == BURST + 2 + BURST
    assert refusals.counts[Reason.QUEUE_FULL] == 1103


# --- whose request it is ----------------------------------------------------------------------------------------------

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize(
    "text",
    [
        *("", "garbage", f"00-{TRACE}-{SPAN}", f"00-{TRACE}-{SPAN}-1", f"00-{TRACE}-{SPAN}-01-more"),
        *(f"ff-{TRACE}-{SPAN}-01", f"00-{TRACE.upper()}-{SPAN}-01", f" 00-{TRACE}-{SPAN}-01"),
        *(f"00-{'0' * 32}-{SPAN}-01", f"00-{TRACE}-{'0' * 16}-01", f"00-{TRACE}-{SPAN}-01\n"),
        f"01-{TRACE}-{SPAN}-01-" + "x" * 1000,
    ],
)
def test_what_is_no_traceparent_is_ignored(text: str) -> None:
    assert not is_traceparent(text)


def test_a_traceparent_is_read_as_the_standard_says() -> None:
    for text in (f"00-{TRACE}-{SPAN}-01", f"01-{TRACE}-{SPAN}-00-of-a-later-version"):
        assert traceparent_of(context(("traceparent", text))) == text
        assert ids_of(context(("traceparent", text))) == {"trace_id": TRACE}


def test_a_request_id_is_short_printable_and_alone_or_ignored() -> None:
    assert request_id_of(context(("x-request-id", "abc-123"))) == "abc-123"
    for bad in ("", "a b", "a\n", "é", "x" * 129):
        assert request_id_of(context(("x-request-id", bad))) == ""
    twice = (("x-request-id", "a"), ("x-request-id", "b"))
    assert ids_of(context(*twice, ("traceparent", f"00-{TRACE}-{SPAN}-01"), ("traceparent", "x"))) == {}


# --- tracing is an extra ----------------------------------------------------------------------------------------------


def test_without_the_extra_an_endpoint_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(TracingError, match=r"pip install '\.\[otel\]'"):
        connect("http://127.0.0.1:4318", "instance")


@pytest.mark.parametrize("endpoint", ["collector:4318", "ftp://collector", "http://", "nonsense"])
def test_an_endpoint_that_is_no_address_says_what_one_is(endpoint: str) -> None:
    with pytest.raises(TracingError, match="http://collector:4318"):
        connect(endpoint, "instance")


def test_the_end_does_not_wait_for_a_collector_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = threading.Event()
    provider: Any = SimpleNamespace(get_tracer=lambda *_: None, shutdown=answered.wait)
    monkeypatch.setattr(telemetry, "FLUSH_S", 0.01)
    telemetry.Tracing(provider).stop()  # returns
    assert not answered.is_set()
    answered.set()


def test_what_opentelemetry_logs_becomes_an_event_of_ours(logs: list[Any]) -> None:
    traces = connect("http://127.0.0.1:9", "instance")
    try:
        logging.getLogger("opentelemetry.exporter").warning("no route to %s", "collector")
        [event] = logs
        assert event["event"] == "trace_export_failed" and event["action"]
        assert event["message"] == "no route to collector"
    finally:
        traces.stop()
