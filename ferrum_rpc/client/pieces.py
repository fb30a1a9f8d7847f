"""The pieces in which a sequence was fed, as far as they affect its last bits, and the pieces that rebuild it.

Spans of up to ``limits.exact_span_tokens`` tokens have the same bits as single decodes; longer ones need not. So only
the longer ones are recorded, and the tokens between them are fed again in spans of that many. A piece that was rolled
back is fed at its old length, with filler tokens at its end: earlier tokens do not attend to them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ferrum_rpc.core import Positions, Rows


class Piece(NamedTuple):
    """Tokens ``start .. end`` of a sequence, fed in one span of ``fed`` tokens."""

    start: int
    end: int
    fed: int

    @property
    def filled(self) -> bool:
        """Whether filler tokens replace some that were rolled back."""
        return self.fed > self.end - self.start

    def rows(self, rows: Rows, positions: Positions) -> Rows:
        """Of the rows of all fed tokens, the requested ones."""
        count = self.end - self.start
        if positions is Positions.ALL:
            return Rows(rows.block, rows.first, count)
        return Rows(rows.block, rows.first + count - 1, 1)

    def tokens(self, sequence: Sequence[int]) -> list[int]:
        """The tokens to feed, of a ``sequence``'s tokens."""
        return [*sequence[self.start : self.end], *([sequence[self.end - 1]] * (self.fed - (self.end - self.start)))]


class Pieces:
    """The long pieces of one sequence, in their order."""

    __slots__ = ("_pieces",)

    def __init__(self, pieces: Iterable[Piece] = ()) -> None:
        self._pieces = list(pieces)

    def cut(self, length: int) -> None:
        """Note that the sequence was rolled back to ``length``."""
        pieces = self._pieces
        while pieces and pieces[-1].start >= length:
            pieces.pop()
        if pieces and pieces[-1].end > length:
            pieces[-1] = pieces[-1]._replace(end=length)

    def fed(self, start: int, count: int, exact: int) -> None:
        """Note that ``count`` tokens were fed at ``start``, after all others. ``exact``: `limits.exact_span_tokens`, 0
        if pieces do not matter."""
        if self._pieces:
            self.cut(start)
        if 0 < exact < count:
            self._pieces.append(Piece(start, start + count, count))

    def upto(self, length: int) -> Pieces:
        """The pieces of the first ``length`` tokens."""
        copy = Pieces(self._pieces)
        copy.cut(length)
        return copy

    def span(self, start: int, count: int, known: int, exact: int) -> int:
        """How many of ``count`` tokens to feed at ``start`` in one span, if the first ``known`` of the sequence were in
        the cache before. 0: they are part of a longer span, or not exact."""
        if exact == 0 or start >= known:
            return count
        for piece in self._pieces:
            if piece.start == start:
                return piece.fed if piece.fed <= count else 0
            if piece.start > start:
                return min(count, exact, piece.start - start)
        return min(count, exact, known - start)

    def plan(self, length: int, known: int, exact: int, most: int) -> list[Piece]:
        """The pieces to feed ``length`` tokens again of which the first ``known`` were in the cache, at most ``most``
        tokens in a call. Tokens that were never there, and all tokens if nothing is guaranteed, are fed in pieces of
        that many."""
        known = min(length, known) if exact > 0 else 0
        found: list[Piece] = []
        at = 0
        for piece in (*self.upto(known)._pieces, Piece(known, known, 0)):
            found += _parts(at, piece.start, min(exact, most) or most)
            if piece.fed:
                found.append(piece) if piece.fed <= most else found.extend(_parts(piece.start, piece.end, most))
            at = piece.end
        return found + _parts(known, length, most)


@dataclass(slots=True)
class Lost:
    """The contents of a lost sequence, to be fed again: its ``tokens``, of which ``known`` were in the cache, the
    ``long`` pieces in which they were fed, and the ``pieces`` to feed now, ``done`` of which are fed."""

    tokens: list[int]
    known: int
    long: Pieces
    pieces: list[Piece] | None = None
    done: int = 0


def _parts(start: int, end: int, size: int) -> list[Piece]:
    cuts = [*range(start, end, size), end]
    return [Piece(a, b, b - a) for a, b in itertools.pairwise(cuts)]
