"""Integer operations on a sequence: truncate, fork, release, reserve. They run between steps, in the same queue.

Each is a `Transaction`: its sequence claimed, its request checked and its command queued in the turn of the event loop
that asks for it, and finished by the model thread's answer. Cancelled before its dispatch, it did not happen, unless a
duplicate waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any

from ferrum_rpc.core import ANYBODY, Caller, HandleRef
from ferrum_rpc.engine.api import Command, Operation
from ferrum_rpc.errors import Cancelled, ExecutorError, InternalError, InvalidRequest
from ferrum_rpc.service.admission import check_length
from ferrum_rpc.service.records import Ending, SequenceRecord
from ferrum_rpc.service.replay import Entry, scope_of
from ferrum_rpc.service.state import ServerState
from ferrum_rpc.service.transaction import FAILED, Transaction

Handles = tuple[HandleRef, ...]


@dataclass(slots=True, eq=False)
class Plan:
    """What an operation on a claimed sequence runs in the model thread, and what follows from it.

    ``command`` is None for a release that waits for the call on the sequence. ``commit`` returns the handles that are
    left; ``refuse`` follows a refusal. ``lose`` ends what the model thread made where its handle cannot be answered,
    however much of ``commit`` was done.
    """

    command: Command | None
    commit: Callable[[], Handles]
    refuse: Callable[[], None] = lambda: None
    lose: Callable[[], object] = lambda: None


class OperationCall(Transaction[tuple[Handles, bool]]):
    """An operation, run once per request id. It has claimed its sequence when it is made, by ``claim`` where another
    handle than a current one will do. It comes to the handles that it left, and to whether they are recorded ones."""

    _handles: Handles = ()
    _done = _replayed = False
    _record: SequenceRecord
    _plan: Plan | None = None
    _operation: Operation | None = None
    _entry: Entry | None = None

    def __init__(
        self,
        state: ServerState,
        handle: HandleRef,
        caller: Caller,
        plan: Callable[[SequenceRecord], Plan],
        *,
        claim: Callable[[], SequenceRecord] | None = None,
        request_id: str = "",
        fingerprint: Hashable = None,
    ) -> None:
        self._state = state
        try:
            _ = state.model
            scope = state.replay.scope(scope_of(caller.name, handle.id, request_id))
            if request_id and (known := scope.get(request_id)) is not None:
                if known.repeated(fingerprint).answer is None:
                    self._wait_for(known, self._on_repeated)
                else:
                    self._on_repeated(known.answer)
                return
            self._record = state.handles.claim(handle, caller.name) if claim is None else claim()
            try:
                self._plan = plan(self._record)
            except Exception:
                self._record.busy = False
                raise
            if request_id:
                self._entry = state.replay.begin(scope, request_id, fingerprint)
            self._submit(self._plan.command)
        except Exception as error:
            if self._plan is not None:  # what it has claimed is free again
                self.settle(self._finish, InternalError(FAILED))
            self.end(error)

    def _submit(self, command: Command | None) -> None:
        if command is None:
            self._record.on_freed.append(partial(self.settle, self._finish, None))
        else:
            self._operation = Operation(command, partial(self.settle, self._finish))
            self._state.engine.submit(self._operation)

    def answer(self) -> tuple[Handles, bool]:
        """What it left. Raises what refused it."""
        if self.refusal is not None:
            raise self.refusal
        if not self._replayed:
            self._state.failpoints.reach("before_reply")
        return self._handles, self._replayed

    def take_back(self) -> bool:
        """See `Transaction`."""
        awaited = self._entry is not None and self._entry.waiters
        if self._operation is None or awaited or not self._state.engine.cancel(self._operation):
            return False
        self.settle(self._finish, Cancelled("the call was cancelled before it was dispatched; nothing happened"))
        return True

    def fail(self, error: InternalError) -> None:
        """See `Transaction`. The sequence is as the engine has it; those that the operation made are released."""
        if self._plan is None:
            return
        state, attempt, record = self._state, self._state.supervisor.attempt, self._record
        if self._done:
            attempt(self._plan.lose)
        if state.handles.is_live(record):
            attempt(state.quotas.settle, record)
        if record.pending_end is not None and not record.busy:
            attempt(state.release, [record], record.pending_end)
        if self._entry is not None:
            attempt(state.replay.finish, self._entry, error)

    def abandon(self) -> None:
        """See `Transaction`."""
        super().abandon()
        self._leave_repeated()

    def _finish(self, result: object) -> None:
        """It was done, or refused."""
        state, plan, record = self._state, self._plan, self._record
        assert plan is not None  # noqa: S101 - it was begun
        if plan.command is not None:
            record.busy = False
        refusal = result if isinstance(result, ExecutorError) else None
        self._done = refusal is None
        if refusal is None:
            self._handles = plan.commit()
        else:
            plan.refuse()
        if plan.command is not None and state.handles.is_live(record):
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

    def plan(record: SequenceRecord) -> Plan:
        check_length(record.length, length, 0, None)

        def commit() -> Handles:
            state.counters.tokens_truncated += record.length - length
            record.length = length
            record.version += 1
            return (record.handle,)

        return Plan(Command("truncate", (record.sequence, length)), commit)

    return OperationCall(state, handle, caller, plan, request_id=request_id, fingerprint=("truncate", handle, length))


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

    def plan(record: SequenceRecord) -> Plan:
        length = record.length if at is None else at
        check_length(record.length, length, 0, None)
        lease = state.leases.find(lease_id, caller.name) if lease_id else record.lease
        children = state.mint(count, state.quotas.account(caller), lease, length, origin)

        def refuse() -> None:
            for child in children:
                state.discard(child)

        def commit() -> Handles:
            for child in children:
                child.length, child.version = length, 1
                state.publish(child)
                state.quotas.settle(child)
            state.release([child for child in children if child.pending_end is not None], Ending.REVOKED)
            return tuple(child.handle for child in children)

        command = Command("fork", (record.sequence, [child.sequence for child in children], length))
        return Plan(command, commit, refuse, partial(state.give_up, children))

    fingerprint = ("fork", handle, count, at, lease_id)
    return OperationCall(state, handle, caller, plan, request_id=request_id, fingerprint=fingerprint)


def release(
    state: ServerState, handle: HandleRef, *, any_version: bool = False, request_id: str = "", caller: Caller = ANYBODY
) -> OperationCall:
    """Free the sequence: no handle is left. With ``any_version`` a sequence whose call is still in flight is released
    when that call ends."""

    def claim() -> SequenceRecord:
        record = state.handles.find(handle, caller.name)
        if record.busy:
            record.pending_end = record.pending_end or Ending.RELEASED
            return record
        return state.handles.claim(handle, caller.name, any_version=True)

    def plan(record: SequenceRecord) -> Plan:
        if record.pending_end is not None:
            return Plan(None, tuple)

        def commit() -> Handles:
            state.remove(record)
            return ()

        return Plan(Command("release", ([record.sequence],)), commit, lose=partial(state.remove, record))

    return OperationCall(
        state,
        handle,
        caller,
        plan,
        claim=claim if any_version else None,
        request_id=request_id,
        fingerprint=("release", handle, any_version),
    )


def reserve(state: ServerState, handle: HandleRef, tokens: int, *, caller: Caller = ANYBODY) -> OperationCall:
    """Hold blocks for ``tokens`` tokens beyond the present length: the handle is left as it is."""

    def plan(record: SequenceRecord) -> Plan:
        check_length(record.length, None, tokens, state.model)
        state.quotas.charge(record, record.length + tokens)

        def commit() -> Handles:
            record.held_to = record.length + tokens if tokens else 0
            return (record.handle,)

        return Plan(Command("reserve", (record.sequence, tokens)), commit)

    return OperationCall(state, handle, caller, plan)
