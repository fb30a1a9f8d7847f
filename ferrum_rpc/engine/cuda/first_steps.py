"""A prefill and decode steps of real shape before anything is served: they compile what a step may launch.

The probes at the start compile kernels with other constants than the model's. Compiled within a caller's step, a kernel
delays it by seconds. These steps also allocate what libraries and modules allocate once, so that a step that waits for
the device afterwards always does; see `graphs.CudaCapture`.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ferrum_rpc.attention.geometry import BatchGeometry
from ferrum_rpc.attention.recurrent_steps import RecurrentStep, RecurrentStore
from ferrum_rpc.core import Greedy, OutputSpec, Positions, Sample, Span, TokenCounts
from ferrum_rpc.engine.compute import Compute, packed_tokens
from ferrum_rpc.models.lora import Loras

PREFILL_TOKENS: Final = 256
"""Tokens of the prefill: more rows than a large tile of attention has."""

DECODES: Final = (1, 2)
"""Sequences of the decode steps: one is greedy, and one is sampled."""

OUTPUTS: Final = (Greedy(), Sample(temperature=0.7, top_k=20, top_p=0.9, seed=0))


def run_first_steps(
    compute: Compute,
    block_size: int,
    blocks: int,
    loras: Loras | None = None,
    states: RecurrentStore | None = None,
) -> None:
    """Run them over the null block and over slots of ``states``, which no sequence owns; their rows are dropped.
    ``blocks``: the most that a sequence may have. ``loras``: also run them with adapters that add nothing. Raises what
    a step raises."""
    context = blocks * block_size
    table = np.zeros(blocks, dtype=np.int32)
    for count, tokens in ((1, min(PREFILL_TOKENS, context)), *((count, 1) for count in DECODES)):
        start = context - tokens
        kinds = [OUTPUTS[index % len(OUTPUTS)] for index in range(count)]
        ids = np.zeros(tokens, dtype=np.int32)
        spans = [Span(0, ids, start, OutputSpec(Positions.LAST, kind)) for kind in kinds]
        geometry = BatchGeometry.build(block_size, [start] * count, [tokens] * count, [table] * count)
        hidden = compute.forward(spans, geometry, states=_anew(states, count, tokens))
        compute.select(spans, hidden, _no_counts)
        if loras is not None and (adapters := loras.reserve(geometry.tokens)) is not None:
            compute.run(packed_tokens(spans), geometry, adapters, states=_anew(states, count, tokens))
        compute.mark().wait()


def _anew(states: RecurrentStore | None, count: int, tokens: int) -> RecurrentStep | None:
    return None if states is None else states.begin_anew([tokens] * count)


def _no_counts(*_: object) -> TokenCounts:
    return np.zeros((0, 2), dtype=np.int32)
