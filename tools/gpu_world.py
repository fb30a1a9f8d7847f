"""A whole model on the device, weights and cache random and made there: what the GPU check times and compares.

The engine's books are left out (nothing here allocates blocks), so that this needs torch, triton and numpy alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.shapes import tensor_shapes
from ferrum_rpc.attention.geometry import BatchGeometry
from ferrum_rpc.attention.triton_paged import TritonPagedAttention
from ferrum_rpc.core import Greedy, OutputSpec, Positions, Rows, Span
from ferrum_rpc.engine.graphs import Capture, CudaCapture, Graphs
from ferrum_rpc.engine.staged_compute import StagedCompute
from ferrum_rpc.kv.store import KvStore
from ferrum_rpc.models.decoder import Decoder
from ferrum_rpc.models.device_rows import select_rows_for
from ferrum_rpc.models.linear import PlainLinear
from ferrum_rpc.models.spec import ModelSpec

BLOCK_SIZE = 16
GREEDY = OutputSpec(Positions.LAST, Greedy())
LEAD_IN = 2
"""Steps of a round before those that count."""


class World:
    """A decoder of ``config`` (a Qwen3 ``config.json``) in bfloat16 over a cache of ``blocks`` blocks of 16 tokens, the
    null block not counted. ``capture`` records graphs; None: CUDA's."""

    def __init__(self, config: dict[str, Any], device: torch.device, blocks: int, capture: Capture | None) -> None:
        spec = ModelSpec.from_config(config)
        self.config, self.device, self.blocks = config, device, blocks
        self.rows_reason, self.ops = select_rows_for(spec, torch.bfloat16, device, interpreted=True)
        self.model = Decoder(spec, torch.bfloat16, device, PlainLinear, self.ops)
        torch.manual_seed(0)
        for name, shape in self.model.expected_tensors().items():
            if len(shape) == 1:
                tensor = torch.ones(shape, dtype=torch.bfloat16, device=device)
            else:
                scale = 0.02 if "embed" in name else shape[1] ** -0.5
                tensor = torch.randn(shape, dtype=torch.bfloat16, device=device) * scale
            self.model.load(name, tensor)
        self.store = KvStore(
            spec.layers,
            blocks + 1,
            BLOCK_SIZE,
            spec.kv_heads,
            spec.head_dim,
            dtype=torch.bfloat16,
            device=device,
        )
        for layer in (*self.store.keys, *self.store.values):
            layer.normal_()
        attention = TritonPagedAttention(self.model.attention_specs, self.store.keys, self.store.values)
        self.compute = StagedCompute(self.model, attention)
        self._capture = capture

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a decode step reads: all but the table of embeddings, of which it reads a few rows."""
        shapes = tensor_shapes(self.config)
        read = [
            shape for name, shape in shapes.items() if "embed_tokens" not in name or self.model.spec.tied_embeddings
        ]
        return 2 * sum(int(np.prod(shape)) for shape in read)

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one cached token."""
        spec = self.model.spec
        return 4 * spec.layers * spec.kv_heads * spec.head_dim

    def graphs(self, most_spans: int, context: int) -> Graphs:
        """Graphs for steps of up to ``most_spans`` sequences of up to ``context`` tokens; shapes are recorded when they
        come."""
        return self.compute.use_graphs(
            CudaCapture(self.device) if self._capture is None else self._capture,
            most_spans=most_spans,
            blocks_per_span=-(-context // BLOCK_SIZE),
        )

    @contextmanager
    def eager(self) -> Iterator[None]:
        """Without graphs."""
        graphs, self.compute.graphs = self.compute.graphs, None
        try:
            yield
        finally:
            self.compute.graphs = graphs


class Step:
    """Steps of ``batch`` sequences that have ``context`` tokens cached, each with ``tokens`` new ones, and greedy rows:
    host time, launches and the wait for the rows are all in it, as in the runner."""

    def __init__(self, world: World, batch: int, context: int, tokens: int = 1, room: int = 64) -> None:
        self._world, self._context, self._tokens, self._room = world, context, tokens, room
        blocks = -(-(context + tokens + room) // BLOCK_SIZE)
        if batch * blocks > world.blocks:
            raise ValueError(f"{batch} sequences need {batch * blocks} blocks, there are {world.blocks}")
        order = 1 + np.random.default_rng(0).permutation(batch * blocks).astype(np.int32)
        self._tables = list(order.reshape(batch, blocks))
        self._ids = np.random.default_rng(1).integers(0, world.config["vocab_size"], (batch, tokens)).astype(np.int32)

    def run(self, index: int = 0) -> tuple[Tensor, Sequence[Rows | None]]:
        """The step at ``context + index`` cached tokens: hidden rows (valid until the next) and the answers."""
        start = self._context + index % self._room
        spans = [Span(number, ids, start, GREEDY) for number, ids in enumerate(self._ids)]
        batch = len(spans)
        geometry = BatchGeometry.build(BLOCK_SIZE, [start] * batch, [self._tokens] * batch, self._tables)
        compute = self._world.compute
        hidden = compute.forward(spans, geometry, lambda: None)
        rows = compute.select(spans, geometry, hidden)
        compute.mark().wait()
        return hidden, rows


def alternate(
    sides: dict[str, Callable[[int], object]], rounds: int, steps: int, lead_in: int = LEAD_IN
) -> dict[str, list[float]]:
    """Median seconds of a step of each side in each round (A B A B ...); ``lead_in`` steps of each are not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, step in sides.items():
            timed = []
            for index in range(lead_in + steps):
                began = time.perf_counter()
                step(index)
                timed.append(time.perf_counter() - began)
            seconds[name].append(median(timed[lead_in:]))
    return seconds


def ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """Round by round."""
    return [a / b for a, b in zip(over, under, strict=True)]
