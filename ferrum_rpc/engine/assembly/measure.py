"""The memory that the largest step needs on a GPU, measured by running it before the cache is allocated.

`size` computes a step's tensors from the model's shape. Libraries that allocate by themselves (sorts, workspaces, the
layers of transformers) are not in that sum. The step runs over a cache of two blocks: every position of every sequence
is in block 1, whose content does not matter.
"""

from __future__ import annotations

import numpy as np
import torch

from ferrum_rpc.attention.geometry import BatchGeometry
from ferrum_rpc.attention.recurrent_steps import RecurrentStore
from ferrum_rpc.core import Sample
from ferrum_rpc.engine.assembly.choose import Choices
from ferrum_rpc.engine.assembly.size import LargestStep
from ferrum_rpc.engine.compute import Compute
from ferrum_rpc.errors import InvalidRequest
from ferrum_rpc.sampling.rows import HEAD_ROWS, RowRequest


def measure_step(choices: Choices, compute: Compute, largest: LargestStep, states: RecurrentStore | None = None) -> int:
    """Peak bytes of the ``largest`` step on its GPU, beyond what is allocated before. ``compute`` has a cache of two
    blocks, and ``states`` a slot for each of `largest_counts`. Raises InvalidRequest if the step does not fit even
    then."""
    device = choices.device
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    try:
        run_largest(compute, choices.config.block_size, choices.max_context, largest, states)
        torch.cuda.synchronize(device)
    except torch.OutOfMemoryError as error:
        raise InvalidRequest(
            f"a step of {largest.tokens:,} tokens does not fit the device memory that the weights leave; lower "
            "--max-batch-tokens",
            field="max_batch_tokens",
        ) from error
    return torch.cuda.max_memory_allocated(device) - before


def largest_counts(max_context: int, largest: LargestStep) -> list[int]:
    """The tokens of each sequence of the largest step."""
    counts = [max_context] * (largest.tokens // max_context)
    return counts + ([rest] if (rest := largest.tokens % max_context) else [])


def run_largest(
    compute: Compute, block_size: int, max_context: int, largest: LargestStep, states: RecurrentStore | None = None
) -> None:
    """Run a step of ``largest.tokens`` tokens, the last of sequences of ``max_context``, and sample as many of its rows
    as are sampled at once, by top-p. Writes block 1 of a cache, and slots of ``states``, that are not in use."""
    counts = largest_counts(max_context, largest)
    table = np.ones(-(-max_context // block_size), dtype=np.int32)
    starts = [max_context - count for count in counts]
    geometry = BatchGeometry.build(block_size, starts, counts, [table] * len(counts))
    anew = None if states is None else states.begin_anew(counts)
    hidden = compute.run(np.zeros(geometry.tokens, dtype=np.int64), geometry, states=anew)
    kind = Sample(top_p=0.9, seed=0)
    rows = min(largest.sequences, geometry.tokens, HEAD_ROWS)
    compute.rows(hidden, [RowRequest(row, 1, kind) for row in range(rows)])
    compute.mark().wait()
