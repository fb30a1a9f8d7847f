"""Copies between the host and a GPU that do not wait: pinned memory, and markers that signal when a step's copies are
done.

Every copy from or to pageable memory waits for the device. Torch reuses the pinned memory when no tensor refers to it;
rows that a caller has not read yet keep theirs. On a CPU nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Marker:
    """The end of the work that is queued on ``device`` so far. On a CPU that work is done."""

    __slots__ = ("_event",)

    def __init__(self, device: torch.device) -> None:
        self._event: Any = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(device))

    def passed(self) -> bool:
        """Whether the device has reached this marker. Never waits; raises the device's failure."""
        return self._event is None or bool(self._event.query())

    def wait(self) -> None:
        """Wait until the device has reached this marker, without the interpreter lock. Raises the device's failure."""
        if self._event is not None:
            self._event.synchronize()


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """``host`` on ``device``, in the order of the stream. Do not write to ``host`` afterwards."""
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


def to_host(columns: Sequence[Tensor]) -> list[Tensor]:
    """Dense copies of ``columns`` (of one device) on the host; on a CPU the columns themselves. Copies from a GPU are
    complete when a `Marker` that is made afterwards has passed; until then their content is undefined."""
    if columns[0].device.type == "cpu":
        return [*map(Tensor.contiguous, columns)]
    host = [host_rows(len(column), column) for column in columns]
    for target, column in zip(host, columns, strict=True):
        target.copy_(column, non_blocking=True)
    return host


def host_rows(rows: int, like: Tensor) -> Tensor:
    """Uninitialised host memory for ``rows`` rows of the shape and dtype of ``like``'s; copies from its device into it
    do not wait."""
    return torch.empty(rows, *like.shape[1:], dtype=like.dtype, pin_memory=like.device.type != "cpu")
