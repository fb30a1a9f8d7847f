"""The device's part of a step on a GPU: everything in by one copy, the layers by one replay where there is a graph.

`Compute` sends three arrays and the attention's plan, each by a copy of its own, and makes every launch from Python.
Here the step's integers travel together (`attention.staging`), and steps of a known shape are replayed (`graphs`).
Rows leave by `sampling.transfer`. Nothing waits for the device, so that the runner can begin a step while the one
before it computes: everything is queued on one stream and happens in that order. What the host writes, it writes only
when the copy out of it has run (`Staging`); what a graph's buffers hold is the next step's once its replay is queued,
and by then the rows that are wanted of it have been queued before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from ferrum_rpc.attention.backend import StagedAttention
from ferrum_rpc.attention.geometry import BatchGeometry, Int64Array
from ferrum_rpc.attention.recurrent_steps import RecurrentStep
from ferrum_rpc.attention.staging import Layout, Staging
from ferrum_rpc.engine.compute import Compute, TokensBehind
from ferrum_rpc.engine.cuda.graphs import STEP_INPUTS, Graphs
from ferrum_rpc.models.base import CacheAttend, Model, Recur, RecurrentModel, StepAdapters, StepInputs
from ferrum_rpc.models.lora import Loras, StagedAdapters
from ferrum_rpc.sampling.transfer import to_device
from ferrum_rpc.sampling.vocab_parallel import VocabShard


class StagedCompute(Compute):
    """Forward passes of ``model`` over what ``attention`` reads and writes. ``graphs``: what replays steps whose shapes
    it has recorded; set by the caller, as it is made of `run_layers`."""

    def __init__(
        self, model: Model, attention: StagedAttention, loras: Loras | None = None, part: VocabShard | None = None
    ) -> None:
        super().__init__(model, attention, loras, part)
        self.late = model.device.type == "cuda"
        self.follows = self.late and part is None
        self.staged = attention
        self.graphs: Graphs | None = None
        self._staging = Staging(model.device)

    def run(
        self,
        packed: Int64Array,
        geometry: BatchGeometry,
        adapters: StepAdapters | None = None,
        behind: TokensBehind | None = None,
        states: RecurrentStep | None = None,
    ) -> Tensor:
        """The rows are valid until the next step."""
        if self.graphs is not None:
            hidden = self.graphs.forward(packed, geometry, adapters, None if behind is None else behind.take, states)
            if hidden is not None:
                return hidden
        capacity, planned = self.staged.draft(geometry)
        adapted = adapters.arrays(recorded=False) if isinstance(adapters, StagedAdapters) else ()
        jobs = (states.jobs().ravel(),) if states is not None and states.queued else ()
        inputs = [packed, geometry.positions, geometry.slots, *jobs, *adapted]
        layout = Layout(
            (*((np.int64, len(each)) for each in inputs), *((np.int32, size) for size in capacity.sizes)),
        )
        sections = self._staging.open(layout)
        self._staging.send(layout, [*inputs, *planned])
        if behind is not None:
            behind.take(sections[0])
        if states is not None and jobs:
            states.sent(sections[STEP_INPUTS].view(states.jobs().shape))
        if isinstance(adapters, StagedAdapters):
            adapters = adapters.bind(sections[STEP_INPUTS + len(jobs) : len(inputs)])
        plan = self.staged.bind(capacity, sections[len(inputs) :])
        return self.run_layers(sections[:STEP_INPUTS], plan, adapters, None if states is None else states.recur)

    def run_layers(
        self, inputs: Sequence[Tensor], plan: Any, adapters: StepAdapters | None = None, recur: Recur | None = None
    ) -> Tensor:
        """As `Compute.run_layers`; the model may write K and V itself. ``recur``: what advances the states of a
        `RecurrentModel`."""
        attention = self.staged
        tokens, positions, slots = inputs

        def stored(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return attention.attend_new(layer, query, key, value, plan)

        def both(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            attention.write(layer, slots, key, value)
            return attention.attend_new(layer, query, key, value, plan)

        attend = CacheAttend(lambda layer: attention.rows(layer, slots), stored, both)
        step = StepInputs(tokens, positions, adapters)
        if recur is not None:
            return cast(RecurrentModel, self.model).forward(step, attend, recur)
        return self.model.forward(step, attend)

    def forget_graphs(self) -> None:
        self.graphs = None

    def to_device(self, *arrays: Int64Array) -> list[Tensor]:
        """Nothing waits."""
        return [to_device(torch.from_numpy(each), self.model.device) for each in arrays]
