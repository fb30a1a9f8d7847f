"""Truncate, fork and reserve: integer operations on a sequence that exists. The caller has claimed it."""

from __future__ import annotations

from collections.abc import Sequence

from ferrum_rpc.client.connection import Connection
from ferrum_rpc.client.retry import Deadline
from ferrum_rpc.client.state import SequenceState, new_request_id, settled
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

    def over(at: int, request_id: str, outcome: list[HandleRef] | BaseException) -> None:
        state, handle, length = rollbacks[at]
        if isinstance(outcome, BaseException):
            state.doubt = settled(state.doubt, outcome, ("truncate", handle, length), request_id)
            refusals[at] = outcome if isinstance(outcome, ExecutorError) else None
        else:
            state.moved(*outcome)

    for request_id, group in calls.items():
        requests = [
            model_executor_pb2.TruncateKvRequest(handle=handle_to_proto(handle), length=length, request_id=request_id)
            for _, handle, length in (rollbacks[at] for at in group)
        ]
        try:
            outcomes = await connection.transport.operate(requests, deadline)
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

    async def children(until: Deadline) -> list[HandleRef]:
        [outcome] = await connection.transport.operate([request], until)
        if isinstance(outcome, ExecutorError):
            raise outcome
        return outcome

    try:
        handles = await children(deadline)
    except BaseException as error:
        state.fork = settled(state.fork, error, content, request.request_id, children)
        raise
    state.fork = None
    return [_child(connection, state, each) for each in handles]


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
    return context.note_pressure((await context.call(context.executor.ReserveKv, request, deadline)).pressure)
