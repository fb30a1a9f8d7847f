"""Adapters that the PEFT library writes, against the PEFT library: where it is installed (`pip install --no-deps peft
accelerate psutil`; this was seen with peft 0.21.2). Elsewhere `test_adapters` computes what they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.adapters import load_adapters
from tests.support.checkpoints import make_model
from tests.support.harness import TOKENS, Executor, error, native, rounded_model

peft: Any = pytest.importorskip("peft")

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CASES: dict[str, dict[str, Any]] = {
    "rank 4": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "rank 8": {"r": 8, "lora_alpha": 3, "target_modules": ALL},
    "rank 16, rsLoRA": {"r": 16, "lora_alpha": 4, "use_rslora": True, "target_modules": "all-linear"},
    "ranks and alphas by module": {
        "r": 4,
        "target_modules": ["q_proj", "o_proj", "down_proj"],
        "rank_pattern": {"layers.1.self_attn.q_proj": 2, "down_proj": 6},
        "alpha_pattern": {"o_proj": 1, "^model.layers.0.self_attn.q_proj": 30},
    },
    "a regular expression": {"r": 5, "target_modules": r".*\.self_attn\.(q|k)_proj"},
    "one layer": {"r": 4, "target_modules": ["up_proj"], "layers_to_transform": [1], "layers_pattern": "layers"},
    "without one": {"r": 4, "target_modules": ["q_proj", "up_proj"], "exclude_modules": ["layers.0.mlp.up_proj"]},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_it_is_what_peft_computes(case, dtype, tmp_path):
    torch.manual_seed(1)
    config = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **CASES[case])
    peft.get_peft_model(make_model("qwen3"), config).save_pretrained(tmp_path / "one")
    reference = rounded_model("qwen3", dtype)
    decoder = native(reference, dtype)
    frequencies = reference.model.rotary_emb.inv_freq.clone()

    def logits(model: Any) -> torch.Tensor:
        adapted = peft.PeftModel.from_pretrained(model, tmp_path / "one").eval()
        adapted.model.model.rotary_emb.inv_freq = frequencies
        with torch.inference_mode():
            found: torch.Tensor = adapted(input_ids=torch.as_tensor(TOKENS)[None], use_cache=False).logits[0].double()
        return found

    truth = logits(rounded_model("qwen3", dtype))
    theirs = logits(reference.to(dtype))
    _, loras = decoder.take_adapters(64)
    load_adapters(tmp_path, loras)
    executor = Executor(decoder, loras=loras, adapters={0: 1})
    assert error(executor.run(TOKENS, [40]), truth) <= 2 * error(theirs, truth)
