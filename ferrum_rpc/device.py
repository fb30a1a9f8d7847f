"""Whether the CUDA device of this process still works.

Not every failure of a device has a type. Torch raises `torch.AcceleratorError`, but Triton's launcher and cuBLAS raise
a plain RuntimeError, which a wrong argument raises too. After nearly all failures of a device every later call fails,
so one more call distinguishes them.
"""

from __future__ import annotations

import torch


def check_device() -> None:
    """Wait for all queued work, and raise `torch.AcceleratorError` if the device is lost. Does nothing in a process
    that has not used CUDA. Call it after an error; a step without errors has no need of it."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
