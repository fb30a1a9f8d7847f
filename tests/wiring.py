"""Short ways to write requests and to read answers on the raw stubs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from ferrum_rpc.errors import ExecutorError, Reason
from ferrum_rpc.executor.v1 import forward_pb2, model_executor_pb2, output_pb2, types_pb2
from ferrum_rpc.wire.status import error_from_rpc

pb = model_executor_pb2

GREEDY = output_pb2.OutputSpec(greedy=output_pb2.GreedyOutput())


def full(dtype: types_pb2.DType = types_pb2.D_TYPE_F32, positions: int = 0) -> output_pb2.OutputSpec:
    return output_pb2.OutputSpec(positions=positions, full_logits=output_pb2.FullLogitsOutput(dtype=dtype))


def top(k: int, positions: int = 0) -> output_pb2.OutputSpec:
    return output_pb2.OutputSpec(positions=positions, top_tokens=output_pb2.TopTokensOutput(k=k))


def item(tokens: Sequence[int], handle: types_pb2.KvHandle | None = None, **fields: Any) -> forward_pb2.ForwardItem:
    return forward_pb2.ForwardItem(token_ids=tokens, handle=handle, **fields)


def field(number: int, content: bytes) -> bytes:
    """The bytes of a protobuf field that has a length."""
    size, length = len(content), b""
    while size > 0x7F:
        length += bytes((size & 0x7F | 0x80,))
        size >>= 7
    return bytes((number << 3 | 2,)) + length + bytes((size,)) + content


async def prefill(served: Any, tokens: Sequence[int], **fields: Any) -> types_pb2.KvHandle:
    answer = await served.executor.Prefill(pb.PrefillRequest(item=item(tokens, **fields)))
    return answer.output.handle


def messages(client: Any) -> list[Any]:
    """Requests that the client sends from now on."""
    sent: list[Any] = []
    context: Any = client._context
    call = context.call

    async def noted(method: Any, request: Any, deadline: Any, *rest: Any) -> Any:
        sent.append(request)
        return await call(method, request, deadline, *rest)

    context.call = noted
    return sent


async def until(predicate: Callable[[], bool]) -> None:
    """Let the event loop run until the predicate holds."""
    for _ in range(1_000_000):
        if predicate():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never came to be")


async def refused(call: Any, reason: Reason, code: grpc.StatusCode) -> ExecutorError:
    """Await a call that must be refused: with this reason, this code, and full details."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.code() is code
    error = error_from_rpc(caught.value)
    assert error.reason is reason
    details = dict(caught.value.trailing_metadata() or ())
    status = status_pb2.Status.FromString(details["grpc-status-details-bin"])
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert (info.reason, info.domain) == (reason, "ferrum_rpc")
    return error
