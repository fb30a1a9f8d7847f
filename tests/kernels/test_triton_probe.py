"""Whether the kernels can be used is decided by asking them, and the answer is a reason that a person can act on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from ferrum_rpc.attention import triton_paged, triton_probe
from ferrum_rpc.attention.triton_probe import probe
from ferrum_rpc.core import AttentionSpec

SPEC = AttentionSpec(4, 2, 16, 0.25)
ROOT = Path(__file__).resolve().parents[2]


def test_layers_that_the_kernels_compute_right_have_no_reason_against(device):
    assert probe(device, [SPEC, AttentionSpec(4, 2, 16, 0.25, 4096, 30.0)], torch.float32) is None


def test_a_wrong_answer_is_a_reason(device, monkeypatch):
    monkeypatch.setattr(triton_paged, "_exponent", lambda spec: (spec.scale, 0.0))
    reason = probe(device, [SPEC], torch.float32)
    assert reason is not None and "differs from float32" in reason


def test_a_failure_is_a_reason(device, monkeypatch):
    def fail(*_):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(triton_paged.TritonPagedAttention, "attend", fail)
    assert probe(device, [SPEC], torch.float32) == "a small step failed: RuntimeError: no such instruction"


def test_what_the_kernels_do_not_know_is_a_reason(device):
    assert "float64" in (probe(device, [SPEC], torch.float64) or "")
    assert "512" in (probe(device, [AttentionSpec(4, 2, 512, 0.25)], torch.float32) or "")


def test_no_triton_is_a_reason(monkeypatch):
    monkeypatch.setattr(triton_probe, "find_spec", lambda _: None)
    assert probe(torch.device("cuda"), [SPEC], torch.bfloat16) == "triton is not installed"


def test_without_cuda_the_reason_is_the_device():
    program = (
        "import torch; from ferrum_rpc.attention.triton_probe import probe; from ferrum_rpc.core import AttentionSpec;"
        "print(probe(torch.device('cpu'), [AttentionSpec(4, 2, 16, 0.25)], torch.float32))"
    )
    compiling = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=compiling, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "the kernels are for CUDA, not for cpu"
