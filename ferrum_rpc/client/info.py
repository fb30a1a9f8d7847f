"""An executor's description (GetInfo) and state (GetStatus), as frozen dataclasses."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, Final

from ferrum_rpc.core import DeviceInfo, Limits, ModelInfo, Pressure
from ferrum_rpc.executor.v1 import model_executor_pb2
from ferrum_rpc.wire.info import from_proto, seconds
from ferrum_rpc.wire.items import pressure_from_proto

UNREPORTED: Final[dict[str, Any]] = {
    "max_adapters": 0,
    "adapter_memory": 0,
    "kv_park_bytes": 0,
    "kv_park_idle_s": 0.0,
    "kv_tier_bytes": 0,
}
"""Fields of `Limits` that `GetInfo` does not have."""


class Capability(enum.Enum):
    """An optional part of the contract; the values are those of the protos."""

    OUTPUT_GREEDY = 1
    OUTPUT_SAMPLE = 2
    OUTPUT_TOP_TOKENS = 3
    OUTPUT_SELECTED_TOKENS = 4
    OUTPUT_FULL_LOGITS = 5
    OUTPUT_ACCEPT = 6
    OUTPUT_HIDDEN_STATES = 7
    UNIFIED_FORWARD = 8
    TRUNCATE = 9
    FORK = 10
    RESERVE = 11
    REPLAY = 12
    LEASES = 13
    SESSION = 14
    TOKEN_MASKS = 15
    PENALTIES = 16
    PREFIX_CACHE = 17
    KV_TRANSFER = 18
    KV_EVENTS = 19
    ADAPTERS = 20
    WARMUP = 21
    RESET = 22
    DRAIN = 23
    LIST_SEQUENCES = 24
    OUTPUT_NEXT_TOKEN = 25
    ROW_LOGPROBS = 26
    RUN = 27
    FOLLOW = 28
    STEP_FORK = 29
    STEP_FRAMES = 30
    PARK = 31
    KV_TRANSPORT_NIXL = 32
    GRAMMAR = 33


class _Open(enum.Enum):
    """An enum in which values of newer executors are ``UNKNOWN``."""

    @classmethod
    def _missing_(cls, value: object) -> _Open:
        return cls["UNKNOWN"]


class ExecutorState(_Open):
    """The life cycle of an executor process; the values are those of the protos."""

    UNKNOWN = 0
    STARTING = 1
    SERVING = 2
    DRAINING = 3
    FAILED = 4
    HUNG = 5


class Health(_Open):
    """``grpc.health.v1.HealthCheckResponse.ServingStatus``; the values are those of the protos."""

    UNKNOWN = 0
    SERVING = 1
    NOT_SERVING = 2
    SERVICE_UNKNOWN = 3


@dataclass(frozen=True, slots=True)
class ExecutorInfo:
    """An executor's description. It does not change during a process lifetime, which ``instance_id`` identifies.

    ``capabilities`` omits those unknown to this client. ``block_size`` is in tokens; ``total_blocks`` is the pool.
    """

    server_version: str
    schema_revision: int
    minimum_client_revision: int
    instance_id: str
    model: ModelInfo
    block_size: int
    total_blocks: int
    limits: Limits
    capabilities: frozenset[Capability]
    device: DeviceInfo


@dataclass(frozen=True, slots=True)
class Counters:
    """Work done since the process started. ``forward_s`` is seconds inside forward passes. Of the ``tokens``,
    ``searched_tokens`` were looked up in the prefix cache, and ``cached_tokens`` found there. ``checkpoints_dropped``:
    of models with a state, because another needed the slot."""

    steps: int
    tokens: int
    rows: int
    forward_s: float
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


@dataclass(frozen=True, slots=True)
class MethodCount:
    """Calls of one RPC. ``errors``: calls that ended non-OK. ``items``/``item_errors``: work items in those calls, and
    those refused inside an OK answer."""

    method: str
    calls: int
    errors: int
    items: int
    item_errors: int


@dataclass(frozen=True, slots=True)
class KvBlocks:
    """The blocks of a cache by state: ``free`` without content, ``cached`` with content that a prompt may find (evicted
    when blocks are needed), ``used`` by sequences. ``parked_bytes`` are outside the cache: of ``parked_sequences``, and
    of the prefix cache's second tier. Of the used ones, ``importing`` are held by ``unfinished_imports``.
    """

    free: int
    cached: int
    used: int
    parked_bytes: int
    parked_sequences: int
    unfinished_imports: int
    importing: int


@dataclass(frozen=True, slots=True)
class ExecutorStatus:
    """An executor's present status. ``leases`` are live, ``sessions`` are open."""

    state: ExecutorState
    pressure: Pressure
    counters: Counters
    methods: tuple[MethodCount, ...]
    uptime_s: float
    replay_bytes: int
    leases: int
    sessions: int
    blocks: KvBlocks


@dataclass(frozen=True, slots=True)
class SequenceInfo:
    """A live sequence, for operators: ``label`` is for logs and not a handle. ``length`` in tokens, ``blocks`` of the
    cache that it refers to, ``idle_s`` since it was last used. ``identity``: its owner, empty if callers are not
    authenticated; ``client_name``: the name that its client gave. ``busy``: a call on it is in flight. ``parked``: its
    cache is on disk, and is restored by the next call."""

    label: str
    length: int
    blocks: int
    idle_s: float
    identity: str
    client_name: str
    adapter: str
    leased: bool
    busy: bool
    parked: bool


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """A loaded adapter: its largest ``rank``, its ``bytes`` in the executor's memory, the number of ``sequences`` that
    use it, and the ``fingerprint`` of the model with it."""

    name: str
    rank: int
    nbytes: int
    sequences: int
    fingerprint: bytes


@dataclass(frozen=True, slots=True)
class CallerActivity:
    """What a caller holds, for operators. ``identity``: empty if callers are not authenticated, and all are one.
    ``blocks``: those that its sequences refer to, a shared one once for each. ``items``: work that waits or runs.
    ``slots``: those of its sequences, 0 for a model without a state."""

    identity: str
    sequences: int
    blocks: int
    leases: int
    sessions: int
    items: int
    slots: int


@dataclass(frozen=True, slots=True)
class SlowCall:
    """A call that ended ``ago_s`` seconds ago, for operators: the full name of its ``method``, of a frame that of
    Session; the ``identity`` of its caller; ``code``: the name of its gRPC status code. A run takes as long as its
    tokens."""

    method: str
    identity: str
    elapsed_s: float
    ago_s: float
    code: str


@dataclass(frozen=True, slots=True)
class Activity:
    """What callers hold and which calls are slow. ``callers``: the one with the most sequences first. ``slowest_calls``
    of the last minute, the slowest first, at most 16."""

    callers: tuple[CallerActivity, ...]
    slowest_calls: tuple[SlowCall, ...]


@dataclass(frozen=True, slots=True)
class WarmupReport:
    """The result of a warm-up: ``steps`` forward passes in ``elapsed_s`` seconds."""

    steps: int
    elapsed_s: float
    pressure: Pressure


# --- from the wire --------------------------------------------------------------------------------------------------


def info_from_proto(proto: model_executor_pb2.GetInfoResponse) -> ExecutorInfo:
    """Wire to domain."""
    model, cache, limits = proto.model, proto.kv_cache, proto.limits
    known = {each.value for each in Capability}
    of_engine = {
        "exact_span_tokens": limits.exact_span_tokens,
        "free_truncation_tokens": limits.free_truncation_tokens if limits.HasField("free_truncation_tokens") else None,
        "checkpoint_tokens": limits.checkpoint_tokens,
    }
    return from_proto(
        ExecutorInfo,
        proto,
        model=from_proto(
            ModelInfo,
            model,
            kv_bytes_per_token=cache.bytes_per_token,
            state_bytes=cache.state_bytes,
            states=None,
            latent=False,  # neither is reported
            kv_shapes=(),
            eos_token_ids=tuple(model.eos_token_ids),
            bos_token_id=model.bos_token_id if model.HasField("bos_token_id") else None,
        ),
        block_size=cache.block_size,
        total_blocks=cache.total_blocks,
        limits=from_proto(Limits, limits, **UNREPORTED, **of_engine),
        capabilities=frozenset(Capability(each) for each in proto.capabilities if each in known),
        device=from_proto(
            DeviceInfo,
            proto.device,
            choices=tuple((each.choice, each.reason) for each in proto.device.choices),
            window_tokens=None,
            **of_engine,
        ),
    )


def status_from_proto(proto: model_executor_pb2.GetStatusResponse) -> ExecutorStatus:
    """Wire to domain."""
    return from_proto(
        ExecutorStatus,
        proto,
        state=ExecutorState(proto.state),
        pressure=pressure_from_proto(proto.pressure),
        counters=from_proto(Counters, proto.counters, forward_s=seconds(proto.counters.forward_time)),
        methods=tuple(from_proto(MethodCount, each) for each in proto.methods),
        blocks=from_proto(KvBlocks, proto.blocks),
    )
