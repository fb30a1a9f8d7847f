"""Every family that transformers runs for us, through our runner, against transformers alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from ferrum_rpc.config import ModelSettings
from ferrum_rpc.core import FullLogits, OutputSpec, Positions, Span
from ferrum_rpc.engine.assembly.build import build_runner
from ferrum_rpc.engine.assembly.choose import choose
from ferrum_rpc.engine.operations import TorchRunner
from ferrum_rpc.errors import InvalidRequest, NotSupported
from ferrum_rpc.models.hf.describe import describe
from tests.support.adapters import ALL as ALL_PROJECTIONS
from tests.support.adapters import make_adapter, merge
from tests.support.harness import error
from tests.support.hf_families import ATTENTION_ALONE, FAMILIES, NATIVE, STATES, TINY, UNSAFE, make_family, model_type
from tests.support.rows import answered

TOKENS = np.random.default_rng(3).integers(3, TINY["vocab_size"], size=(3, 20)).astype(np.int32)
STEPS = (
    {0: 20},  # whole
    {1: 9},  # in pieces, beside others
    {1: 5, 2: 8},
    {1: 6, 2: 1},
    {2: 1},
    {2: 10},
)
ALL = OutputSpec(Positions.ALL, FullLogits())


def feed(runner: TorchRunner) -> torch.Tensor:
    """float32 [3, 20, vocab]: the logits of `TOKENS`, whole, in pieces and by single tokens."""
    done, rows = dict.fromkeys(range(len(TOKENS)), 0), {sequence: [] for sequence in range(len(TOKENS))}
    for counts in STEPS:
        spans = []
        for sequence, count in counts.items():
            start = done[sequence]
            spans.append(Span(sequence, TOKENS[sequence, start : start + count], start, ALL, create=not start))
            done[sequence] += count
        for span, columns in zip(spans, answered(runner, *spans), strict=True):
            rows[span.sequence].append(torch.from_numpy(columns["logits"]))
    runner.check()
    return torch.stack([torch.cat(rows[sequence]) for sequence in range(len(TOKENS))])


def settings(folder, **options) -> ModelSettings:
    options = {"device": "cpu", "block_size": 4, "kv_blocks": 64, "model_backend": "hf", "dtype": "float32"} | options
    return ModelSettings(str(folder), **options)


def plain_logits(model) -> torch.Tensor:
    """float32 [3, 20, vocab] of transformers, of each sequence alone."""
    with torch.inference_mode():
        return torch.cat([model(input_ids=torch.from_numpy(each)[None].long()).logits.float() for each in TOKENS])


@pytest.mark.parametrize("family", [*FAMILIES, *ATTENTION_ALONE])
def test_a_family_over_our_cache_is_transformers_alone(family, tmp_path):
    model = make_family(family)
    model.save_pretrained(tmp_path)
    runner = build_runner(settings(tmp_path))
    truth = plain_logits(model)
    assert error(feed(runner), truth.double()) <= 1e-5
    assert runner.info.parameters == sum(each.numel() for each in model.parameters())


# --- text and images --------------------------------------------------------------------------------------------------

LINEAR = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


def with_images(family: str) -> Any:
    """A random model, where it is a Gemma 3 with the rotation of the published ones."""
    if family != "gemma3":
        return make_family(family)
    return make_family(family, text_config=FAMILIES[family]["text_config"] | {"rope_parameters": LINEAR})


def renamed(folder: Path) -> Path:
    """With the tensors called as transformers calls its modules."""
    file = folder / "model.safetensors"
    tensors = {}
    for name, tensor in load_file(file).items():
        plain = name.replace("language_model.model.", "model.language_model.").replace("language_model.lm_", "lm_")
        tensors[re.sub("^(vision_tower|multi_modal_projector)", r"model.\1", plain)] = tensor
    save_file(tensors, file, {"format": "pt"})
    return folder


@pytest.mark.parametrize("family", ["gemma3", *NATIVE])
def test_the_text_part_of_a_model_with_images_is_native(family, tmp_path):
    model = with_images(family)
    model.save_pretrained(tmp_path)
    runner = build_runner(settings(tmp_path, model_backend="native"))
    assert dict(runner.device.choices)["model=native"] == "requested; images are not served"
    rows = feed(runner)
    assert error(rows, plain_logits(model).double()) <= 1e-5
    assert torch.equal(rows, feed(build_runner(settings(renamed(tmp_path), model_backend="auto"))))


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("language_model.model.layers.2.mlp.up_proj.weight", "1 unexpected .*layers.2"),
        ("audio_tower.weight", "1 unexpected .*audio_tower"),
        ("model.vision_tower.x", "1 unexpected .*model.vision_tower.x"),
    ],
)
def test_what_is_neither_text_nor_image_is_refused(name, match, tmp_path):
    make_family("gemma3").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {name: torch.zeros(4)}, file, {"format": "pt"})
    with pytest.raises(InvalidRequest, match=match):
        choose(settings(tmp_path, model_backend="native"))


@pytest.mark.parametrize("family", UNSAFE)
def test_a_family_that_would_be_wrong_is_refused(family):
    overrides, why = UNSAFE[family]
    with pytest.raises(NotSupported, match=why):
        describe({**TINY, **overrides, "model_type": model_type(family)})


def test_the_page_has_a_row_for_every_family():
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    assert [each for each in (*FAMILIES, *STATES, *NATIVE, *UNSAFE) if f"\n| {each} | " not in page] == []


# --- scalings that depend on a length ---------------------------------------------------------------------------------

LONG = np.random.default_rng(5).integers(3, TINY["vocab_size"], size=60).astype(np.int32)
SHORT = LONG[:9]
SCALED = {
    "dynamic": (
        "llama",
        {"max_position_embeddings": 32, "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}},
    ),
    "longrope": (
        "phi3",
        {
            "sliding_window": None,
            "max_position_embeddings": 64,
            "original_max_position_embeddings": 16,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0, 1.1, 1.2, 1.3],
                "long_factor": [1.5, 2.5, 4.0, 7.0],
            },
        },
    ),
}


def rows_of(runner: TorchRunner, *tokens: np.ndarray) -> list[torch.Tensor]:
    """The logits of sequences that are fed whole in one step."""
    found = answered(runner, *(Span(index, each, 0, ALL, create=True) for index, each in enumerate(tokens)))
    with runner.context():
        runner.release([*range(len(tokens))])
    return [torch.from_numpy(each["logits"]) for each in found]


def alone(model: Any, tokens: np.ndarray) -> torch.Tensor:
    """float64 [n, vocab], by transformers."""
    with torch.inference_mode():
        return model(torch.from_numpy(tokens)[None].long()).logits[0].double()


@pytest.fixture(params=SCALED)
def scaled(request, tmp_path) -> tuple[str, Any]:
    """Its name, and a model whose checkpoint is in ``tmp_path``."""
    family, overrides = SCALED[request.param]
    model = make_family(family, **overrides)
    model.save_pretrained(tmp_path)
    return request.param, model


def test_a_row_does_not_depend_on_how_long_its_neighbours_are(scaled, tmp_path):
    scaling, model = scaled
    runner = build_runner(settings(tmp_path, model_backend="auto", max_context=len(LONG)))
    assert f"of {len(LONG)} tokens" in dict(runner.device.choices)[f"rope={scaling}"]
    long, beside = rows_of(runner, LONG, SHORT)
    assert error(long, alone(model, LONG)) <= 1e-5  # its factors are those of the longest sequence
    [single] = rows_of(runner, SHORT)
    assert error(beside, single.double()) <= 1e-5
    assert error(single, alone(model, SHORT)) > 1e-3  # where transformers takes other factors


def test_a_context_that_needs_no_scaling_has_none(scaled, tmp_path):
    runner = build_runner(settings(tmp_path, max_context=16))
    assert error(rows_of(runner, SHORT)[0], alone(scaled[1], SHORT)) <= 1e-5


def test_dynamic_scaling_reaches_factor_times_the_context_where_that_is_asked_for(tmp_path):
    family, overrides = SCALED["dynamic"]
    make_family(family, **overrides).save_pretrained(tmp_path)
    assert choose(settings(tmp_path)).max_context == 32
    assert choose(settings(tmp_path, max_context=1000)).max_context == 128


@pytest.mark.parametrize(
    ("family", "targets", "backend"),
    [
        ("llama", ALL_PROJECTIONS, "hf"),
        ("qwen2_moe", ("q_proj", "o_proj"), "hf"),
        ("gpt_neox", ("query_key_value", "dense_h_to_4h"), "hf"),
        ("gemma3", ("o_proj", "up_proj"), "native"),
    ],
)
def test_adapters_are_the_model_with_merged_weights(family, targets, backend, tmp_path):
    """Behind the linear layers of transformers, and in the text part of a model with images."""
    model = with_images(family)
    model.save_pretrained(tmp_path / "model")
    plain = plain_logits(model)
    folder = make_adapter(tmp_path / "adapters" / "one", model, targets=targets)
    runner = build_runner(settings(tmp_path / "model", adapter_dir=tmp_path / "adapters", model_backend=backend))
    truth = plain_logits(merge(model, folder))
    with runner.context():
        runner.open_adapter(1, "one")
        while runner.read_adapter(1) is None:
            pass
    spans = [Span(number, TOKENS[number % 3], 0, ALL, create=True, adapter=number // 3) for number in range(6)]
    rows = [torch.from_numpy(each["logits"]) for each in answered(runner, *spans)]
    assert error(torch.stack(rows[3:]), truth.double()) <= 1e-5
    assert error(torch.stack(rows[:3]), plain.double()) <= 1e-5
    assert error(truth, plain.double()) > 0.01
