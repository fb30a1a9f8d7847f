"""bitsandbytes 0.50.2 writes and reads them, 4 bits through transformers, and dequantizes with its own functions."""

from __future__ import annotations

import bitsandbytes
import torch
import transformers
from bitsandbytes.functional import dequantize_4bit
from transformers import BitsAndBytesConfig

from tests.quantized.make import SHAPE, edit_config, edit_tensors, finish, folder, layer_matrices
from tests.support.checkpoints import make_model

KINDS = {
    "bnb-nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "bnb-nf4-nested": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "bnb-fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
}


def make() -> None:
    original = make_model("llama", **SHAPE)
    plain = folder("plain")
    original.save_pretrained(plain)
    for name, options in KINDS.items():
        made = folder(name)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            plain, dtype=torch.float32, device_map="cpu", quantization_config=BitsAndBytesConfig(**options)
        )
        model.save_pretrained(made)
        read = transformers.AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32, device_map="cpu")
        finish(
            made,
            {
                f"{name}.weight": dequantize_4bit(each.weight.data, each.weight.quant_state)
                for name, each in read.named_modules()
                if isinstance(each, bitsandbytes.nn.Linear4bit)
            },
        )
    int8(original, made=folder("bnb-int8"))
    folder("plain")


def int8(model, made) -> None:
    """As `Linear8bitLt` saves them; transformers wants a GPU to do so."""
    model.save_pretrained(made)
    matrices = {}

    def change(tensors):
        for name, weight in layer_matrices(dict(tensors)).items():
            layer = bitsandbytes.nn.Linear8bitLt(*weight.shape[::-1], bias=False, has_fp16_weights=False)
            rounded, scales, _ = bitsandbytes.functional.int8_vectorwise_quant(weight.to(torch.float16))
            layer.weight = bitsandbytes.nn.Int8Params(rounded, requires_grad=False, has_fp16_weights=False)
            layer.weight.CB, layer.weight.SCB = rounded, scales
            module = name.removesuffix("weight")
            tensors.update({module + part: each for part, each in layer.state_dict().items()})
            matrices[name] = bitsandbytes.functional.int8_vectorwise_dequant(rounded, scales)

    edit_tensors(made, change)
    config = BitsAndBytesConfig(load_in_8bit=True).to_dict()
    edit_config(made, quantization_config=config)
    finish(made, matrices)
