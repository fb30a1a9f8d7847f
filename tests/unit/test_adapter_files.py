"""Adapters' folders: what is read, and what is refused by its name before anything is allocated."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ferrum_rpc.engine.adapters import Adapters
from ferrum_rpc.errors import AdapterUnknown, ExecutorError, InvalidRequest, NotSupported
from ferrum_rpc.models.layout import layout
from ferrum_rpc.models.lora import Loras, TorchLoras
from ferrum_rpc.models.spec import ModelSpec
from tests.support.adapters import PREFIX, Weights, make_adapter
from tests.support.checkpoints import TINY

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
SPEC = ModelSpec.from_config({**TINY, "architectures": ["LlamaForCausalLM"], "model_type": "llama"})
QUERY = f"{PREFIX}model.layers.0.self_attn.q_proj"


def made(folder: Path, **options: Any) -> Path:
    return make_adapter(folder / "one", Weights(SPEC), **options)


def loras() -> Loras:
    return TorchLoras(layout(SPEC), torch.float32, torch.device("cpu"))


def load(folder: Path, name: str = "one", into: Loras | None = None) -> bytes:
    adapters = Adapters(folder, into or loras(), bytes(32), 16, 1 << 30)
    adapters.open(1, name)
    while (found := adapters.read(1)) is None:
        pass
    return found


def edit(folder: Path, **changes: Any) -> None:
    file = folder / "one" / CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    file = folder / "one" / TENSORS
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def refused(folder: Path, error: type[ExecutorError], match: str, name: str = "one") -> None:
    """And nothing was allocated; the message has no path."""
    into = loras()
    with pytest.raises(error, match=match) as caught:
        load(folder, name, into)
    assert str(folder) not in caught.value.message
    if caught.value.message.count("NaN") == 0:
        assert not into


# --- the configuration ------------------------------------------------------------------------------------------------

KEYS: dict[str, tuple[dict[str, Any], type[ExecutorError], str]] = {
    "DoRA": ({"use_dora": True}, NotSupported, "use_dora.*with PEFT [^-]*$"),
    "PiSSA": ({"init_lora_weights": "pissa_niter_4"}, NotSupported, "init_lora_weights.*convert it with PEFT"),
    "OLoRA": ({"init_lora_weights": "olora"}, NotSupported, "init_lora_weights.*convert it with PEFT"),
    "LoftQ": ({"init_lora_weights": "loftq"}, NotSupported, "init_lora_weights.*convert it with PEFT"),
    "whole modules": ({"modules_to_save": ["lm_head"]}, NotSupported, "modules_to_save"),
    "biases": ({"bias": "lora_only"}, NotSupported, "bias"),
    "biases of its own": ({"lora_bias": True}, NotSupported, "lora_bias"),
    "turned matrices": ({"fan_in_fan_out": True}, NotSupported, "fan_in_fan_out"),
    "layers that are repeated": ({"layer_replication": [[0, 1]]}, NotSupported, "layer_replication"),
    "tokens": ({"trainable_token_indices": [3]}, NotSupported, "trainable_token_indices"),
    "experts": ({"target_parameters": ["mlp.experts.down_proj"]}, NotSupported, "parameters: experts are not adapted"),
    "experts, as PEFT rewrites them": (
        {"target_parameters": ["down_proj", "gate_up_proj"], "rank_pattern": {r".*\.gate_up_proj": 8}},
        NotSupported,
        "experts are not adapted: down_proj, gate_up_proj; .*merge_and_unload",
    ),
    "a router": ({"target_parameters": ["gate.weight"]}, NotSupported, "target_parameters: .* is not supported"),
    "a late adapter": ({"alora_invocation_tokens": [1]}, NotSupported, "alora_invocation_tokens"),
    "an unknown key": ({"swiglu_scale": 2}, NotSupported, "swiglu_scale"),
    "another method": ({"peft_type": "IA3"}, NotSupported, "peft_type"),
    "no method": ({"peft_type": None}, InvalidRequest, "peft_type"),
    "no rank": ({"r": None}, InvalidRequest, r"\br\b"),
    "a rank of 0": ({"r": 0}, InvalidRequest, r"\br\b"),
    "a rank that is a flag": ({"r": True}, InvalidRequest, r"\br\b"),
    "an alpha that is no number": ({"lora_alpha": "8"}, InvalidRequest, "lora_alpha"),
    "rsLoRA that is no flag": ({"use_rslora": "yes"}, InvalidRequest, "use_rslora"),
    "another rank": ({"r": 5}, InvalidRequest, "shapes"),
    "a rank above the limit": ({"r": 17}, InvalidRequest, "max-adapter-rank"),
    "a rank of a module": ({"rank_pattern": {"q_proj": 2}}, InvalidRequest, "shapes"),
    "a pattern that is run": ({"rank_pattern": {"(.+)+q_proj": 2}}, NotSupported, "regular expression"),
    "an alpha of a module": ({"alpha_pattern": {"q_proj": "2"}}, InvalidRequest, "q_proj"),
    "modules that are no names": ({"target_modules": [3]}, InvalidRequest, "target_modules"),
    "a pattern that is none": ({"target_modules": "(q_proj"}, InvalidRequest, "target_modules: .* not a valid regular"),
    "a pattern that is long": ({"exclude_modules": "a" * 5000}, InvalidRequest, "exclude_modules: .* longer"),
    "modules that have no tensors": ({"target_modules": ["q_proj", "v_proj", "o_proj"]}, InvalidRequest, "no tensors"),
    "tensors of no such module": ({"target_modules": ["q_proj"]}, InvalidRequest, "do not name"),
    "layers that are no numbers": ({"layers_to_transform": ["0"]}, InvalidRequest, "layers_to_transform"),
    "tensors of another layer": ({"layers_to_transform": [0]}, InvalidRequest, "do not name"),
}


@pytest.mark.parametrize("case", KEYS)
def test_keys_that_are_wrong_or_not_done_are_refused_by_name(case: str, tmp_path: Path) -> None:
    changes, error, match = KEYS[case]
    made(tmp_path, targets=("q_proj", "v_proj"))
    edit(tmp_path, **changes)
    refused(tmp_path, error, match)


def test_what_names_modules_by_a_pattern_is_what_its_tensors_are(tmp_path: Path) -> None:
    made(tmp_path, targets=("q_proj", "v_proj"))
    found = load(tmp_path)
    for more in (
        {"target_modules": r".*\.(q|v)_proj"},
        {"target_modules": "all-linear", "exclude_modules": ["o_proj"]},
        {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [0, 1], "layers_pattern": "layers"},
        {"target_modules": ["self_attn.q_proj", "v_proj"], "eva_config": {"rho": 2.0}, "init_lora_weights": "eva"},
    ):
        edit(tmp_path, **more)
        assert load(tmp_path) == found


# --- the files --------------------------------------------------------------------------------------------------------


def change_tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict[str, Any]], object]:
    return lambda tensors: tensors.update({name: change(tensors[name]).contiguous()})


def added(name: str, *shape: int) -> Callable[[dict[str, Any]], object]:
    return lambda tensors: tensors.update({name: torch.zeros(shape)})


EXPERTS = "mlp.experts", "mlp.experts.base_layer", "block_sparse_moe.experts.3.w1", "block_sparse_moe.input_linear"
TENSORS_CASES: dict[str, tuple[Callable[[dict[str, Any]], object], type[ExecutorError], str]] = {
    "one of two": (lambda tensors: tensors.pop(f"{QUERY}.lora_B.weight"), InvalidRequest, "one of the two"),
    "none": (dict.clear, InvalidRequest, "no tensors"),
    "another width": (change_tensor(f"{QUERY}.lora_A.weight", lambda each: each[:, :-1]), InvalidRequest, "shapes"),
    "more rows": (change_tensor(f"{QUERY}.lora_B.weight", lambda each: each.repeat(2, 1)), InvalidRequest, "shapes"),
    "turned": (change_tensor(f"{QUERY}.lora_A.weight", lambda each: each.T), InvalidRequest, "shapes"),
    "integers": (change_tensor(f"{QUERY}.lora_A.weight", lambda each: each.to(torch.int8)), NotSupported, "int8"),
    "NaN": (change_tensor(f"{QUERY}.lora_A.weight", lambda each: each / 0), InvalidRequest, "NaN"),
    "an embedding": (added(f"{PREFIX}model.embed_tokens.lora_embedding_A", 4, 300), NotSupported, "embed_tokens"),
    "a head": (added(f"{PREFIX}lm_head.lora_A.weight", 4, 64), NotSupported, "lm_head"),
    **{
        name: (added(f"{PREFIX}model.layers.0.{name}.lora_A.weight", 4, 64), NotSupported, "experts are not adapted")
        for name in EXPERTS
    },
    "a magnitude": (added(f"{QUERY}.lora_magnitude_vector", 64), NotSupported, "lora_magnitude_vector"),
    "a layer that there is not": (added(QUERY.replace("0", "9") + ".lora_A.weight", 4, 64), NotSupported, "layers.9"),
}


@pytest.mark.parametrize("case", TENSORS_CASES)
def test_tensors_that_do_not_fit_are_refused(case: str, tmp_path: Path) -> None:
    change, error, match = TENSORS_CASES[case]
    made(tmp_path, targets=("q_proj", "v_proj"))
    rewrite(tmp_path, change)
    refused(tmp_path, error, match)


def test_files_that_are_missing_broken_or_pickled_are_refused(tmp_path: Path) -> None:
    folder = made(tmp_path)
    config, tensors = (folder / CONFIG).read_text(), (folder / TENSORS).read_bytes()
    (folder / TENSORS).write_bytes(tensors[:-9])
    refused(tmp_path, InvalidRequest, TENSORS)
    (folder / TENSORS).unlink()
    refused(tmp_path, InvalidRequest, "missing")
    (folder / "adapter_model.bin").write_bytes(b"")
    refused(tmp_path, NotSupported, "pickled")
    (folder / TENSORS).write_bytes(tensors)
    for text in ("", "[]", '{"r": 1, "r": 2}', "{" * 9000, '{"r": NaN}'):
        (folder / CONFIG).write_text(text)
        refused(tmp_path, InvalidRequest, CONFIG)
    (folder / CONFIG).unlink()
    refused(tmp_path, InvalidRequest, "missing")
    (folder / CONFIG).write_text(config)
    load(tmp_path)


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    folder = made(tmp_path)
    content = (folder / TENSORS).read_bytes()
    other = content.replace(b'"F32"', b'"I32"', 1)
    renamed, headless = content.replace(b"lora_A", b"lora_C"), b"\xff" * 8 + content[8:]
    for changed in (content[:-4], content[:5], b"", other, headless, renamed):
        into = loras()
        adapters = Adapters(tmp_path, into, bytes(32), 16, 1 << 30)
        adapters.open(1, "one")
        (folder / TENSORS).write_bytes(changed)
        with pytest.raises(InvalidRequest, match="changed while it was read"):
            while adapters.read(1) is None:
                pass
        adapters.drop(1)
        assert not into
        (folder / TENSORS).write_bytes(content)


def test_a_name_is_a_folder_of_the_adapter_folder_and_nothing_else(tmp_path: Path) -> None:
    root = tmp_path / "adapters"
    made(root)
    made(tmp_path / "outside")
    (root / "file").write_text("")
    paths = ("", ".", "..", "../outside/one", "one/../one", "/", str(root / "one"))
    for name in (*paths, "none", "file", "x" * 5000, "\0"):
        with pytest.raises(AdapterUnknown):
            load(root, name)
    (root / "leads out").symlink_to(tmp_path / "outside" / "one")
    refused(root, InvalidRequest, "link", "leads out")
    (root / "two").mkdir()
    (root / "two" / CONFIG).symlink_to(root / "one" / CONFIG)
    refused(root, InvalidRequest, "link", "two")
    (root / "inside").symlink_to(root / "one")
    assert load(root, "inside") == load(root)
    if hasattr(os, "mkfifo"):  # opening one would hang
        (root / "three").mkdir()
        (root / "three" / CONFIG).write_text((root / "one" / CONFIG).read_text())
        os.mkfifo(root / "three" / TENSORS)
        refused(root, InvalidRequest, "regular file", "three")
