"""The token ids that a sequence holds, committed with its length, and how often each of them occurs, for penalties.

Written by the commit of a step and by nothing else, so that a step that fails leaves them as they were; a roll-back
only lowers the length that they are read up to.

How often tokens occur is kept from one step to the next, so that a decode step counts one token. It is kept while every
step of the sequence requests penalties, in some 120 bytes for each distinct token.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ferrum_rpc.core import TokenArray, TokenCounts

_LEAST: Final = 16

FEW: Final = 64
"""Up to so many tokens are counted one by one, in 0.4 µs each; more together with all others, 200 µs for 2,000."""


def count_tokens(tokens: TokenArray, counted_from: int) -> TokenCounts:
    """The counts of ``tokens``, of which those from the position ``counted_from`` on count."""
    held = np.unique(tokens)
    counts = np.zeros((len(held), 2), np.int32)
    counts[:, 0] = held
    some, times = np.unique(tokens[counted_from:], return_counts=True)
    counts[np.searchsorted(held, some), 1] = times
    return counts


class _KeptCounts:
    """The counts of the first ``length`` ids of a sequence, and of tokens that were fed behind them. ``used``: whether
    they were read since the last commit."""

    __slots__ = ("_counts", "_end", "_fed", "_places", "_totals", "counted_from", "length", "used")

    def __init__(self, ids: TokenArray, counted_from: int) -> None:
        self.length = self._end = len(ids)
        self.counted_from, self.used = counted_from, False
        self._fed: list[int] = []
        self._counts = count_tokens(ids, counted_from)
        self._places = {token: place for place, token in enumerate(self._counts[:, 0].tolist())}
        self._totals: list[int] = np.unique(ids, return_counts=True)[1].tolist()

    def behind(self, ids: TokenArray, length: int, fed: list[int]) -> TokenCounts:
        """The counts of the first ``length`` of ``ids`` and of the tokens ``fed`` behind them, as a copy. Up to
        ``self.length`` the ids are what they were."""
        if self._fed and ids[self.length : length].tolist() == self._fed:  # they were committed
            self.length, self._fed = length, []
        elif length != self.length or self._fed:
            self.move_to(ids, length)
        for token in fed:
            self._add(token)
        self._fed = fed
        return self._counts[: len(self._totals)].copy()

    def move_to(self, ids: TokenArray, length: int) -> None:
        """Count the first ``length`` of ``ids`` and nothing behind them."""
        for token in reversed(self._fed):
            self._remove(token)
        for token in reversed(ids[length : self.length].tolist()):
            self._remove(token)
        for token in ids[self.length : length].tolist():
            self._add(token)
        self.length, self._fed = length, []

    def _add(self, token: int) -> None:
        place = self._places.get(token)
        if place is None:
            place = self._places[token] = len(self._totals)
            self._totals.append(0)
            if place == len(self._counts):
                self._counts = np.concatenate([self._counts, np.empty((place + _LEAST, 2), np.int32)])
            self._counts[place] = token, 0
        self._totals[place] += 1
        if self._end >= self.counted_from:
            self._counts[place, 1] += 1
        self._end += 1

    def _remove(self, token: int) -> None:
        """The last token."""
        self._end -= 1
        place = self._places[token]
        self._totals[place] -= 1
        if self._end >= self.counted_from:
            self._counts[place, 1] -= 1
        if not self._totals[place]:  # the last entry takes its place
            del self._places[token]
            total = self._totals.pop()
            if place < len(self._totals):
                self._totals[place] = total
                self._counts[place] = self._counts[len(self._totals)]
                self._places[int(self._counts[place, 0])] = place


class TokenHistory:
    """Token ids by position. How many of them count is the sequence's length, which is not kept here."""

    __slots__ = ("_ids", "_kept")

    def __init__(self, ids: TokenArray | None = None) -> None:
        self._ids = np.empty(_LEAST, np.int32) if ids is None else ids
        self._kept: _KeptCounts | None = None

    def write(self, start: int, tokens: TokenArray) -> None:
        """Put ``tokens`` at the positions ``start ..``; those before are there."""
        kept = self._kept
        if kept is not None:
            if kept.used and start >= kept.length:
                kept.used = False
            else:  # it was not read in this step, or, after a step that failed, what it counts is overwritten
                self._kept = None
        count, ids = len(tokens), self._ids
        end = start + count
        if end > len(ids):
            larger = np.empty(max(end, 2 * len(ids)), np.int32)
            larger[:start] = ids[:start]
            self._ids = ids = larger
        if count == 1:  # a decode: in 0.13 µs instead of 0.23
            ids[start] = tokens.item()
        else:
            ids[start:end] = tokens

    def upto(self, length: int) -> TokenArray:
        """A view of the first ``length`` ids, int32 [length], valid until the next `write`."""
        return self._ids[:length]

    def counts(self, length: int, counted_from: int, fed: TokenArray) -> TokenCounts:
        """How often the tokens occur among the first ``length`` ids and the tokens ``fed`` behind them; of those from
        the position ``counted_from`` on. Belongs to the caller."""
        if len(fed) > FEW:
            return count_tokens(np.concatenate([self._ids[:length], fed]), counted_from)
        kept = self._kept
        if kept is None or kept.counted_from != counted_from or abs(length - kept.length) > FEW:
            kept = self._kept = _KeptCounts(self._ids[:length], counted_from)
        kept.used = True
        return kept.behind(self._ids, length, fed.tolist())

    def fork(self, length: int) -> TokenHistory:
        """A copy of the first ``length`` ids."""
        return TokenHistory(self._ids[:length].copy())
