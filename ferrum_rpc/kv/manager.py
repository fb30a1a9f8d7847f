"""Sequences and their blocks: reservations of slots to write, as transactions.

Every change of a cache is `reserve`, the forward pass, then `commit` or `rollback`; several are open at once, of
different sequences that may share blocks. One rule makes that safe:

    A block is written only by the holder of its only reference, and a sequence or reservation that may still need the
    content of a block holds a reference to it.

So a shared block is replaced, never written. The block that a reservation replaced keeps that reference until `commit`:
it can be a copy source, and `rollback` finds it unchanged, because until then it is neither free nor private to another
sequence. Two forks that write into a shared block in the same step therefore both copy it. Content that is overwritten
in place is private, and the runner's undo log has its old values (`Reservation.overwritten`). Blocks that one open
reservation copies into, saves or writes are not used by any other, so their order does not matter.

The cost of a decode step does not grow with the length of a sequence or with the number of sequences: a reservation
edits the table in place and keeps the few entries that it replaced.

Blocks that are full of committed tokens are published (`kv.prefix`), and later spans that begin with the same tokens
find them. The pool holds a reference to a published block, so it is replaced like any shared one. If only one sequence
holds it and no block is free for the copy, it is unpublished and written in place: this needs no block, and no promise.
Blocks promised to a sequence are not published before the promise ends, so that no other sequence can share them. Those
that a fork published are withdrawn when the fork ends.

If every layer of the model has a window, blocks behind it are given up (`kv.windows`).

This file has integers only: no tensors, no handles, no wire. It belongs to the model thread; only `state` may be
called from elsewhere. Paged blocks with reference counts and copy-on-write are from vLLM (Kwon et al., SOSP 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from ferrum_rpc.core import PrefixUse, TokenArray
from ferrum_rpc.errors import KvBlocksExhausted
from ferrum_rpc.kv.capacity import Capacity
from ferrum_rpc.kv.lookup import KvLookup
from ferrum_rpc.kv.pool import NULL_BLOCK, BlockPool
from ferrum_rpc.kv.prefix import PrefixCache, PrefixHit
from ferrum_rpc.kv.reservations import NO_SLOTS, Reservations
from ferrum_rpc.kv.sequence import KvMisuse, Reservation, SequenceBlocks
from ferrum_rpc.kv.table import BlockTable, blocks_for, held_blocks
from ferrum_rpc.kv.windows import Window, Windows

_NOTHING: Final = PrefixHit([])


class KvManager(KvLookup):
    """The sequences of one executor, by integer ids that the caller chooses and never uses again.

    ``num_blocks`` blocks of ``block_size`` tokens, block 0 being the null block that is never given out; ``order``
    permutes the others (`BlockPool`). ``fingerprint``: the model's, 32 bytes, for the prefix cache, ``prefixes``.
    ``window``: the longest of the model's layers; None: a layer sees all tokens.

    Lengths and positions are in tokens. A call that raises has changed nothing. `KvMisuse` is raised for an unknown id,
    an id that exists already, an argument out of range, and a sequence whose reservation is open: it is pinned, and
    only `commit` and `rollback` touch it.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        order: Sequence[int] | None = None,
        fingerprint: bytes = bytes(32),
        window: Window | None = None,
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, not {block_size}")
        pool = BlockPool(num_blocks, order)
        prefixes = PrefixCache(pool, block_size, fingerprint)
        capacity = self._capacity = Capacity(pool, block_size, prefixes.withdraw)
        windows = None if window is None else Windows(pool, prefixes, capacity, block_size, window)
        super().__init__(pool, prefixes, windows, block_size)
        self._reservations = Reservations(pool, capacity, prefixes, block_size)
        self._sharing_ended = False  # since spares were trimmed last, perhaps

    # --- a step: reserve, then commit or rollback -------------------------------------------------------------------

    def reserve(  # noqa: PLR0917 - once a span: keywords cost time
        self,
        sequence: int,
        start: int,
        tokens: int,
        create: bool = False,
        ahead: int = 0,
        hold: int = 0,
        parent: int | None = None,
        prefix: PrefixUse | None = None,
        prompt: TokenArray | None = None,
        keep: bool = True,
        sent_from: int | None = None,
    ) -> Reservation:
        """Prepare to write ``tokens`` (1 or more) tokens at the positions ``start ..`` of ``sequence``.

        ``start`` is its length, or less: then the commit also forgets the old tokens from ``start`` on. ``create``
        makes the sequence; ``ahead`` then promises blocks for that many tokens more, as `ensure_capacity` would, in the
        same transaction; it is made of the first ``start`` tokens of ``parent``, which has no open reservation, or of
        none. ``hold`` promises blocks for so many tokens more until `end_hold`, besides what was promised
        before. Raises `KvBlocksExhausted` (``needed_blocks`` from the pool, ``free_blocks`` in it).

        ``prefix``: how a new sequence uses the prefix cache (None: not at all); a fork does as its parent does.
        ``prompt``: the first of the tokens, those that need no row and may be found there: then only what follows is
        written (`Reservation.cached`). To ``keep`` what is published, blocks are copied that could be written in place,
        as long as others are free (`Reservation.kept`). ``sent_from``: nothing is computed, all of the tokens come from
        elsewhere, if possible with what a short way back needs of those before, of which those before ``sent_from``
        cannot come; the others count as found.

        Raises `KvBlocksExhausted` too where tokens before ``start`` must be fed again (`missing`).
        """
        state = self._made(sequence, parent, start, prefix) if create else self._idle(sequence)
        if not 0 <= start <= state.known or tokens < 1 or ahead < 0 or hold < 0 or (ahead and not create):
            raise KvMisuse(f"{tokens} tokens at {start} of {state.length} (create={create}, ahead={ahead})")
        windows = self._windows
        if windows is not None and windows.lacks(state, start):
            raise windows.refusal(state, start)
        size, table, end = self.block_size, state.table, start + tokens
        whole, first = table.whole, start // size
        before = len(whole)
        if (
            not (hold or create)
            and (end - 1) // size == first < before
            and self._pool.is_writable(block := whole.item(first))
        ):
            # Nearly every decode: it writes within one block, which is there and the sequence's own.
            overwritten = NO_SLOTS
            if start < state.length:
                slot = block * size + start % size
                overwritten = np.arange(slot, slot + min(end, state.length) - start)
            read = whole if first + 1 == before else whole[: first + 1]
            state.open = reservation = Reservation(sequence, start, end, read, overwritten)
            return reservation
        found, searched = _NOTHING, 0
        needed = 0 if windows is None or sent_from is None else windows.first_sent(end, sent_from)
        if state.root is not None and prompt is not None and start == state.known and (create or not hold):
            found, searched = self.prefixes.find(state, prompt, needed), len(prompt)
        elif needed:
            found = PrefixHit([NULL_BLOCK] * needed)
        try:
            opened = self._reservations.open(sequence, state, start, end, found, create, ahead, hold, keep)
        except KvBlocksExhausted:
            if parent is not None:
                self.release(sequence, publish=False)
            raise
        state.open = opened
        opened.searched, opened.known, opened.checkpoint = searched, found.known, found.checkpoint
        if prompt is not None and opened.cached:
            state.history.write(start, prompt[: opened.cached])
            state.shared = max(state.shared, start // size + len(found.blocks))
            if not start and state.imported_from < opened.cached:
                state.imported_from = opened.cached  # what was found is not imported
            if found.imported_from < state.imported_from:
                opened.imported_before, state.imported_from = state.imported_from, found.imported_from
        if create:
            if windows is not None and not start:
                state.gone = next((place for place, block in enumerate(found.blocks) if block), len(found.blocks))
            self._capacity.begin(state, end, ahead)
            self._sequences[sequence] = state
        if hold:
            self._capacity.hold(state, end if create else start, end + hold)
        return opened

    def commit(self, reservation: Reservation, tokens: TokenArray, *, again: bool = False) -> int:
        """``tokens`` were written: they are the sequence's now. Where they are fewer than were reserved, what was
        written behind them is forgotten. Returns the new length. ``again``: the sequence had them, and owes those that
        follow."""
        state = self._sequences.get(reservation.sequence)
        if state is None or state.open is not reservation:
            state = self._opened(reservation)  # raises
        start, before = reservation.start, state.length
        end = start + len(tokens)
        if not start < end <= reservation.end:
            raise KvMisuse(f"{len(tokens)} tokens for the positions {start} to {reservation.end}")
        state.history.write(start, tokens)
        state.open = None
        lowest = start if start < state.known else end
        if again:
            lowest, state.recomputed = state.known, state.recomputed + len(tokens)
        else:
            state.owed_to = 0
        if start < before:
            self.prefixes.went_back(state, start)
        if reservation.end == end >= before and not reservation.replaced and not state.promised_tokens:
            state.length = end  # no block is given up
            self._grown(state)
            return end
        dropped = state.table.cut(blocks_for(end, self.block_size))
        self._pool.release([block for _, block in reservation.replaced] + dropped)
        self._sharing_ended |= bool(reservation.replaced or (dropped and state.shared))
        self._capacity.resize(state, lowest, end)
        self._grown(state)
        return end

    def _grown(self, state: SequenceBlocks) -> None:
        """The sequence is longer, or less of it is promised: publish what is full, and give up what is behind its
        window."""
        if state.length >= state.publish_at:
            self.prefixes.publish(state)
        if self._windows is not None:
            gone = state.gone
            self._windows.drop(state)
            self._sharing_ended |= state.gone > gone and bool(state.shared)

    def rollback(self, reservation: Reservation) -> None:
        """Nothing happened: table, references, spares and free list are as before `reserve`, or `reserve_next`.

        The runner has restored what stood in ``reservation.overwritten`` if the forward pass may have begun.
        """
        state = self._sequences.get(reservation.sequence) or self._known(reservation.sequence)
        if state.next is not None:
            self._reservations.undo_next(state, reservation)
            return
        state = self._opened(reservation)
        state.open = None
        if reservation.created:
            self._pool.release([block for _, block in reservation.replaced])
            self.release(reservation.sequence, publish=False)
            return
        self._reservations.undo(state, reservation)

    def reserve_next(self, sequence: int) -> Reservation:
        """Prepare to write one token behind the open reservation of ``sequence``, which appends. `commit_first` commits
        that one, and this one is the open one then; until then only `rollback` may close it.

        Its block is the last one, or one of those promised to the sequence. Raises `KvBlocksExhausted` if no block was
        promised.
        """
        return self._reservations.open_next(sequence, self._known(sequence))

    def commit_first(self, reservation: Reservation, tokens: TokenArray) -> int:
        """`commit`, also of a reservation behind which `reserve_next` has reserved a token. All tokens were written."""
        state = self._sequences.get(reservation.sequence)
        if state is None or state.open is not reservation or state.next is None:
            return self.commit(reservation, tokens)
        end = reservation.end
        if len(tokens) != end - reservation.start:
            raise KvMisuse(f"{len(tokens)} tokens for the positions {reservation.start} to {end}, which are followed")
        state.history.write(reservation.start, tokens)
        state.open, state.next, state.owed_to = state.next, None, 0
        if reservation.replaced:
            self._pool.release([block for _, block in reservation.replaced])
            self._sharing_ended = True
        self._capacity.resize(state, end, end)
        self._grown(state)
        return end

    # --- between steps ----------------------------------------------------------------------------------------------

    def truncate(self, sequence: int, length: int) -> None:
        """Forget the tokens from ``length`` on and free the blocks beyond; spares stay. Never needs a block. What is
        behind the window and gone is taken up as far as it can be found; the sequence owes the rest.

        Raises `TruncateBeyondLength` (``seq_len``) where that would be growth.
        """
        state = self._idle(sequence)
        self._check_within(state, length)
        windows = self._windows
        if windows is not None and windows.lacks(state, length):
            self._sharing_ended |= windows.go_back(state, length)
            self.trim_spares()
            return
        state.owed_to = 0
        dropped = state.table.cut(blocks_for(length, self.block_size))
        self._pool.release(dropped)
        self._sharing_ended |= bool(dropped and state.shared)
        self.prefixes.went_back(state, length)
        self._capacity.resize(state, length, length)
        self.trim_spares()

    def fork(self, parent: int, child: int, at: int | None = None) -> None:
        """Make ``child`` of the first ``at`` tokens (all by default) of ``parent``; a block is shared until one writes.

        The child is promised nothing. Raises `TruncateBeyondLength` (``seq_len``), and `KvBlocksExhausted` where the
        parent was promised capacity and there are not enough blocks for the copies that its promise now needs.
        """
        state = self._idle(parent)
        if child in self._sequences:
            raise KvMisuse(f"sequence {child} exists already")
        at = state.known if at is None else at
        self._check_within(state, at)
        if self._windows is not None and self._windows.lacks(state, at):
            self._sequences[child] = self._windows.fork(state, at)
            return
        shared = state.table.view(blocks_for(at, self.block_size))
        gone = state.gone if self._windows is None else max(state.gone, self._windows.first_kept(at))
        forked = state.forked(at)
        forked.table, forked.length, forked.shared, forked.gone = BlockTable(shared), at, len(shared), gone
        forked.table.clear(0, gone)
        self.prefixes.went_back(forked, at)
        before, shared = state.shared, shared[gone:]
        self._pool.acquire(shared)
        try:
            state.shared = max(before, forked.shared)
            self._capacity.keep(state)
        except KvBlocksExhausted:
            state.shared = before
            self._pool.release(shared)
            raise
        self._sequences[child] = forked

    def begin_fork(self, parent: int, child: int, at: int) -> None:
        """`fork`, for a step that is to create ``child``: what its parent lacks is fed again for it before. `reserve`
        takes it then, or `end_begun` releases it."""
        self.fork(parent, child, at)
        self._begun.add(child)

    def end_begun(self) -> None:
        """Release the forks that were begun and that no reservation has taken."""
        while self._begun:
            self.release(self._begun.pop(), publish=False)

    def ensure_capacity(self, sequence: int, tokens: int) -> None:
        """Promise that the next ``tokens`` tokens of ``sequence`` find their blocks, whatever other sequences do.

        The blocks leave the pool now and wait as the sequence's spares. The promise is counted from the lowest length
        that the sequence has from now on, so a rejected draft does not use it up: writing, truncating and writing
        again is covered up to there. A fork takes spares for what it shares of that. Only going back below where the
        promise was made, into blocks that a fork shares, can shorten it, and only when the pool is empty by then. A
        later call replaces the promise; 0 gives the spares back.

        Raises `KvBlocksExhausted` (``needed_blocks`` from the pool, ``free_blocks`` in it).
        """
        state = self._idle(sequence)
        if tokens < 0:
            raise KvMisuse(f"invalid capacity of {tokens} tokens")
        self._capacity.promise(state, tokens)
        self._grown(state)

    def end_hold(self, sequence: int) -> None:
        """Give back what was held (`reserve`) and not used; what was promised besides stays."""
        state = self._idle(sequence)
        self._capacity.end_hold(state)
        self._grown(state)

    def take_up(self, sequence: int, start: int) -> int:
        """Have what the prefix cache still has of the tokens of ``sequence`` before ``start``, where a span is to begin
        and something is `missing`. Returns the length of what it has now; it owes the rest of its tokens."""
        state, windows = self._idle(sequence), self._windows
        if windows is not None and windows.lacks(state, start):
            self._sharing_ended |= windows.take_up(state, start)
        return state.length

    def take_recomputed(self, sequence: int) -> int:
        """How many tokens of ``sequence`` were fed again since this was asked last."""
        state = self._known(sequence)
        recomputed, state.recomputed = state.recomputed, 0
        return recomputed

    def release(self, sequence: int, *, publish: bool = True) -> None:
        """Forget the sequence. Free what only it held, and spares of others for blocks that are shared no more. Not to
        ``publish``, it never was: what a fork shares with its parent may be promised to that one."""
        state = self._idle(sequence)
        del self._sequences[sequence]
        self._capacity.promised.pop(state, None)
        state.promised_tokens = 0
        if publish and state.length >= state.publish_at:
            self.prefixes.publish(state)
        self._pool.release(held_blocks(state.table.cut(0)) + state.spares)
        self._sharing_ended |= bool(state.shared)
        self.trim_spares()

    def trim_spares(self) -> None:
        """Free the spares for blocks that are shared no more, those of sequences in a step when that is over. To be
        called when a step is: what one leaves behind must not show as a trace of a later one that fails."""
        if not self._sharing_ended:
            return
        self._sharing_ended, promised = False, self._capacity.promised
        for other in [each for each in promised if not each.promised_tokens]:
            del promised[other]
        for other in promised:
            if other.shared and other.spares:
                if other.open is None:
                    self._capacity.trim(other)
                else:
                    self._sharing_ended = True

    def fetch(
        self,
        sequence: int,
        start: int,
        prompt: TokenArray,
        prefix: PrefixUse | None,
        max_blocks: int,
        *,
        reach: int | None = None,
    ) -> list[tuple[int, bytes]]:
        """Have the second tier's blocks for ``prompt``, which is to be written behind the first ``start`` tokens of
        ``sequence`` or of a fork of it, in the prefix cache: up to ``max_blocks`` of them, and of the first ``reach``
        alone. Returns them with what must be written to them. ``prefix``: see `reserve`."""
        state = self._fetching(sequence, start, prefix)
        return [] if state is None else self.prefixes.fetch(state, start, prompt, max_blocks, reach)

    def fetch_window(self, sequence: int, start: int, max_blocks: int) -> list[tuple[int, bytes]]:
        """As `fetch`, of the tokens of ``sequence`` itself: what it needs for a span that begins at ``start``, or for a
        fork there, and neither it nor the prefix cache has."""
        state, windows, size = self._sequences.get(sequence), self._windows, self.block_size
        places = range(0) if state is None or windows is None else windows.to_fetch(state, start)
        if state is None or not places:
            return []
        first, tokens = places.start * size, state.history.upto(min(state.known, places.stop * size))
        return self.prefixes.fetch(state, first, tokens[first:], max_blocks)

    def reset(self) -> None:
        """Forget all sequences. None may have an open reservation."""
        if any(state.open for state in self._sequences.values()):
            raise KvMisuse("a reset must not be called with an open reservation")
        self._sequences.clear()
        self._begun.clear()
        self._capacity.promised.clear()
        self.prefixes.clear()
        self._sharing_ended = False
        self._pool.reset()

    # --- inside -----------------------------------------------------------------------------------------------------

    def _made(self, sequence: int, parent: int | None, length: int, prefix: PrefixUse | None) -> SequenceBlocks:
        """A new sequence, of the first tokens of ``parent`` where one is named, perhaps begun before; without, it is
        not there yet."""
        if sequence in self._begun:
            self._begun.remove(sequence)
        elif sequence in self._sequences:
            raise KvMisuse(f"sequence {sequence} exists already")
        elif parent is None:
            return self._new(prefix)
        else:
            self.fork(parent, sequence, length)
        state = self._sequences[sequence]
        if state.length < length:
            refusal = self.refusal(sequence, length)
            self.release(sequence, publish=False)
            raise refusal
        return state
