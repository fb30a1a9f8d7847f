"""A decoder that is cut among ranks, each of which is a thread."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.distributed import HashStore, PrefixStore, Store

from ferrum_rpc.distributed import shared_memory
from ferrum_rpc.models.decoder import Decoder, ParallelContext, PipelineLinks
from ferrum_rpc.models.linear import select_linear
from ferrum_rpc.models.shard import Shard
from ferrum_rpc.models.spec import ModelSpec
from tests.support.adapters import load_adapters
from tests.support.checkpoints import checkpoint_tensors
from tests.support.harness import CPU, TOKENS, Executor

TWO = Shard(0, 2)
FOUR = Shard(0, 4)
"""Of which two may have the same KV head."""

BOTH = Shard(0, 2, 0, 2)
"""Two ranks in each of two stages."""

SPLIT = [13, 1, 9, 1, 16]


def context_of(number: int, whole: Shard, store: Store) -> ParallelContext:
    """What a rank has and whom it talks to; waits for the others."""
    torch.set_num_threads(1)
    shard = Shard.at(number, whole.ranks, whole.stages)
    everyone = shared_memory.join(PrefixStore("all", store), number, whole.ranks * whole.stages)
    stage = shared_memory.join(PrefixStore(f"stage {shard.stage}", store), shard.rank, shard.ranks)
    before, behind = number - shard.ranks, number + shard.ranks
    pipe = PipelineLinks(everyone, None if shard.first else before, None if shard.last else behind)
    return ParallelContext(shard, stage, pipe)


def decoder_of(reference: Any, context: ParallelContext, dtype: torch.dtype, linear: Any = None) -> Decoder:
    """The decoder of a rank. ``linear``: makes what holds its weights, if not as usual."""
    spec = ModelSpec.from_config(reference.config.to_dict() | {"architectures": [type(reference).__name__]})
    factory, state = select_linear(CPU, dtype)[2] if linear is None else linear(), checkpoint_tensors(reference)
    decoder = Decoder(spec, dtype, CPU, factory, parallel=context)
    for name in decoder.expected_tensors():
        decoder.load(name, state[name])
    return decoder


def on_ranks(
    reference: Any, whole: Shard, dtype: torch.dtype = torch.float32, adapters: Path | None = None, linear: Any = None
) -> torch.Tensor:
    """The logits [T, vocab] of `TOKENS`, each rank's part beside the others'. ``adapters``: a folder with one, which is
    used."""
    store, count = HashStore(), whole.ranks * whole.stages

    def rows(number: int) -> torch.Tensor | None:
        context, loras = context_of(number, whole, store), None
        decoder = decoder_of(reference, context, dtype, linear)
        if adapters is not None:
            _, loras = decoder.take_adapters(64)
            load_adapters(adapters, loras)
        executor = Executor(decoder, loras=loras, adapters={0: 1} if loras else {})
        found = executor.run(TOKENS, SPLIT, logits=context.shard.last)
        return found if context.shard.last else None

    with ThreadPoolExecutor(count) as pool:
        return torch.cat([each for each in pool.map(rows, range(count)) if each is not None], 1)
