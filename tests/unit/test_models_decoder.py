"""Weights go where they belong, once; what is missing is said."""

from __future__ import annotations

import pytest
import torch

from ferrum_rpc.models.decoder import Decoder
from ferrum_rpc.models.layout import layout, parameter_count, parameter_shapes
from ferrum_rpc.models.spec import ModelSpec
from tests.support.checkpoints import CLASSES, checkpoint_tensors, make_model

CPU = torch.device("cpu")


def spec_of(model):
    return ModelSpec.from_config(model.config.to_dict() | {"architectures": [type(model).__name__]})


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        *((family, fields) for family in CLASSES for fields in ({}, {"tie_word_embeddings": True})),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("qwen3", {"attention_bias": True}),
    ],
)
def test_the_layout_is_the_state_of_the_transformers_model(family, fields):
    model = make_model(family, **fields)
    spec = spec_of(model)
    shapes = {name: tuple(tensor.shape) for name, tensor in checkpoint_tensors(model).items()}
    if spec.tied_embeddings:
        del shapes["lm_head.weight"]
    assert {name: placement.shape for name, placement in layout(spec).items()} == shapes
    buffers = (each for name, each in model.named_buffers() if name in shapes)
    assert parameter_count(spec) == sum(weight.numel() for weight in (*model.parameters(), *buffers))


def test_placements_tile_their_parameters():
    table = layout(spec_of(make_model("qwen3", attention_bias=True, head_dim=4)))
    for parameter, shape in parameter_shapes(table.values()).items():
        parts = sorted((p.first, p.rows) for p in table.values() if p.parameter == parameter)
        position = 0
        for first, rows in parts:
            assert first == position
            position += rows
        assert position == shape[0]


def test_a_decoder_says_what_it_lacks_and_loads_in_any_order():
    model = make_model("qwen2")
    decoder = Decoder(spec_of(model), torch.float32, CPU)
    state = model.state_dict()
    names = sorted(decoder.expected_tensors(), key=lambda name: hash((name, 1)))
    for name in names[:-1]:
        decoder.load(name, state[name])
    with pytest.raises(RuntimeError, match="1 weights are not loaded"):
        decoder.logits(torch.zeros(1, 64))
    with pytest.raises(ValueError, match="already"):
        decoder.load(names[0], state[names[0]])
    with pytest.raises(ValueError, match="shape"):
        decoder.load(names[-1], torch.zeros(3, 3))
    with pytest.raises(KeyError):
        decoder.load("model.layers.9.mlp.down_proj.weight", torch.zeros(1))
    decoder.load(names[-1], state[names[-1]])
    assert decoder.logits(torch.zeros(1, 64)).shape == (1, 300)


def test_loading_converts_and_never_aliases():
    model = make_model("llama")
    decoder = Decoder(spec_of(model), torch.bfloat16, CPU)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name in decoder.expected_tensors():
        decoder.load(name, state[name])
    hidden = torch.randn(2, 64).bfloat16()
    before = decoder.logits(hidden)
    for tensor in state.values():
        tensor.zero_()
    assert torch.equal(decoder.logits(hidden), before)


def test_info():
    model = make_model("qwen3", eos_token_id=[2, 7])
    info = Decoder(spec_of(model), torch.bfloat16, CPU).info("tiny")
    assert (info.name, info.architecture) == ("tiny", "Qwen3ForCausalLM")
    assert info.weight_dtype == info.kv_dtype == "bfloat16"
    assert (info.vocab_size, info.max_context, info.layers, info.hidden_size) == (300, 512, 2, 64)
    assert (info.heads, info.kv_heads, info.head_dim) == (4, 2, 16)
    assert (info.eos_token_ids, info.bos_token_id) == ((2, 7), 1)
