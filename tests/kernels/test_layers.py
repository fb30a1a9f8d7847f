"""A decoder of which every operation but the products is a kernel computes the same bits whether K and V are written by
the rotation or by a launch of their own."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

pytest.importorskip("triton")

from ferrum_rpc.attention.triton_paged import TritonPagedAttention
from ferrum_rpc.models.decoder import Decoder
from ferrum_rpc.models.spec import ModelSpec
from ferrum_rpc.models.triton_fused_ops import TritonFusedOps
from tests.checkpoints import TINY
from tests.kernels.fixtures import PagedModel

SPEC = replace(
    ModelSpec.from_config({**TINY, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16}),
    max_context=64,
)
KERNELS = partial(TritonPagedAttention, processors=1)


def decoder(device: torch.device) -> Decoder:
    made = Decoder(SPEC, torch.bfloat16, device, ops=TritonFusedOps(SPEC.layers[0]))
    generator = torch.Generator().manual_seed(0)
    for name, shape in made.expected_tensors().items():
        made.load(name, torch.randn(shape, generator=generator) / shape[-1] ** 0.5)
    return made


def test_the_rotation_writes_what_a_launch_of_its_own_writes(device):
    model = decoder(device)
    fused, apart = (PagedModel(KERNELS, device, model, staged=staged) for staged in (True, False))
    for tokens in ([(0, [3, 1, 4, 1, 5]), (1, [9])], [(0, [2]), (1, [6, 5])], [(1, [3]), (0, [5])]):
        assert torch.equal(fused.step(*tokens), apart.step(*tokens))
        assert torch.equal(fused.cached(), apart.cached())
