"""The recurrent states of a model shared by ranks: each rank has slots of the same numbers, for its own heads.

Rank 0 decides which slot a sequence has, and how long it is. What changes the content of slots, copies and steps, runs
on all ranks in the same order. A request has the lengths of its slots, so that no rank needs a message about a commit
or a truncation. Only how many tokens a state contains may differ, after a failed step (`RecurrentSlot.least`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ferrum_rpc.attention.recurrent import RecurrentSlot
from ferrum_rpc.attention.recurrent_steps import RecurrentSpan, RecurrentStep, RecurrentStore
from ferrum_rpc.engine.ranks.leader import Ranks


class SlotNumbers(NamedTuple):
    """A slot of a store (-1: the one without tokens), and its numbers before a request."""

    number: int
    length: int
    floor: int


class StepNumbers(NamedTuple):
    """A step of `RankedSlots`, and for each of its spans the slot, the number of the one that it leads to, its start
    and its tokens, and the lengths at which states are kept, with the number of a slot or None."""

    number: int
    spans: list[tuple[SlotNumbers, int, int, int, list[tuple[int, int | None]]]]


class RankedSlots(RecurrentStore):
    """Rank 0's slots."""

    def __init__(self, *arguments: Any, ranks: Ranks, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._ranks = ranks
        self._numbers = 0

    def copy(self, source: RecurrentSlot, into: RecurrentSlot, length: int) -> None:
        numbers = SlotNumbers(source.number, source.length, source.floor)
        self._ranks.send("states", "copy", numbers, into.number, length)
        super().copy(source, into, length)

    def begin(self, spans: Sequence[RecurrentSpan]) -> RecurrentStep:
        self._numbers += 1
        step = super().begin(spans)
        step.number = self._numbers
        return step

    def undo(self, step: RecurrentStep) -> None:
        self._ranks.send("states", "undo", step.number)
        super().undo(step)


def numbers_of(step: RecurrentStep) -> StepNumbers:
    """What the other ranks must know of a step of `RankedSlots`."""
    spans = []
    for (slot, into, start, tokens, keep), before in zip(step.spans, step.before, strict=True):
        kept = [(length, None if each is None else each.number) for length, each in keep]
        spans.append((SlotNumbers(slot.number, *before), into.number, start, tokens, kept))
    return StepNumbers(step.number, spans)


class FollowingSlots:
    """The slots of another rank, over its ``store``."""

    def __init__(self, store: RecurrentStore) -> None:
        self.store = store
        self._step: RecurrentStep | None = None

    def copy(self, source: SlotNumbers, into: int, length: int) -> None:
        """See `RecurrentStore.copy`."""
        self.store.copy(self.slot(source), self.store.slots[into], length)

    def begin(self, numbers: StepNumbers) -> RecurrentStep:
        """The same step over its own slots."""
        slots, spans = self.store.slots, list[RecurrentSpan]()
        for source, into, start, tokens, keep in numbers.spans:
            kept = [(length, None if each is None else slots[each]) for length, each in keep]
            spans.append(RecurrentSpan(self.slot(source), slots[into], start, tokens, kept))
        self._step = step = self.store.begin(spans)
        step.number = numbers.number
        return step

    def undo(self, number: int) -> None:
        """Undo a step; does nothing if it had not arrived yet."""
        step, self._step = self._step, None
        if step is not None and step.number == number:
            self.store.undo(step)

    def slot(self, numbers: SlotNumbers) -> RecurrentSlot:
        """The slot, of these lengths."""
        if numbers.number < 0:
            return self.store.empty
        slot = self.store.slots[numbers.number]
        slot.length, slot.floor = numbers.length, numbers.floor
        return slot
