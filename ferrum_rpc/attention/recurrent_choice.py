"""Which kernels advance the states of recurrent layers on a GPU, and why."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final

import torch

from ferrum_rpc.attention.recurrent import STEP_TOKENS, RecurrentInputs, RecurrentKernels
from ferrum_rpc.attention.recurrent_steps import RecurrentSpan, RecurrentStore
from ferrum_rpc.core import RecurrentShape
from ferrum_rpc.selection import BackendCandidate, Choice, Unsuited, select

WIDEST_KEY: Final = 256
"""Rows of a head's state that a program of the kernels holds in its registers."""

COUNTS: Final = ((3, 1), (1, 2), (2, 1), (70, 1))
"""Tokens of each sequence in the steps of the probe: journals fill and are folded, and a chunk has two blocks."""

TOLERANCE: Final = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Relative, by the type of the rows."""


def select_recurrence(shape: RecurrentShape, dtype: torch.dtype, device: torch.device) -> Choice:
    """`RecurrentKernels` for ``device``, or None: torch advances each sequence by itself, token by token."""
    reason = "two launches a layer for all sequences, and two for a prompt"
    kernel = BackendCandidate("triton", lambda: _triton(shape, dtype, device), reason)
    plain = BackendCandidate("torch", lambda: None)
    return select(kernel, plain, what="recurrence", field="recurrence")


def _triton(shape: RecurrentShape, dtype: torch.dtype, device: torch.device) -> RecurrentKernels:
    if find_spec("triton") is None:
        raise Unsuited("it is not installed")
    if torch.version.hip is not None:
        raise Unsuited("the kernels support CUDA, not ROCm")
    if dtype not in TOLERANCE:
        raise Unsuited(f"the kernels do not support {str(dtype).removeprefix('torch.')}")
    if shape.key_dim > WIDEST_KEY:
        raise Unsuited(f"keys of {shape.key_dim} are wider than {WIDEST_KEY}")
    from ferrum_rpc.attention import triton_recurrent, triton_recurrent_chunk

    kernels = RecurrentKernels(triton_recurrent.step, triton_recurrent_chunk.chunk)
    error = _error(kernels, shape, dtype, device)
    if not error <= TOLERANCE[dtype]:  # so that NaN fails too
        raise Unsuited(f"small steps differ from float64 arithmetic by {error:.1e}, more than {TOLERANCE[dtype]:.0e}")
    return kernels


def _error(kernels: RecurrentKernels, shape: RecurrentShape, dtype: torch.dtype, device: torch.device) -> float:
    """The largest relative difference between the rows of small steps on ``device`` and torch in float64 on a CPU."""
    generator, largest = torch.Generator().manual_seed(0), 0.0
    weight = torch.randn((shape.channels, shape.taps), generator=generator)
    stores = [
        RecurrentStore(shape, 1, 3, dtype=dtype, device=device, kernels=kernels),
        RecurrentStore(shape, 1, 3, dtype=torch.float64, device=torch.device("cpu")),
    ]
    for slot in (*stores[0].slots, *stores[1].slots):
        slot.clear()
    for counts in COUNTS:
        channels = torch.randn((sum(counts), shape.channels), generator=generator).to(dtype)
        decay, beta = torch.rand((2, sum(counts), shape.value_heads), generator=generator)
        rows = []
        for store in stores:
            first, second, third = store.slots
            into = first if counts[0] <= STEP_TOKENS else third
            spans = [
                RecurrentSpan(first, into, first.length, counts[0]),
                RecurrentSpan(second, second, second.length, counts[1]),
            ]
            step, (states, own, _) = store.begin(spans), store.buffers
            gates = (each.to(states.device, states.dtype) for each in (-decay, beta))
            inputs = RecurrentInputs(channels.to(own.device, own.dtype), *gates)
            rows.append(step.recur(0, weight.to(states.device, states.dtype), *inputs).cpu().double())
            step.commit()
        found, wanted = rows
        largest = max(largest, float((found - wanted).norm() / wanted.norm()))
    return largest
