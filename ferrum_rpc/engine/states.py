"""The states of recurrent layers, sequence by sequence: which slot each has, and which checkpoints.

A step over sequences with such layers is a transaction here as it is in `kv.manager`: `reserve` of each span, then
`begin`, the layers, and `commit` or `rollback`. What a truncation needs that goes deeper than the last step is fed
again, from the nearest checkpoint (`missing`, `next_piece`): its tokens' keys and values are in the cache, and only the
states advance. So nothing is refused for lack of a checkpoint.

Checkpoints are states at a length, by a key: that of the prefix cache for the block that ends there, or one of the
sequence's own if others must not find it. They are taken `checkpoint_tokens` apart, and where others may find them, at
the last block border of a prompt and where it leaves those that are in the prefix cache.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import structlog

from ferrum_rpc.attention.recurrent import STEP_TOKENS, RecurrentSlot
from ferrum_rpc.attention.recurrent_steps import RecurrentSpan, RecurrentStep, RecurrentStore
from ferrum_rpc.core import MovedStates, Span, StateRows
from ferrum_rpc.device import DEVICE_ERRORS, check_device
from ferrum_rpc.engine.state_images import Content, SlotImages, Snapshot
from ferrum_rpc.errors import KvBlocksExhausted
from ferrum_rpc.kv.sequence import Reservation
from ferrum_rpc.kv.slots import SlotPool

log = structlog.get_logger("ferrum_rpc.engine")

CHECKPOINT_TOKENS: Final = 512
"""Checkpoints are at most so far apart, for blocks of a size that divides it."""

KeyAt = Callable[[int, int], bytes]
"""`KvManager.checkpoint_key`: empty if only the sequence and its forks may find a checkpoint."""


@dataclass(slots=True, eq=False)
class _Held:
    """What a sequence has: its ``slot``, whose content is ``usable`` or has to be replaced, and its ``checkpoints`` by
    length; those of ``own`` only it and its forks find. ``recomputed`` tokens were fed again since its last step, the
    last of them apart, up to the checkpoint ``on_the_way``.
    ``prompt_end``: how far a prompt is fed, and its last checkpoint, which the next chunk replaces. ``arriving``: the
    checkpoint of an import, whose content is not complete."""

    slot: int
    usable: bool = True
    checkpoints: dict[int, bytes] = field(default_factory=dict)
    own: list[bytes] = field(default_factory=list)
    recomputed: int = 0
    on_the_way: bytes = b""
    prompt_end: tuple[int, bytes] | None = None
    arriving: bytes = b""


@dataclass(slots=True, eq=False)
class _OpenSpan:
    """A reserved span: from ``source`` on, a slot or a checkpoint of this ``key``, to the slot ``into``, which was
    ``taken`` for it unless it is the sequence's own; both are one slot where that of the checkpoint was the last.
    ``known``: the checkpoints of a fork's parent. ``cuts``: the lengths at which states are to be ``kept``, in slots
    taken for that; None: there was none."""

    source: RecurrentSlot
    into: int
    start: int
    count: int
    taken: bool
    key: bytes = b""
    cuts: list[int] = field(default_factory=list)
    kept: dict[int, int | None] = field(default_factory=dict)
    known: dict[int, bytes] = field(default_factory=dict)


class StatePiece(NamedTuple):
    """Tokens of ``sequence`` that are fed again: a ``span`` to be run without rows. It advances the slot ``apart``, or
    if that is None the sequence's own. ``fork``: a fork of the sequence needs it."""

    sequence: int
    span: RecurrentSpan
    apart: int | None
    fork: bool


class _Leaving(NamedTuple):
    """What moves with a sequence; see `MovedStates`."""

    slot: Snapshot | None
    checkpoint: Snapshot | None


class States:
    """The states of all sequences over the slots of ``store``, which leave and arrive as ``images``. ``key_at``: see
    `KeyAt`; ``block_size``: that of the cache, between whose blocks prefixes end."""

    def __init__(self, store: RecurrentStore, images: SlotImages, block_size: int, key_at: KeyAt) -> None:
        self.store = store
        self.images = images
        self.pool = SlotPool(len(store.slots))
        self.checkpoint_tokens = max(1, CHECKPOINT_TOKENS // block_size) * block_size
        self._block_size = block_size
        self._key_at = key_at
        self._held: dict[int, _Held] = {}
        self._open: dict[int, _OpenSpan] = {}
        self._leaving: dict[int, _Leaving] = {}
        self._numbers = itertools.count()
        self._needed: frozenset[bytes] = frozenset()  # see `keep_for`
        self._continued: frozenset[bytes] = frozenset()

    # --- what must be fed again -------------------------------------------------------------------------------------

    def keep_for(self, starts: Iterable[tuple[int, int]]) -> None:
        """Spans will start from these sequences at these lengths: until the next call, the checkpoints from which they
        start are the last to be dropped, and no piece takes the slot of one that another piece continues. Else what was
        fed for one span could be dropped for another one, for ever."""
        needed, continued = set[bytes](), set[bytes]()
        for sequence, length in starts:
            held = self._held.get(sequence)
            if held is not None and not (held.usable and self.store.slots[held.slot].reaches(length)):
                at, key = self._nearest(held, length)
                if key and at == length:
                    needed.add(key)
                elif key and key == held.on_the_way:
                    continued.add(key)
        self._needed, self._continued = frozenset(needed), frozenset(continued)

    def missing(self, sequence: int, length: int) -> int:
        """How many tokens of ``sequence`` must be fed again before a step, or a fork of it, can start at ``length``."""
        held = self._held.get(sequence)
        if held is None:
            return 0
        slot = self.store.slots[held.slot]
        if held.usable and slot.reaches(length):
            return 0
        known = self._nearest(held, length)[0]
        return length - (max(known, slot.length) if held.usable and slot.length <= length else known)

    def next_piece(self, sequence: int, length: int, most: int, *, fork: bool) -> StatePiece:
        """The next of those tokens, at most ``most``; `end_piece` follows. They advance the slot of
        the sequence. For a ``fork``, or while the sequence still has longer states, which a step that fails must find,
        they advance a slot apart, which becomes a checkpoint. Raises `KvBlocksExhausted` if there is none for a fork
        that no span needs; without a fork the sequence then takes its own. A sequence has one piece at a time, and
        pieces of several may be run together."""
        held = self._held[sequence]
        slot = self.store.slots[held.slot]
        known, key = self._nearest(held, length)
        apart: int | None = None
        if fork or (held.usable and slot.length > length):
            try:
                apart, continued = self._slot_apart(held, key, fork=fork)
            except KvBlocksExhausted:
                if fork:
                    raise
        if apart is not None:
            source, slot = slot, self.store.slots[apart]
            if not (held.usable and known < source.length <= length):
                source = slot if continued else self._checkpoint(key)
        else:
            source = slot if held.usable and known <= slot.length <= length else self._checkpoint(key)
            held.usable = False  # until the piece is complete
        if source is not slot:
            try:
                self.store.copy(source, slot, source.length)
            except BaseException:
                if apart is not None:
                    self.pool.give(apart)
                raise
        span = RecurrentSpan(slot, slot, slot.length, min(most, length - slot.length))
        return StatePiece(sequence, span, apart, fork)

    def _slot_apart(self, held: _Held, key: bytes, *, fork: bool) -> tuple[int, bool]:
        """A slot for a piece from the checkpoint ``key`` on, and whether it has that checkpoint: it is the one that the
        piece before has left, or a ``fork`` has no other, and no span or piece needs it."""
        if key and key == held.on_the_way and key not in self._needed:
            return self.pool.remove(key), True
        needed = self._needed | self._continued
        return self._take(key, needed if fork else needed | {key})

    def _take(self, key: bytes, needed: frozenset[bytes] = frozenset()) -> tuple[int, bool]:
        """A slot, and whether it has the checkpoint ``key``, whose slot is the last one to be taken. Those of
        checkpoints that are ``needed`` are not taken."""
        try:
            return self.pool.take(needed | {key}), False
        except KvBlocksExhausted:
            slot = self.pool.take_over(key) if key and key not in needed else None
            if slot is None:
                raise
            return slot, True

    def end_piece(self, piece: StatePiece, *, complete: bool) -> None:
        """A piece was run in all layers and committed, or it failed."""
        held, span = self._held[piece.sequence], piece.span
        if complete and not piece.fork:
            held.recomputed += span.tokens
        if piece.apart is None:
            held.usable = complete
        elif complete:
            held.on_the_way = self._keep(held, b"", span.start + span.tokens, piece.apart)
        else:
            self.pool.give(piece.apart)

    # --- a step -----------------------------------------------------------------------------------------------------

    def reserve(self, span: Span, reserved: Reservation, *, publishes: bool) -> None:
        """Prepare the states for a span whose blocks are ``reserved``. Raises `KvBlocksExhausted` (``needed_slots``,
        ``free_slots``); nothing changed then. ``publishes``: whether others may find the sequence's checkpoints."""
        sequence, start = span.sequence, span.start + reserved.cached
        count, held = reserved.end - start, self._held.get(sequence)
        opened = _OpenSpan(self.store.empty, -1, start, count, taken=False)
        if reserved.cached:
            opened.key = reserved.checkpoint
            opened.source = self._checkpoint(opened.key)
        elif span.create and span.parent is not None:
            parent = self._held[span.parent]  # it may be fed in the same step, and then have other checkpoints
            opened.source, opened.key = self._source(parent, start)
            opened.known = dict(parent.checkpoints)
        elif held is not None:
            opened.source, opened.key = self._source(held, start)
            own = self.store.slots[held.slot]
            if count <= STEP_TOKENS and opened.source is own:
                opened.into = held.slot
        if opened.key:
            self.pool.pin(opened.key)
        if count > STEP_TOKENS:
            opened.cuts = self._cuts(start, reserved, publishes=publishes)
        self._open[sequence] = opened
        try:
            if opened.into < 0:
                opened.into, opened.taken = self._take_into(opened), True
                into = self.store.slots[opened.into]
                if opened.source is not into and (count <= STEP_TOKENS or span.parent is not None):
                    self.store.copy(opened.source, into, start)  # a parent may be fed in the same step
                    opened.source = into
        except BaseException:
            self.rollback(sequence)
            raise

    def refusal(self, group: Iterable[Span]) -> KvBlocksExhausted:
        """Of spans that are to run together, when `reserve` has refused one of them and the others are not rolled back
        yet. ``free_slots`` are those that they could have."""
        had = needed = 0
        for span in group:
            opened, held = self._open.get(span.sequence), self._held.get(span.sequence)
            if opened is not None:
                had += opened.taken
            else:
                few = len(span.tokens) <= STEP_TOKENS
                needed += held is None or not (few and held.usable and self.store.slots[held.slot].reaches(span.start))
        metadata = {"needed_slots": had + needed, "free_slots": had}
        message = f"{had} slots for recurrent states are free, of {had + needed} that the items need together"
        return KvBlocksExhausted(message, metadata=metadata)

    def _take_into(self, opened: _OpenSpan) -> int:
        """A slot for a span: that of the checkpoint from which it starts before that of one that another needs."""
        try:
            return self.pool.take(self._needed)
        except KvBlocksExhausted:
            if key := opened.key:
                opened.key = b""
                self.pool.unpin(key)
                slot = self.pool.take_over(key)
                if slot is not None:
                    opened.source = self.store.slots[slot]
                    return slot
                self.pool.pin(key)
                opened.key = key
        return self.pool.take()

    def _cuts(self, start: int, reserved: Reservation, *, publishes: bool) -> list[int]:
        """The lengths behind the first tokens of a long span at which its states are kept."""
        end, every = reserved.end, self.checkpoint_tokens
        cuts = set(range((start // every + 1) * every, end, every))
        if publishes:
            cuts.add((end - 1) // self._block_size * self._block_size)
            cuts.add(reserved.known)
        return sorted(each for each in cuts if start < each < end)

    def begin(self, sequences: list[int]) -> RecurrentStep:
        """The step of these reserved spans, in their order."""
        slots, spans = self.store.slots, list[RecurrentSpan]()
        for sequence in sequences:
            opened = self._open[sequence]
            for length in opened.cuts:  # only now: no span is refused for them
                try:
                    opened.kept[length] = self.pool.take()
                except KvBlocksExhausted:
                    opened.kept[length] = None
            keep = [(length, None if slot is None else slots[slot]) for length, slot in opened.kept.items()]
            spans.append(RecurrentSpan(opened.source, slots[opened.into], opened.start, opened.count, keep))
        return self.store.begin(spans)

    def commit(self, sequence: int, length: int) -> int:
        """The step that a reserved span was in is committed, and the sequence has ``length`` tokens now. Returns how
        many were fed again before."""
        opened = self._open.pop(sequence)
        held = self._held.get(sequence)
        if opened.key:
            self.pool.unpin(opened.key)
        end = opened.start + opened.count
        if held is None:
            held = self._held[sequence] = _Held(opened.into, checkpoints=opened.known)
            held.usable = length == end or opened.count <= STEP_TOKENS
        elif opened.taken and (length == end or opened.count <= STEP_TOKENS):
            self._leave(held, sequence, opened)
            held.slot, held.usable = opened.into, True
        elif opened.taken:  # tokens were rejected, and the chunked form has no states between
            self.pool.give(opened.into)
            self._go_back(held, opened.start)
        held.checkpoints = {at: key for at, key in held.checkpoints.items() if at <= opened.start}
        if opened.key:
            held.checkpoints[opened.start] = opened.key
        slot = self.store.slots[held.slot]
        if held.usable and length < slot.length:
            slot.truncate(length)
        for at, kept in opened.kept.items():
            if kept is not None:
                if at <= length:
                    self._keep(held, self._key_at(sequence, at), at, kept)
                else:
                    self.pool.give(kept)
        if opened.kept:
            self._end_prompt(held, opened, length)
        elif held.usable and opened.count <= STEP_TOKENS:
            self._keep_on_the_way(held, sequence, opened.start, length)
        recomputed, held.recomputed = held.recomputed, 0
        return recomputed

    def _leave(self, held: _Held, sequence: int, opened: _OpenSpan) -> None:
        """The sequence has another slot now. The one that it had is a checkpoint if a chunk began where one is due."""
        slot, start = self.store.slots[held.slot], opened.start
        if start and start % self.checkpoint_tokens == 0 and slot is opened.source:
            slot.truncate(start)
            self._keep(held, self._key_at(sequence, start), start, held.slot)
        else:
            self.pool.give(held.slot)

    def rollback(self, sequence: int) -> None:
        """A reserved span does not run, or its step failed and was undone."""
        opened = self._open.pop(sequence)
        if opened.key:
            self.pool.unpin(opened.key)
        for slot in (*opened.kept.values(), opened.into if opened.taken else None):
            if slot is not None:
                self.pool.give(slot)

    def _end_prompt(self, held: _Held, opened: _OpenSpan, length: int) -> None:
        """The last checkpoint of a chunk stands for the prompt's end, in place of that of the chunk before it."""
        before, last = held.prompt_end, max(opened.kept)
        if before is not None and before[0] == opened.start:
            self.pool.drop(before[1])
        key = held.checkpoints.get(last)
        held.prompt_end = (length, key) if key and last % self.checkpoint_tokens else None

    def _keep_on_the_way(self, held: _Held, sequence: int, start: int, length: int) -> None:
        """A step of few tokens keeps the states `checkpoint_tokens` apart, if there is a slot for them. The step is
        committed, so it does not fail if they cannot be copied; only a device that is lost is an error."""
        at = length // self.checkpoint_tokens * self.checkpoint_tokens
        if at <= start:
            return
        kept: int | None = None
        try:
            kept = self.pool.take()
            self.store.copy(self.store.slots[held.slot], self.store.slots[kept], at)
        except KvBlocksExhausted:
            return
        except Exception as error:
            if kept is not None:
                self.pool.give(kept)
            if isinstance(error, DEVICE_ERRORS):
                raise
            check_device()
            log.warning(
                "checkpoint_not_kept",
                error=type(error).__name__,
                action="nothing: a deep truncation takes longer; if memory is short, lower --kv-memory",
            )
            return
        self._keep(held, self._key_at(sequence, at), at, kept)

    # --- between steps ----------------------------------------------------------------------------------------------

    def truncate(self, sequence: int, length: int) -> None:
        """Only numbers change; what is missing then is fed again with the next step."""
        self._go_back(self._held[sequence], length)

    def fork(self, parent: int, child: int, at: int) -> None:
        """Make ``child`` of the first ``at`` tokens. Raises `KvBlocksExhausted`."""
        held = self._held[parent]
        slot = self.store.slots[held.slot]
        copied = held.usable and (slot.reaches(at) or slot.length < at)
        number, usable = self._take(b"" if copied else self._nearest(held, at)[1])
        made = _Held(number, usable)
        made.checkpoints = {length: key for length, key in held.checkpoints.items() if length <= at}
        if copied:
            try:
                self.store.copy(slot, self.store.slots[made.slot], min(at, slot.length))
            except BaseException:
                self.pool.give(made.slot)
                raise
            made.usable = True
        self._held[child] = made

    def release(self, sequence: int) -> None:
        """Forget a sequence, and the checkpoints that only it can find; or a copy."""
        self.close(sequence)
        held = self._held.pop(sequence, None)
        if held is not None:
            self.pool.give(held.slot)
            for key in held.own:
                self.pool.drop(key)

    # --- states that move -------------------------------------------------------------------------------------------

    def hold(self, sequence: int, number: int) -> None:
        """Keep what moves with ``sequence`` as it is now, for `read` of ``number``, until `close` or `release`: its
        states, if they can be used, and its last checkpoint. It takes no slot."""
        held = self._held[sequence]
        _, key = self._nearest(held, max(held.checkpoints, default=0))
        slot = self.images.snapshot(self.store.slots[held.slot]) if held.usable else None
        try:
            checkpoint = self.images.snapshot(self._checkpoint(key)) if key else None
        except BaseException:
            if slot is not None:
                slot.close()
            raise
        self._leaving[number] = _Leaving(slot, checkpoint)

    def lengths(self, number: int) -> MovedStates:
        """Of what is held under ``number``."""
        slot, checkpoint = (None if each is None else each.lengths for each in self._leaving[number])
        return MovedStates(slot, checkpoint)

    def read(self, number: int, rows: Sequence[StateRows]) -> list[Content]:
        """Some of what is held under ``number``."""
        return [getattr(self._leaving[number], each.image).read(each) for each in rows]

    def close(self, number: int) -> None:
        """What is held under ``number``, if anything is, is not read any more."""
        for each in self._leaving.pop(number, ()):
            if each is not None:
                each.close()

    def begin_import(self, sequence: int, length: int, key: bytes) -> None:
        """Take the slot of a sequence that comes from elsewhere. Raises `KvBlocksExhausted`. The prefix cache has its
        first ``length`` tokens, and the states behind them as the checkpoint ``key`` (b"": it has none)."""
        known = {}
        if key:
            self.pool.find(key)  # the last to be dropped
            known[length] = key
        self._held[sequence] = _Held(self.pool.take(), usable=False, checkpoints=known)

    def write(self, sequence: int, found: int, moved: MovedStates, rows: StateRows, data: Content | bytes) -> None:
        """Write rows of an import whose images have the lengths ``moved``. Others have the first ``found`` tokens too.
        Those of a checkpoint that is not needed, or has no slot any more, are dropped; its slot counts as free. Raises
        ValueError if they are another model's."""
        held, lengths = self._held[sequence], getattr(moved, rows.image)
        slot = self.store.slots[held.slot]
        if rows.image == "checkpoint":
            if rows.tensor == "states" and not rows.first:
                self._await_checkpoint(held, found, lengths.length)
            if held.arriving not in self.pool:
                return
            slot = self._checkpoint(held.arriving)
        self.images.write(slot, lengths, rows, data)

    def _await_checkpoint(self, held: _Held, found: int, at: int) -> None:
        """Have a slot for a checkpoint that comes, unless there is a better one, or no slot."""
        self.pool.drop(held.arriving)
        held.arriving = b""
        if self._nearest(held, found)[0] < at:
            with suppress(KvBlocksExhausted):
                held.arriving = self._keep_own(held, self.pool.take())

    def commit_import(self, sequence: int, found: int, moved: MovedStates) -> None:
        """All rows of ``moved`` are written: the sequence is one like others. Of tokens that others have, a checkpoint
        is for this sequence alone."""
        held = self._held[sequence]
        held.usable = moved.slot is not None
        key, held.arriving = held.arriving, b""
        if key not in self.pool:
            return
        if moved.checkpoint is None:
            self.pool.drop(key)
            return
        at = moved.checkpoint.length
        public = self._key_at(sequence, at) if at > found and at % self._block_size == 0 else b""
        if public:
            self.pool.keep(public, self.pool.remove(key))
        held.checkpoints[at] = public or key

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def content_of(self, slot: int) -> bytes | None:
        """A file of the checkpoint in a slot. None: no file can have it."""
        return self.images.to_file(self.store.slots[slot])

    def has_checkpoint(self, key: bytes) -> bool:
        """Whether there is one of this key."""
        return key in self.pool

    def forget_checkpoints(self) -> None:
        """Drop them all."""
        self.pool.clear()

    def check(self) -> None:
        """Raise `CacheCorrupt` unless the slots are accounted for."""
        self.pool.check([held.slot for held in self._held.values()])

    # --- inside -----------------------------------------------------------------------------------------------------

    def _go_back(self, held: _Held, length: int) -> None:
        slot = self.store.slots[held.slot]
        if held.usable and length < slot.length:
            held.usable = slot.reaches(length)
            if held.usable:
                slot.truncate(length)
        held.checkpoints = {at: key for at, key in held.checkpoints.items() if at <= length}

    def _source(self, held: _Held, start: int) -> tuple[RecurrentSlot, bytes]:
        """The slot from which a step starts at ``start``: the sequence's, or a checkpoint, and its key."""
        slot = self.store.slots[held.slot]
        if held.usable and slot.reaches(start):
            return slot, b""
        length, key = self._nearest(held, start)
        if length != start:  # it was dropped for the slot of another span of the step
            metadata = {"needed_slots": 1, "free_slots": 0}
            raise KvBlocksExhausted("the slot of a checkpoint that the step needs was taken", metadata=metadata)
        return self._checkpoint(key), key

    def _nearest(self, held: _Held, length: int) -> tuple[int, bytes]:
        """The last checkpoint at or below ``length`` that is there, and its key; (0, b""): the beginning."""
        for at in sorted(held.checkpoints, reverse=True):
            if at <= length and held.checkpoints[at] in self.pool:
                return at, held.checkpoints[at]
        return 0, b""

    def _checkpoint(self, key: bytes) -> RecurrentSlot:
        return self.store.slots[self.pool.find(key)] if key else self.store.empty

    def _keep(self, held: _Held, key: bytes, length: int, slot: int) -> bytes:
        if key:
            self.pool.keep(key, slot)
        elif (there := held.checkpoints.get(length, b"")) in self.pool:  # it is of the same tokens
            self.pool.give(slot)
            key = there
        else:
            key = self._keep_own(held, slot)
        held.checkpoints[length] = key
        return key

    def _keep_own(self, held: _Held, slot: int) -> bytes:
        """A slot becomes a checkpoint that others do not find. Its key is new, and never that of other tokens, which
        the sequence had before: forks may still have them."""
        key = next(self._numbers).to_bytes(8, "little")
        if len(held.own) > self.pool.total:  # a sequence may go back ever so often, and slots are few
            held.own = [each for each in held.own if each in self.pool]
        held.own.append(key)
        self.pool.keep(key, slot)
        return key
