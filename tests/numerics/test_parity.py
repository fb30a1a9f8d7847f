"""The native decoder against transformers in float64: fp32 within 2e-5 of the logits' spread, 16 bits twice theirs.

The oracle's norms and softmax are float32 even in a float64 model (its source says so), so errors below about 5e-7 are
not ours to measure.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ferrum_rpc.engine.assembly.loading import load_model
from ferrum_rpc.models import families
from ferrum_rpc.models.decoder import Decoder
from ferrum_rpc.models.shard import Shard
from tests.numerics.ranks import BOTH, FOUR, TWO, on_ranks
from tests.support.checkpoints import CLASSES, WITHOUT_TRANSFORMERS, make_checkpoint
from tests.support.harness import (
    CPU,
    SPLITS,
    TOKENS,
    Executor,
    Oracle,
    error,
    native,
    reference_logits,
    rounded_model,
    worst,
)

ROOT = Path(__file__).parents[2]

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5, 3.0, 4.0]}
LONGROPE |= {"long_factor": [1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0]}
PARTIAL = {"partial_rotary_factor": 0.5} | {name: each[:4] for name, each in LONGROPE.items() if name != "rope_type"}
WINDOWED = {"num_hidden_layers": 3, "layer_types": ["full_attention", "sliding_attention", "full_attention"]}
CASES = {
    "llama": ("llama", {}),
    "llama every bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama yarn": ("llama", {"rope_parameters": YARN}),
    "mistral window": ("mistral", {"sliding_window": 7}),
    "ministral": ("ministral", {"sliding_window": 7} | WINDOWED),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3 tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3 as many head channels as heads": ("qwen3", {"head_dim": 4}),
    "gemma": ("gemma", {"hidden_size": 96}),
    "gemma2": ("gemma2", {"hidden_size": 96, "num_hidden_layers": 3}),
    "gemma2 without caps": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma3": ("gemma3", {"hidden_size": 96}),
    "gemma3 scaled": ("gemma3", {"rope_parameters": {"rope_type": "linear", "factor": 8.0}}),
    "phi3": ("phi3", {}),
    "phi3 partial": ("phi3", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
    "phi3 longrope, partial": ("phi3", {"rope_parameters": LONGROPE | PARTIAL, "original_max_position_embeddings": 32}),
    "granite biases": ("granite", {"attention_bias": True, "mlp_bias": True}),
    "smollm3": ("smollm3", {}),
    "olmo2": ("olmo2", {}),
    "glm4": ("glm4", {}),
    "glm4 whole heads, no biases": ("glm4", {"attention_bias": False, "partial_rotary_factor": 1.0}),
    "starcoder2": ("starcoder2", {}),
    "cohere2": ("cohere2", {}),
    "cohere2 biases": ("cohere2", {"attention_bias": True, "logit_scale": 0.7}),
}
"""Every family, and what `test_config_keys`, which changes every key of a configuration by itself, does not combine."""

SIXTEEN_BITS = ["llama every bias", "llama yarn", "mistral window", "qwen2", "qwen3", "qwen3 tied"]
SIXTEEN_BITS += ["gemma", "gemma2", "gemma3", "phi3 longrope, partial", "granite biases", "smollm3", "olmo2", "glm4"]
SIXTEEN_BITS += ["starcoder2", "cohere2"]


def test_every_family_is_in_the_tests():
    compared = {f"{prefix}ForCausalLM" for prefix in CLASSES.values()}
    assert compared | WITHOUT_TRANSFORMERS.keys() == {*families.FAMILIES}
    assert compared.isdisjoint(WITHOUT_TRANSFORMERS)
    assert all((ROOT / test).is_file() for test in WITHOUT_TRANSFORMERS.values())


@pytest.mark.parametrize("case", CASES)
def test_float32_is_the_oracle_to_2e_5_on_one_rank_and_on_two(case):
    """Whole, chunked and decoded."""
    family, overrides = CASES[case]
    reference = rounded_model(family, torch.float32, **overrides)
    oracle, decoder = Oracle(reference), native(reference)
    for ours in (*(Executor(decoder).run(TOKENS, split) for split in SPLITS), on_ranks(reference, TWO)):
        oracle.check(ours)
        assert (ours.argmax(-1) == oracle.logits.argmax(-1)).all()


@pytest.mark.parametrize(
    ("case", "whole"),
    [
        *((case, BOTH) for case in ("qwen3 tied", "gemma2", "phi3 partial", "cohere2 biases", "olmo2")),
        *((case, FOUR) for case in ("qwen3 tied", "olmo2")),
        ("qwen3 tied", Shard(0, 1, 0, 2)),
    ],
    ids=str,
)
def test_any_cut_is_the_oracle_to_2e_5(case, whole):
    family, overrides = CASES[case]
    reference = rounded_model(family, torch.float32, vocab_size=500, **overrides)
    Oracle(reference).check(on_ranks(reference, whole))


def test_mistral_with_layer_types_is_ministral_as_it_is_published(tmp_path):
    """Ministral 8B says MistralForCausalLM; transformers' AutoModel reads its list of layers nevertheless."""
    import transformers

    family, overrides = CASES["ministral"]
    folder = make_checkpoint(tmp_path, family, **overrides)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    (folder / "config.json").write_text(json.dumps(config))
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").double()
    Oracle(reference).check(Executor(load_model(folder, torch.float32, CPU)).run(TOKENS, [40]))


def test_longrope_is_frozen_for_the_context_that_is_served():
    """transformers takes the short factors where the whole batch is short: so does a server of short contexts, but one
    of long contexts takes the long ones for every sequence."""
    overrides = {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64}
    reference = rounded_model("phi3", torch.float32, **overrides)
    truth = reference_logits(reference, TOKENS, torch.float64)
    spec = native(reference).spec
    for context, same in ((64, True), (65, False), (None, False)):
        decoder = Decoder(spec.for_context(context), torch.float32, CPU)
        for name in decoder.expected_tensors():
            decoder.load(name, reference.state_dict()[name])
        assert (worst(Executor(decoder).run(TOKENS, [40]), truth) <= 2e-5) is same


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["gemma2", "granite", "cohere2"])
def test_the_largest_logit_is_that_of_the_rows(family, dtype):
    """Also where a soft cap makes several logits one."""
    decoder = native(rounded_model(family, dtype), dtype)
    hidden = torch.randn((9, 64), generator=torch.Generator().manual_seed(1)).mul(200).to(dtype)
    rows = decoder.logits(hidden)
    if family == "gemma2":
        assert (rows == rows.amax(-1, keepdim=True)).sum() > len(rows)
    assert torch.equal(decoder.argmax(hidden), rows.argmax(-1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", SIXTEEN_BITS)
def test_sixteen_bits_err_at_most_twice_as_much_as_transformers(case, dtype):
    """In bfloat16 over two ranks too."""
    family, overrides = CASES[case]
    reference = rounded_model(family, dtype, **overrides)
    oracle, decoder = Oracle(reference, dtype), native(reference, dtype)
    for split in SPLITS:
        oracle.check(Executor(decoder).run(TOKENS, split))
    if dtype == torch.bfloat16:
        oracle.check(on_ranks(reference, TWO, dtype))


@pytest.mark.parametrize("computed", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_checkpoints_of_every_plain_type_are_computed_in_every_type(source, computed, tmp_path):
    """Each weight is rounded once, from what is stored."""
    shape = {"vocab_size": 64, "num_hidden_layers": 1}
    folder, tokens = make_checkpoint(tmp_path, "qwen3", dtype=source, **shape), TOKENS[:12] % 64
    model = load_model(folder, computed, CPU)
    assert model.dtype == computed
    Oracle(rounded_model("qwen3", source, **shape), computed, tokens).check(Executor(model).run(tokens, [12]))


def test_float64_works_for_self_tests():
    reference = rounded_model("qwen3", torch.float32)
    Oracle(reference).check(Executor(native(reference, torch.float64)).run(TOKENS, [40]))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", ["llama every bias", "mistral window", "qwen3 tied"])
def test_the_decoder_on_a_gpu(case, dtype):
    family, overrides = CASES[case]
    reference = rounded_model(family, dtype, **overrides)
    truth = reference_logits(reference, TOKENS, torch.float64)
    bound = 2e-5 if dtype == torch.float32 else 2 * error(reference_logits(reference, TOKENS, dtype), truth)
    decoder = native(reference, dtype, device=torch.device("cuda"))
    for split in SPLITS:
        assert error(Executor(decoder).run(TOKENS, split), truth) <= bound
