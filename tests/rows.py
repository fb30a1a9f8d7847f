"""Blocks of rows, by kind, and the tokens before them."""

from __future__ import annotations

from functools import partial

from ferrum_rpc.core import RowBlock, RowKind, TokenArray
from ferrum_rpc.kv.tokens import count_tokens
from ferrum_rpc.sampling.penalties import CountedTokens

token_rows = partial(RowBlock.of, RowKind.TOKENS)
top_token_rows = partial(RowBlock.of, RowKind.TOP_TOKENS)
selected_rows = partial(RowBlock.of, RowKind.SELECTED_TOKENS)
logit_rows = partial(RowBlock.of, RowKind.LOGITS)


def counted(history: TokenArray, position: int, counted_from: int = 0) -> CountedTokens:
    """The tokens before rows of which the first has ``position`` tokens of the ``history`` before it."""
    return CountedTokens(count_tokens(history[:position], counted_from), history[position:])
