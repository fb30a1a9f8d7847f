"""One unary call: deadline, credentials, typed errors, and the resend of a call whose fate is unknown.

Knows gRPC and nothing of sequences.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TypeVar

import grpc

from ferrum_rpc.client.policy import REFUSED_AT_THE_DOOR, Deadline, ResendPolicy, fate_unknown
from ferrum_rpc.errors import ExecutorError, TransportError
from ferrum_rpc.wire.status import error_from_rpc

Request = TypeVar("Request")
Response = TypeVar("Response")
Metadata = Sequence[tuple[str, str]]


class Calls:
    """Makes calls with one caller's credentials and policy."""

    def __init__(self, *, metadata: Metadata, resend: ResendPolicy) -> None:
        self._metadata = tuple(metadata)
        self._resend = resend

    async def ask(
        self,
        method: grpc.aio.UnaryUnaryMultiCallable[Request, Response],
        request: Request,
        deadline: Deadline,
        *,
        attempt_timeout_s: float | None = None,
    ) -> Response:
        """Call once. Raises the `ExecutorError` that the answer stands for."""
        try:
            return await method(request, timeout=deadline.remaining(attempt_timeout_s), metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from None
        except grpc.aio.UsageError:
            raise _closed() from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # Nobody cancelled this task: its channel was closed under it, and grpc.aio says so by cancelling.
            raise _closed() from None

    async def mutate(
        self, method: grpc.aio.UnaryUnaryMultiCallable[Request, Response], request: Request, deadline: Deadline
    ) -> Response:
        """Call, and while its fate is unknown send the same request again, as the policy and the deadline allow.

        Only for requests that carry a request id, or whose repetition changes nothing.
        """
        policy = self._resend
        unknown: ExecutorError | None = None
        for resend in range(policy.times + 1):
            try:
                return await self.ask(method, request, deadline, attempt_timeout_s=policy.attempt_timeout_s)
            except ExecutorError as error:
                if error.metadata.get("grpc_code") == "CANCELLED":
                    raise
                if fate_unknown(error):
                    unknown = error
                elif unknown is None or not isinstance(error, REFUSED_AT_THE_DOOR):
                    raise
            if deadline.passed:
                break
            if resend < policy.times:
                await asyncio.sleep(deadline.remaining(policy.pause(resend)) or 0.0)
        assert unknown is not None  # noqa: S101 - the loop ran, and whatever did not raise was noted
        raise unknown


def _closed() -> TransportError:
    return TransportError("the client was closed while a call was in flight", metadata={"grpc_code": "CANCELLED"})
