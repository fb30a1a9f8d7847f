"""Blocks of rows, by kind, the tokens before them, and the rows that a runner answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ferrum_rpc.core import RowBlock, RowKind, Rows, Span, SpanResult, Step, TokenArray
from ferrum_rpc.kv.tokens import count_tokens
from ferrum_rpc.sampling.masks import Masks
from ferrum_rpc.sampling.penalties import CountedTokens
from ferrum_rpc.sampling.rows import RowRequest, select_rows

token_rows = partial(RowBlock.of, RowKind.TOKENS)
top_token_rows = partial(RowBlock.of, RowKind.TOP_TOKENS)
selected_rows = partial(RowBlock.of, RowKind.SELECTED_TOKENS)
logit_rows = partial(RowBlock.of, RowKind.LOGITS)


def counted(history: TokenArray, position: int, counted_from: int = 0) -> CountedTokens:
    """The tokens before rows of which the first has ``position`` tokens of the ``history`` before it."""
    return CountedTokens(count_tokens(history[:position], counted_from), history[position:])


def columns_of(rows: Rows) -> Mapping[str, np.ndarray]:
    """Of its own rows in the block that they share with others'."""
    return rows.block.cut(rows.first, rows.first + rows.count).columns


def tokens_of(rows: Rows) -> list[int]:
    return columns_of(rows)["token_ids"].tolist()


def selected(table: Tensor, requests: Sequence[RowRequest], sampler: Any, masks: Masks | None = None) -> list[Rows]:
    """What requests for rows of these logits [R, V] get."""
    hidden = torch.arange(len(table), dtype=torch.float32)[:, None]
    masks = Masks(torch.device("cpu")) if masks is None else masks
    return select_rows(hidden, requests, lambda each: table[each[:, 0].long()].clone(), None, sampler, masks=masks)


def answered(runner: Any, *spans: Span) -> list[Mapping[str, np.ndarray]]:
    """A step of a `TorchRunner`: the columns of the rows of each span, in its order; of a span without rows none."""
    with runner.context():
        outcomes = runner.forward(Step(spans)).outcomes
    found = []
    for outcome in outcomes:
        assert isinstance(outcome, SpanResult), outcome
        found.append({} if outcome.rows is None else columns_of(outcome.rows))
    return found


def copy_sequence(source: Any, sequence: int, target: Any, number: int) -> None:
    """Make the sequence ``number`` of another `TorchRunner` of what one has of ``sequence``, by an export."""
    tokens = source.token_ids(sequence)
    target.begin_import(number, tokens, 0, 0, None)
    for layer, parts in enumerate(source.read_kv(sequence, 0, len(tokens), range(source.info.layers))):
        target.write_kv(number, 0, len(tokens), layer, parts)
    target.commit_import(number)
