"""Checks of a work item's form and limits, independent of the state of its sequence and of the executor.

The service checks incoming items with these functions, the client its own before it sends them. Each raises the typed
refusal.
"""

from __future__ import annotations

from typing import Final, assert_never

import numpy as np

from ferrum_rpc.core.info import Limits, ModelInfo
from ferrum_rpc.core.items import WorkItem
from ferrum_rpc.core.outputs import (
    Accept,
    FullLogits,
    Greedy,
    HiddenStates,
    NextToken,
    OutputSpec,
    Positions,
    RowLogprobs,
    Sample,
    SelectedTokens,
    TopTokens,
)
from ferrum_rpc.core.steps import Run, TokenArray
from ferrum_rpc.errors import ExecutorError, InvalidRequest, OutputTooLarge, above

ANSWER_OVERHEAD = 256
"""Upper bound of an item's result without its rows, in bytes."""

SUM_TOLERANCE: Final = 1e-3
"""Tolerance for the sum of a draft's probabilities: rounded to 16 bits it is not exactly 1."""


def check_limit(limits: Limits | None, name: str, count: int, what: str, field: str) -> None:
    """Raise `InvalidRequest` if ``count`` exceeds the limit ``name``. A client may not know the limits (None), or not
    this one (0)."""
    limit = 0 if limits is None else getattr(limits, name)
    if limit and count > limit:
        raise above(name, limit, count, what, field)


def check_run(run: Run, output: OutputSpec, max_stops: int = 0) -> None:
    """Raise `InvalidRequest` for a run whose output chooses no next token, with no tokens, or with more stop ids than
    ``max_stops`` (0: unknown)."""
    kind = output.kind
    if not isinstance(kind, Greedy | Sample) or output.positions is not Positions.LAST:
        raise InvalidRequest(
            "the output of a run must be Greedy() or Sample(...), at the last position", field="output"
        )
    if kind.row_masks:
        raise InvalidRequest("a run takes one mask for all its rows, or none", field="output.row_mask_ids")
    if run.max_tokens < 1:
        raise InvalidRequest("run.max_tokens must be at least 1", field="run.max_tokens")
    if max_stops and (count := len(run.stop_token_ids)) > max_stops:
        raise above("max_stop_tokens", max_stops, count, "stop ids", "run.stop_token_ids")


def too_large(tokens: int, size: int, limits: Limits, max_bytes: int) -> ExecutorError:
    """The refusal of too many tokens, or else of too large an answer, of one item or of a whole call."""
    limit = limits.max_batch_tokens
    if tokens > limit:
        advice = "; feed long prompts in chunks"
        return above("max_batch_tokens", limit, tokens, "tokens", "items.token_ids", advice=advice)
    return OutputTooLarge(
        f"the answer would take {size} bytes of at most {max_bytes}; ask for fewer rows or less",
        metadata={"bytes": size, "max_response_bytes": max_bytes},
    )


def answer_bytes(item: WorkItem, model: ModelInfo, limits: Limits) -> int:
    """Upper bound of an item's answer in bytes. Refuses outputs beyond the limits."""
    output, vocabulary = item.output, model.vocab_size
    match output.kind:
        case Greedy(logprobs=logprobs):
            if logprobs is not None:
                _check_logprobs(logprobs, "output.greedy.logprobs", model, limits)
        case Sample() as sample:
            _check_sample(sample, "output.sample", model, limits)
        case Accept() as accept:
            _check_draft(accept, item.tokens, model, limits)
            if accept.sampling is not None:
                _check_sample(accept.sampling, "output.accept.sampling", model, limits)
        case NextToken(following_token=following, logprobs=logprobs):
            if following is not None:
                check_vocabulary(following, "the following token", "output.next_token.following_token", model)
            if logprobs is not None:
                _check_logprobs(logprobs, "output.next_token.logprobs", model, limits)
        case TopTokens(k):
            check_limit(limits, "max_top_tokens", k, "top tokens", "output.top_tokens.k")
        case SelectedTokens(token_ids):
            _check_selected(token_ids, "output.selected_tokens.token_ids", model, limits)
        case FullLogits() | HiddenStates():
            pass
        case kind:
            assert_never(kind)
    rows = output.row_count(len(item.tokens) or 1, item.start)
    if isinstance(output.kind, Sample | Accept) and (masked := output.masked) is not None:
        masks = len(masked.row_masks)
        if masks and masks != rows:
            raise InvalidRequest(f"{masks} masks for {rows} rows", field="output.row_mask_ids")
    if output.constrained is not None and rows > limits.max_draft_tokens + 1:
        raise InvalidRequest(
            f"a grammar constrains at most {limits.max_draft_tokens + 1} rows of an item, not {rows}",
            field="output.positions",
            metadata={"max_draft_tokens": limits.max_draft_tokens},
        )
    return ANSWER_OVERHEAD + rows * output.row_bytes(vocabulary, model.hidden_size)


def run_bytes(run: Run, output: OutputSpec, model: ModelInfo, limits: Limits) -> int:
    """Upper bound of a run's answer in bytes. Refuses runs beyond the limits."""
    if run.max_tokens > limits.max_run_tokens:
        raise above("max_run_tokens", limits.max_run_tokens, run.max_tokens, "tokens of a run", "run.max_tokens")
    if run.stop_token_ids:
        check_vocabulary(max(run.stop_token_ids), "stop ids", "run.stop_token_ids", model)
    return ANSWER_OVERHEAD + run.max_tokens * output.row_bytes(model.vocab_size, model.hidden_size)


def _check_sample(sample: Sample, field: str, model: ModelInfo, limits: Limits) -> None:
    if sample.bias:
        check_vocabulary(max(sample.bias)[0], "a biased token", f"{field}.bias", model)
    if sample.logprobs is not None:
        _check_logprobs(sample.logprobs, f"{field}.logprobs", model, limits)


def _check_draft(accept: Accept, tokens: TokenArray, model: ModelInfo, limits: Limits) -> None:
    """Refuse a draft that is too long, or that cannot have been sampled from the given probabilities."""
    drafted = max(0, len(tokens) - 1)  # an item that feeds what was chosen names no token
    if drafted > limits.max_draft_tokens:
        raise above("max_draft_tokens", limits.max_draft_tokens, drafted, "draft tokens", "token_ids")
    if not accept.candidates:
        return
    ids, probabilities = accept.draft_token_ids, accept.draft_probabilities
    field = "output.accept.draft_token_ids"
    if accept.candidates > limits.max_draft_candidates:
        raise above(
            "max_draft_candidates", limits.max_draft_candidates, accept.candidates, "candidates of a token", field
        )
    if len(ids) != drafted:
        raise InvalidRequest(f"candidates of {len(ids)} tokens for a draft of {drafted}", field=field)
    check_vocabulary(int(ids.max()), "a candidate", field, model)
    ordered = np.sort(ids, axis=-1)
    if (ordered[:, 1:] == ordered[:, :-1]).any():
        raise InvalidRequest("the candidates of a draft token must differ", field=field)
    found = ids == tokens[1:, None]
    if not found.any(axis=-1).all():
        raise InvalidRequest("each draft token must be among its candidates", field=field)
    field = "output.accept.draft_probabilities"
    if not (probabilities >= 0).all():
        raise InvalidRequest("a draft's probabilities must be 0 or more", field=field)
    sums = probabilities.sum(axis=-1, dtype=np.float64)
    worst = int(np.argmax(np.abs(sums - 1)))
    if not abs(sums[worst] - 1) <= SUM_TOLERANCE:
        raise InvalidRequest(
            f"the probabilities of draft token {worst} sum to {sums[worst]:.6g}, not to 1 within {SUM_TOLERANCE:g}: "
            "divide a q that was cut to its best candidates by its sum, and draw from that",
            field=field,
        )
    if not probabilities[found].all():
        raise InvalidRequest("each draft token must have a probability above 0", field=field)


def _check_logprobs(logprobs: RowLogprobs, field: str, model: ModelInfo, limits: Limits) -> None:
    check_limit(limits, "max_top_tokens", logprobs.top_k, "top tokens", f"{field}.top_k")
    if logprobs.token_ids:
        _check_selected(logprobs.token_ids, f"{field}.token_ids", model, limits)


def _check_selected(token_ids: tuple[int, ...], field: str, model: ModelInfo, limits: Limits) -> None:
    check_limit(limits, "max_selected_tokens", len(token_ids), "selected tokens", field)
    check_vocabulary(max(token_ids), "a selected token", field, model)


def check_vocabulary(token: int, what: str, field: str, model: ModelInfo) -> None:
    """Raise `InvalidRequest` for a token id, the largest of some perhaps, that the model does not have."""
    if token >= model.vocab_size:
        raise InvalidRequest(f"{what} must be below the vocabulary of {model.vocab_size}", field=field)
