"""What is refused before anything starts: checks of a work item against the model, the limits and its sequence.

Pure functions. Each raises the typed refusal, so that a batch can refuse one item and run its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence

from ferrum_rpc.core import (
    Greedy,
    Limits,
    ModelInfo,
    OutputSpec,
    SelectedTokens,
    TokenArray,
    TopTokens,
    WorkItem,
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


def check_batch(items: Sequence[WorkItem | ExecutorError], model: ModelInfo, limits: Limits, max_bytes: int) -> None:
    """Refuse a whole call: empty, above the limits, the same sequence twice, or an answer above ``max_bytes``."""
    if not items:
        raise InvalidRequest("the call has no items", field="items")
    if len(items) > limits.max_batch_items:
        raise InvalidRequest(
            f"{len(items)} items exceed the limit of {limits.max_batch_items}",
            field="items",
            metadata={"max_batch_items": limits.max_batch_items},
        )
    tokens = size = each_size = 0
    alike: tuple[OutputSpec | None, int] = (None, 0)  # a batch mostly wants the same of each
    ids = []
    for item in items:
        if isinstance(item, WorkItem):
            count, output = len(item.tokens), item.output
            if output is not alike[0] or count != alike[1]:
                alike, each_size = (output, count), answer_bytes(item, model.vocab_size)
            tokens += count
            size += each_size
            if item.handle is not None:
                ids.append(item.handle.id)
    if len(set(ids)) < len(ids):
        raise InvalidRequest("the same sequence occurs twice in the call", field="items.handle")
    _check_size(tokens, size, limits, max_bytes)


def check_lone(item: WorkItem, model: ModelInfo, limits: Limits, max_bytes: int) -> None:
    """`check_batch` of one item."""
    _check_size(len(item.tokens), answer_bytes(item, model.vocab_size), limits, max_bytes)


def _check_size(tokens: int, size: int, limits: Limits, max_bytes: int) -> None:
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


def answer_bytes(item: WorkItem, vocab_size: int) -> int:
    """Bytes of an item's answer, at most."""
    return ANSWER_OVERHEAD + item.output.row_count(len(item.tokens)) * item.output.row_bytes(vocab_size)


def check_item(tokens: TokenArray, output: OutputSpec, model: ModelInfo, limits: Limits) -> None:
    """Refuse tokens beyond the vocabulary and outputs beyond the limits."""
    if (tokens.item() if len(tokens) == 1 else int(tokens.max())) >= model.vocab_size:  # numpy's maximum takes 2 µs
        raise InvalidRequest(f"a token id is not below the vocabulary of {model.vocab_size}", field="token_ids")
    match output.kind:
        case Greedy():
            pass
        case TopTokens(k) if k > min(limits.max_top_tokens, model.vocab_size):
            most = min(limits.max_top_tokens, model.vocab_size)
            raise InvalidRequest(
                f"top_tokens.k {k} exceeds {most}", field="output.top_tokens.k", metadata={"max_top_tokens": most}
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
