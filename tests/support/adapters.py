"""Random adapters as PEFT writes them, and what they make of a model's weights, computed here from the definition."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ferrum_rpc.engine.adapters import Adapters
from ferrum_rpc.models.layout import layout
from ferrum_rpc.models.lora import Loras
from ferrum_rpc.models.spec import ModelSpec

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PREFIX = "base_model.model."


class Weights:
    """The names and sizes of a model's matrices, for `make_adapter`: without any of its weights."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """As torch's modules have them."""
        for name, placement in layout(self._spec).items():
            yield name, torch.empty(placement.shape, device="meta")


def make_adapter(
    folder: Path,
    model: Any,
    *,
    r: int = 4,
    targets: Collection[str] = ALL,
    ranks: dict[str, int] | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    size: float = 0.3,
    **config: Any,
) -> Path:
    """Write an adapter of a transformers model, or of `Weights`: of those of its matrices whose names end with one of
    ``targets``. ``ranks``: by such endings, where they differ from ``r``. ``size``: of what it adds, in parts of the
    products. ``config`` are more fields of ``adapter_config.json``."""
    ranks = ranks or {}
    whole = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "somewhere",
        "r": r,
        "lora_alpha": 2 * r,
        "lora_dropout": 0.05,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "target_modules": list(targets),
        "modules_to_save": None,
        "rank_pattern": ranks,
        "alpha_pattern": {},
        "use_dora": False,
        "use_rslora": False,
        **config,
    }
    layers = whole.get("layers_to_transform")
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, weight in model.named_parameters():
        module = name.removesuffix(".weight")
        ending = module.rpartition(".")[2]
        if module == name or ending not in targets or (layers is not None and int(module.split(".")[2]) not in layers):
            continue
        rank = ranks.get(ending, r)
        down = torch.randn((rank, weight.shape[1]), generator=generator) / weight.shape[1] ** 0.5
        up = torch.randn((weight.shape[0], rank), generator=generator) * size / (2 * rank**0.5)
        tensors[f"{PREFIX}{module}.lora_A.weight"] = down.to(dtype)
        tensors[f"{PREFIX}{module}.lora_B.weight"] = up.to(dtype)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(whole))
    return folder


def load_adapters(folder: Path, loras: Loras, max_rank: int = 64) -> list[bytes]:
    """Load the adapters in ``folder`` by their names' order, with the numbers from 1 on. Returns their fingerprints."""
    adapters, found = Adapters(folder, loras, bytes(32), max_rank, 1 << 30), []
    for number, each in enumerate(sorted(folder.iterdir()), 1):
        facts = adapters.open(number, each.name)
        pieces = 0
        while (fingerprint := adapters.read(number)) is None:
            pieces += 1
        assert pieces == facts.pieces
        found.append(fingerprint)
    return found


def merge(model: Any, folder: Path) -> Any:
    """Add an adapter to the weights of a transformers model, in its dtype: W + scale U D. Returns the model."""
    from safetensors.torch import load_file

    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, down in tensors.items():
            if not name.endswith(".lora_A.weight"):
                continue
            module = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
            up = tensors[name.replace("lora_A", "lora_B")]
            alpha = config["alpha_pattern"].get(module.rpartition(".")[2], config["lora_alpha"])
            rank = down.shape[0]
            scale = alpha / (math.sqrt(rank) if config["use_rslora"] else rank)
            weight = parameters[f"{module}.weight"]
            weight += (scale * up.double() @ down.double()).to(weight.dtype)
    return model
