"""Adapters beside the weights against transformers with the adapters merged into them, alone and in one batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ferrum_rpc.engine.adapters import Adapters
from ferrum_rpc.models.layout import layout
from ferrum_rpc.models.lora import Loras, TorchAdapted, TorchLoras
from tests.adapters import make_adapter, merge
from tests.numerics.harness import Executor, error, native, native_or_skip, reference_logits, rounded_model, worst

TOKENS = np.random.default_rng(7).integers(0, 300, size=40)
SPLITS = ([40], [1] * 40, [13, 9, 1, 17])

CASES: dict[str, dict[str, Any]] = {
    "all, rank 4": {},
    "rank 8, alpha 3": {"r": 8, "lora_alpha": 3},
    "rank 16, rsLoRA": {"r": 16, "use_rslora": True},
    "query and value": {"targets": ("q_proj", "v_proj")},
    "key, an odd rank": {"targets": ("k_proj",), "r": 3},
    "the MLP": {"targets": ("up_proj", "down_proj")},
    "ranks and alphas by module": {
        "ranks": {"q_proj": 2, "down_proj": 7},
        "alpha_pattern": {"v_proj": 1, "gate_proj": 16},
    },
    "one layer": {"layers_to_transform": [1]},
}


def load(folder: Path, loras: Loras, max_rank: int = 64) -> list[bytes]:
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


@pytest.mark.parametrize("case", CASES)
def test_float32_is_the_model_with_merged_weights(case: str, tmp_path: Path) -> None:
    reference = rounded_model("qwen3", torch.float32)
    folder = make_adapter(tmp_path / "a" / "one", reference, **CASES[case])
    decoder = native(reference)
    plain = reference_logits(reference, TOKENS, torch.float64)
    truth = reference_logits(merge(reference, folder), TOKENS, torch.float64)
    assert error(plain, truth) > 0.01
    _, loras = decoder.take_adapters(64)
    load(tmp_path / "a", loras)
    for split in SPLITS:
        executor = Executor(decoder, loras=loras)
        executor.adapters[0] = 1
        assert worst(executor.run(TOKENS, split), truth) <= 2e-5
    assert worst(Executor(decoder, loras=loras).run(TOKENS, [40]), plain) <= 2e-5


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("glm4", ("q_proj", "k_proj", "v_proj", "gate_up_proj")),
        ("phi3", ("qkv_proj", "down_proj")),
        ("starcoder2", ("k_proj", "c_fc", "c_proj")),
        ("cohere2", ("q_proj", "o_proj", "up_proj")),
        ("gemma3", ("q_proj", "o_proj", "down_proj")),
    ],
)
def test_families_whose_tensors_are_named_or_laid_out_otherwise(family: str, targets: tuple[str, ...], tmp_path: Path):
    reference = rounded_model(family, torch.float32)
    folder = make_adapter(tmp_path / "a" / "one", reference, targets=targets)
    decoder = native(reference)
    truth = reference_logits(merge(reference, folder), TOKENS, torch.float64)
    _, loras = decoder.take_adapters(64)
    load(tmp_path / "a", loras)
    executor = Executor(decoder, loras=loras)
    executor.adapters[0] = 1
    assert worst(executor.run(TOKENS, [13, 9, 1, 17]), truth) <= 2e-5


def bfloat16_decoder(reference: Any, *, ours: bool) -> Any:
    """Whose products are ours, or torch's."""
    if not ours:
        return native(reference, torch.bfloat16, "plain")
    return native_or_skip(reference, torch.bfloat16, "native")


@pytest.mark.parametrize("case", ["all, rank 4", "rank 16, rsLoRA", "key, an odd rank", "ranks and alphas by module"])
@pytest.mark.parametrize("how", ["native", "native, called back", "torch"])
def test_bfloat16_errs_at_most_twice_as_much_as_transformers(case: str, how: str, tmp_path: Path) -> None:
    reference = rounded_model("qwen3", torch.bfloat16)
    folder = make_adapter(tmp_path / "a" / "one", reference, dtype=torch.bfloat16, **CASES[case])
    decoder = bfloat16_decoder(reference, ours=how != "torch")
    truth = reference_logits(merge(reference, folder), TOKENS, torch.float64)
    theirs = error(reference_logits(reference, TOKENS, torch.bfloat16), truth)
    loras = taking(decoder, how)
    load(tmp_path / "a", loras)
    for split in SPLITS:
        executor = Executor(decoder, loras=loras)
        if how == "native, called back":
            executor.compute._native = None
        executor.adapters[0] = 1
        assert error(executor.run(TOKENS, split), truth) <= 2 * theirs


def taking(decoder: Any, how: str) -> Loras:
    """The decoder's adapters, by torch where that is asked for."""
    _, loras = decoder.take_adapters(64)
    if how == "torch":
        decoder._loras = loras = TorchLoras(layout(decoder.spec), decoder.dtype, decoder.device)
    elif loras.name != "native":
        pytest.skip("no kernel of ours runs here")
    return loras


def four_adapters(folder: Path, reference: Any) -> Path:
    for seed, name in enumerate(("all, rank 4", "rank 16, rsLoRA", "query and value", "the MLP")):
        make_adapter(folder / str(seed), reference, seed=seed, **CASES[name])
    return folder


STEPS = [{0: 30, 1: 3, 2: 27, 3: 1, 4: 5}, {0: 1, 1: 1, 2: 1, 3: 1, 4: 1}, {4: 26, 1: 2, 5: 40}, {0: 2, 5: 1, 3: 1}]
"""Tokens of each sequence. Sequence 0 has no adapter; 1 and 5 have the same."""


def play(executor: Executor, only: int | None = None) -> dict[int, torch.Tensor]:
    """All logits of each sequence, or of one that runs alone in the same pieces."""
    tokens, found = np.random.default_rng(3).integers(0, 300, size=(6, 80)), dict[int, list[torch.Tensor]]()
    used = dict.fromkeys(range(6), 0)
    for step in STEPS:
        spans = {each: tokens[each, used[each] : used[each] + count] for each, count in step.items()}
        spans = {each: span for each, span in spans.items() if only in (None, each)}
        used |= {each: used[each] + len(span) for each, span in spans.items()}
        if spans:
            for each, rows in executor.step(spans).items():
                found.setdefault(each, []).append(rows)
    return {each: torch.cat(rows) for each, rows in found.items()}


@pytest.mark.parametrize("how", ["native", "native, called back", "torch"])
def test_a_batch_of_several_and_the_base_is_each_alone(how: str, tmp_path: Path) -> None:
    """To the bit where the kernels are ours, as is what the base computes without any adapter there."""
    dtype = torch.float32 if how == "torch" else torch.bfloat16
    reference = rounded_model("qwen3", dtype)
    decoder = native(reference, dtype) if how == "torch" else bfloat16_decoder(reference, ours=True)
    base = play(Executor(decoder), only=0)[0]
    loras = taking(decoder, how)
    load(four_adapters(tmp_path, reference), loras)

    def executor() -> Executor:
        made = Executor(decoder, loras=loras)
        made.adapters = {1: 1, 2: 2, 3: 3, 4: 4, 5: 1}
        if how == "native, called back":
            made.compute._native = None
        return made

    together = play(executor())
    alone = {each: play(executor(), only=each)[each] for each in together}
    for each, rows in together.items():
        if how == "torch":
            torch.testing.assert_close(rows, alone[each], rtol=1e-4, atol=1e-4)
        else:
            assert torch.equal(rows, alone[each])
    if how != "torch":
        assert torch.equal(together[0], base)
    apart = play(Executor(decoder, loras=loras))
    assert all(not torch.equal(apart[each], together[each]) for each in range(1, 6))


def test_short_pieces_have_the_bits_of_single_tokens(tmp_path: Path) -> None:
    reference = rounded_model("qwen3", torch.bfloat16, head_dim=32)
    decoder = bfloat16_decoder(reference, ours=True)
    loras = taking(decoder, "native")
    load(four_adapters(tmp_path, reference), loras)
    promised = Executor(decoder, loras=loras).compute.exact_span_tokens
    assert promised == 32

    def rows(pieces: list[int]) -> torch.Tensor:
        executor = Executor(decoder, loras=loras)
        executor.adapters = {0: 2, 1: 1}
        return torch.cat([executor.run(TOKENS, pieces), executor.step({1: TOKENS})[1]])

    assert torch.equal(rows([1] * 40), rows([32, 3, 5]))


# --- what loading promises --------------------------------------------------------------------------------------------


def test_a_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    reference = rounded_model("qwen3", torch.float32)
    options: list[dict[str, Any]] = [{}, {}, {"seed": 1}, {"lora_alpha": 9}, {"targets": ("q_proj",)}]
    for number, each in enumerate(options):
        make_adapter(tmp_path / str(number), reference, **each)
    found = load(tmp_path, native(reference).take_adapters(64)[1])
    assert found[0] == found[1] and len(set(found)) == len(options) - 1 and {len(each) for each in found} == {32}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_told_of_the_memory_is_what_is_taken(dtype: torch.dtype, tmp_path: Path) -> None:
    reference = rounded_model("qwen3", dtype)
    make_adapter(tmp_path / "a" / "one", reference, r=5, targets=("q_proj", "v_proj", "gate_proj", "down_proj"))
    decoder = native(reference, dtype) if dtype == torch.float32 else bfloat16_decoder(reference, ours=True)
    _, loras = decoder.take_adapters(64)
    load(tmp_path / "a", loras)
    tensors = 0
    for each in filter(None, loras._adapters[1]):
        parts = (
            [each.a, each.b]
            if isinstance(each, TorchAdapted)
            else [*each._a, *(lot for lots in each._b.values() for lot in lots)]
        )
        assert each.nbytes == sum(tensor.nbytes for tensor in parts)
        tensors += each.nbytes
    adapters = Adapters(tmp_path / "a", loras, bytes(32), 64, 1 << 30)
    assert adapters.open(2, "one").nbytes == tensors
    adapters.drop(2)
    assert len(loras) == 1
