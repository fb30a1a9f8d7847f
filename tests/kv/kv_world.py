"""A store of plain integers behind a `KvManager`, and what every sequence should contain.

Each written token is another number, so content that ends up in the wrong place is always noticed. Free blocks are
filled with garbage as often as a test likes: whatever reads them is noticed too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ferrum_rpc.kv.manager import KvManager
from ferrum_rpc.kv.sequence import Reservation
from ferrum_rpc.kv.table import slots_for

GARBAGE = -1


@dataclass(eq=False)
class Write:
    """A reservation, the tokens to be written, and what the forward pass has done so far."""

    reservation: Reservation
    tokens: list[int]
    base: list[int]
    saved: np.ndarray | None = None

    @property
    def has_run(self) -> bool:
        return self.saved is not None


class World:
    def __init__(self, num_blocks: int, block_size: int, order: list[int] | None = None) -> None:
        self.kv = KvManager(num_blocks, block_size, order)
        self.content = np.full(num_blocks * block_size, GARBAGE, dtype=np.int64)
        self.tokens: dict[int, list[int]] = {}
        self._next_token = 0

    # --- a step -----------------------------------------------------------------------------------------------------

    def reserve(  # noqa: PLR0917
        self,
        sequence: int,
        start: int,
        count: int,
        create: bool = False,
        ahead: int = 0,
        hold: int = 0,
        parent: int | None = None,
    ) -> Write:
        base = self.tokens.get(sequence if parent is None else parent, [])[:start]
        reservation = self.kv.reserve(sequence, start, count, create, ahead=ahead, hold=hold, parent=parent)
        assert (reservation.sequence, reservation.start, reservation.end) == (sequence, start, start + count)
        assert reservation.table.dtype == np.int32 and len(reservation.table) == -(-(start + count) // self.size)
        first = self._next_token
        self._next_token += count
        return Write(reservation, list(range(first, first + count)), base)

    def run(self, *writes: Write) -> None:
        """What the runner does for one step: all copies, all saves, then the forward pass."""
        for source, target in [pair for write in writes for pair in write.reservation.copies]:
            there, here = self._block(source), self._block(target)
            self.content[here] = self.content[there]
        for write in writes:
            write.saved = self.content[write.reservation.overwritten]
        for write in writes:
            r = write.reservation
            self.content[slots_for(r.table, r.start, r.end, self.size)] = write.tokens
        for write in writes:
            self.check_forward(write)

    def check_forward(self, write: Write) -> None:
        """The forward pass reads the old tokens below ``start``, then the new ones."""
        r = write.reservation
        assert self._read(r.table, r.end) == write.base + write.tokens

    def commit(self, write: Write, kept: int | None = None) -> None:
        """Of what was written the first ``kept`` tokens stay."""
        r, tokens = write.reservation, write.tokens[:kept]
        assert self.kv.commit(r, np.array(tokens, np.int32)) == r.start + len(tokens)
        self.tokens[r.sequence] = write.base + tokens

    def rollback(self, write: Write) -> None:
        if write.saved is not None:
            self.content[write.reservation.overwritten] = write.saved
        self.kv.rollback(write.reservation)

    def write(self, sequence: int, count: int, start: int | None = None, ahead: int = 0) -> Reservation:
        """Reserve, run and commit one span; the sequence is made if need be. Returns the closed reservation."""
        create = sequence not in self.tokens
        start = len(self.tokens.get(sequence, [])) if start is None else start
        write = self.reserve(sequence, start, count, create, ahead)
        self.run(write)
        self.commit(write)
        return write.reservation

    # --- between steps ----------------------------------------------------------------------------------------------

    def fork(self, parent: int, child: int, at: int | None = None) -> None:
        self.kv.fork(parent, child, at)
        self.tokens[child] = self.tokens[parent][:at]

    def truncate(self, sequence: int, length: int) -> None:
        self.kv.truncate(sequence, length)
        del self.tokens[sequence][length:]

    def release(self, sequence: int) -> None:
        self.kv.release(sequence)
        del self.tokens[sequence]

    # --- looking ----------------------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        return self.kv.block_size

    def blocks(self, sequence: int) -> list[int]:
        table = self.kv._sequences[sequence].table
        return table.view(len(table)).tolist()

    def spares(self, sequence: int) -> list[int]:
        return list(self.kv._sequences[sequence].spares)

    def check(self, pinned: set[int] | frozenset[int] = frozenset()) -> None:
        """The books add up, free slots are garbage, and every sequence that is not ``pinned`` reads as it should."""
        self.kv.check()
        for block in self.kv._pool._free:
            self.content[self._block(block)] = GARBAGE
        if not pinned:
            self.content[~self.kv.owned_slots_mask()] = GARBAGE
        for sequence, tokens in self.tokens.items():
            if sequence in pinned:
                continue
            assert self.kv.length(sequence) == len(tokens)
            assert self.kv.tokens(sequence).tolist() == tokens
            assert self._read(np.array(self.blocks(sequence), dtype=np.int32), len(tokens)) == tokens

    def _block(self, block: int) -> slice:
        return slice(block * self.size, (block + 1) * self.size)

    def _read(self, table: np.ndarray, length: int) -> list[int]:
        return [int(self.content[int(table[i // self.size]) * self.size + i % self.size]) for i in range(length)]


def everything(kv: KvManager) -> dict[str, object]:
    """The whole inner state as plain values: equal before and after whatever must leave no trace."""
    return {
        "free": list(kv._pool._free),
        "references": kv._pool._references.tolist(),
        "sequences": {
            sequence: (
                state.table.view(len(state.table)).tolist(),
                state.length,
                list(state.spares),
                state.promised_from,
                state.promised_tokens,
                state.open is None,
            )
            for sequence, state in kv._sequences.items()
        },
    }
