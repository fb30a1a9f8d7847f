"""What is refused before anything starts: checks of a work item against the model, the limits and its sequence.

Pure functions. Each raises the typed refusal, so that a batch can refuse one item and run its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ferrum_rpc.core import (
    Greedy,
    ItemOutcome,
    Limits,
    ModelInfo,
    OutputSpec,
    SelectedTokens,
    TokenArray,
    TopTokens,
    WorkItem,
    named,
)
from ferrum_rpc.errors import (
    ContextLengthExceeded,
    ExecutorError,
    InvalidRequest,
    OutputTooLarge,
    TruncateBeyondLength,
)

ANSWER_OVERHEAD = 256
"""Bytes that an item's result takes besides its rows, generously."""


class Sound(NamedTuple):
    """An item that nothing is wrong with but perhaps its sequence. ``bytes``: what its answer takes at most."""

    place: int
    item: WorkItem
    bytes: int


def check_call(
    items: Sequence[WorkItem | ExecutorError],
    model: ModelInfo,
    limits: Limits,
    max_bytes: int,
    outcomes: list[ItemOutcome | None],
) -> list[Sound]:
    """The items that are sound; the refusals of the others go into ``outcomes``. Raises what refuses the call as a
    whole: no items, or too many."""
    if not items:
        raise InvalidRequest("the call has no items", field="items")
    check_count(len(items), limits)
    sound: list[Sound] = []
    size = 0
    alike: tuple[OutputSpec | None, int] = (None, 0)  # a batch mostly wants the same of each
    for index, item in enumerate(items):
        try:
            if isinstance(item, ExecutorError):
                raise item
            count, output = len(item.tokens), item.output
            _check_tokens(item.tokens, model)
            if output is not alike[0] or count != alike[1]:
                _check_output(output, model, limits)
                most = answer_bytes(item, model.vocab_size)
                check_size(count, most, limits, max_bytes)
                alike, size = (output, count), most
        except ExecutorError as refusal:
            outcomes[index] = refusal
            continue
        sound.append(named(Sound, (index, item, size)))
    return sound


def check_count(items: int, limits: Limits) -> None:
    """Refuse a call of too many items."""
    if items > limits.max_batch_items:
        raise InvalidRequest(
            f"{items} items exceed the limit of {limits.max_batch_items}",
            field="items",
            metadata={"max_batch_items": limits.max_batch_items},
        )


def answer_bytes(item: WorkItem, vocab_size: int) -> int:
    """Bytes of an item's answer, at most."""
    return ANSWER_OVERHEAD + item.output.row_count(len(item.tokens)) * item.output.row_bytes(vocab_size)


def check_size(tokens: int, size: int, limits: Limits, max_bytes: int) -> None:
    """Refuse what is too much for a call, be it one item or all of them."""
    if tokens > limits.max_batch_tokens:
        raise InvalidRequest(
            f"{tokens} tokens exceed the limit of {limits.max_batch_tokens} a call; feed long prompts in chunks",
            field="items.token_ids",
            metadata={"max_batch_tokens": limits.max_batch_tokens},
        )
    if size > max_bytes:
        raise OutputTooLarge(
            f"the answer would take {size} bytes of at most {max_bytes}; ask for fewer rows or less",
            metadata={"bytes": size, "max_response_bytes": max_bytes},
        )


def _check_tokens(tokens: TokenArray, model: ModelInfo) -> None:
    """Refuse tokens beyond the vocabulary."""
    if (tokens.item() if len(tokens) == 1 else int(tokens.max())) >= model.vocab_size:  # numpy's maximum takes 2 µs
        raise InvalidRequest(f"a token id is not below the vocabulary of {model.vocab_size}", field="token_ids")


def _check_output(output: OutputSpec, model: ModelInfo, limits: Limits) -> None:
    """Refuse outputs beyond the limits."""
    match output.kind:
        case Greedy():
            pass
        case TopTokens(k) if k > limits.max_top_tokens:
            raise InvalidRequest(
                f"top_tokens.k {k} exceeds {limits.max_top_tokens}",
                field="output.top_tokens.k",
                metadata={"max_top_tokens": limits.max_top_tokens},
            )
        case SelectedTokens(token_ids):
            if len(token_ids) > limits.max_selected_tokens:
                raise InvalidRequest(
                    f"{len(token_ids)} selected tokens exceed {limits.max_selected_tokens}",
                    field="output.selected_tokens.token_ids",
                    metadata={"max_selected_tokens": limits.max_selected_tokens},
                )
            if max(token_ids) >= model.vocab_size:
                raise InvalidRequest(
                    f"a selected token is not below the vocabulary of {model.vocab_size}",
                    field="output.selected_tokens.token_ids",
                )
        case _:
            pass


def check_rollback(wanted: int, length: int) -> None:
    """Refuse a rollback that would be growth."""
    if wanted > length:
        raise TruncateBeyondLength(
            f"the sequence has {length} tokens and cannot be rolled back to {wanted}", metadata={"seq_len": length}
        )


def check_context(start: int, tokens: int, model: ModelInfo) -> None:
    """Refuse growth beyond the model's context."""
    if start + tokens > model.max_context:
        raise ContextLengthExceeded(
            f"{start} tokens and {tokens} more exceed the context of {model.max_context}",
            metadata={"max_context": model.max_context, "seq_len": start},
        )
