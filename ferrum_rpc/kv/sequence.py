"""What the KV floor remembers: of a sequence between steps, and of a write that is neither committed nor undone.

Two records, almost without behaviour, so that the manager (which changes them) and the audit (which only reads them)
agree on words. This file must not know the pool or the store.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from ferrum_rpc.kv.pool import Int32Array
from ferrum_rpc.kv.table import BlockTable
from ferrum_rpc.kv.tokens import TokenHistory

NEVER: Final = 1 << 62
"""A length that no sequence reaches."""


class KvMisuse(RuntimeError):
    """The engine broke the rules of the KV floor: a defect of this program, never of a request."""


@dataclass(slots=True, eq=False)
class Reservation:
    """Blocks to write the positions ``start .. end`` of one sequence, until `commit` or `rollback`.

    What the runner does with it, between `reserve` and the forward pass, in any order:

    - ``copies``: copy block src to dst for every (src, dst), at most one: a shared block that is written in part;
    - ``overwritten``: save the content of these slots (int64 [n]) and restore it before a `rollback`: they hold
      committed tokens of this sequence, which are rewritten in place.

    ``table`` (int32 [ceil(end / block_size)]) is what the forward pass reads and writes through. It is no copy: it is
    valid until the reservation is closed. The first ``cached`` of the positions are in blocks of the prefix cache,
    where ``searched`` were looked for; only what follows is written.
    """

    sequence: int
    start: int
    end: int
    table: Int32Array
    overwritten: npt.NDArray[np.int64]
    copies: tuple[tuple[int, int], ...] = ()
    # The rest is for undoing it.
    created: bool = False
    replaced: Sequence[tuple[int, int]] = ()
    """(index in the table, the block that was there): still referenced, so that it is not written. The first of
    ``found`` or of ``fresh`` is there now."""
    fresh: Sequence[int] = ()
    """Blocks that this reservation put into the table; the first ``spares_used`` of them were spares."""
    spares_used: int = 0
    held: int | None = None
    """Spares that were allocated for a hold, the last of the sequence's; None: it holds nothing."""
    found: Sequence[int] = ()
    """Blocks of the prefix cache that it put into the table, before the fresh ones."""
    cached: int = 0
    searched: int = 0
    known: int = 0
    """If the model keeps states: up to where the prefix cache has what the span feeds."""
    checkpoint: bytes = b""
    """And the key of the checkpoint behind what is ``cached``."""
    kept: int = 0
    """How many of ``replaced`` only this sequence holds: it could have written them in place, as it does if blocks are
    short, and others would no longer find what is published there."""
    imported_before: int | None = None
    """What ``imported_from`` of the sequence was, where ``found`` has changed it."""


@dataclass(slots=True, eq=False)
class SequenceBlocks:
    """One live sequence: ``length`` tokens in the blocks of ``table``, whose ids are in ``history``.

    ``spares`` are blocks without content that only this sequence may use. They keep a promise: all writes up to
    ``promised_from + promised_tokens`` find their blocks (`KvManager.ensure_capacity`). While more is held,
    ``before_hold`` is the promise that returns. ``shared``: how many entries of the table, from the first on, a fork or
    the prefix cache may hold as well.

    ``root`` is where the chain of its blocks' hashes begins (None: it does not use the prefix cache), and ``chain`` the
    hash of the first ``chained`` blocks, which were published. From ``publish_at`` tokens on there are more to publish.
    ``adapter``: what they are computed with, by name. ``caller``: the digest of its caller's name. From the position
    ``imported_from`` on its content was imported, or computed from what was: it is published for this caller alone.

    Where the model has a window (`kv.windows`), the first ``gone`` entries of the table are the null block. If
    ``owed_to`` is above ``length``, the sequence has as many tokens, and the last of them must be fed again;
    ``recomputed`` were, since it was used last.
    """

    table: BlockTable = field(default_factory=BlockTable)
    length: int = 0
    history: TokenHistory = field(default_factory=TokenHistory)
    spares: list[int] = field(default_factory=list)
    promised_from: int = 0
    promised_tokens: int = 0
    before_hold: tuple[int, int] | None = None
    shared: int = 0
    root: bytes | None = None
    chain: bytes = b""
    chained: int = 0
    publish_at: int = NEVER
    adapter: str = ""
    caller: bytes = b""
    imported_from: int = NEVER
    gone: int = 0
    owed_to: int = 0
    recomputed: int = 0
    open: Reservation | None = None
    next: Reservation | None = None
    """The reservation of one more token behind the open one (`KvManager.reserve_next`)."""

    def forked(self, at: int) -> SequenceBlocks:
        """One that has the first ``at`` tokens and no block of them, and uses the prefix cache as this one does."""
        return SequenceBlocks(
            history=self.history.fork(at),
            root=self.root,
            chain=self.chain,
            chained=self.chained,
            publish_at=self.publish_at,
            adapter=self.adapter,
            caller=self.caller,
            imported_from=self.imported_from,
        )

    @property
    def known(self) -> int:
        """The tokens that it has, with those that must be fed again."""
        return max(self.length, self.owed_to)

    @property
    def unpromised(self) -> int:
        """The length up to which no promise covers writes."""
        return min(self.length, self.promised_from) if self.promised_tokens else self.length

    @property
    def promised_end(self) -> int:
        """The length up to which writes cannot fail for lack of blocks; 0 where nothing was promised."""
        return self.promised_from + self.promised_tokens if self.promised_tokens else 0
