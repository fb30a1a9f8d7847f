"""What a chunk of a cache may hold."""

from __future__ import annotations

import numpy as np
import pytest

from ferrum_rpc.executor.v1 import types_pb2
from ferrum_rpc.wire.kv_stream import CacheLayout

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
    layout = CacheLayout(b"", 1, 1, 1, dtype)
    parts = [finite.tobytes(), finite.tobytes()]
    names = ["keys", "values", "key_scales", "value_scales"][: len([*layout.parts(1)])]
    parts += [F32.tobytes()] * (len(names) - 2)
    assert layout.not_finite(parts) == ""
    for index, name in enumerate(names):
        whole, values = (finite, bad) if index < 2 else (F32, BAD_F32)
        for value in values:
            for at in {0, len(whole) // 2, len(whole)}:
                spoilt = np.insert(whole, at, value)
                assert layout.not_finite([*parts[:index], spoilt.tobytes(), *parts[index + 1 :]]) == name
