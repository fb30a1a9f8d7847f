"""Integer operations on a sequence: truncate, fork, release, reserve. They run between steps, in the same queue.

Each is a `Transaction`: its sequence claimed, its request checked and its command queued in the turn of the event loop
that asks for it, and finished by the model thread's answer. Cancelled before its dispatch, it did not happen, unless a
duplicate waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial

from ferrum_rpc.core import ANYBODY, Caller, HandleRef, ItemAnswer
from ferrum_rpc.engine.api import Command, Operation
from ferrum_rpc.errors import Cancelled, ExecutorError, InternalError, InvalidRequest
from ferrum_rpc.service.admission import check_length
from ferrum_rpc.service.records import Ending, SequenceRecord
from ferrum_rpc.service.replay import Entry, Key, Ticket, scope_of
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
    _ticket: Ticket | None = None

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
            if not self._repeats(scope_of(caller.name, handle.id, request_id), request_id, fingerprint):
                self._record = state.handles.claim(handle, caller.name) if claim is None else claim()
                self._submit(plan, scope_of(caller.name, handle.id, request_id), request_id, fingerprint)
        except Exception as error:
            if self._plan is not None:  # what it has claimed is free again
                self.settle(self._finish, InternalError(FAILED))
            self.end(error)

    def _repeats(self, key: Key, request_id: str, fingerprint: Hashable) -> bool:
        """Join the call that this one repeats. False: there is none. Raises its refusal."""
        _ = self._state.model
        replay = self._state.replay
        if not request_id or (known := replay.scope(key).get(request_id)) is None:
            return False
        self._ticket = ticket = replay.join(known.repeated(fingerprint))
        if ticket.pending is None:
            self._on_repeated()
        else:
            ticket.pending.add_done_callback(partial(self.settle, self._on_repeated))
        return True

    def _submit(self, plan: Callable[[SequenceRecord], Plan], key: Key, request_id: str, fingerprint: Hashable) -> None:
        """Check the request against the claimed sequence, and queue it. A refusal leaves no entry."""
        state, record = self._state, self._record
        try:
            self._plan = plan(record)
        except Exception:
            record.busy = False
            raise
        if request_id:
            self._entry = state.replay.begin(state.replay.scope(key), request_id, fingerprint)
        if self._plan.command is None:
            record.on_freed.append(partial(self.settle, self._finish, None))
        else:
            self._operation = Operation(self._plan.command, partial(self.settle, self._finish))
            state.engine.submit(self._operation)

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
        self._leave_repeated()
        if self._plan is None:
            return
        state, attempt, record = self._state, self._state.supervisor.attempt, self._record
        if self._done:
            attempt(self._plan.lose)
        if state.handles.lives(record):
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
        if plan.command is not None and state.handles.lives(record):
            state.quotas.settle(record)
            record.touch()
        if record.pending_end is not None and not record.busy:
            state.release([record], record.pending_end)
        if self._entry is not None:
            state.replay.finish(self._entry, refusal or self._handles)
        self.end(refusal)

    def _on_repeated(self, _: object = None) -> None:
        """The call that this one repeats has ended."""
        if self._ticket is None:
            return
        outcome = self._state.replay.read(self._ticket)
        self._leave_repeated()
        if isinstance(outcome, ExecutorError):
            self.end(outcome)
            return
        assert not isinstance(outcome, ItemAnswer)  # noqa: S101 - the fingerprint of an operation is no forward's
        self._handles, self._replayed = outcome, True
        self.end()

    def _leave_repeated(self) -> None:
        if self._ticket is not None:
            self._state.replay.leave(self._ticket)
            self._ticket = None


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
    left. The parent does not change."""

    def claim() -> SequenceRecord:
        if not 1 <= count <= state.limits.max_batch_items:
            raise InvalidRequest(f"count must be 1 to {state.limits.max_batch_items}", field="count")
        return state.handles.claim(handle, caller.name)

    def plan(record: SequenceRecord) -> Plan:
        length = record.length if at is None else at
        check_length(record.length, length, 0, None)
        lease = state.leases.find(lease_id, caller.name) if lease_id else record.lease
        children = state.mint(count, state.quotas.account(caller), lease)

        def refuse() -> None:
            for child in children:
                state.discard(child)

        try:
            for child in children:
                child.origin = origin
                state.quotas.charge(child, length)
        except Exception:
            refuse()
            raise

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
    return OperationCall(state, handle, caller, plan, claim=claim, request_id=request_id, fingerprint=fingerprint)


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
