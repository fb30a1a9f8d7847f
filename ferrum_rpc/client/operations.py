"""Truncate, fork and reserve: integer operations on a sequence that exists. The caller has claimed it."""

from __future__ import annotations

from ferrum_rpc.client.link import Link
from ferrum_rpc.client.policy import Deadline
from ferrum_rpc.client.state import SequenceState, settled
from ferrum_rpc.core import HandleRef, Pressure
from ferrum_rpc.executor.v1 import model_executor_pb2
from ferrum_rpc.wire.items import handle_to_proto


async def truncate(link: Link, state: SequenceState, handle: HandleRef, length: int, deadline: Deadline) -> Pressure:
    """Roll back; the state follows."""
    content = ("truncate", handle, length)
    request_id = state.request_id(content)
    transport = await link.transport(deadline)
    try:
        [moved], pressure = await transport.truncate(handle, length, request_id, deadline)
    except BaseException as error:
        state.doubt = settled(state.doubt, error, content, request_id)
        raise
    state.moved(moved)
    return link.saw(pressure)


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

    async def repeat(until: Deadline) -> list[HandleRef]:
        return (await (await link.transport(until)).fork(request, until))[0]

    transport = await link.transport(deadline)
    try:
        children, pressure = await transport.fork(request, deadline)
    except BaseException as error:
        state.fork = settled(state.fork, error, content, request.request_id, repeat)
        raise
    state.fork = None
    link.saw(pressure)
    return [_child(link, state, each) for each in children]


def _child(link: Link, parent: SequenceState, handle: HandleRef) -> SequenceState:
    tokens = None if parent.tokens is None else parent.tokens[: handle.seq_len]
    state = SequenceState(parent.create, handle=handle, tokens=tokens)
    state.lease_id = parent.lease_id
    link.releases.live.add(state)
    return state


async def reserve(link: Link, handle: HandleRef, tokens: int, deadline: Deadline) -> Pressure:
    """Hold blocks. Repeating it changes nothing, so it needs no request id."""
    request = model_executor_pb2.ReserveKvRequest(handle=handle_to_proto(handle), tokens=tokens)
    return link.saw((await link.calls.mutate(link.executor.ReserveKv, request, deadline)).pressure)
