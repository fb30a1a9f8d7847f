"""What an executor must answer, in plain Python: the oracle of the state machine.

Written from docs and protos, sharing no code with the server: sequences are lists of tokens, blocks are objects with a
count of holders, a recorded answer is an entry of a dict. Where the contract leaves a choice (which of two faults of an
item is told), any of them is right.

A test sends a call, and then asks the oracle with what the server said; the oracle says whether it may say so, changes
its own state, and tells what every item's answer must be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from tests.support.identity_oracle import identity_logits

INVALID = "INVALID_REQUEST"
EXHAUSTED = "KV_BLOCKS_EXHAUSTED"
TOO_MANY = "SEQUENCES_EXHAUSTED"
ANSWERS_OF_A_SEQUENCE = 32
"""So many recorded answers of a sequence are known: the latest."""
ROWS_BYTES = 448
"""What recorded rows count besides their bytes."""

PER_ITEM_OVERHEAD = 256
"""No item's result takes more bytes besides its rows. An answer within so much of the limit may be refused."""


# --- what is said on the wire ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Handle:
    id: bytes
    seq_len: int
    version: int

    def __repr__(self) -> str:
        return f"<{self.id[8:11].hex()} of {self.seq_len}, version {self.version}>"


@dataclass(frozen=True)
class Output:
    """``positions``: unset, last, all or none. ``kind``: unset, greedy, logprob, top, selected, full."""

    positions: str = "unset"
    kind: str = "unset"
    k: int = 0
    ids: tuple[int, ...] = ()
    dtype: str = "unset"

    def __repr__(self) -> str:
        return f"{self.positions} {self.kind} {self.k or self.ids or self.dtype}"

    def row_count(self, tokens: int, verify: bool) -> int:
        positions = ("all" if verify else "last") if self.positions == "unset" else self.positions
        return {"last": 1, "all": tokens, "none": 0}[positions]

    def meaning(self, verify: bool) -> tuple:
        """What it asks for, whichever of two spellings it uses."""
        positions = ("all" if verify else "last") if self.positions == "unset" else self.positions
        kind = "greedy" if self.kind == "unset" else self.kind
        dtype = ("f32" if self.dtype == "unset" else self.dtype) if kind == "full" else ""
        return positions, kind, self.k if kind == "top" else 0, self.ids if kind == "selected" else (), dtype

    def row_bytes(self, vocab: int) -> int:
        match self.kind:
            case "top":
                return 8 * self.k + 4
            case "selected":
                return 4 * len(self.ids) + 4
            case "full":
                return vocab * (4 if self.dtype in ("unset", "f32") else 2)
            case "logprob":
                return 8
            case _:
                return 4


@dataclass(frozen=True)
class Item:
    """``reserve`` None: no create options at all."""

    handle: Handle | None
    tokens: tuple[int, ...]
    truncate_to: int | None = None
    output: Output = Output()
    request_id: str = ""
    reserve: int | None = None

    def __repr__(self) -> str:
        rest = f" to {self.truncate_to} reserve {self.reserve} id {self.request_id!r} wants {self.output}"
        return f"[{self.handle or 'new'} {list(self.tokens)}{rest}]"

    def meaning(self, verify: bool) -> tuple:
        """The content that a request id stands for."""
        truncate_to = None if self.handle is None else self.truncate_to
        return "forward", self.handle, self.tokens, truncate_to, self.output.meaning(verify), self.reserve or 0

    @property
    def scope(self) -> bytes | None:
        return None if self.handle is None else self.handle.id


@dataclass(frozen=True)
class Limits:
    """What the server was told to allow."""

    vocab: int
    max_context: int
    max_batch_items: int
    max_batch_tokens: int
    max_top_tokens: int
    max_selected_tokens: int
    max_response_bytes: int
    max_sequences: int
    replay_bytes: int


# --- blocks ---------------------------------------------------------------------------------------------------------


class Block:
    """``holders`` sequences refer to it. It is read-only unless there is one. ``full``: it was
    once, and may be published."""

    def __init__(self):
        self.holders = 1
        self.full = False


@dataclass(eq=False)
class Sequence:
    """A sequence, live or not, and every handle that was ever given out for it. ``held_to``: up to where blocks were
    reserved. ``family``: those that find each other's blocks by their tokens; None: it does not use the prefix cache.
    """

    name: int
    tokens: list[int] = field(default_factory=list)
    handles: list[Handle] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    spares: int = 0
    promised_from: int = 0
    promised: int = 0
    held_to: int = 0
    parked: bool = False
    family: int | None = None

    @property
    def handle(self) -> Handle:
        return self.handles[-1]

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def promised_end(self) -> int:
        return self.promised_from + self.promised if self.promised else 0

    def __repr__(self) -> str:
        return f"sequence {self.name} of {self.length}"


@dataclass(eq=False)
class Write:
    """Blocks taken for ``count`` tokens from ``start`` on, until it is committed or rolled back. ``kept``: one more may
    be copied, so that what is published there stays findable."""

    sequence: Sequence
    start: int
    count: int
    replaced: list[tuple[int, Block]]
    added: int
    from_spares: int
    ahead: int
    copied: int
    kept: int


class Blocks:
    """A pool of ``total`` blocks of ``size`` tokens, shared by forks until one of them writes."""

    def __init__(self, total: int, size: int):
        self.total = self.free = total
        self.size = size

    def blocks_for(self, tokens: int) -> int:
        return (tokens + self.size - 1) // self.size

    def write(self, sequence: Sequence, start: int, count: int, ahead: int = 0) -> Write | None:
        """Take the blocks, or None where there are too few."""
        self._note_full(sequence)
        end, held = start + count, len(sequence.blocks)
        after = self.blocks_for(end)
        shared = [i for i in range(start // self.size, min(held, after)) if sequence.blocks[i].holders > 1]
        added = max(0, after - held)
        promised = self.blocks_for(sequence.promised_end)  # what is written beyond leaves the spares alone
        within = sum(i < promised for i in shared) + max(0, min(after, promised) - held)
        from_spares = min(within, sequence.spares)
        beyond = self.blocks_for(end + ahead) - after
        from_pool = len(shared) + added - from_spares + beyond
        if from_pool > self.free:
            return None
        self.free -= from_pool
        sequence.spares += beyond - from_spares
        replaced = [(i, sequence.blocks[i]) for i in shared]
        first = sequence.blocks[start // self.size : held][:1] if start % self.size else []
        kept = sum(block.full and block.holders == 1 and sequence.family is not None for block in first)
        for i in shared:
            sequence.blocks[i] = Block()
        sequence.blocks += [Block() for _ in range(added)]
        if ahead:
            sequence.promised_from, sequence.promised = end, ahead
        copied = int(bool(shared) and shared[0] == start // self.size and start % self.size != 0)
        return Write(sequence, start, count, replaced, added, from_spares, ahead, copied, kept)

    def commit(self, write: Write, tokens: tuple[int, ...]) -> None:
        sequence = write.sequence
        for _, block in write.replaced:
            self._drop(block)
        self._cut(sequence, write.start + write.count)
        lowest = write.start if write.start < sequence.length else write.start + write.count
        sequence.tokens[write.start :] = tokens
        self._fit_spares(sequence, lowest)

    def rollback(self, write: Write, created: bool, others: Iterable[Sequence]) -> None:
        """``others``: those that are in no step. The end of a sequence, though it never began, is as its release."""
        sequence = write.sequence
        if created:
            self.release(sequence, others)
            return
        for i, block in write.replaced:
            self._drop(sequence.blocks[i])
            sequence.blocks[i] = block
        for block in sequence.blocks[len(sequence.blocks) - write.added :]:
            self._drop(block)
        del sequence.blocks[len(sequence.blocks) - write.added :]
        self.free -= write.from_spares
        sequence.spares += write.from_spares

    def truncate(self, sequence: Sequence, length: int) -> None:
        self._note_full(sequence)
        self._cut(sequence, length)
        del sequence.tokens[length:]
        self._fit_spares(sequence, length)

    def _note_full(self, sequence: Sequence) -> None:
        for block in sequence.blocks[: sequence.length // self.size]:
            block.full = True

    def fork(self, parent: Sequence, child: Sequence, at: int) -> bool:
        """False: the parent's promise needs more blocks than there are, for what it now shares."""
        self._note_full(parent)
        shared = parent.blocks[: self.blocks_for(at)]
        for block in shared:
            block.holders += 1
        missing = max(0, self._spares_wanted(parent, parent.promised_from, parent.promised) - parent.spares)
        if missing > self.free:
            for block in shared:
                block.holders -= 1
            return False
        self.free -= missing
        parent.spares += missing
        child.blocks, child.tokens = list(shared), parent.tokens[:at]
        return True

    def promise(self, sequence: Sequence, tokens: int) -> bool:
        """Hold spares for ``tokens`` more. False: there are too few."""
        wanted = self._spares_wanted(sequence, sequence.length, tokens)
        missing = max(0, wanted - sequence.spares)
        if missing > self.free:
            return False
        self.free += sequence.spares - wanted
        sequence.spares = wanted
        sequence.promised_from, sequence.promised = sequence.length, tokens
        return True

    def release(self, sequence: Sequence, others: Iterable[Sequence] = ()) -> None:
        """Blocks that ``others`` shared with it are theirs alone: they need no spares for them any more."""
        self._cut(sequence, 0)
        self.free += sequence.spares
        sequence.spares = 0
        self.trim(each for each in others if each is not sequence)

    def trim(self, others: Iterable[Sequence]) -> None:
        """Blocks may be shared no more: give back the spares for them. ``others`` are in no step."""
        for other in others:
            if other.promised:
                self._give_back(other, self._spares_wanted(other, other.promised_from, other.promised))

    def park(self, sequence: Sequence, others: Iterable[Sequence]) -> int:
        """Nothing of it is left but its tokens. Returns how many blocks that frees."""
        before = self.free
        self.release(sequence, others)
        sequence.promised, sequence.parked = 0, True
        if sequence.held_to <= sequence.length:
            sequence.held_to = 0
        return self.free - before

    def place(self, sequence: Sequence, tokens: list[int], ahead: int) -> bool:
        """Blocks for the tokens of a sequence that has none, and for so many more. False: there are too few."""
        have = self.blocks_for(len(tokens))
        needed = self.blocks_for(len(tokens) + ahead)
        if needed > self.free:
            return False
        self.free -= needed
        sequence.tokens, sequence.blocks, sequence.spares = tokens, [Block() for _ in range(have)], needed - have
        sequence.promised_from, sequence.promised, sequence.parked = len(tokens), ahead, False
        return True

    def bring_back(self, sequence: Sequence) -> bool:
        """A call on a parked sequence. False: it stays parked."""
        return not sequence.parked or self.place(sequence, sequence.tokens, max(0, sequence.held_to - sequence.length))

    def _drop(self, block: Block) -> None:
        block.holders -= 1
        self.free += block.holders == 0

    def _cut(self, sequence: Sequence, length: int) -> None:
        keep = self.blocks_for(length)
        for block in sequence.blocks[keep:]:
            self._drop(block)
        del sequence.blocks[keep:]

    def _spares_wanted(self, sequence: Sequence, start: int, tokens: int) -> int:
        """Blocks that it takes to write all of a promise once more: those that are not there, and those shared."""
        if not tokens:
            return 0
        first, last, have = start // self.size, self.blocks_for(start + tokens), len(sequence.blocks)
        return max(0, last - have) + sum(block.holders > 1 for block in sequence.blocks[first:last])

    def _fit_spares(self, sequence: Sequence, lowest: int) -> None:
        """A promise counts from the lowest length since; what a fork still holds cuts it short, block by block, if
        nothing is free."""
        if not sequence.promised:
            return
        sequence.promised_from = min(sequence.promised_from, lowest)
        wanted = self._spares_wanted(sequence, sequence.promised_from, sequence.promised)
        taken = min(max(0, wanted - sequence.spares), self.free)
        self.free -= taken
        sequence.spares += taken
        while wanted > sequence.spares:
            whole = (sequence.promised_end - 1) // self.size * self.size
            sequence.promised = max(0, whole - sequence.promised_from)
            wanted = self._spares_wanted(sequence, sequence.promised_from, sequence.promised)
        self._give_back(sequence, wanted)

    def _give_back(self, sequence: Sequence, wanted: int) -> None:
        surplus = max(0, sequence.spares - wanted)
        self.free += surplus
        sequence.spares -= surplus


# --- what must be answered ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Refused:
    """Any of ``reasons`` is right."""

    reasons: frozenset[str]
    sequence: Sequence | None = None


@dataclass(eq=False)
class Committed:
    """``prefixes[i]``: the tokens whose last one row ``i`` stands at."""

    sequence: Sequence
    prefixes: list[tuple[int, ...]]
    record: Record | None


@dataclass(eq=False)
class Record:
    """A recorded answer: handles, and what the test makes of rows. ``serial`` is its place among the recorded rows."""

    meaning: tuple
    handles: tuple[Handle, ...] = ()
    rows: object = field(default=None, repr=False)
    row_bytes: int = 0
    serial: int = -1


@dataclass(eq=False)
class Replayed:
    """The recorded answer, with its rows if `Oracle.keeps_rows`."""

    record: Record


Outcome = Refused | Committed | Replayed


class Oracle:
    """One executor."""

    def __init__(self, limits: Limits, total_blocks: int, block_size: int):
        self.limits = limits
        self.blocks = Blocks(total_blocks, block_size)
        self.live: dict[bytes, Sequence] = {}
        self.gone: dict[bytes, Sequence] = {}
        self.forged: dict[bytes, set[str]] = {}
        """Handle ids that were never given out, and what may be said of each."""
        self.records: dict[tuple[bytes | None, str], Record] = {}
        self.recorded: dict[bytes, list[str]] = {}
        """The request ids of each sequence that are still known, the oldest first."""
        self.row_bytes: list[int] = []
        """Bytes of the rows of every recorded answer, in the order in which they were recorded."""
        self.oldest_rows = 0
        self.counts: Counter[str] = Counter()
        self._names = 0

    # --- handles ----------------------------------------------------------------------------------------------------

    def learn(self, sequence: Sequence, handle: Handle) -> None:
        """The server gave out ``handle``: the right length, another version, never somebody else's id."""
        assert handle.seq_len == sequence.length, f"{sequence}: {handle}"
        if sequence.handles:
            assert handle.id == sequence.handle.id and handle.version > sequence.handle.version
        else:
            assert handle.id not in self.live and handle.id not in self.gone and handle.id not in self.forged
            self.live[handle.id] = sequence
        sequence.handles.append(handle)

    def handle_faults(self, handle: Handle, *, any_version: bool = False) -> frozenset[str]:
        if handle.id in self.gone:
            return frozenset({"HANDLE_RELEASED"})
        sequence = self.live.get(handle.id)
        if sequence is None:
            return frozenset(self.forged[handle.id])
        return frozenset() if any_version or handle == sequence.handle else frozenset({"SEQUENCE_VERSION_MISMATCH"})

    def _new(self, *, cached: bool = False) -> Sequence:
        self._names += 1
        return Sequence(self._names, family=self._names if cached else None)

    def finds_blocks(self, sequence: Sequence) -> bool:
        """Whether it may find blocks of others when it comes back."""
        mine = [each for each in self.live.values() if each.family == sequence.family]
        return sequence.family is not None and len(mine) > 1

    def remove(self, sequence: Sequence) -> None:
        if not sequence.parked:
            self.blocks.release(sequence, self.live.values())
        del self.live[sequence.handle.id]
        self.gone[sequence.handle.id] = sequence
        self.forget_rows(sequence.handle.id)
        self.counts["released"] += 1

    def warmed_up(self) -> None:
        """Sequences of its own came and went."""
        self.blocks.release(Sequence(0), self.live.values())

    # --- forward ----------------------------------------------------------------------------------------------------

    def forward(
        self,
        items: list[Item],
        shape: str,
        *,
        refused: str | None,
        single: bool = False,
        all_or_nothing: bool = False,
        failing: str | None = None,
        calls: int = 1,
    ) -> list[Outcome] | Refused:
        """What a call of ``shape`` (prefill, decode, verify, any) must answer. ``refused`` is the reason of the call's
        own status, if it was refused as a whole; `Refused` says that it had to be. ``failing``: the stage at which the
        step was made to fail. With several ``calls`` the items are of calls that met in a step."""
        must, may = self._call_faults(items, shape) if calls == 1 else (set(), set())
        if all_or_nothing and any(self._item_faults(item, shape, 0)[0] for item in items):
            must, may = set(), must | may  # the item's refusal is the call's, and may come first
        if refused in must | may or must:
            return Refused(frozenset(must | may))
        outcomes, admitted, shared = self._admit(items, shape)
        faulty = next((each for each in outcomes.values() if isinstance(each, Refused)), None)
        if faulty and (single or all_or_nothing):
            return faulty
        self._step(items, shape, admitted, outcomes, all_or_nothing=all_or_nothing, failing=failing)
        for index, first in shared.items():
            outcome = outcomes[first]
            outcomes[index] = Replayed(outcome.record) if isinstance(outcome, Committed) else outcome
            self.counts["echoes"] += 1
        faulty = next((outcomes[i] for i in range(len(items)) if isinstance(outcomes[i], Refused)), None)
        if faulty and (single or all_or_nothing):
            return faulty
        return [outcomes[index] for index in range(len(items))]

    def _call_faults(self, items: list[Item], shape: str) -> tuple[set[str], set[str]]:
        """Reasons for which the whole call must be refused, and for which it may be."""
        limits = self.limits
        if not items or len(items) > limits.max_batch_items:
            return {INVALID}, {INVALID}
        good = [item for item in items if not self._item_faults(item, shape, 0)[0]]
        sound = [item for item in items if not self._malformed(item, shape) and not self._too_much(item, shape)]
        must, may = set(), set()
        for some, verdict in ((good, must), (sound, may)):
            if sum(len(item.tokens) for item in some) > limits.max_batch_tokens:
                verdict.add(INVALID)
        named = Counter(item.handle.id for item in sound if item.handle and item.handle.id in self.live)
        if any(count > 1 for count in named.values()):
            must.add(INVALID)
        if sum(self._answer_bytes(item, shape) for item in good) > limits.max_response_bytes:
            must.add("OUTPUT_TOO_LARGE")
        if sum(self._answer_bytes(item, shape) for item in sound) > limits.max_response_bytes:
            may.add("OUTPUT_TOO_LARGE")
        return must, may

    def _answer_bytes(self, item: Item, shape: str) -> int:
        output = item.output
        return PER_ITEM_OVERHEAD + output.row_count(len(item.tokens), shape == "verify") * output.row_bytes(
            self.limits.vocab
        )

    def _too_much(self, item: Item, shape: str) -> set[str]:
        """What an item by itself is too large for."""
        faults = {INVALID} if len(item.tokens) > self.limits.max_batch_tokens else set()
        if self._answer_bytes(item, shape) > self.limits.max_response_bytes:
            faults.add("OUTPUT_TOO_LARGE")
        return faults

    def _output_faults(self, output: Output) -> bool:
        limits = self.limits
        if output.kind == "top":
            return not 1 <= output.k <= min(limits.max_top_tokens, limits.vocab)
        if output.kind == "selected":
            within = 1 <= len(output.ids) <= limits.max_selected_tokens
            return not within or max(output.ids) >= limits.vocab
        return False

    def _malformed(self, item: Item, shape: str) -> bool:
        """Wrong whatever the state of its sequence."""
        return (
            not item.tokens
            or max(item.tokens) >= self.limits.vocab
            or (shape == "decode" and (item.handle is None or len(item.tokens) != 1))
            or (shape == "verify" and item.handle is None)
            or (item.handle is not None and item.reserve is not None)
            or (item.handle is None and item.truncate_to not in (None, 0))
            or self._output_faults(item.output)
            or len(item.request_id.encode()) > 128
        )

    def _item_faults(self, item: Item, shape: str, minted: int) -> tuple[set[str], Sequence | None]:
        """Everything that is wrong with an item; ``minted`` new sequences stand before it in its call."""
        limits = self.limits
        faults = {INVALID} if self._malformed(item, shape) else self._too_much(item, shape)
        if item.handle is None:
            if len(item.tokens) + (item.reserve or 0) > limits.max_context:
                faults.add("CONTEXT_LENGTH_EXCEEDED")
            if len(self.live) + minted >= limits.max_sequences:
                faults.add(TOO_MANY)
            return faults, None
        wrong = self.handle_faults(item.handle)
        faults |= wrong
        sequence = self.live.get(item.handle.id)
        if not wrong and sequence is not None:
            start = sequence.length
            if item.truncate_to is not None and item.truncate_to > start:
                faults.add("TRUNCATE_BEYOND_LENGTH")
            elif item.truncate_to is not None:
                start = item.truncate_to
            if start + len(item.tokens) > limits.max_context:
                faults.add("CONTEXT_LENGTH_EXCEEDED")
        return faults, sequence

    def _admit(self, items: list[Item], shape: str) -> tuple[dict[int, Outcome], list[int], dict[int, int]]:
        outcomes: dict[int, Outcome] = {}
        admitted: list[int] = []
        shared: dict[int, int] = {}
        in_flight: dict[tuple[bytes | None, str], int] = {}
        minted = 0
        for index, item in enumerate(items):
            key = (item.scope, item.request_id)
            meaning = item.meaning(shape == "verify")
            faults, sequence = self._item_faults(item, shape, minted)
            known = bool(item.request_id) and not self._malformed(item, shape) and not self._too_much(item, shape)
            if known and key in in_flight:
                if items[in_flight[key]].meaning(shape == "verify") == meaning:
                    shared[index] = in_flight[key]
                    continue
                faults.add("REQUEST_ID_REUSED")
            elif known and key in self.records:
                record = self.records[key]
                if record.meaning == meaning:
                    outcomes[index] = self.replay(record)
                    continue
                faults.add("REQUEST_ID_REUSED")
            if faults:
                outcomes[index] = Refused(frozenset(faults), sequence)
                continue
            admitted.append(index)
            minted += item.handle is None
            if item.request_id:
                in_flight[key] = index
        return outcomes, admitted, shared

    def _step(
        self,
        items: list[Item],
        shape: str,
        admitted: list[int],
        outcomes: dict[int, Outcome],
        *,
        all_or_nothing: bool,
        failing: str | None,
    ) -> None:
        """One forward pass: take blocks in order, then commit in order."""
        writes: dict[int, Write] = {}
        exhausted = Refused(frozenset({EXHAUSTED}))
        failed = Refused(frozenset({"STEP_FAILED", EXHAUSTED}))
        old = {index: self.live[items[index].handle.id] for index in admitted if items[index].handle is not None}
        away = [index for index, sequence in old.items() if not self.blocks.bring_back(sequence)]
        outcomes |= dict.fromkeys(admitted if all_or_nothing and away else away, exhausted)
        admitted = [index for index in admitted if index not in outcomes]
        for index in admitted:
            item = items[index]
            sequence = self._new(cached=not item.request_id) if item.handle is None else old[index]
            start = sequence.length if item.handle is None or item.truncate_to is None else item.truncate_to
            write = self.blocks.write(sequence, start, len(item.tokens), item.reserve or 0)
            if write is None:
                outcomes[index] = exhausted
            else:
                writes[index] = write
        none = all_or_nothing and len(writes) < len(admitted)
        fails = bool(admitted) if failing == "reserve" else bool(failing and writes and not none)
        if none or fails:
            fed = {write.sequence for write in writes.values()}
            for index, write in writes.items():
                fed.remove(write.sequence)
                others = [each for each in self.live.values() if each not in fed]
                self.blocks.rollback(write, items[index].handle is None, others)
            self.blocks.trim(self.live.values())
            for index in admitted:
                outcomes[index] = exhausted if not fails else failed if index not in writes else STEP_FAILED
            return
        for index, write in writes.items():
            item, sequence = items[index], write.sequence
            verify = shape == "verify"
            self.counts["truncated"] += sequence.length - write.start
            self.counts["created"] += item.handle is None
            self.counts["tokens"] += len(item.tokens)
            self.counts["copied"] += write.copied
            self.counts["kept"] += write.kept
            self.blocks.commit(write, item.tokens)
            if write.ahead:
                sequence.held_to = sequence.length + write.ahead
            rows = item.output.row_count(len(item.tokens), verify)
            self.counts["rows"] += rows
            prefixes = [tuple(sequence.tokens[: end + 1]) for end in range(sequence.length - rows, sequence.length)]
            record = None
            if item.request_id:
                record = self.record(item.scope, item.request_id, item.meaning(verify))
                if rows:
                    record.row_bytes = ROWS_BYTES + rows * item.output.row_bytes(self.limits.vocab)
                    record.serial = len(self.row_bytes)
                    self.row_bytes.append(record.row_bytes)
                    while sum(self.row_bytes[self.oldest_rows :]) > self.limits.replay_bytes:
                        self.oldest_rows += 1
            outcomes[index] = Committed(sequence, prefixes, record)
        self.blocks.trim(self.live.values())

    # --- request ids ------------------------------------------------------------------------------------------------

    def record(self, scope: bytes | None, request_id: str, meaning: tuple) -> Record:
        record = self.records[scope, request_id] = Record(meaning)
        if scope is not None:
            mine = self.recorded.setdefault(scope, [])
            mine.append(request_id)
            if len(mine) > ANSWERS_OF_A_SEQUENCE:
                oldest = self.records.pop((scope, mine.pop(0)))
                if oldest.serial >= 0:
                    self.row_bytes[oldest.serial] = 0
        return record

    def replay(self, record: Record) -> Replayed:
        self.counts["replays"] += 1
        return Replayed(record)

    def keeps_rows(self, record: Record) -> bool:
        """The newest rows are kept, within the byte budget, as long as their sequence lives."""
        return record.serial >= self.oldest_rows and self.row_bytes[record.serial] > 0

    def forget_rows(self, scope: bytes) -> None:
        """The rows of a sequence that ended make room."""
        for (where, _), record in self.records.items():
            if where == scope and record.serial >= 0:
                self.row_bytes[record.serial] = 0

    # --- operations: each returns the reasons of which one must be told, a record to be replayed, or what was done ----

    def _once(self, scope: bytes, request_id: str, meaning: tuple) -> Replayed | frozenset[str] | None:
        record = self.records.get((scope, request_id)) if request_id else None
        if record is None:
            return None
        return self.replay(record) if record.meaning == meaning else frozenset({"REQUEST_ID_REUSED"})

    def truncate(self, handle: Handle, length: int, request_id: str) -> Replayed | frozenset[str] | Sequence:
        meaning = ("truncate", handle, length)
        if (known := self._once(handle.id, request_id, meaning)) is not None:
            return known
        if faults := self.handle_faults(handle):
            return faults
        sequence = self.live[handle.id]
        if length > sequence.length:
            return frozenset({"TRUNCATE_BEYOND_LENGTH"})
        if not self.blocks.bring_back(sequence):
            return frozenset({EXHAUSTED})
        self.counts["truncated"] += sequence.length - length
        self.blocks.truncate(sequence, length)
        self.blocks.trim(self.live.values())
        if request_id:
            self.record(handle.id, request_id, meaning)
        return sequence

    def fork(
        self, handle: Handle, count: int, at: int | None, request_id: str
    ) -> Replayed | frozenset[str] | list[Sequence]:
        number = count or 1
        meaning = ("fork", handle, number, at)
        if number > self.limits.max_batch_items:
            return frozenset({INVALID})
        if (known := self._once(handle.id, request_id, meaning)) is not None:
            return known
        if faults := self.handle_faults(handle):
            return faults
        parent = self.live[handle.id]
        length = parent.length if at is None else at
        if length > parent.length:
            return frozenset({"TRUNCATE_BEYOND_LENGTH"})
        if len(self.live) + number > self.limits.max_sequences:
            return frozenset({TOO_MANY})
        if not self.blocks.bring_back(parent):
            return frozenset({EXHAUSTED})
        children = [replace(self._new(), family=parent.family) for _ in range(number)]
        for child in children:
            if not self.blocks.fork(parent, child, length):
                assert child is children[0], "what the first took is enough for all"
                return frozenset({EXHAUSTED})
        self.counts["created"] += number
        if request_id:
            self.record(handle.id, request_id, meaning)
        return children

    def release(self, handle: Handle, any_version: bool, request_id: str) -> Replayed | frozenset[str] | Sequence:
        meaning = ("release", handle, any_version)
        if (known := self._once(handle.id, request_id, meaning)) is not None:
            return known
        if faults := self.handle_faults(handle, any_version=any_version):
            return faults
        sequence = self.live[handle.id]
        self.remove(sequence)
        if request_id:
            self.record(handle.id, request_id, meaning)
        return sequence

    def reserve(self, handle: Handle, tokens: int) -> frozenset[str] | Sequence:
        if faults := self.handle_faults(handle):
            return faults
        sequence = self.live[handle.id]
        if sequence.length + tokens > self.limits.max_context:
            return frozenset({"CONTEXT_LENGTH_EXCEEDED"})
        if not self.blocks.bring_back(sequence) or not self.blocks.promise(sequence, tokens):
            return frozenset({EXHAUSTED})
        sequence.held_to = sequence.length + tokens if tokens else 0
        return sequence

    def park(self, handle: Handle) -> frozenset[str] | int:
        """How many blocks are free now."""
        if faults := self.handle_faults(handle):
            return faults
        sequence = self.live[handle.id]
        if not sequence.length:
            return frozenset({INVALID})
        if sequence.parked:
            return 0
        self.counts["parked"] += 1
        return self.blocks.park(sequence, self.live.values())

    def export(self, handle: Handle) -> frozenset[str] | Sequence:
        """A fork of it comes and goes."""
        if faults := self.handle_faults(handle):
            return faults
        sequence, copy = self.live[handle.id], Sequence(0)
        if not sequence.length:
            return frozenset({INVALID})
        if not self.blocks.bring_back(sequence) or not self.blocks.fork(sequence, copy, sequence.length):
            return frozenset({EXHAUSTED})
        self.blocks.release(copy, self.live.values())
        return sequence

    def begin_import(self, tokens: list[int], ahead: int, *, cached: bool) -> frozenset[str] | Sequence:
        """What is to be a sequence has its blocks."""
        faults = set()
        if len(tokens) + ahead > self.limits.max_context:
            faults.add("CONTEXT_LENGTH_EXCEEDED")
        if len(self.live) >= self.limits.max_sequences:
            faults.add(TOO_MANY)
        sequence = self._new(cached=cached)
        if faults or not self.blocks.place(sequence, tokens, ahead):
            return frozenset(faults or {EXHAUSTED})
        sequence.held_to = len(tokens) + ahead if ahead else 0
        return sequence


STEP_FAILED = Refused(frozenset({"STEP_FAILED"}))


# --- what the rows must hold ----------------------------------------------------------------------------------------


@lru_cache(maxsize=20_000)
def logits_after(tokens: tuple[int, ...], config) -> np.ndarray:
    """float64 [V]."""
    return identity_logits(tokens, [len(tokens) - 1], config)[0]


SUM_SLACK = 1e-6
"""A logsumexp is a few units, and is a float32."""


def tolerance(logits: np.ndarray) -> float:
    return 1e-5 * float(logits.std())


def logsumexp(logits: np.ndarray) -> float:
    top = logits.max()
    return float(top + np.log(np.exp(logits - top).sum()))


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """float32 rounded to the nearest bfloat16, ties to even, as float32."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    return (((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16) & 0xFFFFFFFF).astype(np.uint32).view(np.float32)


ROUNDINGS = {
    "unset": lambda values: values.astype(np.float32),
    "f32": lambda values: values.astype(np.float32),
    "bf16": to_bfloat16,
    "f16": lambda values: values.astype(np.float16).astype(np.float32),
}


def check_best(token: int, logits: np.ndarray) -> None:
    """``token`` is the arg-max. A near-tie is forgiven, an exact tie (a vocabulary larger than the model is wide has
    logits that are exactly 0) must go to the lowest id."""
    best = logits.max()
    assert logits[token] >= best - 2 * tolerance(logits), f"{token} has {logits[token]}, the best has {best}"
    if logits[token] == 0.0:
        assert not (logits[:token] == 0.0).any(), f"{token} won over a lower id with the same logit"


def check_top(ids: np.ndarray, values: np.ndarray, logits: np.ndarray) -> None:
    """Falling logit, rising id, nothing better left out."""
    slack = tolerance(logits)
    assert len(set(ids.tolist())) == len(ids)
    np.testing.assert_allclose(values, logits[ids], rtol=0, atol=slack)
    for i in range(len(ids) - 1):
        assert values[i] > values[i + 1] or (values[i] == values[i + 1] and ids[i] < ids[i + 1])
    left_out = np.setdiff1d(np.arange(len(logits)), ids)
    if len(left_out):
        assert logits[left_out].max() <= values[-1] + slack
        if values[-1] == 0.0:
            zeros = left_out[logits[left_out] == 0.0]
            assert not len(zeros) or ids[-1] < zeros.min()


def check_row(row: dict[str, np.ndarray], output: Output, logits: np.ndarray) -> None:
    """``row``: the fields of one row, as they came. ``logits``: float64 [V] of the oracle."""
    slack = tolerance(logits)
    match output.kind:
        case "unset" | "greedy" | "logprob":
            token = int(row["token_ids"])
            check_best(token, logits)
            assert ("logprobs" in row) == (output.kind == "logprob")
            if output.kind == "logprob":
                assert abs(float(row["logprobs"]) - (logits[token] - logsumexp(logits))) <= 2 * slack + SUM_SLACK
        case "top":
            assert row["token_ids"].shape == row["logits"].shape == (output.k,)
            check_top(row["token_ids"].astype(np.int64), row["logits"], logits)
            assert abs(float(row["logsumexp"]) - logsumexp(logits)) <= 2 * slack + SUM_SLACK
        case "selected":
            np.testing.assert_allclose(row["logits"], logits[list(output.ids)], rtol=0, atol=slack)
            assert abs(float(row["logsumexp"]) - logsumexp(logits)) <= 2 * slack + SUM_SLACK
        case "full":
            rounded = ROUNDINGS[output.dtype]
            assert row["logits"].shape == logits.shape
            assert (row["logits"] >= rounded(logits - slack)).all() and (row["logits"] <= rounded(logits + slack)).all()
        case kind:
            raise AssertionError(kind)
