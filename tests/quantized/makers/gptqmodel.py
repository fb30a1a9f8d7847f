"""GPTQModel 7.5.0 writes GPTQ on a CPU, and reads it with its torch kernels.

Where there are two cores it wants GPTQMODEL_CPU_WORKERS=2; TORCHDYNAMO_DISABLE=1 saves minutes.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from tests.quantized.make import SHAPE, edit_config, finish, folder, read_config
from tests.support.checkpoints import make_model

KINDS = {
    "gptq-4": {"bits": 4, "group_size": 32, "desc_act": True, "sym": True},
    "gptq-4-asymmetric": {"bits": 4, "group_size": 16, "desc_act": False, "sym": False, "format": "gptq"},
    "gptq-4-v2": {"bits": 4, "group_size": 32, "desc_act": False, "sym": False, "format": "gptq_v2"},
    "gptq-8": {"bits": 8, "group_size": -1, "desc_act": False, "act_group_aware": False, "sym": True},
}


def make(*wanted: str) -> None:
    for name in wanted or KINDS:
        with tempfile.TemporaryDirectory() as scratch:
            original = Path(scratch) / "original"
            model = make_model("llama", **SHAPE).to(torch.float16)
            model.config.dtype = torch.float16
            model.save_pretrained(original)
            tokenizer().save_pretrained(original)
            texts = torch.randint(0, 32, (32, 64), generator=torch.Generator().manual_seed(1)).tolist()
            quantized = GPTQModel.load(str(original), QuantizeConfig(**KINDS[name]), device="cpu")
            quantized.quantize([{"input_ids": text, "attention_mask": [1] * 64} for text in texts], batch_size=1)
            made = folder(name)
            quantized.save(str(made))
        config = read_config(made)
        config["quantization_config"]["meta"].pop("offload_to_disk_path", None)
        edit_config(made, **config)
        finish(made, read(made, BACKEND.TORCH))


def tokenizer() -> PreTrainedTokenizerFast:
    """What this library wants with every model."""
    words = WordLevel({f"w{each}": each for each in range(32)}, unk_token="w0")  # noqa: S106 - no secret
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words))


def read(made: Path, backend: BACKEND) -> dict[str, torch.Tensor]:
    """Every quantized matrix, by GPTQModel."""
    model = GPTQModel.load(str(made), backend=backend, device="cpu", dtype=torch.float16).model
    return {f"{name}.weight": dequantized(each) for name, each in model.named_modules() if hasattr(each, "qweight")}


def dequantized(layer) -> torch.Tensor:
    """float32 [n, k], not rounded to the type of the scales."""
    layer.scales = layer.scales.float()
    if hasattr(layer, "dequantize_weight"):
        made = layer.dequantize_weight()
    else:
        made = dequantize_gemm(layer.qweight, layer.qzeros, layer.scales, layer.bits, layer.group_size)
    return made.float().T.contiguous()
