"""The device's part of a step: planned integers in, packed rows out.

The runner handles sequences and failures; this file the model, the cache's tensors and the attention backend, without
reservations. Only the model thread may call it.

The model calls back to store and attend, layer by layer. If it and the backend are both our C code, the backend
provides attention as C instead, and all layers run without Python between them.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from ferrum_rpc.attention.backend import AttentionBackend, NativeAttention
from ferrum_rpc.attention.geometry import BatchGeometry, Int64Array
from ferrum_rpc.attention.latent import LatentPagedAttention, Lifts
from ferrum_rpc.attention.recurrent_steps import RecurrentStep
from ferrum_rpc.core import (
    Accept,
    Greedy,
    MaskRows,
    NextToken,
    RankState,
    Rows,
    Sample,
    Span,
    TokenArray,
    TokenCounts,
    named,
)
from ferrum_rpc.device import check_device
from ferrum_rpc.engine.memory import used_memory
from ferrum_rpc.models.base import (
    ONE_CALL_TOKENS,
    Attend,
    LatentAttend,
    Model,
    NativeModel,
    RecurrentModel,
    StepAdapters,
    StepInputs,
)
from ferrum_rpc.models.lora import Loras
from ferrum_rpc.sampling.accept import Draft
from ferrum_rpc.sampling.masks import Masks
from ferrum_rpc.sampling.penalties import CountedTokens
from ferrum_rpc.sampling.rows import Chosen, RowRequest, select_rows
from ferrum_rpc.sampling.transfer import Marker
from ferrum_rpc.sampling.vocab_parallel import VocabShard, select_sampler

AdaptedRows = tuple[int, int, int]
"""The number of an adapter, the first of its rows in a step, and how many there are."""


WordsOf = Callable[[Span, int], MaskRows | None]
"""`Constraints.words`."""


CountsOf = Callable[[int, int, int, TokenArray], TokenCounts]
"""`KvManager.counts`."""


class TokensBehind(NamedTuple):
    """Tokens of a step that are on the device only, because the step before it has ``chosen`` them: int64 [R] in parts.
    The first spans of the step have one token each, which is that of a row of all parts: ``rows``, int64 [n]."""

    chosen: Sequence[Tensor]
    rows: Int64Array

    def take(self, token_ids: Tensor) -> None:
        """Put them into the ``token_ids`` of a step on the device, int64 [T], where the rows are in their place."""
        own = token_ids[: len(self.rows)]
        chosen = self.chosen[0] if len(self.chosen) == 1 else torch.cat([*self.chosen])
        own.copy_(chosen.index_select(0, own))


class Compute:
    """Forward passes of ``model``, whose weights are loaded, over what ``attention`` reads and writes. ``loras``: the
    adapters that spans may name; ``part``: the tokens whose logits the model has, where ranks share its head."""

    look_every_s: float | None = None
    """How often to `check_alive` while there is no work; None: what computes is this process alone."""

    in_stages = False
    """Whether it has some of the layers, and other ranks the rest."""

    masks_first = False
    """Whether the masks of grammars must be there before a step begins: they are sent with it."""

    words_of: WordsOf = staticmethod(lambda span, rows: None)
    """The masks of a span's rows by its grammar."""

    late = False
    """Whether nothing here waits for the device: what is returned is on its way then, and there at the next `mark`."""

    follows = False
    """Whether a step may begin with tokens of the step before it that are on the device only (`TokensBehind`)."""

    def __init__(
        self, model: Model, attention: AttentionBackend, loras: Loras | None = None, part: VocabShard | None = None
    ) -> None:
        self.loras = loras
        self.part = part
        self.model = model
        self.attention = attention
        self.sampler = select_sampler(model.device, part)
        self.chosen: Chosen = []
        """What the last `select` chose, as it is on the device; only if it ``follows``."""
        self._whole_rows = part is None
        self.masks = Masks(model.device)
        self._on_host = model.device.type == "cpu"
        self._done = Marker(torch.device("cpu"))
        self._native: tuple[NativeModel, NativeAttention] | None = None
        if model.native and isinstance(attention, NativeAttention):
            self._native = cast(NativeModel, model), attention

    @property
    def exact_span_tokens(self) -> int:
        """Spans of up to so many tokens have the same bits as single ones, whatever the rest of the step; 0: no
        guarantee."""
        return self.attention.exact_span_tokens if self.model.rowwise else 0

    def forward(
        self,
        spans: Sequence[Span],
        geometry: BatchGeometry,
        behind: TokensBehind | None = None,
        states: RecurrentStep | None = None,
    ) -> Tensor:
        """Write K and V of the spans' tokens; hidden rows [T, hidden]. ``behind``: the tokens of the first spans; those
        that they have stand for nothing then. ``states``: those of the spans, which a `RecurrentModel` advances."""
        packed = packed_tokens(spans)
        if behind is not None:
            packed[: len(behind.rows)] = behind.rows
        adapters = self.adapters_at(self.adapted_rows(spans), len(packed)) if self.loras else None
        return self.run(packed, geometry, adapters, behind, states)

    def _in_c(self, plan: Any, adapters: StepAdapters | None) -> Callable[..., Tensor] | None:
        """The model's forward pass without ``attend``, if it can be one call."""
        if self._native is None or (adapters is not None and adapters.address is None):
            return None
        model, attention = self._native
        step = attention.native_step(plan)
        return None if step is None else lambda inputs, recur=None: model.forward(inputs, step, recur)

    def run(
        self,
        packed: Int64Array,
        geometry: BatchGeometry,
        adapters: StepAdapters | None = None,
        behind: TokensBehind | None = None,
        states: RecurrentStep | None = None,
    ) -> Tensor:
        """As `forward`, of ``packed`` token ids [T], the first of which are the rows of those ``behind``."""
        plan = self.attention.plan(geometry)
        inputs = self.to_device(packed, geometry.positions, geometry.slots)
        if behind is not None:
            behind.take(inputs[0])
        if states is not None:
            tokens, positions, slots = inputs
            step = StepInputs(tokens, positions, adapters)
            if states.native and len(packed) <= ONE_CALL_TOKENS and (in_c := self._in_c(plan, adapters)) is not None:
                return in_c(step, states)
            return cast(RecurrentModel, self.model).forward(step, self._attend(slots, plan), states.recur)
        if (in_c := self._in_c(plan, adapters)) is not None:
            return in_c(StepInputs(inputs[0], inputs[1], adapters))
        return self.run_layers(inputs, plan, adapters)

    def run_layers(self, inputs: Sequence[Tensor], plan: Any, adapters: StepAdapters | None = None) -> Tensor:
        """Hidden rows of a step whose ``inputs`` (token ids, positions, slots) and ``plan`` are on the device."""
        tokens, positions, slots = inputs
        return self.model.forward(StepInputs(tokens, positions, adapters), self._attend(slots, plan))

    def _attend(self, slots: Tensor, plan: Any) -> Attend:
        attention = self.attention

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            attention.write(layer, slots, key, value)
            return attention.attend(layer, query, plan)

        if not isinstance(attention, LatentPagedAttention):
            return attend
        over_latents = attention

        def latent(layer: int, query: Tensor, row: Tensor, lifts: Lifts) -> Tensor:
            over_latents.write(layer, slots, row, row)
            return over_latents.attend_latent(layer, query, lifts, plan)

        return LatentAttend(latent, attend)

    def adapters_at(self, adapted: Sequence[AdaptedRows], tokens: int) -> StepAdapters | None:
        """Of a step of so many tokens."""
        return self.loras.step(adapted, tokens) if adapted and self.loras is not None else None

    def adapted_rows(self, spans: Sequence[Span]) -> list[AdaptedRows]:
        """Which rows of a step have an adapter; rows of one that stand next to each other together."""
        if not self.loras:
            return []
        adapted, first = list[AdaptedRows](), 0
        for span in spans:
            count = len(span.tokens)
            if span.adapter and adapted and adapted[-1][0] == span.adapter and sum(adapted[-1][1:]) == first:
                adapted[-1] = (span.adapter, adapted[-1][1], adapted[-1][2] + count)
            elif span.adapter:
                adapted.append((span.adapter, first, count))
            first += count
        return adapted

    def select(self, spans: Sequence[Span], hidden: Tensor, counts_of: CountsOf) -> tuple[list[Rows | None], list[int]]:
        """The requested rows of each span, from its ``hidden`` rows, on the host; None for a span without rows. They
        are complete once a later `mark` is passed. Also returns which spans are drafts, whose rows still are those of
        all their tokens: `sampling.accept.accepted`."""
        requests, wanted, drafts = self.requests(spans, counts_of)
        rows: list[Rows | None] = [None] * len(spans)
        if requests:
            for index, answer in zip(wanted, self.rows(hidden, requests), strict=True):
                rows[index] = answer
        return rows, drafts

    def requests(self, spans: Sequence[Span], counts_of: CountsOf) -> tuple[list[RowRequest], list[int], list[int]]:
        """The requested rows of a step, the spans that request them, and which of them are drafts; see `select`."""
        requests, wanted, drafts, end = [], [], [], 0
        for index, span in enumerate(spans):
            tokens, start, output = len(span.tokens), span.start, span.output
            end += tokens
            count = output.row_count(tokens, start)
            if count:
                wanted.append(index)
                kind, first, counted, scored, draft = output.kind, end - count, None, None, None
                match kind:
                    case Greedy():  # most of them
                        pass
                    case Accept():
                        drafts.append(index)
                        draft = Draft.of(kind, span.tokens)
                        kind = kind.choice
                        if isinstance(kind, Sample) and kind.penalised:
                            counted = _counted(span, count, kind.penalty_from, counts_of)
                    case Sample() if kind.penalised:
                        counted = _counted(span, count, kind.penalty_from, counts_of)
                    case NextToken(following_token=int(following)):
                        scored = np.append(span.tokens[1:], following)[-count:]
                    case NextToken():
                        scored, first = span.tokens[-count:], first - 1
                words = self.words_of(span, count) if isinstance(kind, Sample) and kind.grammar else None
                position = start + tokens - count + 1
                requests.append(named(RowRequest, (first, count, kind, position, counted, scored, draft, words)))
        return requests, wanted, drafts

    def rows(self, hidden: Tensor, requests: Sequence[RowRequest]) -> list[Rows]:
        """The requested rows of ``hidden`` rows, in the order of the requests."""
        argmax, chosen = self.model.argmax if self._whole_rows else None, None
        if self.follows:
            chosen = self.chosen = []
        return select_rows(
            hidden, requests, self.model.logits, argmax, self.sampler.made, masks=self.masks, chosen=chosen
        )

    def change_masks(self, added: Sequence[tuple[bytes, bytes]], dropped: Sequence[bytes]) -> None:
        """See `Masks.change`."""
        self.masks.change(added, dropped)

    def forget_graphs(self) -> None:
        """Drop all recorded graphs."""

    def recover(self) -> None:
        """End the rest of a failed step, before the cache is restored. Raises `DeviceLost` or `torch.AcceleratorError`
        if the step failed because the device did, whatever error it raised."""
        check_device()

    def check_alive(self) -> None:
        """Raise `DeviceLost` if a part of the compute is lost. Called while there is no work."""

    def ranks(self) -> list[RankState]:
        """See `Runner.ranks`."""
        return [RankState(True, *used_memory(self.model.device))]

    def close(self) -> None:
        """Close it; no step may follow."""

    def mark(self) -> Marker:
        """The end of all work queued so far, including the caller's own operations on the device."""
        return self._done if self._on_host else Marker(self.model.device)

    def to_device(self, *arrays: Int64Array) -> list[Tensor]:
        """The same integers on the model's device."""
        tensors = list(map(torch.from_numpy, arrays))
        return tensors if self._on_host else [each.to(self.model.device) for each in tensors]


def clear_frames(error: BaseException) -> None:
    """Drop the local variables of all frames in which ``error``, or what it came from, was raised. They refer to the
    tensors and the graphs of the failed step: NCCL ends a group only when no graph is left that names it."""
    seen = set[int]()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        traceback.clear_frames(at.__traceback__)
        at = at.__cause__ or at.__context__


def packed_tokens(spans: Sequence[Span]) -> Int64Array:
    """The token ids of all spans, one after the other, int64 [T]."""
    packed = spans[0].tokens if len(spans) == 1 else np.concatenate([span.tokens for span in spans])
    return packed.astype(np.int64)


def _counted(span: Span, rows: int, counted_from: int, counts_of: CountsOf) -> CountedTokens:
    """The tokens before each of the last ``rows`` of a span."""
    fed = len(span.tokens) - rows + 1
    counts = counts_of(span.sequence, span.start, counted_from, span.tokens[:fed])
    return CountedTokens(counts, span.tokens[fed:])
