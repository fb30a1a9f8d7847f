"""The CUDA sampler: the tokens and the kept sets of torch and of C, whatever the blocks in which it reads a row."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from ferrum_rpc.sampling import triton_sample, vocab_parallel
from ferrum_rpc.sampling.draw import PARAMS_DTYPE
from ferrum_rpc.sampling.samplers import NativeSampler, TorchSampler
from ferrum_rpc.sampling.triton_sample import TritonSampler
from ferrum_rpc.sampling.vocab_parallel import select_sampler
from tests.support.draws import any_draws, logits, spoiled
from tests.support.harness import made_or_skip

ROWS = 24


@pytest.fixture
def blocks(device) -> Iterator[None]:
    """Blocks so small that short rows have several: the interpreter takes half a second for a row otherwise."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_sample, "AT_ONCE", 64)
        patch.setattr(triton_sample, "TOGETHER", 2)
        patch.setattr(triton_sample, "WARPS", 1)
        yield


def some(rows: int, vocabulary: int) -> tuple[torch.Tensor, np.ndarray]:
    """Logits, and what is drawn from them."""
    return spoiled(logits(rows, vocabulary, vocabulary)), any_draws(rows, vocabulary, vocabulary)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("vocabulary", [1, 64, 65, 150])
def test_its_tokens_are_those_of_torch_and_of_c(device, vocabulary):
    rows, params = some(ROWS, vocabulary)
    found = TritonSampler().draw(rows.to(device), params).cpu()
    assert (found.dtype, found.shape) == (torch.int64, (ROWS,))
    borderline = device.type == "cuda"  # its exponentials differ in the last place
    assert (found != TorchSampler().draw(rows, params)).sum() <= borderline
    assert (found != made_or_skip(NativeSampler).draw(rows, params)).sum() <= borderline


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("vocabulary", [1, 150])
def test_it_keeps_what_torch_keeps(device, vocabulary):
    rows, params = some(ROWS, vocabulary)
    weights, plain, mass = (each.cpu() for each in TritonSampler().filtered(rows.to(device), params))
    expected, sampled, _ = TorchSampler().filtered(rows, params)
    assert torch.equal(plain, sampled)
    assert torch.equal(weights[plain] > 0, expected[plain] > 0)
    torch.testing.assert_close(weights[plain], expected[plain], rtol=1e-5, atol=0)
    assert weights.isfinite().all()
    torch.testing.assert_close(mass, weights.sum(-1, dtype=torch.float64))


@pytest.mark.usefixtures("blocks")
@given(data=st.data())
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_row_keeps_what_torch_keeps(device, data):
    """Weights that are powers of two, so that sums are exact and the borders of both are the same: half of the cases
    have a border exactly between two tokens."""
    vocabulary = data.draw(st.integers(1, 90))
    exponents = data.draw(st.lists(st.integers(0, 6), min_size=vocabulary, max_size=vocabulary))
    row = torch.tensor([exponents], dtype=torch.float32) * -np.float32(np.log(2))
    params = np.zeros(1, PARAMS_DTYPE)
    params["temperature"] = 1
    params["top_k"] = data.draw(st.integers(0, vocabulary))
    params["top_p"] = data.draw(st.sampled_from([1, 0.5, 0.25, 0.75, 0.875, 0.9, 0.01]))
    params["min_p"] = data.draw(st.sampled_from([0, 0.3]))
    expected = TorchSampler().filtered(row, params)[0] > 0
    found = TritonSampler().filtered(row.to(device), params)[0].cpu() > 0
    if not torch.equal(expected, found):  # where the mass before a token is p within the rounding of weights
        weights = torch.exp(row - row.max()).double()
        [differ] = (expected != found)[0].nonzero(as_tuple=True)
        assert len(differ) == 1
        kept = weights[expected | found].sum() - weights[0, differ[0]]
        of_k = weights.where(row >= row.topk(int(params["top_k"][0]) or vocabulary).values[:, -1:], torch.tensor(0.0))
        assert kept == pytest.approx(float(params["top_p"][0]) * of_k.sum(), rel=1e-6)


@pytest.mark.usefixtures("blocks")
def test_what_cannot_be_drawn_from_takes_the_arg_max(device):
    rows = torch.randn(7, 100, generator=torch.Generator().manual_seed(0))
    rows[0, 40] = rows[0, 20] = torch.inf
    rows[1, 30] = torch.nan
    rows[2] = -torch.inf
    rows[3, 99] = -torch.nan
    rows[5] = -1 - rows[5].abs()
    rows[5, 7], rows[5, 60] = -0.0, 0.0  # one number
    rows[6] = torch.nan
    params = np.zeros(7, PARAMS_DTYPE)
    params["temperature"], params["top_k"], params["top_p"] = [1, 1, 1, 1, 0, 0, 1], 3, 0.5
    found = TritonSampler().draw(rows.to(device), params).tolist()
    assert found == [20, 30, 0, 99, int(rows[4].argmax()), 7, 0]
    weights, plain, _ = TritonSampler().filtered(rows.to(device), params)
    assert not plain.any() and weights.isfinite().all()


@pytest.mark.usefixtures("blocks")
def test_a_row_does_not_depend_on_the_others(device):
    rows, params = some(8, 97)
    rows = rows.to(device)
    found = TritonSampler().draw(rows, params)
    for index in (0, 5, 7):  # rows of 97 logits do not begin at a multiple of 16 bytes
        assert TritonSampler().draw(rows[index : index + 1], params[index : index + 1]) == found[index]
    assert TritonSampler().draw(rows[:0], params[:0]).shape == (0,)


def test_rows_longer_than_a_block_of_the_real_size(device):
    vocabulary = 5 * triton_sample.AT_ONCE + 5
    rows, params = some(3, vocabulary)[0], np.zeros(3, PARAMS_DTYPE)
    params["seed"], params["temperature"], params["top_k"], params["top_p"] = 3, 1, [0, 40, 900], 0.9
    assert torch.equal(TritonSampler().draw(rows.to(device), params).cpu(), TorchSampler().draw(rows, params))


@pytest.mark.usefixtures("blocks")
def test_it_is_chosen_where_it_agrees_with_torch(device, monkeypatch):
    monkeypatch.setattr(vocab_parallel, "PROBED_TOKENS", 40)
    interpreted = device.type == "cpu"
    name, reason, made = select_sampler(device, interpreted=interpreted)
    assert (name, type(made)) == ("triton", TritonSampler) and "not sorted" in reason
    draw = TritonSampler.draw
    monkeypatch.setattr(TritonSampler, "draw", lambda self, *given: draw(self, *given) * 0)
    name, reason, made = select_sampler(device, interpreted=interpreted)
    assert (name, type(made)) == ("torch", TorchSampler) and "differ from torch's" in reason
    monkeypatch.setattr(TritonSampler, "draw", draw)
    filtered = TritonSampler.filtered
    monkeypatch.setattr(
        TritonSampler, "filtered", lambda self, *given: (filtered(self, *given)[0] * 1.01, *filtered(self, *given)[1:])
    )
    name, reason, _ = select_sampler(device, interpreted=interpreted)
    assert name == "torch" and "weights of a small step" in reason
