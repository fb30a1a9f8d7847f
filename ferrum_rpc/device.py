"""Whether the CUDA device of this process still works.

Not every failure of a device has a type. Torch raises `torch.AcceleratorError`, but Triton's launcher and cuBLAS raise
a plain RuntimeError, which a wrong argument raises too. After nearly all failures of a device every later call fails,
so one more call distinguishes them.
"""

from __future__ import annotations

from typing import Final

import torch

from ferrum_rpc.errors import DeviceLost

DEVICE_ERRORS: Final = (torch.AcceleratorError, DeviceLost)
"""Errors that mean that the device is lost: the runtime's own error class, after nearly all of which every later call
fails too. Out of memory is not one (`torch.OutOfMemoryError`: the allocation did not happen and the device continues).
After any other error `check_device` checks the device, because Triton and cuBLAS raise a plain RuntimeError."""


def check_device() -> None:
    """Wait for all queued work, and raise `torch.AcceleratorError` if the device is lost. Does nothing in a process
    that has not used CUDA. Call it after an error; a step without errors has no need of it."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
