"""Integer operations on sequences: truncate, fork, release, reserve, reset. They run between steps, in the same queue.

Each is a `Transaction`: *prepared* (sequence claimed, request checked, operation queued) in the turn of the event loop
that asks for it, and finished by the model thread's answer. Cancelled before its dispatch, it did not happen, unless a
duplicate waits for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np

from ferrum_rpc.core import ANYBODY, Caller, HandleRef, ItemAnswer, OutputSpec, Positions, Span, SpanOutcome
from ferrum_rpc.engine.work import Command, Operation, Submission
from ferrum_rpc.errors import Cancelled, ExecutorError, InstanceMismatch, InternalError, InvalidRequest
from ferrum_rpc.service.admission import check_length
from ferrum_rpc.service.books import Books
from ferrum_rpc.service.records import Ending, Record
from ferrum_rpc.service.replay import Entry, Key, Ticket, scope_of
from ferrum_rpc.service.transaction import FAILED, Transaction

T = TypeVar("T")
Handles = tuple[HandleRef, ...]


@dataclass(slots=True, eq=False)
class Prepared:
    """An operation on a claimed sequence: what the model thread runs, and what becomes of the books after it.

    ``run`` is None for a release that waits for somebody else's call on the sequence. ``lose`` ends what the model
    thread made where nobody will hear of it, however much of ``commit`` was done.
    """

    record: Record
    run: Callable[[Any], object] | None
    commit: Callable[[], Handles]
    refuse: Callable[[], None] = lambda: None
    lose: Callable[[], object] = lambda: None


class OperationCall(Transaction[T]):
    """An operation; ``read`` makes its answer of the handles that it left and of whether they are recorded ones."""

    _handles: Handles = ()
    _done = _replayed = False
    _prepared: Prepared | None = None
    _operation: Operation | None = None
    _entry: Entry | None = None
    _ticket: Ticket | None = None

    def __init__(self, books: Books, read: Callable[[Handles, bool], T]) -> None:
        self._books = books
        self._read = read

    def begin(self, key: Key, request_id: str, fingerprint: Hashable, prepare: Callable[[], Prepared]) -> None:
        """Join the call that this one repeats, or claim and queue. Raises its refusal."""
        _ = self._books.model
        replay = self._books.replay
        scope = replay.scope(key)
        if request_id and (known := scope.get(request_id)) is not None:
            self._ticket = ticket = replay.join(known.repeated(fingerprint))
            if ticket.pending is None:
                self._on_repeated()
            else:
                ticket.pending.add_done_callback(partial(self.settle, self._on_repeated))
            return
        self._prepared = prepared = prepare()  # a refusal leaves no entry
        if request_id:
            self._entry = replay.begin(scope, request_id, fingerprint)
        if prepared.run is None:
            prepared.record.mourners.append(partial(self.settle, self._finish, None))
        else:
            self._operation = Operation(prepared.run, partial(self.settle, self._finish))
            self._books.engine.operate(self._operation)

    def refuse(self, error: Exception) -> None:
        """It could not begin. What it has claimed is free again."""
        if self._prepared is not None:
            self.settle(self._finish, InternalError(FAILED))
        self.end(error)

    def answer(self) -> T:
        """What it left. Raises what refused it."""
        if self.refusal is not None:
            raise self.refusal
        if not self._replayed:
            self._books.failpoints.reach("before_reply")
        return self._read(self._handles, self._replayed)

    def take_back(self) -> bool:
        """See `Transaction`."""
        awaited = self._entry is not None and self._entry.waiters
        if self._operation is None or awaited or not self._books.engine.cancel(self._operation):
            return False
        self.settle(self._finish, Cancelled("the call was cancelled before it was dispatched; nothing happened"))
        return True

    def fail(self, error: InternalError) -> None:
        """See `Transaction`. The sequence is as the engine has it; those that the operation made are released."""
        self._leave()
        prepared, books, attempt = self._prepared, self._books, self._books.supervisor.attempt
        if prepared is None:
            return
        record = prepared.record
        if self._done:
            attempt(prepared.lose)
        if books.handles.lives(record):
            attempt(books.quotas.settle, record)
        if record.doom is not None and not record.busy:
            attempt(books.release, [record], record.doom)
        if self._entry is not None:
            attempt(books.replay.finish, self._entry, error)

    def abandon(self) -> None:
        """See `Transaction`."""
        super().abandon()
        self._leave()

    def _finish(self, result: object) -> None:
        """It was done, or refused."""
        books, prepared = self._books, self._prepared
        assert prepared is not None  # noqa: S101 - it was begun
        record = prepared.record
        if prepared.run is not None:
            record.busy = False
        refusal = result if isinstance(result, ExecutorError) else None
        self._done = refusal is None
        if refusal is None:
            self._handles = prepared.commit()
        else:
            prepared.refuse()
        if prepared.run is not None and books.handles.lives(record):
            books.quotas.settle(record)
            record.touch()
        if record.doom is not None and not record.busy:
            books.release([record], record.doom)
        if self._entry is not None:
            books.replay.finish(self._entry, refusal or self._handles)
        self.end(refusal)

    def _on_repeated(self, _: object = None) -> None:
        """The call that this one repeats has ended."""
        if self._ticket is None:
            return
        outcome = self._books.replay.read(self._ticket)
        self._leave()
        if isinstance(outcome, ExecutorError):
            self.end(outcome)
            return
        assert not isinstance(outcome, ItemAnswer)  # noqa: S101 - the fingerprint told operations from forwards
        self._handles, self._replayed = outcome, True
        self.end()

    def _leave(self) -> None:
        if self._ticket is not None:
            self._books.replay.leave(self._ticket)
            self._ticket = None


class CacheOperations:
    """Runs operations over the books. Each has begun, and has claimed its sequence, when its call is returned."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._warming: set[asyncio.Task[int]] = set()

    def truncate(
        self, handle: HandleRef, length: int, request_id: str = "", *, caller: Caller = ANYBODY
    ) -> OperationCall[tuple[HandleRef, bool]]:
        """Roll back to ``length``. Returns the new handle, and whether it is a recorded answer."""

        def prepare() -> Prepared:
            record = self._books.handles.claim(handle, caller.name)
            with _unclaimed_on_refusal(record):
                check_length(record.length, length, 0, None)

            def commit() -> Handles:
                self._books.counters.tokens_truncated += record.length - length
                record.length = length
                record.version += 1
                return (record.handle,)

            return Prepared(record, Command("truncate", (record.sequence, length)), commit)

        return self._begin(
            scope_of(caller.name, handle.id, request_id),
            request_id,
            ("truncate", handle, length),
            prepare,
            lambda handles, replayed: (handles[0], replayed),
        )

    def fork(
        self,
        handle: HandleRef,
        count: int = 1,
        at: int | None = None,
        request_id: str = "",
        *,
        caller: Caller = ANYBODY,
        lease_id: str = "",
        origin: object | None = None,
    ) -> OperationCall[tuple[Handles, bool]]:
        """``count`` children of the first ``at`` tokens, under the lease that is named or the parent's. The parent
        does not change."""

        def prepare() -> Prepared:
            if not 1 <= count <= self._books.limits.max_batch_items:
                raise InvalidRequest(f"count must be 1 to {self._books.limits.max_batch_items}", field="count")
            record = self._books.handles.claim(handle, caller.name)
            with _unclaimed_on_refusal(record):
                length = record.length if at is None else at
                check_length(record.length, length, 0, None)
                leases = self._books.leases
                lease = leases.find(lease_id, caller.name) if lease_id else record.lease
                children = self._books.mint(count, self._books.quotas.account(caller), lease)
            numbers = [child.sequence for child in children]

            def refuse() -> None:
                for child in children:
                    self._books.stillborn(child)

            try:
                for child in children:
                    child.origin = origin
                    self._books.quotas.charge(child, length)
            except ExecutorError:
                record.busy = False
                refuse()
                raise

            def commit() -> Handles:
                for child in children:
                    child.length, child.version = length, 1
                    self._books.born(child)
                    self._books.quotas.settle(child)
                self._books.release([child for child in children if child.doom is not None], Ending.REVOKED)
                return tuple(child.handle for child in children)

            run = Command("fork", (record.sequence, numbers, length))
            return Prepared(record, run, commit, refuse, partial(self._books.give_up, children))

        return self._begin(
            scope_of(caller.name, handle.id, request_id),
            request_id,
            ("fork", handle, count, at, lease_id),
            prepare,
            lambda handles, replayed: (handles, replayed),
        )

    def release(
        self, handle: HandleRef, *, any_version: bool = False, request_id: str = "", caller: Caller = ANYBODY
    ) -> OperationCall[bool]:
        """Free the sequence; returns whether this is a recorded answer. With ``any_version`` a sequence whose call is
        still in flight is released when that call ends."""

        def prepare() -> Prepared:
            if any_version and (record := self._books.handles.find(handle, caller.name)).busy:
                record.doom = record.doom or Ending.RELEASED
                return Prepared(record, None, tuple)
            record = self._books.handles.claim(handle, caller.name, any_version=any_version)

            def commit() -> Handles:
                self._books.bury(record)
                return ()

            return Prepared(
                record, Command("release", ([record.sequence],)), commit, lose=partial(self._books.bury, record)
            )

        return self._begin(
            scope_of(caller.name, handle.id, request_id),
            request_id,
            ("release", handle, any_version),
            prepare,
            lambda _, replayed: replayed,
        )

    def reserve(self, handle: HandleRef, tokens: int, *, caller: Caller = ANYBODY) -> OperationCall[HandleRef]:
        """Hold blocks for ``tokens`` tokens beyond the present length."""

        def prepare() -> Prepared:
            record = self._books.handles.claim(handle, caller.name)
            with _unclaimed_on_refusal(record):
                check_length(record.length, None, tokens, self._books.model)
                self._books.quotas.charge(record, record.length + tokens)

            def commit() -> Handles:
                record.held_to = record.length + tokens if tokens else 0
                return (record.handle,)

            return Prepared(record, Command("reserve", (record.sequence, tokens)), commit)

        return self._begin(("", ""), "", None, prepare, lambda handles, _: handles[0])

    async def reset(self, instance_id: str = "") -> int:
        """Release every sequence, those with a call in flight when it ends. Returns how many, once all are gone."""
        _ = self._books.model
        if instance_id and instance_id != self._books.handles.instance_id:
            raise InstanceMismatch("another process lifetime was meant; nothing was released")
        return await self._books.ended(self._books.handles.records(), Ending.RESET)

    async def warm_up(self, batch_size: int, prefill_tokens: int) -> int:
        """Run a prefill of ``prefill_tokens`` and a decode of ``batch_size``, on sequences of its own that it releases;
        returns how many steps ran. They are the engine's alone, so they count against no limit and no quota."""
        # A task of its own, so that a cancelled caller leaves no sequences behind.
        task = asyncio.create_task(self._warm_up(batch_size, prefill_tokens))
        self._warming.add(task)
        task.add_done_callback(self._warming.discard)
        return await asyncio.shield(task)

    async def _warm_up(self, batch_size: int, prefill_tokens: int) -> int:
        model, limits = self._books.model, self._books.limits
        batch_size = min(batch_size, limits.max_batch_items)
        prefill_tokens = max(1, min(prefill_tokens, limits.max_batch_tokens - batch_size, model.max_context - 1))
        numbers = [self._books.handles.mint().sequence for _ in range(batch_size)]
        one = np.zeros(1, dtype=np.int32)
        prompts = [np.arange(prefill_tokens, dtype=np.int32) % model.vocab_size, *[one] * (batch_size - 1)]
        spec = OutputSpec(Positions.LAST)
        spans = [Span(number, tokens, 0, spec, create=True) for number, tokens in zip(numbers, prompts, strict=True)]
        outcomes = await self._steps(spans)
        made = [span for span, each in zip(spans, outcomes, strict=True) if not isinstance(each, ExecutorError)]
        if not made:
            return 0
        await self._steps([Span(span.sequence, one, span.end, spec) for span in made])
        await self._between_steps(Command("release", ([span.sequence for span in made],)))
        return 2

    # --- machinery --------------------------------------------------------------------------------------------------

    def _begin(
        self,
        key: Key,
        request_id: str,
        fingerprint: Hashable,
        prepare: Callable[[], Prepared],
        read: Callable[[Handles, bool], T],
    ) -> OperationCall[T]:
        """Run an operation once per request id."""
        call = OperationCall(self._books, read)
        try:
            call.begin(key, request_id, fingerprint, prepare)
        except Exception as error:
            call.refuse(error)
        return call

    async def _between_steps(self, run: Callable[[Any], object]) -> None:
        done: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self._books.engine.operate(Operation(run, lambda result: None if done.done() else done.set_result(result)))
        result = await done
        if isinstance(result, ExecutorError):
            raise result

    async def _steps(self, spans: Sequence[Span]) -> tuple[SpanOutcome, ...]:
        done: asyncio.Future[tuple[SpanOutcome, ...]] = asyncio.get_running_loop().create_future()
        self._books.engine.submit(
            Submission(tuple(spans), lambda outcomes, _: None if done.done() else done.set_result(outcomes))
        )
        return await done


class _unclaimed_on_refusal:  # noqa: N801 - reads as a statement
    """A claim is given back when a check refuses."""

    def __init__(self, record: Record) -> None:
        self._record = record

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._record.busy = False
