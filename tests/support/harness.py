"""Runs the computing half of the engine by hand: a store, a backend, block tables; no pool, runner or service."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Final, TypeVar

import numpy as np
import pytest
import torch

from ferrum_rpc.attention.backend import select_backend
from ferrum_rpc.attention.geometry import BatchGeometry
from ferrum_rpc.attention.recurrent import STEP_TOKENS, RecurrentSlot
from ferrum_rpc.attention.recurrent_steps import RecurrentSpan, RecurrentStep, RecurrentStore
from ferrum_rpc.core import OutputSpec, Positions, Span
from ferrum_rpc.engine.assembly.choose import ROUNDED, cache_layers
from ferrum_rpc.engine.compute import Compute
from ferrum_rpc.errors import InvalidRequest
from ferrum_rpc.kv.store import KvStore
from ferrum_rpc.models.base import Model
from ferrum_rpc.models.decoder import Decoder
from ferrum_rpc.models.linear import LinearFactory, select_linear
from ferrum_rpc.models.lora import Loras
from ferrum_rpc.models.spec import ModelSpec
from tests.support.checkpoints import CLASSES, FAMILY_DEFAULTS, TINY, checkpoint_tensors, drawn, make_model
from tests.support.poison import fill_journal, fill_slots

CPU = torch.device("cpu")
T = TypeVar("T")

TOKENS: Final = np.random.default_rng(7).integers(0, 300, size=40)
SPLITS: Final = ([40], [1] * 40, [13, 9, 1, 17])
"""`TOKENS` whole, one by one, and in pieces."""


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Of torch's."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def native(
    reference: Any, dtype: torch.dtype = torch.float32, linear: str = "auto", device: torch.device = CPU
) -> Decoder:
    """The native decoder with the weights and the configuration of a transformers model."""
    spec = ModelSpec.from_config(reference.config.to_dict() | {"architectures": [type(reference).__name__]})
    decoder = Decoder(spec, dtype, device, select_linear(device, dtype, linear)[2])
    state = checkpoint_tensors(reference)
    for name in decoder.expected_tensors():
        decoder.load(name, state[name])
    return decoder


def random_decoder(
    family: str, dtype: torch.dtype, linear: LinearFactory, device: torch.device = CPU, **overrides: Any
) -> Decoder:
    """A native decoder with random weights of ``dtype``, where no oracle is asked: importing transformers takes seconds
    in a process of its own."""
    config = {**TINY, **FAMILY_DEFAULTS.get(family, {}), **overrides}
    spec = ModelSpec.from_config(config | {"architectures": [f"{CLASSES[family]}ForCausalLM"]})
    decoder, generator = Decoder(spec, dtype, device, linear), torch.Generator().manual_seed(0)
    for name, shape in decoder.expected_tensors().items():
        decoder.load(name, drawn(family, name, shape, generator).to(dtype))
    return decoder


def made_or_skip(make: Callable[[], T]) -> T:
    """A visible skip where a compiler or an instruction is missing."""
    try:
        return make()
    except OSError as missing:
        pytest.skip(str(missing))


def native_or_skip(reference: Any, dtype: torch.dtype, linear: str) -> Decoder:
    """`native`, on a machine that has the instructions and the library of these products; nothing else is skipped."""
    try:
        select_linear(CPU, dtype, linear)
    except InvalidRequest as missing:
        pytest.skip(str(missing))
    return native(reference, dtype, linear)


class TorchInDouble:
    """torch, for a module that asks it for float32."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def reference_logits(reference: Any, tokens: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """float64 [T, vocab] of the transformers model computed in ``dtype``, its rotary frequencies kept in float32. Its
    recurrent layers, which compute in float32 whatever they get, are given float64 for it."""
    original = next(reference.parameters()).dtype
    with torch.inference_mode(), pytest.MonkeyPatch.context() as patched:
        if dtype == torch.float64 and hasattr(reference.config, "linear_num_value_heads"):
            patched.setattr(sys.modules[type(reference).__module__], "torch", TorchInDouble())
        convert(reference, dtype)
        ids = torch.as_tensor(np.asarray(tokens), dtype=torch.int64)[None]
        logits = reference(input_ids=ids, use_cache=False).logits[0].double()
        convert(reference, original)
    return logits


def rounded_model(family: str, dtype: torch.dtype, **overrides: Any) -> Any:
    """A random transformers model whose weights are exact in ``dtype``, held in float64; its rotary frequencies, which
    no checkpoint holds, stay float32."""
    return convert(convert(make_model(family, **overrides), dtype), torch.float64)


class Oracle:
    """The ``logits`` of a transformers model in float64, to which ours in ``dtype`` are held: in float32 each is within
    2e-5 of their spread, and in 16 bits all err at most twice as much as transformers does."""

    def __init__(self, reference: Any, dtype: torch.dtype = torch.float32, tokens: Sequence[int] = TOKENS) -> None:
        self.logits = reference_logits(reference, tokens, torch.float64)
        self._theirs: float | None = None
        if dtype != torch.float32:
            self._theirs = error(reference_logits(reference, tokens, dtype), self.logits)

    def check(self, ours: torch.Tensor) -> None:
        if self._theirs is None:
            assert worst(ours, self.logits) <= 2e-5
        else:
            assert error(ours, self.logits) <= 2 * self._theirs


def convert(reference: Any, dtype: torch.dtype) -> Any:
    """``reference`` in ``dtype``, but for its rotary frequencies."""
    rotary = reference.model.rotary_emb
    frequencies = {name: each.clone() for name, each in rotary.named_buffers()}
    reference.to(dtype)
    for name, each in frequencies.items():
        setattr(rotary, name, each)
    return reference


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square of the difference over the standard deviation of the expected logits."""
    return float((actual.double() - expected).square().mean().sqrt() / expected.std())


def worst(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference over the standard deviation of the expected logits."""
    return float((actual.double() - expected).abs().max() / expected.std())


def check_geometry(geometry):
    """Raise AssertionError unless every array agrees with every other."""
    counts = np.diff(geometry.query_start)
    assert geometry.query_start[0] == 0 and (counts > 0).all()
    assert (geometry.starts + counts == geometry.lengths).all()
    assert (np.diff(geometry.table_start) * geometry.block_size >= geometry.lengths).all()
    for span in range(geometry.spans):
        rows = slice(geometry.query_start[span], geometry.query_start[span + 1])
        positions = np.arange(geometry.starts[span], geometry.lengths[span])
        assert (geometry.positions[rows] == positions).all()
        blocks = geometry.blocks[geometry.table_start[span] + positions // geometry.block_size].astype(np.int64)
        assert (geometry.slots[rows] == blocks * geometry.block_size + positions % geometry.block_size).all()


def slot_of(model: Any) -> RecurrentSlot:
    """Of a new sequence of a model with recurrent layers, for steps of any length."""
    shape, *others = model.recurrent_shapes
    store = RecurrentStore(shape, 1 + len(others), 1, dtype=model.dtype, device=model.device)
    store.slots[0].clear()
    return store.slots[0]


class Executor:
    """Sequences over one store, and the states of recurrent layers. Blocks are handed out in a random order; slots that
    nobody owns hold NaN, and so do rows of journals that no token needs.
    ``adapters``: of sequences that have one, its number among ``loras``. Not ``native``: layers call back for their
    attention, whatever could run in C."""

    def __init__(
        self,
        model: Model,
        *,
        blocks: int = 128,
        block_size: int = 4,
        seed: int = 0,
        kv_dtype: str = "auto",
        loras: Loras | None = None,
        adapters: dict[int, int] | None = None,
        native: bool = True,
    ):
        self.model = model
        layers = cache_layers(model.attention_specs, model.dtype, kv_dtype)
        self.block_size = block_size
        self.store = KvStore(layers, blocks, block_size, model.device)
        fill_slots(self.store, torch.arange(blocks * block_size), float("nan"))
        self.device = model.device
        factory = select_backend(model.device, model.attention_specs, model.dtype, cached=ROUNDED.get(kv_dtype))[2]
        self.backend = factory(model.attention_specs, self.store.keys, self.store.values, sinks=model.sinks)
        backend: Any = self.backend
        if not native:
            plain = ("plan", "write", "attend", "exact_span_tokens")
            backend = SimpleNamespace(**{name: getattr(backend, name) for name in plain})
        self.recurring = bool(getattr(model, "recurrent_shapes", ()))
        self.compute = Compute(model, backend, loras)
        self.adapters = adapters or {}
        self._free = list(1 + np.random.default_rng(seed).permutation(blocks - 1))
        self.tables: dict[int, np.ndarray] = {}
        self.lengths: dict[int, int] = {}
        self.slots: dict[int, RecurrentSlot] = {}

    def step(self, spans: dict[int, Sequence[int]], *, logits: bool = True) -> dict[int, torch.Tensor]:
        """One forward pass that appends tokens to several sequences: their logits [n, vocab]."""
        size = self.block_size
        for sequence, tokens in spans.items():
            table = list(self.tables.get(sequence, ()))
            end = self.lengths.setdefault(sequence, 0) + len(tokens)
            while len(table) * size < end:
                table.append(self._free.pop())
            self.tables[sequence] = np.asarray(table, dtype=np.int32)
        geometry = BatchGeometry.build(
            size,
            [self.lengths[sequence] for sequence in spans],
            [len(tokens) for tokens in spans.values()],
            [self.tables[sequence] for sequence in spans],
        )
        check_geometry(geometry)
        packed = [
            Span(
                sequence,
                np.asarray(tokens, dtype=np.int32),
                self.lengths[sequence],
                OutputSpec(Positions.NONE),
                adapter=self.adapters.get(sequence, 0),
            )
            for sequence, tokens in spans.items()
        ]
        states, after = list[RecurrentSpan](), dict[int, RecurrentSlot]()
        for sequence, tokens in spans.items() if self.recurring else ():
            slot = fill_journal(self.slots.get(sequence) or slot_of(self.model))
            after[sequence] = into = slot if len(tokens) <= STEP_TOKENS else slot_of(self.model)
            states.append(RecurrentSpan(slot, into, slot.length, len(tokens)))
        with torch.inference_mode():
            if self.recurring:
                step = RecurrentStep(states)
                hidden = self.compute.forward(packed, geometry, states=step)
                step.commit()
            else:
                hidden = self.compute.forward(packed, geometry)
            rows = (self.model.logits(hidden) if logits else hidden).cpu()
        self.slots |= after
        for sequence, tokens in spans.items():
            self.lengths[sequence] += len(tokens)
        bounds = geometry.query_start
        return {sequence: rows[bounds[i] : bounds[i + 1]] for i, sequence in enumerate(spans)}

    def truncate(self, sequence: int, length: int) -> None:
        """Cut a sequence back to ``length``, within its last step."""
        if self.recurring:
            self.slots[sequence].truncate(length)
        self.lengths[sequence] = length

    def run(
        self, tokens: Sequence[int], chunks: Sequence[int], sequence: int = 0, *, logits: bool = True
    ) -> torch.Tensor:
        """Feed one sequence in chunks of the given sizes: all its logits [T, vocab], or its hidden rows."""
        out, first = [], 0
        for size in chunks:
            out.append(self.step({sequence: tokens[first : first + size]}, logits=logits)[sequence])
            first += size
        assert first == len(tokens)
        return torch.cat(out)
