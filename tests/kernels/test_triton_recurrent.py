"""The kernel of recurrent steps: near the form of torch in float64, over journals that wrap, truncations, padding."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from ferrum_rpc.attention import triton_recurrent, triton_recurrent_chunk
from ferrum_rpc.attention.recurrent import RecurrentInputs, RecurrentKernels, RecurrentSlot
from ferrum_rpc.attention.recurrent_steps import RecurrentSpan, RecurrentStep, RecurrentStore
from ferrum_rpc.core import RecurrentShape
from ferrum_rpc.models.triton_gates import decays, gate_heads

SHAPES = [
    RecurrentShape(1, 1, 4, 4, taps=2),
    RecurrentShape(2, 4, 12, 20),
    RecurrentShape(1, 3, 24, 8, taps=5),
    RecurrentShape(1, 1, 20, 70),
]
LAYERS = 2
KERNELS = RecurrentKernels(triton_recurrent.step, triton_recurrent_chunk.chunk)


def inputs_of(shape: RecurrentShape, count: int, dtype: torch.dtype, seed: int) -> RecurrentInputs:
    random = torch.Generator().manual_seed(seed)
    channels, decay, beta = (
        torch.randn((count, width), generator=random) for width in (shape.channels, *[shape.value_heads] * 2)
    )
    return RecurrentInputs(channels.to(dtype), -decay.abs() * 0.2, beta.sigmoid())


def store_of(shape: RecurrentShape, slots: int, dtype: torch.dtype, device: torch.device) -> RecurrentStore:
    kernels = None if dtype == torch.float64 else KERNELS
    made = RecurrentStore(shape, LAYERS, slots, dtype=dtype, device=device, kernels=kernels)
    for slot in made.slots:
        slot.lanes = 0
        for each in (slot.channels, slot.gates):
            each.fill_(torch.nan)
        slot.clear()
    return made


def step_of(slots: list[RecurrentSlot], counts: tuple[int, ...]) -> RecurrentStep:
    return RecurrentStep([RecurrentSpan(each, each, each.length, n) for each, n in zip(slots, counts, strict=True)])


def near(found: torch.Tensor, wanted: torch.Tensor, bound: float) -> bool:
    return bool((found.cpu().double() - wanted).norm() <= bound * wanted.norm())


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [*((shape, torch.float32) for shape in SHAPES), *((shape, torch.bfloat16) for shape in SHAPES[::3])],
    ids=str,
)
def test_steps_are_those_of_torch(device, shape, dtype):
    """Of one token and of several, some of which are truncated, beside others; channels are those of a wider tensor."""
    weight = torch.randn((shape.channels, shape.taps), generator=torch.Generator().manual_seed(9))
    kernel = store_of(shape, 3, dtype, device)
    exact = store_of(shape, 3, torch.float64, torch.device("cpu"))
    for number, (counts, kept) in enumerate([((3, 1, 5), 5), ((1, 5, 1), 1), ((5, 9, 4), 2), ((1, 1, 1), 1)]):
        inputs = inputs_of(shape, sum(counts), dtype, number)
        wide = torch.cat((inputs.channels, torch.full((len(inputs.channels), 3), torch.nan, dtype=dtype)), 1).to(device)
        step, wanted = step_of(kernel.slots, counts), step_of(exact.slots, counts)
        for layer in range(LAYERS):
            gates = [each.to(device) for each in inputs[1:]]
            rows = step.recur(layer, weight.to(device), wide[:, : shape.channels], *gates)
            doubled = wanted.recur(layer, weight.double(), *(each.double() for each in inputs))
            assert rows.dtype == dtype
            assert near(rows, doubled, 4e-6 if dtype == torch.float32 else 4e-3), (number, layer)
        step.commit()
        wanted.commit()
        for slot, other in zip(kernel.slots, exact.slots, strict=True):
            assert slot.folded == other.folded
            slot.truncate(length := max(slot.floor, slot.length - 5 + kept))
            other.truncate(length)
    assert any(max(slot.folded) for slot in kernel.slots)
    for slot, other in zip(kernel.slots, exact.slots, strict=True):
        assert near(slot.states, other.states, 4e-6)


@pytest.mark.parametrize(("shape", "dtype"), [(SHAPES[1], torch.bfloat16), (SHAPES[2], torch.float32)], ids=str)
def test_a_chunk_is_that_of_torch(device, shape, dtype):
    """It begins behind tokens that are still in the journal, keeps states on the way, and ends within a block. Its last
    tokens are alike, which makes the powers of their system large."""
    counts, weight = (3, 150), torch.randn((shape.channels, shape.taps), generator=torch.Generator().manual_seed(9))
    kernel = store_of(shape, 3, dtype, device)
    exact = store_of(shape, 3, torch.float64, torch.device("cpu"))
    for number, count in enumerate(counts):
        inputs, rows = inputs_of(shape, count, dtype, number), []
        if count > 60:
            inputs.channels[-60:], inputs.log_decay[-60:], inputs.beta[-60:] = inputs.channels[-1], -1e-3, 0.99
        for store in (kernel, exact):
            source, into, kept = store.slots
            keep = [] if count <= 32 else [(source.length + 70, kept)]
            step = store.begin([RecurrentSpan(source, into if keep else source, source.length, count, keep)])
            own = inputs._replace(channels=inputs.channels.to(source.channels.dtype))
            own = RecurrentInputs(*(each.to(source.states.device) for each in own))
            own = RecurrentInputs(own.channels, *(each.to(source.states.dtype) for each in own[1:]))
            of_step = weight.to(source.states.device, source.states.dtype)
            rows += [step.recur(each, of_step, *own) for each in range(LAYERS)]
            step.commit()
        bound = 1e-5 if dtype == torch.float32 else 4e-3
        assert all(near(found, wanted, bound) for found, wanted in zip(rows[:2], rows[2:], strict=True))
    for slot, other in zip(kernel.slots[1:], exact.slots[1:], strict=True):
        assert near(slot.states, other.states, 1e-5 if dtype == torch.float32 else 2e-3)


def test_padding_and_layers_that_have_folded_already_do_nothing(device):
    """A job of zeros, as a graph has them; and a step that is repeated because it failed behind a layer."""
    shape = SHAPES[1]
    weight = torch.randn((shape.taps, shape.channels), generator=torch.Generator().manual_seed(9)).to(device)
    store = store_of(shape, 2, torch.float32, device)
    for number in range(3):
        step = step_of(store.slots, (2, 2))
        inputs = RecurrentInputs(*(each.to(device) for each in inputs_of(shape, 4, torch.float32, number)))
        jobs = np.zeros((LAYERS, 4, 9), np.int64)
        jobs[:, :2] = step.jobs()
        sent = torch.from_numpy(jobs).to(device)
        first = [triton_recurrent.step(shape, weight, each, inputs) for each in sent]
        folded = [each.states.clone() for each in store.slots]
        jobs[:, :2, 4] = jobs[:, :2, 5]
        again = [triton_recurrent.step(shape, weight, each, inputs) for each in torch.from_numpy(jobs).to(device)]
        assert all(torch.equal(*each) for each in zip(first, again, strict=True))
        assert all(torch.equal(*each) for each in zip(folded, [each.states for each in store.slots], strict=True))
        step.replayed()
        step.commit()
    assert [slot.folded for slot in store.slots] == [[2, 2]] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gates_are_those_of_torch(device, dtype):
    """Of parts of wider rows, whose numbers are large, too."""
    random = torch.Generator().manual_seed(3)
    rows = (8 * torch.randn((19, 300), generator=random)).to(dtype)
    speed, shift = torch.randn((2, 11), generator=random)
    norm, heads = torch.randn(20, generator=random), torch.randn((19, 11, 20), generator=random).to(dtype)
    gates = rows[:, 30:250].unflatten(1, (11, 20))
    found = decays(*(each.to(device) for each in (rows[:, :11], rows[:, 11:22], speed, shift)))
    exact = speed * F.softplus(rows[:, 11:22].double() + shift), rows[:, :11].double().sigmoid()
    assert all(near(mine, wanted, 1e-6) for mine, wanted in zip(found, exact, strict=True))
    bound = 1e-6 if dtype == torch.float32 else 3e-3
    opened, plain = rows.to(device)[:, 30:250].unflatten(1, (11, 20)), heads.double()
    assert near(gate_heads(heads.to(device), opened), plain * gates.double().sigmoid(), bound)
    normed = plain * torch.rsqrt(plain.square().mean(-1, keepdim=True) + 1e-3) * norm
    assert near(gate_heads(heads.to(device), opened, norm.to(device), 1e-3), normed * F.silu(gates.double()), bound)
