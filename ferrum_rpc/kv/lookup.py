"""The sequences of a cache by id, and what can be read of them.

Nothing here changes anything: `KvManager` adds the changes. It has integers only, as that, and belongs to the model
thread; only `KvLookup.state` may be called from elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ferrum_rpc.core import CacheState, PrefixUse, TokenArray, TokenCounts
from ferrum_rpc.errors import KvBlocksExhausted, TruncateBeyondLength
from ferrum_rpc.kv import audit
from ferrum_rpc.kv.pool import BlockPool, Int32Array
from ferrum_rpc.kv.prefix import PrefixCache
from ferrum_rpc.kv.sequence import NEVER, KvMisuse, Reservation, SequenceBlocks
from ferrum_rpc.kv.table import slots_for
from ferrum_rpc.kv.windows import Windows


class KvLookup:
    """The sequences over ``pool``, in blocks of ``block_size`` tokens. `KvMisuse` is raised for an unknown id and for
    positions that a sequence does not have."""

    def __init__(self, pool: BlockPool, prefixes: PrefixCache, windows: Windows | None, block_size: int) -> None:
        self.block_size = block_size
        self.prefixes = prefixes
        self._pool, self._windows = pool, windows
        self._sequences: dict[int, SequenceBlocks] = {}
        self._begun = set[int]()  # forks that a step is to create

    @property
    def has_window(self) -> bool:
        """Whether blocks behind a window are given up, so that tokens may have to be fed again."""
        return self._windows is not None

    def missing(self, sequence: int, start: int, *, fork: bool = False) -> int:
        """How many tokens of ``sequence`` must be fed again before a span of it can begin at ``start``: at most so
        many, and exact once `take_up` was called. Of a ``fork``, as far as the sequence itself owes them."""
        state = self._sequences.get(sequence)
        return 0 if self._windows is None or state is None else self._windows.missing(state, start, fork=fork)

    def has_begun(self, sequence: int) -> bool:
        """Whether ``sequence`` is a fork that a step is to create."""
        return sequence in self._begun

    def refusal(self, sequence: int, start: int) -> KvBlocksExhausted:
        """Of a span that begins at ``start``, or what reads so many tokens, when something is `missing` and cannot be
        fed again."""
        assert self._windows is not None  # noqa: S101 - something is missing
        return self._windows.refusal(self._known(sequence), start)

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

    def _fetching(self, sequence: int, start: int, prefix: PrefixUse | None) -> SequenceBlocks | None:
        """The sequence that a prompt is fetched for, or one like it that does not exist yet; None: nothing is."""
        state = self._sequences.get(sequence)
        if state is None:
            state = self._new(prefix)
        return None if state.root is None or state.open is not None or start > state.known else state

    def _new(self, prefix: PrefixUse | None) -> SequenceBlocks:
        """A sequence without tokens."""
        state = SequenceBlocks()
        if prefix is not None:
            self.prefixes.begin(state, prefix)
        return state

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

    @staticmethod
    def _check_within(state: SequenceBlocks, length: int) -> None:
        if length < 0:
            raise KvMisuse(f"invalid length {length}")
        if length > state.known:
            message = f"the sequence has {state.known} tokens, fewer than {length}"
            raise TruncateBeyondLength(message, metadata={"seq_len": state.known})
