"""Adapters beside the weights against transformers with the adapters merged into them, alone and in one batch, on one
rank and on several."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ferrum_rpc.engine.adapters import Adapters
from ferrum_rpc.models.adapter_config import LowRank
from ferrum_rpc.models.decoder import Decoder
from ferrum_rpc.models.layout import TensorPlacement, layout
from ferrum_rpc.models.linear import LinearFactory, PlainLinear
from ferrum_rpc.models.lora import Loras, TorchLoras
from ferrum_rpc.models.native_linear import PairFactory
from ferrum_rpc.models.native_lora import NativeLoras
from ferrum_rpc.usage import ISA_VARIABLE
from tests.numerics.ranks import BOTH, FOUR, TWO, on_ranks
from tests.numerics.whole_models import native_of
from tests.support.adapters import Weights, load_adapters, make_adapter, merge
from tests.support.harness import (
    CPU,
    SPLITS,
    TOKENS,
    Executor,
    Oracle,
    error,
    made_or_skip,
    native,
    random_decoder,
    rounded_model,
)
from tests.support.inside import held_bytes

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


@pytest.mark.parametrize("case", CASES)
def test_float32_is_the_model_with_merged_weights(case, tmp_path):
    reference = rounded_model("qwen3", torch.float32)
    folder = make_adapter(tmp_path / "one", reference, **CASES[case])
    decoder, plain = native(reference), Oracle(reference)
    merged = Oracle(merge(reference, folder))
    assert error(plain.logits, merged.logits) > 0.01
    _, loras = decoder.take_adapters(64)
    load_adapters(tmp_path, loras)
    for split in SPLITS:
        merged.check(Executor(decoder, loras=loras, adapters={0: 1}).run(TOKENS, split))
    plain.check(Executor(decoder, loras=loras).run(TOKENS, [40]))


CUT: dict[str, tuple[str, dict[str, Any]]] = {
    "all, an odd rank": ("qwen3", {"r": 3}),
    "key, of the last layer": ("qwen3", {"targets": ("k_proj",), "layers_to_transform": [1]}),
    "q, k and v in one, down": ("phi3", {"targets": ("qkv_proj", "down_proj"), "r": 8, "use_rslora": True}),
    "gate and up in one": ("glm4", {"targets": ("q_proj", "k_proj", "gate_up_proj")}),
    "biases, no gate": ("starcoder2", {"targets": ("v_proj", "o_proj", "c_fc", "c_proj")}),
    "norms on both sides": ("gemma3", {"targets": ("q_proj", "o_proj", "down_proj")}),
    "pairs that turn": ("cohere2", {"targets": ("q_proj", "k_proj", "o_proj", "up_proj")}),
}


@pytest.mark.parametrize(
    ("case", "cut"),
    [*((case, BOTH) for case in CUT), ("all, an odd rank", FOUR), ("q, k and v in one, down", FOUR)],
    ids=str,
)
def test_float32_on_ranks_is_the_model_with_merged_weights(case, cut, tmp_path):
    family, options = CUT[case]
    reference = rounded_model(family, torch.float32, vocab_size=500)
    folder = make_adapter(tmp_path / "one", reference, **options)
    ours, without = (on_ranks(reference, cut, adapters=each) for each in (tmp_path, None))
    merged = Oracle(merge(reference, folder))
    merged.check(ours)
    assert error(without, merged.logits) > 0.01


@pytest.mark.parametrize(("family", "cut"), [("qwen3", TWO), ("qwen3", FOUR), ("cohere2", BOTH)], ids=str)
def test_bfloat16_on_ranks_errs_at_most_twice_as_much_as_transformers(family, cut, tmp_path):
    reference = rounded_model(family, torch.bfloat16, vocab_size=500)
    folder = make_adapter(tmp_path / "one", reference, r=16, dtype=torch.bfloat16)
    ours = on_ranks(reference, cut, torch.bfloat16, tmp_path)
    Oracle(merge(reference, folder), torch.bfloat16).check(ours)


ONE_CALL = ("native", "native in avx2")
HOW = pytest.mark.parametrize("how", [*ONE_CALL, "native, called back", "torch"])

Prepare = Callable[..., tuple[Any, Loras]]


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> Prepare:
    """Makes a decoder and what holds its adapters: products and adapters are ours, or torch's. Without a ``reference``
    its weights are random."""

    def prepare(how: str, reference: Any = None, dtype: torch.dtype = torch.bfloat16) -> tuple[Any, Loras]:
        def made(linear: LinearFactory) -> Decoder:
            if reference is None:
                return random_decoder("qwen3", dtype, linear)
            return native_of(reference, lambda: linear, dtype)

        if how == "torch":
            decoder = made(PlainLinear)
            return decoder, TorchLoras(layout(decoder.spec), dtype, decoder.device)
        if how.endswith("avx2"):
            monkeypatch.setenv(ISA_VARIABLE, "avx2")
        decoder = made(made_or_skip(PairFactory))
        _, loras = decoder.take_adapters(64)
        if loras.name != "native":
            pytest.skip("no kernel of ours runs here")
        return decoder, loras

    return prepare


@HOW
@pytest.mark.parametrize("case", ["all, rank 4", "rank 16, rsLoRA", "key, an odd rank", "ranks and alphas by module"])
def test_bfloat16_errs_at_most_twice_as_much_as_transformers(case, how, tmp_path, prepared):
    reference = rounded_model("qwen3", torch.bfloat16)
    folder = make_adapter(tmp_path / "one", reference, dtype=torch.bfloat16, **CASES[case])
    decoder, loras = prepared(how, reference)
    merged = Oracle(merge(reference, folder), torch.bfloat16)
    load_adapters(tmp_path, loras)
    for split in SPLITS:
        executor = Executor(decoder, loras=loras, adapters={0: 1}, native=how in ONE_CALL)
        merged.check(executor.run(TOKENS, split))


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


@HOW
def test_a_batch_of_several_and_the_base_is_each_alone(how, tmp_path, prepared):
    """To the bit where the kernels are ours, as is what the base computes without any adapter there."""
    decoder, loras = prepared(how, dtype=torch.float32 if how == "torch" else torch.bfloat16)
    base = play(Executor(decoder), only=0)[0]
    load_adapters(four_adapters(tmp_path, Weights(decoder.spec)), loras)

    def played(only: int | None = None) -> dict[int, torch.Tensor]:
        used = {1: 1, 2: 2, 3: 3, 4: 4, 5: 1}
        return play(Executor(decoder, loras=loras, adapters=used, native=how in ONE_CALL), only)

    together = played()
    for each, rows in together.items():
        alone = played(only=each)[each]
        if how == "torch":
            torch.testing.assert_close(rows, alone, rtol=1e-4, atol=1e-4)
        else:
            assert torch.equal(rows, alone)
    if how != "torch":
        assert torch.equal(together[0], base)
    apart = play(Executor(decoder, loras=loras))
    assert all(not torch.equal(apart[each], together[each]) for each in range(1, 6))


@pytest.mark.parametrize("how", ONE_CALL)
def test_short_pieces_have_the_bits_of_single_tokens(how, tmp_path, prepared):
    reference = rounded_model("qwen3", torch.bfloat16, head_dim=32)
    decoder, loras = prepared(how, reference)
    load_adapters(four_adapters(tmp_path, reference), loras)
    assert Executor(decoder, loras=loras).compute.exact_span_tokens == 32

    def rows(pieces: list[int]) -> torch.Tensor:
        executor = Executor(decoder, loras=loras, adapters={0: 2, 1: 1})
        return torch.cat([executor.run(TOKENS, pieces), executor.step({1: TOKENS})[1]])

    assert torch.equal(rows([1] * 40), rows([32, 3, 5]))


WIDE_IN, PARTS = 1030, {"query": (40, 70), "value": (33, 3)}
"""Columns of a product, and rows and rank of two matrices of it: no whole number of vectors, of panels, of groups of
panels, or of what AVX2 widens at once."""


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("count", [1, 2, 3, 31])
def test_a_product_of_any_size_is_that_of_float64_and_no_rows_depend_on_others(count):
    starts = {"query": 0, "value": PARTS["query"][0]}
    table = {
        f"{name}.weight": TensorPlacement("qv", (rows, WIDE_IN), starts[name], (rows, WIDE_IN), adaptable=True)
        for name, (rows, _) in PARTS.items()
    }
    loras = made_or_skip(lambda: NativeLoras(table, torch.bfloat16, CPU))
    adapter = [LowRank(name, rank, 1.0, name, name) for name, (_, rank) in PARTS.items()]
    loras.add(1, loras.changes(adapter))
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * scale).bfloat16()

    x, before = draw(count, 2 * WIDE_IN)[:, :WIDE_IN], draw(count, 73)
    expected = before.double()
    for each in adapter:
        rows, rank = PARTS[each.module]
        a, b = draw(rank, WIDE_IN, scale=WIDE_IN**-0.5), draw(rows, rank, scale=rank**-0.5)
        loras.put(1, each, a, b)
        first = starts[each.module]
        expected[:, first : first + rows] += (x.double() @ a.double().T).bfloat16().double() @ b.double().T

    def found(first: int, last: int) -> torch.Tensor:
        y = before[first:last].clone()
        loras.step([(1, 0, last - first)], last - first).add(0, x[first:last], y)
        return y

    whole = found(0, count)
    torch.testing.assert_close(whole.double(), expected, rtol=2**-8, atol=0.01)
    assert torch.equal(torch.cat([found(row, row + 1) for row in range(count)]), whole)


# --- what loading promises --------------------------------------------------------------------------------------------


def test_a_fingerprint_is_of_the_content(tmp_path):
    reference = rounded_model("qwen3", torch.float32)
    options: list[dict[str, Any]] = [{}, {}, {"seed": 1}, {"lora_alpha": 9}, {"targets": ("q_proj",)}]
    for number, each in enumerate(options):
        make_adapter(tmp_path / str(number), reference, **each)
    found = load_adapters(tmp_path, native(reference).take_adapters(64)[1])
    assert found[0] == found[1] and len(set(found)) == len(options) - 1 and {len(each) for each in found} == {32}


@pytest.mark.parametrize("how", ["native", "torch"])
def test_what_is_told_of_the_memory_is_what_is_taken(how, tmp_path, prepared):
    reference = rounded_model("qwen3", torch.bfloat16)
    make_adapter(tmp_path / "one", reference, r=5, targets=("q_proj", "v_proj", "gate_proj", "down_proj"))
    _, loras = prepared(how, reference)
    load_adapters(tmp_path, loras)
    adapters, taken = Adapters(tmp_path, loras, bytes(32), 64, 1 << 30), held_bytes(loras)
    assert adapters.open(2, "one").nbytes == taken > 0
    adapters.drop(2)
    assert held_bytes(loras) == taken
