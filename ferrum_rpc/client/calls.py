"""One call: deadline, credentials, typed errors, and the resend of a call whose fate is unknown.

Independent of sequences. A step of a session is a call as well: whatever is awaited with a request, a
timeout and metadata.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import grpc

from ferrum_rpc.client.policy import REFUSED_BEFORE_RUNNING, Deadline, ResendPolicy, fate_unknown
from ferrum_rpc.errors import Draining, ExecutorError, InstanceMismatch, InvalidRequest, Starting, TransportError
from ferrum_rpc.wire.status import error_from_rpc

Response = TypeVar("Response")
Metadata = Sequence[tuple[str, str]]

Method = Callable[..., Awaitable[Response]]
"""A unary method of a stub, or what is called like one: ``method(request, timeout=, metadata=)`` is one attempt, given
up after ``timeout`` seconds. It raises gRPC's errors or an `ExecutorError`."""


class Calls:
    """Makes calls with one caller's credentials and policy. ``draining``: the executor has said that it is
    draining, which explains a connection that is lost later. ``max_request_bytes``: what the executor takes, once that
    is known; a longer frame of a session would end the stream, with all steps in it."""

    def __init__(self, *, metadata: Metadata, resend: ResendPolicy) -> None:
        self.metadata = tuple(metadata)
        self.draining = False
        self.max_request_bytes: int | None = None
        self._resend = resend

    async def call(
        self,
        method: Method[Response],
        request: Any,
        deadline: Deadline,
        policy: ResendPolicy | None = None,
    ) -> Response:
        """Call, and while its fate is unknown send the same request again, as the policy (default: the client's) and
        the deadline allow. Raises the `ExecutorError` that the answer stands for, and `InvalidRequest` for a request
        that is too long: nothing was sent then.

        Only requests that carry a request id, or whose repetition changes nothing, may be sent again; for the others
        there is `NEVER_RESEND`.
        """
        policy = policy or self._resend
        unknown: ExecutorError | None = None
        resend = 0
        while True:
            try:
                if self.max_request_bytes is not None and request.ByteSize() > self.max_request_bytes:
                    raise InvalidRequest(
                        f"the request takes {request.ByteSize()} bytes and the executor at most "
                        f"{self.max_request_bytes}",
                        field="request",
                        metadata={"max_request_bytes": self.max_request_bytes},
                    )
                return await method(
                    request, timeout=deadline.remaining(policy.attempt_timeout_s), metadata=self.metadata
                )
            except (ExecutorError, grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.CancelledError) as failure:
                error = self._meaning(failure)
            if isinstance(error, TransportError) and error.metadata.get("grpc_code") == "CANCELLED":
                raise error  # this client was closed; an executor that ends all calls answers otherwise
            if fate_unknown(error):
                unknown = error
            elif unknown is None or not isinstance(error, REFUSED_BEFORE_RUNNING):
                raise error
            if deadline.passed or resend >= policy.times:
                raise self.note_error(unknown)  # only the last attempt may have learned that it is draining
            await asyncio.sleep(deadline.remaining(policy.pause(resend)) or 0.0)
            resend += 1

    def _meaning(self, failure: BaseException) -> ExecutorError:
        """The error that a failed attempt stands for. Raises the cancellation of the caller."""
        if isinstance(failure, grpc.aio.AioRpcError):
            return self.note_error(error_from_rpc(failure))
        if isinstance(failure, ExecutorError):
            return self.note_error(failure)
        task = asyncio.current_task()
        if isinstance(failure, asyncio.CancelledError) and task is not None and task.cancelling():
            raise failure
        # This task was not cancelled: its channel was closed under it, and grpc.aio says so by cancelling.
        return closed()

    def note_error(self, error: ExecutorError) -> ExecutorError:
        """Keep whether the executor drains; returns the error to raise. Where the connection to a draining executor is
        lost, that is `Draining`; the fate of the call is as unknown as with any lost connection."""
        if isinstance(error, Draining):
            self.draining = True
        elif isinstance(error, Starting | InstanceMismatch):
            self.draining = False
        elif self.draining and isinstance(error, TransportError) and error.metadata.get("grpc_code") != "CANCELLED":
            return Draining(f"the executor was draining and is gone: {error.message}", metadata=error.metadata)
        return error


def closed() -> TransportError:
    """What a call ends with when its own client is closed under it."""
    return TransportError("the client was closed while a call was in flight", metadata={"grpc_code": "CANCELLED"})
