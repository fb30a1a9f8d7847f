"""What every RPC goes through: counting, in-flight tracking, and errors as statuses.

``grpc.aio`` turns an exception that nobody mapped into UNKNOWN with the exception's text, and ``server.stop()`` returns
before aborted handlers have finished. Both are handled here, once.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import grpc
import structlog

from ferrum_rpc.errors import ExecutorError, InternalError
from ferrum_rpc.wire.status import CODE_BY_REASON, STATUS_METADATA_KEY, status_from_error

log = structlog.get_logger("ferrum_rpc.service")

Context = grpc.aio.ServicerContext[Any, Any]
RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")
Self = TypeVar("Self", bound="Servicer")


@dataclass(slots=True)
class MethodCount:
    """How often a method was called."""

    calls: int = 0
    errors: int = 0
    items: int = 0
    item_errors: int = 0


class CallLog:
    """Calls per method, and how many are in flight."""

    def __init__(self) -> None:
        self.methods: dict[str, MethodCount] = {}
        self.in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def method(self, name: str) -> MethodCount:
        """The count of a method."""
        return self.methods.setdefault(name, MethodCount())

    def enter(self) -> None:
        """A handler has begun."""
        self.in_flight += 1
        self._idle.clear()

    def leave(self) -> None:
        """A handler has ended."""
        self.in_flight -= 1
        if not self.in_flight:
            self._idle.set()

    async def idle(self) -> None:
        """Wait until no handler runs."""
        await self._idle.wait()


class Servicer(Protocol):
    """A class whose methods `answers` wraps."""

    calls: CallLog
    service: str


def answers(
    handler: Callable[[Self, RequestT, Context], Awaitable[ResponseT]],
) -> Callable[[Self, RequestT, Context], Awaitable[ResponseT]]:
    """Make a method an RPC handler: refusals become statuses with details, everything else INTERNAL and a log line."""
    name = handler.__name__

    @functools.wraps(handler)
    async def answer(self: Self, request: RequestT, context: Context) -> ResponseT:
        count = self.calls.method(f"{self.service}/{name}")
        count.calls += 1
        self.calls.enter()
        try:
            return await handler(self, request, context)
        except ExecutorError as error:
            count.errors += 1
            await refuse(context, error)
        except (grpc.aio.AbortError, asyncio.CancelledError):
            count.errors += 1
            raise
        except Exception:
            count.errors += 1
            log.exception("handler_failed", method=name, action="report this stack trace: it is a bug in the executor")
            await refuse(context, InternalError("the executor failed internally; its log says more"))
        finally:
            self.calls.leave()
        raise AssertionError("abort raises")

    return answer


async def refuse(context: Context, error: ExecutorError) -> None:
    """End the call with the error's status and details."""
    details = status_from_error(error).SerializeToString()
    await context.abort(CODE_BY_REASON[error.reason], error.message, ((STATUS_METADATA_KEY, details),))


def deadline_of(context: Context) -> float | None:
    """The call's deadline on `time.monotonic`, or None."""
    remaining = context.time_remaining()
    return None if remaining is None else time.monotonic() + remaining
