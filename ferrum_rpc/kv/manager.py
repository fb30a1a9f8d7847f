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

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from ferrum_rpc.core import CacheState, PrefixUse, TokenArray, TokenCounts
from ferrum_rpc.errors import ExecutorError, KvBlocksExhausted, NotSupported, TruncateBeyondLength
from ferrum_rpc.kv import audit
from ferrum_rpc.kv.capacity import Capacity
from ferrum_rpc.kv.pool import NULL_BLOCK, BlockPool, Int32Array
from ferrum_rpc.kv.prefix import PrefixCache, PrefixHit
from ferrum_rpc.kv.sequence import NEVER, KvMisuse, Reservation, SequenceBlocks
from ferrum_rpc.kv.table import BlockTable, blocks_for, slots_for
from ferrum_rpc.kv.windows import Content, Window, Windows

_NO_SLOTS: Final = np.zeros(0, dtype=np.int64)
_NOTHING: Final = PrefixHit([])


class KvManager:
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
        self.block_size = block_size
        self._pool = BlockPool(num_blocks, order)
        self.prefixes = PrefixCache(self._pool, block_size, fingerprint)
        self._capacity = Capacity(self._pool, block_size, self.prefixes.withdraw)
        self._windows = None if window is None else Windows(self._pool, self.prefixes, block_size, window)
        self._sequences: dict[int, SequenceBlocks] = {}
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

        Raises `KvBlocksExhausted` too where tokens before ``start`` must be fed again (`missing`), and `NotSupported`
        where no block is left of them.
        """
        state = self._made(sequence, parent, start, prefix) if create else self._idle(sequence)
        if not 0 <= start <= state.known or tokens < 1 or ahead < 0 or hold < 0 or (ahead and not create):
            raise KvMisuse(f"{tokens} tokens at {start} of {state.length} (create={create}, ahead={ahead})")
        windows = self._windows
        if windows is not None and windows.lacks(state, start):
            raise self.refusal(sequence, start)
        size, table, end = self.block_size, state.table, start + tokens
        whole, first = table.whole, start // size
        before = len(whole)
        if not hold and (end - 1) // size == first < before and self._pool.is_writable(block := whole.item(first)):
            # Nearly every decode: it writes within one block, which is there and the sequence's own.
            overwritten = _NO_SLOTS
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
            state.open = opened = self._open(sequence, state, start, end, found, create, ahead, hold, keep)
        except KvBlocksExhausted:
            if parent is not None:
                self.release(sequence, publish=False)
            raise
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

    def _open(  # noqa: PLR0917 - once a span: keywords cost time
        self,
        sequence: int,
        state: SequenceBlocks,
        start: int,
        end: int,
        cached: PrefixHit,
        create: bool,
        ahead: int,
        hold: int,
        keep: bool,
    ) -> Reservation:
        """Take the blocks of a reservation that needs any, all or none, and put them into the table."""
        size, table, pool = self.block_size, state.table, self._pool
        found = cached.blocks  # the null block for those that are not needed
        displaced: list[tuple[int, int]] = []
        idle = pool.free_blocks
        place = start // size
        if found and place < len(table) and table[place] == found[0]:  # it went back into a block of its own, and stays
            place, found = place + 1, found[1:]
        if found:  # the first of them perhaps in place of a block that is full in part
            displaced = [(place, block) for block in table.cut(place)]
            table.extend(found)
        first, before, after = place + len(found), len(table), blocks_for(end, size)
        pool.reuse(found := _held(found))
        idle -= pool.free_blocks  # the found ones that had no other reference
        touched = [(index, table[index]) for index in range(first, min(before, after))]
        published = [each for each in touched if pool.has_one_holder(each[1])]
        replaced = [each for each in touched if not pool.is_writable(each[1]) and each not in published]
        table.make_room(after)
        needed = len(replaced) + max(0, after - before)
        promised = blocks_for(state.promised_end, size)  # what is written beyond must not use up what was promised
        within = sum(index < promised for index, _ in replaced) + max(0, min(after, promised) - before)
        spared = min(within, len(state.spares))
        extra = blocks_for(end + max(ahead, hold), size) - after if create else 0
        if hold and not create:
            extra = self._capacity.lacking_to_hold(state, start, after, end + hold, len(state.spares) - spared)
        available = pool.free_blocks - (needed - spared + extra)
        kept = min(len(published), available) if keep and available > 0 else 0
        replaced = sorted(replaced + published[:kept])
        needed += kept
        overwritten = _NO_SLOTS
        if start < state.length:
            skip = [index for index, _ in replaced]
            overwritten = slots_for(table.view(before), start, min(end, state.length), size, skip)
        try:
            allocated = self._capacity.allocate(needed - spared + extra)
        except KvBlocksExhausted:
            if first > place:
                table.cut(place)
                table.extend([block for _, block in displaced])
                pool.release(found)
                # raises, with the numbers before anything was found
                self._capacity.allocate(needed - spared + extra + idle)
            raise
        # From here on nothing fails.
        for _, block in published[kept:]:
            self.prefixes.withdraw(block)
        unspared = len(state.spares) - spared
        fresh = state.spares[unspared:] + allocated[: needed - spared]
        state.spares[unspared:] = allocated[needed - spared :]
        for (index, _), block in zip(replaced, fresh, strict=False):
            table[index] = block
        table.extend(fresh[len(replaced) :])
        # A block that is rewritten from its first slot on needs nothing of the old one.
        partial = start % size and replaced and replaced[0][0] == first
        copies = ((replaced[0][1], fresh[0]),) if partial else ()
        return Reservation(
            sequence,
            start,
            end,
            table.view(after),
            overwritten,
            copies,
            create,
            displaced + replaced,
            fresh,
            spared,
            extra if hold else None,
            found,
            max(0, first * size - start),
            kept=kept,
        )

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
            if state.next is not reservation:
                raise KvMisuse(f"the token behind this reservation of sequence {reservation.sequence} is reserved")
            state.next = None
            if reservation.fresh:
                state.table.cut(len(state.table) - 1)
                state.spares += reservation.fresh
            return
        state = self._opened(reservation)
        state.open = None
        if reservation.created:
            self._pool.release([block for _, block in reservation.replaced])
            self.release(reservation.sequence, publish=False)
            return
        if reservation.imported_before is not None:
            state.imported_from = reservation.imported_before
        if reservation.held is not None:
            self._capacity.undo_hold(state, reservation.held)
        for index, block in reservation.replaced:
            state.table[index] = block
        state.table.cut(blocks_for(state.length, self.block_size))
        state.shared = min(state.shared, len(state.table))
        state.spares += reservation.fresh[: reservation.spares_used]
        self._pool.release([*reservation.found, *reservation.fresh[reservation.spares_used :]])

    def reserve_next(self, sequence: int) -> Reservation:
        """Prepare to write one token behind the open reservation of ``sequence``, which appends. `commit_first` commits
        that one, and this one is the open one then; until then only `rollback` may close it.

        Its block is the last one, or one of those promised to the sequence. Raises `KvBlocksExhausted` if no block was
        promised.
        """
        state = self._known(sequence)
        before, size, table = state.open, self.block_size, state.table
        if before is None or state.next is not None or before.start < state.length:
            raise KvMisuse(f"no open reservation of sequence {sequence} appends, or a token behind it is reserved")
        start = before.end
        after, fresh = blocks_for(start + 1, size), list[int]()
        if after > len(table):
            if not state.spares or state.promised_end <= start:
                free = self._pool.free_blocks
                raise KvBlocksExhausted(
                    f"no block was promised for the token at {start}",
                    metadata={"needed_blocks": 1, "free_blocks": free},
                )
            fresh.append(state.spares.pop())
            table.extend(fresh)
        whole = table.whole[:after]
        state.next = Reservation(sequence, start, start + 1, whole, _NO_SLOTS, fresh=fresh, spares_used=len(fresh))
        return state.next

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
            if length < state.length:
                self._take_up(state, windows.find(state, length), length)
            else:
                self._capacity.resize(state, length, state.length)
            state.owed_to = length
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
            self._sequences[child] = self._fork_from_found(state, self._windows.find(state, at), at)
            return
        shared = state.table.view(blocks_for(at, self.block_size))
        gone = state.gone if self._windows is None else max(state.gone, self._windows.first_kept(at))
        forked = SequenceBlocks(
            BlockTable(shared),
            at,
            state.history.fork(at),
            shared=len(shared),
            root=state.root,
            chain=state.chain,
            chained=state.chained,
            publish_at=state.publish_at,
            adapter=state.adapter,
            caller=state.caller,
            imported_from=state.imported_from,
            gone=gone,
        )
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

    def missing(self, sequence: int, start: int, *, fork: bool = False) -> int:
        """How many tokens of ``sequence`` must be fed again before a span of it can begin at ``start``: at most so
        many, and exact once `take_up` was called. Of a ``fork``, as far as the sequence itself owes them."""
        state = self._sequences.get(sequence)
        if self._windows is None or state is None or state.open is not None or start > state.known:
            return 0
        if start > state.length:
            return start - state.length
        return max(1, start) if not fork and self._windows.lacks(state, start) else 0

    def take_up(self, sequence: int, start: int) -> int:
        """Have what the prefix cache still has of the tokens of ``sequence`` before ``start``, where a span is to begin
        and something is `missing`. Returns the length of what it has now; it owes the rest of its tokens."""
        state, windows = self._idle(sequence), self._windows
        if windows is not None and windows.lacks(state, start):
            content, known = windows.find(state, start), state.known
            if content.length != state.length:
                self._take_up(state, content, known)
                state.owed_to = known
        return state.length

    def refusal(self, sequence: int, start: int) -> ExecutorError:
        """Of a span that begins at ``start``, or what reads so many tokens, when something is `missing` and cannot be
        fed again."""
        state = self._known(sequence)
        if start > state.length:
            free = self._pool.free_blocks
            return KvBlocksExhausted(
                f"{start - state.length} tokens must be fed again first, and no block is free for that",
                metadata={"needed_blocks": free + 1, "free_blocks": free},
            )
        return NotSupported(
            f"the blocks that the position {start} needs are gone, and other items of the call use the sequence too, "
            "or fork it there: cut it back, or fork it (ForkKv), in a call before"
        )

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
        self._pool.release(_held(state.table.cut(0)) + state.spares)
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

    def reach(
        self,
        sequence: int,
        start: int,
        prompt: TokenArray,
        prefix: PrefixUse | None,
        there: Callable[[bytes], bool],
    ) -> tuple[int, bytes]:
        """How many blocks of that are worth fetching, and the key of the checkpoint behind them: see
        `PrefixCache.reach`."""
        state = self._fetching(sequence, start, prefix)
        return (0, b"") if state is None else self.prefixes.reach(state, start, prompt, there)

    def _fetching(self, sequence: int, start: int, prefix: PrefixUse | None) -> SequenceBlocks | None:
        """The sequence that a prompt is fetched for, or one like it that does not exist yet; None: nothing is."""
        state = self._sequences.get(sequence)
        if state is None:
            state = SequenceBlocks()
            if prefix is not None:
                self.prefixes.begin(state, prefix)
        return None if state.root is None or state.open is not None or start > state.length else state

    def forget_prefixes(self) -> None:
        """Unpublish everything: blocks that no sequence holds are empty then."""
        blocks = self.prefixes.published().tolist()
        self.prefixes.clear()
        for block in blocks:
            self._pool.unkeep(block)

    def reset(self) -> None:
        """Forget all sequences. None may have an open reservation."""
        if any(state.open for state in self._sequences.values()):
            raise KvMisuse("a reset must not be called with an open reservation")
        self._sequences.clear()
        self._capacity.promised.clear()
        self.prefixes.clear()
        self._sharing_ended = False
        self._pool.reset()

    # --- looking ----------------------------------------------------------------------------------------------------

    @property
    def has_window(self) -> bool:
        """Whether blocks behind a window are given up, so that tokens may have to be fed again."""
        return self._windows is not None

    def held_from(self, sequence: int) -> int:
        """The first position of ``sequence`` whose block it has: those before it are behind its window."""
        return self._known(sequence).gone * self.block_size

    def imported_from(self, sequence: int) -> int | None:
        """The position from which on the content of ``sequence`` was imported, or computed from what was; None: none
        was."""
        state = self._known(sequence)
        return state.imported_from if state.imported_from <= state.length else None

    def checkpoint_key(self, sequence: int, length: int) -> bytes:
        """The key of the states behind the first ``length`` tokens of ``sequence``, a whole number of blocks; empty if
        it does not publish."""
        state = self._known(sequence)
        return b"" if state.publish_at == NEVER else self.prefixes.key_at(state, length)

    def publishes(self, sequence: int) -> bool:
        """Whether what ``sequence`` computes is published."""
        return self._known(sequence).publish_at != NEVER

    def length(self, sequence: int) -> int:
        """Committed tokens of ``sequence``, with those that must be fed again."""
        return self._known(sequence).known

    def tokens(self, sequence: int) -> TokenArray:
        """Committed token ids of ``sequence``, and those of an open reservation that the prefix cache has, int32
        [length]: a view, valid until the next commit."""
        state = self._known(sequence)
        return state.history.upto(state.known + (0 if state.open is None else state.open.cached))

    def counts(self, sequence: int, length: int, counted_from: int, fed: TokenArray) -> TokenCounts:
        """How often tokens occur among the first ``length`` of ``sequence``, as `tokens` has them, and the tokens
        ``fed`` behind them, which need not be committed: see `TokenHistory.counts`."""
        return self._sequences[sequence].history.counts(length, counted_from, fed)

    def table(self, sequence: int) -> Int32Array:
        """The blocks of ``sequence``, int32 [n]: a view, valid until its next reservation."""
        return self._known(sequence).table.whole

    def slots(self, sequence: int, start: int, end: int) -> npt.NDArray[np.int64]:
        """The slots of the positions ``start .. end`` of ``sequence``, int64 [n]; of those that an open reservation
        writes too."""
        state = self._known(sequence)
        if not 0 <= start <= end <= (state.length if state.open is None else state.open.end):
            raise KvMisuse(f"the positions {start} to {end} of sequence {sequence} of {state.length} tokens")
        return slots_for(state.table.view(len(state.table)), start, end, self.block_size)

    @property
    def total_blocks(self) -> int:
        """Usable blocks, free or held: all but the null block."""
        return self._pool.total_blocks

    @property
    def free_blocks(self) -> int:
        """Blocks that a reservation could take now, published ones among them that no sequence holds. Spares are not
        free."""
        return self._pool.free_blocks

    def state(self) -> CacheState:
        """A snapshot of how full the cache is."""
        pool = self._pool
        blocks = pool.total_blocks, pool.free_blocks
        evicted, changed = (self.prefixes.evicted, self.prefixes.evicted_s), self.prefixes.changed
        return CacheState(self.block_size, *blocks, len(self._sequences), pool.idle_blocks, *evicted, 0, changed)

    def check(self) -> None:
        """Raise `CacheCorrupt`, naming the fault, unless the accounting agrees. O(blocks): for tests."""
        audit.check(self._pool, self._sequences, self.prefixes, self.block_size)

    # --- inside -----------------------------------------------------------------------------------------------------

    def _known(self, sequence: int) -> SequenceBlocks:
        state = self._sequences.get(sequence)
        if state is None:
            raise KvMisuse(f"sequence {sequence} does not exist")
        return state

    def _idle(self, sequence: int) -> SequenceBlocks:
        state = self._sequences.get(sequence) or self._known(sequence)
        if state.open is not None:
            raise KvMisuse(f"sequence {sequence} has an open reservation")
        return state

    def _opened(self, reservation: Reservation) -> SequenceBlocks:
        state = self._sequences.get(reservation.sequence) or self._known(reservation.sequence)
        if state.open is not reservation:
            raise KvMisuse(f"this reservation of sequence {reservation.sequence} was closed before")
        return state

    def _take_up(self, state: SequenceBlocks, content: Content, lowest: int) -> None:
        """The sequence has this content now, of its own tokens, in place of what it had. ``lowest``: the length that it
        goes back to."""
        had, has = _held(state.table.cut(0)), _held(content.blocks)
        own = set(had)
        self._pool.reuse([block for block in has if block not in own])
        own.difference_update(has)
        self._pool.release([block for block in had if block in own])
        self._begin_with(state, content)
        self._capacity.resize(state, lowest, content.length)
        self._sharing_ended = True

    def _begin_with(self, state: SequenceBlocks, content: Content) -> None:
        """``state``, whose table is empty, has references to the blocks of this content."""
        state.table.extend(content.blocks)
        state.gone = len(content.blocks) - len(_held(content.blocks))
        state.length, state.shared = content.length, len(content.blocks)
        self.prefixes.went_back(state, content.length)
        state.imported_from = min(state.imported_from, content.imported_from)

    def _fork_from_found(self, parent: SequenceBlocks, content: Content, at: int) -> SequenceBlocks:
        """A fork of the first ``at`` tokens of ``parent``, which has this content of them. What it lacks is fed again
        for it alone. Raises as `fork` does."""
        forked = SequenceBlocks(
            BlockTable(),
            history=parent.history.fork(at),
            root=parent.root,
            chain=parent.chain,
            chained=parent.chained,
            publish_at=parent.publish_at,
            adapter=parent.adapter,
            caller=parent.caller,
            imported_from=parent.imported_from,
            owed_to=at,
        )
        own = set(_held(parent.table.whole.tolist()))
        has = _held(content.blocks)
        of_parent = [block for block in has if block in own]
        self._pool.acquire(np.array(of_parent, np.int32))
        self._pool.reuse([block for block in has if block not in own])
        before = parent.shared
        try:
            if of_parent:
                parent.shared = max(before, len(content.blocks))
                self._capacity.keep(parent)
        except KvBlocksExhausted:
            parent.shared = before
            self._pool.release(has)
            raise
        self._begin_with(forked, content)
        return forked

    def _made(self, sequence: int, parent: int | None, length: int, prefix: PrefixUse | None) -> SequenceBlocks:
        """A new sequence, of the first tokens of ``parent`` where one is named; without, it is not there yet."""
        if sequence in self._sequences:
            raise KvMisuse(f"sequence {sequence} exists already")
        if parent is None:
            state = SequenceBlocks()
            if prefix is not None:
                self.prefixes.begin(state, prefix)
            return state
        self.fork(parent, sequence, length)
        state = self._sequences[sequence]
        if state.length < length:
            self.release(sequence, publish=False)
            raise self.refusal(parent, length)
        return state

    @staticmethod
    def _check_within(state: SequenceBlocks, length: int) -> None:
        if length < 0:
            raise KvMisuse(f"invalid length {length}")
        if length > state.known:
            message = f"the sequence has {state.known} tokens, fewer than {length}"
            raise TruncateBeyondLength(message, metadata={"seq_len": state.known})


def _held(blocks: Sequence[int]) -> list[int]:
    """The ``blocks`` of a table without those that are gone."""
    return [block for block in blocks if block != NULL_BLOCK]
