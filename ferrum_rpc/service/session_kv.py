"""What a session's frames ask of the cache: roll back, share and release, several sequences in one frame.

A frame has one outcome for every handle, so that one sequence that is busy or gone does not refuse the others. This
file knows neither the stream nor its order of frames.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ferrum_rpc.core import Caller, HandleRef
from ferrum_rpc.errors import ExecutorError, InvalidRequest
from ferrum_rpc.executor.v1 import session_pb2
from ferrum_rpc.service.kv_ops import OperationCall, fork, release, truncate
from ferrum_rpc.service.session_steps import Reply, Step
from ferrum_rpc.service.state import ServerState
from ferrum_rpc.wire.items import (
    fill_pressure,
    handle_from_proto,
    handle_to_proto,
    request_id_from_proto,
)
from ferrum_rpc.wire.status import status_from_error


class SessionKv:
    """The cache as one session sees it: each method begins a `Step`. ``refused(outcomes)`` counts and logs the refusals
    among a frame's outcomes; ``origin`` marks the sequences that the session makes. A frame that is refused whole
    raises."""

    def __init__(
        self, state: ServerState, caller: Caller, origin: object, refused: Callable[[list[Any]], object]
    ) -> None:
        self._state = state
        self._caller = caller
        self._origin = origin
        self._refused = refused

    def truncate(self, step: Step, request: session_pb2.SessionTruncate) -> None:
        """Roll back, each handle to a length of its own."""
        if len(request.handles) != len(request.lengths):
            raise InvalidRequest("`lengths` has one for every handle", field="lengths")
        self._check_count(len(request.handles))
        request_id = request_id_from_proto(request.request_id)
        calls = [
            truncate(self._state, handle_from_proto(handle), length, request_id, caller=self._caller)
            for handle, length in zip(request.handles, request.lengths, strict=True)
        ]
        step.calls, step.reply = calls, partial(self._answer, step.number, calls)

    def release(self, step: Step, request: session_pb2.SessionRelease) -> None:
        """Free."""
        self._check_count(len(request.handles))
        handles = [handle_from_proto(handle) for handle in request.handles]
        calls = [
            release(self._state, handle, any_version=request.any_version, caller=self._caller) for handle in handles
        ]
        step.calls, step.reply = calls, partial(self._answer, step.number, calls, handles)

    def fork(self, step: Step, request: session_pb2.SessionFork) -> None:
        """Share until they diverge."""
        call = fork(
            self._state,
            handle_from_proto(request.handle),
            request.count or 1,
            request.at_length if request.HasField("at_length") else None,
            request_id_from_proto(request.request_id),
            caller=self._caller,
            origin=self._origin,
        )
        step.calls, step.reply = [call], partial(self._forked, step.number, call)

    def _forked(self, number: int, call: OperationCall) -> Reply:
        children, _ = call.answer()
        response = session_pb2.SessionResponse(step_id=number)
        for child in children:
            response.handles.results.add(handle=handle_to_proto(child))
        fill_pressure(response.handles.pressure, self._state.pressure())
        return response, ()

    def _check_count(self, count: int) -> None:
        most = self._state.limits.max_batch_items
        if count > most:
            raise InvalidRequest(f"{count} handles exceed the limit of {most}", field="handles")

    def _answer(self, number: int, calls: Sequence[OperationCall], released: Sequence[HandleRef] = ()) -> Reply:
        """One outcome per handle: what is left of it, or the one that is released."""
        response = session_pb2.SessionResponse(step_id=number)
        answer = response.handles
        outcomes: list[ExecutorError | None] = []
        for index, call in enumerate(calls):
            try:
                handles, _ = call.answer()
            except ExecutorError as error:
                outcomes.append(error)
                answer.results.add(error=status_from_error(error))
            else:
                answer.results.add(handle=handle_to_proto(handles[0] if handles else released[index]))
                outcomes.append(None)
        self._refused(outcomes)
        fill_pressure(answer.pressure, self._state.pressure())
        return response, ()
