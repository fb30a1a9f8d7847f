"""The forward path: from a call's work items to committed answers. Prefill, decode and verify are the same thing here.

    admit     per item: replayed? known handle, current version, not busy, within limits -> a span
    submit    one `Submission` to the model thread; its point of no return is the thread's claim
    commit    on the loop, when the step is done, whether or not the caller waits: lengths, versions, replay log
    answer    outcomes in the order of the items

Ending an item may raise, for want of memory above all. Then the item is answered with `InternalError` and its sequence
is free; the other items of its call and its step commit.
"""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ferrum_rpc.core import ItemAnswer, ItemOutcome, Span, SpanOutcome, StepTiming, WorkItem, named
from ferrum_rpc.engine.api import Submission
from ferrum_rpc.errors import Cancelled, ExecutorError, InternalError, InvalidRequest, KvBlocksExhausted, QueueFull
from ferrum_rpc.service.admission import Admitted, Valid, admit, has_room, queue_full, too_large, valid_items
from ferrum_rpc.service.auth import ARRIVED
from ferrum_rpc.service.quotas import UNCOUNTED_BYTES
from ferrum_rpc.service.records import Account, Ending, Resource
from ferrum_rpc.service.replay import Entry, Outcome
from ferrum_rpc.service.state import ServerState
from ferrum_rpc.service.supervisor import Background
from ferrum_rpc.service.transaction import FAILED, Transaction


class ForwardCall(Transaction["ForwardCall"]):
    """A call that runs its items in one forward pass. It has claimed its sequences when it is made, and waits for
    nothing before. It is its own answer: ``outcomes[i]`` answers ``items[i]`` once it has ended (None before), and
    ``timing`` is None where no step ran for it.

    An item that is an error already (malformed on the wire) refuses itself only. The call as a whole is refused for its
    size, for the queue, and with ``all_or_nothing`` for the first item that is. ``deadline`` is on `time.monotonic`.
    ``max_bytes`` bounds the answer's rows (default: what a unary answer may take). ``origin``: the session that creates
    sequences. ``peer()`` names the connection, which a large answer takes room of before anything is submitted; call
    ``give_back`` once, when the answer has left or the call is over.
    """

    _submission: Submission | None = None  # what waits or runs for it now, and counts in its account
    _submitted = False
    _waits = 0  # what has to end before it has
    _abandoned = False  # its caller was cancelled after the point of no return
    _culprit: int | None = None  # the item whose refusal refused the others, where the engine refused an atomic group
    timing: StepTiming | None = None
    give_back: Callable[[], object] | None = None

    def __init__(
        self,
        state: ServerState,
        account: Account,
        items: Sequence[WorkItem | ExecutorError],
        *,
        all_or_nothing: bool = False,
        deadline: float | None = None,
        max_bytes: int | None = None,
        origin: object | None = None,
        peer: Callable[[], str] | None = None,
    ) -> None:
        self._state = state
        self._account = account
        self._all_or_nothing = all_or_nothing
        self._deadline = deadline
        self._admitted: list[Admitted] = []
        self._spans: list[Span] = []
        self._echoes: dict[int, int] = {}  # items that repeat another one of the same call
        self.outcomes: list[Any] = [None] * len(items)  # of `ItemOutcome`
        try:
            model, limits, outcomes, admitted = state.model, state.limits, self.outcomes, self._admitted
            max_bytes = max_bytes or limits.max_response_bytes
            valid = valid_items(items, model, limits, max_bytes, outcomes)
            if len(valid) > 1:
                self._check_distinct(valid)
            repeated: list[tuple[int, Entry]] = []
            now = time.monotonic()
            tokens = size = 0
            for index, item, most in valid:
                try:
                    found = admit(state, account, index, item, model, origin, now)
                except ExecutorError as error:
                    outcomes[index] = error
                    continue
                size += most
                tokens += len(item.tokens)
                if isinstance(found, Admitted):
                    admitted.append(found)
                    self._spans.append(found.span)
                elif (twin := next((each for each in admitted if each.entry is found), None)) is not None:
                    self._echoes[index] = twin.place  # a repetition within the call waits for no other call
                else:
                    repeated.append((index, found))
            if self._all_or_nothing and (refusal := _first_refusal(outcomes)) is not None:
                raise refusal
            if tokens > limits.max_batch_tokens or size > max_bytes:
                raise too_large(tokens, size, limits, max_bytes)
            if peer is not None and size > UNCOUNTED_BYTES:
                try:
                    self.give_back = state.unread.take(peer(), account, size)
                except QueueFull:
                    state.counters.queue_full += 1
                    raise
            for index, entry in repeated:
                if entry.answer is None:
                    self._waits += 1
                    self._wait_for(entry, partial(self._on_repeated, index))
                else:
                    outcomes[index] = state.replay.repeat(entry.answer)
            self._proceed()
        except Exception as error:
            self._refuse(error)

    def _check_distinct(self, valid: Sequence[Valid]) -> None:
        """Refuse a call that names one sequence twice. Handles that name no sequence refuse their own items only."""
        ids = [item.handle.id for _, item, _ in valid if item.handle is not None]
        if len(set(ids)) == len(ids):
            return
        has, owner = self._state.handles.has, self._account.caller.name
        if any(count > 1 and has(each, owner) for each, count in Counter(ids).items()):
            raise InvalidRequest("the same sequence occurs twice in the call", field="items.handle")

    def _proceed(self) -> None:
        """Submit what was admitted, or end the call where nothing is left to wait for. An ``all_or_nothing`` call first
        waits for the calls in flight that it repeats: one of them that is refused refuses it. They began earlier than
        it did, so no two calls wait for each other."""
        if not self._admitted or self._submitted:
            if not self._waits:
                self._finish()
        elif not (self._all_or_nothing and self._waits):
            state, account = self._state, self._account
            submission = Submission(
                tuple(self._spans),
                self._on_step_done,
                self._all_or_nothing,
                self._deadline,
                account.number,
                ARRIVED.get(),
            )
            if not has_room(state, account, len(self._spans), submission.tokens):
                self._refuse(queue_full(state, account))
                return
            account.held[Resource.QUEUED_ITEMS] += len(self._spans)
            account.held[Resource.QUEUED_TOKENS] += submission.tokens
            self._submission = submission
            state.engine.submit(submission)
            self._submitted = True
            self._waits += 1

    def _on_repeated(self, index: int, outcome: Outcome) -> None:
        """A call that an item repeats has ended."""
        if self.ended:
            return
        self.outcomes[index] = outcome = self._state.replay.repeat(outcome)
        self._waits -= 1
        if not self._submitted and self._all_or_nothing and isinstance(outcome, ExecutorError):
            self._refuse(_first_refusal([outcome], index))
        else:
            self._proceed()

    def answer(self) -> ForwardCall:
        """Itself. Raises what refused the call as a whole."""
        if self._submitted and not isinstance(self.refusal, Cancelled):
            self._state.failpoints.reach("before_reply")
        if self.refusal is not None:
            raise self.refusal
        return self

    # --- settle -----------------------------------------------------------------------------------------------------

    def _on_step_done(self, outcomes: tuple[SpanOutcome, ...], timing: StepTiming | None) -> None:
        self._leave_queue()
        self.settle(self._commit, outcomes, timing)

    def _leave_queue(self) -> None:
        """Its submission waits and runs no more. It refers to the call: to let go of the one lets go of both."""
        if self._submission is not None:
            self._account.held[Resource.QUEUED_ITEMS] -= len(self._spans)
            self._account.held[Resource.QUEUED_TOKENS] -= self._submission.tokens
            self._submission = None

    def _commit(self, outcomes: tuple[SpanOutcome, ...], timing: StepTiming | None) -> None:
        """Commit, whether or not the caller still waits."""
        state, answers, present, now = self._state, self.outcomes, not self._abandoned, time.monotonic()
        for each, outcome in zip(self._admitted, outcomes, strict=True):
            place, record, span, entry = each
            answer: ItemOutcome
            if isinstance(outcome, ExecutorError):
                state.counters.kv_exhausted += isinstance(outcome, KvBlocksExhausted)
                if outcome.position is not None and len(outcomes) > outcome.position:
                    self._culprit = self._admitted[outcome.position].place
                answer = outcome
            else:
                length, rows = outcome
                if record.length != span.start:
                    state.counters.tokens_truncated += record.length - span.start
                record.length = length
                record.version += 1
                if span.create and self._abandoned and entry is None:
                    # Cancelled, and no request id to ask again with: its handle will never be known.
                    record.pending_end = record.pending_end or Ending.ABANDONED
                answer = named(ItemAnswer, (record.handle, rows, False, 0))
            answers[place] = end_item(state, each, answer, now, present=present)
        self.timing = timing
        self._waits -= 1
        if not self._waits:
            self._finish()

    def _finish(self) -> None:
        outcomes = self.outcomes
        for index, source in self._echoes.items():
            outcome = outcomes[source]
            outcomes[index] = outcome._replace(replayed=True) if isinstance(outcome, ItemAnswer) else outcome
        self.end(_first_refusal(outcomes, self._culprit) if self._all_or_nothing else None)

    def _refuse(self, error: Exception | None) -> None:
        """Refuse the call as a whole: nothing happened, and nothing will."""
        outcome = error if isinstance(error, ExecutorError) else InternalError(FAILED)
        now, present = time.monotonic(), not isinstance(error, Cancelled)
        self._leave_queue()
        for each in self._admitted:
            end_item(self._state, each, outcome, now, present=present)
        self.end(error)

    # --- its caller was cancelled, or something failed --------------------------------------------------------------

    def take_back(self) -> bool:
        """A call that only repeats others has nothing to take back."""
        if self.ended or not self._admitted or any(each.entry and each.entry.waiters for each in self._admitted):
            return False
        if self._submitted and (self._submission is None or not self._state.engine.cancel(self._submission)):
            return False
        self._refuse(Cancelled("the call was cancelled before its step; nothing happened"))
        return True

    def fail(self, error: InternalError) -> None:
        """What is with the engine is settled by its answer."""
        if not self._submitted:
            self._refuse(error)
            return
        if self._submission is None:
            for each in self._admitted:
                if self.outcomes[each.place] is None:
                    self.outcomes[each.place] = fail_item(self._state, each)
        self.end(error)

    def abandon(self) -> None:
        self._abandoned = True
        super().abandon()
        if self._submitted or not self._admitted:  # else a duplicate waits for what this one waits for
            self._leave_repeated()


# --- the end of an item -----------------------------------------------------------------------------------------------


def end_item(state: ServerState, each: Admitted, outcome: ItemOutcome, now: float, *, present: bool) -> ItemOutcome:
    """The item is over: its sequence is free again, and its duplicates are answered. ``present``: its caller still
    waits, which renews a lease ``now`` (monotonic seconds). Returns what the item is answered with; never raises."""
    _, record, span, entry = each
    refused = isinstance(outcome, ExecutorError)
    try:
        record.busy = False
        if span.create and refused:
            state.discard(record)
        else:
            if span.create:
                state.publish(record)
            state.quotas.settle(record)
            if present:
                record.touch(now)
            if record.pending_end is not None:
                state.release([record], record.pending_end)
        if entry is not None:
            state.replay.finish(entry, outcome)
    except Exception as error:
        state.supervisor.note(Background.CALLBACK, error)
        return fail_item(state, each, refused=refused)
    return outcome


def fail_item(state: ServerState, each: Admitted, *, refused: bool = False) -> InternalError:
    """What ended the item was begun and not done, or not even begun: free its sequence, and answer the duplicates. One
    that the call was to create is released, unless the engine ``refused`` it. Returns what the item is answered with.
    """
    (_, record, span, entry), attempt = each, state.supervisor.attempt
    outcome = InternalError(FAILED)
    record.busy = False
    if not span.create:
        attempt(state.quotas.settle, record)
        if record.pending_end is not None:
            attempt(state.release, [record], record.pending_end)
    elif refused:
        attempt(state.discard, record)
    else:
        attempt(state.give_up, [record])
    if entry is not None:
        attempt(state.replay.finish, entry, outcome)
    return outcome


def _first_refusal(outcomes: Sequence[object], culprit: int | None = None) -> ExecutorError | None:
    """What refuses an ``all_or_nothing`` call: the first refusal, in the name of its item or of the ``culprit``."""
    for index, outcome in enumerate(outcomes):
        if isinstance(outcome, ExecutorError):
            error = copy.copy(outcome)  # several callers may share the outcome of a step
            error.metadata = {"item": str(index if culprit is None else culprit), **outcome.metadata}
            return error
    return None
