"""Between the host and a GPU without waiting: page-locked memory, and marks that pass when a step's copies are there.

A copy from or to ordinary memory waits for the device by itself, each one. The page-locked memory is torch's to reuse
once no tensor refers to it: rows on their way to a caller keep theirs. On a CPU nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Mark:
    """The end of what has been queued on ``device`` so far. On a CPU that is done."""

    __slots__ = ("_event",)

    def __init__(self, device: torch.device) -> None:
        self._event: Any = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(device))

    def passed(self) -> bool:
        """Whether the device has come here. Never waits; raises what the device failed of."""
        return self._event is None or bool(self._event.query())

    def wait(self) -> None:
        """Until the device has come here, without the interpreter. Raises what the device failed of."""
        if self._event is not None:
            self._event.synchronize()


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """``host`` (not to be written any more) where ``device`` is, in the order of the stream."""
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


def to_host(columns: Sequence[Tensor]) -> list[Tensor]:
    """Dense copies of ``columns`` (of one device) on the host; on a CPU the columns themselves. From a GPU they are on
    their way: a `Mark` that is made from now on is passed when they are there, and until then they hold anything."""
    if columns[0].device.type == "cpu":
        return [*map(Tensor.contiguous, columns)]
    host = [torch.empty(column.shape, dtype=column.dtype, pin_memory=True) for column in columns]
    for target, column in zip(host, columns, strict=True):
        target.copy_(column, non_blocking=True)
    return host
