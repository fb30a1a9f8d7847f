"""Who is calling, and since when. Decided once per call in front of the handlers, read by whoever owns something.

grpc.aio runs every handler in a task of its own, so a context variable set before the handler is the handler's alone.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Final

from ferrum_rpc.core import ANYBODY, Caller

ARRIVED: Final[ContextVar[float]] = ContextVar("ferrum_arrived", default=0.0)
"""When the event loop took the call, or read the frame, on `time.monotonic`. A call's queueing time begins here: its
own turns of a busy event loop are part of it."""

CALLER: Final[ContextVar[Caller]] = ContextVar("ferrum_caller", default=ANYBODY)
"""Who makes the present call; `ANYBODY` where no credentials are asked for."""
