"""The first steps compile what any later step launches: the kernels, and for which kinds of arguments.

Triton compiles a kernel anew for other constants, other types and pointers that are not aligned to 16 bytes, and where
an integer becomes 1 or a multiple of 16. Launches are noted here and not carried out.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

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
from tests.kernels.fixtures import BLOCK_SIZE, PagedModel
from tests.kernels.test_triton_lora import ADAPTERS, MAX_RANK, load

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
}
Variant = tuple[Any, ...]


class Launches:
    """The variants of kernels that were launched."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: set[Variant] = set()
        for kind in (InterpretedFunction, JITFunction):
            monkeypatch.setattr(kind, "run", self._note(kind))

    def _note(self, kind: Any) -> Any:
        def run(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **constants: Any) -> None:
            del grid, warmup
            given = getattr(kernel, "kwargs", {})
            free, anywhere = (
                set(given.get(name) or ()) for name in ("do_not_specialize", "do_not_specialize_on_alignment")
            )
            names = [*inspect.signature(kernel.fn).parameters]
            key = [
                (name, _kind_of(each, name in free, name in anywhere))
                for name, each in zip(names, arguments, strict=False)
            ]
            self.seen.add((kernel.fn.__name__, *key, *sorted(constants.items())))

        return run


def _kind_of(argument: Any, free: bool, anywhere: bool) -> Any:
    if isinstance(argument, Tensor):
        return argument.dtype, anywhere or argument.data_ptr() % 16 == 0
    if isinstance(argument, int) and not free:
        return argument == 1, argument % 16 == 0
    return type(argument)


@pytest.fixture(params=[torch.bfloat16, FP8], ids=["bfloat16", "fp8"])
def world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[PagedModel, Launches]:
    launches = Launches(monkeypatch)
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
def test_no_later_step_compiles_a_kernel(world: tuple[PagedModel, Launches], adapted: bool) -> None:
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
    compiled = set(launches.seen)
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
    assert launches.seen - compiled == set()
