"""What the recurrence takes of the memory while it computes: the temporaries of `recurrent` and of its kernels."""

from __future__ import annotations

from typing import Final

import torch

from ferrum_rpc.attention import native_recurrent
from ferrum_rpc.attention.recurrent import CHUNK_TOKENS, STEP_TOKENS
from ferrum_rpc.core import RecurrentShape

SLICE: Final = 4
"""Vectors of a state's columns that a thread has at a time, as in recurrent_step.c."""


def recurrence_bytes(shape: RecurrentShape, dtype: torch.dtype, tokens: int) -> int:
    """Bytes that `RecurrentStep.recur` takes on a CPU of a layer of a model in ``dtype``, with its result, in the
    largest step of ``tokens`` tokens: they are one span. In the chunked form it takes more than so many single
    tokens."""
    if lanes := native_recurrent.lanes(shape, torch.promote_types(dtype, torch.float32), dtype):
        return _native(shape, dtype, tokens) + kernel_bytes(shape, tokens, lanes)
    return (_chunk if tokens > STEP_TOKENS else _singly)(shape, dtype, tokens)


def kernel_bytes(shape: RecurrentShape, tokens: int, lanes: int) -> int:
    """What the threads of the C kernels allocate for a call."""
    heads = 2 * shape.key_dim + shape.value_dim
    if tokens > STEP_TOKENS:
        floats = CHUNK_TOKENS * (heads + shape.key_dim + 2 * shape.value_dim + 2 * CHUNK_TOKENS + 3)
    else:
        floats = shape.key_dim * SLICE * lanes + (tokens + STEP_TOKENS) * (heads + 2)
    return torch.get_num_threads() * floats * 4


def _native(shape: RecurrentShape, dtype: torch.dtype, tokens: int) -> int:
    """The result, and for a chunk a running state, the inputs with those before them, the results of the pieces between
    checkpoints and their joint."""
    size = dtype.itemsize
    result = tokens * shape.value_heads * shape.value_dim * size
    if tokens <= STEP_TOKENS:
        return result
    return 3 * result + _state(shape) * 4 + (tokens + 2 * (shape.taps - 1)) * shape.channels * size


def _singly(shape: RecurrentShape, dtype: torch.dtype, tokens: int) -> int:
    """A running state and what is added to it, or the results, which are stacked and rounded."""
    size, wide = dtype.itemsize, max(4, dtype.itemsize)
    values, state = shape.value_heads * shape.value_dim, _state(shape) * wide
    weight = shape.channels * shape.taps * wide
    token = shape.channels * (shape.taps * size + wide) + 2 * (shape.value_heads * shape.key_dim + values) * wide
    running = state + token + (tokens - 1) * values * wide
    return state + weight + max(running, tokens * values * (2 * wide + size * (size < wide)))


def _chunk(shape: RecurrentShape, dtype: torch.dtype, tokens: int) -> int:
    """A running state, the inputs with those before them, and what is largest of: the convolution's sum, its next term
    and the sum of both; the heads of the convolved inputs while they are repeated; what is computed of the last block
    of tokens; the results of all blocks and their joint, beside what is left of that block."""
    size, wide = dtype.itemsize, max(4, dtype.itemsize)
    channels, taps, state = shape.channels, shape.taps, _state(shape)
    values, keys = shape.value_heads * shape.value_dim, shape.value_heads * shape.key_dim
    own = shape.key_heads * shape.key_dim  # keys before the value heads that share them have each one
    heads, block = channels + 2 * keys, min(tokens, CHUNK_TOKENS)
    pairs, written, decays = shape.value_heads * block * block, block * values, 3 * shape.value_heads * block
    moments = (
        (tokens + taps - 1) * channels * (size < wide) + 3 * tokens * channels,
        tokens * (channels + max(2 * own + 2 * keys, 3 * own + keys)),
        tokens * (heads + values) + decays + max(5 * pairs + written, 2 * pairs + 2 * written + 3 * state),
        tokens * (heads + 2 * values) + decays + 2 * pairs + 2 * written,
    )
    return (state + channels * taps + max(moments)) * wide + (tokens + 2 * (taps - 1)) * channels * size


def _state(shape: RecurrentShape) -> int:
    return shape.value_heads * shape.key_dim * shape.value_dim
