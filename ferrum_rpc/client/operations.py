"""Truncate, fork and reserve: integer operations on a sequence that exists. The caller has claimed it."""

from __future__ import annotations

from ferrum_rpc.client.link import Link
from ferrum_rpc.client.policy import Deadline
from ferrum_rpc.client.state import SequenceState, settled
from ferrum_rpc.core import HandleRef, Pressure
from ferrum_rpc.executor.v1 import model_executor_pb2
from ferrum_rpc.wire.items import handle_from_proto, handle_to_proto


async def truncate(link: Link, state: SequenceState, handle: HandleRef, length: int, deadline: Deadline) -> Pressure:
    """Roll back; the state follows."""
    content = ("truncate", handle, length)
    request = model_executor_pb2.TruncateKvRequest(
        handle=handle_to_proto(handle), length=length, request_id=state.request_id(content)
    )
    try:
        response = await link.calls.mutate(link.executor.TruncateKv, request, deadline)
    except BaseException as error:
        state.doubt = settled(state.doubt, error, content, request.request_id)
        raise
    state.moved(handle_from_proto(response.handle))
    return link.saw(response.pressure)


async def fork(
    link: Link, state: SequenceState, handle: HandleRef, deadline: Deadline, *, count: int, at: int | None
) -> list[SequenceState]:
    """Children of the first ``at`` tokens, as live states."""
    content = ("fork", handle, count, at)
    request = model_executor_pb2.ForkKvRequest(
        handle=handle_to_proto(handle),
        count=count,
        at_length=at,
        request_id=state.request_id(content),
        lease_id=state.create.lease_id,
    )

    async def send(until: Deadline) -> model_executor_pb2.ForkKvResponse:
        return await link.calls.mutate(link.executor.ForkKv, request, until)

    async def repeat(until: Deadline) -> list[HandleRef]:
        return [handle_from_proto(each) for each in (await send(until)).handles]

    try:
        response = await send(deadline)
    except BaseException as error:
        state.fork = settled(state.fork, error, content, request.request_id, repeat)
        raise
    state.fork = None
    link.saw(response.pressure)
    return [_child(link, state, handle_from_proto(each)) for each in response.handles]


def _child(link: Link, parent: SequenceState, handle: HandleRef) -> SequenceState:
    tokens = None if parent.tokens is None else parent.tokens[: handle.seq_len]
    state = SequenceState(parent.create, handle=handle, tokens=tokens)
    link.releases.live.add(state)
    return state


async def reserve(link: Link, handle: HandleRef, tokens: int, deadline: Deadline) -> Pressure:
    """Hold blocks. Repeating it changes nothing, so it needs no request id."""
    request = model_executor_pb2.ReserveKvRequest(handle=handle_to_proto(handle), tokens=tokens)
    return link.saw((await link.calls.mutate(link.executor.ReserveKv, request, deadline)).pressure)
