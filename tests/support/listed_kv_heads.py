"""DeciLM: a Llama whose configuration lists the KV heads of each layer. transformers has no such class: the oracle is
its Llama with the attention of other ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.support.checkpoints import make_model

LISTED = (4, 1, 2, 4)
"""KV heads of each layer, of 4 heads."""

FIELD = "num_key_value_heads_per_layer"


def make_deci(listed: tuple[int, ...] = LISTED, **overrides: Any) -> Any:
    """A random model, float32, eager attention, in evaluation mode."""
    shape = {"num_hidden_layers": len(listed)} | overrides
    models = {heads: make_model("llama", **shape, num_key_value_heads=heads) for heads in dict.fromkeys(listed)}
    model = models[listed[0]]
    for index, heads in enumerate(listed):
        model.model.layers[index].self_attn = models[heads].model.layers[index].self_attn
    model.config.__class__ = type("DeciLMConfig", (type(model.config),), {"model_type": "deci"})
    model.__class__ = type("DeciLMForCausalLM", (type(model),), {})
    setattr(model.config, FIELD, [*listed])
    return model


def make_deci_checkpoint(path: Path, listed: tuple[int, ...] = LISTED, **overrides: Any) -> Path:
    """Write a random checkpoint to ``path`` and return it."""
    model = make_deci(listed, **overrides)
    model.config.dtype = torch.float32
    model.save_pretrained(path)
    return path
