"""Products on a CUDA device are summed in float32 and rounded once, also where cuBLAS splits a sum."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ferrum_rpc.engine.assembly.choose import fix_products

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

TERMS = 16384
COLUMNS = 4096


@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_long_product_is_float64_rounded_once(dtype, rows):
    """Partial sums in ``dtype`` would change four elements of ten; sums in float32 one of a hundred at most."""
    fix_products()
    torch.manual_seed(0)
    x = torch.randn(rows, TERMS, device="cuda").to(dtype)
    weight = torch.randn(COLUMNS, TERMS, device="cuda").to(dtype) / 16
    exact = F.linear(x.double(), weight.double()).to(dtype)
    assert (F.linear(x, weight) != exact).float().mean() < 0.05


def test_float32_inputs_are_not_rounded_to_tf32():
    fix_products()
    torch.manual_seed(0)
    x, weight = torch.randn(8, 4096, device="cuda"), torch.randn(512, 4096, device="cuda")
    exact = F.linear(x.double(), weight.double())
    error = (F.linear(x, weight) - exact).square().mean().sqrt() / exact.std()
    assert error < 1e-5  # of TF32: 3e-4
