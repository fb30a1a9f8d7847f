from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    D_TYPE_UNSPECIFIED: _ClassVar[DType]
    D_TYPE_F32: _ClassVar[DType]
    D_TYPE_BF16: _ClassVar[DType]
    D_TYPE_F16: _ClassVar[DType]
    D_TYPE_U32: _ClassVar[DType]
    D_TYPE_I32: _ClassVar[DType]
    D_TYPE_I8: _ClassVar[DType]
    D_TYPE_F8_E4M3: _ClassVar[DType]
D_TYPE_UNSPECIFIED: DType
D_TYPE_F32: DType
D_TYPE_BF16: DType
D_TYPE_F16: DType
D_TYPE_U32: DType
D_TYPE_I32: DType
D_TYPE_I8: DType
D_TYPE_F8_E4M3: DType

class KvHandle(_message.Message):
    __slots__ = ("id", "seq_len", "version")
    ID_FIELD_NUMBER: _ClassVar[int]
    SEQ_LEN_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    id: bytes
    seq_len: int
    version: int
    def __init__(self, id: _Optional[bytes] = ..., seq_len: _Optional[int] = ..., version: _Optional[int] = ...) -> None: ...

class Tensor(_message.Message):
    __slots__ = ("dtype", "shape", "data")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    dtype: DType
    shape: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    def __init__(self, dtype: _Optional[_Union[DType, str]] = ..., shape: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ...) -> None: ...

class KvTensor(_message.Message):
    __slots__ = ("name", "dtype", "shape", "layers")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: DType
    shape: _containers.RepeatedScalarFieldContainer[int]
    layers: int
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[_Union[DType, str]] = ..., shape: _Optional[_Iterable[int]] = ..., layers: _Optional[int] = ...) -> None: ...

class KvPressure(_message.Message):
    __slots__ = ("free_blocks", "total_blocks", "block_size", "queued_items", "queued_tokens", "sequences", "running_items", "free_slots", "total_slots")
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    QUEUED_ITEMS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    RUNNING_ITEMS_FIELD_NUMBER: _ClassVar[int]
    FREE_SLOTS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_SLOTS_FIELD_NUMBER: _ClassVar[int]
    free_blocks: int
    total_blocks: int
    block_size: int
    queued_items: int
    queued_tokens: int
    sequences: int
    running_items: int
    free_slots: int
    total_slots: int
    def __init__(self, free_blocks: _Optional[int] = ..., total_blocks: _Optional[int] = ..., block_size: _Optional[int] = ..., queued_items: _Optional[int] = ..., queued_tokens: _Optional[int] = ..., sequences: _Optional[int] = ..., running_items: _Optional[int] = ..., free_slots: _Optional[int] = ..., total_slots: _Optional[int] = ...) -> None: ...

class StepTiming(_message.Message):
    __slots__ = ("step", "queue_micros", "forward_micros", "step_sequences", "step_tokens")
    STEP_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MICROS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_MICROS_FIELD_NUMBER: _ClassVar[int]
    STEP_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    step: int
    queue_micros: int
    forward_micros: int
    step_sequences: int
    step_tokens: int
    def __init__(self, step: _Optional[int] = ..., queue_micros: _Optional[int] = ..., forward_micros: _Optional[int] = ..., step_sequences: _Optional[int] = ..., step_tokens: _Optional[int] = ...) -> None: ...
