"""The CUDA product of one row against float64, and what it leaves to torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from ferrum_rpc.models.linear import select_linear
from ferrum_rpc.models.triton_linear import RowLinear
from tests.kernels.launches import Launches


def drawn(device: torch.device, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(device, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("n", "k"), [(8, 1024), (5, 2048), (4, 24), (1, 1), (23, 1500)])
@pytest.mark.parametrize("biased", [False, True])
def test_one_row_is_the_product_rounded_once(device, dtype, n, k, biased):
    weight, bias, x = drawn(device, dtype, n, k), drawn(device, dtype, n), drawn(device, dtype, 1, k)
    product = RowLinear(weight, bias if biased else None)
    expected = F.linear(x.double(), weight.double(), bias.double() if biased else None)
    for shaped in (x, x[0], x[None]):
        found = product(shaped)
        assert (found.dtype, found.shape) == (dtype, (*shaped.shape[:-1], n))
        error = (found.double().view_as(expected) - expected).abs()
        assert (error <= torch.finfo(dtype).eps * (expected.abs() / 2 + 1e-5 * k)).all()


def test_only_one_dense_row_is_multiplied_by_the_kernel(device, monkeypatch):
    launches = Launches(monkeypatch)
    weight, x = drawn(device, torch.bfloat16, 8, 64), drawn(device, torch.bfloat16, 3, 64)
    product = RowLinear(weight, None)
    apart = x.t().contiguous().t()[:1]
    for rows in (x, x[:0], apart, x[None, :2]):
        assert torch.equal(product(rows), F.linear(rows, weight))
    assert not launches.made
    product(x[1:2])
    assert launches.made == [("row_product_kernel", (2,))]
    assert torch.equal(RowLinear(weight.t().contiguous().t(), None)(x[:1]), F.linear(x[:1], weight))
    assert len(launches.made) == 1


def test_it_is_chosen_where_it_agrees_with_torch(device, monkeypatch):
    interpreted = device.type == "cpu"
    name, reason, factory = select_linear(device, torch.bfloat16, interpreted=interpreted)
    assert (name, factory) == ("triton", RowLinear) and "one row" in reason
    assert select_linear(device, torch.float32, interpreted=interpreted).name == "plain"
    right = RowLinear.__call__
    monkeypatch.setattr(RowLinear, "__call__", lambda self, x: right(self, x) * 1.05)
    name, reason, _ = select_linear(device, torch.bfloat16, interpreted=interpreted)
    assert name == "plain" and "disagrees" in reason
