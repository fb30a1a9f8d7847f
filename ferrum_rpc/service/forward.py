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
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple

from ferrum_rpc.core import (
    Greedy,
    ItemAnswer,
    ItemOutcome,
    ModelInfo,
    RunEnd,
    Sample,
    SpanOutcome,
    StepTiming,
    WorkItem,
    named,
)
from ferrum_rpc.core.check import too_large
from ferrum_rpc.engine.api import Submission
from ferrum_rpc.errors import (
    Cancelled,
    ChainBroken,
    ExecutorError,
    HandleUnknown,
    InternalError,
    InvalidRequest,
    KvBlocksExhausted,
    QueueFull,
    SequenceBusy,
)
from ferrum_rpc.service.admission import (
    NAMING,
    Admitted,
    Held,
    Valid,
    admit,
    follow_up,
    followed,
    foreseen,
    has_room,
    queue_full,
    valid_items,
)
from ferrum_rpc.service.fingerprints import item_fingerprint
from ferrum_rpc.service.guard.auth import ARRIVED
from ferrum_rpc.service.handles import gone
from ferrum_rpc.service.quotas import UNCOUNTED_BYTES
from ferrum_rpc.service.records import Account, Resource, SequenceEnd, SequenceRecord, Successor, no_follower
from ferrum_rpc.service.replay import Entry, Outcome, scope_of
from ferrum_rpc.service.state import ServerState
from ferrum_rpc.service.supervisor import BackgroundTask
from ferrum_rpc.service.transaction import CANCELLED_BEFORE, FAILED, CallPhase, Failed, Transaction
from ferrum_rpc.service.waits import bring_in, tiered

CHOOSING: Final = (Greedy, Sample)
"""Outputs whose last row is a token that another item may feed."""


class Following(NamedTuple):
    """An ``item`` that waits for the forward in flight on the sequence of ``record``, whose end calls ``proceed``."""

    record: SequenceRecord
    item: WorkItem
    entry: Entry
    proceed: Callable[[], object]

    @property
    def waits(self) -> bool:
        """Whether that forward is still in flight."""
        return self.record.follower is self.proceed

    def leave(self) -> None:
        """Let another item follow."""
        if self.waits:
            self.record.follower = no_follower


class ForwardCall(Transaction["ForwardCall"]):
    """A call that runs its items in one forward pass. It has claimed its sequences when it is made, and waits for
    nothing before. It is its own answer: ``outcomes[i]`` answers ``items[i]`` once it has ended (None before), and
    ``timing`` is None where no step ran for it.

    An item that is an error already (malformed on the wire) refuses itself only. The call as a whole is refused for its
    size, for the queue, and with ``all_or_nothing`` for the first item that is. ``deadline`` is on `time.monotonic`.
    ``max_bytes`` bounds the answer's rows (default: what a unary answer may take). ``origin``: the session that creates
    sequences. ``on_tokens`` is called with what runs choose, step by step: a list of (item, tokens before, token).
    ``peer()`` names the connection, whose unread bytes a large answer counts in before anything is submitted; call
    ``free_answer`` once, when the answer has left or the call is over.
    """

    _submission: Submission | None = None  # what is queued or runs for it now, and counts in its account
    _behind: Admitted | None = None  # its item, while the engine may begin that behind the one that it follows
    _cancelled_behind = False  # it was cancelled then
    begun = False  # the engine has begun that, and what it follows is not settled yet
    _unforeseen = False  # that one could not be committed, and the engine had begun its own
    _abandoned = False  # its caller was cancelled
    _first_failed: int | None = None  # the item for whose refusal the engine refused an atomic group
    timing: StepTiming | None = None
    free_answer: Callable[[], object] | None = None

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
        on_tokens: Callable[[list[tuple[int, int, int]]], object] | None = None,
    ) -> None:
        self._on_tokens = on_tokens
        self._state = state
        self._account = account
        self._all_or_nothing = all_or_nothing
        self._deadline = deadline
        self._held = Held()
        self._admitted = self._held.admitted
        self._repeated = {}
        self._duplicates: dict[int, int] = {}  # items that repeat another one of the same call
        self._following: dict[int, Following] = {}  # items that wait for one in flight
        self.outcomes: list[Any] = [None] * len(items)  # of `ItemOutcome`
        try:
            limits = state.limits
            max_bytes = max_bytes or limits.max_response_bytes
            model = state.model
            valid = valid_items(items, model, limits, max_bytes, self.outcomes)
            if len(valid) > 1:
                self._check_distinct(valid)
            repeated, tokens, size = self._claim(valid, model, origin)
            if self._all_or_nothing and (refusal := _first_refusal(self.outcomes)) is not None:
                raise refusal
            if tokens > limits.max_batch_tokens or size > max_bytes:
                raise too_large(tokens, size, limits, max_bytes)
            if peer is not None and size > UNCOUNTED_BYTES:
                try:
                    self.free_answer = state.unread.allocate(peer(), account, size)
                except QueueFull:
                    state.counters.queue_full += 1
                    raise
            for index, entry in repeated:
                if entry.answer is None:
                    self._repeat(entry, partial(self._on_repeated, index))
                else:
                    self.outcomes[index] = state.replay.repeat(entry.answer)
            if self._following and len(items) == 1:
                self._queue_behind()
            self._proceed()
        except Exception as error:
            self._refuse(error)

    def _claim(
        self, valid: Sequence[Valid], model: ModelInfo, origin: object | None
    ) -> tuple[list[tuple[int, Entry]], int, int]:
        """Claim the sequences of the items, or refuse them. Returns those that repeat an earlier call, and of all that
        were not refused the tokens and the bytes of their answers, at most."""
        state, account, admitted = self._state, self._account, self._admitted
        repeated, begun = list[tuple[int, Entry]](), dict[Entry, int]()
        tokens = size = 0
        now = time.monotonic()
        if [item for _, item, _ in valid if item.create.fork]:  # last: what is fed besides is the call's own by then
            valid = sorted(valid, key=lambda each: each[1].create.fork)
        for index, item, item_bytes in valid:
            try:
                if item.follow is None:
                    found: Admitted | Entry | None = admit(state, account, index, item, model, origin, now, self._held)
                else:
                    found = self._follow(index, item)
            except ExecutorError as error:
                self.outcomes[index] = error
                continue
            size += item_bytes
            tokens += len(item.tokens) or 1
            if found is None:
                begun[self._following[index].entry] = index
            elif isinstance(found, Admitted):
                admitted.append(found)
                if (entry := found.entry) is not None:
                    begun[entry] = index
            elif (place := begun.get(found)) is not None:
                self._duplicates[index] = place  # a repetition within the call waits for no other call
            else:
                repeated.append((index, found))
        return repeated, tokens, size

    def _check_distinct(self, valid: Sequence[Valid]) -> None:
        """Refuse a call that names one sequence twice. Handles that name no sequence refuse their own items only."""
        ids = [item.handle.id for _, item, _ in valid if item.handle is not None and not item.create.fork]
        if len(set(ids)) == len(ids):
            return
        has, owner = self._state.handles.has, self._account.caller.name
        if any(count > 1 and has(each, owner) for each, count in Counter(ids).items()):
            raise InvalidRequest("the same sequence occurs twice in the call", field="items.handle")

    def _follow(self, index: int, item: WorkItem) -> Admitted | Entry | None:
        """Admit an item that follows another, find its recorded answer, or have it wait (None)."""
        state, owner, words = self._state, self._account.caller.name, item.output.words
        record, item = followed(state, item, owner)
        item = item._replace(output=replace(item.output, words=b"")) if words else item
        scope, fingerprint = state.replay.scope(scope_of(owner, record.id, item.request_id)), item_fingerprint(item)
        if (known := scope.get(item.request_id)) is not None:
            return known.repeated(fingerprint)
        if isinstance(item.output.kind, NAMING):  # what it names must be there when its turn comes
            output, run = self._held.pin(state, self._account, item.output, item.run, words)
            item = item._replace(output=output, run=run)
        if not record.busy:
            each = follow_up(state, self._account, index, item, None)
            return each._replace(entry=state.replay.begin(scope, item.request_id, fingerprint))
        if record.follower is not no_follower:
            raise SequenceBusy("another item follows the one in flight, or what is in flight cannot be followed")
        entry = state.replay.begin(scope, item.request_id, fingerprint)
        record.follower = proceed = partial(self.settle, self._on_followed, index, item, entry)
        self._following[index] = Following(record, item, entry, proceed)
        return None

    def _on_followed(self, index: int, item: WorkItem, entry: Entry) -> None:
        """What an item follows is over."""
        if self._behind is not None and not self._take_back():
            return  # the engine hands it back
        del self._following[index]
        refusal: ExecutorError | None = None
        try:
            each = follow_up(self._state, self._account, index, item, entry)
            self._admitted.append(each)
        except HandleUnknown:
            refusal = ChainBroken("the creation that this item follows was refused")
        except ExecutorError as error:
            refusal = error
        if refusal is not None:
            self._refuse_follower(index, entry, refusal)
        else:
            self._proceed()

    def _refuse_follower(self, index: int, entry: Entry, refusal: ExecutorError) -> None:
        self.outcomes[index] = refusal
        self._state.replay.finish(entry, refusal)
        if self._all_or_nothing:
            self._refuse(_first_refusal([refusal], index))
        else:
            self._proceed()

    def _queue_behind(self) -> None:
        """Have the engine begin its only item, a run that follows another item, in the step after that one's last."""
        state, account = self._state, self._account
        [(index, (record, item, entry, _))] = self._following.items()
        before = record.submission
        if before is None:
            return
        place = next(at for at, span in enumerate(before.spans) if span.sequence == record.sequence)
        if not isinstance(before.spans[place].output.kind, CHOOSING):
            return
        each = foreseen(state, index, item, record, entry)
        if each is None:
            return
        self._behind, record.successor = each, self
        self._submission = Submission(
            (each.span,),
            self._on_step_done,
            self._all_or_nothing,
            self._deadline,
            account.number,
            on_tokens=None if self._on_tokens is None else self._pass_tokens,
            max_running=account.most[Resource.RUNS],
            behind=(before, place),
            begins=self._on_begun_behind,
        )
        state.engine.submit(self._submission)
        self.phase = CallPhase.QUEUED

    def _on_begun_behind(self) -> None:
        """The engine begins its item with the next step. The answer of the one that it follows comes next."""
        self.begun = self._behind is not None

    def take_over(self, committed: bool) -> None:
        """See `Successor`."""
        each, submission, engine = self._behind, self._submission, self._state.engine
        assert each is not None and submission is not None  # noqa: S101 - the engine has begun it
        record = each.record
        record.busy, record.follower, record.submission, record.successor = True, no_follower, submission, None
        record.cut = partial(engine.interrupt, submission, 0)
        self._behind, self.begun, self._unforeseen = None, False, not committed
        self._following.clear()
        self._admitted.append(each)
        self._account.held[Resource.QUEUED_ITEMS] += 1
        self._account.held[Resource.QUEUED_TOKENS] += 1
        if record.pending_end is not None:
            record.cut(gone(record.pending_end))

    def withdraw(self, cause: ExecutorError) -> None:
        """See `Successor`."""
        if not self._take_back() and self._submission is not None:
            self._state.engine.interrupt(self._submission, 0, cause)

    def _take_back(self) -> bool:
        """Take its item back from the engine, if it has not begun there."""
        submission = self._submission
        if submission is None or not self._state.engine.cancel(submission):
            return False
        self._leave_queue()
        self.phase = CallPhase.CLAIMED
        return True

    def _on_handed_back(self, outcomes: tuple[SpanOutcome, ...]) -> None:
        """The engine does not begin its item behind the one that it follows, or has ended."""
        self._leave_queue()
        self.phase = CallPhase.CLAIMED
        [(index, following)] = self._following.items()
        if self._cancelled_behind and not self._awaited():
            self._refuse(Cancelled(CANCELLED_BEFORE))
        elif outcomes and isinstance(refusal := outcomes[0], ExecutorError):
            del self._following[index]
            following.leave()
            self._refuse_follower(index, following.entry, refusal)
        elif not following.waits:  # what it follows is over
            self._on_followed(index, following.item, following.entry)

    def _proceed(self, *, waited: bool = False) -> None:
        """Submit what was admitted, or end the call where nothing is left to wait for. A call first waits for the items
        in flight that its own follow, an ``all_or_nothing`` one also for those that it repeats: one of them that is
        refused refuses it. They began earlier than it did, so no two calls wait for each other. ``waited``: the caches
        of its sequences are there, else it waits for those that are not."""
        if self.phase is CallPhase.CLAIMED and not self._following:
            state, account, admitted = self._state, self._account, self._admitted
            if admitted:
                if self._all_or_nothing and self._repeated:
                    return
                if not waited and (state.parked.sequences or state.engine.cache.tier_bytes) and self._wait_for_caches():
                    return
                submission = Submission(
                    tuple([each.span for each in admitted]),
                    self._on_step_done,
                    self._all_or_nothing,
                    self._deadline,
                    account.number,
                    ARRIVED.get(),
                    None if self._on_tokens is None else self._pass_tokens,
                    account.most[Resource.RUNS],
                )
                if not has_room(state, account, len(admitted), submission.tokens):
                    self._undo(queue_full(state, account))
                    return
                account.held[Resource.QUEUED_ITEMS] += len(admitted)
                account.held[Resource.QUEUED_TOKENS] += submission.tokens
                self._submission = submission
                for each in admitted:
                    each.record.submission = submission
                if submission.runs:
                    for index, each in enumerate(admitted):
                        if each.span.run is not None:
                            each.record.cut = partial(state.engine.interrupt, submission, index)
                state.engine.submit(submission)
                self.phase = CallPhase.QUEUED
                return
            self.phase = CallPhase.SETTLED
        if self.phase is CallPhase.SETTLED and not self._repeated:
            self._finish()

    def _wait_for_caches(self) -> bool:
        """Wait for those of its sequences that are not in the engine. False: they all are."""
        state, engine = self._state, self._state.engine
        records = [*(each.record for each in self._admitted), *self._held.parents]
        parked = [record for record in records if record.parked]
        prompts, back = tiered(state, self._admitted, self._held.parents) if engine.cache.tier_bytes else ((), ())
        if parked or prompts or back:
            self._wait(bring_in(state, self._account, self._goes_on, parked, prompts, back))
            return True
        return False

    def _go_on(self, failed: Failed) -> None:
        dropped = self._drop(failed) if failed else []
        if dropped and self._all_or_nothing:
            self._undo(_first_refusal(self.outcomes))
        else:
            self._proceed(waited=True)
        _call_followers(dropped)

    def _drop(self, failed: Failed) -> list[Admitted]:
        """End the items that feed or fork a sequence that could not be brought back, and return them."""
        now, kept, dropped = time.monotonic(), list[Admitted](), list[Admitted]()
        for each in self._admitted:
            refusal = failed.get(each.span.sequence) or failed.get(each.span.parent or 0)
            if refusal is None:
                kept.append(each)
            else:
                dropped.append(each)
                self.outcomes[each.place] = end_item(self._state, each, refusal, now, not self._abandoned)
        self._admitted[:] = kept
        return dropped

    def _pass_tokens(self, chosen: list[tuple[int, int, int]]) -> None:
        if self._on_tokens is not None and not self._abandoned:
            self._on_tokens([(self._admitted[index].place, first, token) for index, first, token in chosen])

    def _on_repeated(self, index: int, outcome: Outcome) -> None:
        """A call that an item repeats has ended."""
        self.outcomes[index] = outcome = self._state.replay.repeat(outcome)
        if self.phase is CallPhase.CLAIMED and self._all_or_nothing and isinstance(outcome, ExecutorError):
            self._undo(_first_refusal([outcome], index))
        else:
            self._proceed()

    def answer(self) -> ForwardCall:
        """Itself. Raises what refused the call as a whole."""
        if self._admitted:  # it has run
            self._state.failpoints.reach("before_reply")
        if self.refusal is not None:
            raise self.refusal
        return self

    # --- settle -----------------------------------------------------------------------------------------------------

    def _on_step_done(self, outcomes: tuple[SpanOutcome, ...], timing: StepTiming | None) -> None:
        if self._behind is not None:
            self.settle(self._on_handed_back, outcomes)
            return
        self._leave_queue()
        if self._unforeseen:
            outcomes = (ChainBroken("the item that this one follows failed"),)
        self.settle(self._commit, outcomes, timing)

    def _leave_queue(self) -> None:
        """Its submission is over. The two refer to each other: without this reference both are freed at once."""
        submission, self._submission = self._submission, None
        behind, self._behind = self._behind, None
        if behind is not None:
            if behind.record.successor is self:
                behind.record.successor = None
        elif submission is not None:
            self._account.held[Resource.QUEUED_ITEMS] -= len(submission.spans)
            self._account.held[Resource.QUEUED_TOKENS] -= submission.tokens

    def _commit(self, outcomes: tuple[SpanOutcome, ...], timing: StepTiming | None) -> None:
        """Commit, whether or not the caller still waits."""
        state, answers, present, now = self._state, self.outcomes, not self._abandoned, time.monotonic()
        followed = False
        for each, outcome in zip(self._admitted, outcomes, strict=True):
            place, record, span, entry = each
            answer: ItemOutcome
            if isinstance(outcome, ExecutorError):
                state.counters.kv_exhausted += isinstance(outcome, KvBlocksExhausted)
                if outcome.position is not None and len(outcomes) > outcome.position:
                    self._first_failed = self._admitted[outcome.position].place
                answer = outcome
            else:
                length, rows, ended, cached, recomputed = outcome
                if record.length > span.start:
                    state.counters.tokens_truncated += record.length - span.start
                if record.adapter is not None:
                    state.counters.adapter_tokens += length - span.start
                record.length = length
                record.version += 1
                record.chosen = None
                if rows is not None and isinstance(span.output.kind, CHOOSING):
                    token = rows.block.columns["token_ids"].item(rows.first + rows.count - 1)
                    record.chosen = record.version, token, ended is not None and ended.end is RunEnd.STOP_ID
                if span.create and self._abandoned and entry is None:
                    # Cancelled, and no request id to ask again with: its handle will never be known.
                    record.pending_end = record.pending_end or SequenceEnd.ABANDONED
                answer = named(ItemAnswer, (record.handle, rows, False, cached, ended, recomputed))
            answers[place] = end_item(state, each, answer, now, present)
            followed = followed or record.follower is not None
        self.timing = timing
        if self.phase is CallPhase.QUEUED:  # else it has failed meanwhile
            if self._repeated:
                self.phase = CallPhase.SETTLED
            else:
                self._finish()
        if followed:
            _call_followers(self._admitted)

    def end(self, refusal: Exception | None = None) -> None:
        held = self._held
        if held.masks:
            self._state.masks.unpin(held.masks)
            held.masks.clear()
        if held.grammars:
            self._state.grammars.unpin(held.grammars)
            held.grammars.clear()
        while held.parents:
            parent = held.parents.pop()
            parent.busy = False
            if parent.pending_end is not None:
                self._state.supervisor.attempt(self._state.release, [parent], parent.pending_end)
        super().end(refusal)

    def _finish(self) -> None:
        outcomes = self.outcomes
        for index, source in self._duplicates.items():
            outcome = outcomes[source]
            outcomes[index] = outcome._replace(replayed=True) if isinstance(outcome, ItemAnswer) else outcome
        self.end(_first_refusal(outcomes, self._first_failed) if self._all_or_nothing else None)

    def _undo(self, error: Exception | None) -> None:
        outcome = error if isinstance(error, ExecutorError) else InternalError(FAILED)
        now, present = time.monotonic(), not isinstance(error, Cancelled)
        self._leave_queue()
        for following in self._following.values():
            following.leave()
            self._state.supervisor.attempt(self._state.replay.finish, following.entry, outcome)
        self._following.clear()
        for each in self._admitted:
            end_item(self._state, each, outcome, now, present)
        self.end(error)
        _call_followers(self._admitted)
        self._admitted.clear()

    # --- its caller was cancelled, or something failed --------------------------------------------------------------

    def _cancel(self) -> bool:
        """Runs that have begun are interrupted."""
        engine, submission = self._state.engine, self._submission
        if submission is None:
            return False
        if engine.cancel(submission):
            return True
        self._cancelled_behind = self._behind is not None
        if submission.runs:
            cause = Cancelled("the call was cancelled; these are the tokens until then")
            engine.interrupt(submission, None, cause)
        return False

    def _awaited(self) -> bool:
        """Whether a duplicate waits for one of its items."""
        entries = [*(each.entry for each in self._admitted), *(each.entry for each in self._following.values())]
        return any(entry and entry.waiters for entry in entries)

    def fail(self, error: InternalError) -> None:
        """What is with the engine is settled by its answer."""
        if self.phase < CallPhase.QUEUED:
            self._refuse(error)
            return
        answered = self._submission is None and self.phase is not CallPhase.SETTLED  # its commit has failed
        if answered:
            for each in self._admitted:
                if self.outcomes[each.place] is None:
                    self.outcomes[each.place] = fail_item(self._state, each)
        self.end(error)
        if answered:
            _call_followers(self._admitted)

    def abandon(self) -> None:
        self._abandoned = True
        super().abandon()
        self._proceed()


# --- the end of an item -----------------------------------------------------------------------------------------------


def _call_followers(ended: Sequence[Admitted]) -> None:
    """Items that waited for these go on; those were answered before."""
    for each in ended:
        if each.record.busy:  # it was taken over
            continue
        follower, each.record.follower = each.record.follower, None
        if follower is not None:
            follower()


def end_item(state: ServerState, each: Admitted, outcome: ItemOutcome, now: float, present: bool) -> ItemOutcome:
    """The item is over: its sequence is free again, and its duplicates are answered. ``present``: its caller still
    waits, which renews a lease ``now`` (monotonic seconds). Returns what the item is answered with; never raises."""
    _, record, span, entry = each
    refused, successor = isinstance(outcome, ExecutorError), None
    if record.successor is not None:
        successor = _begun(record)
    try:
        record.busy, record.cut, record.submission = False, None, None
        if record.follower is no_follower:
            record.follower = None
        record.reached = sys.maxsize if refused else record.length
        if span.create and refused:
            state.discard(record)
        else:
            if span.create:
                state.publish(record)
                state.counters.sequences_forked += span.parent is not None
            elif not refused:
                record.go_back(span.start)
            if successor is None:
                state.quotas.settle(record)
            if present:
                record.touch(now)
            if record.pending_end is not None and successor is None:
                state.release([record], record.pending_end)
        if entry is not None:
            state.replay.finish(entry, outcome)
    except Exception as error:
        state.supervisor.note(BackgroundTask.CALLBACK, error)
        return fail_item(state, each, refused=refused)
    if successor is not None:
        successor.take_over(not refused)
    else:
        record.successor = None
    return outcome


def _begun(record: SequenceRecord) -> Successor | None:
    """What takes the sequence over from the forward that is being settled."""
    return record.successor if record.successor is not None and record.successor.begun else None


def fail_item(state: ServerState, each: Admitted, *, refused: bool = False) -> InternalError:
    """What ended the item was begun and not done, or not even begun: free its sequence, and answer the duplicates. One
    that the call was to create is released, unless the engine ``refused`` it. Returns what the item is answered with.
    """
    (_, record, span, entry), attempt = each, state.supervisor.attempt
    outcome = InternalError(FAILED)
    successor = _begun(record)
    record.busy, record.cut, record.submission = False, None, None
    if record.follower is no_follower:
        record.follower = None
    if successor is None:
        record.successor = None
    if successor is not None:  # the engine goes on with it
        if span.create:
            attempt(state.publish, record)
            record.pending_end = record.pending_end or SequenceEnd.ABANDONED
        attempt(successor.take_over, False)
    elif not span.create:
        attempt(state.quotas.settle, record)
        if record.pending_end is not None:
            attempt(state.release, [record], record.pending_end)
    elif refused:
        attempt(state.discard, record)
    else:
        attempt(state.abandon, [record])
    if entry is not None:
        attempt(state.replay.finish, entry, outcome)
    return outcome


def _first_refusal(outcomes: Sequence[object], first_failed: int | None = None) -> ExecutorError | None:
    """What refuses an ``all_or_nothing`` call: the first refusal. It names its item, or the ``first_failed``."""
    for index, outcome in enumerate(outcomes):
        if isinstance(outcome, ExecutorError):
            error = copy.copy(outcome)  # several callers may share the outcome of a step
            error.metadata = {"item": str(index if first_failed is None else first_failed), **outcome.metadata}
            return error
    return None
