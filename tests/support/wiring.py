"""Short ways to write requests and to read answers on the raw stubs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from ferrum_rpc.client.client import connection_of
from ferrum_rpc.errors import ExecutorError, Reason
from ferrum_rpc.executor.v1 import forward_pb2, model_executor_pb2, output_pb2, types_pb2
from ferrum_rpc.wire.rows import rows_from_proto
from ferrum_rpc.wire.status import CODE_BY_REASON, STATUS_METADATA_KEY, error_from_rpc, error_from_status
from tests.support import waiting

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
    return (await served.prefill(tokens, **fields)).output.handle


async def decode(served: Any, tokens: Sequence[int], handle: types_pb2.KvHandle, **fields: Any) -> types_pb2.KvHandle:
    """The handle of a sequence behind one more step."""
    return (await served.decode(tokens, handle, **fields)).output.handle


async def release(served: Any, *handles: types_pb2.KvHandle) -> None:
    """Whatever their versions."""
    for each in handles:
        await served.release(each, any_version=True)


async def refusal(call: Awaitable[Any]) -> ExecutorError | None:
    """Why a call is refused, or None."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error_from_rpc(error)
    return None


def messages(client: Any) -> list[Any]:
    """Requests that the client sends from now on."""
    sent: list[Any] = []
    context: Any = connection_of(client).context
    call = context.call

    async def noted(method: Any, request: Any, deadline: Any, *rest: Any) -> Any:
        sent.append(request)
        return await call(method, request, deadline, *rest)

    context.call = noted
    return sent


async def until(predicate: Callable[[], bool]) -> None:
    """Let the event loop run until the predicate holds: a few turns at once, which see what passes, then each
    millisecond, which leaves the processor to what is waited for. Raises TimeoutError."""
    for _ in range(500):
        if predicate():
            return
        await asyncio.sleep(0)
    await waiting.until(predicate)


def chosen(answer: Any, output: Any = None) -> list[int]:
    """The tokens of one output of an answer; without ``output`` the answer has one."""
    rows = (output or answer.output).rows
    tokens = rows_from_proto(answer.row_blocks)[rows.block]["token_ids"][rows.first : rows.first + rows.count]
    return list(map(int, tokens))


def reason_of(result: Any) -> Reason | None:
    """Why an item or a handle of an answer was refused, or None."""
    return error_from_status(result.error).reason if result.HasField("error") else None


def error_of(status: status_pb2.Status) -> ExecutorError:
    """The refusal that a status stands for: with one ErrorInfo, and the code that is documented for its reason."""
    info = error_details_pb2.ErrorInfo()
    [detail] = [each for each in status.details if each.Is(info.DESCRIPTOR)]
    detail.Unpack(info)
    error = error_from_status(status)
    code, _ = CODE_BY_REASON[error.reason].value  # of the documents too: tests/unit/test_contract.py
    assert (info.domain, info.reason, status.code) == ("ferrum_rpc", error.reason, code)
    return error


def error_of_call(refusal: grpc.aio.AioRpcError) -> ExecutorError:
    """The refusal of a call, whose status has it in full."""
    status = status_pb2.Status.FromString(dict(refusal.trailing_metadata() or ())[STATUS_METADATA_KEY])
    assert (status.code, status.message) == (refusal.code().value[0], refusal.details())
    return error_of(status)


async def refused(call: Any, reason: Reason, code: grpc.StatusCode | None = None) -> ExecutorError:
    """Await a call that must be refused for this reason."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    error = error_of_call(caught.value)
    assert error.reason is reason and code in (None, caught.value.code())
    return error
