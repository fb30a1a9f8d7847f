"""Numpy arrays as the contract's raw little-endian tensors, without a copy on the way in."""

from __future__ import annotations

import sys
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ferrum_rpc.core import RowDType
from ferrum_rpc.errors import InvalidRequest
from ferrum_rpc.executor.v1 import types_pb2

if sys.byteorder != "little":  # pragma: no cover - no such machine serves models
    raise ImportError("ferrum_rpc assumes a little-endian machine")

NUMPY_BY_DTYPE: Final[dict[types_pb2.DType, np.dtype[Any]]] = {
    types_pb2.D_TYPE_F32: np.dtype(np.float32),
    types_pb2.D_TYPE_BF16: np.dtype(np.uint16),
    types_pb2.D_TYPE_F16: np.dtype(np.float16),
    types_pb2.D_TYPE_U32: np.dtype(np.uint32),
    types_pb2.D_TYPE_I32: np.dtype(np.int32),
    types_pb2.D_TYPE_I8: np.dtype(np.int8),
    types_pb2.D_TYPE_F8_E4M3: np.dtype(np.uint8),
}

DTYPE_BY_NAME: Final = {
    "float32": types_pb2.D_TYPE_F32,
    "bfloat16": types_pb2.D_TYPE_BF16,
    "float16": types_pb2.D_TYPE_F16,
    "int8": types_pb2.D_TYPE_I8,
    "fp8": types_pb2.D_TYPE_F8_E4M3,
}
"""Types of models and caches, by their names."""

EXPONENTS: Final[dict[types_pb2.DType, np.unsignedinteger[Any]]] = {
    types_pb2.D_TYPE_F32: np.uint32(0x7F80_0000),
    types_pb2.D_TYPE_BF16: np.uint16(0x7F80),
    types_pb2.D_TYPE_F16: np.uint16(0x7C00),
    types_pb2.D_TYPE_F8_E4M3: np.uint8(0x7F),  # it has no infinities, and one NaN of each sign
}
"""Of types that can hold NaN or infinities: the bits that are all ones in those and in no other number."""

DTYPE_BY_NUMPY: Final = {dtype: proto for proto, dtype in NUMPY_BY_DTYPE.items()}
"""uint16 means bfloat16 and uint8 means fp8: the contract has no other use for them."""

ROW_DTYPE_TO_PROTO: Final[dict[RowDType, types_pb2.DType]] = {
    RowDType.F32: types_pb2.D_TYPE_F32,
    RowDType.BF16: types_pb2.D_TYPE_BF16,
    RowDType.F16: types_pb2.D_TYPE_F16,
}
ROW_DTYPE_FROM_PROTO: Final = {proto: dtype for dtype, proto in ROW_DTYPE_TO_PROTO.items()}


def fill_tensor(tensor: types_pb2.Tensor, array: npt.NDArray[Any]) -> None:
    """Write a C-contiguous array into its message."""
    describe(tensor, array)
    tensor.data = array.tobytes()


def describe(tensor: types_pb2.Tensor, array: npt.NDArray[Any]) -> None:
    """Write an array's type and shape into its message; its bytes are sent separately."""
    tensor.dtype = DTYPE_BY_NUMPY[array.dtype]
    tensor.shape.extend(array.shape)


def is_finite(dtype: types_pb2.DType, data: Any) -> bool:
    """Whether no number in a buffer of numbers is NaN or infinite."""
    ones = EXPONENTS.get(dtype)
    return ones is None or bool((np.frombuffer(data, ones.dtype) & ones).max() != ones)


def tensor_from_proto(tensor: types_pb2.Tensor) -> npt.NDArray[Any]:
    """A read-only view of the message's bytes; raises `InvalidRequest` if type, shape and size are inconsistent."""
    dtype = NUMPY_BY_DTYPE.get(tensor.dtype)
    if dtype is None:
        raise InvalidRequest("a tensor has no known dtype", field="dtype")
    data = tensor.data  # one copy of the bytes per access
    count = 1
    for extent in tensor.shape:
        count *= extent
    if count * dtype.itemsize != len(data):
        raise InvalidRequest(
            f"a tensor of shape {list(tensor.shape)} needs {count * dtype.itemsize} bytes and has {len(data)}",
            field="data",
        )
    return np.frombuffer(data, dtype=dtype).reshape(tuple(tensor.shape))
