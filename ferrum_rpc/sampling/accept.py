"""Speculative decoding's verification: which tokens of a draft stay, and the token behind them.

Each row of [last, d0 … dN-1] chooses a token, and the draft stays up to the first of its tokens that its row did not
choose. So a row need only choose right, and what was accepted can be read from the tokens alone.

- Greedy: the arg-max. The emitted tokens are those of greedy decoding.
- A draft without probabilities is a certain guess: the row draws as it would without one, and draws ``d`` with
  probability p(d), another token with its probability of the others. So the tokens of a seed are the same with any
  draft, and with none.
- A draft that was drawn from probabilities q: ``d`` with probability min(1, p(d) / q(d)), else a token drawn from
  max(0, p - q). That is exact rejection sampling (Leviathan et al., 2023; Chen et al., 2023), and p is what the filters
  leave. The two numbers are of two streams of the row's seed and position.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ferrum_rpc.core import Accept, RowBlock, Rows, TokenArray
from ferrum_rpc.sampling.draw import ACCEPT, TOKEN, Sampler, SamplingParams, uniforms
from ferrum_rpc.sampling.transfer import to_device

ROWS_AT_ONCE: Final = 32
"""A row of 152k tokens takes some 5 MB on the way."""


class Proposal(NamedTuple):
    """A token of a draft, and the candidates (uint32 [k]) that it was drawn from, with their probabilities
    (float32 [k])."""

    token: int
    token_ids: npt.NDArray[np.uint32]
    probabilities: npt.NDArray[np.float32]


class Draft(NamedTuple):
    """The N tokens of a draft, int32 [N], and what they were drawn from, uint32 and float32 [N, k]."""

    tokens: TokenArray
    token_ids: npt.NDArray[np.uint32]
    probabilities: npt.NDArray[np.float32]

    @classmethod
    def of(cls, kind: Accept, tokens: TokenArray) -> Draft | None:
        """That of an item of ``tokens``; None where it only has to be compared."""
        if kind.sampling is None or not kind.candidates:
            return None
        return cls(tokens[1:], kind.draft_token_ids, kind.draft_probabilities)

    def proposals(self) -> Iterator[Proposal]:
        """Row by row. The last row of the item has none."""
        return map(Proposal, self.tokens.tolist(), self.token_ids, self.probabilities)


def verify(
    logits: Tensor, params: SamplingParams, proposals: Sequence[tuple[int, Proposal]], tokens: Tensor, sampler: Sampler
) -> None:
    """Choose the tokens of the rows of ``proposals``, into ``tokens`` (int64 [R]). ``logits`` float32 [R, V] and
    ``params`` [R] are those of all rows."""
    for first in range(0, len(proposals), ROWS_AT_ONCE):
        part = proposals[first : first + ROWS_AT_ONCE]
        rows = np.array([row for row, _ in part])
        where = to_device(torch.from_numpy(rows), logits.device)
        tokens[where] = _verified(logits[where], params[rows], [proposal for _, proposal in part], sampler)


def _verified(logits: Tensor, params: SamplingParams, proposals: Sequence[Proposal], sampler: Sampler) -> Tensor:
    """The token of each row, int64 [r]."""
    on_host = logits.device.type == "cpu"
    max_candidates = max(len(each.token_ids) for each in proposals)
    ids = np.zeros((len(proposals), max_candidates), np.int64)
    probabilities = np.zeros((len(proposals), max_candidates), np.float64)
    for row, (_, row_ids, row_probabilities) in enumerate(proposals):
        ids[row, : len(row_ids)], probabilities[row, : len(row_ids)] = row_ids, row_probabilities
    tokens = np.array([each.token for each in proposals])
    of_draft = np.where(ids == tokens[:, None], probabilities, 0).max(axis=-1)
    chances = [uniforms(params["seed"], params["position"], stream) for stream in (ACCEPT, TOKEN)]
    on_device = [
        to_device(torch.from_numpy(each), logits.device) for each in (ids, probabilities, tokens, of_draft, *chances)
    ]
    candidates, drafted, token, odds, luck, chance = on_device
    weights, plain, total = sampler.filtered(logits, params)
    held = sampler.at(weights, token[:, None]).squeeze(-1) > luck * odds * total
    best = sampler.argmax(logits)
    chosen = token.where(plain, best)
    # On a GPU the host must not wait for how many are rejected.
    rejected = (~held & plain).nonzero().squeeze(-1) if on_host else torch.arange(len(token), device=logits.device)
    if len(rejected):
        left = weights[rejected].to(torch.float64)
        sampler.add(left, candidates[rejected], (-drafted * total[:, None])[rejected])
        # where nothing is left p and q differ by rounding
        sampled = sampler.picked(left.clamp_(min=0), chance[rejected], best[rejected])
        chosen[rejected] = chosen[rejected].where(held[rejected] | ~plain[rejected], sampled)
    return chosen


def accepted(
    fed: Sequence[TokenArray], rows: Sequence[Rows | None], drafts: Sequence[int]
) -> tuple[dict[int, int], list[Rows | None]]:
    """Of the ``drafts`` among the spans of a step, how many of the tokens that were ``fed`` stay; and all ``rows``,
    those of rejected tokens being gone from their blocks."""
    kept: dict[int, int] = {}
    left = list(rows)
    for at in drafts:
        all_rows = rows[at]
        assert all_rows is not None  # noqa: S101 - a draft has rows
        block, first, count = all_rows.block, all_rows.first, all_rows.count
        wrong = np.flatnonzero(block["token_ids"][first : first + count - 1] != fed[at][1:])
        kept[at] = int(wrong[0]) + 1 if wrong.size else count
        left[at] = Rows(block, first, kept[at])
    for block in {id(each.block): each.block for each in (left[at] for at in drafts) if each is not None}.values():
        members = [(at, each) for at, each in enumerate(left) if each is not None and each.block is block]
        places = np.concatenate([np.arange(each.first, each.first + each.count) for _, each in members])
        packed, first = RowBlock(block.kind, {name: column[places] for name, column in block.columns.items()}), 0
        for at, each in members:
            left[at] = Rows(packed, first, each.count)
            first += each.count
    return kept, left
