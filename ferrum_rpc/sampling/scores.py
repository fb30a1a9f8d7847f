"""Log-probabilities: those returned with a sampled token, and scores of given tokens.

All are of the row as the model computed it, however the token was chosen.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ferrum_rpc.core import RowLogprobs, TokenArray
from ferrum_rpc.sampling.draw import Sampler
from ferrum_rpc.sampling.transfer import to_device

Columns = dict[str, Tensor]
"""Columns of some rows, by their names in `core.RowKind`, on the device."""


class Scored:
    """The given tokens of some rows, in order, in place of `rows.SampledRows`."""

    __slots__ = ("_tokens",)

    def __init__(self, tokens: Tensor) -> None:
        self._tokens = tokens

    @classmethod
    def of(cls, tokens: Sequence[TokenArray], device: torch.device) -> Scored:
        """Those of several requests."""
        return cls(to_device(torch.from_numpy(np.concatenate(tokens).astype(np.int64)), device))

    def between(self, first: int, last: int) -> Scored:
        """Those of the rows ``first .. last``."""
        return Scored(self._tokens[first:last])

    def tokens(self, logits: Tensor) -> Tensor:
        """One for each row of ``logits``, int64 [r]."""
        return self._tokens


def token_columns(
    logits: Tensor, tokens: Tensor | None, logprob: bool, logprobs: RowLogprobs | None, sampler: Sampler
) -> Columns:
    """The ``tokens`` int64 [r] (None: the argmax) of float32 ``logits`` [r, V], their log-probabilities if
    ``logprob`` is set, and the additional ``logprobs``. One pass finds the best tokens, one the logsumexp."""
    if not logprob and logprobs is None:
        return {"token_ids": sampler.argmax(logits) if tokens is None else tokens}
    top_k, token_ids = (0, ()) if logprobs is None else (logprobs.top_k, logprobs.token_ids)
    best = sampler.best(logits, max(top_k, int(tokens is None)))
    columns = {"token_ids": best.token_ids[:, 0] if tokens is None else tokens}
    logsumexp = best.logsumexp[:, None]
    if logprob:
        chosen = best.logits[:, :1] if tokens is None else sampler.at(logits, tokens[:, None])
        columns["logprobs"] = (chosen - logsumexp).squeeze(-1)
    if top_k:
        columns["top_token_ids"], columns["top_logprobs"] = best.token_ids, best.logits - logsumexp
    if token_ids:
        columns["selected_logprobs"] = select_tokens(logits, token_ids, sampler) - logsumexp
    return columns


def select_tokens(logits: Tensor, token_ids: Sequence[int], sampler: Sampler) -> Tensor:
    """Those of ``logits`` [r, V] of the given tokens, [r, n]."""
    tokens = to_device(torch.tensor(token_ids, dtype=torch.int64), logits.device)
    return sampler.at(logits, tokens.expand(len(logits), -1))
