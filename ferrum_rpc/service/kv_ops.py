"""Integer operations on a sequence: truncate, fork, release, reserve. They run between steps, in the same queue.
Unary calls and a session's frames begin them by one table, `OPERATIONS`.

Each is a `Transaction`: its sequence claimed, its request checked and its command queued in the turn of the event loop
that asks for it, and finished by the model thread's answer. Cancelled before its dispatch, it did not happen, unless a
duplicate waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from ferrum_rpc.core import ANYBODY, Caller, HandleRef, named
from ferrum_rpc.engine.api import Operation
from ferrum_rpc.engine.commands import Command, Operations
from ferrum_rpc.errors import ExecutorError, InternalError, InvalidRequest, above
from ferrum_rpc.service.admission import check_length
from ferrum_rpc.service.records import SequenceEnd, SequenceRecord
from ferrum_rpc.service.replay import Entry, scope_of
from ferrum_rpc.service.state import ServerState
from ferrum_rpc.service.transaction import FAILED, CallPhase, Failed, Transaction
from ferrum_rpc.service.waits import bring_in
from ferrum_rpc.wire.items import fork_from_proto, handle_from_proto, request_id_from_proto

Handles = tuple[HandleRef, ...]


def _nothing() -> Handles:
    return ()


class KvOperation(NamedTuple):
    """An operation on a claimed sequence, whose request is right. ``command``: for the model thread (None: it waits for
    the call in flight). ``commit`` makes the engine's change the service's, and returns the handles that are left;
    ``undo`` frees what the operation took, where the engine refused it; ``give_up`` what the engine has made or left,
    where ``commit`` failed or what follows it did: no handle is answered then."""

    command: Command[Any] | None
    commit: Callable[[], Handles]
    undo: Callable[[], object] = _nothing
    give_up: Callable[[], object] = _nothing


class OperationCall(Transaction[tuple[Handles, bool]]):
    """An operation, run once per request id. It has claimed its sequence when it is made, by ``claim`` where another
    handle than a current one will do. A parked sequence is brought back first, unless it ``stays`` parked. It comes to
    the handles that it left, and to whether they are recorded ones."""

    _handles: Handles = ()
    _replayed = False
    _record: SequenceRecord
    _change: KvOperation | None = None
    _operation: Operation | None = None
    _entry: Entry | None = None

    def __init__(
        self,
        state: ServerState,
        handle: HandleRef,
        caller: Caller,
        begin: Callable[[SequenceRecord], KvOperation],
        *,
        claim: Callable[[], SequenceRecord] | None = None,
        stays: bool = False,
        request_id: str = "",
        fingerprint: Hashable = None,
    ) -> None:
        self._state, self._repeated = state, {}
        try:
            _ = state.model
            scope = state.replay.scope(scope_of(caller.name, handle.id, request_id))
            if request_id and (known := scope.get(request_id)) is not None:
                self.phase = CallPhase.SETTLED
                if known.repeated(fingerprint).answer is None:
                    self._repeat(known, self._on_repeated)
                else:
                    self._on_repeated(known.answer)
                return
            self._record = record = state.handles.claim(handle, caller.name) if claim is None else claim()
            try:
                self._change = begin(record)
            except Exception:
                record.busy = False
                raise
            if request_id:
                self._entry = state.replay.begin(scope, request_id, fingerprint)
            if self._change.command is None:
                self.phase = CallPhase.SETTLED
                record.on_freed.append(partial(self.settle, self._finish, None))
                return
            self._operation = Operation(self._change.command, partial(self.settle, self._finish))
            if record.parked and not stays:
                self._wait(bring_in(state, record.account, self._goes_on, [record]))
            else:
                state.engine.submit(self._operation)
                self.phase = CallPhase.QUEUED
        except Exception as error:
            if self._change is not None and self.phase is not CallPhase.DONE:  # what it has claimed is free again
                self.settle(self._finish, InternalError(FAILED))
            self.end(error)

    def answer(self) -> tuple[Handles, bool]:
        """What it left. Raises what refused it."""
        if self.refusal is not None:
            raise self.refusal
        if not self._replayed:
            self._state.failpoints.reach("before_reply")
        return self._handles, self._replayed

    def _cancel(self) -> bool:
        return self._operation is not None and self._state.engine.cancel(self._operation)

    def _awaited(self) -> bool:
        return self._entry is not None and bool(self._entry.waiters)

    def _go_on(self, failed: Failed) -> None:
        if failed:
            [refusal] = failed.values()
            self._finish(refusal)
        elif self._operation is not None:
            try:
                self._state.engine.submit(self._operation)
            except Exception:  # what it has claimed is free again
                self.settle(self._finish, InternalError(FAILED))
                raise
            self.phase = CallPhase.QUEUED

    def _undo(self, error: Exception | None) -> None:
        self.settle(self._finish, error)

    def fail(self, error: InternalError) -> None:
        """The sequence is as the engine has it; those that the operation made are released."""
        if self._change is None:
            return
        state, attempt, record = self._state, self._state.supervisor.attempt, self._record
        if self.phase is CallPhase.SETTLED:
            attempt(self._change.give_up)
        if record.id in state.handles.live:
            attempt(state.quotas.settle, record)
        if record.pending_end is not None and not record.busy:
            attempt(state.release, [record], record.pending_end)
        if self._entry is not None:
            attempt(state.replay.finish, self._entry, error)

    def _finish(self, result: object) -> None:
        """Commit what the engine has done, or undo what the operation claimed where ``result`` is a refusal."""
        state, record, change = self._state, self._record, self._change
        assert change is not None  # noqa: S101 - it was begun
        claimed = change.command is not None
        if claimed:
            record.busy = False
        refusal = result if isinstance(result, ExecutorError) else None
        if refusal is None:
            self.phase = CallPhase.SETTLED
            self._handles = change.commit()
        else:
            change.undo()
        if claimed and record.id in state.handles.live:
            state.quotas.settle(record)
            record.touch()
        if record.pending_end is not None and not record.busy:
            state.release([record], record.pending_end)
        if self._entry is not None:
            state.replay.finish(self._entry, refusal or self._handles)
        self.end(refusal)

    def _on_repeated(self, outcome: Any) -> None:
        """The call that this one repeats has left handles, or was refused."""
        outcome = self._state.replay.repeat(outcome)
        if isinstance(outcome, ExecutorError):
            self.end(outcome)
            return
        self._handles, self._replayed = outcome, True
        self.end()


def truncate(
    state: ServerState, handle: HandleRef, length: int, request_id: str = "", *, caller: Caller = ANYBODY
) -> OperationCall:
    """Roll back to ``length``: one handle is left."""

    def begin(record: SequenceRecord) -> KvOperation:
        check_length(record.length, length, 0, None)

        def commit() -> Handles:
            state.counters.tokens_truncated += record.length - length
            record.length = length
            record.version += 1
            return (record.handle,)

        command = Command(Operations.truncate, record.sequence, length)
        return named(KvOperation, (command, commit, _nothing, _nothing))

    return OperationCall(state, handle, caller, begin, request_id=request_id, fingerprint=("truncate", handle, length))


def fork(
    state: ServerState,
    handle: HandleRef,
    count: int = 1,
    at: int | None = None,
    request_id: str = "",
    *,
    caller: Caller = ANYBODY,
    lease_id: str = "",
    origin: object | None = None,
) -> OperationCall:
    """``count`` children of the first ``at`` tokens, under the lease that is named or the parent's: their handles are
    left. The parent does not change. Raises `InvalidRequest` for the count."""
    if not 1 <= count <= state.limits.max_batch_items:
        raise InvalidRequest(f"count must be 1 to {state.limits.max_batch_items}", field="count")

    def begin(record: SequenceRecord) -> KvOperation:
        length = record.length if at is None else at
        check_length(record.length, length, 0, None)
        lease = state.leases.find(lease_id, caller.name) if lease_id else record.lease
        account, own, adapter = state.quotas.account(caller), record.prefix, record.adapter
        children = state.mint(count, account, lease, length, origin, prefix=own, adapter=adapter, start=length)

        def commit() -> Handles:
            state.counters.sequences_forked += count
            for child in children:
                child.length, child.version, child.reached = length, 1, record.reached
                state.publish(child)
                state.quotas.settle(child)
            for child in children:
                if child.pending_end is not None:
                    state.release([child], child.pending_end)
            return tuple([child.handle for child in children])

        def undo() -> None:
            for child in children:
                state.discard(child)

        command = Command(Operations.fork, record.sequence, [child.sequence for child in children], length)
        return KvOperation(command, commit, undo, partial(state.abandon, children))

    fingerprint = ("fork", handle, count, at, lease_id)
    return OperationCall(state, handle, caller, begin, request_id=request_id, fingerprint=fingerprint)


def release(
    state: ServerState, handle: HandleRef, *, any_version: bool = False, request_id: str = "", caller: Caller = ANYBODY
) -> OperationCall:
    """Free the sequence: no handle is left. With ``any_version`` a sequence whose call is still in flight is released
    when that call ends."""

    def claim() -> SequenceRecord:
        record = state.handles.find(handle, caller.name)
        if record.busy:
            state.end([record], SequenceEnd.RELEASED)
            return record
        return state.handles.claim(handle, caller.name, any_version=True)

    def begin(record: SequenceRecord) -> KvOperation:
        if record.pending_end is not None:
            return KvOperation(None, _nothing)

        def commit() -> Handles:
            state.remove(record)
            return ()

        command = Command(Operations.release, [] if record.parked else [record.sequence])
        return named(KvOperation, (command, commit, _nothing, partial(state.remove, record)))

    fingerprint = ("release", handle, any_version)
    only = claim if any_version else None
    return OperationCall(
        state, handle, caller, begin, claim=only, stays=True, request_id=request_id, fingerprint=fingerprint
    )


def reserve(state: ServerState, handle: HandleRef, tokens: int, *, caller: Caller = ANYBODY) -> OperationCall:
    """Hold blocks for ``tokens`` tokens beyond the present length: the handle is left as it is."""

    def begin(record: SequenceRecord) -> KvOperation:
        check_length(record.length, None, tokens, state.model)
        state.quotas.charge(record, record.length, record.length + tokens)

        def commit() -> Handles:
            record.held_from, record.held_to = record.length, record.length + tokens if tokens else 0
            return (record.handle,)

        command = Command(Operations.reserve, record.sequence, tokens)
        return named(KvOperation, (command, commit, _nothing, _nothing))

    return OperationCall(state, handle, caller, begin)


# --- messages ---------------------------------------------------------------------------------------------------------

Begin = Callable[[ServerState, Caller, Any, object], Sequence[OperationCall]]
"""``begin(state, caller, message, origin)``: an operation for each handle of a message, of which a call has one and a
frame several. ``origin`` marks the sequences that it makes. Raises what refuses the message as a whole."""


def _truncate(state: ServerState, caller: Caller, message: Any, origin: object) -> Sequence[OperationCall]:
    lengths = message.lengths if hasattr(message, "lengths") else (message.length,)
    if hasattr(message, "lengths") and len(message.handles) != len(lengths):
        raise InvalidRequest("`lengths` must have one for every handle", field="lengths")
    handles, request_id = _handles(state, message), request_id_from_proto(message.request_id)
    return [
        truncate(state, each, length, request_id, caller=caller) for each, length in zip(handles, lengths, strict=True)
    ]


def _fork(state: ServerState, caller: Caller, message: Any, origin: object) -> Sequence[OperationCall]:
    lease_id = message.lease_id
    return (fork(state, *fork_from_proto(message), caller=caller, lease_id=lease_id, origin=origin),)


def _release(state: ServerState, caller: Caller, message: Any, origin: object) -> Sequence[OperationCall]:
    handles, any_version = _handles(state, message), message.any_version
    request_id = request_id_from_proto(message.request_id) if hasattr(message, "request_id") else ""
    return [release(state, each, any_version=any_version, request_id=request_id, caller=caller) for each in handles]


def _reserve(state: ServerState, caller: Caller, message: Any, origin: object) -> Sequence[OperationCall]:
    return (reserve(state, handle_from_proto(message.handle), message.tokens, caller=caller),)


OPERATIONS: Final[dict[str, Begin]] = {
    "truncate": _truncate,
    "fork": _fork,
    "release": _release,
    "reserve": _reserve,
}
"""By the name of the session's frame."""


def _handles(state: ServerState, message: Any) -> list[HandleRef]:
    if hasattr(message, "handle"):
        return [handle_from_proto(message.handle)]
    count, limit = len(message.handles), state.limits.max_batch_items
    if count > limit:
        raise above("max_operations", limit, count, "handles", "handles")
    return list(map(handle_from_proto, message.handles))
