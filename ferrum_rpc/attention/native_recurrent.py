"""The recurrence of Gated DeltaNet on a CPU by C kernels: a step reads each state once, and writes it at most once.

Torch passes over a state several times for every token, and dispatches an operation for each pass. ``recurrent_step.c``
passes all tokens through a slice of the state that stays in cache, for all sequences of a step in one call a layer.
``recurrent_chunk.c`` computes long spans, head by head. `recurrent` has the design of both, and computes in torch what
they do not take.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ferrum_rpc.core import RecurrentShape
from ferrum_rpc.native import library

DTYPES: Final = (torch.bfloat16, torch.float32)
Inputs = tuple[Tensor, Tensor, Tensor]
"""`recurrent.RecurrentInputs`."""

Jobs = npt.NDArray[np.int64]
"""[jobs, 9]: a `library.RecurrentJob` in each row, whose fields all have 8 bytes."""

JOB_INTEGERS: Final = 9

FOLDED: Final = 4
"""The column of how many tokens a state contains, which C brings up to date."""

FLOOR: Final = 5
"""The column of how many it contains after the step."""


def lanes_of(shape: RecurrentShape, states: Tensor, channels: Tensor) -> int:
    """Floats in the vectors that the kernels have for such states and rows; 0: torch must compute."""
    return lanes(shape, states.dtype, channels.dtype) if states.device.type == "cpu" else 0


def lanes(shape: RecurrentShape, wide: torch.dtype, dtype: torch.dtype) -> int:
    """As `lanes_of`, on a CPU, of states in ``wide`` and rows in ``dtype``."""
    if wide != torch.float32 or dtype not in DTYPES:
        return 0
    return library.recurrent_lanes(shape.key_dim, shape.value_dim, shape.taps)


def addresses(*tensors: Tensor) -> tuple[Jobs, Jobs]:
    """Of the first elements of ``tensors``, and the bytes from one of their parts to the next."""
    first, apart = ([each.data_ptr() for each in tensors], [each.stride(0) * each.element_size() for each in tensors])
    return np.array(first, np.int64), np.array(apart, np.int64)


def step(shape: RecurrentShape, lanes: int, taps: Tensor, jobs: Jobs, inputs: Inputs) -> Tensor:
    """Rows [T, value_heads, value_dim], defined where a job has them. States contain ``floor`` tokens then, as
    ``jobs`` (contiguous) say, and journals have the new ones.

    ``taps``: [taps, channels], float32 and contiguous. ``inputs``: channels in the type of the journals. A job without
    new rows must have tokens to fold, and none behind them.

    Raises MemoryError, and changes nothing, if memory is short.
    """
    first = jobs.ctypes.data

    def run(layer: int) -> int:
        status: int = library.load().ferrum_recurrent_step(layer, first, len(jobs))
        return status

    return _rows(shape, lanes, taps, inputs, run)


def chunk(shape: RecurrentShape, lanes: int, taps: Tensor, inputs: Inputs, state: Tensor) -> Tensor:
    """Rows [T, value_heads, value_dim] of T tokens in the chunked form. ``state`` [value_heads, key_dim, value_dim],
    float32 and contiguous, is updated in place.

    ``taps``: as for `step`. ``inputs``: their channels begin with the rows of the taps - 1 tokens before.

    Raises MemoryError, and changes nothing, if memory is short.
    """

    def run(layer: int) -> int:
        status: int = library.load().ferrum_recurrent_chunk(layer, len(inputs[1]), state.data_ptr())
        return status

    return _rows(shape, lanes, taps, inputs, run)


def _rows(shape: RecurrentShape, lanes: int, taps: Tensor, inputs: Inputs, run: Callable[[int], int]) -> Tensor:
    """What ``run`` computes, which gets the address of a `library.RecurrentLayer`."""
    channels, log_decay, beta = inputs
    if channels.stride(1) != 1:
        channels = channels.contiguous()
    log_decay, beta = (each.to(torch.float32).contiguous() for each in (log_decay, beta))
    found = channels.new_empty((len(log_decay), shape.value_heads, shape.value_dim))
    layer = library.RecurrentLayer(
        taps.data_ptr(),
        channels.data_ptr(),
        channels.stride(0) * channels.element_size(),
        log_decay.data_ptr(),
        beta.data_ptr(),
        found.data_ptr(),
        shape.key_heads,
        shape.value_heads,
        shape.key_dim,
        shape.value_dim,
        shape.taps,
        channels.dtype == torch.float32,
        lanes,
        torch.get_num_threads(),
    )
    if run(ctypes.addressof(layer)):
        raise MemoryError("no memory for the rows of a recurrent layer")
    return found
