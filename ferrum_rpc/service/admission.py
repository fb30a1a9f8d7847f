"""What is refused before anything starts, and what an item claims that is not: its sequence, its place in the queue.

Each check raises the typed refusal, so that a batch can refuse one item and run its neighbours. A refusal leaves no
trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ferrum_rpc.core import (
    Greedy,
    ItemOutcome,
    Limits,
    ModelInfo,
    NextToken,
    OutputSpec,
    RowLogprobs,
    Sample,
    SelectedTokens,
    Span,
    TopTokens,
    WorkItem,
    named,
)
from ferrum_rpc.errors import (
    ContextLengthExceeded,
    ExecutorError,
    InvalidRequest,
    OutputTooLarge,
    QueueFull,
    TruncateBeyondLength,
)
from ferrum_rpc.executor.v1 import forward_pb2
from ferrum_rpc.service.records import RETRY_AFTER_S, Account, Resource, SequenceRecord
from ferrum_rpc.service.replay import Entry, item_fingerprint, scope_of
from ferrum_rpc.service.state import ServerState

ANSWER_OVERHEAD = 256
"""Bytes that an item's result takes besides its rows, generously."""

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


def check_room(state: ServerState, account: Account, items: Sequence[forward_pb2.ForwardItem]) -> None:
    """Refuse a call of too many items, or that the queue has no room for, before its items are looked at: under
    overload a refusal must cost next to nothing (reading 1,024 tokens takes 30 µs). Calls that may have been answered,
    or that are too large for an empty queue, are let through to be refused so."""
    limits, knows, owner = state.limits, state.replay.knows, account.caller.name
    if len(items) > limits.max_batch_items:
        raise _above(limits, "max_batch_items", len(items), "items", "items")
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
    most_items = min(limits.max_queued_items, account.most[Resource.QUEUED_ITEMS])
    most_tokens = min(limits.max_queued_tokens, account.most[Resource.QUEUED_TOKENS])
    return QueueFull(
        f"{state.engine.queued_items} items with {state.engine.queued_tokens} tokens wait, "
        f"{account.held[Resource.QUEUED_ITEMS]} with {account.held[Resource.QUEUED_TOKENS]} wait or run for you; "
        "nothing was started",
        metadata={"max_queued_items": most_items, "max_queued_tokens": most_tokens},
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
    size = checked_count = 0
    checked_output: OutputSpec | None = None  # nearly always the same for all of a batch
    for index, item in enumerate(items):
        if isinstance(item, ExecutorError):
            outcomes[index] = item
            continue
        tokens, output = item.tokens, item.output
        count = len(tokens)
        try:
            # numpy's maximum takes 2 µs
            if (tokens.item() if count == 1 else int(tokens.max())) >= model.vocab_size:
                raise InvalidRequest(f"a token id is not below the vocabulary of {model.vocab_size}", field="token_ids")
            if output is not checked_output or count != checked_count:
                most = _answer_bytes(item, model, limits)
                if count > limits.max_batch_tokens or most > max_bytes:
                    raise too_large(count, most, limits, max_bytes)
                # Where scores begin depends on where the item stands.
                checked_output = None if isinstance(output.kind, NextToken) else output
                checked_count, size = count, most
        except ExecutorError as refusal:
            outcomes[index] = refusal
            continue
        valid.append((index, item, size))
    return valid


def too_large(tokens: int, size: int, limits: Limits, max_bytes: int) -> ExecutorError:
    """The refusal of too many tokens, or else bytes of an answer, of one item or of all of a call."""
    if tokens > limits.max_batch_tokens:
        return _above(
            limits, "max_batch_tokens", tokens, "tokens", "items.token_ids", advice="; feed long prompts in chunks"
        )
    return OutputTooLarge(
        f"the answer would take {size} bytes of at most {max_bytes}; ask for fewer rows or less",
        metadata={"bytes": size, "max_response_bytes": max_bytes},
    )


def _above(limits: Limits, name: str, count: int, what: str, field: str, *, advice: str = "") -> InvalidRequest:
    """The refusal of more than a call may have; ``name`` is the field of the limits."""
    most = getattr(limits, name)
    return InvalidRequest(f"{count} {what} exceed the limit of {most}{advice}", field=field, metadata={name: most})


def _answer_bytes(item: WorkItem, model: ModelInfo, limits: Limits) -> int:
    """Bytes of an item's answer, at most. Refuses outputs beyond the limits."""
    output, vocabulary = item.output, model.vocab_size
    match output.kind:
        case Greedy(logprobs=None):
            pass
        case Greedy(logprobs=RowLogprobs() as beside):
            _check_logprobs(beside, "output.greedy.logprobs", model, limits)
        case Sample(bias=bias, logprobs=beside):
            if bias:
                _check_vocabulary(max(bias)[0], "a biased token", "output.sample.bias", model)
            if beside is not None:
                _check_logprobs(beside, "output.sample.logprobs", model, limits)
        case NextToken(following_token=following, logprobs=beside):
            if following is not None:
                _check_vocabulary(following, "the following token", "output.next_token.following_token", model)
            if beside is not None:
                _check_logprobs(beside, "output.next_token.logprobs", model, limits)
        case TopTokens(k):
            _check_top(k, "output.top_tokens.k", limits)
        case SelectedTokens(token_ids):
            _check_selected(token_ids, "output.selected_tokens.token_ids", model, limits)
    rows = output.row_count(len(item.tokens), item.start)
    return ANSWER_OVERHEAD + rows * output.row_bytes(vocabulary, model.hidden_size)


def _check_logprobs(beside: RowLogprobs, field: str, model: ModelInfo, limits: Limits) -> None:
    _check_top(beside.top_k, f"{field}.top_k", limits)
    if beside.token_ids:
        _check_selected(beside.token_ids, f"{field}.token_ids", model, limits)


def _check_top(k: int, field: str, limits: Limits) -> None:
    if k > limits.max_top_tokens:
        raise _above(limits, "max_top_tokens", k, "top tokens", field)


def _check_selected(token_ids: tuple[int, ...], field: str, model: ModelInfo, limits: Limits) -> None:
    if len(token_ids) > limits.max_selected_tokens:
        raise _above(limits, "max_selected_tokens", len(token_ids), "selected tokens", field)
    _check_vocabulary(max(token_ids), "a selected token", field, model)


def _check_vocabulary(token: int, what: str, field: str, model: ModelInfo) -> None:
    if token >= model.vocab_size:
        raise InvalidRequest(f"{what} is not below the vocabulary of {model.vocab_size}", field=field)


# --- an item and its sequence -----------------------------------------------------------------------------------------


def admit(  # noqa: PLR0917 - once an item: keywords cost time
    state: ServerState,
    account: Account,
    index: int,
    item: WorkItem,
    model: ModelInfo,
    origin: object | None,
    now: float,
) -> Admitted | Entry:
    """Turn an item into a span of a sequence that is busy from now on, or find its recorded answer. Raises its refusal,
    having changed nothing. ``now``: on `time.monotonic`."""
    replay, owner = state.replay, account.caller.name
    _, handle, tokens, truncate_to, output, request_id, create = item
    if request_id:
        scope = replay.scope(scope_of(owner, b"" if handle is None else handle.id, request_id))
        fingerprint = item_fingerprint(item)
        if (known := scope.get(request_id)) is not None:
            return known.repeated(fingerprint)
    if handle is None:
        room, start = len(tokens) + create.reserve_tokens, 0
        check_length(0, None, room, model)
        lease = state.leases.find(create.lease_id, owner, field="create.lease_id") if create.lease_id else None
        [record] = state.mint(1, account, lease, room, origin, room if create.reserve_tokens else 0)
    else:
        record = state.handles.claim(handle, owner, now=now)
        try:
            start = check_length(record.length, truncate_to, len(tokens), model)
            state.quotas.charge(record, start + len(tokens))
        except ExecutorError:
            record.busy = False
            raise
    span = named(Span, (record.sequence, tokens, start, output, handle is None, create.reserve_tokens))
    entry = replay.begin(scope, request_id, fingerprint) if request_id else None
    return named(Admitted, (index, record, span, entry))


def check_length(length: int, truncate_to: int | None, tokens: int, model: ModelInfo | None) -> int:
    """Refuse a rollback that would be growth, and growth beyond the model's context (None: it does not grow). Returns
    where the new tokens begin."""
    if truncate_to is not None:
        if truncate_to > length:
            raise TruncateBeyondLength(
                f"the sequence has {length} tokens and cannot be rolled back to {truncate_to}",
                metadata={"seq_len": length},
            )
        length = truncate_to
    if model is not None and length + tokens > model.max_context:
        raise ContextLengthExceeded(
            f"{length} tokens and {tokens} more exceed the context of {model.max_context}",
            metadata={"max_context": model.max_context, "seq_len": length},
        )
    return length
