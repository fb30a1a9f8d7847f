"""The first steps compile what any later step launches: the kernels, and for which kinds of arguments."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from ferrum_rpc.attention.eight_bits import FP8
from ferrum_rpc.attention.triton_paged import TritonPagedAttention
from ferrum_rpc.engine.cuda.first_steps import PREFILL_TOKENS, run_first_steps
from ferrum_rpc.models.decoder import Decoder
from ferrum_rpc.models.layout import layout
from ferrum_rpc.models.spec import ModelSpec
from ferrum_rpc.models.triton_fused_ops import TritonFusedOps
from ferrum_rpc.models.triton_lora import TritonLoras
from ferrum_rpc.sampling.draw import PARAMS_DTYPE
from ferrum_rpc.sampling.triton_sample import TritonSampler
from ferrum_rpc.selection import Choice
from tests.kernels.launches import Launches
from tests.kernels.test_triton_lora import ADAPTERS, MAX_RANK, load
from tests.support.checkpoints import TINY
from tests.support.fixtures import BLOCK_SIZE, PagedModel

CONFIG = {**TINY, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "tie_word_embeddings": True}
CONFIG |= {"vocab_size": 64, "intermediate_size": 64, "num_attention_heads": 8, "head_dim": 16, "eos_token_id": 0}


@pytest.fixture(params=[torch.bfloat16, FP8], ids=["bfloat16", "fp8"])
def world(request, monkeypatch) -> tuple[PagedModel, Launches]:
    launches = Launches(monkeypatch, carried_out=False)
    spec, cpu = ModelSpec.from_config(CONFIG), torch.device("cpu")
    model = Decoder(spec, torch.bfloat16, cpu, ops=TritonFusedOps(spec.layers[0]))
    for name, shape in model.expected_tensors().items():
        model.load(name, torch.zeros(shape, dtype=torch.bfloat16))
    backend = partial(TritonPagedAttention, dtype=torch.bfloat16, processors=4)
    with torch.inference_mode():
        made = PagedModel(backend, cpu, model, kv_dtype=request.param)
        made.attention.warm_up()
    made.compute.sampler = Choice("triton", "", TritonSampler())
    return made, launches


@pytest.mark.parametrize("adapted", [False, True], ids=["plain", "adapters"])
def test_no_later_step_compiles_a_kernel(world, adapted):
    model, launches = world
    loras = None
    if adapted:
        table = layout(ModelSpec.from_config(CONFIG))
        model.compute.loras = loras = TritonLoras(table, torch.bfloat16, torch.device("cpu"), max_rank=MAX_RANK)
        for number in ADAPTERS:
            load(loras, number)
        model.adapters = {sequence: 1 + sequence % len(ADAPTERS) for sequence in range(16)}
    with torch.inference_mode():
        run_first_steps(model.compute, BLOCK_SIZE, PREFILL_TOKENS // BLOCK_SIZE, loras)
    compiled = set(launches.variants)
    needed = {"add_norm_kernel", "gate_kernel", "attend_kernel", "merge_kernel", "sample_kernel"}
    assert {name for name, *_ in compiled} >= needed
    rng = np.random.default_rng(0)
    tokens = lambda count: rng.integers(0, 64, count)  # noqa: E731
    for length in (1, 2, 15, 16, 17, 32, 33):
        model.step((0, tokens(length)))
        model.truncate(0, 0)
    for count in range(1, 17):
        model.step(*((sequence, tokens(1 + sequence % 3)) for sequence in range(count)))
        model.step(*((sequence, tokens(1)) for sequence in range(count)))
        for sequence in range(count):
            model.truncate(sequence, 0)
    model.step((0, tokens(40)), (1, tokens(1)), (2, tokens(5)))
    model.step((3, tokens(40)), (6, tokens(40)))  # of one adapter: in large tiles
    for rows in (1, 3, 16):  # sampled rows also begin where 16 bytes do not
        logits, params = torch.zeros(rows + 1, 61)[1:], np.zeros(rows, PARAMS_DTYPE)
        TritonSampler().draw(logits, params)
        TritonSampler().filtered(logits, params)
    assert launches.variants - compiled == set()
