"""compressed-tensors 0.20.0 writes and reads them. Scales are those of the extremes, as its observers compute them."""

from __future__ import annotations

import torch
import transformers
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus, apply_quantization_config
from compressed_tensors.quantization.utils import calculate_qparams
from transformers.utils.quantization_config import CompressedTensorsConfig

from tests.quantized.make import SHAPE, finish, folder, layer_matrices
from tests.support.checkpoints import make_model

INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
PER_TOKEN = {"strategy": "token", "dynamic": True}
MXFP4 = {"strategy": "group", "group_size": 32, "num_bits": 4, "type": "float", "scale_dtype": "torch.uint8"}
KINDS = {
    "ct-w8a8": ({"strategy": "channel"} | INT8, INT8 | PER_TOKEN),
    "ct-w8a8-asymmetric": ({"strategy": "tensor"} | INT8 | {"symmetric": False}, INT8 | PER_TOKEN),
    "ct-w4a16": ({"strategy": "group", "group_size": 32, "num_bits": 4, "type": "int", "symmetric": True}, None),
    "ct-w4a16-asymmetric": ({"strategy": "group", "group_size": 16, "num_bits": 4, "symmetric": False}, None),
    "ct-w8a16": ({"strategy": "channel"} | INT8, None),
    "ct-fp8-dynamic": ({"strategy": "channel"} | FP8, FP8 | PER_TOKEN),
    "ct-fp8-static": ({"strategy": "tensor"} | FP8, FP8 | {"strategy": "tensor", "dynamic": False}),
    "ct-fp8-block": (
        {"strategy": "block", "block_structure": [48, 24]} | FP8,
        FP8 | {"strategy": "group", "group_size": 32, "dynamic": True},
    ),
    "ct-w4a16-mxfp4": (MXFP4 | {"zp_dtype": "torch.uint8"}, None),
}


def make() -> None:
    for name, (weights, activations) in KINDS.items():
        model = make_model("llama", **SHAPE)
        model.config.dtype = torch.float32
        group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
        config = QuantizationConfig(config_groups={"group_0": group}, ignore=["lm_head"])
        apply_quantization_config(model, config)
        for module in model.modules():
            scheme = getattr(module, "quantization_scheme", None)
            if scheme is None:
                continue
            module.quantization_status = QuantizationStatus.FROZEN
            low, high = extremes(module.weight.detach(), scheme.weights)
            scale, zero = calculate_qparams(low, high, scheme.weights)
            module.weight_scale.data.copy_(scale.view(module.weight_scale.shape))
            if hasattr(module, "weight_zero_point"):
                module.weight_zero_point.data.copy_(zero.view(module.weight_zero_point.shape))
            if hasattr(module, "input_scale"):
                module.input_scale.data.fill_(0.01)
        made = folder(name)
        compressor = ModelCompressor.from_pretrained_model(model)
        compressor.compress_model(model)
        model.save_pretrained(made)
        compressor.update_config(made)
        read = transformers.AutoModelForCausalLM.from_pretrained(
            made, dtype=torch.float32, quantization_config=CompressedTensorsConfig(run_compressed=False)
        )
        finish(made, layer_matrices(read.state_dict()))


def extremes(weight: torch.Tensor, scheme) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the largest number of each part that shares a scale."""
    if scheme.strategy == "tensor":
        return weight.min().view(1), weight.max().view(1)
    if scheme.strategy == "channel":
        return weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    if scheme.strategy == "group":
        parts = weight.view(len(weight), -1, scheme.group_size)
        return parts.amin(2), parts.amax(2)
    high, wide = scheme.block_structure
    blocks = [rows.split(wide, 1) for rows in weight.split(high, 0)]
    return tuple(torch.tensor([[f(part) for part in row] for row in blocks]) for f in (torch.min, torch.max))
