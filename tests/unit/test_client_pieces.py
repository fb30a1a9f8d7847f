"""The pieces that a sequence was fed in, and those that rebuild it: for any history, and for what is left of it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ferrum_rpc.client.pieces import Piece, Pieces
from ferrum_rpc.core import Positions, Rows

EXACT, MOST = 4, 64


def spans(pieces: list[Piece]) -> list[tuple[int, int, int]]:
    return [tuple(each) for each in pieces]


def test_long_pieces_go_as_they_went_and_the_rest_in_short_ones():
    pieces = Pieces()
    at = 0
    for count in (10, 1, 1, 1, 4, 1, 6):
        pieces.fed(at, count, EXACT)
        at += count
    assert spans(pieces.plan(at, at, EXACT, MOST)) == [(0, 10, 10), (10, 14, 4), (14, 18, 4), (18, 24, 6)]


def test_a_piece_that_was_rolled_back_is_fed_as_long_as_it_was():
    pieces = Pieces()
    pieces.fed(0, 10, EXACT)
    pieces.fed(7, 1, EXACT)
    [long, short] = pieces.plan(8, 8, EXACT, MOST)
    assert (tuple(long), tuple(short)) == ((0, 7, 10), (7, 8, 1))
    assert long.tokens(range(20)) == [0, 1, 2, 3, 4, 5, 6, 6, 6, 6]


def test_of_a_piece_with_filler_tokens_the_rows_of_its_own_are_the_callers():
    piece, fed = Piece(4, 7, 10), Rows(block={}, first=20, count=10)
    assert piece.rows(fed, Positions.ALL) == Rows({}, 20, 3)
    assert piece.rows(fed, Positions.LAST) == Rows({}, 22, 1)


def test_calls_are_as_large_as_they_may_be_where_nothing_is_promised_or_was_in_the_cache():
    pieces = Pieces()
    pieces.fed(0, 10, 0)
    for known, exact in ((100, 0), (0, EXACT)):
        assert spans(pieces.plan(100, known, exact, MOST)) == [(0, 64, 64), (64, 100, 36)]


def test_a_branch_has_the_pieces_of_what_it_shares_and_changes_no_others():
    parent = Pieces()
    parent.fed(0, 10, EXACT)
    child = parent.upto(5)
    child.fed(5, 9, EXACT)
    assert spans(parent.plan(10, 10, EXACT, MOST)) == [(0, 10, 10)]
    assert spans(child.plan(14, 14, EXACT, MOST)) == [(0, 5, 10), (5, 14, 9)]


steps = st.lists(st.tuples(st.integers(0, 12), st.integers(1, 12)), min_size=1, max_size=30)


@given(steps, st.integers(0, 6), st.integers(12, 20))
def test_every_token_is_computed_in_a_span_of_the_kind_that_it_was(history, exact, most):
    """``kind[i]``: the span that computed token i, where it was long: where it began and how long it was."""
    pieces, kind = Pieces(), []
    for back, count in history:
        del kind[max(0, len(kind) - back) :]
        start = len(kind)
        pieces.fed(start, count, exact)
        kind += [(start, count) if 0 < exact < count else None] * count
    rebuilt: list[tuple[int, int] | None] = []
    for piece in pieces.plan(len(kind), len(kind), exact, most):
        assert piece.start == len(rebuilt) and 0 < piece.end - piece.start <= piece.fed <= most
        long = 0 < exact < piece.fed
        rebuilt += [(piece.start, piece.fed) if long else None] * (piece.end - piece.start)
    assert rebuilt == kind
