"""What a chunk of a cache may hold."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from ferrum_rpc.errors import InvalidRequest, LayoutMismatch
from ferrum_rpc.executor.v1 import kv_transfer_pb2, types_pb2
from ferrum_rpc.wire.kv_stream import CacheLayout, chunk_from_proto, widest_bytes
from ferrum_rpc.wire.tensor import is_finite

F32 = np.array([0.0, -0.0, 1e-45, np.finfo(np.float32).max, np.finfo(np.float32).min], "<f4")
"""Finite, to the last one."""
BAD_F32 = np.array([np.nan, -np.nan, np.inf, -np.inf], "<f4")
BAD_F32_BITS = np.array([0x7F80_0001, 0xFFFF_FFFF], "<u4").view("<f4")

KINDS: dict[str, tuple[types_pb2.DType, np.ndarray, np.ndarray]] = {
    "float32": (types_pb2.D_TYPE_F32, F32, np.concatenate([BAD_F32, BAD_F32_BITS])),
    "bfloat16": (
        types_pb2.D_TYPE_BF16,
        np.array([0, 0x8000, 1, 0x7F7F, 0xFF7F], "<u2"),
        np.array([0x7F80, 0xFF80, 0x7F81, 0xFFFF], "<u2"),
    ),
    "float16": (
        types_pb2.D_TYPE_F16,
        np.array([0, 0x8000, 1, 0x7BFF, 0xFBFF], "<u2"),
        np.array([0x7C00, 0xFC00, 0x7C01, 0xFFFF], "<u2"),
    ),
    "fp8": (
        types_pb2.D_TYPE_F8_E4M3,
        np.array([each for each in range(256) if each & 0x7F != 0x7F], np.uint8),
        np.array([0x7F, 0xFF], np.uint8),
    ),
    "int8": (types_pb2.D_TYPE_I8, np.arange(256, dtype=np.uint8), np.zeros(0, np.uint8)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_value_that_is_not_finite_is_found_in_any_place(kind: str) -> None:
    dtype, finite, bad = KINDS[kind]
    assert is_finite(dtype, finite.tobytes())
    for value in bad:
        for at in {0, len(finite) // 2, len(finite)}:
            assert not is_finite(dtype, np.insert(finite, at, value).tobytes())


# --- layers that differ -----------------------------------------------------------------------------------------------

SHAPES = ((2, 8), (2, 8), (1, 16), (2, 8), (4, 8), (1, 16))
TOKENS = np.arange(3, dtype=np.int32)


def uneven(dtype: types_pb2.DType = types_pb2.D_TYPE_BF16, shapes: Any = SHAPES) -> CacheLayout:
    return CacheLayout(b"f" * 32, shapes, dtype)


def chunk_of(layout: CacheLayout, layer: int, tokens: int = 3) -> kv_transfer_pb2.KvChunk:
    parts = [
        kv_transfer_pb2.KvPart(tensor=name, data=types_pb2.Tensor(dtype=dtype, shape=shape, data=bytes(size)))
        for name, dtype, shape, size in layout.parts(layer, tokens)
    ]
    return kv_transfer_pb2.KvChunk(layer=layer, parts=parts)


@pytest.mark.parametrize(("dtype", "size", "scales"), [(types_pb2.D_TYPE_BF16, 2, 0), (types_pb2.D_TYPE_I8, 1, 4)])
def test_a_token_takes_the_sum_of_what_its_layers_keep(dtype: types_pb2.DType, size: int, scales: int) -> None:
    layout = uneven(dtype)
    of_layers = [2 * heads * (width * size + scales) for heads, width in SHAPES]
    assert layout.token_bytes == sum(of_layers) < len(SHAPES) * layout.widest_bytes
    assert [layout.chunk_bytes(layer, 5) for layer in range(len(SHAPES))] == [5 * each for each in of_layers]
    message = layout.to_proto(TOKENS, 4, 0)
    assert widest_bytes(message) == layout.widest_bytes == max(of_layers)
    told = [math.prod(each.shape) * each.layers * (4 if "scales" in each.name else size) for each in message.tensors]
    assert sum(told) == layout.token_bytes


def test_a_layout_of_layers_that_differ_lists_tensors_of_each_kind_and_is_no_other() -> None:
    layout = uneven()
    message = layout.to_proto(TOKENS, 4, 0)
    assert (message.layers, message.kv_heads, message.head_dim, message.dtype) == (0, 0, 0, 0)
    assert [(each.name, [*each.shape], each.layers) for each in message.tensors] == [
        (f"{name}.{number}", shape, layers)
        for number, shape, layers in ((1, [2, 8], 3), (2, [1, 16], 2), (3, [4, 8], 1))
        for name in ("keys", "values")
    ]
    layout.check(message)
    others = {
        "all alike": uneven(shapes=((2, 8),) * 6),
        "another width": uneven(shapes=(*SHAPES[:-1], (1, 8))),
        "another number of layers": uneven(shapes=(*SHAPES, (2, 8))),
        "another type": uneven(types_pb2.D_TYPE_F16),
    }
    for name, other in others.items():
        for ours, theirs in ((layout, other), (other, layout)):
            with pytest.raises(LayoutMismatch) as refused:
                ours.check(theirs.to_proto(TOKENS, 4, 0))
            assert "tensors" in str(refused.value.metadata["differs"]), name


def test_layers_that_are_alike_have_the_layout_of_before() -> None:
    message = uneven(shapes=((2, 8),) * 6).to_proto(TOKENS, 4, 0)
    assert (message.layers, message.kv_heads, message.head_dim, message.dtype) == (6, 2, 8, types_pb2.D_TYPE_BF16)
    assert not message.tensors and not widest_bytes(message)


def test_a_chunk_has_the_tensors_of_its_layer() -> None:
    layout = uneven()
    for layer in range(len(SHAPES)):
        tokens, parts = chunk_from_proto(layout, layer, chunk_of(layout, layer))
        assert tokens == 3 and sum(map(len, parts)) == layout.chunk_bytes(layer, 3)
        for other in range(len(SHAPES)):
            if SHAPES[other] != SHAPES[layer]:
                with pytest.raises(InvalidRequest, match=f"layer {layer} must have the parts keys") as refused:
                    chunk_from_proto(layout, layer, chunk_of(layout, other))
                assert refused.value.field == "chunk.parts"


def test_a_chunk_of_the_right_names_and_another_width_is_refused() -> None:
    layout, renamed = uneven(), chunk_of(uneven(), 2)
    for part in renamed.parts:
        part.tensor = part.tensor.replace(".2", ".1")
    with pytest.raises(InvalidRequest, match=r"keys.1 of a chunk are 96 bytes of shape \[3, 2, 8\]"):
        chunk_from_proto(layout, 0, renamed)
