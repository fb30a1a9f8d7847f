"""Matrix products with resident weights against the exact ones, in every way that this machine has."""

from __future__ import annotations

import gc
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves

from ferrum_rpc.errors import InvalidRequest
from ferrum_rpc.models.linear import PackedLinear, PlainLinear, select_linear, select_quantized
from ferrum_rpc.models.native_linear import (
    ByteFactory,
    NativeHeads,
    NativeLinear,
    NibbleFactory,
    PairFactory,
    StoredFactory,
    Workspace,
)
from ferrum_rpc.models.stored_integers import Code, Integers
from ferrum_rpc.usage import ISA_VARIABLE, ISAS
from tests.support.harness import made_or_skip, threads

CPU = torch.device("cpu")
BF16 = torch.bfloat16
SHAPES = [(96, 64), (100, 192), (17, 128), (16, 4160), (33, 2112)]  # odd columns, one block, and more than a chunk
FACTORIES = [PairFactory, ByteFactory, NibbleFactory]
ROWS = [0, 1, 2, 5, 6, 7, 13, 32, 241]


@pytest.fixture(params=FACTORIES)
def factory(request, isa):
    """Our kernel, of every kind, in every instruction set that this machine has."""
    return made_or_skip(request.param)


def in_every_isa(monkeypatch, make):
    """What is made with each."""
    for each in ISAS:
        monkeypatch.setenv(ISA_VARIABLE, each)
        yield make()


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def error(actual, x, weight, bias=None):
    """Root mean square error, relative to the exact product's."""
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    return ((actual.double() - expected).norm() / expected.norm()).item() if expected.numel() else 0.0


@pytest.mark.parametrize(("shape", "biased"), [*((each, True) for each in SHAPES), (SHAPES[1], False)], ids=str)
def test_a_native_product_is_the_exact_one_as_far_as_its_numbers_go(factory, shape, biased):
    n, k = shape
    weight, bias = draw(n, k), draw(n, seed=1) if biased else None
    product = factory(weight, bias)
    for rows in ROWS:
        x = draw(rows, k, seed=rows)
        answer = product(x)
        assert answer.dtype == BF16 and answer.shape == (rows, n)
        assert error(answer, x, weight, bias) < {"native": 0.003, "int8": 0.012, "int4": 0.1}[factory.name]
        assert torch.equal(product.fp32(x), answer.float())
        exact = product.exact(x)
        assert torch.equal(exact.to(BF16), answer)
        if factory.name == "native":
            assert error(exact, x, weight, bias) < 1e-5


def test_an_answer_depends_on_nothing_but_its_row(factory):
    """Bit for bit: on no neighbour, no place in the batch and no number of threads."""
    weight = draw(1040, 1088)
    product = factory(weight, None)
    x = draw(300, 1088, seed=1)
    whole = product(x)
    for count in (1, 3):
        with threads(count):
            for first, last in ((0, 1), (17, 24), (100, 300), (299, 300)):
                assert torch.equal(product(x[first:last]), whole[first:last])


def test_rows_may_lie_apart_and_in_more_dimensions(factory):
    weight = draw(48, 64)
    product = factory(weight, None)
    wide = draw(6, 200)
    assert torch.equal(product(wide[:, 100:164]), product(wide[:, 100:164].contiguous()))
    cube = draw(2, 3, 64)
    assert torch.equal(product(cube), product(cube.view(6, 64)).view(2, 3, 48))


@pytest.mark.parametrize("shape", [(96, 64), (100, 192)], ids=str)
def test_products_of_heads_have_the_bits_of_each_alone(isa, shape):
    """On any number of threads, and where rows lie apart."""
    (n, k), heads = shape, 5
    made = made_or_skip(PairFactory)
    products = [made(draw(n, k, seed=head), None) for head in range(heads)]
    together = NativeHeads(products)
    for rows, count in itertools.product((1, 7, 33), (1, 2, 7)):
        x, out = draw(rows, heads, k + 6, seed=rows)[..., 6:], torch.zeros((rows, heads, n + 3), dtype=BF16)
        with threads(count):
            together(x, out[..., 3:])
        assert torch.equal(out[..., 3:], torch.stack([each(x[:, head]) for head, each in enumerate(products)], 1))
        assert not out[..., :3].any()


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_what_is_no_number_stays_in_its_row_and_shows(factory, poison):
    weight = draw(32, 128)
    product = factory(weight, None)
    x = draw(7, 128)
    clean = product(x)
    x[3, 70] = poison
    poisoned = product(x)
    assert not poisoned[3].isfinite().any()
    others = torch.arange(7) != 3
    assert torch.equal(poisoned[others], clean[others])


@pytest.mark.parametrize("kind", [ByteFactory, NibbleFactory])
def test_a_row_of_bytes_that_is_not_finite_is_no_number_and_one_near_zero_is_zero(isa, kind):
    """The scale of a group is decided whatever lies beside what is not finite, in the same lane of a vector too."""
    product = made_or_skip(kind)(draw(32, 128), None)
    x = draw(5, 128)
    for row, poison in enumerate((float("nan"), float("inf"), -float("inf"))):
        x[row, 3], x[row, 3 + 16], x[row, 3 + 32] = 3e38, poison, 1.0
    x[3] = 1e-39
    answer = product(x)
    assert answer[:3].isnan().all()
    assert (answer[3] == 0).all()
    assert answer[4].isfinite().all() and (answer[4] != 0).any()


LARGEST = [
    *((shape, "any") for shape in (*SHAPES, (5000, 64))),
    *((shape, kind) for shape in ((100, 192), (5000, 64)) for kind in ("ties", "no numbers")),
    *((shape, kind) for shape in ((17, 128), (33, 2112)) for kind in ("zeros", "infinite")),
]
"""Shapes, and what is peculiar to their rows: each with one kind of products, of which the sums alone are looked at."""


@pytest.mark.parametrize(
    ("shape", "kind", "make"),
    [(*each, make) for each, make in zip(LARGEST, itertools.cycle(FACTORIES), strict=False)],
    ids=lambda each: each.__name__ if isinstance(each, type) else str(each),
)
def test_the_largest_of_a_row_is_the_first_of_the_largest_that_would_be_written(isa, shape, kind, make):
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
    product = made_or_skip(make)(weight, bias)
    for rows in ROWS:
        x = draw(rows, k, seed=rows)
        if kind == "no numbers" and rows > 1:
            x[1] = float("nan")
        expected = product.fp32(x).argmax(dim=-1)
        for count in (1, 3):
            with threads(count):
                found = product.argmax(x)
            assert found.dtype == torch.int64
            assert torch.equal(found, expected)
    assert torch.equal(product.argmax(draw(2, 3, k)), product.argmax(draw(2, 3, k).view(6, k)).view(2, 3))


def test_an_odd_width_is_filled_up(isa):
    weight, x = draw(20, 33), draw(70, 33, seed=1)
    product = made_or_skip(PairFactory)(weight, None)
    assert error(product(x), x, weight) < 0.003
    assert torch.equal(product(x[20:24]), product(x)[20:24])


def awkward(rows, k):
    """Rows with what is no number, groups near zero and at both ends of the range, and ties of rounding."""
    x = draw(rows, k, seed=rows)
    for row, values in enumerate(
        ([float("nan")], [float("inf")], [1e-39, 2e-38], [3e38, -3e38], [127.0, 0.5, 1.5, 2.5])
    ):
        if row < rows - 1:
            x[row, : len(values)] = torch.tensor(values)
    if rows > 6:
        x[5], x[6, 64:] = 1e-38, 0.0
    return x


@pytest.mark.parametrize("kind", [ByteFactory, NibbleFactory])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bytes_and_nibbles_have_the_same_bits_in_every_instruction_set(monkeypatch, shape, kind):
    n, k = shape
    weight, bias = draw(n, k), draw(n, seed=1)
    weight[0], weight[1] = weight[0].abs(), -weight[1].abs()  # 0 and 15 stand for 0
    first, *others = in_every_isa(monkeypatch, lambda: made_or_skip(kind)(weight, bias))
    for rows in ROWS:
        x = awkward(rows, k)
        bits, largest = first(x).view(torch.int16), first.argmax(x)
        for product in others:
            assert torch.equal(product(x).view(torch.int16), bits) and torch.equal(product.argmax(x), largest)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pairs_have_the_portable_bits_in_floats_and_are_near_in_their_own_instruction(monkeypatch, shape):
    """The product of two bfloat16 is exact in float32, so all loops over floats round the same sums. `vdpbf16ps` and
    AMX round otherwise, k times at most on either side; outputs are rounded to half a unit of bfloat16."""
    n, k = shape
    weight, bias = draw(n, k), draw(n, seed=1)
    portable, *others, avx512, amx = in_every_isa(monkeypatch, lambda: made_or_skip(PairFactory)(weight, bias))
    for rows in ROWS:
        x = draw(rows, k, seed=rows)
        expected = portable.fp32(x)
        assert all(torch.equal(each.fp32(x), expected) for each in others)
        size = F.linear(x.double().abs(), weight.double().abs(), bias.double().abs())
        bound = 2 * k * 2**-24 * size + 2**-8 * expected.double().abs()
        for each in (avx512, amx):
            assert ((each.fp32(x).double() - expected.double()).abs() <= bound).all()


def test_rounding_to_bytes_keeps_zeros_and_harms_only_the_block_of_an_outlier(isa):
    factory = made_or_skip(ByteFactory)
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


def integers(bits, group, kind):
    """Of a matrix [40, 512]: numbers at both ends, scales at both ends of float16."""
    n, k = 40, 512
    generator = torch.Generator().manual_seed(group)
    numbers = torch.randint(0, 1 << bits, (n, k), generator=generator, dtype=torch.uint8)
    numbers[3], numbers[4] = (1 << bits) - 1, 0
    groups = n, k // group
    if kind == "factored":
        scales, least = (torch.randint(0, 64, groups, generator=generator, dtype=torch.uint8) for _ in range(2))
        factors = torch.rand((n, k // 256, 2), generator=generator).half()
        factors[5], factors[6, 0], factors[7] = 6e-8, 65504.0, -factors[7]
        return Integers(bits, numbers, scales, least, factors)
    scales = torch.rand(groups, generator=generator).half()
    scales[5], scales[6, 0], scales[7] = 6e-8, 65504.0, -scales[7]
    if kind == "iq4":
        return Integers(bits, numbers, scales, code=Code.IQ4)
    zeros = torch.randint(0, (1 << bits) + (bits == 4), groups, generator=generator).to(torch.uint8)  # GPTQ's reach 16
    if kind == "mxfp4":
        exponents = torch.randint(110, 131, groups, generator=generator, dtype=torch.uint8)
        numbers[2], exponents[5], exponents[6, 0] = 7, 0, 235
        return Integers(bits, numbers, exponents, code=Code.MXFP4)
    order = torch.randperm(k, generator=generator).int() if kind == "ordered" else None
    return Integers(bits, numbers, scales, None if kind == "centered" else zeros, order=order)


@pytest.mark.parametrize(
    ("bits", "group", "kind"),
    [
        *itertools.product((4, 8), (16, 32, 64, 128), ("centered", "zeroed", "ordered")),
        (4, 32, "factored"),
        (4, 16, "mxfp4"),
        (4, 32, "mxfp4"),
        (4, 16, "iq4"),
        (4, 32, "iq4"),
    ],
)
def test_integers_are_multiplied_as_the_numbers_that_they_stand_for(monkeypatch, bits, group, kind):
    """In groups as files have them, with the largest products that 16 bits must hold. Rows of whole numbers are rounded
    to themselves. Many rows have the bits of few."""
    matrix = integers(bits, group, kind)
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-126, 127, (60, 512), generator=generator).float()
    x[:, ::16], x[0], x[1] = 127.0, 127.0, -127.0  # wherever a group begins
    if matrix.order is not None:
        x[:, matrix.order[::16].long()] = 127.0
    weight = matrix.floats().double()
    expected = x.double() @ weight.T
    form = matrix.form
    assert form.group == group and form.fitting([0, 512]) == form
    assert (form.fitting([128, 384]) is None) == form.factored

    def product():
        made = made_or_skip(lambda: StoredFactory(Workspace()))(matrix, None)
        held = [each for each in tree_leaves(gc.get_referents(made)) if isinstance(each, torch.Tensor)]
        assert sum(each.nbytes for each in held) == StoredFactory.nbytes(*matrix.shape, form)
        many = made.fp32(x.to(BF16))
        assert torch.equal(many[:7], made.fp32(x[:7].to(BF16)))
        ids = torch.tensor([39, 0, 5, 5])
        torch.testing.assert_close(made.rows(ids), weight[ids].to(BF16), rtol=2**-7, atol=0)
        return many

    first, *others = in_every_isa(monkeypatch, product)
    assert all(torch.equal(first, each) for each in others)
    scale = (x.abs().double() @ weight.abs().T).clamp_min(1e-30)
    assert ((first.double() - expected).abs() / scale).max() < 2**-8


def test_every_number_of_mxfp4_is_exact_with_every_exponent(monkeypatch):
    """2^-127 too, which is subnormal; NaN stays what no number is. Rows are small, so that float32 holds all sums."""
    numbers = torch.arange(32, dtype=torch.uint8).repeat(256, 1) % 16
    numbers[:, 16:] = numbers[:, 16:].roll(5, 1)
    exponents = torch.arange(256)[:, None]
    matrix = Integers(4, numbers, exponents.to(torch.uint8), code=Code.MXFP4)
    e2m1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    weight = torch.cat((e2m1, -e2m1))[numbers.int()] * 2.0 ** (exponents.double() - 127)
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-126, 127, (60, 32), generator=generator).double()
    x[:, 0] = 127
    x *= 2.0**-20

    def product():
        made = made_or_skip(lambda: StoredFactory(Workspace()))(matrix, None)
        answer = made.exact(x.to(BF16))
        assert torch.equal(answer[:, :255].double(), (x @ weight.T)[:, :255])
        assert torch.equal(answer[:2], made.exact(x[:2].to(BF16)))
        assert not answer[:, 255].isfinite().any()
        held = torch.arange(253)  # beyond, float32 has no room for 6
        assert torch.equal(made.rows(held).double(), weight[held])
        assert made.rows(torch.tensor([255])).isnan().all()
        return answer[:, :255]

    first, *others = in_every_isa(monkeypatch, product)
    assert all(torch.equal(first, each) for each in others)
    assert torch.equal(matrix.floats()[:253].double(), weight[:253])


def test_every_number_of_iq4_is_exact(isa):
    """Sums of rows and weights that are whole numbers are."""
    numbers = torch.arange(32, dtype=torch.uint8).repeat(16, 1) % 16
    numbers[:, 16:] = torch.arange(16, dtype=torch.uint8)[:, None]
    made = made_or_skip(lambda: StoredFactory(Workspace()))(
        Integers(4, numbers, torch.ones(16, 1).half(), code=Code.IQ4), None
    )
    iq4 = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]  # of ggml-common.h
    weight = torch.tensor(iq4, dtype=torch.float64)[numbers.int()]
    x = torch.randint(-126, 127, (60, 32), generator=torch.Generator().manual_seed(0)).double()
    x[:, 0] = 127
    assert torch.equal(made.exact(x.to(BF16)).double(), x @ weight.T)
    assert torch.equal(made.rows(torch.arange(16)).double(), weight)


@pytest.mark.parametrize("kind", [PairFactory, ByteFactory, NibbleFactory])
def test_rows_of_a_packed_matrix_are_what_it_multiplies(kind):
    """What the embedding is looked up in, where the head is the same table."""
    factory, weight = made_or_skip(kind), draw(88, 128).float()
    kept = weight.clone()
    product, ids = factory(weight, None), torch.tensor([0, 87, 16, 16, 3])
    assert torch.equal(weight, kept)
    each = torch.eye(128).to(BF16)
    atol = 1e-6 if kind is ByteFactory else 0  # sums of 16 numbers in another order
    torch.testing.assert_close(product.rows(ids), product(each).T[ids], rtol=2**-7, atol=atol)


def test_an_outlier_in_each_group_leaves_the_others_most_of_their_bits(isa):
    """Of a row or of a column. Without mixing the error is 0.02."""
    made = made_or_skip(ByteFactory)
    plain, large = draw(70, 256, seed=1), draw(70, 256)
    large[:, 5::64] = 30.0
    for x, weight in ((large, plain), (plain, large)):
        assert error(made(weight, None)(x), x, weight) < 0.012


def test_the_largest_numbers_of_bfloat16_are_mixed_without_becoming_infinite(isa):
    weight, x = torch.full((16, 64), 2.0**-10).to(BF16), torch.full((3, 64), 3e38).to(BF16)
    weight[:, 1::2] = 0
    answer = made_or_skip(ByteFactory)(weight, None)(x)
    torch.testing.assert_close(answer.double(), x.double() @ weight.double().T, rtol=0.02, atol=0)


def test_the_last_rows_of_4_bits_may_have_8_where_blocks_of_these_divide_a_row():
    space = made_or_skip(Workspace)
    factory, x = NibbleFactory(space), draw(9, 192)
    for k, fine in ((192, 40), (96, 0)):  # blocks of 64 do not divide 96
        weight, bias, rows = draw(100, k), draw(100, seed=1), x[:, :k]
        made = factory(weight, bias, 40)
        parts = NibbleFactory(space)(weight[: 100 - fine], bias[: 100 - fine])(rows)
        if fine:
            parts = torch.cat((parts, ByteFactory(space)(weight[-fine:], bias[-fine:])(rows)), -1)
        assert torch.equal(made(rows), parts)
        assert error(made(rows)[:, 60:], rows, weight[60:], bias[60:]) < (0.012 if fine else 0.1)
    plain = NibbleFactory(space)
    plain(draw(100, 192), None)
    factory = NibbleFactory(space)
    factory(draw(100, 192), None, 40)
    assert 0.6 * plain.error < factory.error < 0.9 * plain.error  # of all rows


def test_a_product_of_several_kinds_is_theirs_side_by_side():
    space = made_or_skip(Workspace)
    bias, held = draw(40 + 40 + 24), StoredFactory(space)
    parts = [
        held(integers(4, 32, "factored"), bias[:40]),
        held(integers(8, 16, "ordered"), bias[40:80]),
        PairFactory(space)(draw(24, 512), bias[80:]),
    ]
    joined = NativeLinear.joined(parts)
    for rows in (1, 9, 70):
        x = draw(rows, 512)
        assert torch.equal(joined(x), torch.cat([part(x) for part in parts], -1))
        assert torch.equal(joined.fp32(x), torch.cat([part.fp32(x) for part in parts], -1))


def test_bytes_are_refused_where_they_cannot_be_used():
    made_or_skip(ByteFactory)
    for kind in (ByteFactory, NibbleFactory):
        with pytest.raises(InvalidRequest, match=f"blocks of {kind.group}.*without --quantize {kind.name}"):
            kind()(draw(16, 80), None)
        with pytest.raises(InvalidRequest, match="float32"):
            select_quantized(CPU, torch.float32, kind.name)
        with pytest.raises(InvalidRequest, match="not on cuda"):
            select_quantized(torch.device("cuda"), BF16, kind.name)


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
    made_or_skip(PairFactory)
    for isa, chosen in (("portable", False), ("avx2", True), ("avx512", True), ("amx", True)):
        monkeypatch.setenv(ISA_VARIABLE, isa)
        name, reason, factory = select_linear(CPU, BF16)
        if chosen and factory.isa != "portable C":
            assert name == "native" and factory.isa in reason
        else:
            assert name != "native" and "portable C" in reason
        assert select_linear(CPU, BF16, "native").name == "native"


def test_a_kernel_that_is_wrong_is_not_chosen(monkeypatch):
    made_or_skip(PairFactory)
    right = PairFactory.__call__
    monkeypatch.setattr(PairFactory, "__call__", lambda self, weight, bias: right(self, weight * 1.05, bias))
    name, reason, _ = select_linear(CPU, BF16)
    assert name != "native" and "disagrees" in reason
