"""The recurrence of Gated DeltaNet on a CUDA device: a step is two launches a layer, whatever its sequences.

In torch every token of every sequence takes a dozen launches, each of which passes over a whole state. Here a program
has some columns of one head's state in its registers. It passes the rows of the journal and then the new tokens through
them, and writes the state once, at the floor: what `recurrent` describes, and what ``recurrent_step.c`` does on a CPU,
for the same jobs. The new tokens go into the journal by a launch of its own, when no program reads the rows any more
that they replace.

A step's jobs are read from device memory, so a CUDA graph replays it for other sequences. A job of zeros does nothing,
as padding must. This file imports triton.
"""

# triton has no types, and its language is not Python's
# mypy: disable-error-code="untyped-decorator"
# ruff: noqa: PLR0915, PLR0917

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ferrum_rpc.core import RecurrentShape

COLUMNS = 64
"""Columns of a head's state that a program has."""

WARPS = 8

JOURNALED = 1024
"""Channels of a program that writes the journal."""

EPSILON = tl.constexpr(1e-6)
"""`recurrent.EPSILON`."""

JOB = tl.constexpr(9)
"""Integers of a job."""


def step(shape: RecurrentShape, taps: Tensor, jobs: Tensor, inputs: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Rows [T, value_heads, value_dim], defined where a job has them, in the type of their channels. States contain
    ``floor`` tokens then, and journals have the new ones.

    ``jobs``: int64 [jobs, 9] on the device, `native_recurrent.Jobs` of states in float32 and journals of the inputs'
    type. ``taps``: float32 [taps, channels]. ``inputs``: `recurrent.RecurrentInputs`.
    """
    channels, log_decay, beta = inputs
    if channels.stride(1) != 1:
        channels = channels.contiguous()
    log_decay, beta = log_decay.float().contiguous(), beta.float().contiguous()
    found = channels.new_empty((len(log_decay), shape.value_heads, shape.value_dim))
    columns = min(COLUMNS, triton.next_power_of_2(shape.value_dim))
    grid = (shape.value_heads * triton.cdiv(shape.value_dim, columns), len(jobs))
    step_kernel[grid](
        jobs,
        taps,
        channels,
        channels.stride(0),
        log_decay,
        beta,
        found,
        GROUP=shape.value_heads // shape.key_heads,
        KEY_HEADS=shape.key_heads,
        VALUE_HEADS=shape.value_heads,
        KEY_DIM=shape.key_dim,
        VALUE_DIM=shape.value_dim,
        TAPS=shape.taps,
        WINDOW=triton.next_power_of_2(shape.taps),
        CHANNELS=shape.channels,
        KEYS=triton.next_power_of_2(shape.key_dim),
        COLUMNS=columns,
        num_warps=WARPS,
    )
    journal_kernel[len(jobs), triton.cdiv(shape.channels, JOURNALED)](
        jobs,
        channels,
        channels.stride(0),
        log_decay,
        beta,
        CHANNELS=shape.channels,
        AT_ONCE=JOURNALED,
        VALUE_HEADS=shape.value_heads,
        HEADS=triton.next_power_of_2(shape.value_heads),
    )
    return found


@triton.jit
def step_kernel(
    jobs: tl.tensor,
    taps: tl.tensor,
    channels: tl.tensor,
    stride: tl.tensor,
    log_decay: tl.tensor,
    beta: tl.tensor,
    found: tl.tensor,
    GROUP: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TAPS: tl.constexpr,
    WINDOW: tl.constexpr,
    CHANNELS: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """One program per job and `COLUMNS` columns of a head."""
    blocks: tl.constexpr = (VALUE_DIM + COLUMNS - 1) // COLUMNS
    head = tl.program_id(0) // blocks
    column = (tl.program_id(0) % blocks) * COLUMNS + tl.arange(0, COLUMNS)
    job = jobs + tl.program_id(1).to(tl.int64) * JOB
    rows = tl.load(job + 3)
    folded, floor, start = tl.load(job + 4), tl.load(job + 5), tl.load(job + 6)
    first, end = tl.load(job + 7), start + tl.load(job + 8)
    if folded < end:
        journal = tl.load(job + 1).to(tl.pointer_type(channels.dtype.element_ty))
        gates = tl.load(job + 2).to(tl.pointer_type(tl.float32))
        key = tl.arange(0, KEYS)
        in_key, in_value = key < KEY_DIM, column < VALUE_DIM
        held = in_key[:, None] & in_value[None, :]
        states = tl.load(job).to(tl.pointer_type(tl.float32)) + head * (KEY_DIM * VALUE_DIM)
        states = states + key[:, None] * VALUE_DIM + column[None, :]
        state = tl.load(states, mask=held, other=0.0)
        of_query = (head // GROUP) * KEY_DIM + key
        of_key = KEY_HEADS * KEY_DIM + of_query
        of_value = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + column
        tap = tl.arange(0, WINDOW)
        in_tap = (tap < TAPS)[:, None]
        keys_held, values_held = in_tap & in_key[None, :], in_tap & in_value[None, :]
        weights = taps + (tap * CHANNELS)[:, None]
        query_weights = tl.load(weights + of_query[None, :], mask=keys_held, other=0.0)
        key_weights = tl.load(weights + of_key[None, :], mask=keys_held, other=0.0)
        value_weights = tl.load(weights + of_value[None, :], mask=values_held, other=0.0)
        for position in range(folded, end):
            at = position - (TAPS - 1) + tap
            own = (channels + (first + at - start) * stride).to(tl.int64)
            old = (journal + ((at % rows + rows) % rows) * CHANNELS).to(tl.int64)
            row = tl.where(at >= start, own, old).to(tl.pointer_type(channels.dtype.element_ty))[:, None]
            keys = tl.sum(tl.load(row + of_key[None, :], mask=keys_held, other=0.0).to(tl.float32) * key_weights, 0)
            value = tl.sum(
                tl.load(row + of_value[None, :], mask=values_held, other=0.0).to(tl.float32) * value_weights, 0
            )
            keys, value = keys * tl.sigmoid(keys), value * tl.sigmoid(value)
            keys = keys / tl.sqrt(tl.sum(keys * keys, 0) + EPSILON)
            new = position >= start
            here = (first + position - start) * VALUE_HEADS + head
            there = (position % rows) * (2 * VALUE_HEADS) + head
            decay = tl.load(log_decay + here, mask=new, other=0.0) + tl.load(gates + there, mask=~new, other=0.0)
            written = tl.load(beta + here, mask=new, other=0.0)
            written += tl.load(gates + there + VALUE_HEADS, mask=~new, other=0.0)
            state = state * tl.exp(decay)
            answer = tl.sum(state * keys[:, None], 0)
            state = state + keys[:, None] * ((value - answer) * written)[None, :]
            if position == floor - 1:
                tl.store(states, state, mask=held)
            if new:
                asked = tl.load(row + of_query[None, :], mask=keys_held, other=0.0).to(tl.float32) * query_weights
                query = tl.sum(asked, 0)
                query = query * tl.sigmoid(query)
                query = query / tl.sqrt((tl.sum(query * query, 0) + EPSILON) * KEY_DIM)
                read = tl.sum(state * query[:, None], 0)
                tl.store(found + here * VALUE_DIM + column, read.to(found.dtype.element_ty), mask=in_value)


@triton.jit
def journal_kernel(
    jobs: tl.tensor,
    channels: tl.tensor,
    stride: tl.tensor,
    log_decay: tl.tensor,
    beta: tl.tensor,
    CHANNELS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
) -> None:
    """One program per job and `AT_ONCE` channels; the first of a job also has its gates."""
    job = jobs + tl.program_id(0).to(tl.int64) * JOB
    rows, start = tl.load(job + 3), tl.load(job + 6)
    first, count = tl.load(job + 7), tl.load(job + 8)
    if count > 0:
        journal = tl.load(job + 1).to(tl.pointer_type(channels.dtype.element_ty))
        gates = tl.load(job + 2).to(tl.pointer_type(tl.float32))
        channel = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
        head = tl.arange(0, HEADS)
        held, leads = channel < CHANNELS, (head < VALUE_HEADS) & (tl.program_id(1) == 0)
        for token in range(0, count):
            row = (start + token) % rows
            taken = tl.load(channels + (first + token) * stride + channel, mask=held)
            tl.store(journal + row * CHANNELS + channel, taken, mask=held)
            here, there = (first + token) * VALUE_HEADS + head, row * (2 * VALUE_HEADS) + head
            tl.store(gates + there, tl.load(log_decay + here, mask=leads), mask=leads)
            tl.store(gates + there + VALUE_HEADS, tl.load(beta + here, mask=leads), mask=leads)
