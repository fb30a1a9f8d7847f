"""A runner of a model with recurrent layers, the tokens that its sequences have, and what their rows must be."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from ferrum_rpc.attention.recurrent import RecurrentSlot
from ferrum_rpc.config import ModelSettings
from ferrum_rpc.core import (
    PREFIX,
    Accept,
    FullLogits,
    MovedStates,
    OutputSpec,
    Positions,
    PrefixUse,
    Span,
    StateLengths,
    StateRows,
    Step,
)
from ferrum_rpc.engine.assembly.build import build_runner
from ferrum_rpc.engine.assembly.size import LargestStep
from ferrum_rpc.errors import ExecutorError, KvBlocksExhausted
from ferrum_rpc.wire.state_stream import rows_of
from tests.support.checkpoints import RECURRENT_SHAPE as SHAPE
from tests.support.checkpoints import make_model
from tests.support.poison import poison
from tests.support.queued import as_on_a_gpu
from tests.support.ranks import World as Ranked
from tests.support.rows import columns_of

SIZE, EVERY, PIECE, PASS, SLOTS = 4, 24, 40, 100, 7
LAYERS = 2
"""That attend."""

PIECE_BYTES = 3000
"""States move in pieces of so much, which end within layers."""

LAST = OutputSpec(Positions.LAST, FullLogits())
ALL = OutputSpec(Positions.ALL, FullLogits())
VOCABULARY = 6
IMPORTED = PREFIX._replace(caller=bytes(16), imported_from=0)
"""As a caller's import that is not trusted."""

OF_A_LIAR = PREFIX._replace(caller=bytes([1] * 16))
"""As what a caller computes that imports forged content."""


FOUR: dict[str, Any] = {"vocab_size": 400, "num_attention_heads": 4, "num_key_value_heads": 2}
"""What four ranks can share."""

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5": SHAPE,
    "qwen3_next": SHAPE | {"num_experts_per_tok": 8},
    **{f"qwen3_5, {heads} key heads": SHAPE | FOUR | {"linear_num_key_heads": heads} for heads in (2, 4)},
}
"""By name, what is said of a model; the name begins with its family. All experts compute every row, for rounding may
send one to another expert."""

WINDOWS: dict[str, dict[str, Any]] = {"mistral": {"sliding_window": 10}}
"""The same, of models whose layers all have a window."""


@cache
def reference(family: str) -> Any:
    return make_model(family.partition(",")[0], **(FAMILIES | WINDOWS)[family])


@cache
def wanted(history: tuple[int, ...], family: str) -> np.ndarray:
    """Logits [len, vocab] of every row."""
    with torch.inference_mode():
        return reference(family)(torch.tensor([history])).logits[0].float().numpy()


def settings_of(folder: Any, **more: Any) -> ModelSettings:
    usual = {"dtype": "float32", "block_size": SIZE, "kv_blocks": 200, "device": "cpu"}
    return ModelSettings(str(folder), **usual | more)


class Sabotage(Exception):
    pass


class Taken(NamedTuple):
    """A sequence that left: ``pieces`` are those of its ``states``, ``parts`` its keys and values by layer."""

    tokens: np.ndarray
    states: MovedStates
    pieces: list[tuple[StateRows, Any]]
    parts: list[tuple[np.ndarray, ...]]
    lies: bool = False


class World:
    """A runner of ``family``, and the tokens that each sequence ``has``, but for ``lies``: sequences of forged
    content. Several ranks are threads; then `close` it."""

    refusals: tuple[type[ExecutorError], ...] = (KvBlocksExhausted,)

    def __init__(
        self,
        folder: Any,
        slots: int | None = SLOTS,
        dtype: str = "float32",
        blocks: int = 200,
        size: int = SIZE,
        *,
        family: str = "qwen3_5",
        queued: bool = False,
        largest: LargestStep | None = None,
        **more: Any,
    ) -> None:
        """``queued``: steps run as on a GPU, see `as_on_a_gpu`."""
        self.family = family
        config = settings_of(folder, dtype=dtype, block_size=size, kv_blocks=blocks, state_slots=slots, **more)
        self.fails_at: tuple[int, str, int] | None = None
        self.bound = 1e-4 if config.device == "cpu" else 1e-3  # a GPU's products of matrices are less exact
        self.ranked: Ranked | None = None
        if config.ranks > 1:
            stages = {rank: partial(self._stage, rank) for rank in range(config.ranks)}
            self.ranked = Ranked(config, stages[0], stages)
            self.runner = self.ranked.runner
            phases: list[Any] = [each.phase for each in self.ranked.followers] if slots is not None else []
            with torch.inference_mode():  # what is not copied there is noticed
                for buffer in (each for phase in phases for each in phase.slots.store.buffers):
                    buffer.fill_(math.nan)
        else:
            stage = partial(self._stage, 0)
            self.runner = build_runner(config, stage=stage, largest=largest)
            if queued:
                self.runner, self.capture = as_on_a_gpu(self.runner, stage)
        self.has: dict[int, tuple[int, ...]] = {}
        self.lies = set[int]()
        self.numbers = count(1)

    def _stage(self, rank: int, stage: str) -> None:
        if self.fails_at is not None and self.fails_at[:2] == (rank, stage):
            left = self.fails_at[2] - 1
            self.fails_at = (rank, stage, left) if left else None
            if not left:
                raise Sabotage

    def slots(self) -> list[RecurrentSlot]:
        """Those of all ranks, which have done all that they were sent."""
        stores = [self.runner.states.store]
        if self.ranked is not None:
            self.ranked.ranks.ask("halt")
            phases: list[Any] = [each.phase for each in self.ranked.followers]
            stores += [each.slots.store for each in phases]
        return [slot for store in stores for slot in store.slots]

    def close(self) -> None:
        """End its ranks."""
        if self.ranked is not None:
            self.ranked.close()

    def poison(self) -> None:
        """Fill what nobody owns with NaN."""
        if self.ranked is not None:
            self.ranked.poison()
        else:
            poison(self.runner)

    @contextmanager
    def failing(self, stage: str, nth: int, rank: int = 0) -> Iterator[None]:
        self.fails_at = rank, stage, nth
        try:
            yield
        finally:
            self.fails_at = None

    def span(
        self, sequence: int, tokens: Any, start: int | None = None, output: OutputSpec = LAST, **more: Any
    ) -> Span:
        start = len(self.has[sequence]) if start is None else start
        return Span(sequence, np.asarray(tokens, np.int32), start, output, **more)

    def made(self, tokens: Any, output: OutputSpec = LAST, prefix: Any = PREFIX) -> Span:
        return Span(next(self.numbers), np.asarray(tokens, np.int32), 0, output, create=True, prefix=prefix)

    def fork(self, parent: int, tokens: Any, at: int) -> Span:
        return Span(next(self.numbers), np.asarray(tokens, np.int32), at, LAST, create=True, parent=parent)

    def step(self, *spans: Span) -> list[Any]:
        """Rows are right, and what is refused is as it was."""
        with torch.inference_mode():
            outcomes = self.runner.forward(Step(spans)).outcomes
        before = dict(self.has)
        for span, outcome in zip(spans, outcomes, strict=True):
            if isinstance(outcome, ExecutorError):
                assert isinstance(outcome, self.refusals), outcome
                continue
            old = before[span.parent] if span.parent is not None else before.get(span.sequence, ())
            history = (*old[: span.start], *span.tokens.tolist())
            self.has[span.sequence] = history[: outcome.length]
            if outcome.rows is not None and not isinstance(span.output.kind, Accept):
                assert self.near(columns_of(outcome.rows)["logits"], history)
        self.check()
        return list(outcomes)

    def do(self, operation: str, *arguments: Any) -> Any:
        with torch.inference_mode():
            return getattr(self.runner, operation)(*arguments)

    def end(self) -> None:
        """As the end of the process: the second tier gets what the prefix cache has."""
        with self.runner.context():
            pass

    def truncate(self, sequence: int, length: int) -> None:
        self.do("truncate", sequence, length)
        self.has[sequence] = self.has[sequence][:length]

    def release(self, sequence: int) -> None:
        self.do("release", [sequence])
        del self.has[sequence]

    def near(self, found: np.ndarray, history: tuple[int, ...]) -> bool:
        """Whether rows are the last ones of such a sequence."""
        rows = wanted(history, self.family)[len(history) - len(found) :]
        return bool(np.abs(found - rows).max() <= self.bound * rows.std())

    def check(self) -> None:
        self.runner.check()
        for sequence, history in self.has.items():
            assert tuple(self.runner.kv.tokens(sequence).tolist()) == history

    def missing(self, sequence: int) -> int:
        return self.runner.feeding.missing(self.span(sequence, [0]))

    def taken(self, sequence: int) -> Taken:
        """What an export of a sequence has."""
        copy = next(self.numbers)
        self.do("begin_export", sequence, copy)
        tokens, states = self.do("token_ids", copy), self.do("state_lengths", copy)
        pieces = self.pieces(copy, states)
        parts = self.do("read_kv", copy, 0, len(tokens), range(LAYERS))
        self.do("release", [copy])
        return Taken(tokens, states, pieces, parts)

    def pieces(self, number: int, states: MovedStates) -> list[tuple[StateRows, Any]]:
        """All rows of states of these lengths that are held under ``number``."""
        rows = [each for each in rows_of(self.runner.info.states, states, PIECE_BYTES) if each.tensor != "lengths"]
        return [(each, self.do("read_states", number, [each])[0]) for each in rows]

    def bring(self, taken: Taken, prefix: PrefixUse | None) -> int:
        """Make a sequence of that. Raises `KvBlocksExhausted`; then nothing has changed."""
        sequence, tokens = next(self.numbers), taken.tokens
        first = self.do("begin_import", sequence, tokens, 0, 0, prefix)
        for layer, parts in enumerate(taken.parts) if first < len(tokens) else ():
            missing = [each[len(each) // len(tokens) * first :] for each in parts]
            self.do("write_kv", sequence, first, len(tokens), layer, missing)
        for piece in taken.pieces:
            self.do("write_states", sequence, taken.states, [piece])
        assert self.do("commit_import", sequence, taken.states) == len(tokens)
        if taken.lies:
            self.lies.add(sequence)
        else:
            self.has[sequence] = tuple(tokens.tolist())
        self.check()
        return sequence

    def forged(self, tokens: Any, at: int, *, journal: bool) -> Taken:
        """An export whose content is nowhere a number, with a checkpoint at a length of at most ``at`` tokens; with a
        ``journal`` for all tokens that it may have, or none."""
        info, tokens = self.runner.info, np.asarray(tokens, np.int32)
        made, width = info.states, info.kv_heads * info.head_dim
        shape, length = made.shape, len(tokens)

        def content(*extents: int, size: int = 4) -> bytes:
            return b"\xff" * (math.prod(extents) * size)

        def lengths(length: int, floor: int, folded: int) -> StateLengths:
            return StateLengths(length, floor, (folded,) * made.layers)

        floor = max(0, length - made.step_tokens) if journal else length
        states = lengths(length, floor, max(0, floor - made.step_tokens) if journal else length)
        at = min(at, length) // SIZE * SIZE
        checkpoint = lengths(at, at, max(0, at - made.step_tokens) if journal else at) if at else None
        parts = [tuple([np.frombuffer(content(length, width), np.uint8)] * 2)] * LAYERS
        sizes = {
            "states": (shape.key_dim, shape.value_dim),
            "channels": (shape.channels,),
            "gates": (2, shape.value_heads),
        }
        moved = MovedStates(states, checkpoint)
        rows = [each for each in rows_of(made, moved, PIECE_BYTES) if each.tensor != "lengths"]
        pieces = [(each, content(each.rows, *sizes[each.tensor])) for each in rows]
        return Taken(tokens, moved, pieces, parts, lies=True)


def prompt(tokens: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCABULARY, tokens).tolist()


def fed(world: World, tokens: list[int], *more: list[int], prefix: PrefixUse | None = None) -> int:
    """A new sequence of ``tokens``, fed in one step, and of ``more``."""
    made = world.made(tokens, prefix=prefix)
    world.step(made)
    for each in more:
        world.step(world.span(made.sequence, each))
    return made.sequence


def computed(world: World, tokens: list[int], prefix: PrefixUse = PREFIX) -> int:
    """How many tokens of a new sequence were not found."""
    [outcome] = world.step(span := world.made(tokens, prefix=prefix))
    world.release(span.sequence)
    return len(tokens) - outcome.cached_tokens


class Bits:
    """The rows of one sequence, whose tokens are fed in steps of up to 32, in bfloat16 over our products."""

    def __init__(self, folder: Any, **more: Any) -> None:
        self.world = World(folder, dtype="bfloat16", **more)
        if not self.world.runner.device.exact_span_tokens:
            pytest.skip("rows of short spans need not have the bits of single decodes here")

    def rows(self, *spans: Span) -> list[bytes]:
        with torch.inference_mode():
            outcomes = self.world.runner.forward(Step(spans)).outcomes
        for span in spans:
            before = self.world.has.get(span.parent or span.sequence, ())
            self.world.has[span.sequence] = (*before[: span.start], *span.tokens.tolist())
        return [columns_of(each.rows)["logits"][-1].tobytes() for each in outcomes]

    def alone(self, history: list[int]) -> bytes:
        """The last row of a new sequence that is fed token by token."""
        made = self.world.made(history[:1], prefix=None)
        [row] = self.rows(made)
        for token in history[1:]:
            [row] = self.rows(self.world.span(made.sequence, [token]))
        self.world.release(made.sequence)
        return row
