"""What is refused before anything starts, and what an item claims that is not: its sequence, its place in the queue.

Each check raises the typed refusal, so that a batch can refuse one item and run its neighbours. A refusal leaves no
trace.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

import numpy as np

from ferrum_rpc.core import (
    Accept,
    HandleRef,
    ItemAnswer,
    ItemOutcome,
    Limits,
    ModelInfo,
    NextToken,
    OutputSpec,
    PrefixUse,
    Run,
    Sample,
    Span,
    TokenArray,
    WorkItem,
    named,
)
from ferrum_rpc.core.check import answer_bytes, run_bytes, too_large
from ferrum_rpc.errors import (
    ChainBroken,
    ContextLengthExceeded,
    ExecutorError,
    InvalidRequest,
    NotSupported,
    QueueFull,
    TruncateBeyondLength,
    above,
    counted,
)
from ferrum_rpc.executor.v1 import forward_pb2
from ferrum_rpc.service.contents import Registered
from ferrum_rpc.service.fingerprints import item_fingerprint
from ferrum_rpc.service.handles import stale
from ferrum_rpc.service.records import RETRY_AFTER_S, Account, Adapter, Resource, SequenceRecord, no_follower
from ferrum_rpc.service.replay import Entry, scope_of
from ferrum_rpc.service.state import ServerState

NAMING: Final = (Sample, Accept)
"""Outputs that may name masks or a grammar. A union would be made anew at every look, in 0.2 µs."""

Valid = tuple[int, WorkItem, int]
"""An item with its place in the call and the bytes that its answer takes at most. Nothing is wrong with it but perhaps
its sequence."""


class Admitted(NamedTuple):
    """The item at ``place`` of its call, on its way through a step. ``entry`` is that of the replay log, if it has a
    request id."""

    place: int
    record: SequenceRecord
    span: Span
    entry: Entry | None


# --- the call ---------------------------------------------------------------------------------------------------------


def check_queue_capacity(state: ServerState, account: Account, items: Sequence[forward_pb2.ForwardItem]) -> None:
    """Refuse a call of too many items, or that the queue has no room for, before its items are looked at: under
    overload a refusal must cost next to nothing (reading 1,024 tokens takes 30 µs). Calls that may have been answered,
    or that are too large for an empty queue, are let through to be refused so."""
    limits, knows, owner = state.limits, state.replay.knows, account.caller.name
    if len(items) > limits.max_batch_items:
        raise above("max_batch_items", limits.max_batch_items, len(items), "items", "items")
    # Counting tokens costs more than asking whether any number of them would do; nearly always it would.
    if has_room(state, account, len(items), limits.max_batch_tokens):
        return
    tokens = sum(len(item.token_ids) for item in items)
    if tokens > limits.max_batch_tokens or has_room(state, account, len(items), tokens):
        return
    if not any(
        each.request_id and knows(scope_of(owner, each.handle.id, each.request_id), each.request_id) for each in items
    ):
        raise queue_full(state, account)


def has_room(state: ServerState, account: Account, items: int, tokens: int) -> bool:
    """Whether so many items with so many tokens may wait, of all callers and of this one."""
    engine, limits, held, most = state.engine, state.limits, account.held, account.most
    return (
        engine.queued_items + items <= limits.max_queued_items
        and engine.queued_tokens + tokens <= limits.max_queued_tokens
        and held[Resource.QUEUED_ITEMS] + items <= most[Resource.QUEUED_ITEMS]
        and held[Resource.QUEUED_TOKENS] + tokens <= most[Resource.QUEUED_TOKENS]
    )


def queue_full(state: ServerState, account: Account) -> QueueFull:
    """The refusal of a call that `has_room` denies; it is counted."""
    limits = state.limits
    state.counters.queue_full += 1
    max_items = min(limits.max_queued_items, account.most[Resource.QUEUED_ITEMS])
    max_tokens = min(limits.max_queued_tokens, account.most[Resource.QUEUED_TOKENS])
    return QueueFull(
        f"{counted(state.engine.queued_items, 'item')} of {counted(state.engine.queued_tokens, 'token')} in all wait, "
        f"{account.held[Resource.QUEUED_ITEMS]} of {account.held[Resource.QUEUED_TOKENS]} wait or run for you; "
        "nothing was started",
        metadata={"max_queued_items": max_items, "max_queued_tokens": max_tokens},
        retry_after_s=RETRY_AFTER_S,
    )


def valid_items(
    items: Sequence[WorkItem | ExecutorError],
    model: ModelInfo,
    limits: Limits,
    max_bytes: int,
    outcomes: list[ItemOutcome | None],
) -> list[Valid]:
    """The items that are valid; the refusals of the others go into ``outcomes``. Raises where there are no items."""
    if not items:
        raise InvalidRequest("the call has no items", field="items")
    valid: list[Valid] = []
    size = checked_count = runs = 0
    checked_output: OutputSpec | None = None  # nearly always the same for all of a batch
    vocab_size = model.vocab_size
    for index, item in enumerate(items):
        if isinstance(item, ExecutorError):
            outcomes[index] = item
            continue
        tokens, output, run = item.tokens, item.output, item.run
        count = len(tokens)
        try:
            # numpy's maximum takes 2 µs
            if count and (tokens.item() if count == 1 else int(tokens.max())) >= vocab_size:
                raise InvalidRequest(f"token ids must be below the vocabulary of {vocab_size}", field="token_ids")
            if output is not checked_output or count != checked_count:
                item_bytes = answer_bytes(item, model, limits)
                if count > limits.max_batch_tokens or item_bytes > max_bytes:
                    raise too_large(count, item_bytes, limits, max_bytes)
                # Where scores begin depends on where the item stands.
                checked_output = None if isinstance(output.kind, NextToken) else output
                checked_count, size = count, item_bytes
            if run is not None:
                runs += 1
                item_bytes = run_bytes(run, output, model, limits)
                if item_bytes > max_bytes:
                    raise too_large(count, item_bytes, limits, max_bytes)
                valid.append((index, item, item_bytes))
                continue
        except ExecutorError as refusal:
            outcomes[index] = refusal
            continue
        valid.append((index, item, size))
    if runs > limits.max_running:
        raise above("max_running", limits.max_running, runs, "runs", "items.run")
    return valid


# --- an item and its sequence -----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Held:
    """What a call holds until it has ended: its ``admitted`` items, the ``masks`` and ``grammars`` that they name, and
    sequences of which they make ``parents`` and that it does not feed."""

    admitted: list[Admitted] = field(default_factory=list)
    masks: list[Registered] = field(default_factory=list)
    grammars: list[Registered] = field(default_factory=list)
    parents: list[SequenceRecord] = field(default_factory=list)

    def pin(
        self, state: ServerState, account: Account, output: OutputSpec, run: Run | None, words: bytes
    ) -> tuple[OutputSpec, Run | None]:
        """Pin the masks and the grammar that an output names until the call has ended. Returns the output with the
        engine's name of the grammar, and the run, which ends with the tokens that end a text. Raises
        `TokenMaskUnknown`, `GrammarUnknown`, `NotSupported` without grammars, and as `MaskTable.register`; nothing has
        changed then."""
        model = state.model
        if (masked := output.masked) is not None:
            self.masks += state.masks.pin(account, masked, words, model.vocab_size)
        if (constrained := output.constrained) is None:
            return output, run
        if not model.tokenizer_sha256:
            raise NotSupported("grammars are not offered (capability GRAMMAR)", field="output.grammar_id")
        grammar = state.grammars.pin(account, constrained.grammar)
        self.grammars.append(grammar)
        kind: Any = replace(constrained, grammar=state.grammars.key(account, grammar.id))
        if isinstance(output.kind, Accept):
            kind = output.kind.choosing(kind)
        if run is not None:
            run = replace(run, stop_token_ids=(*run.stop_token_ids, *model.eos_token_ids))
        return OutputSpec(output.positions, kind), run

    def parent(self, state: ServerState, handle: HandleRef, owner: str, now: float) -> SequenceRecord:
        """The sequence that an item forks, which stays as it is until the call's step. Raises as `HandleTable.claim`,
        but for a sequence that is the call's own already."""
        record = state.handles.live.get(handle.id)
        mine = (*self.parents, *(each.record for each in self.admitted))
        if record is None or not any(each is record for each in mine):
            record = state.handles.claim(handle, owner, now)
            self.parents.append(record)
        elif (record.version, record.length) != (handle.version, handle.seq_len):
            raise stale(record)
        return record


def admit(  # noqa: PLR0917 - once an item: keywords cost time
    state: ServerState,
    account: Account,
    index: int,
    item: WorkItem,
    model: ModelInfo,
    origin: object | None,
    now: float,
    held: Held,
) -> Admitted | Entry:
    """Turn an item into a span of a sequence that is busy from now on, or find its recorded answer. Raises its refusal,
    having changed nothing. ``now``: on `time.monotonic`. What it holds besides is added to ``held``."""
    replay, owner = state.replay, account.caller.name
    handle, output, request_id, kind = item.handle, item.output, item.request_id, item.output.kind
    words = output.words
    if words:
        item = item._replace(output=replace(output, words=b""))
    made = handle is None or item.create.fork
    if request_id:
        scope = replay.scope(scope_of(owner, b"" if made or handle is None else handle.id, request_id))
        fingerprint = item_fingerprint(item)
        if (known := scope.get(request_id)) is not None:
            return known.repeated(fingerprint)
    if handle is None or made:
        record, span = _new_span(state, account, item, model, origin, now, held)
    else:
        record = state.handles.claim(handle, owner, now)
        span = claimed_span(state, record, item, item.tokens, model)
    follower: Callable[[], object] | None = no_follower
    if isinstance(kind, NAMING):
        if isinstance(kind, Accept):
            follower = None
        try:
            pinned, run = held.pin(state, account, span.output, span.run, words)
            if pinned is not span.output:
                span = span._replace(output=pinned, run=run)
        except ExecutorError:
            if span.create:
                state.discard(record)
            else:
                record.busy = False
                state.quotas.settle(record)
            raise
    record.follower = follower
    entry = replay.begin(scope, request_id, fingerprint) if request_id else None
    return named(Admitted, (index, record, span, entry))


def _new_span(  # noqa: PLR0917 - as `admit`
    state: ServerState,
    account: Account,
    item: WorkItem,
    model: ModelInfo,
    origin: object | None,
    now: float,
    held: Held,
) -> tuple[SequenceRecord, Span]:
    """The span of an item that makes a sequence, and its record."""
    owner = account.caller.name
    _, handle, tokens, truncate_to, output, request_id, create, run, _ = item
    parent = None if handle is None else held.parent(state, handle, owner, now)
    start = 0 if parent is None else check_length(parent.length, truncate_to, 0, None)
    end = start + len(tokens)
    capacity = end + create.reserve_tokens
    check_length(start, None, len(tokens), model, create.reserve_tokens)
    if run is not None:
        run, output = _fitted(run, output, end, model)
        capacity = max(capacity, end + run.max_tokens - 1)
    lease = None if parent is None else parent.lease
    if create.lease_id:
        lease = state.leases.find(create.lease_id, owner, field="create.lease_id")
    held_to = end + create.reserve_tokens if create.reserve_tokens else 0
    ahead = create.reserve_tokens
    adapter = None if parent is None else parent.adapter
    if create.adapter:
        adapter = state.adapters.find(create.adapter, "create.adapter")
    prefix = prefix_use(create.prefix, account, adapter)
    own = prefix if parent is None else parent.prefix
    [record] = state.mint(1, account, lease, capacity, origin, held_to, own, adapter, request_id, start=start)
    record.held_from = end
    made_of = None if parent is None else parent.sequence
    number = 0 if adapter is None else adapter.number
    return record, named(Span, (record.sequence, tokens, start, output, True, ahead, run, made_of, prefix, number))


def claimed_span(
    state: ServerState, record: SequenceRecord, item: WorkItem, tokens: TokenArray, model: ModelInfo
) -> Span:
    """The span of an item that has claimed ``record``, which is free again where it is refused."""
    try:
        return _span_at(state, record, record.length, item, tokens, model)
    except ExecutorError:
        record.busy = False
        raise


def _span_at(  # noqa: PLR0917 - as `admit`
    state: ServerState, record: SequenceRecord, length: int, item: WorkItem, tokens: TokenArray, model: ModelInfo
) -> Span:
    """The span of an item on a sequence of ``length`` tokens, which is charged for it."""
    run, output = item.run, item.output
    start = check_length(length, item.truncate_to, len(tokens), model)
    end = start + len(tokens)
    if run is not None:
        run, output = _fitted(run, output, end, model)
        end += run.max_tokens - 1
    state.quotas.charge(record, min(start, record.length), end)
    adapter = 0 if record.adapter is None else record.adapter.number
    return named(Span, (record.sequence, tokens, start, output, False, 0, run, None, None, adapter))


def prefix_use(
    requested: PrefixUse | None, account: Account, adapter: Adapter | None, imported_from: int | None = None
) -> PrefixUse | None:
    """How a new sequence of this caller, with an adapter or without, uses the prefix cache."""
    if requested is None:
        return None
    name, fingerprint = ("", b"") if adapter is None else (adapter.name, adapter.fingerprint)
    return PrefixUse(requested.salt, requested.publishes, name, fingerprint, account.digest, imported_from)


def _fitted(run: Run, output: OutputSpec, length: int, model: ModelInfo) -> tuple[Run, OutputSpec]:
    """A run as the context allows it once its item has been fed, which leaves ``length`` tokens; and the output of all
    its steps, which share a seed."""
    left = model.max_context - length + 1
    if left < run.max_tokens:
        run = replace(run, max_tokens=left, at_context=True)
    kind = output.kind
    if isinstance(kind, Sample) and kind.seed is None:
        output = OutputSpec(output.positions, replace(kind, seed=random.getrandbits(64)))
    return run, output


# --- an item behind one that is in flight -----------------------------------------------------------------------------


def followed(state: ServerState, item: WorkItem, owner: str) -> tuple[SequenceRecord, WorkItem]:
    """The sequence that an item follows on, and the item with its id. Raises `ChainBroken` where no such creation is
    known, and what the handle of a sequence that is gone is answered with."""
    handle, follow = item.handle, item.follow
    assert handle is not None and follow is not None  # noqa: S101 - the wire floor looked
    if not follow.creation:
        return state.handles.find(handle, owner), item
    record = state.creation(owner, follow.creation)
    if record is None:
        entry = state.replay.scope(scope_of(owner, b"", follow.creation)).get(follow.creation)
        made = None if entry is None else entry.answer
        if not isinstance(made, ItemAnswer):
            raise ChainBroken("no creation with this request id is in flight or recorded", field="follow.creation")
        record = state.handles.find(made.handle, owner)
    return record, item._replace(handle=named(HandleRef, (record.id, handle.seq_len, handle.version)))


def follow_up(state: ServerState, account: Account, index: int, item: WorkItem, entry: Entry | None) -> Admitted:
    """Admit an item that follows, now that nothing is in flight on its sequence. Raises `ChainBroken` where that is not
    as the item foresaw, and what `admit` raises."""
    handle, follow = item.handle, item.follow
    assert handle is not None and follow is not None  # noqa: S101 - the wire floor looked
    record = state.handles.find(handle, account.caller.name)
    stands = {"version": record.version, "seq_len": record.length}
    if (record.version, record.length) != (handle.version, handle.seq_len):
        raise ChainBroken(
            f"the sequence stands at version {record.version} with {record.length} tokens, "
            f"not at version {handle.version} with {handle.seq_len}",
            metadata=stands,
        )
    tokens = item.tokens
    if follow.feed_chosen:
        version, token, stop = record.chosen or (0, 0, False)
        if version != record.version:
            raise ChainBroken("the preceding item chose no token that can be fed", metadata=stands)
        if stop:
            raise ChainBroken("the preceding run ended with a stop id", metadata=stands)
        tokens = np.array((token,), np.int32)
    model = state.model  # raises where the executor has ended: nothing is claimed then
    state.handles.claim(handle, account.caller.name)
    span = claimed_span(state, record, item, tokens, model)
    record.follower = None if isinstance(item.output.kind, Accept) else no_follower
    return named(Admitted, (index, record, span, entry))


def foreseen(state: ServerState, index: int, item: WorkItem, record: SequenceRecord, entry: Entry) -> Admitted | None:
    """Admit an item that follows the forward in flight as if that had ended as the item foresees, with 0 in place of
    the token that it will choose. None: only what is left behind can decide, or the item has no run, or it has a
    grammar, whose mask depends on that token."""
    handle, follow, before = item.handle, item.follow, record.submission
    assert handle is not None and follow is not None  # noqa: S101 - the wire floor looked
    if before is None or item.run is None or not follow.feed_chosen or item.output.constrained is not None:
        return None
    if handle.version != record.version + 1 or item.truncate_to is not None or record.pending_end is not None:
        return None
    try:
        span = _span_at(state, record, handle.seq_len, item, np.zeros(1, np.int32), state.model)
    except ExecutorError:
        return None
    return named(Admitted, (index, record, span, entry))


def check_length(
    length: int, truncate_to: int | None, tokens: int, model: ModelInfo | None, reserve_tokens: int = 0
) -> int:
    """Refuse a rollback that would be growth, and growth beyond the model's context (None: it does not grow), with what
    a new sequence has reserved. Returns where the new tokens begin."""
    if truncate_to is not None:
        if truncate_to > length:
            raise TruncateBeyondLength(
                f"the sequence has {length} tokens and cannot be rolled back to {truncate_to}",
                metadata={"seq_len": length},
            )
        length = truncate_to
    if model is not None and length + tokens + reserve_tokens > model.max_context:
        reserved = f" and {reserve_tokens} of reserve_tokens" if reserve_tokens else ""
        raise ContextLengthExceeded(
            f"{length} tokens and {tokens} more{reserved} exceed the context of {model.max_context}",
            metadata={"max_context": model.max_context, "seq_len": length},
        )
    return length
