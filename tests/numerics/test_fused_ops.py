"""What lies between the products, against float64, in torch and in every instruction set of this machine."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from ferrum_rpc.models.fused_ops import NATIVE, NativeFusedOps, TorchFusedOps
from ferrum_rpc.models.fused_ops_choice import select_fused_ops
from ferrum_rpc.models.rope import RopeSpec
from ferrum_rpc.models.rotary import Rotary
from ferrum_rpc.models.spec import ModelSpec
from ferrum_rpc.native import library
from tests import exact_rows
from tests.checkpoints import TINY
from tests.exact_rows import close

CPU = torch.device("cpu")
MODEL = ModelSpec.from_config(
    {**TINY, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"}
    | {"hidden_size": 96, "intermediate_size": 160, "num_attention_heads": 6, "num_key_value_heads": 2}
    | {"head_dim": 32, "num_hidden_layers": 1}
)
SPEC = MODEL.layers[0]


def model(layer):
    """Of one such layer."""
    layer = replace(layer, mlp=replace(layer.mlp, hidden=layer.mixer.hidden))
    return replace(MODEL, layers=(layer,), hidden_size=layer.mixer.hidden, norm=layer.norm)


TYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)


def every_way(dtype, spec=SPEC):
    yield TorchFusedOps(spec, dtype)
    for lanes in (16, 8, 4):
        with suppress(OSError):
            yield NativeFusedOps(spec, dtype, lanes)


def draw(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@TYPES
@pytest.mark.parametrize("rows", [1, 3, 2000], ids=str)  # the last is shared out to threads
def test_the_sum_is_kept_and_normed(dtype, rows):
    weight, delta = draw(1, 96, seed=1), draw(rows, 96, dtype=dtype, seed=2)
    for ops in every_way(dtype):
        hidden = draw(rows, 96, dtype=dtype) * 3
        total = hidden + delta
        for each in (delta, None):
            normed = ops.add_norm(hidden, each, weight)
            assert torch.equal(hidden, total)
            exact = total.double() * (total.double().square().mean(-1, keepdim=True) + SPEC.norm.eps).rsqrt()
            close(normed, exact * weight.double())


@TYPES
@pytest.mark.parametrize("norms", [False, True], ids=["plain", "normed"])
def test_queries_and_keys_are_normed_and_rotated_and_values_left_alone(dtype, norms):
    positions = torch.tensor([0, 1, 500, 30_000])
    rope = RopeSpec("yarn", factor=4.0, original_context=4096, attention_factor=1.2)
    cos, sin = (each[0] for each in Rotary([rope], 32, CPU)(positions))
    norm = draw(8, 32, seed=5) if norms else None
    for ops in every_way(dtype):
        qkv = draw(4, 10 * 32, dtype=dtype, seed=3)
        heads = qkv.clone().view(4, 10, 32).double()
        rotating = heads[:, :8]
        if norm is not None:
            rotating = rotating * (rotating.square().mean(-1, keepdim=True) + SPEC.norm.eps).rsqrt() * norm.double()
        turned = torch.cat((-rotating[..., 16:], rotating[..., :16]), -1)
        exact = rotating * cos.double() + turned * torch.cat((sin, sin), -1).double()
        query, key, value = ops.heads(qkv, norm, cos, sin)
        close(query, exact[:, :6])
        close(key, exact[:, 6:])
        assert torch.equal(value.double(), heads[:, 8:])


@TYPES
def test_the_gate_is_silu_from_one_end_of_the_numbers_to_the_other(dtype):
    gate = torch.cat((draw(40) * 4, torch.linspace(-120, 120, 117), torch.tensor([0.0, -1e30, 1e30])))
    rows = torch.cat((gate, draw(160, seed=4)))[None].to(dtype)
    for ops in every_way(dtype):
        # In torch the product is of two rounded numbers.
        torch.testing.assert_close(
            ops.gate(rows.clone()).double(),
            F.silu(rows[:, :160].double()) * rows[:, 160:].double(),
            rtol=1.1 * torch.finfo(dtype).eps if dtype == torch.bfloat16 else 4e-6,
            atol=1e-30,
        )


def test_every_activation_of_the_kernels_is_tried():
    assert {exact_rows.variant(SPEC, name).mlp.activation for name in exact_rows.VARIANTS} == NATIVE.keys()


@TYPES
@pytest.mark.parametrize("name", exact_rows.VARIANTS)
def test_what_families_differ_in(dtype, name):
    spec = exact_rows.variant(SPEC, name)

    def near(found, exact):  # in torch a gate's product is of two rounded numbers
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(found.double(), exact, rtol=1.1 * eps if eps > 1e-3 else 32 * eps, atol=4e-6)

    for ops in every_way(dtype, spec):
        exact_rows.check(ops, spec, draw, near, dtype)


def test_what_is_not_a_number_stays_none():
    for ops in every_way(torch.bfloat16):
        hidden = draw(1, 96, dtype=torch.bfloat16)
        hidden[0, 5] = torch.nan
        assert ops.add_norm(hidden, None, draw(1, 96)).isnan().all()
        rows = draw(1, 320, dtype=torch.bfloat16)
        rows[0, 7] = torch.nan
        assert ops.gate(rows).isnan().nonzero().tolist() == [[0, 7]]
        for norm in (None, draw(8, 32, seed=5)):
            qkv = draw(1, 320, dtype=torch.bfloat16)
            qkv[0, 32 + 3] = torch.nan
            query, key, value = ops.heads(
                qkv, norm, *(each[0] for each in Rotary([RopeSpec()], 32, CPU)(torch.tensor([9])))
            )
            lost = query[0, 1].isnan().nonzero().flatten().tolist()
            assert lost == ([3, 19] if norm is None else [*range(32)])
            assert query[0, 2:].isfinite().all() and key.isfinite().all() and value.isfinite().all()


@pytest.mark.parametrize(
    ("spec", "dtype", "why"),
    [
        (SPEC, torch.float16, "not float16"),
        (replace(SPEC, mlp=replace(SPEC.mlp, activation="gelu")), torch.float32, "not gelu"),
        (replace(SPEC, mixer=replace(SPEC.mixer, head_dim=12, rotary_dim=12)), torch.float32, "must be multiples"),
    ],
    ids=["dtype", "activation", "width"],
)
def test_what_the_kernel_cannot_do_torch_does_and_the_reason_says_so(spec, dtype, why):
    reason, ops = select_fused_ops(model(spec), dtype, CPU)
    assert ops.name == "torch" and why in reason


@TYPES
@pytest.mark.parametrize("name", exact_rows.VARIANTS)
def test_the_kernel_of_every_family_is_chosen(name, dtype):
    reason, ops = select_fused_ops(model(exact_rows.variant(SPEC, name)), dtype, CPU)
    assert ops.name == "native", reason


def test_the_kernel_is_chosen_where_it_is_built_and_torch_where_not(monkeypatch):
    assert select_fused_ops(model(SPEC), torch.bfloat16, CPU)[1].name == "native"
    monkeypatch.setattr(library, "PACKAGE", "no_such_package")
    monkeypatch.setattr(library, "load", library.load.__wrapped__)
    reason, ops = select_fused_ops(model(SPEC), torch.bfloat16, CPU)
    assert ops.name == "torch" and "compiler" in reason


@pytest.mark.parametrize("factor", [1.1, float("nan")])
@pytest.mark.parametrize("name", ["add_norm", "gate"])
def test_a_kernel_that_is_wrong_is_not_used(monkeypatch, name, factor):
    right = getattr(NativeFusedOps, name)
    monkeypatch.setattr(NativeFusedOps, name, lambda *arguments: right(*arguments) * factor)
    reason, ops = select_fused_ops(model(SPEC), torch.bfloat16, CPU)
    assert ops.name == "torch" and "differs from torch's" in reason
