import datetime

from ferrum_rpc.executor.v1 import forward_pb2 as _forward_pb2
from ferrum_rpc.executor.v1 import info_pb2 as _info_pb2
from ferrum_rpc.executor.v1 import output_pb2 as _output_pb2
from ferrum_rpc.executor.v1 import session_pb2 as _session_pb2
from ferrum_rpc.executor.v1 import types_pb2 as _types_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GrammarKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GRAMMAR_KIND_UNSPECIFIED: _ClassVar[GrammarKind]
    GRAMMAR_KIND_JSON_SCHEMA: _ClassVar[GrammarKind]
    GRAMMAR_KIND_REGEX: _ClassVar[GrammarKind]
    GRAMMAR_KIND_LARK: _ClassVar[GrammarKind]
GRAMMAR_KIND_UNSPECIFIED: GrammarKind
GRAMMAR_KIND_JSON_SCHEMA: GrammarKind
GRAMMAR_KIND_REGEX: GrammarKind
GRAMMAR_KIND_LARK: GrammarKind

class PrefillRequest(_message.Message):
    __slots__ = ("item",)
    ITEM_FIELD_NUMBER: _ClassVar[int]
    item: _forward_pb2.ForwardItem
    def __init__(self, item: _Optional[_Union[_forward_pb2.ForwardItem, _Mapping]] = ...) -> None: ...

class PrefillResponse(_message.Message):
    __slots__ = ("output", "row_blocks", "pressure", "timing")
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    ROW_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PRESSURE_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    output: _forward_pb2.ForwardOutput
    row_blocks: _containers.RepeatedCompositeFieldContainer[_output_pb2.RowBlock]
    pressure: _types_pb2.KvPressure
    timing: _types_pb2.StepTiming
    def __init__(self, output: _Optional[_Union[_forward_pb2.ForwardOutput, _Mapping]] = ..., row_blocks: _Optional[_Iterable[_Union[_output_pb2.RowBlock, _Mapping]]] = ..., pressure: _Optional[_Union[_types_pb2.KvPressure, _Mapping]] = ..., timing: _Optional[_Union[_types_pb2.StepTiming, _Mapping]] = ...) -> None: ...

class BatchPrefillRequest(_message.Message):
    __slots__ = ("items", "all_or_nothing")
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    ALL_OR_NOTHING_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[_forward_pb2.ForwardItem]
    all_or_nothing: bool
    def __init__(self, items: _Optional[_Iterable[_Union[_forward_pb2.ForwardItem, _Mapping]]] = ..., all_or_nothing: bool = ...) -> None: ...

class BatchPrefillResponse(_message.Message):
    __slots__ = ("results", "row_blocks", "pressure", "timing")
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    ROW_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PRESSURE_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[_forward_pb2.ItemResult]
    row_blocks: _containers.RepeatedCompositeFieldContainer[_output_pb2.RowBlock]
    pressure: _types_pb2.KvPressure
    timing: _types_pb2.StepTiming
    def __init__(self, results: _Optional[_Iterable[_Union[_forward_pb2.ItemResult, _Mapping]]] = ..., row_blocks: _Optional[_Iterable[_Union[_output_pb2.RowBlock, _Mapping]]] = ..., pressure: _Optional[_Union[_types_pb2.KvPressure, _Mapping]] = ..., timing: _Optional[_Union[_types_pb2.StepTiming, _Mapping]] = ...) -> None: ...

class DecodeRequest(_message.Message):
    __slots__ = ("item",)
    ITEM_FIELD_NUMBER: _ClassVar[int]
    item: _forward_pb2.ForwardItem
    def __init__(self, item: _Optional[_Union[_forward_pb2.ForwardItem, _Mapping]] = ...) -> None: ...

class DecodeResponse(_message.Message):
    __slots__ = ("output", "row_blocks", "pressure", "timing")
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    ROW_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PRESSURE_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    output: _forward_pb2.ForwardOutput
    row_blocks: _containers.RepeatedCompositeFieldContainer[_output_pb2.RowBlock]
    pressure: _types_pb2.KvPressure
    timing: _types_pb2.StepTiming
    def __init__(self, output: _Optional[_Union[_forward_pb2.ForwardOutput, _Mapping]] = ..., row_blocks: _Optional[_Iterable[_Union[_output_pb2.RowBlock, _Mapping]]] = ..., pressure: _Optional[_Union[_types_pb2.KvPressure, _Mapping]] = ..., timing: _Optional[_Union[_types_pb2.StepTiming, _Mapping]] = ...) -> None: ...

class BatchDecodeRequest(_message.Message):
    __slots__ = ("items", "all_or_nothing")
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    ALL_OR_NOTHING_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[_forward_pb2.ForwardItem]
    all_or_nothing: bool
    def __init__(self, items: _Optional[_Iterable[_Union[_forward_pb2.ForwardItem, _Mapping]]] = ..., all_or_nothing: bool = ...) -> None: ...

class BatchDecodeResponse(_message.Message):
    __slots__ = ("results", "row_blocks", "pressure", "timing")
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    ROW_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PRESSURE_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[_forward_pb2.ItemResult]
    row_blocks: _containers.RepeatedCompositeFieldContainer[_output_pb2.RowBlock]
    pressure: _types_pb2.KvPressure
    timing: _types_pb2.StepTiming
    def __init__(self, results: _Optional[_Iterable[_Union[_forward_pb2.ItemResult, _Mapping]]] = ..., row_blocks: _Optional[_Iterable[_Union[_output_pb2.RowBlock, _Mapping]]] = ..., pressure: _Optional[_Union[_types_pb2.KvPressure, _Mapping]] = ..., timing: _Optional[_Union[_types_pb2.StepTiming, _Mapping]] = ...) -> None: ...

class UnifiedForwardRequest(_message.Message):
    __slots__ = ("items", "all_or_nothing")
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    ALL_OR_NOTHING_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[_forward_pb2.ForwardItem]
    all_or_nothing: bool
    def __init__(self, items: _Optional[_Iterable[_Union[_forward_pb2.ForwardItem, _Mapping]]] = ..., all_or_nothing: bool = ...) -> None: ...

class UnifiedForwardResponse(_message.Message):
    __slots__ = ("results", "row_blocks", "pressure", "timing")
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    ROW_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PRESSURE_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[_forward_pb2.ItemResult]
    row_blocks: _containers.RepeatedCompositeFieldContainer[_output_pb2.RowBlock]
    pressure: _types_pb2.KvPressure
    timing: _types_pb2.StepTiming
    def __init__(self, results: _Optional[_Iterable[_Union[_forward_pb2.ItemResult, _Mapping]]] = ..., row_blocks: _Optional[_Iterable[_Union[_output_pb2.RowBlock, _Mapping]]] = ..., pressure: _Optional[_Union[_types_pb2.KvPressure, _Mapping]] = ..., timing: _Optional[_Union[_types_pb2.StepTiming, _Mapping]] = ...) -> None: ...

class ForwardVerifyRequest(_message.Message):
    __slots__ = ("item",)
    ITEM_FIELD_NUMBER: _ClassVar[int]
    item: _forward_pb2.ForwardItem
    def __init__(self, item: _Optional[_Union[_forward_pb2.ForwardItem, _Mapping]] = ...) -> None: ...

class ForwardVerifyResponse(_message.Message):
    __slots__ = ("output", "row_blocks", "pressure", "timing")
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    ROW_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PRESSURE_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    output: _forward_pb2.ForwardOutput
    row_blocks: _containers.RepeatedCompositeFieldContainer[_output_pb2.RowBlock]
    pressure: _types_pb2.KvPressure
    timing: _types_pb2.StepTiming
    def __init__(self, output: _Optional[_Union[_forward_pb2.ForwardOutput, _Mapping]] = ..., row_blocks: _Optional[_Iterable[_Union[_output_pb2.RowBlock, _Mapping]]] = ..., pressure: _Optional[_Union[_types_pb2.KvPressure, _Mapping]] = ..., timing: _Optional[_Union[_types_pb2.StepTiming, _Mapping]] = ...) -> None: ...

class TruncateKvRequest(_message.Message):
    __slots__ = ("handle", "length", "request_id")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    handle: _types_pb2.KvHandle
    length: int
    request_id: str
    def __init__(self, handle: _Optional[_Union[_types_pb2.KvHandle, _Mapping]] = ..., length: _Optional[int] = ..., request_id: _Optional[str] = ...) -> None: ...

class TruncateKvResponse(_message.Message):
    __slots__ = ("handle", "pressure", "replayed")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    PRESSURE_FIELD_NUMBER: _ClassVar[int]
    REPLAYED_FIELD_NUMBER: _ClassVar[int]
    handle: _types_pb2.KvHandle
    pressure: _types_pb2.KvPressure
    replayed: bool
    def __init__(self, handle: _Optional[_Union[_types_pb2.KvHandle, _Mapping]] = ..., pressure: _Optional[_Union[_types_pb2.KvPressure, _Mapping]] = ..., replayed: bool = ...) -> None: ...

class ForkKvRequest(_message.Message):
    __slots__ = ("handle", "count", "at_length", "request_id", "lease_id")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    AT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    handle: _types_pb2.KvHandle
    count: int
    at_length: int
    request_id: str
    lease_id: str
    def __init__(self, handle: _Optional[_Union[_types_pb2.KvHandle, _Mapping]] = ..., count: _Optional[int] = ..., at_length: _Optional[int] = ..., request_id: _Optional[str] = ..., lease_id: _Optional[str] = ...) -> None: ...

class ForkKvResponse(_message.Message):
    __slots__ = ("handles", "pressure", "replayed")
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    PRESSURE_FIELD_NUMBER: _ClassVar[int]
    REPLAYED_FIELD_NUMBER: _ClassVar[int]
    handles: _containers.RepeatedCompositeFieldContainer[_types_pb2.KvHandle]
    pressure: _types_pb2.KvPressure
    replayed: bool
    def __init__(self, handles: _Optional[_Iterable[_Union[_types_pb2.KvHandle, _Mapping]]] = ..., pressure: _Optional[_Union[_types_pb2.KvPressure, _Mapping]] = ..., replayed: bool = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("handle", "any_version", "request_id")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    ANY_VERSION_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    handle: _types_pb2.KvHandle
    any_version: bool
    request_id: str
    def __init__(self, handle: _Optional[_Union[_types_pb2.KvHandle, _Mapping]] = ..., any_version: bool = ..., request_id: _Optional[str] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ("pressure", "replayed")
    PRESSURE_FIELD_NUMBER: _ClassVar[int]
    REPLAYED_FIELD_NUMBER: _ClassVar[int]
    pressure: _types_pb2.KvPressure
    replayed: bool
    def __init__(self, pressure: _Optional[_Union[_types_pb2.KvPressure, _Mapping]] = ..., replayed: bool = ...) -> None: ...

class ReserveKvRequest(_message.Message):
    __slots__ = ("handle", "tokens")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    handle: _types_pb2.KvHandle
    tokens: int
    def __init__(self, handle: _Optional[_Union[_types_pb2.KvHandle, _Mapping]] = ..., tokens: _Optional[int] = ...) -> None: ...

class ReserveKvResponse(_message.Message):
    __slots__ = ("handle", "pressure")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    PRESSURE_FIELD_NUMBER: _ClassVar[int]
    handle: _types_pb2.KvHandle
    pressure: _types_pb2.KvPressure
    def __init__(self, handle: _Optional[_Union[_types_pb2.KvHandle, _Mapping]] = ..., pressure: _Optional[_Union[_types_pb2.KvPressure, _Mapping]] = ...) -> None: ...

class AcquireLeaseRequest(_message.Message):
    __slots__ = ("ttl", "client_name")
    TTL_FIELD_NUMBER: _ClassVar[int]
    CLIENT_NAME_FIELD_NUMBER: _ClassVar[int]
    ttl: _duration_pb2.Duration
    client_name: str
    def __init__(self, ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., client_name: _Optional[str] = ...) -> None: ...

class AcquireLeaseResponse(_message.Message):
    __slots__ = ("lease_id", "ttl", "renew_every")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    RENEW_EVERY_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    ttl: _duration_pb2.Duration
    renew_every: _duration_pb2.Duration
    def __init__(self, lease_id: _Optional[str] = ..., ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., renew_every: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class KeepAliveRequest(_message.Message):
    __slots__ = ("lease_id",)
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    def __init__(self, lease_id: _Optional[str] = ...) -> None: ...

class KeepAliveResponse(_message.Message):
    __slots__ = ("ttl", "pressure")
    TTL_FIELD_NUMBER: _ClassVar[int]
    PRESSURE_FIELD_NUMBER: _ClassVar[int]
    ttl: _duration_pb2.Duration
    pressure: _types_pb2.KvPressure
    def __init__(self, ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., pressure: _Optional[_Union[_types_pb2.KvPressure, _Mapping]] = ...) -> None: ...

class RevokeLeaseRequest(_message.Message):
    __slots__ = ("lease_id",)
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    def __init__(self, lease_id: _Optional[str] = ...) -> None: ...

class RevokeLeaseResponse(_message.Message):
    __slots__ = ("released_sequences", "pressure")
    RELEASED_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    PRESSURE_FIELD_NUMBER: _ClassVar[int]
    released_sequences: int
    pressure: _types_pb2.KvPressure
    def __init__(self, released_sequences: _Optional[int] = ..., pressure: _Optional[_Union[_types_pb2.KvPressure, _Mapping]] = ...) -> None: ...

class RegisterTokenMaskRequest(_message.Message):
    __slots__ = ("words", "sha256")
    WORDS_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    words: _types_pb2.Tensor
    sha256: bytes
    def __init__(self, words: _Optional[_Union[_types_pb2.Tensor, _Mapping]] = ..., sha256: _Optional[bytes] = ...) -> None: ...

class RegisterTokenMaskResponse(_message.Message):
    __slots__ = ("token_mask_id",)
    TOKEN_MASK_ID_FIELD_NUMBER: _ClassVar[int]
    token_mask_id: bytes
    def __init__(self, token_mask_id: _Optional[bytes] = ...) -> None: ...

class RegisterGrammarRequest(_message.Message):
    __slots__ = ("kind", "text")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    kind: GrammarKind
    text: bytes
    def __init__(self, kind: _Optional[_Union[GrammarKind, str]] = ..., text: _Optional[bytes] = ...) -> None: ...

class RegisterGrammarResponse(_message.Message):
    __slots__ = ("grammar_id",)
    GRAMMAR_ID_FIELD_NUMBER: _ClassVar[int]
    grammar_id: bytes
    def __init__(self, grammar_id: _Optional[bytes] = ...) -> None: ...

class GetInfoRequest(_message.Message):
    __slots__ = ("client_revision",)
    CLIENT_REVISION_FIELD_NUMBER: _ClassVar[int]
    client_revision: int
    def __init__(self, client_revision: _Optional[int] = ...) -> None: ...

class GetInfoResponse(_message.Message):
    __slots__ = ("server_version", "schema_revision", "minimum_client_revision", "instance_id", "model", "kv_cache", "limits", "capabilities", "device")
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_REVISION_FIELD_NUMBER: _ClassVar[int]
    MINIMUM_CLIENT_REVISION_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    server_version: str
    schema_revision: int
    minimum_client_revision: int
    instance_id: str
    model: _info_pb2.ModelInfo
    kv_cache: _info_pb2.KvCacheInfo
    limits: _info_pb2.Limits
    capabilities: _containers.RepeatedScalarFieldContainer[_info_pb2.Capability]
    device: _info_pb2.DeviceInfo
    def __init__(self, server_version: _Optional[str] = ..., schema_revision: _Optional[int] = ..., minimum_client_revision: _Optional[int] = ..., instance_id: _Optional[str] = ..., model: _Optional[_Union[_info_pb2.ModelInfo, _Mapping]] = ..., kv_cache: _Optional[_Union[_info_pb2.KvCacheInfo, _Mapping]] = ..., limits: _Optional[_Union[_info_pb2.Limits, _Mapping]] = ..., capabilities: _Optional[_Iterable[_Union[_info_pb2.Capability, str]]] = ..., device: _Optional[_Union[_info_pb2.DeviceInfo, _Mapping]] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("state", "pressure", "counters", "methods", "uptime", "replay_bytes", "leases", "sessions", "blocks")
    STATE_FIELD_NUMBER: _ClassVar[int]
    PRESSURE_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    METHODS_FIELD_NUMBER: _ClassVar[int]
    UPTIME_FIELD_NUMBER: _ClassVar[int]
    REPLAY_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    state: _info_pb2.ExecutorState
    pressure: _types_pb2.KvPressure
    counters: _info_pb2.Counters
    methods: _containers.RepeatedCompositeFieldContainer[_info_pb2.MethodCount]
    uptime: _duration_pb2.Duration
    replay_bytes: int
    leases: int
    sessions: int
    blocks: _info_pb2.KvBlocks
    def __init__(self, state: _Optional[_Union[_info_pb2.ExecutorState, str]] = ..., pressure: _Optional[_Union[_types_pb2.KvPressure, _Mapping]] = ..., counters: _Optional[_Union[_info_pb2.Counters, _Mapping]] = ..., methods: _Optional[_Iterable[_Union[_info_pb2.MethodCount, _Mapping]]] = ..., uptime: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., replay_bytes: _Optional[int] = ..., leases: _Optional[int] = ..., sessions: _Optional[int] = ..., blocks: _Optional[_Union[_info_pb2.KvBlocks, _Mapping]] = ...) -> None: ...
