"""Blocks of rows, by kind."""

from __future__ import annotations

from functools import partial

from ferrum_rpc.core import RowBlock, RowKind

token_rows = partial(RowBlock.of, RowKind.TOKENS)
top_token_rows = partial(RowBlock.of, RowKind.TOP_TOKENS)
selected_rows = partial(RowBlock.of, RowKind.SELECTED_TOKENS)
logit_rows = partial(RowBlock.of, RowKind.LOGITS)
