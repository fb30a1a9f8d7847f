"""The forward path: from a call's work items to committed answers.

    admit     per item: replayed? known handle, current version, not busy, within limits -> a span
    submit    one `Submission` to the model thread; its point of no return is the thread's claim
    commit    on the loop, when the step is done, whether or not the caller still listens: lengths, versions, replay log
    answer    outcomes in the order of the items

A refusal before the submit leaves no trace. Prefill, decode and verify are the same thing here.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from ferrum_rpc.core import (
    ANYBODY,
    Caller,
    HandleRef,
    ItemAnswer,
    ItemOutcome,
    ModelInfo,
    Span,
    SpanOutcome,
    StepTiming,
    WorkItem,
    named,
)
from ferrum_rpc.engine.work import Submission
from ferrum_rpc.errors import Cancelled, ExecutorError, KvBlocksExhausted, QueueFull
from ferrum_rpc.executor.v1 import forward_pb2
from ferrum_rpc.service import admission
from ferrum_rpc.service.books import RETRY_AFTER_S, Books
from ferrum_rpc.service.handles import Ending, Record
from ferrum_rpc.service.quotas import Account, Resource
from ferrum_rpc.service.replay import Entry, Ticket, item_fingerprint, scope_of


class Admitted(NamedTuple):
    """The item at ``place`` of its call, on its way through a step. ``entry`` is that of the replay log, if it has a
    request id."""

    place: int
    record: Record
    span: Span
    entry: Entry | None


@dataclass(slots=True, eq=False)
class Call:
    """A forward call in flight; its step writes into ``outcomes``, and then ``finished`` is called: with the step's
    timing, or with `Cancelled` where the call was taken back. ``submission``: what waits or runs for it, and counts in
    ``account``; None where every item was refused. ``abandoned``: its caller was cancelled after the point of no
    return. ``culprit``: the item whose refusal refused the others, where the engine refused an atomic group."""

    admitted: list[Admitted]
    outcomes: dict[int, ItemOutcome]
    finished: Callable[[StepTiming | Cancelled | None], object]
    submission: Submission | None = None
    account: Account | None = None
    abandoned: bool = False
    culprit: int | None = None


class TakeBack:
    """A way to take a call back without giving up its answer: a call that has not begun is answered with `Cancelled`,
    one that has as usual. For callers that share a stream, where nobody's own cancellation ends the call."""

    def __init__(self) -> None:
        self.asked = False
        self.withdraw: Callable[[], object] | None = None

    def __call__(self) -> None:
        """Take it back, if it has not begun."""
        self.asked = True
        if self.withdraw is not None:
            self.withdraw()


@dataclass(frozen=True, slots=True)
class ForwardAnswer:
    """``outcomes[i]`` answers ``items[i]``; ``timing`` is None where no step ran for the call."""

    outcomes: list[ItemOutcome]
    timing: StepTiming | None


class ForwardPath:
    """Runs forward calls over the books."""

    def __init__(self, books: Books) -> None:
        self._books = books

    async def forward(
        self,
        items: Sequence[WorkItem | ExecutorError],
        *,
        caller: Caller = ANYBODY,
        all_or_nothing: bool = False,
        deadline: float | None = None,
        max_bytes: int | None = None,
        origin: object | None = None,
        take_back: TakeBack | None = None,
    ) -> ForwardAnswer:
        """Run a call's items in one forward pass.

        An item that is an error already (malformed on the wire) is refused alone. Raises what refuses the whole call:
        its size, the queue, and with ``all_or_nothing`` the first item's refusal. ``deadline`` is on `time.monotonic`.
        ``max_bytes`` bounds the answer's rows (default: what a unary answer may take). ``origin``: the session that
        creates sequences.
        """
        if len(items) == 1 and not all_or_nothing and not isinstance(items[0], ExecutorError):
            future: asyncio.Future[StepTiming | None] = asyncio.get_running_loop().create_future()
            call = self.start(
                items[0],
                caller=caller,
                deadline=deadline,
                max_bytes=max_bytes,
                origin=origin,
                finished=partial(_resolve, future),
            )
            if call is not None:
                timing = await self._result(call, future, take_back)
                return ForwardAnswer([call.outcomes[0]], timing)
        return await self._batch(items, caller, all_or_nothing, deadline, max_bytes, origin, take_back)

    async def _batch(  # noqa: PLR0917 - called once, by `forward`
        self,
        items: Sequence[WorkItem | ExecutorError],
        caller: Caller,
        all_or_nothing: bool,
        deadline: float | None,
        max_bytes: int | None,
        origin: object | None,
        take_back: TakeBack | None,
    ) -> ForwardAnswer:
        """`forward` of any number of items, whatever they repeat."""
        books = self._books
        model, account = books.model, books.quotas.account(caller)
        admission.check_batch(items, model, books.limits, max_bytes or books.limits.max_response_bytes)
        if all_or_nothing:
            await self._first_calls(items, caller)
        outcomes: dict[int, ItemOutcome] = {}
        admitted: list[Admitted] = []
        replayed: dict[int, Ticket] = {}
        echoes: dict[int, int] = {}
        now = time.monotonic()
        try:
            for index, item in enumerate(items):
                try:
                    if isinstance(item, ExecutorError):
                        raise item
                    found = self._admit(index, item, model, caller, origin, now)
                except ExecutorError as error:
                    outcomes[index] = error
                    continue
                if isinstance(found, Admitted):
                    admitted.append(found)
                elif (twin := next((each for each in admitted if each.entry is found), None)) is not None:
                    echoes[index] = twin.place  # a repetition within the call waits for nobody else
                else:
                    replayed[index] = books.replay.join(found)
            try:
                if all_or_nothing:
                    _raise_first(outcomes)
                if not self._has_room(account, len(admitted), sum([len(each.span.tokens) for each in admitted])):
                    raise self._queue_full(account)
            except ExecutorError as error:
                self._withdraw(admitted, error)
                raise
            timing: StepTiming | None = None
            culprit: int | None = None
            if admitted:
                done: asyncio.Future[StepTiming | None] = asyncio.get_running_loop().create_future()
                call = Call(admitted, outcomes, partial(_resolve, done))
                self._submit(call, account, all_or_nothing, deadline)
                timing, culprit = await self._result(call, done, take_back), call.culprit
            for index, ticket in replayed.items():
                answer = await books.replay.answer(ticket)
                assert isinstance(answer, ItemAnswer | ExecutorError)  # noqa: S101 - the fingerprint told forwards from operations
                outcomes[index] = answer
            for index, source in echoes.items():
                outcome = outcomes[source]
                outcomes[index] = outcome._replace(replayed=True) if isinstance(outcome, ItemAnswer) else outcome
        finally:
            for ticket in replayed.values():
                books.replay.leave(ticket)
        if all_or_nothing:
            _raise_first(outcomes, culprit)
        return ForwardAnswer([outcomes[index] for index in range(len(items))], timing)

    def start(
        self,
        item: WorkItem,
        *,
        caller: Caller,
        deadline: float | None,
        max_bytes: int | None,
        origin: object | None,
        finished: Callable[[StepTiming | Cancelled | None], object],
    ) -> Call | None:
        """Begin a call of one item without waiting for anything; ``outcomes[0]`` is there when ``finished`` is called,
        which is at once where the item is refused. None: it repeats a call and has to wait for that one's answer, which
        `forward` does. Raises what refuses a call as a whole. The arguments are those of `forward`."""
        books = self._books
        model = books.model
        admission.check_lone(item, model, books.limits, max_bytes or books.limits.max_response_bytes)
        try:
            found = self._admit(0, item, model, caller, origin, time.monotonic())
        except ExecutorError as refusal:
            call = Call([], {0: refusal}, finished)
            finished(None)
            return call
        if not isinstance(found, Admitted):
            return None
        call = Call([found], {}, finished)
        account = books.quotas.account(caller)
        if not self._has_room(account, 1, len(item.tokens)):
            error = self._queue_full(account)
            self._withdraw(call.admitted, error)
            raise error
        self._submit(call, account, False, deadline)
        return call

    async def _first_calls(self, items: Sequence[WorkItem | ExecutorError], caller: Caller) -> None:
        """Wait for the calls in flight that items of an ``all_or_nothing`` call repeat, and share their refusal: the
        others must not run before it is known. Nothing is claimed meanwhile: no two calls wait for each other."""
        replay, waited = self._books.replay, True
        while waited:  # while this waits for one call, another may begin
            waited = False
            for index, item in enumerate(items):
                if isinstance(item, ExecutorError) or not item.request_id:
                    continue
                handle_id = b"" if item.handle is None else item.handle.id
                entry = replay.in_flight(scope_of(caller.name, handle_id, item.request_id), item.request_id)
                if entry is None:
                    continue
                waited = True
                ticket = replay.join(entry)
                try:
                    outcome = await replay.settled(ticket)
                finally:
                    replay.leave(ticket)
                if isinstance(outcome, ExecutorError):
                    _raise_first({index: outcome})

    # --- admit ------------------------------------------------------------------------------------------------------

    def _admit(  # noqa: PLR0917 - once an item: what its call knows is handed down one by one
        self, index: int, item: WorkItem, model: ModelInfo, caller: Caller, origin: object | None, now: float
    ) -> Admitted | Entry:
        """Turn an item into a span, or find its recorded answer. Raises its refusal, having changed nothing. ``now``:
        on `time.monotonic`."""
        books = self._books
        replay = books.replay
        _, handle, tokens, truncate_to, output, request_id, create = item
        admission.check_item(tokens, output, model, books.limits)
        if request_id:
            scope = replay.scope(scope_of(caller.name, b"" if handle is None else handle.id, request_id))
            fingerprint = item_fingerprint(item)
            if (known := scope.get(request_id)) is not None:
                return known.repeated(fingerprint)
        if handle is None:
            record = self._mint(item, model, caller)
            record.origin = origin
        else:
            record = self._claim(item, handle, model, caller, now)
        start = record.length if truncate_to is None else truncate_to
        span = named(Span, (record.sequence, tokens, start, output, handle is None, create.reserve_tokens))
        entry = replay.begin(scope, request_id, fingerprint) if request_id else None
        return named(Admitted, (index, record, span, entry))

    def _mint(self, item: WorkItem, model: ModelInfo, caller: Caller) -> Record:
        books, create = self._books, item.create
        room = len(item.tokens) + create.reserve_tokens
        admission.check_context(0, room, model)
        lease = books.leases.find(create.lease_id, caller.name, field="create.lease_id") if create.lease_id else None
        record = books.mint(1, caller, lease)[0]
        record.held_to = room if create.reserve_tokens else 0
        try:
            books.quotas.charge(record, room)
        except ExecutorError:
            books.stillborn(record)
            raise
        return record

    def _claim(self, item: WorkItem, handle: HandleRef, model: ModelInfo, caller: Caller, now: float) -> Record:
        record = self._books.handles.claim(handle, caller.name, now=now)
        try:
            start = record.length
            if item.truncate_to is not None:
                admission.check_rollback(item.truncate_to, start)
                start = item.truncate_to
            admission.check_context(start, len(item.tokens), model)
            self._books.quotas.charge(record, start + len(item.tokens))
        except ExecutorError:
            record.busy = False
            raise
        return record

    def check_room(self, items: Sequence[forward_pb2.ForwardItem], caller: Caller) -> None:
        """Refuse a call that the queue has no room for before its items are looked at: under overload a refusal must
        cost next to nothing (reading 1,024 tokens takes 30 µs). Calls that may have been answered, or that are too
        large for an empty queue, are let through to hear so."""
        limits, knows = self._books.limits, self._books.replay.knows
        if self.has_room(items, caller):
            return
        account = self._books.quotas.account(caller)
        tokens = sum(len(item.token_ids) for item in items)
        if tokens > limits.max_batch_tokens or self._has_room(account, len(items), tokens):
            return
        if not any(
            each.request_id and knows(scope_of(caller.name, each.handle.id, each.request_id), each.request_id)
            for each in items
        ):
            raise self._queue_full(account)

    def has_room(self, items: Sequence[forward_pb2.ForwardItem], caller: Caller) -> bool:
        """Whether `check_room` lets a call through without counting its tokens, which costs more than asking whether
        any number of them would do; nearly always."""
        limits, account = self._books.limits, self._books.quotas.account(caller)
        return len(items) > limits.max_batch_items or self._has_room(account, len(items), limits.max_batch_tokens)

    def _has_room(self, account: Account, items: int, tokens: int) -> bool:
        engine, limits = self._books.engine, self._books.limits
        return (
            engine.queued_items + items <= limits.max_queued_items
            and engine.queued_tokens + tokens <= limits.max_queued_tokens
            and account.room(Resource.QUEUED_ITEMS, items)
            and account.room(Resource.QUEUED_TOKENS, tokens)
        )

    def _queue_full(self, account: Account) -> QueueFull:
        books, limits = self._books, self._books.limits
        books.counters.queue_full += 1
        most_items = min(limits.max_queued_items, account.most[Resource.QUEUED_ITEMS])
        most_tokens = min(limits.max_queued_tokens, account.most[Resource.QUEUED_TOKENS])
        return QueueFull(
            f"{books.engine.queued_items} items with {books.engine.queued_tokens} tokens wait, "
            f"{account.held[Resource.QUEUED_ITEMS]} with {account.held[Resource.QUEUED_TOKENS]} wait or run for you; "
            "nothing was started",
            metadata={"max_queued_items": most_items, "max_queued_tokens": most_tokens},
            retry_after_s=RETRY_AFTER_S,
        )

    def _withdraw(self, admitted: Sequence[Admitted], error: ExecutorError) -> None:
        """Undo admissions: nothing happened."""
        now, heard = time.monotonic(), not isinstance(error, Cancelled)
        for each in admitted:
            self._settle(each, error, now, heard=heard)

    # --- submit and commit ------------------------------------------------------------------------------------------

    def _submit(self, call: Call, account: Account, all_or_nothing: bool, deadline: float | None) -> None:
        spans = tuple([each.span for each in call.admitted])
        submission = Submission(spans, partial(self._commit, call), all_or_nothing, deadline, account.number)
        account.take(Resource.QUEUED_ITEMS, len(spans))
        account.take(Resource.QUEUED_TOKENS, submission.tokens)
        call.submission, call.account = submission, account
        self._books.engine.submit(submission)

    @staticmethod
    def _left(call: Call) -> None:
        """Its submission waits and runs no more."""
        if call.submission is not None and call.account is not None:
            call.account.give(Resource.QUEUED_ITEMS, len(call.admitted))
            call.account.give(Resource.QUEUED_TOKENS, call.submission.tokens)

    async def _result(
        self, call: Call, done: asyncio.Future[StepTiming | None], take_back: TakeBack | None
    ) -> StepTiming | None:
        """Wait for a call's step; raises `Cancelled` where it was taken back."""
        if take_back is not None:
            take_back.withdraw = partial(self.take_back, call)
            if take_back.asked:
                take_back()
        try:
            timing = await done
        except asyncio.CancelledError:
            self.abandon(call)
            raise
        if call.submission is not None:
            self._books.failpoints.reach("before_reply")
        return timing

    def abandon(self, call: Call) -> None:
        """Its caller is gone: take it back, or let it run with nobody to hear of it."""
        call.abandoned = not self.take_back(call)

    def take_back(self, call: Call) -> bool:
        """Take a call back that has not begun and that no duplicate waits for. False: it runs, or is over."""
        awaited = any(each.entry is not None and each.entry.waiters for each in call.admitted)
        if awaited or call.submission is None or not self._books.engine.cancel(call.submission):
            return False
        self._left(call)
        error = Cancelled("the call was cancelled before its step; nothing happened")
        self._withdraw(call.admitted, error)
        call.finished(error)
        return True

    def _commit(self, call: Call, outcomes: tuple[SpanOutcome, ...], timing: StepTiming | None) -> None:
        """The step is over: make it so, whether or not the caller still listens."""
        self._left(call)
        books, answers, heard, now = self._books, call.outcomes, not call.abandoned, time.monotonic()
        for each, outcome in zip(call.admitted, outcomes, strict=True):
            if isinstance(outcome, ExecutorError):
                books.counters.kv_exhausted += isinstance(outcome, KvBlocksExhausted)
                if outcome.position is not None and len(outcomes) > outcome.position:
                    call.culprit = call.admitted[outcome.position].place
                answers[each.place] = outcome
                self._settle(each, outcome, now, heard=heard)
                continue
            (place, record, span, entry), (length, rows) = each, outcome
            if record.length != span.start:
                books.counters.tokens_truncated += record.length - span.start
            record.length = length
            record.version += 1
            if span.create:
                books.born(record)
                # Cancelled, and no request id to ask again with: nobody will ever learn this handle.
                if call.abandoned and entry is None:
                    record.doom = record.doom or Ending.ABANDONED
            answers[place] = answer = named(ItemAnswer, (record.handle, rows, False, 0))
            self._settle(each, answer, now, heard=heard)
        call.finished(timing)

    def _settle(self, each: Admitted, outcome: ItemOutcome, now: float, *, heard: bool) -> None:
        """The item is over: the sequence is free again, and the duplicates hear of it. ``heard``: the caller still
        listens, which is a sign of life, ``now`` on `time.monotonic`."""
        books, (_, record, span, entry) = self._books, each
        record.busy = False
        if span.create and isinstance(outcome, ExecutorError):
            books.stillborn(record)
        else:
            books.quotas.settle(record)
            if heard:
                record.touch(now)
            if record.doom is not None:
                books.release([record], record.doom)
        if entry is not None:
            books.replay.finish(entry, outcome)


def _resolve(done: asyncio.Future[StepTiming | None], ending: StepTiming | Cancelled | None) -> None:
    """Wake whoever waits for a call, if there still is anybody."""
    if done.done():
        return
    if isinstance(ending, Cancelled):
        done.set_exception(ending)
    else:
        done.set_result(ending)


def _raise_first(outcomes: dict[int, ItemOutcome], culprit: int | None = None) -> None:
    """Raise the refusal that refuses an ``all_or_nothing`` call: the culprit's, or the first. It names its item."""
    for index in sorted(outcomes):
        outcome = outcomes[index]
        if isinstance(outcome, ExecutorError):
            error = copy.copy(outcome)  # several callers may share the outcome of a step
            error.metadata = {"item": str(index if culprit is None else culprit), **outcome.metadata}
            raise error
