"""Latent attention and its experts (DeepSeek V2 and V3): what rows do not depend on, the cache, configurations.

`test_whole_models` compares such models with transformers.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from ferrum_rpc.attention.latent import EXPANDED_BYTES, LatentPagedAttention
from ferrum_rpc.core import AttentionSpec, LatentShape
from ferrum_rpc.engine.assembly.choose import cache_layers
from ferrum_rpc.models.expert_rows import route
from ferrum_rpc.models.latent_rows import LatentLifts
from ferrum_rpc.models.layout import held_parts, layout, parameter_count
from ferrum_rpc.models.parts.experts import Routing
from ferrum_rpc.models.spec import ModelSpec
from ferrum_rpc.models.stored_integers import IntegerFormat
from tests.numerics.whole_models import model
from tests.support.harness import Executor, Oracle, native, worst


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("experts", [6, 64])
def test_a_row_is_routed_alike_alone_and_beside_others(scores, experts):
    """Of numbers of experts that fill vectors, and that do not."""
    generator = torch.Generator().manual_seed(0)
    logits, choice = torch.randn((701, experts), generator=generator), torch.randn(experts, generator=generator)
    routing = Routing(scores, 3, 2, 1, biased=True, normed=True, scale=1.7)
    together, singly = route(logits, routing, choice), [route(row[None], routing, choice) for row in logits]
    for index, found in enumerate(together):
        assert torch.equal(found, torch.cat([each[index] for each in singly]))
    assert (together[0].diff(dim=1) > 0).all()


def test_a_token_takes_one_row_of_a_layer():
    spec = AttentionSpec(16, 1, 576, 0.1, latent=LatentShape(512, 64, 128, 128))
    [cache] = cache_layers([spec], torch.bfloat16, "auto")
    assert cache.slot_bytes == 1152
    executor = Executor(native(model(case="V3")))
    assert isinstance(executor.backend, LatentPagedAttention)
    assert [each.shape for each in executor.store.buffers] == [(3, 1, 128, 4, 1, 48)]


@pytest.mark.parametrize("case", ["V2", "V2, groups", "V3, dense, wide values"])
def test_heads_are_expanded_some_at_a_time(case, monkeypatch):
    """And a span in tiles."""
    reference = model(case=case)
    tokens = np.random.default_rng(1).integers(0, 300, size=330)
    decoder, oracle = native(reference), Oracle(reference, tokens=tokens)
    monkeypatch.setattr("ferrum_rpc.attention.latent.EXPANDED_BYTES", EXPANDED_BYTES >> 8)
    expand, together = LatentLifts.expand, set()

    def counted(lifts: LatentLifts, rows: torch.Tensor, first: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        together.add((len(rows), len(keys)))
        expand(lifts, rows, first, keys, values)

    monkeypatch.setattr(LatentLifts, "expand", counted)
    ours = Executor(decoder).run(tokens, [40, 290])
    assert worst(ours, oracle.logits) <= 1e-5
    assert together == {(40, 4), (330, 1)}


YARN_BY_40 = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "original_max_position_embeddings": 4096, "type": "yarn"}
PUBLISHED: dict[str, dict[str, Any]] = {
    "V2-Lite": {
        **{"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "q_lora_rank": None},
        **{"hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 27},
        **{"num_attention_heads": 16, "num_key_value_heads": 16, "n_routed_experts": 64, "n_shared_experts": 2},
        **{"num_experts_per_tok": 6, "n_group": 1, "topk_group": 1, "topk_method": "greedy", "norm_topk_prob": False},
        **{"first_k_dense_replace": 1, "routed_scaling_factor": 1.0, "scoring_func": "softmax", "vocab_size": 102400},
        **{
            "aux_loss_alpha": 0.001,
            "seq_aux": True,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-06,
            "bos_token_id": 100000,
        },
        "rope_scaling": YARN_BY_40 | {"mscale": 0.707, "mscale_all_dim": 0.707},
    },
    "V3": {
        **{"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "q_lora_rank": 1536},
        **{"hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61},
        **{"num_attention_heads": 128, "num_key_value_heads": 128, "n_routed_experts": 256, "n_shared_experts": 1},
        **{"num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "topk_method": "noaux_tc", "norm_topk_prob": True},
        **{"first_k_dense_replace": 3, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "vocab_size": 129280},
        **{"num_nextn_predict_layers": 1, "rms_norm_eps": 1e-06, "bos_token_id": 0, "ep_size": 1},
        "rope_scaling": YARN_BY_40 | {"mscale": 1.0, "mscale_all_dim": 1.0},
    },
}
"""What decides in the configurations that DeepSeek publishes."""
SHARED = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "moe_layer_freq": 1}
SHARED |= {"max_position_embeddings": 163840, "rope_theta": 10000, "attention_bias": False, "hidden_act": "silu"}
BILLIONS = {"V2-Lite": 15.7, "V3": 671.0}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration_is_read(name):
    spec = ModelSpec.from_config(PUBLISHED[name] | SHARED)
    assert parameter_count(spec) / 1e9 == pytest.approx(BILLIONS[name], abs=0.05)
    caches = cache_layers(spec.attention_specs, torch.bfloat16, "auto")
    assert sum(each.slot_bytes for each in caches) == 1152 * len(spec.layers)
    mscale = 0.1 * PUBLISHED[name]["rope_scaling"]["mscale_all_dim"] * math.log(40) + 1
    assert spec.attention_specs[0].scale == pytest.approx(192**-0.5 * mscale**2)
    assert spec.ropes[0].attention_factor == 1.0


def test_what_lifts_latents_and_what_scores_experts_is_never_held_as_integers():
    placements = layout(native(model(case="V3")).spec)
    form = IntegerFormat(8, 64)
    held = held_parts(placements, dict.fromkeys(placements, form))
    left = {each.parameter for each in placements.values() if len(each.shape) == 2} - held.keys()
    assert {name.split(".")[2] for name in left if name.startswith("layers.")} == {"lifts", "router"}
    assert "layers.1.7.down.weight" in held
