"""The forward path: from a call's work items to committed answers.

    admit     per item: replayed? known handle, current version, not busy, within limits -> a span
    submit    one `Submission` to the model thread; its point of no return is the thread's claim
    commit    on the loop, when the step is done, whether or not the caller still listens: lengths, versions, replay log
    answer    outcomes in the order of the items

A refusal before the submit leaves no trace. Prefill, decode and verify are the same thing here.
"""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

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
from ferrum_rpc.errors import Cancelled, ExecutorError, InternalError, InvalidRequest, KvBlocksExhausted, QueueFull
from ferrum_rpc.executor.v1 import forward_pb2
from ferrum_rpc.service import admission
from ferrum_rpc.service.admitted import Admitted, lost, settle
from ferrum_rpc.service.books import RETRY_AFTER_S, Books
from ferrum_rpc.service.identity import ARRIVED
from ferrum_rpc.service.records import Account, Ending, Record, Resource
from ferrum_rpc.service.replay import Entry, Recorded, Ticket, item_fingerprint, scope_of
from ferrum_rpc.service.transaction import FAILED, Transaction


class Call(Transaction["Call"]):
    """A forward call, and its own answer: ``outcomes[i]`` answers ``items[i]`` once it has ended (None before), and
    ``timing`` is None where no step ran for it.

    ``bytes``: what its answer takes at most. ``submitted``: it went to the engine's queue; ``submission``: what waits
    or runs there for it now, and counts in the caller's ``account``. ``joined``: its places at calls that are repeated,
    by item. ``echoes``: items that repeat another one of the same call. ``waits``: what has to end before it has.
    ``abandoned``: its caller was cancelled after the point of no return. ``culprit``: the item whose refusal refused
    the others, where the engine refused an atomic group.
    """

    __slots__ = (
        "_path",
        "abandoned",
        "account",
        "admitted",
        "all_or_nothing",
        "bytes",
        "culprit",
        "deadline",
        "echoes",
        "joined",
        "outcomes",
        "submission",
        "submitted",
        "timing",
        "waits",
    )

    def __init__(
        self, path: ForwardPath, account: Account, items: int, all_or_nothing: bool, deadline: float | None
    ) -> None:
        super().__init__(path.supervisor)
        self._path = path
        self.account = account
        self.all_or_nothing = all_or_nothing
        self.deadline = deadline
        self.bytes = 0
        self.outcomes: list[Any] = [None] * items  # of `ItemOutcome`
        self.admitted: list[Admitted] = []
        self.joined: dict[int, Ticket] = {}
        self.echoes: dict[int, int] = {}
        self.submission: Submission | None = None
        self.submitted = False
        self.timing: StepTiming | None = None
        self.waits = 0
        self.abandoned = False
        self.culprit: int | None = None

    def answer(self) -> Call:
        """Itself. Raises what refused the call as a whole."""
        if self.submitted and not isinstance(self.refusal, Cancelled):
            self._path.failpoints.reach("before_reply")
        if self.refusal is not None:
            raise self.refusal
        return self

    def take_back(self) -> bool:
        """See `Transaction`."""
        return self._path.take_back(self)

    def fail(self, error: InternalError) -> None:
        """See `Transaction`."""
        self._path.fail(self, error)

    def abandon(self) -> None:
        """See `Transaction`."""
        self._path.abandon(self)
        self._hear = None


class ForwardPath:
    """Runs forward calls over the books."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self.failpoints, self.supervisor = books.failpoints, books.supervisor

    def forward(
        self,
        items: Sequence[WorkItem | ExecutorError],
        *,
        caller: Caller = ANYBODY,
        all_or_nothing: bool = False,
        deadline: float | None = None,
        max_bytes: int | None = None,
        origin: object | None = None,
        hold: Callable[[Account, int], object] | None = None,
    ) -> Call:
        """Begin a call that runs its items in one forward pass. It has claimed its sequences when this returns, and
        waits for nothing before.

        An item that is an error already (malformed on the wire) is refused alone. The call as a whole is refused for
        its size, for the queue, and with ``all_or_nothing`` for the first item that is. ``deadline`` is on
        `time.monotonic`. ``max_bytes`` bounds the answer's rows (default: what a unary answer may take). ``origin``:
        the session that creates sequences. ``hold`` is called with the bytes that the answer takes at most, before
        anything is submitted; what it raises refuses the call.
        """
        call = Call(self, self._books.quotas.account(caller), len(items), all_or_nothing, deadline)
        try:
            self._begin(call, items, caller, max_bytes, origin, hold)
        except Exception as error:
            self._refuse(call, error)
        return call

    def _begin(  # noqa: PLR0917 - called once, by `forward`
        self,
        call: Call,
        items: Sequence[WorkItem | ExecutorError],
        caller: Caller,
        max_bytes: int | None,
        origin: object | None,
        hold: Callable[[Account, int], object] | None,
    ) -> None:
        """Admit the items, join what they repeat, submit. Raises what refuses the call."""
        books = self._books
        model, limits, replay, outcomes = books.model, books.limits, books.replay, call.outcomes
        max_bytes = max_bytes or limits.max_response_bytes
        sound = admission.check_call(items, model, limits, max_bytes, outcomes)
        if len(sound) > 1:
            self._check_twins(sound, caller)
        now = time.monotonic()
        tokens = 0
        for index, item, size in sound:
            try:
                found = self._admit(index, item, model, caller, origin, now)
            except ExecutorError as error:
                outcomes[index] = error
                continue
            call.bytes += size
            tokens += len(item.tokens)
            if isinstance(found, Admitted):
                call.admitted.append(found)
            elif (twin := next((each for each in call.admitted if each.entry is found), None)) is not None:
                call.echoes[index] = twin.place  # a repetition within the call waits for nobody else
            else:
                call.joined[index] = replay.join(found)
        if call.all_or_nothing and (refusal := _first_refusal(outcomes)) is not None:
            raise refusal
        admission.check_size(tokens, call.bytes, limits, max_bytes)
        if hold is not None:
            try:
                hold(call.account, call.bytes)
            except QueueFull:
                books.counters.queue_full += 1
                raise
        for index, ticket in call.joined.items():
            if ticket.pending is None:
                outcomes[index] = _item_outcome(replay.read(ticket))
            else:
                call.waits += 1
                ticket.pending.add_done_callback(partial(call.take, self._heard, call, index, ticket))
        self._proceed(call)

    def _check_twins(self, sound: Sequence[admission.Sound], caller: Caller) -> None:
        """Refuse a call that names one sequence twice. What names none is refused alone, and so is its twin."""
        ids = [each.item.handle.id for each in sound if each.item.handle is not None]
        if len(set(ids)) == len(ids):
            return
        if any(count > 1 and self._books.handles.has(each, caller.name) for each, count in Counter(ids).items()):
            raise InvalidRequest("the same sequence occurs twice in the call", field="items.handle")

    def _proceed(self, call: Call) -> None:
        """Submit what was admitted, or end the call where nothing is left to wait for. An ``all_or_nothing`` call first
        waits for the calls in flight that it repeats: one of them that is refused refuses it. They began earlier than
        it did, so no two calls wait for each other."""
        if not call.admitted or call.submitted:
            if not call.waits:
                self._finish(call)
        elif not (call.all_or_nothing and call.waits):
            spans = tuple([each.span for each in call.admitted])
            submission = Submission(
                spans,
                partial(self._answered, call),
                call.all_or_nothing,
                call.deadline,
                call.account.number,
                ARRIVED.get(),
            )
            if not self._has_room(call.account, len(spans), submission.tokens):
                self._refuse(call, self._queue_full(call.account))
                return
            call.account.take(Resource.QUEUED_ITEMS, len(spans))
            call.account.take(Resource.QUEUED_TOKENS, submission.tokens)
            call.submission = submission
            self._books.engine.submit(submission)
            call.submitted = True
            call.waits += 1

    @staticmethod
    def _left(call: Call) -> None:
        """Its submission waits and runs no more. It refers to the call: whoever lets go of the one lets go of both."""
        if call.submission is not None:
            call.account.give(Resource.QUEUED_ITEMS, len(call.admitted))
            call.account.give(Resource.QUEUED_TOKENS, call.submission.tokens)
            call.submission = None

    def _heard(self, call: Call, index: int, ticket: Ticket, _: object) -> None:
        """A call that an item repeats has ended."""
        if call.ended:
            return
        call.outcomes[index] = outcome = _item_outcome(self._books.replay.read(ticket))
        call.waits -= 1
        if not call.submitted and call.all_or_nothing and isinstance(outcome, ExecutorError):
            self._refuse(call, _first_refusal([outcome], index))
        else:
            self._proceed(call)

    def _finish(self, call: Call) -> None:
        outcomes = call.outcomes
        for index, source in call.echoes.items():
            outcome = outcomes[source]
            outcomes[index] = outcome._replace(replayed=True) if isinstance(outcome, ItemAnswer) else outcome
        self._leave(call)
        call.end(_first_refusal(outcomes, call.culprit) if call.all_or_nothing else None)

    def _refuse(self, call: Call, error: Exception | None) -> None:
        """Refuse the call as a whole: nothing happened, and nothing will."""
        told = error if isinstance(error, ExecutorError) else InternalError(FAILED)
        now, heard = time.monotonic(), not isinstance(error, Cancelled)
        self._left(call)
        for each in call.admitted:
            settle(self._books, each, told, now, heard=heard)
        self._leave(call)
        call.end(error)

    def _leave(self, call: Call) -> None:
        """It waits no longer for what it repeats."""
        for ticket in call.joined.values():
            self._books.replay.leave(ticket)
        call.joined.clear()

    def take_back(self, call: Call) -> bool:
        """See `Transaction`. A call that only repeats others has nothing to take back."""
        if call.ended or not call.admitted or any(each.entry and each.entry.waiters for each in call.admitted):
            return False
        if call.submitted and (call.submission is None or not self._books.engine.cancel(call.submission)):
            return False
        self._refuse(call, Cancelled("the call was cancelled before its step; nothing happened"))
        return True

    def fail(self, call: Call, error: InternalError) -> None:
        """See `Transaction`. What is with the engine is settled by its answer."""
        if not call.submitted:
            self._refuse(call, error)
            return
        if call.submission is None:
            for each in call.admitted:
                if call.outcomes[each.place] is None:
                    call.outcomes[each.place] = lost(self._books, each)
        self._leave(call)
        call.end(error)

    def abandon(self, call: Call) -> None:
        """See `Transaction`."""
        if self.take_back(call):
            return
        call.abandoned = True
        if call.submitted or not call.admitted:  # else a duplicate waits for what this one waits for
            self._leave(call)

    # --- admit ------------------------------------------------------------------------------------------------------

    def _admit(  # noqa: PLR0917 - once an item: what its call knows is handed down one by one
        self, index: int, item: WorkItem, model: ModelInfo, caller: Caller, origin: object | None, now: float
    ) -> Admitted | Entry:
        """Turn an item into a span, or find its recorded answer. Raises its refusal, having changed nothing. ``now``:
        on `time.monotonic`."""
        books = self._books
        replay = books.replay
        _, handle, tokens, truncate_to, output, request_id, create = item
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
        """Refuse a call of too many items, or that the queue has no room for, before its items are looked at: under
        overload a refusal must cost next to nothing (reading 1,024 tokens takes 30 µs). Calls that may have been
        answered, or that are too large for an empty queue, are let through to hear so."""
        limits, knows = self._books.limits, self._books.replay.knows
        account = self._books.quotas.account(caller)
        if len(items) > limits.max_batch_items:
            admission.check_count(len(items), limits)
        # Counting tokens costs more than asking whether any number of them would do; nearly always it would.
        if self._has_room(account, len(items), limits.max_batch_tokens):
            return
        tokens = sum(len(item.token_ids) for item in items)
        if tokens > limits.max_batch_tokens or self._has_room(account, len(items), tokens):
            return
        if not any(
            each.request_id and knows(scope_of(caller.name, each.handle.id, each.request_id), each.request_id)
            for each in items
        ):
            raise self._queue_full(account)

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

    # --- commit ----------------------------------------------------------------------------------------------------

    def _answered(self, call: Call, outcomes: tuple[SpanOutcome, ...], timing: StepTiming | None) -> None:
        """The step is over."""
        self._left(call)
        call.take(self._commit, call, outcomes, timing)

    def _commit(self, call: Call, outcomes: tuple[SpanOutcome, ...], timing: StepTiming | None) -> None:
        """Make it so, whether or not the caller still listens."""
        books, answers, heard, now = self._books, call.outcomes, not call.abandoned, time.monotonic()
        for each, outcome in zip(call.admitted, outcomes, strict=True):
            if isinstance(outcome, ExecutorError):
                books.counters.kv_exhausted += isinstance(outcome, KvBlocksExhausted)
                if outcome.position is not None and len(outcomes) > outcome.position:
                    call.culprit = call.admitted[outcome.position].place
                answers[each.place] = settle(books, each, outcome, now, heard=heard)
                continue
            (place, record, span, entry), (length, rows) = each, outcome
            if record.length != span.start:
                books.counters.tokens_truncated += record.length - span.start
            record.length = length
            record.version += 1
            if span.create and call.abandoned and entry is None:
                # Cancelled, and no request id to ask again with: nobody will ever learn this handle.
                record.doom = record.doom or Ending.ABANDONED
            answer = named(ItemAnswer, (record.handle, rows, False, 0))
            answers[place] = settle(books, each, answer, now, heard=heard)
        call.timing = timing
        call.waits -= 1
        self._proceed(call)


def _item_outcome(outcome: Recorded | ExecutorError) -> ItemOutcome:
    assert isinstance(outcome, ItemAnswer | ExecutorError)  # noqa: S101 - the fingerprint told forwards from operations
    return outcome


def _first_refusal(outcomes: Sequence[ItemOutcome | None], culprit: int | None = None) -> ExecutorError | None:
    """What refuses an ``all_or_nothing`` call: the first refusal, in the name of its item or of the ``culprit``."""
    for index, outcome in enumerate(outcomes):
        if isinstance(outcome, ExecutorError):
            error = copy.copy(outcome)  # several callers may share the outcome of a step
            error.metadata = {"item": str(index if culprit is None else culprit), **outcome.metadata}
            return error
    return None
