import datetime

from ferrum_rpc.executor.v1 import types_pb2 as _types_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Capability(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CAPABILITY_UNSPECIFIED: _ClassVar[Capability]
    CAPABILITY_OUTPUT_GREEDY: _ClassVar[Capability]
    CAPABILITY_OUTPUT_SAMPLE: _ClassVar[Capability]
    CAPABILITY_OUTPUT_TOP_TOKENS: _ClassVar[Capability]
    CAPABILITY_OUTPUT_SELECTED_TOKENS: _ClassVar[Capability]
    CAPABILITY_OUTPUT_FULL_LOGITS: _ClassVar[Capability]
    CAPABILITY_OUTPUT_ACCEPT: _ClassVar[Capability]
    CAPABILITY_OUTPUT_HIDDEN_STATES: _ClassVar[Capability]
    CAPABILITY_UNIFIED_FORWARD: _ClassVar[Capability]
    CAPABILITY_TRUNCATE: _ClassVar[Capability]
    CAPABILITY_FORK: _ClassVar[Capability]
    CAPABILITY_RESERVE: _ClassVar[Capability]
    CAPABILITY_REPLAY: _ClassVar[Capability]
    CAPABILITY_LEASES: _ClassVar[Capability]
    CAPABILITY_SESSION: _ClassVar[Capability]
    CAPABILITY_TOKEN_MASKS: _ClassVar[Capability]
    CAPABILITY_PENALTIES: _ClassVar[Capability]
    CAPABILITY_PREFIX_CACHE: _ClassVar[Capability]
    CAPABILITY_KV_TRANSFER: _ClassVar[Capability]
    CAPABILITY_KV_EVENTS: _ClassVar[Capability]
    CAPABILITY_ADAPTERS: _ClassVar[Capability]
    CAPABILITY_WARMUP: _ClassVar[Capability]
    CAPABILITY_RESET: _ClassVar[Capability]
    CAPABILITY_DRAIN: _ClassVar[Capability]
    CAPABILITY_LIST_SEQUENCES: _ClassVar[Capability]
    CAPABILITY_OUTPUT_NEXT_TOKEN: _ClassVar[Capability]
    CAPABILITY_ROW_LOGPROBS: _ClassVar[Capability]
    CAPABILITY_RUN: _ClassVar[Capability]
    CAPABILITY_FOLLOW: _ClassVar[Capability]
    CAPABILITY_STEP_FORK: _ClassVar[Capability]
    CAPABILITY_STEP_FRAMES: _ClassVar[Capability]
    CAPABILITY_PARK: _ClassVar[Capability]
    CAPABILITY_KV_TRANSPORT_NIXL: _ClassVar[Capability]
    CAPABILITY_GRAMMAR: _ClassVar[Capability]

class ExecutorState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EXECUTOR_STATE_UNSPECIFIED: _ClassVar[ExecutorState]
    EXECUTOR_STATE_STARTING: _ClassVar[ExecutorState]
    EXECUTOR_STATE_SERVING: _ClassVar[ExecutorState]
    EXECUTOR_STATE_DRAINING: _ClassVar[ExecutorState]
    EXECUTOR_STATE_FAILED: _ClassVar[ExecutorState]
    EXECUTOR_STATE_HUNG: _ClassVar[ExecutorState]
CAPABILITY_UNSPECIFIED: Capability
CAPABILITY_OUTPUT_GREEDY: Capability
CAPABILITY_OUTPUT_SAMPLE: Capability
CAPABILITY_OUTPUT_TOP_TOKENS: Capability
CAPABILITY_OUTPUT_SELECTED_TOKENS: Capability
CAPABILITY_OUTPUT_FULL_LOGITS: Capability
CAPABILITY_OUTPUT_ACCEPT: Capability
CAPABILITY_OUTPUT_HIDDEN_STATES: Capability
CAPABILITY_UNIFIED_FORWARD: Capability
CAPABILITY_TRUNCATE: Capability
CAPABILITY_FORK: Capability
CAPABILITY_RESERVE: Capability
CAPABILITY_REPLAY: Capability
CAPABILITY_LEASES: Capability
CAPABILITY_SESSION: Capability
CAPABILITY_TOKEN_MASKS: Capability
CAPABILITY_PENALTIES: Capability
CAPABILITY_PREFIX_CACHE: Capability
CAPABILITY_KV_TRANSFER: Capability
CAPABILITY_KV_EVENTS: Capability
CAPABILITY_ADAPTERS: Capability
CAPABILITY_WARMUP: Capability
CAPABILITY_RESET: Capability
CAPABILITY_DRAIN: Capability
CAPABILITY_LIST_SEQUENCES: Capability
CAPABILITY_OUTPUT_NEXT_TOKEN: Capability
CAPABILITY_ROW_LOGPROBS: Capability
CAPABILITY_RUN: Capability
CAPABILITY_FOLLOW: Capability
CAPABILITY_STEP_FORK: Capability
CAPABILITY_STEP_FRAMES: Capability
CAPABILITY_PARK: Capability
CAPABILITY_KV_TRANSPORT_NIXL: Capability
CAPABILITY_GRAMMAR: Capability
EXECUTOR_STATE_UNSPECIFIED: ExecutorState
EXECUTOR_STATE_STARTING: ExecutorState
EXECUTOR_STATE_SERVING: ExecutorState
EXECUTOR_STATE_DRAINING: ExecutorState
EXECUTOR_STATE_FAILED: ExecutorState
EXECUTOR_STATE_HUNG: ExecutorState

class ModelInfo(_message.Message):
    __slots__ = ("name", "architecture", "vocab_size", "max_context", "layers", "hidden_size", "heads", "kv_heads", "head_dim", "parameters", "weight_dtype", "kv_dtype", "eos_token_ids", "bos_token_id", "folder", "fingerprint", "tokenizer_sha256")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    HEADS_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_DTYPE_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BOS_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_SHA256_FIELD_NUMBER: _ClassVar[int]
    name: str
    architecture: str
    vocab_size: int
    max_context: int
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    parameters: int
    weight_dtype: str
    kv_dtype: str
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bos_token_id: int
    folder: str
    fingerprint: bytes
    tokenizer_sha256: bytes
    def __init__(self, name: _Optional[str] = ..., architecture: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_context: _Optional[int] = ..., layers: _Optional[int] = ..., hidden_size: _Optional[int] = ..., heads: _Optional[int] = ..., kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., parameters: _Optional[int] = ..., weight_dtype: _Optional[str] = ..., kv_dtype: _Optional[str] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., bos_token_id: _Optional[int] = ..., folder: _Optional[str] = ..., fingerprint: _Optional[bytes] = ..., tokenizer_sha256: _Optional[bytes] = ...) -> None: ...

class KvCacheInfo(_message.Message):
    __slots__ = ("block_size", "total_blocks", "bytes_per_token", "state_bytes", "tensors")
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    STATE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    block_size: int
    total_blocks: int
    bytes_per_token: int
    state_bytes: int
    tensors: _containers.RepeatedCompositeFieldContainer[_types_pb2.KvTensor]
    def __init__(self, block_size: _Optional[int] = ..., total_blocks: _Optional[int] = ..., bytes_per_token: _Optional[int] = ..., state_bytes: _Optional[int] = ..., tensors: _Optional[_Iterable[_Union[_types_pb2.KvTensor, _Mapping]]] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("max_batch_items", "max_batch_tokens", "max_top_tokens", "max_selected_tokens", "max_request_bytes", "max_response_bytes", "max_sequences", "max_queued_items", "max_queued_tokens", "replay_bytes", "max_steps_in_flight", "session_inline_bytes", "max_session_response_bytes", "lease_ttl", "max_lease_ttl", "idle_ttl", "max_sequences_per_caller", "max_blocks_per_caller", "max_leases", "min_lease_ttl", "max_sessions", "caller_share", "exact_span_tokens", "max_unread_bytes", "max_run_tokens", "max_running", "max_followers", "max_forks", "max_draft_tokens", "max_draft_candidates", "max_token_masks", "max_biases", "max_transfers", "max_cache_salt_bytes", "max_name_bytes", "max_request_id_bytes", "max_stop_tokens", "max_operations", "max_watchers", "max_grammars", "max_grammar_bytes", "free_truncation_tokens", "checkpoint_tokens")
    MAX_BATCH_ITEMS_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_SELECTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUEST_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_RESPONSE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUED_ITEMS_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REPLAY_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_STEPS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    SESSION_INLINE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_SESSION_RESPONSE_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEASE_TTL_FIELD_NUMBER: _ClassVar[int]
    MAX_LEASE_TTL_FIELD_NUMBER: _ClassVar[int]
    IDLE_TTL_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCES_PER_CALLER_FIELD_NUMBER: _ClassVar[int]
    MAX_BLOCKS_PER_CALLER_FIELD_NUMBER: _ClassVar[int]
    MAX_LEASES_FIELD_NUMBER: _ClassVar[int]
    MIN_LEASE_TTL_FIELD_NUMBER: _ClassVar[int]
    MAX_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    CALLER_SHARE_FIELD_NUMBER: _ClassVar[int]
    EXACT_SPAN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_UNREAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_RUN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_FIELD_NUMBER: _ClassVar[int]
    MAX_FOLLOWERS_FIELD_NUMBER: _ClassVar[int]
    MAX_FORKS_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKEN_MASKS_FIELD_NUMBER: _ClassVar[int]
    MAX_BIASES_FIELD_NUMBER: _ClassVar[int]
    MAX_TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    MAX_CACHE_SALT_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_NAME_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUEST_ID_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_STOP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_OPERATIONS_FIELD_NUMBER: _ClassVar[int]
    MAX_WATCHERS_FIELD_NUMBER: _ClassVar[int]
    MAX_GRAMMARS_FIELD_NUMBER: _ClassVar[int]
    MAX_GRAMMAR_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_TRUNCATION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    max_batch_items: int
    max_batch_tokens: int
    max_top_tokens: int
    max_selected_tokens: int
    max_request_bytes: int
    max_response_bytes: int
    max_sequences: int
    max_queued_items: int
    max_queued_tokens: int
    replay_bytes: int
    max_steps_in_flight: int
    session_inline_bytes: int
    max_session_response_bytes: int
    lease_ttl: _duration_pb2.Duration
    max_lease_ttl: _duration_pb2.Duration
    idle_ttl: _duration_pb2.Duration
    max_sequences_per_caller: int
    max_blocks_per_caller: int
    max_leases: int
    min_lease_ttl: _duration_pb2.Duration
    max_sessions: int
    caller_share: float
    exact_span_tokens: int
    max_unread_bytes: int
    max_run_tokens: int
    max_running: int
    max_followers: int
    max_forks: int
    max_draft_tokens: int
    max_draft_candidates: int
    max_token_masks: int
    max_biases: int
    max_transfers: int
    max_cache_salt_bytes: int
    max_name_bytes: int
    max_request_id_bytes: int
    max_stop_tokens: int
    max_operations: int
    max_watchers: int
    max_grammars: int
    max_grammar_bytes: int
    free_truncation_tokens: int
    checkpoint_tokens: int
    def __init__(self, max_batch_items: _Optional[int] = ..., max_batch_tokens: _Optional[int] = ..., max_top_tokens: _Optional[int] = ..., max_selected_tokens: _Optional[int] = ..., max_request_bytes: _Optional[int] = ..., max_response_bytes: _Optional[int] = ..., max_sequences: _Optional[int] = ..., max_queued_items: _Optional[int] = ..., max_queued_tokens: _Optional[int] = ..., replay_bytes: _Optional[int] = ..., max_steps_in_flight: _Optional[int] = ..., session_inline_bytes: _Optional[int] = ..., max_session_response_bytes: _Optional[int] = ..., lease_ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., max_lease_ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., idle_ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., max_sequences_per_caller: _Optional[int] = ..., max_blocks_per_caller: _Optional[int] = ..., max_leases: _Optional[int] = ..., min_lease_ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., max_sessions: _Optional[int] = ..., caller_share: _Optional[float] = ..., exact_span_tokens: _Optional[int] = ..., max_unread_bytes: _Optional[int] = ..., max_run_tokens: _Optional[int] = ..., max_running: _Optional[int] = ..., max_followers: _Optional[int] = ..., max_forks: _Optional[int] = ..., max_draft_tokens: _Optional[int] = ..., max_draft_candidates: _Optional[int] = ..., max_token_masks: _Optional[int] = ..., max_biases: _Optional[int] = ..., max_transfers: _Optional[int] = ..., max_cache_salt_bytes: _Optional[int] = ..., max_name_bytes: _Optional[int] = ..., max_request_id_bytes: _Optional[int] = ..., max_stop_tokens: _Optional[int] = ..., max_operations: _Optional[int] = ..., max_watchers: _Optional[int] = ..., max_grammars: _Optional[int] = ..., max_grammar_bytes: _Optional[int] = ..., free_truncation_tokens: _Optional[int] = ..., checkpoint_tokens: _Optional[int] = ...) -> None: ...

class DeviceInfo(_message.Message):
    __slots__ = ("kind", "name", "memory_bytes", "threads", "attention_backend", "choices")
    KIND_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    THREADS_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_BACKEND_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    kind: str
    name: str
    memory_bytes: int
    threads: int
    attention_backend: str
    choices: _containers.RepeatedCompositeFieldContainer[DeviceChoice]
    def __init__(self, kind: _Optional[str] = ..., name: _Optional[str] = ..., memory_bytes: _Optional[int] = ..., threads: _Optional[int] = ..., attention_backend: _Optional[str] = ..., choices: _Optional[_Iterable[_Union[DeviceChoice, _Mapping]]] = ...) -> None: ...

class DeviceChoice(_message.Message):
    __slots__ = ("choice", "reason")
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    choice: str
    reason: str
    def __init__(self, choice: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class MethodCount(_message.Message):
    __slots__ = ("method", "calls", "errors", "items", "item_errors")
    METHOD_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    ITEM_ERRORS_FIELD_NUMBER: _ClassVar[int]
    method: str
    calls: int
    errors: int
    items: int
    item_errors: int
    def __init__(self, method: _Optional[str] = ..., calls: _Optional[int] = ..., errors: _Optional[int] = ..., items: _Optional[int] = ..., item_errors: _Optional[int] = ...) -> None: ...

class Counters(_message.Message):
    __slots__ = ("steps", "tokens", "rows", "forward_time", "sequences_created", "sequences_released", "replays", "kv_exhausted", "queue_full", "tokens_truncated", "blocks_copied", "leases_expired", "sequences_expired", "searched_tokens", "cached_tokens", "blocks_evicted", "sequences_forked", "sequences_exported", "sequences_imported", "sequences_parked", "checkpoints_dropped")
    STEPS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_TIME_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_CREATED_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_RELEASED_FIELD_NUMBER: _ClassVar[int]
    REPLAYS_FIELD_NUMBER: _ClassVar[int]
    KV_EXHAUSTED_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FULL_FIELD_NUMBER: _ClassVar[int]
    TOKENS_TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_COPIED_FIELD_NUMBER: _ClassVar[int]
    LEASES_EXPIRED_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_EXPIRED_FIELD_NUMBER: _ClassVar[int]
    SEARCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_EVICTED_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FORKED_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_EXPORTED_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_IMPORTED_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_PARKED_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTS_DROPPED_FIELD_NUMBER: _ClassVar[int]
    steps: int
    tokens: int
    rows: int
    forward_time: _duration_pb2.Duration
    sequences_created: int
    sequences_released: int
    replays: int
    kv_exhausted: int
    queue_full: int
    tokens_truncated: int
    blocks_copied: int
    leases_expired: int
    sequences_expired: int
    searched_tokens: int
    cached_tokens: int
    blocks_evicted: int
    sequences_forked: int
    sequences_exported: int
    sequences_imported: int
    sequences_parked: int
    checkpoints_dropped: int
    def __init__(self, steps: _Optional[int] = ..., tokens: _Optional[int] = ..., rows: _Optional[int] = ..., forward_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., sequences_created: _Optional[int] = ..., sequences_released: _Optional[int] = ..., replays: _Optional[int] = ..., kv_exhausted: _Optional[int] = ..., queue_full: _Optional[int] = ..., tokens_truncated: _Optional[int] = ..., blocks_copied: _Optional[int] = ..., leases_expired: _Optional[int] = ..., sequences_expired: _Optional[int] = ..., searched_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., blocks_evicted: _Optional[int] = ..., sequences_forked: _Optional[int] = ..., sequences_exported: _Optional[int] = ..., sequences_imported: _Optional[int] = ..., sequences_parked: _Optional[int] = ..., checkpoints_dropped: _Optional[int] = ...) -> None: ...

class KvBlocks(_message.Message):
    __slots__ = ("free", "cached", "used", "parked_bytes", "parked_sequences", "unfinished_imports", "importing")
    FREE_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    PARKED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PARKED_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    UNFINISHED_IMPORTS_FIELD_NUMBER: _ClassVar[int]
    IMPORTING_FIELD_NUMBER: _ClassVar[int]
    free: int
    cached: int
    used: int
    parked_bytes: int
    parked_sequences: int
    unfinished_imports: int
    importing: int
    def __init__(self, free: _Optional[int] = ..., cached: _Optional[int] = ..., used: _Optional[int] = ..., parked_bytes: _Optional[int] = ..., parked_sequences: _Optional[int] = ..., unfinished_imports: _Optional[int] = ..., importing: _Optional[int] = ...) -> None: ...
