"""The request of a log line: ``x-request-id`` and W3C ``traceparent`` from a call's metadata.

They are read when something is logged, or when tracing is on, so a call that is not logged costs nothing here. Both
come from the caller, so they are checked and bounded; invalid ones are ignored, as the standard requires.
https://www.w3.org/TR/trace-context/#traceparent-header
"""

from __future__ import annotations

import re
from contextvars import ContextVar
from typing import Any, Final

import grpc

Context = grpc.aio.ServicerContext[Any, Any]

REQUEST_ID_KEY: Final = "x-request-id"
TRACEPARENT_KEY: Final = "traceparent"
REQUEST_ID_BYTES: Final = 128
TRACEPARENT_BYTES: Final = 128
"""A later version may append fields to the 55 bytes of version 00; a longer one is ignored."""

TRACE_ID: Final = slice(3, 35)
"""Where a ``traceparent`` has its trace id: 32 hexadecimal digits behind the version."""

_REQUEST_ID: Final = re.compile(r"[\x21-\x7e]+")
_TRACEPARENT: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}(-.*)?")

OWN_TRACE: Final[ContextVar[str]] = ContextVar("ferrum_trace", default="")
"""The trace that the executor started for the current call, if the caller named none. grpc.aio runs every handler in a
task of its own, so it belongs to that call."""


def is_traceparent(text: str) -> bool:
    """Whether it is valid by the standard."""
    match = _TRACEPARENT.fullmatch(text) if len(text) <= TRACEPARENT_BYTES else None
    if match is None:
        return False
    version, trace_id, span_id, more = match.groups()
    return version != "ff" and not (version == "00" and more) and bool(int(trace_id, 16) and int(span_id, 16))


def traceparent_of(context: Context) -> str:
    """The call's ``traceparent``, or an empty string; also if there are two."""
    found = _values(context, TRACEPARENT_KEY)
    return found[0] if len(found) == 1 and is_traceparent(found[0]) else ""


def request_id_of(context: Context) -> str:
    """The call's ``x-request-id``, or an empty string."""
    found = _values(context, REQUEST_ID_KEY)
    if len(found) == 1 and len(found[0]) <= REQUEST_ID_BYTES and _REQUEST_ID.fullmatch(found[0]):
        return found[0]
    return ""


def ids_of(context: Context) -> dict[str, str]:
    """``request_id`` and ``trace_id`` as fields of a log line, if the call has them."""
    trace_id = traceparent_of(context)[TRACE_ID] or OWN_TRACE.get()
    ids = {"request_id": request_id_of(context), "trace_id": trace_id}
    return {name: value for name, value in ids.items() if value}


def _values(context: Context, key: str) -> list[str]:
    return [value for name, value in context.invocation_metadata() or () if name == key and isinstance(value, str)]
