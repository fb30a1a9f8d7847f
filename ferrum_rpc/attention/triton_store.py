"""Kernels that write K and V of a step's new tokens into their slots, in one launch for both.

Two ``index_copy_`` calls are four launches a layer if K and V come out of a fused projection (each needs a dense copy
first). These kernels read the projection's output in place: one for a cache of unquantized numbers, one that quantizes
them to the rows of `eight_bits`.
"""

# triton has no types, and its language is not Python's
# mypy: disable-error-code="untyped-decorator"
# a kernel must be one function with all of its arguments
# ruff: noqa: PLR0917

import triton
import triton.language as tl
from torch import Tensor

from ferrum_rpc.attention.triton_plan import padded_dim

WIDTH = 1024
"""Numbers that one program moves, for K and for V each: 16 bytes for each thread of 128 in 16 bits."""


def store(keys: Tensor, values: Tensor, slots: Tensor, key: Tensor, value: Tensor) -> None:
    """Write ``key`` and ``value`` [T, kv_heads, head_dim] to ``slots`` (int64 [T]) of one layer's ``keys`` and
    ``values`` [num_blocks, block_size, kv_heads, head_dim], in their dtype.

    A slot may occur twice only if it is never read: which of the two stays is undefined. Raises ValueError where blocks
    of the layer do not follow each other densely or the last axis of what is written is not dense.
    """
    heads, head_dim = keys.shape[2:]
    _check_dense(keys, values, key, value)
    if not len(slots):
        return
    size = heads * head_dim
    width = min(WIDTH, triton.next_power_of_2(size))
    store_kernel[(len(slots), triton.cdiv(size, width))](
        keys,
        values,
        slots,
        key,
        value,
        *key.stride()[:2],
        *value.stride()[:2],
        HEAD_DIM=head_dim,
        SIZE=size,
        WIDTH=width,
    )


def store_quantized(
    keys: Tensor, values: Tensor, scales: tuple[Tensor, Tensor], slots: Tensor, key: Tensor, value: Tensor
) -> None:
    """As `store`, to rows of `eight_bits` in fp8: ``keys`` and ``values`` float8_e4m3fn [num_blocks, block_size,
    kv_heads, head_dim + 4], and their ``scales``, float32 views [num_blocks, block_size, kv_heads] of the same memory.
    """
    heads, head_dim = key.shape[1:]
    _check_dense(keys, values, key, value)
    if not len(slots):
        return
    quantize_kernel[(len(slots), heads)](
        keys,
        values,
        *scales,
        slots,
        key,
        value,
        *key.stride()[:2],
        *value.stride()[:2],
        HEADS=heads,
        HEAD_DIM=head_dim,
        PADDED_DIM=padded_dim(head_dim),
        ROW=keys.shape[-1],
    )


def _check_dense(keys: Tensor, values: Tensor, key: Tensor, value: Tensor) -> None:
    if not (keys.is_contiguous() and values.is_contiguous()):
        raise ValueError("a layer's keys and values must be dense")
    if key.stride(-1) != 1 or value.stride(-1) != 1:
        raise ValueError("the last axis of the new keys and values must be dense")


@triton.jit
def store_kernel(
    keys: tl.tensor,  # [slots, SIZE], dense
    values: tl.tensor,
    slots: tl.tensor,  # int64 [T]
    key: tl.tensor,  # [T, heads, HEAD_DIM], strides key_token, key_head, 1
    value: tl.tensor,
    key_token: tl.tensor,
    key_head: tl.tensor,
    value_token: tl.tensor,
    value_head: tl.tensor,
    HEAD_DIM: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """One program per token and WIDTH numbers."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    held = column < SIZE
    head = column // HEAD_DIM
    dim = column % HEAD_DIM
    to = tl.load(slots + token) * SIZE + column
    k = tl.load(key + token * key_token + head * key_head + dim, mask=held)
    v = tl.load(value + token * value_token + head * value_head + dim, mask=held)
    tl.store(keys + to, k.to(keys.dtype.element_ty), mask=held)
    tl.store(values + to, v.to(values.dtype.element_ty), mask=held)


@triton.jit
def quantize_kernel(
    keys: tl.tensor,  # fp8 [slots, HEADS, ROW], dense
    values: tl.tensor,
    key_scales: tl.tensor,  # float32 [slots, HEADS], strides ROW / 4: the last four bytes of each row
    value_scales: tl.tensor,
    slots: tl.tensor,  # int64 [T]
    key: tl.tensor,  # [T, HEADS, HEAD_DIM], strides key_token, key_head, 1
    value: tl.tensor,
    key_token: tl.tensor,
    key_head: tl.tensor,
    value_token: tl.tensor,
    value_head: tl.tensor,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ROW: tl.constexpr,
) -> None:
    """One program per token and head."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    row = tl.load(slots + token) * HEADS + head
    dim = tl.arange(0, PADDED_DIM)
    held = dim < HEAD_DIM
    k = tl.load(key + token * key_token + head * key_head + dim, mask=held, other=0.0)
    v = tl.load(value + token * value_token + head * value_head + dim, mask=held, other=0.0)
    k, key_scale = _quantized(k.to(tl.float32))
    v, value_scale = _quantized(v.to(tl.float32))
    tl.store(keys + row * ROW + dim, k, mask=held)
    tl.store(values + row * ROW + dim, v, mask=held)
    tl.store(key_scales + row * (ROW // 4), key_scale)
    tl.store(value_scales + row * (ROW // 4), value_scale)


@triton.jit
def _quantized(x):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """As `eight_bits.to_rows`: fp8 numbers and their scale, which is NaN where a number is not finite. Divisions are
    exact, and no instruction for a maximum is given a NaN."""
    size = tl.where(tl.abs(x) < float("inf"), tl.abs(x), float("inf"))
    largest = tl.max(size, 0)
    scale = tl.where(largest < float("inf"), tl.div_rn(largest, 448.0), float("nan"))
    normal = scale >= 1.1754943508222875e-38  # the smallest normal number
    inverse = tl.where(normal, tl.div_rn(1.0, tl.where(normal, scale, 1.0)), 0.0)
    scaled = tl.where(size < float("inf"), x, 0.0) * inverse
    return tl.minimum(tl.maximum(scaled, -448.0), 448.0).to(tl.float8e4nv), scale
