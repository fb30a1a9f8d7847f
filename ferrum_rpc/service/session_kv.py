"""What a session's frames ask of the cache: roll back, share and release, several sequences in one frame.

A frame has one outcome for every handle, so that one sequence that is busy or gone does not refuse the others. The
stream and the order of its frames are `session`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ferrum_rpc.core import Caller, HandleRef
from ferrum_rpc.errors import ExecutorError, InvalidRequest, above
from ferrum_rpc.executor.v1 import session_pb2
from ferrum_rpc.service.kv_ops import OperationCall, fork, release, reserve, truncate
from ferrum_rpc.service.state import ServerState
from ferrum_rpc.service.transaction import Transaction
from ferrum_rpc.wire.items import (
    fill_pressure,
    fork_from_proto,
    handle_from_proto,
    handle_to_proto,
    request_id_from_proto,
)
from ferrum_rpc.wire.status import status_from_error

Reply = Callable[[session_pb2.SessionResponse], Iterable[session_pb2.SessionResponse]]
"""Fills the answer of a frame whose calls have ended, and returns the frames of rows that go ahead of it. Raises what
refuses the frame."""


@dataclass(slots=True, eq=False)
class PendingFrame:
    """A frame in progress. ``waits``: how many of its ``calls`` have not ended. ``parts``: those that have and are not
    answered, where it is answered in parts; None where it is answered as a whole. ``free_answer`` frees the bytes of
    large answers. A forward has so many ``items`` and arrived
    at ``began``, on `time.monotonic`."""

    number: int
    calls: Sequence[Transaction[Any]] = ()
    reply: Reply | None = None
    waits: int = 0
    parts: list[int] | None = None
    free_answer: Callable[[], object] | None = None
    items: int = 0
    began: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class SessionKv:
    """The cache as one session sees it: each method begins a `PendingFrame`, or raises what refuses the frame.
    ``refused(outcomes)`` counts and logs the refusals among a frame's outcomes; ``origin`` marks the sequences that the
    session makes."""

    state: ServerState
    caller: Caller
    origin: object
    refused: Callable[[list[Any]], object]

    def truncate(self, step: PendingFrame, request: session_pb2.SessionTruncate) -> None:
        """Roll back, each handle to a length of its own."""
        if len(request.handles) != len(request.lengths):
            raise InvalidRequest("`lengths` must have one for every handle", field="lengths")
        handles, request_id = self._handles(request), request_id_from_proto(request.request_id)
        calls = [
            truncate(self.state, handle, length, request_id, caller=self.caller)
            for handle, length in zip(handles, request.lengths, strict=True)
        ]
        step.calls, step.reply = calls, partial(self._answer, calls, ())

    def release(self, step: PendingFrame, request: session_pb2.SessionRelease) -> None:
        handles, any_version = self._handles(request), request.any_version
        calls = [release(self.state, each, any_version=any_version, caller=self.caller) for each in handles]
        step.calls, step.reply = calls, partial(self._answer, calls, handles)

    def fork(self, step: PendingFrame, request: session_pb2.SessionFork) -> None:
        lease_id, origin = request.lease_id, self.origin
        call = fork(self.state, *fork_from_proto(request), caller=self.caller, lease_id=lease_id, origin=origin)
        step.calls, step.reply = (call,), partial(self._forked, call)

    def reserve(self, step: PendingFrame, request: session_pb2.SessionReserve) -> None:
        call = reserve(self.state, handle_from_proto(request.handle), request.tokens, caller=self.caller)
        step.calls, step.reply = (call,), partial(self._answer, (call,), ())

    def release_before(self, request: session_pb2.SessionForward) -> None:
        """Release what a forward frame lets go of, whatever becomes of the frame. Raises `InvalidRequest`."""
        own = {item.handle.id for item in request.items}
        if any(handle.id in own for handle in request.release):
            raise InvalidRequest("a frame cannot release a sequence that it feeds", field="release")
        if len(request.release) > (most := self.state.limits.max_batch_items):
            raise above("max_operations", most, len(request.release), "handles", "release")
        for handle in map(handle_from_proto, request.release):
            call = release(self.state, handle, any_version=True, caller=self.caller)
            call.when_ended(partial(self._note, call))

    def _note(self, call: OperationCall) -> None:
        if call.refusal is not None:
            self.refused([call.refusal])

    def _handles(self, request: session_pb2.SessionTruncate | session_pb2.SessionRelease) -> list[HandleRef]:
        count, most = len(request.handles), self.state.limits.max_batch_items
        if count > most:
            raise above("max_operations", most, count, "handles", "handles")
        return [handle_from_proto(handle) for handle in request.handles]

    def _forked(self, call: OperationCall, response: session_pb2.SessionResponse) -> tuple[()]:
        for child in call.answer()[0]:
            response.handles.results.add(handle=handle_to_proto(child))
        fill_pressure(response.handles.pressure, self.state.pressure())
        return ()

    def _answer(
        self, calls: Sequence[OperationCall], released: Sequence[HandleRef], response: session_pb2.SessionResponse
    ) -> tuple[()]:
        """One outcome per handle: what is left of it, or the one that is released."""
        answer, errors = response.handles, list[ExecutorError | None]()
        for index, call in enumerate(calls):
            error = None
            try:
                handles, _ = call.answer()
                answer.results.add(handle=handle_to_proto(handles[0] if handles else released[index]))
            except ExecutorError as refusal:
                answer.results.add(error=status_from_error(error := refusal))
            errors.append(error)
        self.refused(errors)
        fill_pressure(answer.pressure, self.state.pressure())
        return ()
