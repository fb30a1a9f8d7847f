"""The router beside executors that come and go, without any."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from ferrum_rpc.client import ExecutorError, InstanceMismatch
from ferrum_rpc.scheduler.patience import ExecutorGone
from ferrum_rpc.scheduler.request import Request
from ferrum_rpc.scheduler.router import Router


class OneExecutor:
    """A fleet of one executor, at which every call raises ``error``, and which answers no request of its status."""

    targets = ("there:1",)

    def __init__(self, error: ExecutorError) -> None:
        self.error, self.changes, self.there = error, 0, [self]
        self.target, self.condition = self.targets[0], "serving"
        self.draining = self.hung = self.gone = False
        self._ended = asyncio.Event()

    @property
    def serving(self) -> list[OneExecutor]:
        return self.there

    async def changed(self, since: int) -> int:
        await self._ended.wait()
        if self.changes == since:
            await asyncio.Event().wait()
        return self.changes

    async def look(self, member: OneExecutor) -> None:
        """It did not answer in time."""

    async def ended(self) -> None:
        await self._ended.wait()

    async def end(self, why: ExecutorError) -> None:
        self.gone, self.there, self.changes = True, [], self.changes + 1
        self._ended.set()

    def driver(self) -> SimpleNamespace:
        @asynccontextmanager
        async def serving(*_, **__):
            raise self.error
            yield

        return SimpleNamespace(serving=serving, port=SimpleNamespace())


@pytest.mark.parametrize(
    ("error", "ends"),
    [(InstanceMismatch("of another process"), ExecutorGone), (ExecutorError("out of order"), ExecutorError)],
    ids=lambda each: getattr(each, "__name__", type(each).__name__),
)
async def test_another_process_at_an_address_ends_its_executor_and_other_errors_the_run(error, ends):
    """Whether a request of its status confirms it in time or not."""
    executor = OneExecutor(error)
    router = Router(lambda member, first: executor.driver(), executor, patience_s=0.01)
    with pytest.raises(ends) as caught:
        await router.run([Request(0, (1,), 1)])
    assert executor.gone == (ends is ExecutorGone) == (caught.value is not error)
    assert router.counts.executors_lost == executor.gone
