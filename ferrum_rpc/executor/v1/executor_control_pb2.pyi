import datetime

from ferrum_rpc.executor.v1 import info_pb2 as _info_pb2
from ferrum_rpc.executor.v1 import types_pb2 as _types_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WarmupRequest(_message.Message):
    __slots__ = ("batch_size", "prefill_tokens")
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    batch_size: int
    prefill_tokens: int
    def __init__(self, batch_size: _Optional[int] = ..., prefill_tokens: _Optional[int] = ...) -> None: ...

class WarmupResponse(_message.Message):
    __slots__ = ("steps", "elapsed", "pressure")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_FIELD_NUMBER: _ClassVar[int]
    PRESSURE_FIELD_NUMBER: _ClassVar[int]
    steps: int
    elapsed: _duration_pb2.Duration
    pressure: _types_pb2.KvPressure
    def __init__(self, steps: _Optional[int] = ..., elapsed: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., pressure: _Optional[_Union[_types_pb2.KvPressure, _Mapping]] = ...) -> None: ...

class ResetRequest(_message.Message):
    __slots__ = ("instance_id",)
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    def __init__(self, instance_id: _Optional[str] = ...) -> None: ...

class ResetResponse(_message.Message):
    __slots__ = ("released_sequences", "pressure")
    RELEASED_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    PRESSURE_FIELD_NUMBER: _ClassVar[int]
    released_sequences: int
    pressure: _types_pb2.KvPressure
    def __init__(self, released_sequences: _Optional[int] = ..., pressure: _Optional[_Union[_types_pb2.KvPressure, _Mapping]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("grace",)
    GRACE_FIELD_NUMBER: _ClassVar[int]
    grace: _duration_pb2.Duration
    def __init__(self, grace: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("state", "sequences")
    STATE_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    state: _info_pb2.ExecutorState
    sequences: int
    def __init__(self, state: _Optional[_Union[_info_pb2.ExecutorState, str]] = ..., sequences: _Optional[int] = ...) -> None: ...

class LoadAdapterRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class LoadAdapterResponse(_message.Message):
    __slots__ = ("adapter",)
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    adapter: AdapterInfo
    def __init__(self, adapter: _Optional[_Union[AdapterInfo, _Mapping]] = ...) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class UnloadAdapterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListAdaptersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListAdaptersResponse(_message.Message):
    __slots__ = ("adapters",)
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[AdapterInfo]
    def __init__(self, adapters: _Optional[_Iterable[_Union[AdapterInfo, _Mapping]]] = ...) -> None: ...

class AdapterInfo(_message.Message):
    __slots__ = ("name", "rank", "bytes", "sequences", "fingerprint")
    NAME_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    name: str
    rank: int
    bytes: int
    sequences: int
    fingerprint: bytes
    def __init__(self, name: _Optional[str] = ..., rank: _Optional[int] = ..., bytes: _Optional[int] = ..., sequences: _Optional[int] = ..., fingerprint: _Optional[bytes] = ...) -> None: ...

class ListSequencesRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListSequencesResponse(_message.Message):
    __slots__ = ("sequences", "next_page_token")
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    sequences: _containers.RepeatedCompositeFieldContainer[SequenceInfo]
    next_page_token: str
    def __init__(self, sequences: _Optional[_Iterable[_Union[SequenceInfo, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class SequenceInfo(_message.Message):
    __slots__ = ("label", "seq_len", "blocks", "idle", "client_name", "adapter", "identity", "busy", "leased", "parked")
    LABEL_FIELD_NUMBER: _ClassVar[int]
    SEQ_LEN_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    IDLE_FIELD_NUMBER: _ClassVar[int]
    CLIENT_NAME_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    BUSY_FIELD_NUMBER: _ClassVar[int]
    LEASED_FIELD_NUMBER: _ClassVar[int]
    PARKED_FIELD_NUMBER: _ClassVar[int]
    label: str
    seq_len: int
    blocks: int
    idle: _duration_pb2.Duration
    client_name: str
    adapter: str
    identity: str
    busy: bool
    leased: bool
    parked: bool
    def __init__(self, label: _Optional[str] = ..., seq_len: _Optional[int] = ..., blocks: _Optional[int] = ..., idle: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., client_name: _Optional[str] = ..., adapter: _Optional[str] = ..., identity: _Optional[str] = ..., busy: bool = ..., leased: bool = ..., parked: bool = ...) -> None: ...

class GetActivityRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetActivityResponse(_message.Message):
    __slots__ = ("callers", "slowest_calls")
    CALLERS_FIELD_NUMBER: _ClassVar[int]
    SLOWEST_CALLS_FIELD_NUMBER: _ClassVar[int]
    callers: _containers.RepeatedCompositeFieldContainer[CallerActivity]
    slowest_calls: _containers.RepeatedCompositeFieldContainer[SlowCall]
    def __init__(self, callers: _Optional[_Iterable[_Union[CallerActivity, _Mapping]]] = ..., slowest_calls: _Optional[_Iterable[_Union[SlowCall, _Mapping]]] = ...) -> None: ...

class CallerActivity(_message.Message):
    __slots__ = ("identity", "sequences", "blocks", "leases", "sessions", "items", "slots")
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    identity: str
    sequences: int
    blocks: int
    leases: int
    sessions: int
    items: int
    slots: int
    def __init__(self, identity: _Optional[str] = ..., sequences: _Optional[int] = ..., blocks: _Optional[int] = ..., leases: _Optional[int] = ..., sessions: _Optional[int] = ..., items: _Optional[int] = ..., slots: _Optional[int] = ...) -> None: ...

class SlowCall(_message.Message):
    __slots__ = ("method", "identity", "elapsed", "ago", "code")
    METHOD_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_FIELD_NUMBER: _ClassVar[int]
    AGO_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    method: str
    identity: str
    elapsed: _duration_pb2.Duration
    ago: _duration_pb2.Duration
    code: str
    def __init__(self, method: _Optional[str] = ..., identity: _Optional[str] = ..., elapsed: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., ago: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., code: _Optional[str] = ...) -> None: ...
