"""The requested output of a span: which positions yield rows, and the content of each row."""

from __future__ import annotations

import copy
import enum
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from ferrum_rpc.core.rows import RowKind
from ferrum_rpc.errors import InvalidRequest


class Positions(enum.Enum):
    """Which positions of a span yield a row."""

    NONE = "none"
    LAST = "last"
    ALL = "all"


_NONE, _LAST = Positions.NONE, Positions.LAST  # a member costs 0.1 µs to look up, and every item asks for it


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
    """Additional log-probabilities of a row, as the model computed it (f32): of its ``top_k`` best tokens, in the order
    of `TopTokens`, and of ``token_ids``, in their order."""

    top_k: int = 0
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Greedy:
    """The argmax token of a row; ties go to the lowest id. With ``logprob`` also its log-probability (f32), with
    ``logprobs`` those of other tokens. ``mask``, ``row_masks``, ``grammar``, ``grammar_from``: as in `Sample`; on the
    executor's side such an output is a `Sample` at temperature 0."""

    field: ClassVar[str] = "greedy"
    rows: ClassVar[RowKind] = RowKind.TOKENS
    logprob: bool = False
    logprobs: RowLogprobs | None = None
    mask: bytes = b""
    row_masks: tuple[bytes, ...] = ()
    grammar: bytes = b""
    grammar_from: int = 0

    @property
    def listed(self) -> bool:
        """Whether it contains lists, which may be long."""
        return self.row_masks != () or (self.logprobs is not None and self.logprobs.token_ids != ())


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
    in the order of their positions; empty: none for that row. ``grammar``, in place of masks: the id of a registered
    grammar, whose text is the sequence's tokens from the position ``grammar_from`` on."""

    field: ClassVar[str] = "sample"
    rows: ClassVar[RowKind] = RowKind.TOKENS
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
    grammar: bytes = b""
    grammar_from: int = 0

    @property
    def listed(self) -> bool:
        """As `Greedy.listed`."""
        logprobs = self.logprobs
        return self.bias != () or self.row_masks != () or (logprobs is not None and logprobs.token_ids != ())

    @property
    def masks(self) -> tuple[bytes, ...]:
        """The masks that it names; empty entries are rows without one."""
        return (self.mask,) if self.mask else self.row_masks

    @property
    def penalised(self) -> bool:
        """Whether the result depends on the sequence's tokens."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


@dataclass(frozen=True, slots=True)
class TopTokens:
    """The ``k`` largest logits with their ids, by descending logit and ascending id, and the row's logsumexp."""

    field: ClassVar[str] = "top_tokens"
    rows: ClassVar[RowKind] = RowKind.TOP_TOKENS
    listed: ClassVar[bool] = False
    k: int


@dataclass(frozen=True, slots=True)
class SelectedTokens:
    """The logits of the given ids, in the given order, and the row's logsumexp."""

    field: ClassVar[str] = "selected_tokens"
    rows: ClassVar[RowKind] = RowKind.SELECTED_TOKENS
    listed: ClassVar[bool] = True
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FullLogits:
    """The whole row of V logits."""

    field: ClassVar[str] = "full_logits"
    rows: ClassVar[RowKind] = RowKind.LOGITS
    listed: ClassVar[bool] = False
    dtype: RowDType = RowDType.F32


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """The input of the output head: the row after the final norm."""

    field: ClassVar[str] = "hidden_states"
    rows: ClassVar[RowKind] = RowKind.HIDDEN_STATES
    listed: ClassVar[bool] = False
    dtype: RowDType = RowDType.F32


@dataclass(frozen=True, slots=True)
class NextToken:
    """Scores of a span's own tokens: the row of token i has token i + 1 and its log-probability (f32), that of the last
    one ``following_token``; None: it has no row, nor has a token that stands before ``first_position`` of the sequence.
    ``logprobs``: those of other tokens. Its positions are `Positions.ALL`."""

    field: ClassVar[str] = "next_token"
    rows: ClassVar[RowKind] = RowKind.TOKENS
    first_position: int = 0
    following_token: int | None = None
    logprobs: RowLogprobs | None = None

    @property
    def listed(self) -> bool:
        """As `Greedy.listed`."""
        return self.logprobs is not None and self.logprobs.token_ids != ()

    def row_count(self, tokens: int, start: int) -> int:
        """As `OutputSpec.row_count`."""
        return max(0, tokens - (self.following_token is None) - max(0, self.first_position - start))


@dataclass(frozen=True, slots=True, init=False)
class Accept:
    """Of [last, d0 … dN-1] the longest prefix of the draft that holds, and the token after it; the cache keeps ``last``
    and what was accepted. ``sampling``: how the tokens are chosen; None: greedily. They have the distribution of
    ``sampling`` alone, however bad the draft is, if the draft is as described: each of its tokens was sampled from k
    candidates by their probabilities, whose sum is 1, or, if k is 0, is a guess.

    Made of ``draft_token_ids`` uint32 [N, k] and ``draft_probabilities`` float32 [N, k], array-likes both; kept as
    bytes, so that outputs can be compared and hashed. Raises `InvalidRequest` for arrays that do not agree."""

    field: ClassVar[str] = "accept"
    rows: ClassVar[RowKind] = RowKind.TOKENS
    listed: ClassVar[bool] = True
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
                f"draft_token_ids {[*ids.shape]} and draft_probabilities {[*probabilities.shape]} must have one shape",
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

    def choosing(self, sampling: Sample) -> Accept:
        """The same draft, whose tokens are chosen by ``sampling``."""
        made = copy.copy(self)
        object.__setattr__(made, "sampling", sampling)
        return made

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
        message = f"{name}: must be {'integers' if dtype.kind == 'u' else 'numbers'} [N, k], not {[*given.shape]}"
        raise InvalidRequest(message, field=f"output.accept.{name}")
    if dtype.kind == "u" and not 0 <= given.min() <= given.max() < 1 << 32:
        raise InvalidRequest(f"{name}: token ids must have 32 bits", field=f"output.accept.{name}")
    return given.astype(dtype, copy=False)


_GREEDY: Final = Greedy()

OutputKind = Greedy | Sample | TopTokens | SelectedTokens | FullLogits | Accept | HiddenStates | NextToken
"""In the order of their fields in the contract. Every kind has ``field``, the contract's name of it, ``rows``, the kind
of rows that answer it, and ``listed``."""


@dataclass(frozen=True, slots=True)
class OutputSpec:
    """The output of a span: which positions yield rows, and what of each. ``words``: those of a mask that came with the
    item and is not registered yet. The service floor registers it and passes on the rest: the words are not part of the
    request's content."""

    positions: Positions = Positions.LAST
    kind: OutputKind = field(default_factory=Greedy)
    words: bytes = field(default=b"", compare=False, repr=False)

    def row_count(self, tokens: int, start: int) -> int:
        """Rows that a span of ``tokens`` tokens from position ``start`` of its sequence on yields."""
        if self.positions is _LAST:
            return 1
        if self.positions is _NONE:
            return 0
        return self.kind.row_count(tokens, start) if isinstance(self.kind, NextToken) else tokens

    @property
    def masked(self) -> Sample | None:
        """The sampling parameters, if they name masks."""
        sample = self.kind.sampling if isinstance(self.kind, Accept) else self.kind
        return sample if isinstance(sample, Sample) and (sample.mask or sample.row_masks) else None

    @property
    def constrained(self) -> Greedy | Sample | None:
        """How tokens are chosen, if they are constrained by a grammar."""
        kind = self.kind.sampling if isinstance(self.kind, Accept) else self.kind
        return kind if isinstance(kind, Greedy | Sample) and kind.grammar else None

    def row_bytes(self, vocab_size: int, hidden_size: int) -> int:
        """Bytes of one row on the wire."""
        kind = self.kind
        match kind.choice if isinstance(kind, Accept) else kind:
            case Greedy(logprob, logprobs) | Sample(logprob=logprob, logprobs=logprobs):
                return (8 if logprob else 4) + _logprobs_bytes(logprobs)
            case NextToken(logprobs=logprobs):
                return 8 + _logprobs_bytes(logprobs)
            case TopTokens(k):
                return 8 * k + 4
            case SelectedTokens(token_ids):
                return 4 * len(token_ids) + 4
            case FullLogits(dtype):
                return dtype.itemsize * vocab_size
            case HiddenStates(dtype):
                return dtype.itemsize * hidden_size


def _logprobs_bytes(logprobs: RowLogprobs | None) -> int:
    return 0 if logprobs is None else 8 * logprobs.top_k + 4 * len(logprobs.token_ids)
