"""The largest of each row, in an order that knows no ties: falling logit, then rising id."""

from __future__ import annotations

import torch
from torch import Tensor


def top_tokens(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of float32 [R, V] by falling logit, then rising id: values [R, k] and ids int64 [R, k]."""
    return top_tokens_sorted(logits, k) if logits.device.type == "cpu" else top_tokens_queued(logits, k)


def top_tokens_sorted(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`top_tokens` where looking at the candidates does not wait for a device.

    ``torch.topk`` breaks ties as it likes. Ties are the rule in 16-bit models, so the exact order must be cheap: the k
    candidates are sorted, stably, by id and then by value; only a row whose boundary value goes on beyond them is
    scanned for the lowest ids that have it.
    """
    vocabulary = logits.shape[-1]
    values, ids = logits.topk(min(k + 1, vocabulary), dim=-1)
    if k < vocabulary:
        open_rows = (values[:, k] == values[:, k - 1]).nonzero().squeeze(1).tolist()
        values, ids = values[:, :k].contiguous(), ids[:, :k].contiguous()
        for row in open_rows:
            at_boundary = values[row] == values[row, -1]
            ids[row, at_boundary] = (logits[row] == values[row, -1]).nonzero().squeeze(1)[: int(at_boundary.sum())]
    ids = ids.sort(dim=-1).values
    values, by_value = logits.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, by_value)


def top_tokens_queued(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`top_tokens_sorted`, bit for bit but for NaN, in a number of launches that does not depend on what is in
    ``logits``: the host need not look, so that a GPU's queue goes on.

    A logit's bits, as an integer that orders as the logits do, stand above the id counted from the end: 64-bit keys
    without ties, of which the k largest are taken.
    """
    vocabulary = logits.shape[-1]
    bits = (logits + 0.0).view(torch.int32)  # -0.0 equals 0.0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    last = vocabulary - 1
    keys = ordered * (1 << 32) + torch.arange(last, -1, -1, device=logits.device)
    ids = last - (keys.topk(k, dim=-1).values & 0xFFFFFFFF)
    return logits.gather(-1, ids), ids
