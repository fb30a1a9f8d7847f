"""The geometry of a step, in integers on the host: which positions each row attends to, and where K and V are.

The runner builds one `BatchGeometry` per step from block tables. It is all that an attention backend's ``plan`` reads.
A step is S spans with T tokens in total, packed one after the other; prefill and decode are not distinguished.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

_NO_BLOCKS: Final = np.zeros(0, dtype=np.int32)


class BatchGeometry(NamedTuple):
    """One step's spans. All arrays live on the host and are read-only by convention.

    block_size   slots of a block
    by_span      int32 [4, S+1]: ``query_start``, ``starts``, ``lengths`` and ``table_start``, a row each
    blocks       int32: block ids of all spans, one after the other, of each ``ceil(length / block_size)``
    slots        int64 [T]: where each token's K and V are written
    positions    int64 [T]: each token's position in its sequence
    """

    block_size: int
    by_span: Int32Array
    blocks: Int32Array
    slots: Int64Array
    positions: Int64Array

    @classmethod
    def build(
        cls, block_size: int, starts: Sequence[int], counts: Sequence[int], tables: Sequence[Int32Array]
    ) -> BatchGeometry:
        """The geometry of spans of ``counts[s]`` tokens after ``starts[s]`` cached ones, over ``tables[s]``.

        Raises ValueError if a span is empty or its table is too short for it.
        """
        query_start, table_start, lengths, used = [0], [0], [], []
        tokens = blocks_used = 0
        for start, count, table in zip(starts, counts, tables, strict=True):
            length = start + count
            needed = -(-length // block_size)
            if start < 0 or count < 1:
                raise ValueError("a span must have at least one token and a start of at least 0")
            if (there := len(table)) < needed:
                raise ValueError("a block table is shorter than its sequence")
            query_start.append(tokens := tokens + count)
            table_start.append(blocks_used := blocks_used + needed)
            lengths.append(length)
            used.append(table if there == needed else table[:needed])
        by_span = np.array([*query_start, *starts, 0, *lengths, 0, *table_start], dtype=np.int32).reshape(4, -1)
        slots, positions = np.empty((2, tokens), dtype=np.int64)
        position_at, slot_at = positions.data, slots.data
        for row, start, length, table in zip(query_start, starts, lengths, used, strict=False):
            if length == start + 1:  # nearly every span: 0.2 µs; numpy takes 8, and 0.1 to set each element
                position_at[row] = start
                slot_at[row] = table.item(-1) * block_size + start % block_size
            else:
                rows = slice(row, row + length - start)
                positions[rows] = own = np.arange(start, length)
                slots[rows] = table[own // block_size] * np.int64(block_size) + own % block_size
        blocks = used[0] if len(used) == 1 else np.concatenate((_NO_BLOCKS, *used))
        return cls(block_size, by_span, blocks, slots, positions)

    @property
    def query_start(self) -> Int32Array:
        """int32 [S+1]: span s owns rows ``query_start[s] .. query_start[s+1]`` of the packed tokens."""
        return self.by_span[0, :]

    @property
    def starts(self) -> Int32Array:
        """int32 [S]: tokens of the sequence that are cached before the span."""
        return self.by_span[1, :-1]

    @property
    def lengths(self) -> Int32Array:
        """int32 [S]: tokens of the sequence once the span is written."""
        return self.by_span[2, :-1]

    @property
    def table_start(self) -> Int32Array:
        """int32 [S+1]: span s reads through ``blocks[table_start[s] : table_start[s+1]]``."""
        return self.by_span[3, :]

    @property
    def spans(self) -> int:
        """S, the number of spans."""
        return len(self.by_span[0, :]) - 1

    @property
    def tokens(self) -> int:
        """T, the number of packed tokens."""
        return self.positions.size
