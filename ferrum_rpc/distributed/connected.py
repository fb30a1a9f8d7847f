"""What groups on a process group of torch.distributed have in common, whichever backend connects it.

A group is an object of its own, and a process has no default group, so tensor-parallel and pipeline-parallel groups can
coexist. Its connections end once, when the first rank notices a failure, and `renew` makes new ones.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, Store

from ferrum_rpc.distributed.group import GroupAborted

MESSAGE = 0
"""The tag of what ranks send."""


class ConnectedGroup(ABC):
    """Of all ranks that create one with the same ``store``. Raises `GroupAborted` if they do not join."""

    native_sum = None

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        self.rank, self.size = rank, size
        self._store, self._timeout = store, timeout
        self._changing = threading.Lock()  # who aborts may be another thread
        self._reason = "the group is not connected"
        self._connected: Any = None
        self.renew(0)

    @abstractmethod
    def renew(self, epoch: int) -> None:
        """As `Group.renew`; waits for the others."""

    @abstractmethod
    def _disconnect(self, connected: Any) -> None:
        """Close the connections, so that what waits in them returns."""

    def abort(self) -> None:
        """As `Group.abort`, for this rank; its peers notice, or must be notified otherwise."""
        self._end("this rank aborted the group")

    def close(self) -> None:
        self._end("the group is closed")

    def _connect(self, backend: Any, epoch: int, options: Any) -> None:
        """Join the others in a process group of ``backend``."""
        options._timeout = self._timeout
        try:
            made = backend(PrefixStore(f"epoch {epoch}", self._store), self.rank, self.size, options)
        except torch.AcceleratorError:
            raise
        except RuntimeError as error:
            raise GroupAborted(f"rank {self.rank} cannot join its group of {self.size}: {error}") from error
        with self._changing:
            self._connected = made

    def _open(self) -> Any:
        """The process group."""
        connected = self._connected
        if connected is None:
            raise GroupAborted(self._reason)
        return connected

    def _do(self, call: Callable[[Any], Any]) -> None:
        """Make ``call`` with the process group, and wait for what it returns. It fails if a connection is closed, by
        this rank or by the end of a peer."""
        connected = self._open()
        try:
            if (work := call(connected)) is not None:
                work.wait()
        except torch.AcceleratorError:
            raise
        except RuntimeError as error:
            self._end(f"rank {self.rank} lost another: {error}")
            raise GroupAborted(self._reason) from error

    def _end(self, reason: str) -> None:
        with self._changing:
            connected, self._connected = self._connected, None
            if connected is None:
                return
            self._reason = reason
        self._disconnect(connected)
