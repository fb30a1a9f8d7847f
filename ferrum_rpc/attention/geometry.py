"""Who attends to what in one step, in integers on the host.

The runner builds one `BatchGeometry` per step from block tables; every attention backend reads it in its ``plan`` and
nothing else: not sequences, not handles, not the pool. There is no prefill and no decode here, only spans of S
sequences with T tokens in total, packed one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

FEW_TOKENS: Final = 128
"""Up to so many tokens a step is planned with Python's integers: a call of numpy costs what ten of their operations do,
and many times that where the model has driven it out of the caches since. A lone decode step takes 3 us instead of 25,
one of 64 sequences 120 us instead of 220."""


_LENGTHS: Final = "starts, counts and tables differ in length"
_EMPTY: Final = "a span needs at least one token and a start that is not negative"
_SHORT: Final = "a block table is shorter than its sequence"


class BatchGeometry(NamedTuple):
    """One step's spans. All arrays live on the host and are read-only by convention.

    block_size   slots of a block
    query_start  int32 [S+1]: span s owns rows ``query_start[s] .. query_start[s+1]`` of the packed tokens
    starts       int32 [S]: tokens of the sequence that are cached before the span
    lengths      int32 [S]: tokens of the sequence once the span is written (``starts`` + the span's tokens)
    tables       S arrays, int32: block ids of the sequence, at least ``ceil(lengths / block_size)`` of them
    entries      int32: all tables, one after the other
    table_start  int32 [S+1]: span s's table is ``entries[table_start[s] : table_start[s+1]]``
    slots        int64 [T]: where each token's K and V are written
    positions    int64 [T]: each token's position in its sequence
    by_span      of few tokens: query_start, table_start, starts and lengths are views of it, in this order
    """

    block_size: int
    query_start: Int32Array
    starts: Int32Array
    lengths: Int32Array
    tables: Sequence[Int32Array]
    entries: Int32Array
    table_start: Int32Array
    slots: Int64Array
    positions: Int64Array
    by_span: Int32Array | None = None

    @classmethod
    def build(
        cls, block_size: int, starts: Sequence[int], counts: Sequence[int], tables: Sequence[Int32Array]
    ) -> BatchGeometry:
        """The geometry of spans of ``counts[s]`` tokens after ``starts[s]`` cached ones, over ``tables[s]``.

        Raises ValueError where a span is empty or its table does not reach its end.
        """
        if len(counts) <= FEW_TOKENS and 0 < sum(counts) <= FEW_TOKENS:
            return cls._build_few(block_size, starts, counts, tables)
        cached = np.asarray(starts, dtype=np.int32)
        tokens = np.asarray(counts, dtype=np.int32)
        lengths = cached + tokens
        table_start = np.zeros(len(tables) + 1, dtype=np.int32)
        np.cumsum([len(table) for table in tables], out=table_start[1:])
        sizes = np.diff(table_start)
        if not len(cached) == len(tokens) == len(sizes):
            raise ValueError(_LENGTHS)
        if (tokens < 1).any() or (cached < 0).any():
            raise ValueError(_EMPTY)
        if (sizes.astype(np.int64) * block_size < lengths).any():
            raise ValueError(_SHORT)
        query_start = np.zeros(len(tokens) + 1, dtype=np.int32)
        np.cumsum(tokens, out=query_start[1:])
        # position of row r = r - (first row of its span - tokens cached before it)
        positions = np.arange(query_start[-1], dtype=np.int64) - np.repeat(query_start[:-1] - cached, tokens)
        entries = np.concatenate(tables) if tables else np.zeros(0, dtype=np.int32)
        blocks = entries[np.repeat(table_start[:-1], tokens) + positions // block_size].astype(np.int64)
        slots = blocks * block_size + positions % block_size
        return cls(block_size, query_start, cached, lengths, tables, entries, table_start, slots, positions)

    @classmethod
    def _build_few(
        cls, block_size: int, starts: Sequence[int], counts: Sequence[int], tables: Sequence[Int32Array]
    ) -> BatchGeometry:
        """As `build`, by loops over tokens."""
        spans = len(counts)
        if not len(starts) == spans == len(tables):
            raise ValueError(_LENGTHS)
        if min(counts) < 1 or min(starts) < 0:
            raise ValueError(_EMPTY)
        lengths = [start + count for start, count in zip(starts, counts, strict=True)]
        sizes = [len(table) for table in tables]
        if any(size * block_size < length for size, length in zip(sizes, lengths, strict=True)):
            raise ValueError(_SHORT)
        query_start, table_start = accumulate(counts, initial=0), accumulate(sizes, initial=0)
        positions, slots = [], []
        for start, length, table in zip(starts, lengths, tables, strict=True):
            for position in range(start, length) if length > start + 1 else (start,):
                positions.append(position)
                slots.append(table.item(position // block_size) * block_size + position % block_size)
        by_span = np.array([*query_start, *table_start, *starts, *lengths], dtype=np.int32)
        return cls(
            block_size,
            by_span[: spans + 1],
            by_span[2 * spans + 2 : 3 * spans + 2],
            by_span[3 * spans + 2 :],
            tables,
            tables[0] if spans == 1 else np.concatenate(tables),
            by_span[spans + 1 : 2 * spans + 2],
            np.array(slots, dtype=np.int64),
            np.array(positions, dtype=np.int64),
            by_span,
        )

    @property
    def addresses(self) -> tuple[int, int, int, int, int]:
        """Where ``query_start``, ``starts``, ``lengths``, ``table_start`` and ``entries`` lie, for kernels in C. numpy
        takes 1 us to tell where one array is."""
        entries = self.entries.ctypes.data
        if self.by_span is None:
            arrays = (self.query_start, self.starts, self.lengths, self.table_start)
            query_start, starts, lengths, table_start = (each.ctypes.data for each in arrays)
            return query_start, starts, lengths, table_start, entries
        first, size, spans = self.by_span.ctypes.data, self.by_span.itemsize, len(self.starts)
        starts = first + 2 * (spans + 1) * size
        return first, starts, starts + spans * size, first + (spans + 1) * size, entries

    @property
    def spans(self) -> int:
        """S, the number of spans."""
        return len(self.starts)

    @property
    def tokens(self) -> int:
        """T, the number of packed tokens."""
        return int(self.query_start[-1])

    def check(self) -> None:
        """Raise AssertionError unless every array agrees with every other."""
        counts = np.diff(self.query_start)
        assert self.query_start[0] == 0 and (counts > 0).all()  # noqa: S101
        assert (self.starts + counts == self.lengths).all()  # noqa: S101
        for span, table in enumerate(self.tables):
            rows = slice(self.query_start[span], self.query_start[span + 1])
            positions = np.arange(self.starts[span], self.lengths[span])
            assert (self.positions[rows] == positions).all()  # noqa: S101
            blocks = table[positions // self.block_size].astype(np.int64)
            assert (self.slots[rows] == blocks * self.block_size + positions % self.block_size).all()  # noqa: S101
