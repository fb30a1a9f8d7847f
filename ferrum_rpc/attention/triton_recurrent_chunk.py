"""The chunked form of Gated DeltaNet on a CUDA device: two launches for a piece of a prompt.

In torch a block of 64 tokens takes 25 launches, one after the other: 46,000 of them for a prompt of 8,192 tokens of
Qwen3.5-0.8B, whose step took 1.27 s. Here all blocks of all heads are prepared at once: convolution, norms, and the
triangular system that says what each token of a block writes (the WY form of Yang et al. 2024, arXiv:2406.06484). Then
a program has some columns of one head's state in its registers, and passes the blocks through them.

The system is solved row by row. A product of powers of its matrix would be faster, but their entries grow beyond what
float32 holds where tokens repeat. This file imports triton.
"""

# triton has no types, and its language is not Python's
# mypy: disable-error-code="untyped-decorator"
# ruff: noqa: PLR0917

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferrum_rpc.core import RecurrentShape

TOKENS = 64
"""Of a block."""

COLUMNS = 16
"""Columns of a head's state that a program has."""

TWO_STAGES = 200 << 10
"""Bytes of shared memory with which a program loads a block while it computes the one before."""

LEAST = 16
"""The least side of a product of matrices."""

EPSILON = tl.constexpr(1e-6)
"""`recurrent.EPSILON`."""


def chunk(shape: RecurrentShape, taps: Tensor, inputs: tuple[Tensor, Tensor, Tensor], state: Tensor) -> Tensor:
    """Rows [T, value_heads, value_dim] of T tokens, in the type of their channels. ``state`` [value_heads, key_dim,
    value_dim], float32 and contiguous, is updated in place.

    ``taps``: float32 [taps, channels]. ``inputs``: `recurrent.RecurrentInputs`, whose channels begin with the rows of
    the taps - 1 tokens before.
    """
    channels, log_decay, beta = inputs
    if channels.stride(1) != 1:
        channels = channels.contiguous()
    log_decay, beta = log_decay.float().contiguous(), beta.float().contiguous()
    tokens, heads = len(log_decay), shape.value_heads
    blocks = triton.cdiv(tokens, TOKENS)
    padded = blocks * TOKENS
    query, key = (state.new_empty((padded, shape.key_heads, shape.key_dim)) for _ in range(2))
    erased = state.new_empty((padded, heads, shape.key_dim))
    written = state.new_empty((padded, heads, shape.value_dim))
    total = state.new_empty((padded, heads))
    found = channels.new_empty((tokens, heads, shape.value_dim))
    keys, values = (max(LEAST, triton.next_power_of_2(each)) for each in (shape.key_dim, shape.value_dim))
    columns = min(COLUMNS, values)
    sizes = {
        "GROUP": heads // shape.key_heads,
        "KEY_HEADS": shape.key_heads,
        "VALUE_HEADS": heads,
        "KEY_DIM": shape.key_dim,
        "VALUE_DIM": shape.value_dim,
        "TOKENS": TOKENS,
        "KEYS": keys,
        "PRECISION": "tf32x3" if channels.dtype == torch.float32 else "tf32",
    }
    prepare_kernel[blocks, heads](
        taps, channels, channels.stride(0), log_decay, beta, query, key, erased, written, total, tokens,
        TAPS=shape.taps, CHANNELS=shape.channels, VALUES=values, **sizes, num_warps=2,
    )  # fmt: skip
    chunk_kernel[heads, triton.cdiv(shape.value_dim, columns)](
        query, key, erased, written, total, state, found, tokens,
        COLUMNS=columns, **sizes, num_warps=4, num_stages=stages(state.device),
    )  # fmt: skip
    return found


@functools.cache
def stages(device: torch.device) -> int:
    """Blocks that a program has in shared memory at once: that of a block takes half of `TWO_STAGES`."""
    if device.type != "cuda":
        return 1
    there: int = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0)
    return 1 + (there >= TWO_STAGES)


@triton.jit
def prepare_kernel(
    taps: tl.tensor,
    channels: tl.tensor,
    stride: tl.tensor,
    log_decay: tl.tensor,
    beta: tl.tensor,
    query: tl.tensor,  # [padded, KEY_HEADS, KEY_DIM], of length 1 / sqrt(KEY_DIM)
    key: tl.tensor,  # as query, of length 1
    erased: tl.tensor,  # [padded, VALUE_HEADS, KEY_DIM]: what the state before the block is multiplied with
    written: tl.tensor,  # [padded, VALUE_HEADS, VALUE_DIM]: what tokens write if that state is zero
    total: tl.tensor,  # [padded, VALUE_HEADS]: the logarithm of the decay since the block began
    tokens: tl.tensor,
    TAPS: tl.constexpr,
    CHANNELS: tl.constexpr,
    VALUES: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """One program per block of tokens and value head."""
    place = tl.arange(0, TOKENS)
    token = tl.program_id(0).to(tl.int64) * TOKENS + place
    head = tl.program_id(1)
    own = head // GROUP
    there = token < tokens
    column = tl.arange(0, KEYS)
    in_key = column < KEY_DIM
    of_key = token[:, None] * (KEY_HEADS * KEY_DIM) + (own * KEY_DIM + column)[None, :]
    if head % GROUP == 0:
        rows = _convolved(taps, channels, stride, token, there, own * KEY_DIM + column, in_key, CHANNELS, TAPS)
        rows = rows / tl.sqrt(tl.sum(rows * rows, 1) + EPSILON)[:, None] / tl.sqrt(tl.full([], KEY_DIM, tl.float32))
        tl.store(query + of_key, rows, mask=in_key[None, :])
    of_keys = (KEY_HEADS + own) * KEY_DIM + column
    keys = _convolved(taps, channels, stride, token, there, of_keys, in_key, CHANNELS, TAPS)
    keys = keys / tl.sqrt(tl.sum(keys * keys, 1) + EPSILON)[:, None]
    if head % GROUP == 0:
        tl.store(key + of_key, keys, mask=in_key[None, :])
    gate = token * VALUE_HEADS + head
    since = tl.cumsum(tl.load(log_decay + gate, mask=there, other=0.0), 0)
    tl.store(total + gate, since)
    strength = tl.load(beta + gate, mask=there, other=0.0)
    before = place[:, None] > place[None, :]
    between = tl.exp(tl.where(before, since[:, None] - since[None, :], 0.0))
    system = tl.dot(keys, tl.trans(keys), input_precision=PRECISION) * between * strength[:, None]
    solved = tl.where(before, -system, 0.0)
    for row in range(1, TOKENS):
        this = place[:, None] == row
        of_row = tl.sum(tl.where(this, solved, 0.0), 0)
        of_row = of_row + tl.sum(of_row[:, None] * solved, 0)
        solved = tl.where(this, of_row[None, :], solved)
    solved = tl.where(place[:, None] == place[None, :], 1.0, solved)
    gone = tl.dot(solved, keys * (strength * tl.exp(since))[:, None], input_precision=PRECISION)
    at = (token * VALUE_HEADS + head)[:, None]
    tl.store(erased + at * KEY_DIM + column[None, :], gone, mask=in_key[None, :])
    channel = tl.arange(0, VALUES)
    in_value = channel < VALUE_DIM
    of_value = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + channel
    values = _convolved(taps, channels, stride, token, there, of_value, in_value, CHANNELS, TAPS)
    new = tl.dot(solved, values * strength[:, None], input_precision=PRECISION)
    tl.store(written + at * VALUE_DIM + channel[None, :], new, mask=in_value[None, :])


@triton.jit
def _convolved(
    taps: tl.tensor,
    channels: tl.tensor,
    stride: tl.tensor,
    token: tl.tensor,
    there: tl.tensor,
    channel: tl.tensor,
    held: tl.tensor,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
) -> tl.tensor:
    """The convolution of a block's tokens, then SiLU; 0 where there is no token."""
    mixed = tl.zeros([token.shape[0], channel.shape[0]], tl.float32)
    mask = there[:, None] & held[None, :]
    for tap in tl.static_range(TAPS):
        row = tl.load(channels + ((token + tap) * stride)[:, None] + channel[None, :], mask=mask, other=0.0)
        mixed += row.to(tl.float32) * tl.load(taps + tap * CHANNELS + channel, mask=held, other=0.0)[None, :]
    return mixed * tl.sigmoid(mixed)


@triton.jit
def chunk_kernel(
    query: tl.tensor,
    key: tl.tensor,
    erased: tl.tensor,
    written: tl.tensor,
    total: tl.tensor,
    state: tl.tensor,
    found: tl.tensor,
    tokens: tl.tensor,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """One program per value head and `COLUMNS` columns of its state."""
    head = tl.program_id(0)
    place, row = tl.arange(0, TOKENS), tl.arange(0, KEYS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    in_key, in_value = row < KEY_DIM, column < VALUE_DIM
    held = in_key[:, None] & in_value[None, :]
    states = state + head * (KEY_DIM * VALUE_DIM) + row[:, None] * VALUE_DIM + column[None, :]
    own = tl.load(states, mask=held, other=0.0)
    seen = place[:, None] >= place[None, :]
    token = place.to(tl.int64)
    for _ in range(0, tl.cdiv(tokens, TOKENS)):
        at = token * VALUE_HEADS + head
        of_key = token[:, None] * (KEY_HEADS * KEY_DIM) + ((head // GROUP) * KEY_DIM + row)[None, :]
        since = tl.load(total + at)
        end = tl.sum(tl.where(place == TOKENS - 1, since, 0.0), 0)
        gone = tl.load(erased + at[:, None] * KEY_DIM + row[None, :], mask=in_key[None, :], other=0.0)
        of_value = at[:, None] * VALUE_DIM + column[None, :]
        new = tl.load(written + of_value, mask=in_value[None, :], other=0.0)
        new -= tl.dot(gone, own, input_precision=PRECISION)
        queries = tl.load(query + of_key, mask=in_key[None, :], other=0.0)
        keys = tl.load(key + of_key, mask=in_key[None, :], other=0.0)
        between = tl.exp(tl.where(seen, since[:, None] - since[None, :], 0.0))
        scores = tl.where(seen, tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * between, 0.0)
        read = tl.dot(queries * tl.exp(since)[:, None], own, input_precision=PRECISION)
        read += tl.dot(scores, new, input_precision=PRECISION)
        kept = tl.trans(keys * tl.exp(end - since)[:, None])
        own = own * tl.exp(end) + tl.dot(kept, new, input_precision=PRECISION)
        answers = (token < tokens)[:, None] & in_value[None, :]
        tl.store(found + of_value, read.to(found.dtype.element_ty), mask=answers)
        token += TOKENS
    tl.store(states, own, mask=held)
