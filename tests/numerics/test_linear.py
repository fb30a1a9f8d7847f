"""Matrix products with resident weights against the exact ones, in every way that this machine has."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ferrum_rpc.errors import InvalidRequest
from ferrum_rpc.models.linear import PackedLinear, PlainLinear, select_bytes, select_linear
from ferrum_rpc.models.native_linear import ByteFactory, PairFactory
from ferrum_rpc.native import cpu

CPU = torch.device("cpu")
BF16 = torch.bfloat16
SHAPES = [(96, 64), (100, 192), (17, 128), (16, 4160), (33, 2112)]  # odd columns, one block, and more than a chunk
ROWS = [0, 1, 2, 5, 6, 7, 13, 32, 241]


def native_or_skip(factory):
    """Our kernel, or why it is not there: a compiler or an instruction."""
    try:
        return factory()
    except OSError as error:
        pytest.skip(str(error))


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def error(actual, x, weight, bias=None):
    """Root mean square error, relative to the exact product's."""
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    return ((actual.double() - expected).norm() / expected.norm()).item() if expected.numel() else 0.0


@pytest.mark.parametrize(("factory", "allowed"), [(PairFactory, 0.003), (ByteFactory, 0.012)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_a_native_product_is_the_exact_one_as_far_as_its_numbers_go(factory, allowed, shape, biased):
    n, k = shape
    weight, bias = draw(n, k), draw(n, seed=1) if biased else None
    product = native_or_skip(factory)(weight, bias)
    for rows in ROWS:
        x = draw(rows, k, seed=rows)
        answer = product(x)
        assert answer.dtype == BF16 and answer.shape == (rows, n)
        assert error(answer, x, weight, bias) < allowed
        assert torch.equal(product.fp32(x), answer.float())


@pytest.mark.parametrize("factory", [PairFactory, ByteFactory])
def test_an_answer_depends_on_nothing_but_its_row(factory):
    """Bit for bit: on no neighbour, no place in the batch and no number of threads."""
    weight = draw(1040, 1088)
    product = native_or_skip(factory)(weight, None)
    x = draw(300, 1088, seed=1)
    whole, threads = product(x), torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            for first, last in ((0, 1), (17, 24), (100, 300), (299, 300)):
                assert torch.equal(product(x[first:last]), whole[first:last])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("factory", [PairFactory, ByteFactory])
def test_rows_may_lie_apart_and_in_more_dimensions(factory):
    weight = draw(48, 64)
    product = native_or_skip(factory)(weight, None)
    wide = draw(6, 200)
    assert torch.equal(product(wide[:, 100:164]), product(wide[:, 100:164].contiguous()))
    cube = draw(2, 3, 64)
    assert torch.equal(product(cube), product(cube.view(6, 64)).view(2, 3, 48))


@pytest.mark.parametrize("factory", [PairFactory, ByteFactory])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_what_is_no_number_stays_in_its_row_and_shows(factory, poison):
    weight = draw(32, 128)
    product = native_or_skip(factory)(weight, None)
    x = draw(7, 128)
    clean = product(x)
    x[3, 70] = poison
    poisoned = product(x)
    assert not poisoned[3].isfinite().any()
    others = torch.arange(7) != 3
    assert torch.equal(poisoned[others], clean[others])


def test_a_row_of_bytes_that_is_not_finite_is_no_number_and_one_near_zero_is_zero():
    """The scale of a group is decided whatever lies beside what is not finite, in the same lane of a vector too."""
    product = native_or_skip(ByteFactory)(draw(32, 128), None)
    x = draw(5, 128)
    for row, poison in enumerate((float("nan"), float("inf"), -float("inf"))):
        x[row, 3], x[row, 3 + 16], x[row, 3 + 32] = 3e38, poison, 1.0
    x[3] = 1e-39
    answer = product(x)
    assert answer[:3].isnan().all()
    assert (answer[3] == 0).all()
    assert answer[4].isfinite().all() and (answer[4] != 0).any()


@pytest.mark.parametrize("factory", [PairFactory, ByteFactory])
@pytest.mark.parametrize("shape", [*SHAPES, (5000, 64)], ids=str)
@pytest.mark.parametrize("kind", ["any", "ties", "zeros", "no numbers", "infinite"])
def test_the_largest_of_a_row_is_the_first_of_the_largest_that_would_be_written(factory, shape, kind):
    n, k = shape
    weight, bias = draw(n, k), draw(n, seed=1)
    if kind == "ties":
        weight, bias = weight[torch.arange(n) % 7], bias[torch.arange(n) % 7]
    elif kind == "zeros":
        weight, bias = torch.zeros_like(weight), -torch.zeros_like(bias)
    elif kind == "no numbers":
        bias[[n // 2, n - 1]] = float("nan")
    elif kind == "infinite":
        bias[:] = -float("inf")
    product = native_or_skip(factory)(weight, bias)
    threads = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            for rows in ROWS:
                x = draw(rows, k, seed=rows)
                if kind == "no numbers" and rows > 1:
                    x[1] = float("nan")
                found = product.argmax(x)
                assert found.dtype == torch.int64
                assert torch.equal(found, product.fp32(x).argmax(dim=-1))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(product.argmax(draw(2, 3, k)), product.argmax(draw(2, 3, k).view(6, k)).view(2, 3))


def test_an_odd_width_is_filled_up():
    weight, x = draw(20, 33), draw(4, 33, seed=1)
    product = native_or_skip(PairFactory)(weight, None)
    assert error(product(x), x, weight) < 0.003


def test_rounding_to_bytes_keeps_zeros_and_harms_only_the_block_of_an_outlier():
    factory = native_or_skip(ByteFactory)
    weight = draw(32, 256)
    weight[5] = 0
    x = draw(3, 256, seed=1)
    x[1] = 0
    answer = factory(weight, None)(x)
    assert (answer[:, 5] == 0).all() and (answer[1] == 0).all()
    assert 0.001 < factory.error < 0.01
    outlier = x.clone()
    outlier[0, 0] = 3e4
    weight[:, :64] = 0  # what the outlier meets
    product = factory(weight, None)
    assert torch.equal(product(outlier)[0], product(x)[0])


def test_bytes_are_refused_where_they_cannot_be_used():
    native_or_skip(ByteFactory)
    with pytest.raises(InvalidRequest, match="blocks of 64"):
        ByteFactory()(draw(16, 80), None)
    with pytest.raises(InvalidRequest, match="float32"):
        select_bytes(CPU, torch.float32)
    with pytest.raises(InvalidRequest, match="not on cuda"):
        select_bytes(torch.device("cuda"), BF16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_a_product_packed_by_onednn_is_the_plain_one(dtype, biased):
    try:
        select_linear(CPU, dtype, "onednn")
    except InvalidRequest as reason:
        pytest.skip(str(reason))
    weight, bias = torch.randn(96, 80).to(dtype), torch.randn(96).to(dtype) if biased else None
    packed, plain = PackedLinear(weight, bias), PlainLinear(weight, bias)
    for rows in (0, 1, 2, 17, 200):
        x = torch.randn(rows, 80).to(dtype)
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(packed(x), plain(x), rtol=20 * eps, atol=100 * eps)


def test_the_choice_of_a_linear_has_a_reason(monkeypatch):
    assert select_linear(CPU, torch.float32, "plain") == ("plain", "requested", PlainLinear)
    name, reason, factory = select_linear(CPU, torch.float64)
    assert (name, factory) == ("plain", PlainLinear) and "float64" in reason
    for requested in ("onednn", "native"):
        with pytest.raises(InvalidRequest, match="not available"):
            select_linear(CPU, torch.float64, requested)
    with pytest.raises(InvalidRequest, match="unknown"):
        select_linear(CPU, torch.float32, "gpu")
    monkeypatch.setattr(cpu, "flags", lambda: frozenset({"amx_bf16"}))
    name, reason, _ = select_linear(CPU, BF16)
    assert name != "native" and "native" in reason


def test_a_kernel_that_is_wrong_is_not_chosen(monkeypatch):
    native_or_skip(PairFactory)
    right = PairFactory.__call__
    monkeypatch.setattr(PairFactory, "__call__", lambda self, weight, bias: right(self, weight * 1.05, bias))
    name, reason, _ = select_linear(CPU, BF16)
    assert name != "native" and "disagrees" in reason
