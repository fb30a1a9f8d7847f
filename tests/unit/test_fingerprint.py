"""Which models are the same: those that compute the same K and V of the same tokens."""

from __future__ import annotations

import shutil
from dataclasses import replace

import torch
from safetensors.torch import load_file, save_file

from ferrum_rpc.config import ModelSettings
from ferrum_rpc.engine.assembly.build import build_runner
from ferrum_rpc.engine.assembly.source import _sample

IDENTITY = ModelSettings("identity", kv_blocks=8)


def of(settings: ModelSettings) -> bytes:
    return build_runner(settings).info.fingerprint


def test_an_identity_model_is_its_configuration() -> None:
    one = of(IDENTITY)
    assert len(one) == 32
    assert of(replace(IDENTITY, name="another name", kv_blocks=4)) == one
    assert len({one, of(replace(IDENTITY, identity_layers=3)), of(replace(IDENTITY, identity_positional=True))}) == 3


def test_a_checkpoint_is_its_configuration_its_weights_and_how_they_are_computed(checkpoint_of, tmp_path) -> None:
    folder = checkpoint_of()
    settings = ModelSettings(str(folder), dtype="float32", kv_blocks=8)
    one = of(settings)
    moved = shutil.copytree(folder, tmp_path / "moved")
    assert of(replace(settings, path=str(moved))) == one, "where it lies does not matter"
    assert of(replace(settings, dtype="bfloat16")) != one
    other = shutil.copytree(folder, tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    name = max(weights, key=lambda each: weights[each].numel())
    weights[name].view(-1)[-1] += 1
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    assert of(replace(settings, path=str(other))) != one, "the last number of a tensor"


def test_a_sample_does_not_read_whole_tensors_and_is_whole_where_they_are_small() -> None:
    small, large = torch.zeros(1024), torch.zeros(1 << 16)
    assert _sample(small) != _sample(torch.ones(1024))
    read = _sample(large)
    for at, changes in ((0, True), (1000, False), ((1 << 16) - 1, True)):
        other = large.clone()
        other[at] = 1
        assert (_sample(other) != read) is changes
