"""The words that every floor shares: pure data, no behaviour worth mocking.

Everything the executor does is one primitive: a *step*, a list of *spans* that run in one forward pass. "Prefill" and
"decode" are words of the wire and of metrics; here there are only spans. This file imports nothing of the project and
no torch, so that the service floor, the wire floor and the engine can all speak it.

Shapes use these letters: T tokens of a step, R rows that were asked for, V vocabulary, k candidates of a row.

What is made for every sequence of every step is a named tuple: as immutable as a frozen dataclass, and made in a
quarter of its time, which would be 6 µs a sequence and step more.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ferrum_rpc.errors import ExecutorError, InvalidRequest

TokenArray = npt.NDArray[np.int32]
"""Token ids of one span, int32 [n]."""


named: Final = tuple.__new__
"""``named(HandleRef, (id, seq_len, version))`` is ``HandleRef(id, seq_len, version)`` in half of its 0.3 µs: a named
tuple's own ``__new__`` is a function in Python. All fields, in their order: no default fills in."""


# --- what a caller wants to see -------------------------------------------------------------------------------------


class Positions(enum.Enum):
    """Which positions of a span yield a row."""

    NONE = "none"
    LAST = "last"
    ALL = "all"


class RowDType(enum.Enum):
    """Element type of a raw row on the host and on the wire (little endian)."""

    F32 = "f32"
    BF16 = "bf16"
    F16 = "f16"

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return 4 if self is RowDType.F32 else 2


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """Log-probabilities beside a row's token, of the row as the model gave it (f32): of its ``top_k`` best tokens, in
    the order of `TopTokens`, and of ``token_ids``, in their order."""

    top_k: int = 0
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Greedy:
    """The arg-max token of a row; ties go to the lowest id. With ``logprob`` also its log-probability (f32), with
    ``logprobs`` those of other tokens. ``mask``, ``row_masks``: as in `Sample`, and on the executor's side such an
    output is a `Sample` at temperature 0."""

    logprob: bool = False
    logprobs: RowLogprobs | None = None
    mask: bytes = b""
    row_masks: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Sample:
    """A token drawn on the device (`sampling.draw`): ``temperature`` 0 is greedy; ``top_k`` 0, ``top_p`` 1 and
    ``min_p`` 0 keep all tokens; ``bias``: (token, what is added to its logit). ``seed``: 64 bits; None: any. The draw
    is a function of the row, the seed and the row's position. With ``logprob`` also the token's log-probability in the
    row as the model gave it (f32), with ``logprobs`` those of other tokens.

    ``repetition_penalty`` divides positive and multiplies negative logits of tokens that the sequence holds (1: none);
    ``presence_penalty`` is subtracted once, ``frequency_penalty`` for each occurrence, of those from the position
    ``penalty_from`` on (0: none).

    ``mask``: the id of a registered mask of the tokens that may be drawn. ``row_masks``: one for each row in its place,
    in the order of their positions; empty: none for that row."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    logprob: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_from: int = 0
    logprobs: RowLogprobs | None = None
    mask: bytes = b""
    row_masks: tuple[bytes, ...] = ()

    @property
    def masks(self) -> tuple[bytes, ...]:
        """The masks that it names; those of rows without one are empty."""
        return (self.mask,) if self.mask else self.row_masks

    @property
    def penalised(self) -> bool:
        """Whether the sequence's tokens matter."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


@dataclass(frozen=True, slots=True)
class TopTokens:
    """The ``k`` largest logits with their ids, by falling logit and rising id, and the row's logsumexp."""

    k: int


@dataclass(frozen=True, slots=True)
class SelectedTokens:
    """The logits of the given ids, in the given order, and the row's logsumexp."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FullLogits:
    """The whole row of V logits."""

    dtype: RowDType = RowDType.F32


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """What the output head reads: the row after the final norm."""

    dtype: RowDType = RowDType.F32


@dataclass(frozen=True, slots=True)
class NextToken:
    """Scores of a span's own tokens: the row of token i has token i + 1 and its log-probability (f32), that of the last
    one ``following_token``; None: it has no row, nor has a token that stands before ``first_position`` of the sequence.
    ``logprobs``: those of other tokens. Its positions are `Positions.ALL`."""

    first_position: int = 0
    following_token: int | None = None
    logprobs: RowLogprobs | None = None

    def row_count(self, tokens: int, start: int) -> int:
        """As `OutputSpec.row_count`."""
        return max(0, tokens - (self.following_token is None) - max(0, self.first_position - start))


@dataclass(frozen=True, slots=True, init=False)
class Accept:
    """Of [last, d0 … dN-1] the longest prefix of the draft that holds, and the token after it; the cache keeps ``last``
    and what was accepted. ``sampling``: how the tokens are chosen; None: greedily. They have the distribution that it
    gives them alone, however bad the draft is, if what is said of the draft is true: that each of its tokens was drawn
    from k candidates by their probabilities, or, where k is 0, that it is a guess.

    Made of ``draft_token_ids`` uint32 [N, k] and ``draft_probabilities`` float32 [N, k], array-likes both; kept as
    bytes, so that outputs can be compared and hashed. Raises `InvalidRequest` for arrays that do not agree."""

    sampling: Sample | None
    candidates: int
    token_ids: bytes
    probabilities: bytes

    def __init__(
        self,
        sampling: Sample | None = None,
        draft_token_ids: npt.ArrayLike | None = None,
        draft_probabilities: npt.ArrayLike | None = None,
    ) -> None:
        ids, probabilities = np.zeros((0, 0), np.uint32), np.zeros((0, 0), np.float32)
        if draft_token_ids is not None:
            ids = _matrix(draft_token_ids, np.dtype(np.uint32), "draft_token_ids")
        if draft_probabilities is not None:
            probabilities = _matrix(draft_probabilities, np.dtype(np.float32), "draft_probabilities")
        if ids.shape != probabilities.shape:
            raise InvalidRequest(
                f"draft_token_ids {[*ids.shape]} and draft_probabilities {[*probabilities.shape]} are not of one shape",
                field="output.accept.draft_probabilities",
            )
        put = object.__setattr__  # it is frozen
        put(self, "sampling", sampling)
        put(self, "candidates", ids.shape[1] if ids.size else 0)
        put(self, "token_ids", ids.tobytes())
        put(self, "probabilities", probabilities.tobytes())

    @property
    def draft_token_ids(self) -> npt.NDArray[np.uint32]:
        """The candidates, uint32 [N, k], where there are any."""
        return np.frombuffer(self.token_ids, np.uint32).reshape(-1, self.candidates)

    @property
    def draft_probabilities(self) -> npt.NDArray[np.float32]:
        """Their probabilities, float32 [N, k], where there are any."""
        return np.frombuffer(self.probabilities, np.float32).reshape(-1, self.candidates)

    @property
    def choice(self) -> Greedy | Sample:
        """How the token of each row is chosen."""
        return _GREEDY if self.sampling is None else self.sampling


def _matrix(values: npt.ArrayLike, dtype: np.dtype[Any], name: str) -> npt.NDArray[Any]:
    """Numbers [N, k] as ``dtype`` that holds them. Raises `InvalidRequest`."""
    try:
        given = np.asarray(values)
    except ValueError:
        given = np.zeros(0)
    if given.ndim != 2 or not given.size or given.dtype.kind not in ("iu" if dtype.kind == "u" else "iuf"):
        message = f"{name}: {'integers' if dtype.kind == 'u' else 'numbers'} [N, k] are wanted, not {[*given.shape]}"
        raise InvalidRequest(message, field=f"output.accept.{name}")
    if dtype.kind == "u" and not 0 <= given.min() <= given.max() < 1 << 32:
        raise InvalidRequest(f"{name}: a token id is not of 32 bits", field=f"output.accept.{name}")
    return given.astype(dtype, copy=False)


_GREEDY: Final = Greedy()

OutputKind = Greedy | Sample | TopTokens | SelectedTokens | FullLogits | HiddenStates | NextToken | Accept


@dataclass(frozen=True, slots=True)
class OutputSpec:
    """What a span returns: which of its positions, and what of each. ``words``: those of a mask that is not registered
    and came with the item. The service floor registers it and hands on the rest: they are no part of what is asked."""

    positions: Positions = Positions.LAST
    kind: OutputKind = field(default_factory=Greedy)
    words: bytes = field(default=b"", compare=False, repr=False)

    def row_count(self, tokens: int, start: int) -> int:
        """Rows that a span of ``tokens`` tokens from position ``start`` of its sequence on yields."""
        if self.positions is Positions.ALL:
            return self.kind.row_count(tokens, start) if isinstance(self.kind, NextToken) else tokens
        return 1 if self.positions is Positions.LAST else 0

    @property
    def masked(self) -> Sample | None:
        """How its tokens are drawn, where masks are named."""
        sample = self.kind.sampling if isinstance(self.kind, Accept) else self.kind
        return sample if isinstance(sample, Sample) and (sample.mask or sample.row_masks) else None

    def row_bytes(self, vocab_size: int, hidden_size: int) -> int:
        """Bytes of one row on the wire."""
        kind = self.kind
        match kind.choice if isinstance(kind, Accept) else kind:
            case Greedy(logprob, beside) | Sample(logprob=logprob, logprobs=beside):
                return (8 if logprob else 4) + _bytes_beside(beside)
            case NextToken(logprobs=beside):
                return 8 + _bytes_beside(beside)
            case TopTokens(k):
                return 8 * k + 4
            case SelectedTokens(token_ids):
                return 4 * len(token_ids) + 4
            case FullLogits(dtype):
                return dtype.itemsize * vocab_size
            case HiddenStates(dtype):
                return dtype.itemsize * hidden_size


def _bytes_beside(logprobs: RowLogprobs | None) -> int:
    return 0 if logprobs is None else 8 * logprobs.top_k + 4 * len(logprobs.token_ids)


# --- the primitive --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Run:
    """Feed each chosen token to the next step, until ``max_tokens`` are chosen or one of ``stop_token_ids`` is.
    ``at_context``: no more fit into the model's context."""

    max_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    at_context: bool = False


class RunEnd(enum.Enum):
    """Why a run ended; the contract's names."""

    MAX_TOKENS = "max_tokens"
    STOP_ID = "stop_id"
    CONTEXT = "context"
    CUT = "cut"


class RunEnded(NamedTuple):
    """The end of a run, and what cut it."""

    end: RunEnd
    cause: ExecutorError | None = None


class PrefixUse(NamedTuple):
    """How a sequence uses the prefix cache: it finds blocks of sequences with the same ``salt`` and ``adapter``, and
    ``publishes`` its own for them. ``fingerprint``: of the model with the adapter, where there is one."""

    salt: bytes = b""
    publishes: bool = True
    adapter: str = ""
    fingerprint: bytes = b""


PREFIX: Final = PrefixUse()
"""Without a salt."""


class Span(NamedTuple):
    """``tokens`` of one sequence, to be written at positions ``start ..`` and attended causally.

    ``start`` is the sequence's length, or less: then the sequence is first rolled back to ``start`` in the same
    transaction. ``create`` marks a sequence that does not exist yet (``start`` is 0); ``reserve_tokens`` are tokens
    beyond the span for which blocks are held as well, or the span is refused. ``run``: the steps that follow by
    themselves, for which blocks are held too. ``parent``: a sequence of whose first ``start`` tokens the new one is
    made, as they were before the step. ``prefix``: how a new sequence uses the prefix cache; None: not at all.
    ``adapter``: the number of the adapter that the sequence is computed with; 0: none.
    """

    sequence: int
    tokens: TokenArray
    start: int
    output: OutputSpec
    create: bool = False
    reserve_tokens: int = 0
    run: Run | None = None
    parent: int | None = None
    prefix: PrefixUse | None = None
    adapter: int = 0

    @property
    def end(self) -> int:
        """The sequence's length once the span is committed."""
        return self.start + len(self.tokens)

    @property
    def prompt(self) -> TokenArray | None:
        """The tokens from the first on of which no row is needed, so that they need not be computed; None: there are
        none. A row of scores needs the one before it."""
        rows = self.row_count + isinstance(self.output.kind, NextToken)
        count = len(self.tokens) - max(1, rows)
        return self.tokens[:count] if count > 0 else None

    @property
    def row_count(self) -> int:
        """Rows that the span yields."""
        return self.output.row_count(len(self.tokens), self.start)


class Step(NamedTuple):
    """Spans that run in one forward pass, at most one per sequence.

    ``atomic`` lists index ranges of ``spans`` that succeed or fail together (the wire's ``all_or_nothing``). A span
    outside of them fails by itself.
    """

    spans: tuple[Span, ...]
    atomic: tuple[range, ...] = ()


# --- what a scheduler asks for --------------------------------------------------------------------------------------


class HandleRef(NamedTuple):
    """The wire's KvHandle: opaque bytes, the length and the version of a sequence. Printed without the bytes: with them
    a caller may use the sequence, where callers do not authenticate."""

    id: bytes
    seq_len: int
    version: int

    def __repr__(self) -> str:
        return f"HandleRef(seq_len={self.seq_len}, version={self.version})"


@dataclass(frozen=True, slots=True)
class CreateOptions:
    """What holds for a new sequence. ``reserve_tokens``: blocks to hold beyond the prompt. ``prefix``: how it uses the
    prefix cache; None: not at all. ``lease_id``: the lease that it ends with; none: it ends when it is unused for long.
    ``fork``: it is made of the sequence of the item's handle, whose lease it has where none is named, whose adapter it
    has, and uses the prefix cache as that does. ``adapter``: the name of its adapter; empty: none."""

    reserve_tokens: int = 0
    prefix: PrefixUse | None = PREFIX
    lease_id: str = ""
    fork: bool = False
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class Follow:
    """Wait for the item in flight. ``feed_chosen``: feed the token that it chose last. ``creation``: the request id of
    the creation that makes the sequence."""

    feed_chosen: bool = False
    creation: str = ""


class WorkItem(NamedTuple):
    """The one work item behind every forward call, checked for form but not yet against any state.

    ``handle`` None asks for a new sequence. ``truncate_to`` rolls back first, in the same transaction. ``follow``: the
    handle is the one that an item in flight will leave; without an id it is that of a creation.
    """

    item_id: int
    handle: HandleRef | None
    tokens: TokenArray
    truncate_to: int | None
    output: OutputSpec
    request_id: str
    create: CreateOptions
    run: Run | None = None
    follow: Follow | None = None

    @property
    def start(self) -> int:
        """Where its tokens stand in the sequence, if its handle is not stale."""
        if self.truncate_to is not None:
            return self.truncate_to
        return 0 if self.handle is None else self.handle.seq_len


@dataclass(frozen=True, slots=True)
class Caller:
    """Who makes a call. Where callers do not authenticate, all are `ANYBODY`: one name, allowed everything.

    Handles, leases and request ids belong to the name; another name's read as unknown. ``operator``: may use
    ExecutorControl. ``shares``: others may call beside it, so it has a share of each table and not all of it.
    """

    name: str = ""
    operator: bool = True
    shares: bool = False


ANYBODY: Final = Caller()


# --- what comes back ------------------------------------------------------------------------------------------------


class RowKind(enum.Enum):
    """What a block of rows holds. ``field``: the contract's name of the kind. ``columns``: the contract's names of its
    tensors; the first ``required`` of them are always there, each of the others where it was asked for."""

    TOKENS = ("tokens", ("token_ids", "logprobs", "top_token_ids", "top_logprobs", "selected_logprobs"), 1)
    """Chosen or scored tokens: ``token_ids`` uint32 [R]; ``logprobs`` float32 [R] of them; ``top_token_ids`` uint32
    [R, k] and ``top_logprobs`` float32 [R, k] of the k best; ``selected_logprobs`` float32 [R, n] of n ids."""
    TOP_TOKENS = ("top_tokens", ("token_ids", "logits", "logsumexp"), 3)
    """``token_ids`` uint32 [R, k], ``logits`` float32 [R, k], ``logsumexp`` float32 [R]."""
    SELECTED_TOKENS = ("selected_tokens", ("logits", "logsumexp"), 2)
    """``logits`` float32 [R, n] of the n ids that were asked for, ``logsumexp`` float32 [R]."""
    LOGITS = ("logits", ("logits",), 1)
    """``logits`` [R, V]: float32, float16, or bfloat16 as raw uint16 (numpy has no bfloat16)."""

    HIDDEN_STATES = ("hidden_states", ("hidden_states",), 1)
    """``hidden_states`` [R, hidden size], of the types of ``logits``."""

    def __init__(self, field: str, columns: tuple[str, ...], required: int) -> None:
        self.field = field
        self.columns = columns
        self.required = required


@dataclass(frozen=True, slots=True, eq=False)
class RowBlock:
    """Rows of one kind from one step, packed: spans that asked for the same kind share the block. ``columns``:
    C-ordered arrays of R rows each, by name, in the order of the kind; those that are optional may be missing."""

    kind: RowKind
    columns: dict[str, npt.NDArray[Any]]

    @classmethod
    def of(cls, kind: RowKind, *arrays: npt.NDArray[Any]) -> RowBlock:
        """A block of the kind's first columns, in their order."""
        return cls(kind, dict(zip(kind.columns, arrays, strict=False)))

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        return self.columns[name]

    @property
    def rows(self) -> int:
        """R."""
        return len(self.columns[self.kind.columns[0]])

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return sum([column.nbytes for column in self.columns.values()])

    def bytes_of(self, count: int) -> int:
        """Bytes of so many of its rows."""
        return self.nbytes // self.rows * count

    def between(self, first: int, last: int) -> RowBlock:
        """A view of the rows ``first .. last``."""
        return RowBlock(self.kind, {name: column[first:last] for name, column in self.columns.items()})

    def cut(self, first: int, last: int) -> RowBlock:
        """A copy of the rows ``first .. last``."""
        return RowBlock(self.kind, {name: column[first:last].copy() for name, column in self.columns.items()})


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """The rows ``first .. first + count`` of a block: the answer to one span."""

    block: RowBlock
    first: int
    count: int

    @property
    def nbytes(self) -> int:
        """Bytes of these rows."""
        return self.block.bytes_of(self.count)

    def detached(self) -> Rows:
        """A copy of these rows, in a block of their own."""
        return Rows(self.block.cut(self.first, self.first + self.count), 0, self.count)


class StepTiming(NamedTuple):
    """How one step went, for one of its submissions. Times in seconds on the executor's monotonic clock."""

    step: int
    sequences: int
    tokens: int
    queue_s: float
    forward_s: float


class SpanResult(NamedTuple):
    """A committed span: the sequence's new length and the rows that were asked for; of a run those of all its steps.
    ``cached_tokens`` were found in the prefix cache."""

    length: int
    rows: Rows | None
    ended: RunEnded | None = None
    cached_tokens: int = 0


class ItemAnswer(NamedTuple):
    """A committed work item: the sequence's handle after it, and its rows (None: none asked for, or replayed without
    its payload)."""

    handle: HandleRef
    rows: Rows | None
    replayed: bool = False
    cached_tokens: int = 0
    ended: RunEnded | None = None


ItemOutcome = ItemAnswer | ExecutorError
"""Per work item: an answer, or why it was refused (its sequence is unchanged)."""

SpanOutcome = SpanResult | ExecutorError
"""Per span: a result, or why this span did not run (its sequence is as before)."""


class StepResult(NamedTuple):
    """``outcomes[i]`` answers ``spans[i]``. ``blocks_copied`` counts copies on write, ``tokens_searched`` the tokens
    that were looked for in the prefix cache."""

    outcomes: tuple[SpanOutcome, ...]
    forward_s: float
    blocks_copied: int = 0
    tokens_searched: int = 0


# --- facts about an executor ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The attention of one layer: head counts, ``head_dim``, softmax scale, sliding window (tokens that a query sees,
    itself included; None is all), logit soft cap (None is none), and whether every head has a sink: a logit that the
    softmax counts like a score, without a value to it."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a scheduler must know of the loaded model. ``kv_bytes_per_token`` counts K and V of all layers, and is known
    once there is a cache. ``folder``: where it lies on the executor's machine; empty: it is built in. ``fingerprint``:
    32 bytes; models with the same one compute the same K and V."""

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
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    folder: str = ""
    fingerprint: bytes = b""


NO_KERNELS: Final = "kernels=none"
"""The choice of a CPU's engine whose C library is missing or cannot be loaded."""


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """Where the model runs and which backends were chosen, each with its reason (``choices``: what -> why).
    ``exact_span_tokens``: spans up to so many tokens give the very bits of single decodes, whatever the neighbours; 0:
    nothing is promised."""

    kind: str
    name: str
    memory_bytes: int
    threads: int
    attention_backend: str
    choices: tuple[tuple[str, str], ...] = ()
    exact_span_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Limits:
    """What one call, and all calls together, may ask for. Reported by GetInfo, enforced by the service floor.
    ``caller_share``: the part of a table that one of several callers may hold; a limit per caller that is not 0 stands
    in its place. ``max_adapters`` 0: none are offered; that and what is of parking is not told by GetInfo.
    ``exact_span_tokens`` is no setting: the engine knows it (`DeviceInfo`), GetInfo reports it here."""

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
    max_steps_in_flight: int = 8
    session_inline_bytes: int = 1 << 20
    max_session_response_bytes: int = 256 << 20
    max_unread_bytes: int = 512 << 20
    lease_ttl_s: float = 30.0
    min_lease_ttl_s: float = 1.0
    max_lease_ttl_s: float = 3600.0
    idle_ttl_s: float = 600.0
    max_leases: int = 1024
    max_sessions: int = 4096
    max_token_masks: int = 2048
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
    exact_span_tokens: int = 0

    @property
    def max_selected_tokens_of_a_call(self) -> int:
        """Ids of all `SelectedTokens` and `RowLogprobs` of a call together; each takes the event loop 30 ns."""
        return 16 * self.max_selected_tokens


class CacheState(NamedTuple):
    """A snapshot of the block pool. Of the free blocks ``cached_blocks`` are published in the prefix cache. So far
    ``blocks_evicted`` left it for want of room, after ``evicted_s`` seconds there in all; ``tier_bytes`` of them are in
    the second tier."""

    block_size: int
    total_blocks: int
    free_blocks: int
    sequences: int
    cached_blocks: int = 0
    blocks_evicted: int = 0
    evicted_s: float = 0.0
    tier_bytes: int = 0


class BlockChange(NamedTuple):
    """A block was published in the prefix cache under ``hash``, behind the block ``parent`` (b"": it is the first of
    its chain), as computed with ``adapter``; or, without a parent, its hash is there no more, or in the second tier
    alone (``parked``). An empty hash: none is."""

    hash: bytes
    parent: bytes | None
    parked: bool = False
    adapter: str = ""


class AdapterFacts(NamedTuple):
    """An adapter as its files say: its largest rank, what it takes of the device's memory, and in how many pieces it is
    read."""

    rank: int
    nbytes: int
    pieces: int


class Pressure(NamedTuple):
    """The wire's KvPressure: the block pool, the queue in front of it, and the runs under way."""

    free_blocks: int
    total_blocks: int
    block_size: int
    queued_items: int
    queued_tokens: int
    sequences: int
    running_items: int = 0
