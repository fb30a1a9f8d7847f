from ferrum_rpc.executor.v1 import forward_pb2 as _forward_pb2
from ferrum_rpc.executor.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class KvTransport(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KV_TRANSPORT_UNSPECIFIED: _ClassVar[KvTransport]
    KV_TRANSPORT_NIXL: _ClassVar[KvTransport]
KV_TRANSPORT_UNSPECIFIED: KvTransport
KV_TRANSPORT_NIXL: KvTransport

class KvLayout(_message.Message):
    __slots__ = ("model_fingerprint", "layers", "kv_heads", "head_dim", "dtype", "seq_len", "token_ids", "adapter", "block_size", "tensors", "first_token")
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SEQ_LEN_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    model_fingerprint: bytes
    layers: int
    kv_heads: int
    head_dim: int
    dtype: _types_pb2.DType
    seq_len: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    adapter: str
    block_size: int
    tensors: _containers.RepeatedCompositeFieldContainer[_types_pb2.KvTensor]
    first_token: int
    def __init__(self, model_fingerprint: _Optional[bytes] = ..., layers: _Optional[int] = ..., kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., dtype: _Optional[_Union[_types_pb2.DType, str]] = ..., seq_len: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., adapter: _Optional[str] = ..., block_size: _Optional[int] = ..., tensors: _Optional[_Iterable[_Union[_types_pb2.KvTensor, _Mapping]]] = ..., first_token: _Optional[int] = ...) -> None: ...

class KvPart(_message.Message):
    __slots__ = ("tensor", "data")
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    tensor: str
    data: _types_pb2.Tensor
    def __init__(self, tensor: _Optional[str] = ..., data: _Optional[_Union[_types_pb2.Tensor, _Mapping]] = ...) -> None: ...

class KvChunk(_message.Message):
    __slots__ = ("layer", "first_token", "keys", "values", "crc32c", "key_scales", "value_scales", "remote", "parts", "first_row")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    KEY_SCALES_FIELD_NUMBER: _ClassVar[int]
    VALUE_SCALES_FIELD_NUMBER: _ClassVar[int]
    REMOTE_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    FIRST_ROW_FIELD_NUMBER: _ClassVar[int]
    layer: int
    first_token: int
    keys: _types_pb2.Tensor
    values: _types_pb2.Tensor
    crc32c: int
    key_scales: _types_pb2.Tensor
    value_scales: _types_pb2.Tensor
    remote: KvRemote
    parts: _containers.RepeatedCompositeFieldContainer[KvPart]
    first_row: int
    def __init__(self, layer: _Optional[int] = ..., first_token: _Optional[int] = ..., keys: _Optional[_Union[_types_pb2.Tensor, _Mapping]] = ..., values: _Optional[_Union[_types_pb2.Tensor, _Mapping]] = ..., crc32c: _Optional[int] = ..., key_scales: _Optional[_Union[_types_pb2.Tensor, _Mapping]] = ..., value_scales: _Optional[_Union[_types_pb2.Tensor, _Mapping]] = ..., remote: _Optional[_Union[KvRemote, _Mapping]] = ..., parts: _Optional[_Iterable[_Union[KvPart, _Mapping]]] = ..., first_row: _Optional[int] = ...) -> None: ...

class KvSource(_message.Message):
    __slots__ = ("transport", "agent")
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    AGENT_FIELD_NUMBER: _ClassVar[int]
    transport: KvTransport
    agent: bytes
    def __init__(self, transport: _Optional[_Union[KvTransport, str]] = ..., agent: _Optional[bytes] = ...) -> None: ...

class KvRemote(_message.Message):
    __slots__ = ("address", "size", "notification")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    NOTIFICATION_FIELD_NUMBER: _ClassVar[int]
    address: int
    size: int
    notification: bytes
    def __init__(self, address: _Optional[int] = ..., size: _Optional[int] = ..., notification: _Optional[bytes] = ...) -> None: ...

class KvTrailer(_message.Message):
    __slots__ = ("sha256",)
    SHA256_FIELD_NUMBER: _ClassVar[int]
    sha256: bytes
    def __init__(self, sha256: _Optional[bytes] = ...) -> None: ...

class ExportKvRequest(_message.Message):
    __slots__ = ("handle", "first_token", "chunk_tokens", "transport", "layout_only")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_ONLY_FIELD_NUMBER: _ClassVar[int]
    handle: _types_pb2.KvHandle
    first_token: int
    chunk_tokens: int
    transport: KvTransport
    layout_only: bool
    def __init__(self, handle: _Optional[_Union[_types_pb2.KvHandle, _Mapping]] = ..., first_token: _Optional[int] = ..., chunk_tokens: _Optional[int] = ..., transport: _Optional[_Union[KvTransport, str]] = ..., layout_only: bool = ...) -> None: ...

class ExportKvResponse(_message.Message):
    __slots__ = ("layout", "chunk", "trailer", "source")
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    TRAILER_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    layout: KvLayout
    chunk: KvChunk
    trailer: KvTrailer
    source: KvSource
    def __init__(self, layout: _Optional[_Union[KvLayout, _Mapping]] = ..., chunk: _Optional[_Union[KvChunk, _Mapping]] = ..., trailer: _Optional[_Union[KvTrailer, _Mapping]] = ..., source: _Optional[_Union[KvSource, _Mapping]] = ...) -> None: ...

class ImportKvRequest(_message.Message):
    __slots__ = ("header", "chunk", "trailer", "source")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    TRAILER_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    header: ImportKvHeader
    chunk: KvChunk
    trailer: KvTrailer
    source: KvSource
    def __init__(self, header: _Optional[_Union[ImportKvHeader, _Mapping]] = ..., chunk: _Optional[_Union[KvChunk, _Mapping]] = ..., trailer: _Optional[_Union[KvTrailer, _Mapping]] = ..., source: _Optional[_Union[KvSource, _Mapping]] = ...) -> None: ...

class ImportKvHeader(_message.Message):
    __slots__ = ("layout", "create", "request_id", "abandon")
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    CREATE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ABANDON_FIELD_NUMBER: _ClassVar[int]
    layout: KvLayout
    create: _forward_pb2.CreateOptions
    request_id: str
    abandon: bool
    def __init__(self, layout: _Optional[_Union[KvLayout, _Mapping]] = ..., create: _Optional[_Union[_forward_pb2.CreateOptions, _Mapping]] = ..., request_id: _Optional[str] = ..., abandon: bool = ...) -> None: ...

class ImportKvResponse(_message.Message):
    __slots__ = ("handle", "pressure", "replayed", "next_token")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    PRESSURE_FIELD_NUMBER: _ClassVar[int]
    REPLAYED_FIELD_NUMBER: _ClassVar[int]
    NEXT_TOKEN_FIELD_NUMBER: _ClassVar[int]
    handle: _types_pb2.KvHandle
    pressure: _types_pb2.KvPressure
    replayed: bool
    next_token: int
    def __init__(self, handle: _Optional[_Union[_types_pb2.KvHandle, _Mapping]] = ..., pressure: _Optional[_Union[_types_pb2.KvPressure, _Mapping]] = ..., replayed: bool = ..., next_token: _Optional[int] = ...) -> None: ...

class WatchKvEventsRequest(_message.Message):
    __slots__ = ("after_event", "instance_id")
    AFTER_EVENT_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    after_event: int
    instance_id: str
    def __init__(self, after_event: _Optional[int] = ..., instance_id: _Optional[str] = ...) -> None: ...

class WatchKvEventsResponse(_message.Message):
    __slots__ = ("event", "events", "instance_id", "snapshot", "more", "gap")
    EVENT_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    GAP_FIELD_NUMBER: _ClassVar[int]
    event: int
    events: _containers.RepeatedCompositeFieldContainer[KvEvent]
    instance_id: str
    snapshot: bool
    more: bool
    gap: bool
    def __init__(self, event: _Optional[int] = ..., events: _Optional[_Iterable[_Union[KvEvent, _Mapping]]] = ..., instance_id: _Optional[str] = ..., snapshot: bool = ..., more: bool = ..., gap: bool = ...) -> None: ...

class KvEvent(_message.Message):
    __slots__ = ("stored", "removed", "cleared", "parked")
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    PARKED_FIELD_NUMBER: _ClassVar[int]
    stored: KvBlockStored
    removed: KvBlockRemoved
    cleared: KvCacheCleared
    parked: KvBlockParked
    def __init__(self, stored: _Optional[_Union[KvBlockStored, _Mapping]] = ..., removed: _Optional[_Union[KvBlockRemoved, _Mapping]] = ..., cleared: _Optional[_Union[KvCacheCleared, _Mapping]] = ..., parked: _Optional[_Union[KvBlockParked, _Mapping]] = ...) -> None: ...

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

class KvBlockParked(_message.Message):
    __slots__ = ("hash",)
    HASH_FIELD_NUMBER: _ClassVar[int]
    hash: bytes
    def __init__(self, hash: _Optional[bytes] = ...) -> None: ...

class ParkKvRequest(_message.Message):
    __slots__ = ("handle",)
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    handle: _types_pb2.KvHandle
    def __init__(self, handle: _Optional[_Union[_types_pb2.KvHandle, _Mapping]] = ...) -> None: ...

class ParkKvResponse(_message.Message):
    __slots__ = ("handle", "freed_blocks", "pressure")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    FREED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PRESSURE_FIELD_NUMBER: _ClassVar[int]
    handle: _types_pb2.KvHandle
    freed_blocks: int
    pressure: _types_pb2.KvPressure
    def __init__(self, handle: _Optional[_Union[_types_pb2.KvHandle, _Mapping]] = ..., freed_blocks: _Optional[int] = ..., pressure: _Optional[_Union[_types_pb2.KvPressure, _Mapping]] = ...) -> None: ...
