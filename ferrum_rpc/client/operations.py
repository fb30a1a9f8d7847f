"""Truncate, fork and reserve: integer operations on a sequence that exists. The caller has claimed it."""

from __future__ import annotations

from collections.abc import Sequence

from ferrum_rpc.client.connection import Connection
from ferrum_rpc.client.policy import Deadline
from ferrum_rpc.client.state import SequenceState, new_request_id, settled
from ferrum_rpc.client.transport import Outcomes, Rollback, Transport
from ferrum_rpc.core import HandleRef, Pressure
from ferrum_rpc.errors import ExecutorError
from ferrum_rpc.executor.v1 import model_executor_pb2
from ferrum_rpc.wire.items import handle_to_proto


async def truncate(
    connection: Connection, rollbacks: Sequence[tuple[SequenceState, HandleRef, int]], deadline: Deadline
) -> list[ExecutorError | None]:
    """Roll back, each to its length; the states follow. None: done. All have one request id, but for those whose
    doubtful call for the same thing has one already."""
    fresh = new_request_id()
    calls: dict[str, list[int]] = {}
    for at, (state, handle, length) in enumerate(rollbacks):
        calls.setdefault(state.request_id(("truncate", handle, length), fresh), []).append(at)
    refusals: list[ExecutorError | None] = [None] * len(rollbacks)

    def over(at: int, request_id: str, outcome: HandleRef | BaseException) -> None:
        state, handle, length = rollbacks[at]
        if isinstance(outcome, BaseException):
            state.doubt = settled(state.doubt, outcome, ("truncate", handle, length), request_id)
            refusals[at] = outcome if isinstance(outcome, ExecutorError) else None
        else:
            state.moved(outcome)

    for request_id, group in calls.items():

        async def send(transport: Transport, part: Sequence[Rollback], request_id: str = request_id) -> Outcomes:
            return await transport.truncate(part, request_id, deadline)

        try:
            outcomes = await connection.dispatcher.outcomes(send, [rollbacks[at][1:] for at in group], deadline)
        except BaseException as error:
            for at in group:
                over(at, request_id, error)
            raise
        for at, outcome in zip(group, outcomes, strict=True):
            over(at, request_id, outcome)
    return refusals


async def fork(
    connection: Connection, state: SequenceState, handle: HandleRef, deadline: Deadline, *, count: int, at: int | None
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
        return (await (await connection.dispatcher.transport(until)).fork(request, until))[0]

    transport = await connection.dispatcher.transport(deadline)
    try:
        children, pressure = await transport.fork(request, deadline)
    except BaseException as error:
        state.fork = settled(state.fork, error, content, request.request_id, repeat)
        raise
    state.fork = None
    connection.context.note_pressure(pressure)
    return [_child(connection, state, each) for each in children]


def _child(connection: Connection, parent: SequenceState, handle: HandleRef) -> SequenceState:
    tokens = None if parent.tokens is None else parent.tokens[: handle.seq_len]
    state = SequenceState(parent.create, handle=handle, tokens=tokens)
    state.lease_id = parent.lease_id
    state.pieces = parent.pieces.upto(handle.seq_len)
    connection.releases.live.add(state)
    return state


async def reserve(connection: Connection, handle: HandleRef, tokens: int, deadline: Deadline) -> Pressure:
    """Hold blocks. Repeating it changes nothing, so it needs no request id."""
    request = model_executor_pb2.ReserveKvRequest(handle=handle_to_proto(handle), tokens=tokens)
    context = connection.context
    return context.note_pressure((await context.calls.call(context.executor.ReserveKv, request, deadline)).pressure)
