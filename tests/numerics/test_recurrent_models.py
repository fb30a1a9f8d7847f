"""What rows of models with recurrent layers do not depend on, and what such a model is made of.

`test_whole_models` compares them with transformers. The bits of a row depend on its sequence alone where products and
row operations are our kernels.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from ferrum_rpc.core import RecurrentShape
from ferrum_rpc.errors import NotSupported
from ferrum_rpc.models.base import StepInputs
from ferrum_rpc.models.decoder import Decoder
from ferrum_rpc.models.families import FAMILIES
from ferrum_rpc.models.footprint import DecoderBuild, weight_bytes
from ferrum_rpc.models.linear import PlainLinear
from ferrum_rpc.models.native_linear import ByteFactory, NibbleFactory, PairFactory
from ferrum_rpc.models.recurrent_rows import RecurrentWeights, gated, gated_norm, recurrent_rows
from ferrum_rpc.models.shard import WHOLE, Shard
from ferrum_rpc.models.spec import ModelSpec
from ferrum_rpc.native import library
from tests.numerics.ranks import on_ranks
from tests.numerics.whole_models import RECURRENT, ROUND, SHAPES, SPLITS, TOKENS, exact, model, native_of
from tests.support.adapters import load_adapters, make_adapter, merge
from tests.support.checkpoints import make_model
from tests.support.harness import CPU, Executor, Oracle, error, native, threads
from tests.support.harness import TOKENS as RANK_TOKENS

WIDE = ROUND["qwen3_5"]


def test_float64_works_for_self_tests():
    reference = model()
    oracle = Oracle(reference, tokens=TOKENS)
    assert error(Executor(native(reference, torch.float64)).run(TOKENS, SPLITS[1]), oracle.logits) <= 1e-6


# --- bits -------------------------------------------------------------------------------------------------------------

IN_ONE_CALL = ({0: 32, 1: 9}, {0: 1, 1: 1, 2: 4}, {2: 40, 0: 3}, {0: 5, 2: 1, 1: 32})
"""Tokens of each sequence; in the third step, a chunk, layers run one by one."""


@pytest.mark.parametrize("case", list(RECURRENT)[:3])
@pytest.mark.parametrize("factory", [PairFactory, ByteFactory, NibbleFactory])
def test_layers_in_one_call_give_the_bits_of_layers_one_by_one(factory, case):
    """With drafts that are rejected between the steps, on one thread and on two."""
    decoder = exact(factory, case)
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


def test_rows_with_adapters_of_our_kernels_have_the_bits_of_single_decodes(tmp_path):
    reference = model(torch.bfloat16, **WIDE)
    decoder = native_of(reference, PairFactory)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("second", ["linear_attention", "full_attention"])
def test_stages_have_their_own_states(second, dtype):
    """And one may have none."""
    kinds = ["linear_attention", "full_attention", second, "full_attention"]
    reference = model(dtype, vocab_size=500, layer_types=kinds, **WIDE)
    Oracle(reference, dtype, RANK_TOKENS).check(on_ranks(reference, Shard(0, 1, 0, 2), dtype))


def test_a_stage_without_attention_is_refused_by_name():
    spec = ModelSpec.from_config(
        make_model("qwen3_5", **SHAPES["qwen3_5"] | {"full_attention_interval": 4}).config.to_dict()
    )
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
