"""Gated DeltaNet (the recurrent layers of Qwen3-Next and Qwen3.5) over a state that steps can leave again.

A recurrent layer overwrites its state with every token, so nothing remains of the state that a rejected draft, a
truncation or a failed step must return to. A snapshot per token would cost a whole state each. A slot keeps instead an
older state and a journal, the inputs of the tokens since:

    positions    0 ...... folded ...... floor ...... length ...... length + T
                 in the state |  journal: committed tokens  | the step under way

`floor` is the length before the last committed step, and no truncation within that step goes below it. So a step folds
the journal up to `floor` into the stored state, and no further. The rows of the journal behind it and of the new tokens
advance a copy that is dropped (in C: a head's state in cache). This makes every operation on the last step one of
integers. Commit and truncation set `length`; a failed step has folded only what no truncation can reach, which the
count `folded` of each layer records, and has written only rows behind `length`. Repeated, it computes the same bits.

Each token is computed alone, by operations on tensors of one shape. So the bits of a state depend on its tokens only,
not on the steps that brought them, nor on when the journal was folded. This does not hold of the chunked form, for
prompts: it writes another slot, which takes the place of the first at commit, and may keep the states between its
tokens in further ones, as checkpoints.

The convolution needs the `taps - 1` inputs before each token. The journal has them as its oldest rows: what it stores
of a token is the input of the convolution, from which k and v are computed again. That takes 12 kB a token and layer of
Qwen3.5-0.8B in bfloat16, where k and v in float32 take 16 kB more.

The rule is that of Yang, Kautz and Hatamizadeh 2024 (arXiv:2412.06464), the chunked form that of Yang et al. 2024
(arXiv:2406.06484), both with the conventions of transformers. A state with a ring of the inputs since, in which a
rollback moves a cursor, is the idea of ReplaySSM (Dao AI Lab 2026, vLLM #48018 and #49887), there for rejected drafts.
docs/models.md has the design, its figures and the alternatives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ferrum_rpc.attention import native_recurrent
from ferrum_rpc.core import RecurrentShape

STEP_TOKENS: Final = 32
"""The most tokens of a step in the token-by-token form, and so of a truncation that costs nothing."""

CHUNK_TOKENS: Final = 64
"""Tokens that the chunked form combines into products of matrices."""

EPSILON: Final = 1e-6
"""Added to the squared length of q and k, as in transformers."""


class RecurrentInputs(NamedTuple):
    """What the projections of a layer give for T tokens.

    channels    [T, channels] of any float type: q, k and v before the convolution
    log_decay   [T, value_heads]: the logarithm of the factor by which a token lets the state decay, at most 0
    beta        [T, value_heads]: how much of a token's value is written, 0 to 1
    """

    channels: Tensor
    log_decay: Tensor
    beta: Tensor


class HeadRows(NamedTuple):
    """q and k [..., value_heads, key_dim] of length 1 (q then divided by sqrt(key_dim)), v [..., value_heads,
    value_dim]."""

    query: Tensor
    key: Tensor
    value: Tensor


def convolve(inputs: Tensor, weight: Tensor) -> Tensor:
    """The causal convolution of each channel by itself, then SiLU: [T, channels] of ``inputs`` [taps - 1 + T, channels]
    and ``weight`` [taps, channels], whose last row is for the newest input."""
    taps = len(weight)
    tokens = len(inputs) - taps + 1
    mixed = inputs[:tokens] * weight[0]
    for tap in range(1, taps):
        mixed = mixed + inputs[tap : tap + tokens] * weight[tap]
    return F.silu(mixed)


def split_heads(mixed: Tensor, shape: RecurrentShape) -> HeadRows:
    """q, k and v of ``mixed`` [..., channels], normalised and repeated for the value heads that share them."""
    keys, group = shape.key_heads * shape.key_dim, shape.value_heads // shape.key_heads
    query, key, value = torch.split(mixed, [keys, keys, shape.value_heads * shape.value_dim], -1)
    query, key = (_normalised(_heads(each, shape.key_heads)) for each in (query, key))
    return HeadRows(
        (query / shape.key_dim**0.5).repeat_interleave(group, -2),
        key.repeat_interleave(group, -2),
        _heads(value, shape.value_heads),
    )


def _heads(rows: Tensor, heads: int) -> Tensor:
    return rows.reshape(*rows.shape[:-1], heads, -1)


def _normalised(rows: Tensor) -> Tensor:
    return rows * torch.rsqrt((rows * rows).sum(-1, keepdim=True) + EPSILON)


def delta_update(state: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor) -> None:
    """One token, in place: ``state`` [H, key_dim, value_dim] decays, and what it answers to ``key`` [H, key_dim] moves
    by ``beta`` [H] towards ``value`` [H, value_dim]. All are of the state's type."""
    state.mul_(log_decay.exp()[:, None, None])
    answer = (state * key[:, :, None]).sum(-2)
    state.add_(key[:, :, None] * ((value - answer) * beta[:, None])[:, None, :])


def delta_read(state: Tensor, query: Tensor) -> Tensor:
    """The output [H, value_dim] of ``state`` [H, key_dim, value_dim] for ``query`` [H, key_dim]."""
    return (state * query[:, :, None]).sum(-2)


def delta_chunks(state: Tensor, heads: HeadRows, log_decay: Tensor, beta: Tensor) -> Tensor:
    """T tokens in the chunked form: `delta_update` and `delta_read` for each, with products of matrices.

    ``state`` [H, key_dim, value_dim] is updated in place. The tensors of ``heads`` are [T, H, ...], ``log_decay`` and
    ``beta`` [T, H], all of the state's type; so is the result [T, H, value_dim]. Its values are close to those of the
    other form; the bits differ, and depend on T.
    """
    rows = [torch.split(each.transpose(0, 1), CHUNK_TOKENS, 1) for each in (*heads, log_decay, beta)]
    found = []
    for query, key, value, decay, strength in zip(*rows, strict=True):
        total = decay.cumsum(1)  # [H, n], the logarithm of the decay since the chunk began
        between = (total[:, :, None] - total[:, None, :]).exp().tril()  # [H, n, n], from column to row
        since, until = total.exp()[:, :, None], (total[:, -1:] - total).exp()[:, :, None]
        # what each token writes depends on what those before it wrote: a triangular system
        system = strength[:, :, None] * (key @ key.mT) * between
        wanted = strength[:, :, None] * (value - since * (key @ state))
        written = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
        found.append(since * (query @ state) + ((query @ key.mT) * between) @ written)
        state.copy_(state * since[:, -1:] + (key * until).mT @ written)
    return torch.cat(found, 1).transpose(0, 1)


@dataclass(frozen=True)
class SlotImage:
    """What a fork, a transfer or a checkpoint keeps of a slot: its numbers, and the rows of its journal in order."""

    length: int
    floor: int
    folded: tuple[int, ...]
    states: Tensor
    """[layers, value_heads, key_dim, value_dim]"""
    channels: Tensor
    """[layers, rows, channels]; the last row is that of token ``length - 1``"""
    gates: Tensor
    """[layers, rows, 2, value_heads]: ``log_decay`` and ``beta``"""
    least: int = 0


class RecurrentKernels(NamedTuple):
    """What computes on a GPU, in the type of the channels.

    ``step(shape, taps [taps, channels], jobs int64 [jobs, 9], inputs)`` advances the slots of ``jobs``, a
    `native_recurrent.Jobs` on the device, by rows of ``inputs``: rows [T, value_heads, value_dim], defined where a job
    has them. ``chunk(shape, taps, inputs, state)``: `delta_chunks` of the convolved inputs, whose channels begin with
    those of the tokens before.
    """

    step: Callable[[RecurrentShape, Tensor, Tensor, RecurrentInputs], Tensor]
    chunk: Callable[[RecurrentShape, Tensor, RecurrentInputs, Tensor], Tensor]


KeptAt = tuple[int, "RecurrentSlot | None"]
"""A length at which the states of a chunk are kept, in a slot that `RecurrentSlot.restart` has set to it; None: they
are not, but the chunked form begins anew there as if they were."""


class RecurrentSlot:
    """The recurrent layers of one sequence: a state for each, and a journal of the last tokens' inputs.

    The journal is a ring; token p is in row ``p % rows``. `rows_needed` says how many a step needs.

    number   its place in a `RecurrentStore`
    length   tokens of the sequence, as callers see it
    floor    the length before the last committed step; a truncation goes no deeper for free
    folded   for each layer, the tokens that its state contains: at most ``floor``
    least    what a step that failed may have folded, here or on another rank: no truncation goes below it
    rows     of the journal in use; a step takes more of those that are there, if it needs them
    before_change  is called once, before a step, or anything else but a truncation, changes what the slot has
    states   [layers, value_heads, key_dim, value_dim]
    channels [layers, all rows, channels] in the model's type
    gates    [layers, all rows, 2, value_heads] in the states' type
    lanes    of the vectors of the C kernels that compute its steps and chunks; 0: torch does
    kernels  what computes its steps and chunks on a GPU, if anything does
    """

    def __init__(
        self,
        shape: RecurrentShape,
        states: Tensor,
        channels: Tensor,
        gates: Tensor,
        kernels: RecurrentKernels | None = None,
    ) -> None:
        """The tensors need no content; call `clear`, `restart` or `load` before the first step."""
        self.shape, self.kernels = shape, kernels
        self.states, self.channels, self.gates = states, channels, gates
        self.number = -1
        self.length = self.floor = self.least = 0
        self.folded = [0] * len(states)
        self.rows = self._fewest = rows_needed(shape, 1, 1) if kernels is None else channels.shape[1]
        self.before_change: list[Callable[[], object]] = []
        self.lanes = native_recurrent.lanes_of(shape, states, channels)
        self.addresses, self.apart = native_recurrent.addresses(states, channels, gates)

    # --- a step, layer by layer -------------------------------------------------------------------------------------

    def step(self, layer: int, weight: Tensor, inputs: RecurrentInputs, start: int | None = None) -> Tensor:
        """Rows [T, value_heads, value_dim] of at most `STEP_TOKENS` new tokens, in the type of their ``channels``.

        ``weight`` [channels, taps] is the convolution's. ``start`` is the position of the first token where a step
        before this one is not committed yet; otherwise it is `length`. When all layers ran, `commit` makes the tokens
        part of the sequence. A step that is not committed changes nothing that a caller can see.

        Raises ValueError, and changes nothing, if shapes do not fit or the journal has too few rows.
        """
        start = self.length if start is None else start
        end = start + self.checked(inputs, weight)
        if self.lanes:
            self.make_room(start, end)
            jobs = self._jobs(layer, self.folded[layer], self.floor, start, end - start)
            rows = step_together(self, weight, inputs, jobs)
            self.folded[layer] = self.floor
            return rows
        self.make_room(start, end)
        weight = self.taps(weight)
        running = self.states[layer].clone()
        if self.folded[layer] < self.floor:
            self._advance(running, layer, weight, range(self.folded[layer], self.floor))
            self.states[layer].copy_(running)  # whole, so that a failure before leaves the old state
            self.folded[layer] = self.floor
        self._write(layer, start, inputs)  # only now: the rows may take the place of those just folded
        self._advance(running, layer, weight, range(self.floor, start))
        found: list[Tensor] = []
        self._advance(running, layer, weight, range(start, end), found)
        return torch.stack(found).to(inputs.channels.dtype)

    def chunk(
        self,
        layer: int,
        weight: Tensor,
        inputs: RecurrentInputs,
        into: RecurrentSlot,
        keep: Sequence[KeptAt] = (),
    ) -> Tensor:
        """Rows [T, value_heads, value_dim] of T new tokens in the chunked form; see `step`.

        ``into`` is a slot that `restart` has set to the length behind them, and gets their states. At the lengths of
        ``keep``, in order, the chunked form begins anew, and a slot that stands there gets the states. To commit,
        replace this slot by ``into``. This slot does not change, unless it is ``into`` itself: a step that fails then
        leaves nothing of it.

        Raises ValueError, and changes nothing, if shapes do not fit or lengths are not in order.
        """
        tokens, start = self.checked(inputs, weight), self.length
        ends = [length - start for length, _ in keep] + [tokens if into is self else into.length - start]
        if ends[-1] != tokens or sorted({0, *ends}) != [0, *ends]:
            raise ValueError("the slot after a chunk must be longer by the tokens of the chunk, and those kept shorter")
        weight, before, first = self.taps(weight), self.shape.taps - 1, 0
        running = self.states[layer].clone()
        self._advance(running, layer, weight, range(self.folded[layer], start))
        last = self.channels[layer, self._ring(start - before, start)]
        window = torch.cat((last, inputs.channels.to(last.dtype)))
        log_decay, beta = (each.to(running.dtype) for each in inputs[1:])
        found = []
        for end, slot in zip(ends, (*[each for _, each in keep], into), strict=True):
            piece = slice(first, end)
            span = RecurrentInputs(window[first : end + before], log_decay[piece], beta[piece])
            found.append(self._chunked(running, weight, span))
            if slot is not None:
                slot.states[layer].copy_(running)
                slot.channels[layer, slot._ring(start + end - before, start + end)] = window[end : end + before]
                slot.folded[layer] = start + end
            first = end
        return torch.cat(found).to(inputs.channels.dtype)

    # --- between steps ----------------------------------------------------------------------------------------------

    def commit(self, tokens: int) -> None:
        """Make the ``tokens`` of a step that ran in all layers part of the sequence; steps commit in their order."""
        self.floor, self.length = self.length, self.length + tokens

    def reaches(self, length: int) -> bool:
        """Whether `truncate` can go back to ``length``."""
        return max(self.least, *self.folded) <= length <= self.length

    def truncate(self, length: int) -> None:
        """Cut the sequence back to ``length``: to any within the last committed step, and deeper as long as no state
        has folded what is beyond. Only numbers change.

        Raises ValueError if a checkpoint is needed.
        """
        if not self.reaches(length):
            folded = max(self.least, *self.folded)
            raise ValueError(f"a truncation to {length} needs a checkpoint: {folded} tokens are folded")
        self.length, self.floor = length, min(self.floor, length)

    def clear(self) -> None:
        """Make it that of a sequence without tokens."""
        self.restart(0)
        self.states.zero_()
        # the inputs before the first token are zeros, in rows -3 to -1
        self.channels[:, self._ring(1 - self.shape.taps, 0)] = 0.0

    def restart(self, length: int) -> None:
        """Make it a slot for ``length`` tokens whose states `chunk` will bring."""
        self.become(length, length, [length] * len(self.folded))

    def become(self, length: int, floor: int, folded: Sequence[int]) -> None:
        """Make it a slot of these lengths, whose states, and the rows of whose journal, are written then. Raises
        ValueError if the journal has too few rows for them."""
        needed, there = length - min(folded) + self.shape.taps - 1, self.channels.shape[1]
        if needed > there:
            raise ValueError(f"the journal has {there} rows, and {needed} are needed")
        self.leave()
        self.length, self.floor, self.folded = length, floor, list(folded)
        self.least = max(folded)
        self.rows = max(self._fewest, needed)

    def leave(self) -> None:
        """What it has is about to change."""
        while self.before_change:
            self.before_change[-1]()
            self.before_change.pop()

    def kept(self) -> list[int]:
        """The rows of the journal that the sequence needs, in the order of tokens; the last is that of the last one."""
        return self._ring(min(self.folded) - self.shape.taps + 1, self.length)

    def save_rows(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """The rows of the tokens ``start .. end``, for `restore_rows`."""
        ring = self._ring(start, end)
        return self.channels[:, ring], self.gates[:, ring]

    def restore_rows(self, start: int, end: int, saved: tuple[Tensor, Tensor]) -> None:
        """Put back what `save_rows` returned."""
        ring = self._ring(start, end)
        self.channels[:, ring], self.gates[:, ring] = saved

    def image(self, *, shared: bool = False) -> SlotImage:
        """What the sequence needs, in no more rows than it needs. A copy, unless the states are to be ``shared``."""
        ring = self.kept()
        return SlotImage(
            self.length,
            self.floor,
            tuple(self.folded),
            self.states if shared else self.states.clone(),
            self.channels[:, ring],
            self.gates[:, ring],
            self.least,
        )

    def load(self, image: SlotImage) -> None:
        """Take over the content of ``image``. Raises ValueError if the journal has too few rows for it."""
        self.become(image.length, image.floor, image.folded)
        self.least = image.least
        ring = self.kept()
        self.states.copy_(image.states)
        self.channels[:, ring], self.gates[:, ring] = image.channels, image.gates

    # --- inside -----------------------------------------------------------------------------------------------------

    def make_room(self, start: int, end: int) -> None:
        """Use as many rows of the journal as a step of the tokens ``start .. end`` needs. Raises ValueError if there
        are too few, or if it cannot be a step."""
        if not start < end <= start + STEP_TOKENS or start < self.length:
            raise ValueError(f"a step must have 1 to {STEP_TOKENS} tokens, behind those of the sequence")
        needed = rows_needed(self.shape, start - self.floor, end - start)
        if needed <= self.rows:
            return
        if needed > (there := self.channels.shape[1]):
            raise ValueError(f"the journal has {there} rows, and the step needs {needed}")
        first = min(self.folded) - self.shape.taps + 1
        before, kept = self.rows, self.save_rows(first, start)
        try:
            self.rows = needed
            self.restore_rows(first, start, kept)
        except BaseException:
            self.rows = before
            self.restore_rows(first, start, kept)
            raise

    def checked(self, inputs: RecurrentInputs, weight: Tensor) -> int:
        """The number of tokens. Raises ValueError if shapes do not fit."""
        tokens, heads, shape = len(inputs.channels), self.shape.value_heads, self.shape
        wanted = [(tokens, shape.channels), (tokens, heads), (tokens, heads), (shape.channels, shape.taps)]
        if [tuple(each.shape) for each in (*inputs, weight)] != wanted:
            raise ValueError(f"inputs and weight must have the shapes {wanted}")
        return tokens

    def taps(self, weight: Tensor) -> Tensor:
        """[taps, channels] of ``weight`` [channels, taps], in the states' type."""
        return weight.to(self.states.dtype).T.contiguous()

    def _ring(self, first: int, last: int) -> list[int]:
        """Rows of the tokens ``first .. last``."""
        return [position % self.rows for position in range(first, last)]

    def _write(self, layer: int, start: int, inputs: RecurrentInputs) -> None:
        ring = self._ring(start, start + len(inputs.channels))
        self.channels[layer, ring] = inputs.channels.to(self.channels.dtype)
        self.gates[layer, ring] = torch.stack(inputs[1:], 1).to(self.gates.dtype)

    def _advance(
        self, state: Tensor, layer: int, weight: Tensor, tokens: range, found: list[Tensor] | None = None
    ) -> None:
        """Update ``state`` with ``tokens`` of the journal, the next ones. ``found`` gets the output of each; only torch
        takes it."""
        if (self.lanes or (self.kernels is not None and found is None)) and tokens:
            jobs = self._jobs(layer, tokens.start, tokens.stop, tokens.stop, 0)
            jobs[0, 0] = state.data_ptr()
            none = RecurrentInputs(self.channels[layer, :0], *self.gates[layer, :0].unbind(1))
            if self.kernels is not None:
                self.kernels.step(self.shape, weight, torch.from_numpy(jobs).to(state.device), none)
            else:
                native_recurrent.step(self.shape, self.lanes, weight, jobs, none)
            return
        for position in tokens:
            window = self.channels[layer, self._ring(position + 1 - self.shape.taps, position + 1)]
            query, key, value = split_heads(convolve(window.to(state.dtype), weight)[0], self.shape)
            log_decay, beta = self.gates[layer, position % self.rows]
            delta_update(state, key, value, log_decay, beta)
            if found is not None:
                found.append(delta_read(state, query))

    def _chunked(self, state: Tensor, weight: Tensor, inputs: RecurrentInputs) -> Tensor:
        """Update ``state`` with the tokens of ``inputs``, whose channels begin with the rows of those before them."""
        if self.kernels is not None:
            return self.kernels.chunk(self.shape, weight, inputs, state)
        if self.lanes:
            return native_recurrent.chunk(self.shape, self.lanes, weight, inputs, state)
        heads = split_heads(convolve(inputs.channels.to(state.dtype), weight), self.shape)
        return delta_chunks(state, heads, *inputs[1:])

    def _jobs(self, layer: int, folded: int, floor: int, start: int, count: int) -> native_recurrent.Jobs:
        """The one of this slot, for ``count`` rows."""
        at = self.addresses + layer * self.apart
        return np.array([[*at.tolist(), self.rows, folded, floor, start, 0, count]], np.int64)


def step_together(
    slot: RecurrentSlot, weight: Tensor, inputs: RecurrentInputs, jobs: native_recurrent.Jobs | Tensor
) -> Tensor:
    """`RecurrentSlot.step` of the slots of ``jobs``, of which ``slot`` is one, in one call of C, or by the kernel that
    they have, for which the jobs are on the device. Rows that none has are undefined."""
    dtype = inputs.channels.dtype
    inputs = inputs._replace(channels=inputs.channels.to(slot.channels.dtype))
    if isinstance(jobs, Tensor):
        assert slot.kernels is not None  # noqa: S101 - see above
        return slot.kernels.step(slot.shape, slot.taps(weight), jobs, inputs).to(dtype)
    return native_recurrent.step(slot.shape, slot.lanes, slot.taps(weight), jobs, inputs).to(dtype)


def rows_needed(shape: RecurrentShape, last: int, new: int) -> int:
    """Rows of a journal for a step of ``new`` tokens behind a committed one of ``last``: a row for each, and the inputs
    of the convolution before them."""
    return shape.taps - 1 + last + new
