"""What the service floor keeps: the life of the process, live sequences, recorded answers, counts.

The forward path and the cache operations share these books and nothing else. Everything here runs on the event loop, so
there are no locks; the model thread's side is read through snapshots and never waited for.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ferrum_rpc.core import DeviceInfo, Limits, ModelInfo, Pressure
from ferrum_rpc.engine.thread import ModelThread, Operation
from ferrum_rpc.errors import DeviceLost, Draining, KvBlocksExhausted, Starting
from ferrum_rpc.service.handles import HandleTable, Record
from ferrum_rpc.service.replay import ReplayLog

RETRY_AFTER_S: Final = 0.05
"""What a refusal for want of room suggests to wait: about a step."""

RETRY_ELSEWHERE_S: Final = 1.0
"""What a refusal while starting or draining suggests to wait."""


class Lifecycle(enum.Enum):
    """Where the process stands."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    FAILED = "failed"


@dataclass(slots=True)
class ServiceCounters:
    """What has happened since the start."""

    created: int = 0
    released: int = 0
    kv_exhausted: int = 0
    queue_full: int = 0
    tokens_truncated: int = 0


class Books:
    """One executor's books. Bound to the running event loop."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.handles = HandleTable()
        self.replay = ReplayLog(limits.replay_bytes)
        self.counters = ServiceCounters()
        self.state = Lifecycle.STARTING
        self.started = time.monotonic()
        self._creating = 0
        self._thread: ModelThread | None = None
        self._model: ModelInfo | None = None
        self._device: DeviceInfo | None = None

    # --- life -------------------------------------------------------------------------------------------------------

    def attach(self, thread: ModelThread) -> None:
        """The thread that will run the steps; it may still be loading."""
        self._thread = thread

    def serve(self, model: ModelInfo, device: DeviceInfo) -> None:
        """The model is loaded."""
        self._model, self._device = model, device
        if self.state is Lifecycle.STARTING:
            self.state = Lifecycle.SERVING

    def drain(self) -> None:
        """Take no new sequences; go on with those that are there."""
        if self.state is not Lifecycle.FAILED:
            self.state = Lifecycle.DRAINING

    def fail(self) -> None:
        """The model thread is gone."""
        self.state = Lifecycle.FAILED

    @property
    def model(self) -> ModelInfo:
        """The loaded model; raises `Starting` or `DeviceLost` before and after its life."""
        if self.state is Lifecycle.FAILED:
            raise DeviceLost("the model thread is gone; the executor must be restarted")
        if self._model is None:
            raise Starting("the model is loading; nothing was started", retry_after_s=RETRY_ELSEWHERE_S)
        return self._model

    @property
    def device(self) -> DeviceInfo:
        """Where the model runs; raises as `model` does."""
        _ = self.model
        assert self._device is not None  # noqa: S101 - set together with the model
        return self._device

    @property
    def thread(self) -> ModelThread:
        """The model thread."""
        assert self._thread is not None  # noqa: S101 - attached before the server takes calls
        return self._thread

    def pressure(self) -> Pressure:
        """How full the executor is, as of the last step. Never waits."""
        cache, thread = self.thread.cache, self.thread
        return Pressure(
            free_blocks=cache.free_blocks,
            total_blocks=cache.total_blocks,
            block_size=cache.block_size,
            queued_items=thread.queued_items,
            queued_tokens=thread.queued_tokens,
            sequences=len(self.handles),
        )

    # --- sequences --------------------------------------------------------------------------------------------------

    def mint(self, count: int) -> list[Record]:
        """Records of sequences to be created, or the refusal. Each must be followed by `born` or `stillborn`."""
        if self.state is Lifecycle.DRAINING:
            raise Draining("the executor takes no new sequences; nothing was started", retry_after_s=RETRY_ELSEWHERE_S)
        if len(self.handles) + self._creating + count > self.limits.max_sequences:
            self.counters.kv_exhausted += 1
            raise KvBlocksExhausted(
                f"{len(self.handles)} sequences live and {self.limits.max_sequences} may; release some",
                metadata={"max_sequences": self.limits.max_sequences},
                retry_after_s=RETRY_AFTER_S,
            )
        self._creating += count
        return [self.handles.mint() for _ in range(count)]

    def born(self, record: Record) -> None:
        """A minted sequence exists."""
        self._creating -= 1
        self.handles.insert(record)
        self.counters.created += 1

    def stillborn(self, record: Record) -> None:
        """A minted sequence never came to be."""
        self._creating -= 1
        record.busy = False

    def bury(self, record: Record) -> bool:
        """Take a sequence out of the table; the caller sees to its blocks. False: it was not there."""
        if not self.handles.remove(record):
            return False
        self.counters.released += 1
        return True

    def release(self, records: Sequence[Record]) -> None:
        """Take idle sequences out of the table and have their blocks freed; those that are gone are free already."""
        numbers = [record.sequence for record in records if self.bury(record)]

        def freed(_: object) -> None:
            for record in records:
                while record.mourners:
                    record.mourners.pop()()

        if numbers:
            self.thread.operate(Operation(lambda runner: runner.release(numbers), freed))
        else:
            freed(None)
