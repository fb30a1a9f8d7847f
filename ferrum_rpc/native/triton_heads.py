"""What a layer does with its heads between the projection and attention, in one Triton kernel: norms, rotation, and the
cache write.

Each would be a launch of its own (2 to 3 us in a CUDA graph, times the layers of a model), and each would read the
projection's output again. Models rotate and attention knows the cache, and neither imports the other: so what both
launch is here. A cache has unquantized numbers or the fp8 rows of `attention.eight_bits`.

Bytes: every head is read once; queries and keys are written back; keys and values are written to their slots.

This file imports triton; `CacheRows` is the only name that others may need without it.
"""

# triton has no types, and its language is not Python's
# mypy: disable-error-code="untyped-decorator"
# a kernel must be one function with all of its arguments
# ruff: noqa: PLR0915, PLR0917

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

HEADS_AT_ONCE = 8
"""Heads of one program: 2 kB of heads of 128 in 16 bits, 16 bytes for each thread of four warps."""


class CacheRows(NamedTuple):
    """Where K and V of a step's tokens are written: ``slots`` (int64 [T]) of one layer's ``keys`` and ``values``
    [num_blocks, block_size, kv_heads, row], dense. Rows of fp8 are float8_e4m3fn [..., head_dim + 4], and ``scales``
    are float32 views [num_blocks, block_size, kv_heads] of their last four bytes.

    A slot may occur twice only if it is never read: which of the two stays is undefined.
    """

    keys: Tensor
    values: Tensor
    slots: Tensor
    scales: tuple[Tensor, Tensor] | None = None


class HeadNorm(NamedTuple):
    """The norm of queries and keys: ``weight`` float32 [heads + kv_heads, head_dim]; ``whole``: all queries of a token
    are normed together, and all keys, instead of each head by itself."""

    weight: Tensor
    eps: float
    whole: bool


def place_heads(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    norm: HeadNorm | None = None,
    rotation: tuple[Tensor, Tensor] | None = None,
    into: CacheRows | None = None,
) -> None:
    """Norm and rotate ``query`` [T, heads, head_dim] and ``key`` [T, kv_heads, head_dim] in place, and write key and
    ``value`` [T, kv_heads, head_dim] to the cache. ``rotation``: cos [T, 1, n] and sin [T, 1, n / 2] of `Rotary`.
    Without ``into`` nothing is written to a cache; without ``query`` keys are neither normed nor rotated.

    Raises ValueError if the layer's cache or the last axis of a head is not dense.
    """
    if into is not None and not (into.keys.is_contiguous() and into.values.is_contiguous()):
        raise ValueError("a layer's keys and values must be dense")
    if any(each is not None and each.stride(-1) != 1 for each in (query, key, value)):
        raise ValueError("the last axis of the new keys and values must be dense")
    turned = query is not None and (norm is not None or rotation is not None)
    if not len(key) or not (turned or into is not None):
        return
    tokens, kv_heads, head_dim = key.shape
    heads = 0 if query is None else query.shape[1]
    rows = key if query is None else query  # not read if there is none
    half = (head_dim if rotation is None else rotation[0].shape[-1]) // 2
    rest = head_dim - 2 * half
    whole = norm is not None and norm.whole
    at_once = min(HEADS_AT_ONCE, triton.next_power_of_2(max(heads, kv_heads)))
    blocks = triton.cdiv(max(heads, kv_heads), at_once) if whole else 1
    queries = triton.cdiv(heads, at_once * blocks) if turned else 0
    keys = triton.cdiv(kv_heads, at_once * blocks)
    values = 0 if into is None else triton.cdiv(kv_heads, at_once)
    to = into or CacheRows(key, value, key)
    heads_kernel[(tokens, queries + keys + values)](
        rows,
        key,
        value,
        rows if norm is None else norm.weight,
        *(rotation or (rows, rows)),
        to.keys,
        to.values,
        *(to.scales or (to.keys, to.values)),
        to.slots,
        0.0 if norm is None else norm.eps,
        *rows.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        QUERIES=heads,
        KV_HEADS=kv_heads,
        DIM=head_dim,
        HALF=half,
        PADDED=triton.next_power_of_2(half),
        REST=triton.next_power_of_2(rest) if rest else 0,
        AT_ONCE=at_once,
        BLOCKS=blocks,
        QUERY_PROGRAMS=queries,
        KEY_PROGRAMS=keys,
        WHOLE=triton.next_power_of_2(max(heads, kv_heads) * head_dim) if whole else 0,
        HAS_NORM=norm is not None,
        HAS_ROPE=rotation is not None,
        CACHE_ROW=0 if into is None else into.keys.shape[-1],
        QUANTIZED=to.scales is not None,
    )


@triton.jit
def heads_kernel(
    query: tl.tensor,  # [T, QUERIES, DIM], strides query_token, query_head, 1
    key: tl.tensor,  # [T, KV_HEADS, DIM], strides key_token, key_head, 1
    value: tl.tensor,  # as key
    norm: tl.tensor,  # float32 [QUERIES + KV_HEADS, DIM]
    cos: tl.tensor,  # float32 [T, 1, 2 * HALF]: both halves are the same
    sin: tl.tensor,  # float32 [T, 1, HALF]
    keys: tl.tensor,  # [slots, KV_HEADS, CACHE_ROW], dense
    values: tl.tensor,
    key_scales: tl.tensor,  # float32 [slots, KV_HEADS], strides CACHE_ROW / 4: the last four bytes of each fp8 row
    value_scales: tl.tensor,
    slots: tl.tensor,  # int64 [T]
    eps: tl.tensor,
    query_token: tl.tensor,
    query_head: tl.tensor,
    key_token: tl.tensor,
    key_head: tl.tensor,
    value_token: tl.tensor,
    value_head: tl.tensor,
    QUERIES: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,  # channel i is paired with i + HALF
    PADDED: tl.constexpr,
    REST: tl.constexpr,  # capacity for the channels behind the pairs; 0: there are none
    AT_ONCE: tl.constexpr,
    BLOCKS: tl.constexpr,  # of AT_ONCE heads that a program of queries or keys works on
    QUERY_PROGRAMS: tl.constexpr,  # 0: queries and keys are neither normed nor rotated
    KEY_PROGRAMS: tl.constexpr,
    WHOLE: tl.constexpr,  # capacity for all queries of a token, which are normed as one; 0: each head is
    HAS_NORM: tl.constexpr,
    HAS_ROPE: tl.constexpr,
    CACHE_ROW: tl.constexpr,  # numbers of a head's row in the cache; 0: there is no cache to write to
    QUANTIZED: tl.constexpr,
) -> None:
    """A token's programs: those of its queries, then of its keys, then of its values."""
    token = tl.program_id(0).to(tl.int64)
    program = tl.program_id(1)
    cos += token * (2 * HALF)
    sin += token * HALF
    slot = token
    if CACHE_ROW > 0:
        slot = tl.load(slots + token) * KV_HEADS
    TURNS: tl.constexpr = QUERY_PROGRAMS > 0
    if program < QUERY_PROGRAMS:
        _place(
            query + token * query_token, query_head, norm, cos, sin, keys, key_scales, eps, program,
            QUERIES, DIM, HALF, PADDED, REST, AT_ONCE, BLOCKS, WHOLE, TURNS, HAS_NORM, HAS_ROPE, 0, False,
        )  # fmt: skip
    elif program < QUERY_PROGRAMS + KEY_PROGRAMS:
        _place(
            key + token * key_token, key_head, norm + QUERIES * DIM, cos, sin,
            keys + slot * CACHE_ROW, key_scales + slot * (CACHE_ROW // 4), eps, program - QUERY_PROGRAMS,
            KV_HEADS, DIM, HALF, PADDED, REST, AT_ONCE, BLOCKS, WHOLE, TURNS, HAS_NORM, HAS_ROPE, CACHE_ROW, QUANTIZED,
        )  # fmt: skip
    else:
        _place(
            value + token * value_token, value_head, norm, cos, sin,
            values + slot * CACHE_ROW, value_scales + slot * (CACHE_ROW // 4), eps,
            program - QUERY_PROGRAMS - KEY_PROGRAMS,
            KV_HEADS, DIM, HALF, PADDED, REST, AT_ONCE, 1, 0, False, False, False, CACHE_ROW, QUANTIZED,
        )  # fmt: skip


@triton.jit
def _place(
    rows: tl.tensor,  # the token's heads, COUNT of them
    stride: tl.tensor,
    norm: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    to: tl.tensor,  # the token's rows in the cache
    scales: tl.tensor,
    eps: tl.tensor,
    program: tl.tensor,
    COUNT: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    PADDED: tl.constexpr,
    REST: tl.constexpr,
    AT_ONCE: tl.constexpr,
    BLOCKS: tl.constexpr,
    WHOLE: tl.constexpr,
    TURNS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_ROPE: tl.constexpr,
    CACHE_ROW: tl.constexpr,
    QUANTIZED: tl.constexpr,
) -> None:
    dim = tl.arange(0, PADDED)
    in_dim = dim < HALF
    if HAS_NORM and WHOLE > 0:
        every = tl.arange(0, WHOLE)
        x = tl.load(rows + every // DIM * stride + every % DIM, mask=every < COUNT * DIM, other=0.0).to(tl.float32)
        of_all = 1.0 / tl.sqrt(tl.sum(x * x, 0) / (COUNT * DIM) + eps)
    for block in tl.static_range(BLOCKS):
        head = (program * BLOCKS + block) * AT_ONCE + tl.arange(0, AT_ONCE)
        in_heads = head < COUNT
        held = in_heads[:, None] & in_dim[None, :]
        at = rows + (head * stride)[:, None] + dim[None, :]
        first = tl.load(at, mask=held, other=0.0).to(tl.float32)
        second = tl.load(at + HALF, mask=held, other=0.0).to(tl.float32)
        if REST > 0:
            behind = 2 * HALF + tl.arange(0, REST)
            rest_held = in_heads[:, None] & (behind < DIM)[None, :]
            rest_at = rows + (head * stride)[:, None] + behind[None, :]
            rest = tl.load(rest_at, mask=rest_held, other=0.0).to(tl.float32)
        if HAS_NORM:
            if WHOLE > 0:
                scale = of_all
            else:
                squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
                if REST > 0:
                    squares += tl.sum(rest * rest, 1)
                scale = (1.0 / tl.sqrt(squares / DIM + eps))[:, None]
            weight = norm + head[:, None] * DIM + dim[None, :]
            first = first * scale * tl.load(weight, mask=held, other=0.0)
            second = second * scale * tl.load(weight + HALF, mask=held, other=0.0)
            if REST > 0:
                rest_weight = tl.load(norm + head[:, None] * DIM + behind[None, :], mask=rest_held, other=0.0)
                rest = rest * scale * rest_weight
        if HAS_ROPE:
            c = tl.load(cos + dim, mask=in_dim, other=0.0)[None, :]
            s = tl.load(sin + dim, mask=in_dim, other=0.0)[None, :]
            rotated = first * c - second * s
            second = second * c + first * s
            first = rotated
        if TURNS:
            first = first.to(rows.dtype.element_ty)  # the cache gets what is attended to, rounded once
            second = second.to(rows.dtype.element_ty)
            tl.store(at, first, mask=held)
            tl.store(at + HALF, second, mask=held)
            if HAS_NORM and REST > 0:
                rest = rest.to(rows.dtype.element_ty)
                tl.store(rest_at, rest, mask=rest_held)
        if CACHE_ROW > 0:
            if QUANTIZED:
                first = first.to(tl.float32)
                second = second.to(tl.float32)
                largest = tl.maximum(tl.max(_size(first), 1), tl.max(_size(second), 1))
                if REST > 0:
                    rest = rest.to(tl.float32)
                    largest = tl.maximum(largest, tl.max(_size(rest), 1))
                scale = tl.where(largest < float("inf"), tl.div_rn(largest, 448.0), float("nan"))
                normal = scale >= 1.1754943508222875e-38  # the smallest normal number
                inverse = tl.where(normal, tl.div_rn(1.0, tl.where(normal, scale, 1.0)), 0.0)[:, None]
                tl.store(scales + head * (CACHE_ROW // 4), scale, mask=in_heads)
                first = _scaled(first, inverse)
                second = _scaled(second, inverse)
                if REST > 0:
                    rest = _scaled(rest, inverse)
            to_at = to + head[:, None] * CACHE_ROW + dim[None, :]
            tl.store(to_at, first.to(to.dtype.element_ty), mask=held)
            tl.store(to_at + HALF, second.to(to.dtype.element_ty), mask=held)
            if REST > 0:
                to_rest = to + head[:, None] * CACHE_ROW + behind[None, :]
                tl.store(to_rest, rest.to(to.dtype.element_ty), mask=rest_held)


@triton.jit
def _size(x):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """The magnitudes, infinity for NaN: no instruction for a maximum is given one."""
    return tl.where(tl.abs(x) < float("inf"), tl.abs(x), float("inf"))


@triton.jit
def _scaled(x, inverse):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """As `eight_bits.to_rows`; what is not finite is 0, and its row's scale is NaN."""
    scaled = tl.where(tl.abs(x) < float("inf"), x, 0.0) * inverse
    return tl.minimum(tl.maximum(scaled, -448.0), 448.0)
