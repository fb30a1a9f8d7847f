"""A store of plain integers behind a `KvManager`, and what every sequence should contain.

What a slot holds is another number for each salt and each row of tokens up to there, so content that ends up in the
wrong place is always noticed; sequences that do not use the prefix cache have each a salt of their own. Each token is
another one too, unless a world has an ``alphabet``. Free blocks are filled with garbage as often as a test likes:
whatever reads them is noticed too.

What a caller imports are numbers that nobody computes, and what is computed behind them is another number than the
computed one of the same tokens: no sequence of another caller may ever have it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ferrum_rpc.core import PrefixUse
from ferrum_rpc.errors import KvBlocksExhausted
from ferrum_rpc.kv.manager import KvManager
from ferrum_rpc.kv.sequence import Reservation
from ferrum_rpc.kv.table import slots_for
from ferrum_rpc.kv.windows import Window
from tests.support.inside import free_list, idle_blocks, kept_blocks, pool_of, references, sequences, table_of

GARBAGE = -1
HOG = 99
"""A sequence that takes what is left."""


@dataclass(eq=False)
class Write:
    """A reservation, the tokens to be written, and what the forward pass has done so far. ``content``: of all
    positions, once it has run; ``imported``: what it writes is no forward pass's; ``behind``: the open one of its
    sequence, behind which it writes."""

    reservation: Reservation
    tokens: list[int]
    base: list[int]
    imported: bool = False
    content: list[int] = field(default_factory=list)
    saved: np.ndarray | None = None
    behind: Write | None = None

    @property
    def has_run(self) -> bool:
        return self.saved is not None


class DictTier:
    """A second tier that forgets nothing."""

    def __init__(self) -> None:
        self.there: dict[bytes, bytes] = {}

    def read(self, hashed: bytes) -> bytes | None:
        return self.there.get(hashed)

    def hashes(self) -> list[bytes]:
        return list(self.there)

    def __contains__(self, hashed: bytes) -> bool:
        return hashed in self.there


def owned_slots(kv: KvManager) -> npt.NDArray[np.bool_]:
    """Which slots hold a committed token of some sequence or are published, bool [num_blocks * block_size]. Not while
    a reservation is open: its sequence then owns its old slots and its new ones."""
    size = kv.block_size
    owned = np.zeros(pool_of(kv).num_blocks * size, dtype=np.bool_)
    owned.reshape(-1, size)[kv.prefixes.published()] = True
    for state in sequences(kv).values():
        assert state.open is None
        owned[slots_for(state.table.view(len(state.table)), 0, state.length, size)] = True
    return owned


class World:
    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        order: list[int] | None = None,
        alphabet: int | None = None,
        *,
        tier: bool = False,
        window: Window | None = None,
    ) -> None:
        self.kv = KvManager(num_blocks, block_size, order, window=window)
        self.tier = DictTier() if tier else None
        if self.tier is not None:
            self.kv.prefixes.tier = self.tier
        self.content = np.full(num_blocks * block_size, GARBAGE, dtype=np.int64)
        self.tokens: dict[int, list[int]] = {}
        self._next_token = 0
        self._alphabet = alphabet
        self.salts: dict[int, object] = {}
        self.callers: dict[int, bytes] = {}
        self.contents: dict[int, list[int]] = {}
        self._numbers: dict[object, int] = {}
        self.made: list[tuple[bytes, object, tuple[int, ...]]] = []
        """By number: the caller that imported it or what it was computed from (b"": none), the salt, and the tokens."""
        self.cached = 0
        """Tokens that were found in the prefix cache."""

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
        prefix: PrefixUse | None = None,
        findable: int | None = None,
        tokens: list[int] | None = None,
    ) -> Write:
        """``findable``: of how many of the tokens no row is wanted; None: of all but the last. ``tokens``: those that
        are to be written; None: others."""
        base = self.tokens.get(sequence if parent is None else parent, [])[:start]
        tokens = self.draw(count) if tokens is None else tokens
        imported = create and prefix is not None and prefix.imported_from is not None
        most = count if imported else count - 1 if findable is None else findable
        reservation = self.kv.reserve(
            sequence,
            start,
            count,
            create,
            ahead=ahead,
            hold=hold,
            parent=parent,
            prefix=prefix,
            prompt=np.array(tokens[:most], np.int32) if most > 0 else None,
        )
        if create:
            own = ("own", sequence) if prefix is None else prefix.salt
            self.salts[sequence] = own if parent is None else self.salts[parent]
            self.callers[sequence] = b"" if prefix is None else prefix.caller
            if parent is not None:
                self.callers[sequence] = self.callers[parent]
                self.contents[sequence] = self.contents[parent][:start]
        assert 0 <= reservation.cached <= max(0, most)
        self.cached += reservation.cached
        assert (reservation.sequence, reservation.start, reservation.end) == (sequence, start, start + count)
        assert reservation.table.dtype == np.int32 and len(reservation.table) == -(-(start + count) // self.size)
        return Write(reservation, tokens, base, imported)

    def reserve_next(self, write: Write) -> Write:
        """One more token behind an open write."""
        reservation, end = self.kv.reserve_next(write.reservation.sequence), write.reservation.end
        assert (reservation.start, reservation.end) == (end, end + 1)
        assert len(reservation.table) == -(-(end + 1) // self.size) and not len(reservation.overwritten)
        return Write(reservation, self.draw(1), write.base + write.tokens, behind=write)

    def fetch(self, sequence: int, tokens: list[int], prefix: PrefixUse | None, most: int) -> None:
        """What the runner does before a step that is to write ``tokens`` behind what is there."""
        start = len(self.tokens.get(sequence, []))
        self.take_fetched(self.kv.fetch(sequence, start, np.array(tokens, np.int32), prefix, most), most)

    def take_fetched(self, fetched: list[tuple[int, bytes]], most: int) -> None:
        """Write what was read of the tier, at most so many blocks."""
        assert len(fetched) <= most
        self.save_leaving()
        for block, content in fetched:
            self.content[self.block_slots(block)] = np.frombuffer(content, np.int64)

    def draw(self, count: int) -> list[int]:
        first = self._next_token
        self._next_token += count
        tokens = list(range(first, first + count))
        if self._alphabet is None:
            return tokens
        return [(token * 40503 >> 7) % self._alphabet for token in tokens]

    def run(self, *writes: Write) -> None:
        """What the runner does for one step: all copies, all saves, then the forward pass."""
        self.save_leaving()
        for source, target in [pair for write in writes for pair in write.reservation.copies]:
            there, here = self.block_slots(source), self.block_slots(target)
            self.content[here] = self.content[there]
        for write in writes:
            write.saved = self.content[write.reservation.overwritten]
        for write in writes:
            r = write.reservation
            written, whole = r.start + r.cached, r.start // self.size * self.size
            content = self._read(r.table, written)
            behind = write.behind
            before = (self.contents.get(r.sequence, []) if behind is None else behind.content)[: r.start]
            assert content[:whole] == before[:whole] and (r.cached or content == before)
            self._check_allowed(r.sequence, (write.base + write.tokens)[:written], content)
            write.content = self._followed(r.sequence, content, write)
            self.content[slots_for(r.table, written, r.end, self.size)] = write.content[written:]
        for write in writes:
            self.check_forward(write)

    def save_leaving(self) -> None:
        """What had to leave the prefix cache goes to the tier, before anything is written."""
        for block, hashed in self.kv.prefixes.take_leaving():
            assert self.tier is not None
            self.tier.there[hashed] = self.content[self.block_slots(block)].tobytes()
            self.kv.prefixes.note_tier(hashed, there=True)

    def check_forward(self, write: Write) -> None:
        """The forward pass reads the old tokens below ``start``, then the new ones."""
        r = write.reservation
        assert self._read(r.table, r.end) == write.content

    def commit(self, write: Write, kept: int | None = None) -> None:
        """Of what was written the first ``kept`` tokens stay."""
        r, tokens = write.reservation, write.tokens[:kept]
        followed = sequences(self.kv)[r.sequence].next is not None
        commit = self.kv.commit_first if followed else self.kv.commit
        assert commit(r, np.array(tokens, np.int32)) == r.start + len(tokens)
        self.tokens[r.sequence] = write.base + tokens
        self.contents[r.sequence] = write.content[: r.start + len(tokens)]

    def finish(self, write: Write) -> None:
        """Run it, and commit all of it."""
        self.run(write)
        self.commit(write)

    def end(self, under_way: Iterable[Write]) -> None:
        """Undo these and release all sequences: then every block is free."""
        for write in under_way:
            self.rollback(write)
        self.check()
        for sequence in list(self.tokens):
            self.release(sequence)
        self.kv.check()
        assert self.kv.free_blocks == self.kv.total_blocks

    def rollback(self, write: Write) -> None:
        if write.saved is not None:
            self.content[write.reservation.overwritten] = write.saved
        self.kv.rollback(write.reservation)

    def write(
        self, sequence: int, count: int, start: int | None = None, ahead: int = 0, prefix: PrefixUse | None = None
    ) -> Reservation:
        """Reserve, run and commit one span; the sequence is made if need be. Returns the closed reservation."""
        create = sequence not in self.tokens
        start = len(self.tokens.get(sequence, [])) if start is None else start
        write = self.reserve(sequence, start, count, create, ahead, prefix=prefix if create else None)
        self.finish(write)
        return write.reservation

    @contextmanager
    def exhausted(self, needed: int, free: int) -> Iterator[None]:
        """What is done lacks blocks, says how many, and changes nothing."""
        before = everything(self.kv)
        with pytest.raises(KvBlocksExhausted) as refusal:
            yield
        assert refusal.value.metadata == {"needed_blocks": str(needed), "free_blocks": str(free)}
        assert everything(self.kv) == before

    # --- what a test begins with ------------------------------------------------------------------------------------

    def wrote(self, sequence: int, count: int, **how: Any) -> World:
        """See `write`."""
        self.write(sequence, count, **how)
        return self

    def promised(self, sequence: int, tokens: int) -> World:
        self.kv.ensure_capacity(sequence, tokens)
        return self

    def forked(self, parent: int, child: int, at: int | None = None) -> World:
        self.fork(parent, child, at)
        return self

    def full(self, free: int = 0) -> World:
        """Somebody has taken every block that was left, but for so many."""
        if self.kv.free_blocks > free:
            self.write(HOG, (self.kv.free_blocks - free) * self.size)
        assert self.kv.free_blocks == free
        return self

    # --- between steps ----------------------------------------------------------------------------------------------

    def fork(self, parent: int, child: int, at: int | None = None) -> None:
        self.kv.fork(parent, child, at)
        self.tokens[child], self.salts[child] = self.tokens[parent][:at], self.salts[parent]
        self.contents[child], self.callers[child] = self.contents[parent][:at], self.callers[parent]

    def truncate(self, sequence: int, length: int) -> None:
        self.kv.truncate(sequence, length)
        del self.tokens[sequence][length:], self.contents[sequence][length:]

    def release(self, sequence: int) -> None:
        self.kv.release(sequence)
        del self.tokens[sequence]

    # --- looking ----------------------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        return self.kv.block_size

    def blocks(self, sequence: int) -> list[int]:
        return table_of(self.kv, sequence).tolist()

    def spares(self, sequence: int) -> list[int]:
        return list(sequences(self.kv)[sequence].spares)

    def check(self, pinned: set[int] | frozenset[int] = frozenset()) -> None:
        """The books add up, free slots are garbage, and every sequence that is not ``pinned`` reads as it should."""
        self.kv.check()
        self._spoil(pinned)
        for sequence, tokens in self.tokens.items():
            if sequence in pinned:
                continue
            assert self.kv.length(sequence) == len(tokens)
            assert self.kv.tokens(sequence).tolist() == tokens
            found = self._read(np.array(self.blocks(sequence), dtype=np.int32), len(tokens))
            assert found == self.contents[sequence]
            self._check_allowed(sequence, tokens, found)

    def _spoil(self, pinned: set[int] | frozenset[int]) -> None:
        """Fill what nobody has with garbage."""
        leaving = {block for block, _ in self.kv.prefixes.leaving}  # nobody has saved them yet, or written there
        for block in set(free_list(pool_of(self.kv))) - leaving:
            self.content[self.block_slots(block)] = GARBAGE
        if not pinned:
            unowned = ~owned_slots(self.kv)
            for block in leaving:
                unowned[self.block_slots(block)] = False
            self.content[unowned] = GARBAGE

    def _check_allowed(self, sequence: int, tokens: list[int], content: list[int]) -> None:
        """All of it was made for these tokens, here or by the sequence's own caller."""
        for place, number in enumerate(content):
            assert number != GARBAGE
            caller, salt, made_for = self.made[number]
            assert (salt, made_for) == (self.salts[sequence], tuple(tokens[: place + 1]))
            assert caller in (b"", self.callers[sequence]), "what another caller imported"

    def _followed(self, sequence: int, content: list[int], write: Write) -> list[int]:
        """``content``, and a number for each position that follows: the same where salt and all before are the same,
        but for what is imported."""
        content, tokens, salt = list(content), write.base + write.tokens, self.salts[sequence]
        imported = write.imported or any(self.made[number][0] for number in content)
        caller = self.callers[sequence] if imported else b""
        for place in range(len(content), len(tokens)):
            before = (salt, *content) if imported else content[-1] if content else ("first", salt)
            key = object() if write.imported else (before, tokens[place])
            number = self._numbers.setdefault(key, len(self.made))
            if number == len(self.made):
                self.made.append((caller, salt, tuple(tokens[: place + 1])))
            content.append(number)
        return content

    def block_slots(self, block: int) -> slice:
        return slice(block * self.size, (block + 1) * self.size)

    def _read(self, table: np.ndarray, length: int) -> list[int]:
        return [int(self.content[int(table[i // self.size]) * self.size + i % self.size]) for i in range(length)]


def everything(kv: KvManager, *, ordered: bool = True) -> dict[str, object]:
    """The whole inner state as plain values: equal before and after whatever must leave no trace. Not ``ordered``: a
    published block may have had to give way, and is free like any other now."""
    pool = pool_of(kv)
    return {
        "free": list(free_list(pool)) if ordered else sorted({*free_list(pool), *idle_blocks(pool)}),
        "references": (references(pool) - kept_blocks(pool))[1:].tolist(),
        "sequences": {
            sequence: (
                state.table.view(len(state.table)).tolist(),
                state.length,
                list(state.spares),
                state.imported_from,
                state.promised_from,
                state.promised_tokens,
                state.gone,
                state.owed_to,
                state.open is None,
            )
            for sequence, state in sequences(kv).items()
        },
    }
