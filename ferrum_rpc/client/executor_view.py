"""One executor as a client knows it, for a scheduler's decisions."""

from __future__ import annotations

from typing import Protocol

from ferrum_rpc.client.context import Context
from ferrum_rpc.client.info import ExecutorInfo
from ferrum_rpc.core import Pressure


class ExecutorView(Protocol):
    """One executor for one life of its process, as the client knows it. Reading it sends nothing."""

    @property
    def target(self) -> str:
        """The address that the client connects to."""

    @property
    def info(self) -> ExecutorInfo:
        """Its model, cache, limits and capabilities."""

    @property
    def pressure(self) -> Pressure | None:
        """How full it was in its last answer."""

    @property
    def draining(self) -> bool:
        """Whether it has reported that it drains."""

    @property
    def hung(self) -> bool:
        """Whether it has reported that its device makes no progress, or, in a fleet, does not answer. It may
        recover."""

    @property
    def gone(self) -> bool:
        """Whether it has ended, or another process answers in its place."""

    @property
    def serving(self) -> bool:
        """Whether it accepts new sequences."""

    @property
    def condition(self) -> str:
        """One word for display: gone, hung, draining or serving."""


class SoleExecutor(ExecutorView):
    """The executor of an `ExecutorClient`. `hung` is that of the last `ExecutorClient.status`."""

    def __init__(self, context: Context, info: ExecutorInfo) -> None:
        self._context = context
        self._info = info

    @property
    def target(self) -> str:
        return self._context.target

    @property
    def info(self) -> ExecutorInfo:
        return self._info

    @property
    def pressure(self) -> Pressure | None:
        return self._context.pressure

    @property
    def draining(self) -> bool:
        return self._context.draining

    @property
    def hung(self) -> bool:
        return self._context.hung

    @property
    def gone(self) -> bool:
        known = self._context.known_info
        return known is not None and known.instance_id != self._info.instance_id

    @property
    def serving(self) -> bool:
        return self.condition == "serving"

    @property
    def condition(self) -> str:
        return "gone" if self.gone else "hung" if self.hung else "draining" if self.draining else "serving"
