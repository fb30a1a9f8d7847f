"""What a session's frames ask of the cache: roll back, share and release, several sequences in one frame.

A frame has one outcome for every handle, so that one sequence that is busy or gone does not refuse the others. The
stream and the order of its frames are `session`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ferrum_rpc.core import Caller
from ferrum_rpc.errors import ExecutorError, InvalidRequest, above
from ferrum_rpc.executor.v1 import session_pb2
from ferrum_rpc.service.kv_ops import OPERATIONS, OperationCall, release
from ferrum_rpc.service.state import ServerState
from ferrum_rpc.service.transaction import Transaction
from ferrum_rpc.wire.items import fill_pressure, handle_from_proto, handle_to_proto
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
    """The cache as one session sees it: `begin` fills a `PendingFrame`, or raises what refuses the frame.
    ``refused(outcomes)`` counts and logs the refusals among a frame's outcomes; ``origin`` marks the sequences that the
    session makes."""

    state: ServerState
    caller: Caller
    origin: object
    refused: Callable[[list[Any]], object]

    def begin(self, kind: str, step: PendingFrame, request: Any) -> None:
        """Begin what a frame of this ``kind`` asks for."""
        step.calls = calls = OPERATIONS[kind](self.state, self.caller, request, self.origin)
        step.reply = partial(self._answer, calls, request)

    def release_before(self, request: session_pb2.SessionForward) -> None:
        """Release what a forward frame lets go of, whatever becomes of the frame. Raises `InvalidRequest`."""
        own = {item.handle.id for item in request.items}
        if any(handle.id in own for handle in request.release):
            raise InvalidRequest("a frame cannot release a sequence that it feeds", field="release")
        if len(request.release) > (limit := self.state.limits.max_batch_items):
            raise above("max_operations", limit, len(request.release), "handles", "release")
        for handle in map(handle_from_proto, request.release):
            call = release(self.state, handle, any_version=True, caller=self.caller)
            call.when_ended(partial(self._note, call))

    def _note(self, call: OperationCall) -> None:
        if call.refusal is not None:
            self.refused([call.refusal])

    def _answer(self, calls: Sequence[OperationCall], request: Any, response: session_pb2.SessionResponse) -> tuple[()]:
        """One outcome per handle: what is left of it, or the one that is released; of a fork, its children."""
        answer, errors = response.handles, list[ExecutorError]()
        for index, call in enumerate(calls):
            try:
                left, _ = call.answer()
            except ExecutorError as error:
                if isinstance(request, session_pb2.SessionFork):
                    raise
                answer.results.add(error=status_from_error(error))
                errors.append(error)
                continue
            for handle in map(handle_to_proto, left) if left else (request.handles[index],):
                answer.results.add(handle=handle)
        self.refused(errors)
        fill_pressure(answer.pressure, self.state.pressure())
        return ()
