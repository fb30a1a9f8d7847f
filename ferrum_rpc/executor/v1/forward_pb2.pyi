from ferrum_rpc.executor.v1 import info_pb2 as _info_pb2
from ferrum_rpc.executor.v1 import output_pb2 as _output_pb2
from ferrum_rpc.executor.v1 import types_pb2 as _types_pb2
from google.rpc import status_pb2 as _status_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RunEnd(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RUN_END_UNSPECIFIED: _ClassVar[RunEnd]
    RUN_END_MAX_TOKENS: _ClassVar[RunEnd]
    RUN_END_STOP_ID: _ClassVar[RunEnd]
    RUN_END_CONTEXT: _ClassVar[RunEnd]
    RUN_END_CUT: _ClassVar[RunEnd]

class CacheMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CACHE_MODE_UNSPECIFIED: _ClassVar[CacheMode]
    CACHE_MODE_READ_WRITE: _ClassVar[CacheMode]
    CACHE_MODE_READ_ONLY: _ClassVar[CacheMode]
    CACHE_MODE_BYPASS: _ClassVar[CacheMode]
RUN_END_UNSPECIFIED: RunEnd
RUN_END_MAX_TOKENS: RunEnd
RUN_END_STOP_ID: RunEnd
RUN_END_CONTEXT: RunEnd
RUN_END_CUT: RunEnd
CACHE_MODE_UNSPECIFIED: CacheMode
CACHE_MODE_READ_WRITE: CacheMode
CACHE_MODE_READ_ONLY: CacheMode
CACHE_MODE_BYPASS: CacheMode

class ForwardItem(_message.Message):
    __slots__ = ("item_id", "handle", "token_ids", "truncate_to", "output", "request_id", "create", "run", "follow", "needs")
    ITEM_ID_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_TO_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CREATE_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    NEEDS_FIELD_NUMBER: _ClassVar[int]
    item_id: int
    handle: _types_pb2.KvHandle
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    truncate_to: int
    output: _output_pb2.OutputSpec
    request_id: str
    create: CreateOptions
    run: Run
    follow: Follow
    needs: _containers.RepeatedScalarFieldContainer[_info_pb2.Capability]
    def __init__(self, item_id: _Optional[int] = ..., handle: _Optional[_Union[_types_pb2.KvHandle, _Mapping]] = ..., token_ids: _Optional[_Iterable[int]] = ..., truncate_to: _Optional[int] = ..., output: _Optional[_Union[_output_pb2.OutputSpec, _Mapping]] = ..., request_id: _Optional[str] = ..., create: _Optional[_Union[CreateOptions, _Mapping]] = ..., run: _Optional[_Union[Run, _Mapping]] = ..., follow: _Optional[_Union[Follow, _Mapping]] = ..., needs: _Optional[_Iterable[_Union[_info_pb2.Capability, str]]] = ...) -> None: ...

class Run(_message.Message):
    __slots__ = ("max_tokens", "stop_token_ids")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, max_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Follow(_message.Message):
    __slots__ = ("feed_chosen", "creation")
    FEED_CHOSEN_FIELD_NUMBER: _ClassVar[int]
    CREATION_FIELD_NUMBER: _ClassVar[int]
    feed_chosen: bool
    creation: str
    def __init__(self, feed_chosen: bool = ..., creation: _Optional[str] = ...) -> None: ...

class CreateOptions(_message.Message):
    __slots__ = ("lease_id", "adapter", "cache_salt", "cache_mode", "reserve_tokens", "fork")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    CACHE_MODE_FIELD_NUMBER: _ClassVar[int]
    RESERVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FORK_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    adapter: str
    cache_salt: bytes
    cache_mode: CacheMode
    reserve_tokens: int
    fork: bool
    def __init__(self, lease_id: _Optional[str] = ..., adapter: _Optional[str] = ..., cache_salt: _Optional[bytes] = ..., cache_mode: _Optional[_Union[CacheMode, str]] = ..., reserve_tokens: _Optional[int] = ..., fork: bool = ...) -> None: ...

class ForwardOutput(_message.Message):
    __slots__ = ("handle", "rows", "replayed", "cached_tokens", "run_end", "run_cause", "recomputed_tokens")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    REPLAYED_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RUN_END_FIELD_NUMBER: _ClassVar[int]
    RUN_CAUSE_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    handle: _types_pb2.KvHandle
    rows: _output_pb2.RowRange
    replayed: bool
    cached_tokens: int
    run_end: RunEnd
    run_cause: _status_pb2.Status
    recomputed_tokens: int
    def __init__(self, handle: _Optional[_Union[_types_pb2.KvHandle, _Mapping]] = ..., rows: _Optional[_Union[_output_pb2.RowRange, _Mapping]] = ..., replayed: bool = ..., cached_tokens: _Optional[int] = ..., run_end: _Optional[_Union[RunEnd, str]] = ..., run_cause: _Optional[_Union[_status_pb2.Status, _Mapping]] = ..., recomputed_tokens: _Optional[int] = ...) -> None: ...

class ItemResult(_message.Message):
    __slots__ = ("item_id", "output", "error", "item_index")
    ITEM_ID_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    ITEM_INDEX_FIELD_NUMBER: _ClassVar[int]
    item_id: int
    output: ForwardOutput
    error: _status_pb2.Status
    item_index: int
    def __init__(self, item_id: _Optional[int] = ..., output: _Optional[_Union[ForwardOutput, _Mapping]] = ..., error: _Optional[_Union[_status_pb2.Status, _Mapping]] = ..., item_index: _Optional[int] = ...) -> None: ...
