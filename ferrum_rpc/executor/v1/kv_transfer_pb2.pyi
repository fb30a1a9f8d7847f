from ferrum_rpc.executor.v1 import forward_pb2 as _forward_pb2
from ferrum_rpc.executor.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class KvLayout(_message.Message):
    __slots__ = ("model_fingerprint", "layers", "kv_heads", "head_dim", "dtype", "seq_len", "token_ids")
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SEQ_LEN_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    model_fingerprint: bytes
    layers: int
    kv_heads: int
    head_dim: int
    dtype: _types_pb2.DType
    seq_len: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, model_fingerprint: _Optional[bytes] = ..., layers: _Optional[int] = ..., kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., dtype: _Optional[_Union[_types_pb2.DType, str]] = ..., seq_len: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class KvChunk(_message.Message):
    __slots__ = ("layer", "first_token", "keys", "values", "crc32c")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    layer: int
    first_token: int
    keys: _types_pb2.Tensor
    values: _types_pb2.Tensor
    crc32c: int
    def __init__(self, layer: _Optional[int] = ..., first_token: _Optional[int] = ..., keys: _Optional[_Union[_types_pb2.Tensor, _Mapping]] = ..., values: _Optional[_Union[_types_pb2.Tensor, _Mapping]] = ..., crc32c: _Optional[int] = ...) -> None: ...

class ExportKvRequest(_message.Message):
    __slots__ = ("handle", "first_token", "chunk_tokens")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    handle: _types_pb2.KvHandle
    first_token: int
    chunk_tokens: int
    def __init__(self, handle: _Optional[_Union[_types_pb2.KvHandle, _Mapping]] = ..., first_token: _Optional[int] = ..., chunk_tokens: _Optional[int] = ...) -> None: ...

class ExportKvResponse(_message.Message):
    __slots__ = ("layout", "chunk")
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    layout: KvLayout
    chunk: KvChunk
    def __init__(self, layout: _Optional[_Union[KvLayout, _Mapping]] = ..., chunk: _Optional[_Union[KvChunk, _Mapping]] = ...) -> None: ...

class ImportKvRequest(_message.Message):
    __slots__ = ("header", "chunk")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    header: ImportKvHeader
    chunk: KvChunk
    def __init__(self, header: _Optional[_Union[ImportKvHeader, _Mapping]] = ..., chunk: _Optional[_Union[KvChunk, _Mapping]] = ...) -> None: ...

class ImportKvHeader(_message.Message):
    __slots__ = ("layout", "create", "request_id")
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    CREATE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    layout: KvLayout
    create: _forward_pb2.CreateOptions
    request_id: str
    def __init__(self, layout: _Optional[_Union[KvLayout, _Mapping]] = ..., create: _Optional[_Union[_forward_pb2.CreateOptions, _Mapping]] = ..., request_id: _Optional[str] = ...) -> None: ...

class ImportKvResponse(_message.Message):
    __slots__ = ("handle", "pressure", "replayed")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    PRESSURE_FIELD_NUMBER: _ClassVar[int]
    REPLAYED_FIELD_NUMBER: _ClassVar[int]
    handle: _types_pb2.KvHandle
    pressure: _types_pb2.KvPressure
    replayed: bool
    def __init__(self, handle: _Optional[_Union[_types_pb2.KvHandle, _Mapping]] = ..., pressure: _Optional[_Union[_types_pb2.KvPressure, _Mapping]] = ..., replayed: bool = ...) -> None: ...

class WatchKvEventsRequest(_message.Message):
    __slots__ = ("after_event",)
    AFTER_EVENT_FIELD_NUMBER: _ClassVar[int]
    after_event: int
    def __init__(self, after_event: _Optional[int] = ...) -> None: ...

class WatchKvEventsResponse(_message.Message):
    __slots__ = ("event", "events")
    EVENT_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    event: int
    events: _containers.RepeatedCompositeFieldContainer[KvEvent]
    def __init__(self, event: _Optional[int] = ..., events: _Optional[_Iterable[_Union[KvEvent, _Mapping]]] = ...) -> None: ...

class KvEvent(_message.Message):
    __slots__ = ("stored", "removed", "cleared")
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    stored: KvBlockStored
    removed: KvBlockRemoved
    cleared: KvCacheCleared
    def __init__(self, stored: _Optional[_Union[KvBlockStored, _Mapping]] = ..., removed: _Optional[_Union[KvBlockRemoved, _Mapping]] = ..., cleared: _Optional[_Union[KvCacheCleared, _Mapping]] = ...) -> None: ...

class KvBlockStored(_message.Message):
    __slots__ = ("hash", "parent_hash", "token_ids", "adapter")
    HASH_FIELD_NUMBER: _ClassVar[int]
    PARENT_HASH_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    hash: bytes
    parent_hash: bytes
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    adapter: str
    def __init__(self, hash: _Optional[bytes] = ..., parent_hash: _Optional[bytes] = ..., token_ids: _Optional[_Iterable[int]] = ..., adapter: _Optional[str] = ...) -> None: ...

class KvBlockRemoved(_message.Message):
    __slots__ = ("hash",)
    HASH_FIELD_NUMBER: _ClassVar[int]
    hash: bytes
    def __init__(self, hash: _Optional[bytes] = ...) -> None: ...

class KvCacheCleared(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
