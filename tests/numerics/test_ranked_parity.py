"""The native decoder cut among ranks, each in a thread, against transformers: the bounds are those of one rank."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, PrefixStore

from ferrum_rpc.distributed import shared_memory
from ferrum_rpc.models.decoder import Decoder, ParallelContext, PipelineLinks
from ferrum_rpc.models.linear import select_linear
from ferrum_rpc.models.shard import Shard
from ferrum_rpc.models.spec import ModelSpec
from tests.numerics.harness import CPU, Executor, error, reference_logits, rounded_model, worst
from tests.numerics.test_adapters import load
from tests.numerics.test_parity import CASES, SIXTEEN_BITS, TOKENS

SPLIT = [13, 1, 9, 1, 16]
TWO = Shard(0, 2)


def on_ranks(
    reference: Any, whole: Shard, dtype: torch.dtype = torch.float32, adapters: Path | None = None
) -> torch.Tensor:
    """The logits [T, vocab], each rank's tokens beside the others'. ``adapters``: a folder with one, which is used."""
    spec = ModelSpec.from_config(reference.config.to_dict() | {"architectures": [type(reference).__name__]})
    state, store = reference.state_dict(), HashStore()
    count = whole.ranks * whole.stages

    def follow(number: int) -> torch.Tensor | None:
        torch.set_num_threads(1)
        shard = Shard.at(number, whole.ranks, whole.stages)
        everyone = shared_memory.join(PrefixStore("all", store), number, count)
        stage = shared_memory.join(PrefixStore(f"stage {shard.stage}", store), shard.rank, shard.ranks)
        before, behind = number - shard.ranks, number + shard.ranks
        pipe = PipelineLinks(everyone, None if shard.first else before, None if shard.last else behind)
        decoder = Decoder(spec, dtype, CPU, select_linear(CPU, dtype)[2], parallel=ParallelContext(shard, stage, pipe))
        for name in decoder.expected_tensors():
            decoder.load(name, state[name])
        loras = None
        if adapters is not None:
            _, loras = decoder.take_adapters(64)
            load(adapters, loras)
        ours, first, rows = Executor(decoder, loras=loras), 0, []
        ours.adapters = {} if adapters is None else {0: 1}
        for size in SPLIT:
            step = {0: TOKENS[first : first + size]}
            rows.append(ours.step(step, logits=shard.last)[0])
            first += size
        return torch.cat(rows) if shard.last else None

    with ThreadPoolExecutor(count) as pool:
        return torch.cat([each for each in pool.map(follow, range(count)) if each is not None], 1)


@pytest.mark.parametrize("case", CASES)
def test_float32_over_two_ranks_is_the_oracle_to_2e_5(case: str) -> None:
    family, overrides = CASES[case]
    reference = rounded_model(family, torch.float32, **overrides)
    truth = reference_logits(reference, TOKENS, torch.float64)
    ours = on_ranks(reference, TWO)
    assert worst(ours, truth) <= 2e-5
    assert (ours.argmax(-1) == truth.argmax(-1)).all()


@pytest.mark.parametrize("whole", [Shard(0, 4), Shard(0, 1, 0, 2), Shard(0, 2, 0, 2)], ids=["4", "2 stages", "2 x 2"])
@pytest.mark.parametrize("case", ["qwen3 tied", "gemma2", "phi3 partial", "cohere2 biases", "olmo2"])
def test_any_cut_is_the_oracle_to_2e_5(case: str, whole: Shard) -> None:
    """Also where there are fewer KV heads than ranks."""
    family, overrides = CASES[case]
    reference = rounded_model(family, torch.float32, vocab_size=500, **overrides)
    truth = reference_logits(reference, TOKENS, torch.float64)
    assert worst(on_ranks(reference, whole), truth) <= 2e-5


@pytest.mark.parametrize("case", SIXTEEN_BITS)
def test_bfloat16_over_two_ranks_errs_at_most_twice_as_much_as_transformers(case: str) -> None:
    family, overrides = CASES[case]
    reference = rounded_model(family, torch.bfloat16, **overrides)
    truth = reference_logits(reference, TOKENS, torch.float64)
    theirs = error(reference_logits(reference, TOKENS, torch.bfloat16), truth)
    assert error(on_ranks(reference, TWO, torch.bfloat16), truth) <= 2 * theirs
