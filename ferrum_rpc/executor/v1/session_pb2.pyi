import datetime

from ferrum_rpc.executor.v1 import forward_pb2 as _forward_pb2
from ferrum_rpc.executor.v1 import output_pb2 as _output_pb2
from ferrum_rpc.executor.v1 import types_pb2 as _types_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.rpc import status_pb2 as _status_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SessionRequest(_message.Message):
    __slots__ = ("step_id", "forward", "truncate", "release", "fork", "keep_alive", "hello", "close", "cancel", "reserve")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    FORWARD_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    FORK_FIELD_NUMBER: _ClassVar[int]
    KEEP_ALIVE_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    forward: SessionForward
    truncate: SessionTruncate
    release: SessionRelease
    fork: SessionFork
    keep_alive: SessionKeepAlive
    hello: SessionHello
    close: SessionClose
    cancel: SessionCancel
    reserve: SessionReserve
    def __init__(self, step_id: _Optional[int] = ..., forward: _Optional[_Union[SessionForward, _Mapping]] = ..., truncate: _Optional[_Union[SessionTruncate, _Mapping]] = ..., release: _Optional[_Union[SessionRelease, _Mapping]] = ..., fork: _Optional[_Union[SessionFork, _Mapping]] = ..., keep_alive: _Optional[_Union[SessionKeepAlive, _Mapping]] = ..., hello: _Optional[_Union[SessionHello, _Mapping]] = ..., close: _Optional[_Union[SessionClose, _Mapping]] = ..., cancel: _Optional[_Union[SessionCancel, _Mapping]] = ..., reserve: _Optional[_Union[SessionReserve, _Mapping]] = ...) -> None: ...

class SessionHello(_message.Message):
    __slots__ = ("client_revision", "lease_id", "steps_in_flight", "inline_bytes", "client_name", "tokens")
    CLIENT_REVISION_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    STEPS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    INLINE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CLIENT_NAME_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    client_revision: int
    lease_id: str
    steps_in_flight: int
    inline_bytes: int
    client_name: str
    tokens: bool
    def __init__(self, client_revision: _Optional[int] = ..., lease_id: _Optional[str] = ..., steps_in_flight: _Optional[int] = ..., inline_bytes: _Optional[int] = ..., client_name: _Optional[str] = ..., tokens: bool = ...) -> None: ...

class SessionForward(_message.Message):
    __slots__ = ("items", "all_or_nothing", "timeout", "apart", "release")
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    ALL_OR_NOTHING_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    APART_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[_forward_pb2.ForwardItem]
    all_or_nothing: bool
    timeout: _duration_pb2.Duration
    apart: bool
    release: _containers.RepeatedCompositeFieldContainer[_types_pb2.KvHandle]
    def __init__(self, items: _Optional[_Iterable[_Union[_forward_pb2.ForwardItem, _Mapping]]] = ..., all_or_nothing: bool = ..., timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., apart: bool = ..., release: _Optional[_Iterable[_Union[_types_pb2.KvHandle, _Mapping]]] = ...) -> None: ...

class SessionTruncate(_message.Message):
    __slots__ = ("handles", "lengths", "request_id")
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    handles: _containers.RepeatedCompositeFieldContainer[_types_pb2.KvHandle]
    lengths: _containers.RepeatedScalarFieldContainer[int]
    request_id: str
    def __init__(self, handles: _Optional[_Iterable[_Union[_types_pb2.KvHandle, _Mapping]]] = ..., lengths: _Optional[_Iterable[int]] = ..., request_id: _Optional[str] = ...) -> None: ...

class SessionRelease(_message.Message):
    __slots__ = ("handles", "any_version")
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    ANY_VERSION_FIELD_NUMBER: _ClassVar[int]
    handles: _containers.RepeatedCompositeFieldContainer[_types_pb2.KvHandle]
    any_version: bool
    def __init__(self, handles: _Optional[_Iterable[_Union[_types_pb2.KvHandle, _Mapping]]] = ..., any_version: bool = ...) -> None: ...

class SessionFork(_message.Message):
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

class SessionReserve(_message.Message):
    __slots__ = ("handle", "tokens")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    handle: _types_pb2.KvHandle
    tokens: int
    def __init__(self, handle: _Optional[_Union[_types_pb2.KvHandle, _Mapping]] = ..., tokens: _Optional[int] = ...) -> None: ...

class SessionKeepAlive(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SessionCancel(_message.Message):
    __slots__ = ("step_id", "item_indexes")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    ITEM_INDEXES_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    item_indexes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, step_id: _Optional[int] = ..., item_indexes: _Optional[_Iterable[int]] = ...) -> None: ...

class SessionClose(_message.Message):
    __slots__ = ("release_sequences",)
    RELEASE_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    release_sequences: bool
    def __init__(self, release_sequences: bool = ...) -> None: ...

class SessionResponse(_message.Message):
    __slots__ = ("step_id", "forward", "rows", "handles", "keep_alive", "welcome", "error", "goodbye", "tokens")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    FORWARD_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    KEEP_ALIVE_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    forward: SessionForwardAnswer
    rows: SessionRows
    handles: SessionHandlesAnswer
    keep_alive: SessionKeepAliveAnswer
    welcome: SessionWelcome
    error: _status_pb2.Status
    goodbye: SessionGoodbye
    tokens: SessionTokens
    def __init__(self, step_id: _Optional[int] = ..., forward: _Optional[_Union[SessionForwardAnswer, _Mapping]] = ..., rows: _Optional[_Union[SessionRows, _Mapping]] = ..., handles: _Optional[_Union[SessionHandlesAnswer, _Mapping]] = ..., keep_alive: _Optional[_Union[SessionKeepAliveAnswer, _Mapping]] = ..., welcome: _Optional[_Union[SessionWelcome, _Mapping]] = ..., error: _Optional[_Union[_status_pb2.Status, _Mapping]] = ..., goodbye: _Optional[_Union[SessionGoodbye, _Mapping]] = ..., tokens: _Optional[_Union[SessionTokens, _Mapping]] = ...) -> None: ...

class SessionWelcome(_message.Message):
    __slots__ = ("schema_revision", "instance_id", "lease_id", "steps_in_flight", "inline_bytes", "lease_ttl", "renew_every")
    SCHEMA_REVISION_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    STEPS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    INLINE_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEASE_TTL_FIELD_NUMBER: _ClassVar[int]
    RENEW_EVERY_FIELD_NUMBER: _ClassVar[int]
    schema_revision: int
    instance_id: str
    lease_id: str
    steps_in_flight: int
    inline_bytes: int
    lease_ttl: _duration_pb2.Duration
    renew_every: _duration_pb2.Duration
    def __init__(self, schema_revision: _Optional[int] = ..., instance_id: _Optional[str] = ..., lease_id: _Optional[str] = ..., steps_in_flight: _Optional[int] = ..., inline_bytes: _Optional[int] = ..., lease_ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., renew_every: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class SessionForwardAnswer(_message.Message):
    __slots__ = ("results", "row_blocks", "pressure", "timing", "more")
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    ROW_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PRESSURE_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[_forward_pb2.ItemResult]
    row_blocks: _containers.RepeatedCompositeFieldContainer[_output_pb2.RowBlock]
    pressure: _types_pb2.KvPressure
    timing: _types_pb2.StepTiming
    more: bool
    def __init__(self, results: _Optional[_Iterable[_Union[_forward_pb2.ItemResult, _Mapping]]] = ..., row_blocks: _Optional[_Iterable[_Union[_output_pb2.RowBlock, _Mapping]]] = ..., pressure: _Optional[_Union[_types_pb2.KvPressure, _Mapping]] = ..., timing: _Optional[_Union[_types_pb2.StepTiming, _Mapping]] = ..., more: bool = ...) -> None: ...

class SessionTokens(_message.Message):
    __slots__ = ("runs",)
    RUNS_FIELD_NUMBER: _ClassVar[int]
    runs: _containers.RepeatedCompositeFieldContainer[RunTokens]
    def __init__(self, runs: _Optional[_Iterable[_Union[RunTokens, _Mapping]]] = ...) -> None: ...

class RunTokens(_message.Message):
    __slots__ = ("item_index", "first", "token_ids", "step_id")
    ITEM_INDEX_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    item_index: int
    first: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    step_id: int
    def __init__(self, item_index: _Optional[int] = ..., first: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., step_id: _Optional[int] = ...) -> None: ...

class SessionRows(_message.Message):
    __slots__ = ("block", "first", "rows", "field")
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    block: int
    first: int
    rows: _types_pb2.Tensor
    field: int
    def __init__(self, block: _Optional[int] = ..., first: _Optional[int] = ..., rows: _Optional[_Union[_types_pb2.Tensor, _Mapping]] = ..., field: _Optional[int] = ...) -> None: ...

class SessionHandlesAnswer(_message.Message):
    __slots__ = ("results", "pressure")
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    PRESSURE_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[HandleResult]
    pressure: _types_pb2.KvPressure
    def __init__(self, results: _Optional[_Iterable[_Union[HandleResult, _Mapping]]] = ..., pressure: _Optional[_Union[_types_pb2.KvPressure, _Mapping]] = ...) -> None: ...

class HandleResult(_message.Message):
    __slots__ = ("handle", "error")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    handle: _types_pb2.KvHandle
    error: _status_pb2.Status
    def __init__(self, handle: _Optional[_Union[_types_pb2.KvHandle, _Mapping]] = ..., error: _Optional[_Union[_status_pb2.Status, _Mapping]] = ...) -> None: ...

class SessionKeepAliveAnswer(_message.Message):
    __slots__ = ("pressure", "ttl")
    PRESSURE_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    pressure: _types_pb2.KvPressure
    ttl: _duration_pb2.Duration
    def __init__(self, pressure: _Optional[_Union[_types_pb2.KvPressure, _Mapping]] = ..., ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class SessionGoodbye(_message.Message):
    __slots__ = ("released_sequences",)
    RELEASED_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    released_sequences: int
    def __init__(self, released_sequences: _Optional[int] = ...) -> None: ...
