"""FP8 in blocks as DeepSeek publishes it: no library writes it on a CPU, transformers 5.23.0 reads it.

The blocks here are smaller than the usual 128, so that a tiny matrix has several.
"""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from torch.nn.functional import pad

from tests.quantized.make import SHAPE, edit_config, edit_tensors, finish, folder, layer_matrices
from tests.support.checkpoints import make_model

LARGEST = torch.finfo(torch.float8_e4m3fn).max


def make() -> None:
    made = folder("fp8-block")
    make_model("llama", **SHAPE).save_pretrained(made)
    round_in_blocks(made, 16, 32)
    read = transformers.AutoModelForCausalLM.from_pretrained(
        made,
        dtype=torch.float32,
        quantization_config=transformers.FineGrainedFP8Config(weight_block_size=(16, 32), dequantize=True),
    )
    finish(made, layer_matrices(read.state_dict()))
    per_tensor("fp8-tensor")


def round_in_blocks(made: Path, high: int, wide: int) -> None:
    """Round the matrices of the layers of a checkpoint of one file."""

    def change(tensors):
        for name, weight in layer_matrices(dict(tensors)).items():
            rows, width = weight.shape
            padded = pad(weight.float(), (0, -width % wide, 0, -rows % high))
            parts = padded.view(padded.shape[0] // high, high, -1, wide)
            scales = parts.abs().amax((1, 3)) / LARGEST
            rounded = (parts / scales[:, None, :, None]).view(padded.shape)[:rows, :width]
            tensors[name] = rounded.to(torch.float8_e4m3fn)
            tensors[name + "_scale_inv"] = scales

    edit_tensors(made, change)
    section = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [high, wide]}
    edit_config(made, quantization_config=section)


def per_tensor(kind: str) -> None:
    """As AutoFP8 wrote it."""
    made, matrices = folder(kind), {}
    make_model("llama", **SHAPE).save_pretrained(made)

    def change(tensors):
        for name, weight in layer_matrices(dict(tensors)).items():
            scale = weight.abs().amax() / LARGEST
            tensors[name] = (weight / scale).to(torch.float8_e4m3fn)
            tensors[name + "_scale"] = scale
            tensors[name.removesuffix("weight") + "input_scale"] = torch.tensor(0.01)
            matrices[name] = tensors[name].float() * scale

    edit_tensors(made, change)
    edit_config(
        made, quantization_config={"activation_scheme": "static", "quant_method": "fp8", "ignored_layers": ["lm_head"]}
    )
    finish(made, matrices)
