"""A span of each RPC to a collector.

Spans are off unless an endpoint is set, and OpenTelemetry is an extra: nothing of it is imported before. A span is a
child of the caller's ``traceparent`` and carries what the answer has (step number, sizes, times); the steps
themselves have no spans, a step being of many callers.
Names of attributes: https://opentelemetry.io/docs/specs/semconv/rpc/
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import structlog

from ferrum_rpc import __version__
from ferrum_rpc.install import install
from ferrum_rpc.service.trace_context import OWN_TRACE, TRACEPARENT_KEY, Context, traceparent_of

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

log = structlog.get_logger("ferrum_rpc.tracing")

SERVICE_NAME: Final = "ferrum-rpc"
TRACES_PATH: Final = "/v1/traces"
FLUSH_S: Final = 2.0
"""Maximum time for the last spans at the end of the process."""

SERVER_ERRORS: Final = frozenset(
    {"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"}
)
"""Status codes that are errors of the server's span; other codes are errors of the caller (the conventions list
them)."""


class TracingError(RuntimeError):
    """Tracing is configured but cannot work; the message names the remedy."""


class Tracing:
    """Creates the spans of one server. ``provider`` samples and exports; `stop` shuts it down."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._otel = trace
        self._provider = provider
        self._tracer = provider.get_tracer("ferrum_rpc", __version__)
        self._caller_of = TraceContextTextMapPropagator().extract

    def begin(self, method: str, context: Context) -> Span:
        """Start the span of a handler. ``method``: full name. `end` must follow."""
        otel, attributes = self._otel, {"rpc.system.name": "grpc", "rpc.method": method}
        caller = self._caller_of({TRACEPARENT_KEY: traceparent_of(context)})
        span = self._tracer.start_span(method, caller, otel.SpanKind.SERVER, attributes)
        OWN_TRACE.set(otel.format_trace_id(span.get_span_context().trace_id))
        return span

    def end(self, span: Span, code: str, message: str, response: Any) -> None:
        """End the span with this status code; ``response`` is None if there is none."""
        if span.is_recording():
            span.set_attribute("rpc.response.status_code", code)
            if message:
                span.set_attribute("ferrum.message", message)
            if code in SERVER_ERRORS:
                span.set_status(self._otel.StatusCode.ERROR)
            span.set_attributes(_step_attributes(response))
        span.end()

    def stop(self) -> None:
        """Export the remaining spans, for `FLUSH_S` at most: the exporter would retry a missing collector for 10 s and
        more. Blocks: do not call it on the event loop."""
        flush = threading.Thread(target=self._provider.shutdown, name="ferrum-traces", daemon=True)
        flush.start()
        flush.join(FLUSH_S)


def _step_attributes(response: Any) -> dict[str, int | float]:
    """The attributes of the step of a forward's answer; none for other answers."""
    if response is None or "timing" not in response.DESCRIPTOR.fields_by_name or not response.HasField("timing"):
        return {}
    timing = response.timing
    return {
        "ferrum.step": timing.step,
        "ferrum.step_sequences": timing.step_sequences,
        "ferrum.step_tokens": timing.step_tokens,
        "ferrum.queue_seconds": timing.queue_micros / 1e6,
        "ferrum.forward_seconds": timing.forward_micros / 1e6,
    }


def connect(endpoint: str, instance_id: str) -> Tracing:
    """Tracing to the OTLP/HTTP collector at ``endpoint``, in batches, from a thread of its own. A missing collector
    costs a log line. Raises `TracingError` for an invalid address, or if the extra is not installed."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise TracingError("otel_endpoint must be an address, such as http://collector:4318")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise TracingError(f"otel_endpoint is set and OpenTelemetry is not installed: {install('otel')}") from error
    if parts.path in ("", "/"):
        endpoint = parts._replace(path=TRACES_PATH).geturl()
    _log_as_ours()
    resource = Resource.create(
        {"service.name": SERVICE_NAME, "service.version": __version__, "service.instance.id": instance_id}
    )
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
    return Tracing(provider)


class _OurLog(logging.Handler):
    """Log records of OpenTelemetry as events of ours."""

    def emit(self, record: logging.LogRecord) -> None:
        log.warning("trace_export_failed", message=record.getMessage(), action="check otel_endpoint and the collector")


def _log_as_ours() -> None:
    logger = logging.getLogger("opentelemetry")
    logger.handlers = [_OurLog(logging.WARNING)]
    logger.propagate = False
