"""Between the host and a GPU without waiting more often than once: page-locked memory and one wait for all columns.

A copy from or to ordinary memory waits for the device by itself, each one. The page-locked memory is torch's to reuse
once nobody holds it any more: rows on their way to a caller keep theirs. On a CPU nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """``host`` (not to be written any more) where ``device`` is, in the order of the stream."""
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


def to_host(columns: Sequence[Tensor]) -> list[Tensor]:
    """Dense copies of ``columns`` (of one device) on the host, complete; on a CPU the columns themselves."""
    if columns[0].device.type != "cuda":
        return [column.cpu().contiguous() for column in columns]
    host = [torch.empty(column.shape, dtype=column.dtype, pin_memory=True) for column in columns]
    for target, column in zip(host, columns, strict=True):
        target.copy_(column, non_blocking=True)
    torch.cuda.current_stream(columns[0].device).synchronize()
    return host
