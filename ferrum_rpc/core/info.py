"""Information about an executor: its model, device and limits, and its load."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from ferrum_rpc.core.states import StateLengths


@dataclass(frozen=True, slots=True)
class LatentShape:
    """What a layer with latent attention keeps of a token: a row of ``rotated`` channels of a key, which all heads
    share, and behind them a latent of ``rank`` numbers. Of the latent each head has ``plain`` more channels of its key,
    and a value of ``value_dim``."""

    rank: int
    rotated: int
    plain: int
    value_dim: int

    @property
    def width(self) -> int:
        """Of a row."""
        return self.rotated + self.rank

    @property
    def key_dim(self) -> int:
        """Of a head's key, and so of its query."""
        return self.rotated + self.plain


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The attention of one layer: head counts, ``head_dim``, softmax scale, sliding window (number of tokens that a
    query sees, including itself; None means all), logit soft cap (or None), and whether every head has a sink, a logit
    that the softmax counts like a score without a value. ``latent``: the cache has one head, whose rows are keys and
    values at once, and ``head_dim`` is their width."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    latent: LatentShape | None = None


@dataclass(frozen=True, slots=True)
class RecurrentShape:
    """Heads of a recurrent layer (Gated DeltaNet). Each key head belongs to ``value_heads // key_heads`` value heads in
    a row."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int = 4
    """Inputs that a row of the convolution reads, its own and those before."""

    @property
    def channels(self) -> int:
        """Width of the convolution: q and k of the key heads, then v of the value heads."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class StateTensors:
    """The tensors of the states of a sequence: ``layers`` of one ``shape``. ``dtype``: of the journal's channels;
    ``wide_dtype``: of the rest. ``step_tokens``: the most tokens of a step that can be taken back."""

    shape: RecurrentShape
    layers: int
    dtype: str
    wide_dtype: str
    step_tokens: int

    def rows(self, lengths: StateLengths) -> int:
        """Rows of a layer's journal that move: of the tokens that not every state contains, and the inputs of the
        convolution before them."""
        return lengths.length - min(lengths.folded) + self.shape.taps - 1

    def row_count(self, tensor: str, lengths: StateLengths) -> int:
        """All rows of one of `STATE_TENSORS`; see `StateRows`. Of ``lengths`` it is the same for all."""
        if tensor == "lengths":
            return 2 + self.layers
        return self.layers * (self.shape.value_heads if tensor == "states" else self.rows(lengths))


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Properties of the loaded model. ``kv_bytes_per_token`` counts K and V of all layers, and is known once there is a
    cache; ``state_bytes`` are those of a sequence's recurrent states, and ``states`` their tensors, if they can be
    moved. ``latent``: the cache has one row per token and layer, of ``head_dim`` numbers, which is key and value.
    ``kv_shapes``: the KV heads and their width of each layer that keeps K and V, unless all layers keep the same;
    ``heads``, ``kv_heads`` and ``head_dim`` are those of the first one. GetInfo reports neither. ``folder``: its path
    on the executor's machine; empty for a built-in model. ``fingerprint``: 32 bytes; models with the same one compute
    the same K and V. ``tokenizer_sha256``: of the tokenizer of grammars; empty: there are none."""

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
    kv_bytes_per_token: int = 0
    state_bytes: int = 0
    states: StateTensors | None = None
    latent: bool = False
    kv_shapes: tuple[tuple[int, int], ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    folder: str = ""
    fingerprint: bytes = b""
    tokenizer_sha256: bytes = b""

    def kv_shape(self, layer: int) -> tuple[int, int]:
        """KV heads and their width in one of the layers that keep K and V, which ``layer`` counts."""
        return self.kv_shapes[layer] if self.kv_shapes else (self.kv_heads, self.head_dim)


NO_KERNELS: Final = "kernels=none"
"""The choice of an engine on a CPU whose C library is missing or cannot be loaded."""


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """The device of the model and the selected backends with their reasons (``choices``: choice -> reason).
    ``exact_span_tokens``: spans of up to this many tokens give exactly the bits of single decodes, whatever their
    neighbours; 0: nothing is promised. ``free_truncation_tokens``: to go back by up to so many tokens of the last step
    costs nothing; by more, tokens are fed again, from a checkpoint if they come every ``checkpoint_tokens``. None: any
    truncation costs nothing. ``window_tokens``: so many tokens of a sequence stay in the cache, besides those of a
    step, because every layer has a window; None: all do. GetInfo does not report that."""

    kind: str
    name: str
    memory_bytes: int
    threads: int
    attention_backend: str
    choices: tuple[tuple[str, str], ...] = ()
    exact_span_tokens: int = 0
    free_truncation_tokens: int | None = None
    checkpoint_tokens: int = 0
    window_tokens: int | None = None


def blocks_held(start: int, end: int, block_size: int, window_tokens: int | None) -> int:
    """The most blocks that a sequence of ``end`` tokens holds while those from ``start`` on are written, or blocks for
    them are promised. Behind ``window_tokens`` tokens more they are given up (`DeviceInfo`)."""
    blocks = -(-end // block_size)
    if window_tokens is None:
        return blocks
    tokens = end - max(0, start - window_tokens)
    return min(blocks, (tokens + block_size - 2) // block_size + 1)


MAX_CACHE_SALT_BYTES: Final = 1024
MAX_NAME_BYTES: Final = 256
MAX_REQUEST_ID_BYTES: Final = 128
MAX_STOP_TOKENS: Final = 256
MAX_BIASES: Final = 512


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one call, and of all calls together. Reported by GetInfo, enforced by the service floor.
    ``caller_share``: the part of a table that one of several callers may hold; a limit per caller that is not 0 stands
    in its place. ``max_adapters`` 0: none are offered. GetInfo reports neither that nor ``adapter_memory``, nor the
    limits of parking and of the second tier (``kv_tier_bytes``; 0: there is none).
    ``exact_span_tokens``, ``free_truncation_tokens`` and ``checkpoint_tokens`` are no settings: the engine knows them
    (`DeviceInfo`), GetInfo reports them here. Nor are those from ``max_cache_salt_bytes`` to ``max_biases``, which the
    wire floor enforces, and ``max_forks`` and ``max_operations``, which are ``max_batch_items``. To a client 0 means
    that the executor does not report the limit."""

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
    max_steps_in_flight: int = 64
    session_inline_bytes: int = 1 << 20
    max_session_response_bytes: int = 256 << 20
    max_unread_bytes: int = 512 << 20
    lease_ttl_s: float = 30.0
    min_lease_ttl_s: float = 1.0
    max_lease_ttl_s: float = 3600.0
    idle_ttl_s: float = 600.0
    max_leases: int = 1024
    max_sessions: int = 4096
    max_watchers: int = 64
    max_token_masks: int = 2048
    max_grammars: int = 64
    max_grammar_bytes: int = 256 << 10
    caller_share: float = 0.5
    max_draft_tokens: int = 64
    max_draft_candidates: int = 64
    max_sequences_per_caller: int = 0
    max_blocks_per_caller: int = 0
    max_run_tokens: int = 32
    max_running: int = 64
    max_followers: int = 1
    max_transfers: int = 4
    max_adapters: int = 0
    kv_park_bytes: int = 8 << 30
    kv_park_idle_s: float = 0.0
    adapter_memory: int = 0
    kv_tier_bytes: int = 0
    exact_span_tokens: int = 0
    free_truncation_tokens: int | None = None
    checkpoint_tokens: int = 0
    max_cache_salt_bytes: int = MAX_CACHE_SALT_BYTES
    max_name_bytes: int = MAX_NAME_BYTES
    max_request_id_bytes: int = MAX_REQUEST_ID_BYTES
    max_stop_tokens: int = MAX_STOP_TOKENS
    max_biases: int = MAX_BIASES
    max_forks: int = 0
    max_operations: int = 0

    @property
    def max_selected_tokens_of_a_call(self) -> int:
        """Ids of all `SelectedTokens` and `RowLogprobs` of a call together; each takes the event loop 30 ns."""
        return 16 * self.max_selected_tokens


class CacheState(NamedTuple):
    """A snapshot of the block pool. Of the free blocks ``cached_blocks`` are published in the prefix cache. So far
    ``blocks_evicted`` were evicted from it, after ``evicted_s`` seconds there in total; ``tier_bytes`` of them are in
    the second tier. ``prefix_changes`` changes with each `BlockChange`. If the model has recurrent layers, a sequence
    needs one of ``total_slots`` for its states; ``free_slots`` hold none, or one of the ``checkpoints``, of which
    ``checkpoints_dropped`` were dropped for others so far."""

    block_size: int
    total_blocks: int
    free_blocks: int
    sequences: int
    cached_blocks: int = 0
    blocks_evicted: int = 0
    evicted_s: float = 0.0
    tier_bytes: int = 0
    prefix_changes: int = 0
    total_slots: int = 0
    free_slots: int = 0
    checkpoints: int = 0
    checkpoints_dropped: int = 0


class RankState(NamedTuple):
    """A process that computes a part of the model: whether it is alive, its resident memory, and what it has reserved
    on a GPU, both in bytes. 0 means unknown, or none."""

    alive: bool
    resident_bytes: int
    device_bytes: int = 0


class BlockChange(NamedTuple):
    """A block was published in the prefix cache under ``hash``, behind the block ``parent`` (b"": it is the first of
    its chain), as computed with ``adapter``; or, without a parent, its hash was removed, or is only in the second tier
    (``parked``). An empty hash: all were removed. ``caller``: the digest of the caller who imported its content, or
    what it was computed from; empty: it was computed here, and all callers may find it."""

    hash: bytes
    parent: bytes | None
    parked: bool = False
    adapter: str = ""
    caller: bytes = b""


class AdapterFacts(NamedTuple):
    """An adapter according to its files: its largest rank, its device memory, and the number of pieces in which it is
    read."""

    rank: int
    nbytes: int
    pieces: int


class Pressure(NamedTuple):
    """The wire's KvPressure: the block pool, the queue in front of it, the runs under way, and the slots for recurrent
    states (`CacheState`)."""

    free_blocks: int
    total_blocks: int
    block_size: int
    queued_items: int
    queued_tokens: int
    sequences: int
    running_items: int = 0
    free_slots: int = 0
    total_slots: int = 0
