"""The slots of all sequences of a model with recurrent layers, and a step over several of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ferrum_rpc.attention.native_recurrent import FLOOR, FOLDED
from ferrum_rpc.attention.recurrent import (
    STEP_TOKENS,
    KeptAt,
    RecurrentInputs,
    RecurrentKernels,
    RecurrentSlot,
    rows_needed,
    step_together,
)
from ferrum_rpc.core import RecurrentShape


class RecurrentStore:
    """The tensors of all slots, and of one without tokens, ``empty``, that chunks of new sequences start from.

    The memory is not initialised: on a CPU its pages are touched when they are first written. So a sequence that only
    decodes takes little of its journal, which has place for steps of `STEP_TOKENS` tokens.
    """

    def __init__(
        self,
        shape: RecurrentShape,
        layers: int,
        slots: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        rows: int | None = None,
        kernels: RecurrentKernels | None = None,
    ) -> None:
        """Slots of models in ``dtype``; ``rows``: of each journal (default: for any steps). ``kernels``: what
        computes on a GPU."""
        rows = rows_needed(shape, STEP_TOKENS, STEP_TOKENS) if rows is None else rows
        wide, heads = torch.promote_types(dtype, torch.float32), shape.value_heads
        options: dict[str, Any] = {"device": device}
        states = torch.empty((slots, layers, heads, shape.key_dim, shape.value_dim), dtype=wide, **options)
        channels = torch.empty((slots, layers, rows, shape.channels), dtype=dtype, **options)
        gates = torch.empty((slots, layers, rows, 2, heads), dtype=wide, **options)
        self.buffers, self.kernels = (states, channels, gates), kernels
        parts = zip(states, channels, gates, strict=True)
        self.slots = [RecurrentSlot(shape, one, row, gate, kernels) for one, row, gate in parts]
        for number, slot in enumerate(self.slots):
            slot.number = number
        fewest = rows_needed(shape, 1, 1)
        wanted = [(each, each.shape[2:]) for each in (states, channels[:, :, :fewest], gates[:, :, :fewest])]
        state, row, gate = (each.new_zeros(one).expand(layers, *one) for each, one in wanted)
        self.empty = RecurrentSlot(shape, state, row, gate, kernels)

    def copy(self, source: RecurrentSlot, into: RecurrentSlot, length: int) -> None:
        """Give ``into`` the content of ``source`` cut to ``length``."""
        into.load(source.image(shared=True))
        into.truncate(length)

    def begin(self, spans: Sequence[RecurrentSpan]) -> RecurrentStep:
        """A step over these slots. Raises ValueError as `RecurrentStep` does."""
        return RecurrentStep(spans)

    def begin_anew(self, counts: Sequence[int]) -> RecurrentStep:
        """A step of so many tokens each, without a purpose, in the first slots, which must be free."""
        spans = list[RecurrentSpan]()
        for slot, count in zip(self.slots, counts, strict=False):
            slot.clear()
            source = slot if count <= STEP_TOKENS else self.empty
            spans.append(RecurrentSpan(source, slot, 0, count))
        return RecurrentStep(spans)

    def recur(self, jobs: Tensor) -> Callable[[int, Tensor, Tensor, Tensor, Tensor], Tensor]:
        """What advances the slots that ``jobs`` [layers, jobs, 9] name when it runs, on the device: by the kernel, in a
        graph."""
        first, kernels = self.slots[0], self.kernels
        assert kernels is not None  # noqa: S101 - see above

        def recur(layer: int, weight: Tensor, channels: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
            return kernels.step(
                first.shape, first.taps(weight), jobs[layer], RecurrentInputs(channels, log_decay, beta)
            )

        return recur

    def undo(self, step: RecurrentStep) -> None:
        """Undo a step that has ended and is not committed."""
        step.undo()


def slot_bytes(shape: RecurrentShape, layers: int, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes of the states of a slot of a `RecurrentStore`, and of its journal."""
    store = RecurrentStore(shape, layers, 1, dtype=dtype, device=torch.device("meta"))
    states, *journal = store.buffers
    return states.nbytes, sum(each.nbytes for each in journal)


class RecurrentSpan(NamedTuple):
    """``tokens`` of a sequence of ``start`` tokens, whose ``slot`` reaches back to that. They lead to ``into``:
    the same slot if there are at most `STEP_TOKENS`, and otherwise another one; see `RecurrentSlot.chunk`. It may be
    the same there, too, if its content is not needed. ``keep``: where states are kept."""

    slot: RecurrentSlot
    into: RecurrentSlot
    start: int
    tokens: int
    keep: Sequence[KeptAt] = ()


class RecurrentStep:
    """The recurrence of a step over several sequences: each has a slot, and the next of the step's packed rows.

    A span of at most `STEP_TOKENS` tokens is computed token by token, a longer one in the chunked form. Call `recur`
    once for each recurrent layer, then `commit`. A step that is not committed changes nothing that a caller can see,
    once `undo` was called.
    """

    def __init__(self, spans: Sequence[RecurrentSpan]) -> None:
        """Cuts the slots back to where the spans start. Raises ValueError if one cannot be."""
        self.spans = spans
        self.number = 0
        """By which ranks name it."""
        self.before = [(each.slot.length, each.slot.floor) for each in spans]
        """The length and the floor of each span's slot."""
        self._rows: list[tuple[int, int, tuple[Tensor, Tensor]] | None] = []
        for slot, into, start, count, keep in spans:
            saved = None
            if start < slot.length and count <= STEP_TOKENS:
                saved = start, slot.length, slot.save_rows(start, slot.length)
            slot.truncate(start)
            if into is not slot:
                into.restart(start + count)
            else:
                into.leave()
            for length, kept in keep:
                if kept is not None:
                    kept.restart(length)
            self._rows.append(saved)
        ends = [*itertools.accumulate(each.tokens for each in spans)]
        self._tokens = ends[-1]
        self._together = [
            (span.slot, end - span.tokens, span.tokens) for span, end in zip(spans, ends, strict=True) if _joins(span)
        ]
        """Slots that one call of C advances, or one of their kernel, with their first rows and how many they have."""
        self._others = [
            (span, slice(end - span.tokens, end)) for span, end in zip(spans, ends, strict=True) if not _joins(span)
        ]
        self._jobs: npt.NDArray[np.int64] | None = None
        self._sent: Tensor | None = None

    def jobs(self) -> npt.NDArray[np.int64]:
        """`native_recurrent.Jobs` of every layer, [layers, jobs, 9], of the slots that are advanced together."""
        if self._jobs is None:
            slots = [slot for slot, _, _ in self._together]
            for slot, _, count in self._together:
                slot.make_room(slot.length, slot.length + count)
            layers = len(slots[0].folded)
            self._jobs = made = np.empty((layers, len(slots), 9), np.int64)
            made[:, :, :3] = np.array([slot.addresses for slot in slots])
            made[:, :, :3] += np.arange(layers)[:, None, None] * np.array([slot.apart for slot in slots])
            made[:, :, FOLDED] = np.array([slot.folded for slot in slots]).T
            made[:, :, 3] = [slot.rows for slot in slots]
            made[:, :, 5:] = [(slot.floor, slot.length, row, count) for slot, row, count in self._together]
        return self._jobs

    def advanced(self) -> None:
        """C has advanced the slots of `jobs`, in some layers or in all."""
        for (slot, _, _), folded in zip(self._together, self.jobs()[:, :, FOLDED].T.tolist(), strict=True):
            slot.folded = folded

    def sent(self, jobs: Tensor) -> None:
        """The `jobs` are on the device, where the kernel of the slots reads them."""
        self._sent = jobs

    def replayed(self) -> None:
        """A graph has advanced all slots, in all layers."""
        jobs = self.jobs()
        jobs[:, :, FOLDED] = jobs[:, :, FLOOR]
        self.advanced()

    @property
    def native(self) -> bool:
        """Whether C can advance all slots."""
        return not self._others and not self.queued

    @property
    def queued(self) -> bool:
        """Whether a kernel on the device advances some slots together."""
        return bool(self._together) and self._together[0][0].kernels is not None

    @property
    def uniform(self) -> bool:
        """Whether all slots are advanced together."""
        return not self._others

    def recur(self, layer: int, weight: Tensor, channels: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
        """Rows [T, value_heads, value_dim] of the ``layer``-th recurrent layer of `RecurrentInputs` of T packed rows;
        ``weight`` [channels, taps]. Raises ValueError as `RecurrentSlot.step` does."""
        first, inputs = self.spans[0].slot, RecurrentInputs(channels, log_decay, beta)
        rows = first.checked(inputs, weight)
        if self._tokens != rows:
            raise ValueError(f"the step has {self._tokens} tokens, and {rows} rows are given")
        if self._together:
            if self.queued and self._sent is None:
                self.sent(torch.from_numpy(self.jobs()).to(channels.device))
            jobs = self.jobs() if self._sent is None else self._sent
            found = step_together(self._together[0][0], weight, inputs, jobs[layer])
            for slot, _, _ in self._together:
                slot.folded[layer] = slot.floor
        else:
            found = channels.new_empty((rows, first.shape.value_heads, first.shape.value_dim))
        for (slot, into, _, count, keep), own in self._others:
            part = RecurrentInputs(*(each[own] for each in inputs))
            if count <= STEP_TOKENS:
                found[own] = slot.step(layer, weight, part)
            else:
                found[own] = slot.chunk(layer, weight, part, into, keep)
        return found

    def commit(self, left_out: Collection[int] = ()) -> None:
        """Make the tokens part of their sequences: those of ``into`` from now on. Spans that are ``left_out``, by
        index, are undone."""
        for index, (slot, into, start, count, _) in enumerate(self.spans):
            if index in left_out or (count > STEP_TOKENS and into is not slot):
                self._undo(index)
            elif count <= STEP_TOKENS:
                slot.commit(count)
            else:
                slot.length = slot.floor = start + count

    def undo(self) -> None:
        """Nothing happened. Call it once the step has ended, instead of `commit`."""
        for index, (slot, _, _, count, _) in enumerate(self.spans):
            if count <= STEP_TOKENS:
                slot.least = max(slot.least, slot.floor)
            self._undo(index)

    def _undo(self, index: int) -> None:
        slot, rows = self.spans[index].slot, self._rows[index]
        slot.length, slot.floor = self.before[index]
        if rows is not None:
            slot.restore_rows(*rows)


def _joins(span: RecurrentSpan) -> bool:
    """Whether the slot is advanced together with others."""
    return span.tokens <= STEP_TOKENS and bool(span.slot.lanes or span.slot.kernels is not None)
