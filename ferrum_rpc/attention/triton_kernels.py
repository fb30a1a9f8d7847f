"""The two kernels of the CUDA attention path. Their work items come from `triton_plan`.

The algorithm is FlashAttention-2 (Dao 2023, arXiv:2307.08691): a program keeps a tile of query rows and iterates over
the keys once with an online softmax, in float32 and in powers of two. Three things differ, because this is a server:

- K and V are read from the store's blocks (PagedAttention, Kwon et al. 2023, arXiv:2309.06180). A tile of keys is
  independent of the block size: every key looks up its own block in the table, so any block size runs at full width.
- The query heads that share a KV head are rows of the same tile, so K and V are read once per KV head. Rows are
  numbered ``token * group + head``: a tile may end within a token, and any group size fits.
- A tile's keys may be split over several programs if too few would run (Flash-Decoding, Dao et al. 2023). These write
  unnormalised sums and their statistics; `merge_kernel` adds them up.

Everything that changes from step to step is read from device memory, so that a CUDA graph can replay the same launch. A
program whose work item has no rows ends at once, so a fixed grid can have unused programs.

Triton compiles this file's functions from source: names in capitals are compile-time constants.
"""

# triton has no types, and its language is not Python's: a `for` here becomes a loop on the device
# mypy: disable-error-code="untyped-decorator"
# a kernel must be one function with all of its arguments
# ruff: noqa: PLR0915, PLR0917

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def attend_kernel(
    query: tl.tensor,  # [T, heads, HEAD_DIM], strides query_token, query_head, 1
    keys: tl.tensor,  # [num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM or more], strides kv_block, kv_slot, kv_head, 1
    values: tl.tensor,  # as keys
    key_scales: tl.tensor,  # float32, with a quarter of the strides; see ROUNDED
    value_scales: tl.tensor,
    sinks: tl.tensor,  # float32 [heads]; see HAS_SINKS
    output: tl.tensor,  # [T, heads, HEAD_DIM], contiguous
    sums: tl.tensor,  # float32 [parts, KV_HEADS, ROWS, HEAD_DIM]: the sums of split items
    stats: tl.tensor,  # float32 [parts, KV_HEADS, ROWS, 2]: their maximum (of base-2 exponents) and denominator
    items: tl.tensor,  # int32 [items, 8]: see triton_plan
    tables: tl.tensor,  # int32: block ids of all spans
    factor: tl.tensor,  # multiplies each dot product; see triton_paged
    cap: tl.tensor,  # the soft cap times log2(e)
    query_token: tl.tensor,
    query_head: tl.tensor,
    kv_block: tl.tensor,
    kv_slot: tl.tensor,
    kv_head: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    HAS_SINKS: tl.constexpr,  # each row starts with its head's sink; those of a split tile when they are merged
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,  # tokens that a query sees; 0: all
    HAS_CAP: tl.constexpr,
    QUANTIZED: tl.constexpr,  # keys and values are fp8, to be multiplied with their scales
    PRECISION: tl.constexpr,
) -> None:
    """One program per work item and KV head: the item's rows against its keys."""
    # The KV head runs fastest: programs that start together read neighbouring parts of the same slots.
    program = tl.program_id(0)
    head = program % KV_HEADS
    item = items + program // KV_HEADS * 8
    rows = tl.load(item + 2)
    if rows == 0:
        return
    token = tl.load(item)
    first_row = tl.load(item + 1)
    start = tl.load(item + 3)
    low = tl.load(item + 4)
    high = tl.load(item + 5)
    table = tables + tl.load(item + 6)
    part = tl.load(item + 7)

    # Lanes after the item's last row repeat that row: no lane reads rows of other spans.
    index = tl.arange(0, ROWS)
    row = first_row + tl.minimum(index, rows - 1)
    position = start + row // GROUP
    place = (token + row // GROUP).to(tl.int64)
    query_head_of_row = head * GROUP + row % GROUP
    dim = tl.arange(0, PADDED_DIM)
    in_dim = dim < HEAD_DIM
    query_at = place * query_token + query_head_of_row * query_head
    q = tl.load(query + query_at[:, None] + dim[None, :], mask=in_dim[None, :], other=0.0)

    # Keys that every row sees need no mask: those between `inner` and `outer`.
    first_position = start + first_row // GROUP
    outer = low + tl.maximum(tl.minimum(first_position + 1, high) - low, 0) // KEYS * KEYS
    inner = low
    if WINDOW > 0:
        last_position = start + (first_row + rows - 1) // GROUP
        unseen = tl.maximum(last_position - WINDOW + 1 - low, 0)
        inner = tl.minimum(low + (unseen + KEYS - 1) // KEYS * KEYS, outer)

    head_at = head * kv_head
    if QUANTIZED:  # rows are word-aligned, so four numbers are one access; the compiler cannot derive that
        head_at = tl.multiple_of(head_at, 4)
        key_scales += head_at // 4
        value_scales += head_at // 4
    keys += head_at
    values += head_at
    total = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    denominator = tl.zeros([ROWS], tl.float32)
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    if HAS_SINKS:
        alone = part < 0
        maximum = tl.where(alone, tl.load(sinks + query_head_of_row) * LOG2_E, maximum)
        denominator = tl.where(alone, 1.0, denominator)
    for phase in tl.static_range(3):
        begin = low
        end = inner
        if phase == 1:
            begin = inner
            end = outer
        if phase == 2:
            begin = outer
            end = high
        if WINDOW > 0 or phase > 0:
            for key in tl.range(begin, end, KEYS):
                n = key + tl.arange(0, KEYS)
                if phase == 1:
                    block = tl.load(table + n // BLOCK_SIZE)
                    held = in_dim[None, :]
                else:  # slots after the last key are undefined and not read
                    block = tl.load(table + n // BLOCK_SIZE, mask=n < high, other=0)
                    held = (n < high)[:, None] & in_dim[None, :]
                at = block.to(tl.int64) * kv_block + n % BLOCK_SIZE * kv_slot
                if QUANTIZED:
                    at = tl.multiple_of(at, 4)
                k = tl.load(keys + at[:, None] + dim[None, :], mask=held, other=0.0)
                if QUANTIZED:
                    scale = tl.load(key_scales + at // 4, mask=n < high, other=0.0)
                    k = (k.to(tl.float32) * scale[:, None]).to(q.dtype)
                scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
                if HAS_CAP:  # tanh(x) = 1 - 2 / (exp(2 x) + 1), right at both infinities; near 0 it would cancel
                    scores = scores * factor
                    x = scores * 0.34657359  # from twice the argument in base 2
                    z = x * x
                    near = ((-5.70498872745e-3 * z + 2.06390887954e-2) * z - 5.37397155531e-2) * z + 1.33314422036e-1
                    near = (near * z - 3.33332819422e-1) * z * x + x
                    far = 1.0 - 2.0 / (tl.exp2(scores) + 1.0)
                    scores = cap * tl.where(z < 0.390625, near, far)
                if phase != 1:  # only a tile's last part may end within a step of keys: at its last row's position
                    seen = n[None, :] <= position[:, None]
                    if WINDOW > 0:
                        seen = seen & (n[None, :] > position[:, None] - WINDOW)
                    scores = tl.where(seen, scores, float("-inf"))
                # Without a cap scores are raw products: the maximum of a row is scaled, not each score, and the scaling
                # below is one instruction with the subtraction (the factor is positive).
                unit = 1.0 if HAS_CAP else factor
                highest = tl.maximum(maximum, tl.max(scores, 1) * unit)
                # a row that has seen no key yet has no maximum: -inf - -inf would be NaN
                base = tl.where(highest == float("-inf"), 0.0, highest)
                weights = tl.exp2(scores * unit - base[:, None])
                decay = tl.exp2(maximum - base)
                denominator = denominator * decay + tl.sum(weights, 1)
                v = tl.load(values + at[:, None] + dim[None, :], mask=held, other=0.0)
                if QUANTIZED:
                    scale = tl.load(value_scales + at // 4, mask=n < high, other=0.0)
                    v = (v.to(tl.float32) * scale[:, None]).to(q.dtype)
                total = tl.dot(weights.to(v.dtype), v, total * decay[:, None], input_precision=PRECISION)
                maximum = highest

    stored = (index < rows)[:, None] & in_dim[None, :]
    if part < 0:
        output_at = (place * (KV_HEADS * GROUP) + query_head_of_row) * HEAD_DIM
        result = (total / denominator[:, None]).to(output.dtype.element_ty)
        tl.store(output + output_at[:, None] + dim[None, :], result, mask=stored)
    else:
        slot = (part.to(tl.int64) * KV_HEADS + head) * ROWS + index
        tl.store(sums + slot[:, None] * HEAD_DIM + dim[None, :], total, mask=stored)
        tl.store(stats + slot * 2, maximum, mask=index < rows)
        tl.store(stats + slot * 2 + 1, denominator, mask=index < rows)


@triton.jit
def merge_kernel(
    output: tl.tensor,  # [T, heads, HEAD_DIM], contiguous
    sums: tl.tensor,  # as in attend_kernel
    stats: tl.tensor,
    sinks: tl.tensor,
    merges: tl.tensor,  # int32 [merges, 8]: see triton_plan
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """One program per row of a split tile: its parts' sums, brought to one maximum, over their denominators."""
    index = tl.program_id(0)
    head = tl.program_id(1)
    merge = merges + tl.program_id(2) * 8
    rows = tl.load(merge + 2)
    if index >= rows:
        return
    row = tl.load(merge + 1) + index
    first = tl.load(merge + 3)
    count = tl.load(merge + 4)
    dim = tl.arange(0, PADDED_DIM)
    in_dim = dim < HEAD_DIM
    total = tl.zeros([PADDED_DIM], tl.float32)
    denominator = 0.0
    maximum = float("-inf")
    if HAS_SINKS:
        denominator = 1.0
        maximum = tl.load(sinks + head * GROUP + row % GROUP) * LOG2_E
    for step in tl.range(0, count, PARTS):
        part = step + tl.arange(0, PARTS)
        slot = ((first + part).to(tl.int64) * KV_HEADS + head) * ROWS + index
        maxima = tl.load(stats + slot * 2, mask=part < count, other=float("-inf"))
        shares = tl.load(stats + slot * 2 + 1, mask=part < count, other=0.0)
        highest = tl.maximum(maximum, tl.max(maxima, 0))
        base = tl.where(highest == float("-inf"), 0.0, highest)
        weights = tl.exp2(maxima - base)
        decay = tl.exp2(maximum - base)
        held = (part < count)[:, None] & in_dim[None, :]
        partial = tl.load(sums + slot[:, None] * HEAD_DIM + dim[None, :], mask=held, other=0.0)
        total = total * decay + tl.sum(partial * weights[:, None], 0)
        denominator = denominator * decay + tl.sum(shares * weights, 0)
        maximum = highest
    place = (tl.load(merge) + row // GROUP).to(tl.int64)
    at = (place * (KV_HEADS * GROUP) + head * GROUP + row % GROUP) * HEAD_DIM
    tl.store(output + at + dim, (total / denominator).to(output.dtype.element_ty), mask=in_dim)
