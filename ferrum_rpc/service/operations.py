"""Integer operations on sequences: truncate, fork, release, reserve, reset. They run between steps, in the same queue.

Each is *prepared* (sequence claimed, request checked, operation queued) in one turn of the event loop, and finished by
the model thread's answer, whether or not the caller still listens: committed, recorded, the sequence free again.
Cancelled before its dispatch, it did not happen, unless a duplicate waits for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ferrum_rpc.core import ANYBODY, Caller, HandleRef, ItemAnswer, OutputSpec, Positions, Span, SpanOutcome
from ferrum_rpc.engine.work import Command, Operation, Submission
from ferrum_rpc.errors import Cancelled, ExecutorError, InstanceMismatch, InvalidRequest
from ferrum_rpc.service import admission
from ferrum_rpc.service.books import Books
from ferrum_rpc.service.handles import Ending, Record
from ferrum_rpc.service.replay import Entry, Key, scope_of

Handles = tuple[HandleRef, ...]


@dataclass(slots=True, eq=False)
class Prepared:
    """An operation on a claimed sequence: what the model thread runs, and what becomes of the books after it.

    ``run`` is None for a release that waits for somebody else's call on the sequence.
    """

    record: Record
    run: Callable[[Any], object] | None
    commit: Callable[[], Handles]
    refuse: Callable[[], None] = lambda: None


class CacheOperations:
    """Runs operations over the books."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._warming: set[asyncio.Task[int]] = set()

    async def truncate(
        self, handle: HandleRef, length: int, request_id: str = "", *, caller: Caller = ANYBODY
    ) -> tuple[HandleRef, bool]:
        """Roll back to ``length``. Returns the new handle, and whether it is a recorded answer."""

        def prepare() -> Prepared:
            record = self._books.handles.claim(handle, caller.name)
            with _unclaimed_on_refusal(record):
                admission.check_rollback(length, record.length)

            def commit() -> Handles:
                self._books.counters.tokens_truncated += record.length - length
                record.length = length
                record.version += 1
                return (record.handle,)

            return Prepared(record, Command("truncate", (record.sequence, length)), commit)

        handles, replayed = await self._once(
            scope_of(caller.name, handle.id, request_id), request_id, ("truncate", handle, length), prepare
        )
        return handles[0], replayed

    async def fork(
        self,
        handle: HandleRef,
        count: int = 1,
        at: int | None = None,
        request_id: str = "",
        *,
        caller: Caller = ANYBODY,
        lease_id: str = "",
        origin: object | None = None,
    ) -> tuple[Handles, bool]:
        """``count`` children of the first ``at`` tokens, under the lease that is named or the parent's. The parent
        does not change."""
        if not 1 <= count <= self._books.limits.max_batch_items:
            raise InvalidRequest(f"count must be 1 to {self._books.limits.max_batch_items}", field="count")

        def prepare() -> Prepared:
            record = self._books.handles.claim(handle, caller.name)
            with _unclaimed_on_refusal(record):
                length = record.length if at is None else at
                admission.check_rollback(length, record.length)
                leases = self._books.leases
                lease = leases.find(lease_id, caller.name) if lease_id else record.lease
                children = self._books.mint(count, caller, lease)
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

            return Prepared(record, Command("fork", (record.sequence, numbers, length)), commit, refuse)

        return await self._once(
            scope_of(caller.name, handle.id, request_id), request_id, ("fork", handle, count, at, lease_id), prepare
        )

    async def release(
        self, handle: HandleRef, *, any_version: bool = False, request_id: str = "", caller: Caller = ANYBODY
    ) -> bool:
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

            return Prepared(record, Command("release", ([record.sequence],)), commit)

        _, replayed = await self._once(
            scope_of(caller.name, handle.id, request_id), request_id, ("release", handle, any_version), prepare
        )
        return replayed

    async def reserve(self, handle: HandleRef, tokens: int, *, caller: Caller = ANYBODY) -> HandleRef:
        """Hold blocks for ``tokens`` tokens beyond the present length."""
        model = self._books.model

        def prepare() -> Prepared:
            record = self._books.handles.claim(handle, caller.name)
            with _unclaimed_on_refusal(record):
                admission.check_context(record.length, tokens, model)
                self._books.quotas.charge(record, record.length + tokens)

            def commit() -> Handles:
                record.held_to = record.length + tokens if tokens else 0
                return (record.handle,)

            return Prepared(record, Command("reserve", (record.sequence, tokens)), commit)

        handles, _ = await self._once(("", ""), "", None, prepare)
        return handles[0]

    async def reset(self, instance_id: str = "") -> int:
        """Release every sequence, those with a call in flight when it ends. Returns how many, once all are gone."""
        _ = self._books.model
        if instance_id and instance_id != self._books.handles.instance_id:
            raise InstanceMismatch("another process lifetime was meant; nothing was released")
        return await self._books.ended(self._books.handles.records(), Ending.RESET)

    async def warm_up(self, batch_size: int, prefill_tokens: int) -> int:
        """Run a prefill of ``prefill_tokens`` and a decode of ``batch_size``, on sequences of its own that it releases;
        returns how many steps ran."""
        # A task of its own, so that a cancelled caller leaves no sequences behind.
        task = asyncio.create_task(self._warm_up(batch_size, prefill_tokens))
        self._warming.add(task)
        task.add_done_callback(self._warming.discard)
        return await asyncio.shield(task)

    async def _warm_up(self, batch_size: int, prefill_tokens: int) -> int:
        model, limits = self._books.model, self._books.limits
        batch_size = min(batch_size, limits.max_batch_items)
        prefill_tokens = max(1, min(prefill_tokens, limits.max_batch_tokens - batch_size, model.max_context - 1))
        records = self._books.mint(batch_size)
        one = np.zeros(1, dtype=np.int32)
        prompts = [np.arange(prefill_tokens, dtype=np.int32) % model.vocab_size, *[one] * (batch_size - 1)]
        spec = OutputSpec(Positions.LAST)
        spans = [
            Span(record.sequence, tokens, 0, spec, create=True) for record, tokens in zip(records, prompts, strict=True)
        ]
        try:
            outcomes = await self._steps(spans)
            made = [span for span, each in zip(spans, outcomes, strict=True) if not isinstance(each, ExecutorError)]
            if not made:
                return 0
            await self._steps([Span(span.sequence, one, span.end, spec) for span in made])
            await self._between_steps(Command("release", ([span.sequence for span in made],)))
            return 2
        finally:
            for record in records:
                self._books.stillborn(record)

    # --- machinery --------------------------------------------------------------------------------------------------

    async def _once(
        self, key: Key, request_id: str, fingerprint: Hashable, prepare: Callable[[], Prepared]
    ) -> tuple[Handles, bool]:
        """Run an operation once per request id: its result, and whether it is a recorded one."""
        _ = self._books.model
        replay = self._books.replay
        entry: Entry | None = None
        if request_id:
            scope = replay.scope(key)
            if (known := scope.get(request_id)) is not None:
                return await self._repeated(known.repeated(fingerprint)), True
            prepared = prepare()  # a refusal leaves no entry
            entry = replay.begin(scope, request_id, fingerprint)
        else:
            prepared = prepare()
        done: asyncio.Future[Handles | ExecutorError] = asyncio.get_running_loop().create_future()

        def finish(result: object) -> None:
            outcome: Handles | ExecutorError
            record = prepared.record
            if prepared.run is not None:
                record.busy = False
            if isinstance(result, ExecutorError):
                outcome = result
                prepared.refuse()
            else:
                outcome = prepared.commit()
            if prepared.run is not None and self._books.handles.lives(record):
                self._books.quotas.settle(record)
                record.touch()
            if record.doom is not None and not record.busy:
                self._books.release([record], record.doom)
            if entry is not None:
                replay.finish(entry, outcome)
            if not done.done():
                done.set_result(outcome)

        operation: Operation | None = None
        if prepared.run is None:
            prepared.record.mourners.append(lambda: finish(None))
        else:
            operation = Operation(prepared.run, finish)
            self._books.engine.operate(operation)
        try:
            outcome = await done
        except asyncio.CancelledError:
            awaited = entry is not None and entry.waiters
            if operation is not None and not awaited and self._books.engine.cancel(operation):
                finish(Cancelled("the call was cancelled before it was dispatched; nothing happened"))
            raise
        if isinstance(outcome, ExecutorError):
            raise outcome
        self._books.failpoints.reach("before_reply")
        return outcome, False

    async def _repeated(self, entry: Entry) -> Handles:
        """What the first call with this request id got."""
        replay = self._books.replay
        ticket = replay.join(entry)
        try:
            answer = await replay.answer(ticket)
        finally:
            replay.leave(ticket)
        if isinstance(answer, ExecutorError):
            raise answer
        assert not isinstance(answer, ItemAnswer)  # noqa: S101 - the fingerprint told operations from forwards
        return answer

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
