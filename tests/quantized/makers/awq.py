"""AWQ as AutoAWQ packs it for its "gemm" kernels: nothing writes it on a CPU, GPTQModel 7.5.0 reads it."""

from __future__ import annotations

import torch
from gptqmodel import BACKEND

from tests.quantized.make import SHAPE, edit_config, edit_tensors, finish, folder, layer_matrices
from tests.quantized.makers.gptqmodel import read, tokenizer
from tests.support.checkpoints import make_model

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight columns stand in a word, lowest bits first."""


def make() -> None:
    quantized("awq-4", 32)
    quantized("awq-4-whole", 64)


def quantized(kind: str, size: int) -> None:
    made = folder(kind)
    model = make_model("llama", **SHAPE).to(torch.float16)
    model.config.dtype = torch.float16
    model.save_pretrained(made)
    tokenizer().save_pretrained(made)

    def change(tensors):
        for name, weight in layer_matrices(dict(tensors)).items():
            groups = tensors.pop(name).float().view(len(weight), -1, size)
            low, high = groups.amin(2), groups.amax(2)
            scales = ((high - low) / 15).half()
            zeros = (-low / scales).round().clamp(0, 15)
            numbers = (groups / scales[..., None] + zeros[..., None]).round().clamp(0, 15).view(weight.shape)
            module = name.removesuffix("weight")
            tensors[module + "qweight"] = packed(numbers.T)
            tensors[module + "qzeros"] = packed(zeros.T)
            tensors[module + "scales"] = scales.T

    edit_tensors(made, change)
    edit_config(
        made,
        quantization_config={
            "bits": 4,
            "group_size": size,
            "modules_to_not_convert": None,
            "quant_method": "awq",
            "version": "gemm",
            "zero_point": True,
        },
    )
    finish(made, read(made, BACKEND.TORCH_AWQ))


def packed(numbers: torch.Tensor) -> torch.Tensor:
    """int32 [k, n / 8] of [k, n]."""
    parts = numbers.to(torch.int64).view(len(numbers), -1, 8)
    words = sum(parts[..., column] << 4 * place for place, column in enumerate(ORDER))
    return words.to(torch.int32)
