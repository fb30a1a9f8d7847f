"""Penalties of rows for the tokens before them, from counts of these tokens.

A row needs of its sequence only which tokens occur, and how often. The counts come with the first row of a request; a
row behind it has one token more than the row before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ferrum_rpc.core import Sample, TokenArray, TokenCounts


class Penalty(NamedTuple):
    """Penalties on a ``row`` of the logits for the tokens in ``counts`` (C order). ``repetition`` divides
    positive logits and multiplies others. Where a token counts, ``frequency`` times its count is subtracted, and then
    ``presence``."""

    row: int
    counts: TokenCounts
    repetition: float
    presence: float
    frequency: float


class CountedTokens(NamedTuple):
    """The tokens before the rows of a request: the ``counts`` of those before the token that its first row chooses, and
    the tokens ``following`` (int32 [rows - 1]), of which each row has one more than the row before it."""

    counts: TokenCounts
    following: TokenArray

    def penalties(self, kind: Sample, position: int, rows: range, first: int) -> Iterator[Penalty]:
        """Those of some ``rows`` of the request, which are the logits' rows from ``first`` on. ``position``: tokens
        before the one that row 0 chooses."""
        counts, given = self.counts, (kind.repetition_penalty, kind.presence_penalty, kind.frequency_penalty)
        for row in range(rows.stop):
            if row:
                counts = _with_one(counts, self.following[row - 1], position + row > kind.penalty_from)
            if row >= rows.start:
                yield Penalty(first + row - rows.start, counts, *given)


def _with_one(counts: TokenCounts, token: np.int32, counted: bool) -> TokenCounts:
    """``counts`` and one token more, as a copy."""
    [places] = (counts[:, 0] == token).nonzero()
    if not len(places):
        return np.concatenate([counts, np.array([[token, counted]], np.int32)])
    counts = counts.copy()
    counts[places[0], 1] += counted
    return counts
