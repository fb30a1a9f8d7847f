"""What lies between the products, against float64, in torch and in every instruction set of this machine."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from ferrum_rpc.models.fused_ops import NATIVE, NativeFusedOps, TorchFusedOps, activation_name
from ferrum_rpc.models.fused_ops_choice import select_fused_ops
from ferrum_rpc.models.rope import RopeSpec
from ferrum_rpc.models.rotary import Rotary
from tests.support import exact_rows
from tests.support.exact_rows import draw, model_of

CPU = torch.device("cpu")
SIZES = {"hidden_size": 96, "intermediate_size": 160, "num_attention_heads": 6, "num_key_value_heads": 2}
MODEL = exact_rows.one_layer(**SIZES, head_dim=32)
SPEC = MODEL.layers[0]
TYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)


def every_way(dtype, spec=SPEC):
    yield TorchFusedOps(spec, dtype)
    for lanes in (16, 8, 4):
        with suppress(OSError):
            yield NativeFusedOps(spec, dtype, lanes)


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
    variants = (exact_rows.variant(SPEC, name) for name in exact_rows.VARIANTS)
    assert {activation_name(each.mlp.activation) for each in variants} == NATIVE.keys()


@TYPES
@pytest.mark.parametrize(
    ("name", "rows"), [*((each, 3) for each in exact_rows.VARIANTS), ("plain", 1), ("normed", 2000)]
)
def test_what_families_differ_in(dtype, name, rows):
    """Also of so many rows that they are shared out to threads."""
    spec = exact_rows.variant(SPEC, name)

    def near(found, exact):  # in torch a gate's product is of two rounded numbers
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(found.double(), exact, rtol=1.1 * eps if eps > 1e-3 else 32 * eps, atol=4e-6)

    for ops in every_way(dtype, spec):
        exact_rows.check(ops, spec, dtype, rows, close_gate=near)


@pytest.mark.parametrize("name", ["plain", "clamped"])
def test_a_gate_of_what_is_not_a_number_is_none(name):
    rows = draw(1, 320, dtype=torch.bfloat16)
    rows[0, 7] = rows[0, 160 + 9] = torch.nan
    for ops in every_way(torch.bfloat16, exact_rows.variant(SPEC, name)):
        assert ops.gate(rows.clone()).isnan().nonzero().tolist() == [[0, 7], [0, 9]]


def test_what_is_not_a_number_stays_none():
    for ops in every_way(torch.bfloat16):
        hidden = draw(1, 96, dtype=torch.bfloat16)
        hidden[0, 5] = torch.nan
        assert ops.add_norm(hidden, None, draw(1, 96)).isnan().all()
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
    reason, ops = select_fused_ops(model_of(spec, MODEL), dtype, CPU)
    assert ops.name == "torch" and why in reason


@TYPES
@pytest.mark.parametrize("name", exact_rows.VARIANTS)
def test_the_kernel_of_every_family_is_chosen(name, dtype):
    reason, ops = select_fused_ops(model_of(exact_rows.variant(SPEC, name), MODEL), dtype, CPU)
    assert ops.name == "native", reason


@pytest.mark.usefixtures("no_library")
def test_torch_is_chosen_where_the_kernel_is_not_built():
    reason, ops = select_fused_ops(MODEL, torch.bfloat16, CPU)
    assert ops.name == "torch" and "compiler" in reason


@pytest.mark.parametrize("factor", [1.1, float("nan")])
@pytest.mark.parametrize("name", ["add_norm", "gate"])
def test_a_kernel_that_is_wrong_is_not_used(monkeypatch, name, factor):
    right = getattr(NativeFusedOps, name)
    monkeypatch.setattr(NativeFusedOps, name, lambda *arguments: right(*arguments) * factor)
    reason, ops = select_fused_ops(MODEL, torch.bfloat16, CPU)
    assert ops.name == "torch" and "differs from torch's" in reason
