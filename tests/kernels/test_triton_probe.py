"""Whether the kernels can be used is decided by asking them, and the answer is a reason that a person can act on."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from ferrum_rpc.attention import triton_paged, triton_probe
from ferrum_rpc.attention.triton_probe import probe
from ferrum_rpc.core import AttentionSpec
from ferrum_rpc.selection import Unsuited

SPEC = AttentionSpec(4, 2, 16, 0.25)
ROOT = Path(__file__).resolve().parents[2]


def test_layers_that_the_kernels_compute_right_have_no_reason_against(device):
    specs = [SPEC, AttentionSpec(4, 2, 16, 0.25, 4096, 30.0)]
    assert probe(device, specs, torch.float32) is triton_paged.TritonPagedAttention


def test_a_wrong_answer_is_a_reason(device, monkeypatch):
    monkeypatch.setattr(triton_paged, "_exponent", lambda spec: (spec.scale, 0.0))
    with pytest.raises(Unsuited, match="differs from float32"):
        probe(device, [SPEC], torch.float32)


@pytest.mark.parametrize(
    ("spec", "dtype", "reason"), [(SPEC, torch.float64, "float64"), (replace(SPEC, head_dim=512), torch.float32, "512")]
)
def test_what_the_kernels_do_not_know_is_a_reason(device, spec, dtype, reason):
    with pytest.raises(Unsuited, match=reason):
        probe(device, [spec], dtype)


def test_no_triton_is_a_reason(monkeypatch):
    monkeypatch.setattr(triton_probe, "find_spec", lambda _: None)
    with pytest.raises(Unsuited, match="triton is not installed"):
        probe(torch.device("cuda"), [SPEC], torch.bfloat16)


def test_without_cuda_the_reason_is_the_device():
    program = (
        "import torch; from ferrum_rpc.attention.triton_probe import probe; from ferrum_rpc.core import AttentionSpec\n"
        "try: probe(torch.device('cpu'), [AttentionSpec(4, 2, 16, 0.25)], torch.float32)\n"
        "except Exception as error: print(error)"
    )
    compiling = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=compiling, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "the kernels support CUDA, not cpu"
