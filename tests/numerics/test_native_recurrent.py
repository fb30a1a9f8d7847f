"""The C kernels of recurrent layers, in each instruction set: near the form of torch in float64, and what they refuse.

`test_recurrent` has the promises about bits, for the kernels too.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from ferrum_rpc.attention import native_recurrent
from ferrum_rpc.attention.recurrent import RecurrentInputs, rows_needed
from ferrum_rpc.attention.recurrent_steps import RecurrentSpan, RecurrentStep
from ferrum_rpc.core import RecurrentShape
from ferrum_rpc.models.recurrent_rows import RecurrentWeights, gated, gated_norm, recurrent_rows
from ferrum_rpc.native import library
from tests.support.poison import fill_journal
from tests.support.recurrent_layers import PlainLoop, Stack, after_chunk, close, everything, gate, new_slot, random

LANES = {"portable": 4, "avx2": 8, "avx512": 16}
SHAPES = {  # by the vectors that divide a head
    4: [RecurrentShape(1, 1, 4, 4, taps=2), RecurrentShape(2, 4, 12, 20)],
    8: [RecurrentShape(3, 3, 8, 40, taps=5), RecurrentShape(1, 3, 24, 8)],
    16: [RecurrentShape(2, 4, 16, 80), RecurrentShape(1, 2, 128, 128)],
}
TOKENS = tuple(place * place % 7 for place in range(40))


@pytest.fixture(params=LANES)
def lanes(request, monkeypatch):
    """Those of an instruction set, in which slots that are made now compute."""
    monkeypatch.setenv("FERRUM_ISA", request.param)
    wanted = LANES[request.param]
    if slot_of(SHAPES[16][0], torch.float32).lanes != wanted:
        pytest.skip("not on this machine")
    return wanted


def inputs_of(shape, count, dtype, seed=0):
    decay, beta = random(2, count, shape.value_heads, seed=seed + 1)
    return RecurrentInputs(random(count, shape.channels, seed=seed).to(dtype), gate(decay), beta.sigmoid())


def slot_of(shape, dtype, layers=1):
    return new_slot(rows_needed(shape, 5, 32), layers, shape, dtype)


def step_of(slots, counts):
    return RecurrentStep(
        [RecurrentSpan(slot, slot, slot.length, count) for slot, count in zip(slots, counts, strict=True)]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_steps_are_those_of_torch(lanes, dtype):
    """Of one token and of several, some of which are truncated, beside others; rows are those of a wider tensor."""
    for shape in itertools.chain(*(SHAPES[each] for each in SHAPES if each >= lanes)):
        weight = random(shape.channels, shape.taps, seed=9)
        native = [slot_of(shape, dtype, 2) for _ in range(3)]
        exact = [slot_of(shape, torch.float64, 2) for _ in native]
        assert (native[0].lanes, exact[0].lanes) == (lanes, 0)
        for step, (counts, kept) in enumerate([((3, 1, 5), 5), ((1, 5, 1), 1), ((5, 32, 4), 2), ((1, 1, 1), 1)]):
            inputs = inputs_of(shape, sum(counts), dtype, seed=step)
            wide = torch.cat((inputs.channels, torch.zeros(len(inputs.channels), 3, dtype=dtype)), 1)
            found = step_of([*map(fill_journal, native)], counts)
            rows = found.recur(1, weight, wide[:, : shape.channels], *inputs[1:])
            wanted = step_of(exact, counts)
            doubled = wanted.recur(1, weight.double(), *(each.double() for each in inputs))
            assert rows.dtype == dtype
            assert close(rows.double(), doubled, 4e-6 if dtype == torch.float32 else 4e-3), (shape, step)
            found.commit()
            wanted.commit()
            for slot, other in zip(native, exact, strict=True):
                slot.truncate(length := max(slot.floor, slot.length - 5 + kept))
                other.truncate(length)
        for slot, other in zip(native, exact, strict=True):
            assert slot.folded == other.folded != [0, 0]
            assert close(slot.states.double(), other.states, 4e-6)
            assert not slot.states[0].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("split", [[1] * 40, [32, 8], [5, 1, 1, 25, 8], [31, 1, 3, 5]], ids=str)
def test_bits_depend_on_the_tokens_only(lanes, split, dtype):
    stack = Stack(1, dtype, SHAPES[16][0])
    slot, rows, wanted = stack.slot(rows_needed(stack.shape, 32, 32)), [], PlainLoop(stack)
    for count in split:
        rows.append(stack.step(fill_journal(slot), TOKENS[slot.length : slot.length + count]))
        slot.commit(count)
    stack.step(slot, (1,))
    assert torch.equal(torch.cat(rows), wanted.rows(TOKENS, 40))
    assert torch.equal(slot.states[0], wanted.after(TOKENS[: slot.floor])[0][0][0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_chunks_are_those_of_torch(lanes, dtype):
    """Behind a step whose tokens are not folded yet, and behind one another."""
    for shape in itertools.chain(*(SHAPES[each] for each in SHAPES if each >= lanes)):
        weight = random(shape.channels, shape.taps, seed=9)
        slot, exact = slot_of(shape, dtype), slot_of(shape, torch.float64)
        for step, tokens in enumerate((3, 33, 64, 65, 4, 4, 130)):
            inputs = inputs_of(shape, tokens, dtype, seed=step)
            doubled = RecurrentInputs(*(each.double() for each in inputs))
            if tokens > 32:
                after, other = (after_chunk(each, tokens) for each in (slot, exact))
                rows, wanted = slot.chunk(0, weight, inputs, after), exact.chunk(0, weight.double(), doubled, other)
                slot, exact = after, other
            else:
                rows, wanted = slot.step(0, weight, inputs), exact.step(0, weight.double(), doubled)
                slot.commit(tokens)
                exact.commit(tokens)
            assert rows.dtype == dtype and rows.shape == (tokens, shape.value_heads, shape.value_dim)
            assert close(rows.double(), wanted, 4e-6 if dtype == torch.float32 else 4e-3), (shape, step)
            assert close(slot.states.double(), exact.states, 4e-6), (shape, step)


def test_a_decay_of_nearly_everything_leaves_no_infinities_in_a_chunk(lanes):
    shape = SHAPES[16][0]
    weight, inputs = random(shape.channels, 4), inputs_of(shape, 70, torch.float32)
    inputs = inputs._replace(log_decay=inputs.log_decay - 40)
    slot, exact = slot_of(shape, torch.float32), slot_of(shape, torch.float64)
    rows = slot.chunk(0, weight, inputs, after_chunk(slot, 70))
    doubled = RecurrentInputs(*(each.double() for each in inputs))
    assert close(rows.double(), exact.chunk(0, weight.double(), doubled, after_chunk(exact, 70)), 4e-6)


def test_bits_do_not_depend_on_threads(lanes):
    shape, threads = SHAPES[16][0], torch.get_num_threads()
    found = []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            slots = [slot_of(shape, torch.bfloat16) for _ in range(4)]
            for seed in range(3):
                step = step_of(slots, (4, 1, 2, 40))
                inputs = inputs_of(shape, 47, torch.bfloat16, seed)
                rows = step.recur(0, random(shape.channels, 4), *inputs)
                step.commit()
            found.append([rows.tolist(), *(everything(slot) for slot in slots)])
    finally:
        torch.set_num_threads(threads)
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        (torch.float16, SHAPES[16][0]),
        (torch.float64, SHAPES[16][0]),
        (torch.float32, RecurrentShape(1, 1, 16, 6)),
        (torch.float32, RecurrentShape(1, 1, 6, 16)),
        (torch.float32, RecurrentShape(1, 1, 16, 16, taps=65)),
    ],
    ids=str,
)
def test_torch_computes_what_the_kernels_do_not_take(dtype, shape):
    slot = slot_of(shape, dtype)
    assert slot.lanes == 0
    rows = slot.step(0, random(shape.channels, shape.taps), inputs_of(shape, 1, dtype))
    assert rows.isfinite().all()


def test_torch_computes_where_the_library_is_not_built(monkeypatch):
    def missing():
        raise OSError

    monkeypatch.setattr(library, "load", missing)
    assert not library.is_built.__wrapped__()
    monkeypatch.setattr(library, "is_built", lambda: False)
    assert slot_of(SHAPES[16][0], torch.float32).lanes == 0


def test_without_memory_a_step_changes_nothing(lanes, monkeypatch):
    class Short:
        ferrum_recurrent_step = ferrum_recurrent_chunk = staticmethod(lambda *_: -1)

    shape = SHAPES[16][0]
    slot, weight = slot_of(shape, torch.float32), random(shape.channels, 4)
    for _ in range(2):
        slot.step(0, weight, inputs_of(shape, 2, torch.float32))
        slot.commit(2)
    before, after = everything(slot), after_chunk(slot, 40)
    monkeypatch.setattr(native_recurrent.library, "load", Short)
    with pytest.raises(MemoryError, match="recurrent"):
        slot.step(0, weight, inputs_of(shape, 2, torch.float32))
    with pytest.raises(MemoryError, match="recurrent"):
        slot.chunk(0, weight, inputs_of(shape, 40, torch.float32), after)
    assert everything(slot) == before


def test_rows_of_another_type_are_those_of_the_journal_s(lanes):
    shape = SHAPES[16][0]
    inputs, found = inputs_of(shape, 3, torch.bfloat16), []
    for each in (inputs, inputs._replace(channels=inputs.channels.float(), beta=inputs.beta.double())):
        rows = slot_of(shape, torch.bfloat16).step(0, random(shape.channels, 4), each)
        assert rows.dtype == each.channels.dtype
        found.append(rows.float())
    assert torch.equal(*found)


# --- rows beside the recurrence ---------------------------------------------------------------------------------------

ROW_SHAPE = RecurrentShape(key_heads=1, value_heads=21, key_dim=3, value_dim=48)


def weights_of(dtype=torch.float32):
    drawn = (random(ROW_SHAPE.channels, 1, 4), random(21, seed=1), random(21, seed=2), random(48, seed=3))
    return RecurrentWeights.of(*(each.to(dtype) for each in drawn))


def row_inputs(dtype):
    """Numbers as layers have them, larger ones, and those whose exponentials are infinite or nothing."""
    inputs = random(9, ROW_SHAPE.channels + 21 * 48 + 2 * 21, seed=4) * torch.logspace(-3, 3, 9)[:, None]
    inputs[3, -5:] = torch.tensor([-1e30, 1e30, 0.0, 88.8, -88.8])
    return inputs.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_beside_the_recurrence_are_those_of_torch(lanes, dtype):
    """Of which the recurrence gets numbers in float32, whatever the model's type."""
    inputs = row_inputs(dtype)
    numbers = inputs.double()[:, -42:].split(21, 1)
    rows = recurrent_rows(inputs, ROW_SHAPE, weights_of())
    exact = recurrent_rows(inputs.double(), ROW_SHAPE, weights_of(torch.float64))
    assert torch.equal(rows.channels.double(), exact.channels) and torch.equal(rows.gate.double(), exact.gate)
    for found, wanted, x in zip((rows.beta, rows.log_decay), (exact.beta, exact.log_decay), numbers, strict=True):
        bound = wanted.abs() * (1e-6 + 1e-7 * x.abs().clamp(max=100)) + 1e-36  # of the sum in the exponent
        assert found.dtype == torch.float32 and (found.double() - wanted).abs().le(bound).all()
    heads, rounded = random(9, 21, 48, seed=5).to(dtype), 1e-6 if dtype == torch.float32 else 0.004
    pairs = rows.gate.view(9, 21, 48), random(9, 21, 2, 48, seed=6).to(dtype)[:, :, 0]
    normed = gated_norm(heads, rows.gate, weights_of(), 1e-3)
    wanted = gated_norm(heads.double(), exact.gate, weights_of(torch.float64), 1e-3)
    assert normed.shape == (9, 21 * 48) and (normed.double() - wanted).abs().le(wanted.abs() * rounded + 1e-30).all()
    for gates in pairs:
        found, wanted = gated(heads, gates), gated(heads.double(), gates.double())
        assert found.dtype == dtype and (found.double() - wanted).abs().le(wanted.abs() * rounded + 1e-30).all()


def test_weights_lie_as_the_convolution_reads_them():
    assert weights_of().taps[:, 0].T.is_contiguous()


def test_a_number_that_is_none_stays_one(lanes):
    inputs = row_inputs(torch.float32)
    inputs[:, -1] = inputs[:, -22] = inputs[:, -43] = float("nan")
    rows = recurrent_rows(inputs, ROW_SHAPE, weights_of())
    for each in (rows.log_decay, rows.beta, gated(rows.gate.view(9, 21, 48), rows.gate.view(9, 21, 48)).flatten(1)):
        assert each[:, -1].isnan().all() and each[:, :-1].isfinite().all()


def test_many_rows_have_the_bits_of_few_on_any_threads(lanes):
    threads, heads, gates = torch.get_num_threads(), random(200, 21, 48), random(200, 21, 48, seed=1)
    try:
        torch.set_num_threads(3)
        found = gated(heads, gates)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found, torch.cat([gated(*pair) for pair in zip(heads.split(9), gates.split(9), strict=True)]))
