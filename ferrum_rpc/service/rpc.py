"""Accounting of an RPC: its status code, its duration, its refusal in the log, its span if tracing is on.

``grpc.aio`` turns an unmapped exception into UNKNOWN with the exception's text, and ``server.stop()`` returns before
aborted handlers have finished. Both are handled here, once, for the one handler of `registry`.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import grpc

from ferrum_rpc.errors import ExecutorError, InternalError, Reason
from ferrum_rpc.service.error_log import ErrorLog
from ferrum_rpc.service.guard.auth import CALLER
from ferrum_rpc.service.meters import SECONDS, Histogram
from ferrum_rpc.service.slow_calls import SlowestCalls
from ferrum_rpc.service.telemetry import Tracing
from ferrum_rpc.service.trace_context import Context
from ferrum_rpc.wire.status import CODE_BY_REASON, STATUS_METADATA_KEY, status_from_error

PUSHBACK_METADATA_KEY: Final = "grpc-retry-pushback-ms"
"""Trailer with the time of a retry for gRPC clients that retry automatically; others read RetryInfo."""

UNKNOWN_METHOD: Final = "unknown"
"""The single name under which calls of unknown methods are counted: no caller's text becomes a label."""

AT_DEADLINE_S: Final = 0.02
AT_DEADLINE_SHARE: Final = 0.01
"""A call that is cancelled this close to its deadline counts as ended by it: client and server have separate clocks,
and gRPC rounds a timeout up by as much as this fraction."""

_CODE_NAMES: Final[dict[int, str]] = {code.value[0]: code.name for code in grpc.StatusCode}


@dataclass(slots=True)
class MethodStats:
    """Number of calls of a method by name of the status code. ``seconds`` covers unary calls only: a stream lasts as
    long as its client."""

    calls: int = 0
    errors: int = 0
    items: int = 0
    item_errors: int = 0
    codes: dict[str, int] = field(default_factory=dict)
    seconds: Histogram = field(default_factory=lambda: Histogram(SECONDS))


class CallLog:
    """Calls by the full name of their method, calls in flight, and refusals. Only names of handlers are counted: a
    caller cannot create new ones. ``in_flight`` counts unary calls, ``streams`` the open streams: a drain waits for the
    former and closes the latter. ``session_items``: the seconds from a frame's arrival until each of its items was
    answered. ``slowest``: unary calls and frames of sessions."""

    def __init__(self, tracer: Tracing | None = None) -> None:
        self.methods: defaultdict[str, MethodStats] = defaultdict(MethodStats)
        self.refusals = ErrorLog()
        self.tracer = tracer
        self.session_items = Histogram(SECONDS)
        self.slowest = SlowestCalls()
        self.in_flight = 0
        self.streams = 0
        self.no_calls = asyncio.Event()
        self.no_calls.set()

    async def idle(self) -> None:
        """Wait until no unary handler runs. Does not wait for open streams."""
        await self.no_calls.wait()

    def refused_items(self, method: str, outcomes: Sequence[object], context: Context) -> None:
        """Count and log the refusals among the outcomes of a call of several items. ``method``: full name."""
        for index, outcome in enumerate(outcomes):
            if isinstance(outcome, ExecutorError):
                _drop_frames(outcome)
                self.methods[method].item_errors += 1
                self.refusals.note(method, outcome, context, item=index)


class Call:
    """One RPC, from its handler's first turn to its last. ``method``: full name."""

    __slots__ = ("_began", "_code", "_context", "_count", "_log", "_message", "_method", "_span", "_stream")

    def __init__(self, log: CallLog, method: str, context: Context, stream: bool) -> None:
        self._log = log
        self._method = method
        self._context = context
        self._stream = stream
        self._count = log.methods[method]
        self._count.calls += 1
        if stream:
            log.streams += 1
        else:
            log.in_flight += 1
            log.no_calls.clear()
        self._code = "OK"
        self._message = ""
        self._span = None if log.tracer is None else log.tracer.begin(method, context)
        self._began = time.perf_counter()

    def failed(self, error: BaseException) -> ExecutorError | None:
        """The refusal for the exception that the handler raised; None if gRPC has answered already."""
        self._count.errors += 1
        refusal: ExecutorError | None = None
        if isinstance(error, ExecutorError):
            refusal = error
            self._log.refusals.note(self._method, refusal, self._context)
        elif isinstance(error, grpc.aio.AbortError):
            number: Any = self._context.code()  # an int, whatever the stubs say
            self._code = _CODE_NAMES.get(number, "UNKNOWN")
        elif isinstance(error, Exception):
            refusal = InternalError("the executor failed internally; its log says more")
            self._log.refusals.note(self._method, refusal, self._context, cause=error)
        else:  # cancelled by the client, by the deadline, or by the end of the server
            left = self._context.time_remaining()
            near = AT_DEADLINE_S + AT_DEADLINE_SHARE * (time.perf_counter() - self._began)
            self._code = "CANCELLED" if left is None or left > near else "DEADLINE_EXCEEDED"
        if refusal is not None:
            self._code, self._message = CODE_BY_REASON[refusal.reason].name, refusal.message
        return refusal

    def end(self, response: Any, timed: bool) -> None:
        log, count = self._log, self._count
        if self._stream:
            log.streams -= 1
        else:
            log.in_flight -= 1
            if not log.in_flight:
                log.no_calls.set()
        if timed:
            count.seconds.observe(seconds := time.perf_counter() - self._began)
            log.slowest.note(self._method, CALLER.get().name, seconds, self._code)
        count.codes[self._code] = count.codes.get(self._code, 0) + 1
        if log.tracer is not None and self._span is not None:
            log.tracer.end(self._span, self._code, self._message, response)


async def refuse(context: Context, error: ExecutorError) -> None:
    """End the call with the error's status and details."""
    _drop_frames(error)
    metadata: list[tuple[str, str | bytes]] = [(STATUS_METADATA_KEY, status_from_error(error).SerializeToString())]
    if error.reason is Reason.DRAINING:
        metadata.append((PUSHBACK_METADATA_KEY, "-1"))  # no retry here: another executor has to be asked
    elif error.retry_after_s is not None:
        metadata.append((PUSHBACK_METADATA_KEY, str(round(error.retry_after_s * 1000))))
    try:
        await context.abort(CODE_BY_REASON[error.reason], error.message, tuple(metadata))
    except grpc.aio.AbortError:
        raise
    except Exception:  # the peer has gone before it read that: gRPC would log a stack trace
        raise asyncio.CancelledError from None


def _drop_frames(error: BaseException) -> None:
    """Clear the traceback of a refusal. Its frames hold the request, the answer and the refusal itself: a reference
    cycle, which would live until the garbage collector runs."""
    error.__traceback__ = error.__context__ = error.__cause__ = None


def deadline_of(context: Context) -> float | None:
    """The call's deadline on `time.monotonic`, or None."""
    remaining = context.time_remaining()
    return None if remaining is None else time.monotonic() + remaining
