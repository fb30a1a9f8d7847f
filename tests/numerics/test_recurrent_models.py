"""Whole models with recurrent layers (Qwen3.5) against transformers, and what their rows do not depend on.

In float32 the root mean square of the error is at most 3e-6 of the logits' spread, in 16 bits at most twice that of
transformers, for sequences that are fed whole, in chunks, side by side, by single tokens, and with rejected drafts. The
bits of a row depend on its sequence alone where products and row operations are our kernels.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ferrum_rpc.core import RecurrentShape
from ferrum_rpc.engine.assembly.loading import load_model
from ferrum_rpc.errors import NotSupported
from ferrum_rpc.models.base import StepInputs
from ferrum_rpc.models.decoder import Decoder
from ferrum_rpc.models.families import FAMILIES
from ferrum_rpc.models.footprint import DecoderBuild, weight_bytes
from ferrum_rpc.models.fused_ops_choice import select_fused_ops
from ferrum_rpc.models.linear import LinearFactory, PlainLinear
from ferrum_rpc.models.native_linear import ByteFactory, NibbleFactory, PairFactory
from ferrum_rpc.models.recurrent_rows import RecurrentWeights, gated, gated_norm, recurrent_rows
from ferrum_rpc.models.shard import WHOLE, Shard
from ferrum_rpc.models.spec import ModelSpec
from ferrum_rpc.native import library
from tests.numerics.ranks import FOUR, TWO, on_ranks
from tests.support.adapters import load_adapters, make_adapter, merge
from tests.support.checkpoints import checkpoint_tensors, make_checkpoint, make_model, rewrite
from tests.support.harness import CPU, Executor, Oracle, error, made_or_skip, native, rounded_model, threads
from tests.support.harness import TOKENS as RANK_TOKENS

TOKENS = np.random.default_rng(5).integers(0, 300, size=84)
SPLITS = ([84], [1] * 7 + [40, 1, 3, 33], [32, 5, 1, 1, 13, 32])
"""`TOKENS` in one chunk, in chunks and steps, and in steps alone."""

SHAPE = {"num_hidden_layers": 4, "full_attention_interval": 2, "intermediate_size": 128}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "partial_rotary_factor": 0.5}
SECTIONS = {"rope_type": "default", "mrope_section": [2, 1, 1], "mrope_interleaved": True, "partial_rotary_factor": 0.5}
CASES: dict[str, dict[str, Any]] = {
    "usual": {},
    "tied, biases": {"tie_word_embeddings": True, "attention_bias": True},
    "as many key heads": {"linear_num_key_heads": 4, "linear_conv_kernel_dim": 2, "rope_parameters": SECTIONS},
    "one key head, attention first": {
        "linear_num_key_heads": 1,
        "linear_value_head_dim": 8,
        "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"],
        "rope_parameters": YARN,
    },
}


def model(dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    return rounded_model("qwen3_5", dtype, **SHAPE | overrides)


def with_rejected_drafts(executor: Executor) -> torch.Tensor:
    """All logits of `TOKENS` in sequence 0, beside a sequence in chunks: of each step of five behind the first all or
    some of the tokens are others, which are cut off again; once twice, and once the whole step."""
    rows, at, others = [executor.step({0: TOKENS[:40], 1: TOKENS[20:60]})[0]], 40, TOKENS[::-1]
    for kept in (0, 2, 5, 1, 4, 3, 5, 0):
        drafts = [*TOKENS[at : at + kept], *others[kept:5]]
        step = {0: drafts, 1: TOKENS[at : at + 33]} if kept == 2 else {0: drafts}
        rows.append(executor.step(step)[0][:kept])
        if kept == 1:
            executor.truncate(0, at + 3)
        executor.truncate(0, at + kept)
        at += kept
    rows.append(executor.step({1: TOKENS[:2], 0: TOKENS[at:]})[0])
    return torch.cat(rows)


@pytest.mark.parametrize("case", CASES)
def test_float32_is_the_oracle_to_3e_6(case):
    reference = model(**CASES[case])
    oracle, decoder = Oracle(reference, tokens=TOKENS), native(reference)
    for split in SPLITS:
        ours = Executor(decoder).run(TOKENS, split)
        assert error(ours, oracle.logits) <= 3e-6
        assert (ours.argmax(-1) == oracle.logits.argmax(-1)).all()
    assert error(with_rejected_drafts(Executor(decoder)), oracle.logits) <= 3e-6


@pytest.mark.parametrize("linear", ["native", "plain"])
@pytest.mark.parametrize("case", CASES)
def test_bfloat16_errs_at_most_twice_as_much_as_transformers(case, linear):
    reference = model(torch.bfloat16, **CASES[case])
    decoder = native_of(reference, PairFactory) if linear == "native" else native(reference, torch.bfloat16, "plain")
    oracle = Oracle(reference, torch.bfloat16, TOKENS)
    for split in SPLITS:
        oracle.check(Executor(decoder).run(TOKENS, split))
    oracle.check(with_rejected_drafts(Executor(decoder)))


def test_float16_errs_at_most_twice_as_much_as_transformers():
    reference = model(torch.float16)
    Oracle(reference, torch.float16, TOKENS).check(Executor(native(reference, torch.float16)).run(TOKENS, SPLITS[1]))


def test_float64_works_for_self_tests():
    reference = model()
    oracle = Oracle(reference, tokens=TOKENS)
    assert error(Executor(native(reference, torch.float64)).run(TOKENS, SPLITS[1]), oracle.logits) <= 1e-6


def native_of(reference: Any, factory: Any, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A decoder whose products are our kernels'."""
    linear: LinearFactory = made_or_skip(factory)
    spec = ModelSpec.from_config(reference.config.to_dict() | {"architectures": [type(reference).__name__]})
    decoder, state = Decoder(spec, dtype, CPU, linear), checkpoint_tensors(reference)
    for name in decoder.expected_tensors():
        decoder.load(name, state[name])
    return decoder


def test_quantized_products_are_near_what_they_quantize():
    reference = model(torch.bfloat16)
    oracle = Oracle(reference, torch.bfloat16, TOKENS)
    for factory, bound in ((ByteFactory, 0.1), (NibbleFactory, 0.5)):
        assert error(Executor(native_of(reference, factory)).run(TOKENS, SPLITS[1]), oracle.logits) <= bound


# --- bits -------------------------------------------------------------------------------------------------------------

PAIRS = partial(made_or_skip, PairFactory)

WIDE = {"head_dim": 64}
"""Rows of which our kernels are."""

NATIVE = pytest.mark.parametrize("factory", [PairFactory, ByteFactory, NibbleFactory])


def exact(factory: Any, **overrides: Any) -> Any:
    decoder = native_of(model(torch.bfloat16, **WIDE | overrides), factory)
    if select_fused_ops(decoder.spec, torch.bfloat16, CPU)[1].name != "native":
        pytest.skip("no kernel of ours runs here")
    return decoder


IN_ONE_CALL = ({0: 32, 1: 9}, {0: 1, 1: 1, 2: 4}, {2: 40, 0: 3}, {0: 5, 2: 1, 1: 32})
"""Tokens of each sequence; in the third step, a chunk, layers run one by one."""


@pytest.mark.parametrize("case", ["usual", "tied, biases", "as many key heads"])
@NATIVE
def test_layers_in_one_call_give_the_bits_of_layers_one_by_one(factory, case):
    """With drafts that are rejected between the steps, on one thread and on two."""
    decoder = exact(factory, **CASES[case])
    if not decoder.native:
        pytest.skip("heads are too narrow for the vectors of this machine")

    def run(executor: Executor) -> tuple[list[torch.Tensor], int]:
        attend, called = executor.backend.attend, []
        executor.compute.attention.attend = lambda *each: (called.append(each[0]), attend(*each))[1]
        rows = list[torch.Tensor]()
        for step in IN_ONE_CALL:
            lengths = {each: executor.lengths.get(each, 0) for each in step}
            spans = {each: TOKENS[lengths[each] : lengths[each] + count] for each, count in step.items()}
            rows += executor.step(spans, logits=False).values()
            for each, count in step.items():
                executor.truncate(each, lengths[each] + (max(1, count - 2) if count <= 32 else count))
        return [*rows, *(each for slot in executor.slots.values() for each in slot.states)], len(called)

    wanted, apart = run(Executor(decoder, native=False))
    for count in (1, 2):
        with threads(count):
            found, called = run(Executor(decoder))
        assert (apart, called) == (2 * len(IN_ONE_CALL), 2), "layers with attention, of the step with a chunk"
        assert all(map(torch.equal, found, wanted))


def test_a_call_that_fails_says_what_is_folded(monkeypatch):
    decoder = exact(PairFactory)
    executor = Executor(decoder)
    twin = Executor(decoder)
    for each in (executor, twin):
        each.step({0: TOKENS[:5]})
        each.step({0: TOKENS[5:10]})
    run = library.load().ferrum_layers_run

    def broken(handle: int, weights: int, _count: int, *others: Any) -> int:
        run(handle, weights, 2, *others)  # half of them
        return -1

    monkeypatch.setattr(library.load(), "ferrum_layers_run", broken)
    with pytest.raises(MemoryError):
        executor.step({0: TOKENS[:32]})
    assert executor.slots[0].folded == [5, 0], "the second one has not run"
    monkeypatch.undo()
    assert torch.equal(executor.step({0: TOKENS[10:42]})[0], twin.step({0: TOKENS[10:42]})[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [7, 48], ids=["torch", "native"])
def test_rows_around_the_recurrence_have_the_same_bits_alone(dim, dtype):
    """In torch of widths that fill no vector: the place of a row in it would change its bits."""
    shape, generator = RecurrentShape(1, 5, 3, dim), torch.Generator().manual_seed(0)

    def draw(*size: int, kind: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(kind)

    weights = RecurrentWeights.of(draw(shape.channels, 1, 4), draw(5), draw(5), draw(dim))
    inputs = draw(61, shape.channels + 5 * dim + 2 * 5, kind=dtype)
    rows, singly = recurrent_rows(inputs, shape, weights), [recurrent_rows(row[None], shape, weights) for row in inputs]
    for name, found in rows._asdict().items():
        assert torch.equal(found, torch.cat([getattr(row, name) for row in singly])), name
    found, gates = draw(61, 5, dim, kind=dtype), draw(61, 5, dim, kind=dtype)
    pairs = list(zip(found[:, None], gates[:, None], strict=True))
    normed = [gated_norm(row, gate.flatten(1), weights, 1e-6) for row, gate in pairs]
    assert torch.equal(gated_norm(found, gates.flatten(1), weights, 1e-6), torch.cat(normed))
    assert torch.equal(gated(found, gates), torch.cat([gated(*pair) for pair in pairs]))


@NATIVE
def test_a_truncation_within_the_last_step_leaves_the_bits_of_never_having_fed_it(factory):
    decoder = exact(factory)
    plain = Executor(decoder)
    plain.step({0: TOKENS[:40], 1: TOKENS[20:60]})
    assert torch.equal(
        with_rejected_drafts(Executor(decoder))[40:], torch.cat([plain.step({0: [each]})[0] for each in TOKENS[40:]])
    )


class Broken(RuntimeError):
    pass


@pytest.mark.parametrize("tokens", [1, 4, 33])
@pytest.mark.parametrize("layer", [0, 1])
def test_a_step_that_fails_in_a_layer_can_be_repeated_or_its_sequence_cut(layer, tokens, monkeypatch):
    reference = model()
    decoder = native(reference)
    whole, other = Executor(decoder), Executor(decoder)
    for executor in (whole, other):
        executor.step({0: TOKENS[:40]})
        executor.step({0: TOKENS[40:43]})
    forward = decoder.forward

    def broken(inputs, attend, recur):
        def fails(at, *rows):
            found = recur(at, *rows)
            if at == layer:
                raise Broken
            return found

        return forward(inputs, attend, fails)

    with monkeypatch.context() as patched, pytest.raises(Broken):
        patched.setattr(decoder, "forward", broken)
        other.step({0: TOKENS[50 : 50 + tokens]})
    for executor in (whole, other):
        executor.truncate(0, 41)
    assert torch.equal(*(executor.step({0: TOKENS[41 : 41 + tokens]})[0] for executor in (whole, other)))


# --- the rest of a model ----------------------------------------------------------------------------------------------


ADAPTED = ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj", "q_proj", "o_proj", "down_proj")


def test_adapters_of_recurrent_layers_and_gated_attention_are_merged_weights(tmp_path):
    reference = model()
    folder, plain = make_adapter(tmp_path / "one", reference, targets=ADAPTED, r=3), Oracle(reference, tokens=TOKENS)
    decoder = native(reference)
    merged = Oracle(merge(reference, folder), tokens=TOKENS)
    assert error(plain.logits, merged.logits) > 0.01
    _, loras = decoder.take_adapters(64)
    load_adapters(tmp_path, loras)
    ours = Executor(decoder, loras=loras, adapters={0: 1}).run(TOKENS, SPLITS[1])
    assert error(ours, merged.logits) <= 3e-6


def test_rows_with_adapters_of_our_kernels_have_the_bits_of_single_decodes(tmp_path):
    reference, decoder = model(torch.bfloat16, **WIDE), exact(PairFactory)
    folder = make_adapter(tmp_path / "one", reference, targets=ADAPTED, r=3)
    merged = Oracle(merge(reference, folder), torch.bfloat16, TOKENS)
    _, loras = decoder.take_adapters(64)
    if loras.name != "native":
        pytest.skip("no kernel of ours runs here")
    load_adapters(tmp_path, loras)

    def rows(pieces: list[int]) -> torch.Tensor:
        executor = Executor(decoder, loras=loras, adapters={0: 1})
        assert executor.compute.exact_span_tokens == 32
        return executor.run(TOKENS, pieces)

    singly = rows([1] * 84)
    merged.check(singly)
    assert torch.equal(rows([32, 5, 1, 32, 14]), singly)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_checkpoint_is_loaded_by_the_names_of_transformers(dtype, tmp_path):
    folder = make_checkpoint(tmp_path, "qwen3_5", dtype=dtype, **SHAPE)
    oracle = Oracle(model(dtype), dtype, TOKENS)
    ours = Executor(load_model(folder, dtype, CPU)).run(TOKENS, SPLITS[1])
    if dtype == torch.float32:
        assert error(ours, oracle.logits) <= 3e-6
    else:
        oracle.check(ours)


def test_attention_without_a_gate_may_stand_beside_gated(monkeypatch):
    """A gate of zeros halves what attention finds."""

    def vary(config, at, layer):
        return replace(layer, mixer=replace(layer.mixer, gated=False)) if at == 1 else layer

    name = "Qwen3_5ForCausalLM"
    monkeypatch.setitem(FAMILIES, name, replace(FAMILIES[name], vary=vary))
    reference = model()
    ungated = reference.model.layers[1].self_attn
    queries = ungated.q_proj.weight.detach().view(4, 2, 16, 64)
    queries[:, 1] = 0
    others = {
        "model.layers.1.self_attn.q_proj.weight": queries[:, 0].reshape(64, 64),
        "model.layers.1.self_attn.o_proj.weight": ungated.o_proj.weight.detach() / 2,
    }
    spec = ModelSpec.from_config(reference.config.to_dict() | {"architectures": [name]})
    decoder, state = Decoder(spec, torch.float32, CPU), reference.state_dict() | others
    for expected in decoder.expected_tensors():
        decoder.load(expected, state[expected])
    assert error(Executor(decoder).run(TOKENS, SPLITS[0]), Oracle(reference, tokens=TOKENS).logits) <= 3e-6


def test_what_is_no_matrix_stays_in_float32():
    """Checkpoints in bfloat16 have the decay's speed in float32."""
    state, found = model(torch.bfloat16).state_dict(), list[torch.Tensor]()
    name, speed = "model.layers.0.linear_attn.A_log", torch.tensor([0.1234567, -1.2345678, 2.3456789, 0.0])

    def recur(layer, weight, channels, log_decay, beta):
        if layer == 0:
            found.append(log_decay)
        assert log_decay.dtype == beta.dtype == torch.float32 != channels.dtype
        return torch.zeros(len(channels), 4, 16, dtype=channels.dtype)

    for each in (speed, torch.zeros(4)):
        decoder = Decoder(native(model()).spec, torch.bfloat16, CPU)
        for expected in decoder.expected_tensors():
            decoder.load(expected, each if expected == name else state[expected])
        decoder.forward(StepInputs(torch.tensor([5, 6]), torch.arange(2)), lambda layer, query, *_: query, recur)
    assert torch.allclose(found[0], found[1] * speed.exp(), rtol=1e-6, atol=0)


def with_images(folder: Path, text: Any) -> None:
    """Write a model of text and images with this text part."""
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    vision = {"hidden_size": 32, "intermediate_size": 48, "depth": 1, "num_heads": 2, "out_hidden_size": 64}
    config = Qwen3_5Config(text_config=text.config.to_dict(), vision_config=vision | {"patch_size": 4})
    whole = Qwen3_5ForConditionalGeneration(config)
    whole.model.language_model, whole.lm_head = text.model, text.lm_head
    whole.save_pretrained(folder)


def test_the_text_part_of_a_model_with_images_is_the_decoder(tmp_path):
    """And layers that draft tokens are left out."""
    with_images(tmp_path, make_model("qwen3_5", **SHAPE))
    rewrite(tmp_path, lambda tensors: tensors.update({"mtp.fc.weight": torch.zeros(3)}))
    decoder, oracle = load_model(tmp_path, torch.float32, CPU), Oracle(model(), tokens=TOKENS)
    assert decoder.spec.architecture == "Qwen3_5ForConditionalGeneration"
    assert error(Executor(decoder).run(TOKENS, SPLITS[0]), oracle.logits) <= 3e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("second", ["linear_attention", "full_attention"])
def test_stages_have_their_own_states(second, dtype):
    """And one may have none."""
    kinds = ["linear_attention", "full_attention", second, "full_attention"]
    reference = model(dtype, vocab_size=500, layer_types=kinds, **WIDE)
    Oracle(reference, dtype, RANK_TOKENS).check(on_ranks(reference, Shard(0, 1, 0, 2), dtype))


@pytest.mark.parametrize("whole", [TWO, FOUR], ids=["2", "4"])
@pytest.mark.parametrize("case", CASES)
def test_ranks_share_the_heads(case, whole):
    """Also where several have the same key head."""
    reference = model(vocab_size=500, **CASES[case])
    assert error(on_ranks(reference, whole), Oracle(reference, tokens=RANK_TOKENS).logits) <= 3e-6


def test_ranks_share_the_heads_in_bfloat16():
    reference = model(torch.bfloat16, vocab_size=500, **WIDE)
    Oracle(reference, torch.bfloat16, RANK_TOKENS).check(on_ranks(reference, TWO, torch.bfloat16, linear=PAIRS))


def test_ranks_share_adapters(tmp_path):
    reference = model(vocab_size=500)
    folder = make_adapter(tmp_path / "one", reference, targets=ADAPTED, r=3)
    ours, plain = on_ranks(reference, TWO, adapters=tmp_path), Oracle(reference)
    merged = Oracle(merge(reference, folder))
    assert error(plain.logits, merged.logits) > 0.01
    assert error(ours, merged.logits) <= 3e-6


@pytest.mark.parametrize(
    ("changes", "ranks", "words"),
    [
        ({}, 3, "linear_num_value_heads 4 must be a multiple of it; of this model it can be 1, 2, 4$"),
        (
            {"linear_num_key_heads": 3, "linear_num_value_heads": 6},
            2,
            "linear_num_key_heads 3 must be a multiple of it, or the other way round; of this model it can be 1$",
        ),
        ({"linear_num_value_heads": 8}, 8, "num_attention_heads 4 must be a multiple of it; .* 1, 2, 4$"),
    ],
)
def test_heads_that_ranks_cannot_share_are_refused_by_name(changes, ranks, words):
    with pytest.raises(NotSupported, match=f"tensor_parallel {ranks}: {words}") as caught:
        Shard(0, ranks).of(native(model(vocab_size=500, **changes)).spec)
    assert caught.value.field == "tensor_parallel"


def test_a_stage_without_attention_is_refused_by_name():
    spec = ModelSpec.from_config(make_model("qwen3_5", **SHAPE | {"full_attention_interval": 4}).config.to_dict())
    with pytest.raises(NotSupported, match="stage 0 would have no layer with attention") as caught:
        Shard(0, 1, 0, 2).of(spec)
    assert caught.value.field == "pipeline_parallel"


def test_weights_are_counted():
    reference = model(tie_word_embeddings=True)
    spec = native(reference).spec
    build = DecoderBuild(spec, spec, WHOLE, torch.float32, PlainLinear, PlainLinear, None)
    matrices = sum(each.numel() for each in reference.parameters() if each.dim() == 2)
    others = sum(each.numel() for each in reference.parameters() if each.dim() != 2)
    others += 2 * (4 + 2 - 2) * 16  # of two layers the norms of query and key, a row for each head
    assert weight_bytes(build) == 4 * (matrices + others)
    assert weight_bytes(replace(build, dtype=torch.bfloat16)) == 2 * matrices + 4 * others
