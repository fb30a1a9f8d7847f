"""K and V of a step's new tokens into their slots, in one launch for both.

Two ``index_copy_`` calls are four launches a layer where K and V come out of a fused projection (each needs its own
dense copy first). This kernel reads them where the projection left them. Who owns the memory is not known here.
"""

# triton has no types, and its language is not Python's
# mypy: disable-error-code="untyped-decorator"

import triton
import triton.language as tl
from torch import Tensor

WIDTH = 1024
"""Numbers that one program moves, for K and for V each: 16 bytes for each thread of 128 in 16 bits."""


def store(keys: Tensor, values: Tensor, slots: Tensor, key: Tensor, value: Tensor) -> None:
    """Write ``key`` and ``value`` [T, kv_heads, head_dim] to ``slots`` (int64 [T]) of one layer's ``keys`` and
    ``values`` [num_blocks, block_size, kv_heads, head_dim], in their dtype.

    A slot may occur twice only if it is never read: which of the two stays is undefined. Raises ValueError where blocks
    of the layer do not follow each other densely or the last axis of what is written is not dense.
    """
    heads, head_dim = keys.shape[2:]
    if not (keys.is_contiguous() and values.is_contiguous()):
        raise ValueError("a layer's keys and values must be dense")
    if key.stride(-1) != 1 or value.stride(-1) != 1:
        raise ValueError("the last axis of the new keys and values must be dense")
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


@triton.jit
def store_kernel(  # noqa: PLR0917
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
