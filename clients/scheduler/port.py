"""One executor as its driver uses it: how full it is, work items of requests, and calls that are made until they are
answered. All IO of steps is here.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Final

from clients.scheduler.policy import PlannedFeed, Pool
from clients.scheduler.refusals import NO_ANSWER, NOT_NOW, Patience
from clients.scheduler.report import RunCounts
from ferrum_rpc.client import (
    Accept,
    BatchResults,
    CacheMode,
    ExecutorClient,
    ExecutorError,
    ExecutorInfo,
    ExecutorState,
    Greedy,
    Item,
    OutputSpec,
    Positions,
    Run,
    Sample,
    Sequence,
)

HANGS: Final = "the executor's device makes no progress"
FULL: Final = "the cache is full of other schedulers' sequences"
STATUS_S: Final = 1.0
"""Within this an executor says why it does not answer."""


class ExecutorPort:
    """``sampling``: how tokens are chosen. ``cache_mode``: of new sequences. ``patience``: for how long an executor
    that takes nothing is asked again; the fleet's where there are several."""

    def __init__(
        self,
        client: ExecutorClient,
        info: ExecutorInfo,
        *,
        sampling: Greedy | Sample,
        cache_mode: CacheMode,
        patience_s: float,
    ) -> None:
        self._client, self._sampling, self.cache_mode = client, sampling, cache_mode
        self.max_context = info.model.max_context
        self.patience = Patience(patience_s)
        self._most_blocks = info.limits.max_blocks_per_caller
        self._hung = False  # as of the last look

    @property
    def target(self) -> str:
        """Where it is."""
        return self._client.target

    @property
    def pool(self) -> Pool:
        """How full the executor is, by its last answer."""
        pressure = self._client.pressure
        assert pressure is not None  # noqa: S101 - `look` came first
        total = min(pressure.total_blocks, self._most_blocks or pressure.total_blocks)
        return Pool(min(pressure.free_blocks, total), total, pressure.block_size)

    def holds(self, tokens: int) -> bool:
        """Whether a sequence of so many tokens could be here, if it were alone."""
        return tokens <= self.max_context and self.pool.blocks(tokens) <= self.pool.total

    def new_sequence(self) -> Sequence:
        """One that is empty."""
        return self._client.sequence(cache_mode=self.cache_mode)

    async def look(self) -> None:
        """See how full the executor is."""
        while True:
            try:
                self._hung = (await self._client.status()).state is ExecutorState.HUNG
            except NOT_NOW + NO_ANSWER as error:
                await self.patience.wait(error)
            else:
                return

    async def idle(self, refusal: ExecutorError | None) -> None:
        """Wait for blocks that are with other schedulers, for what was refused, or for an executor that hangs."""
        await self.patience.wait(HANGS if self._hung else refusal or FULL)
        await self.look()

    def item(self, feed: PlannedFeed, *, run: Run | None = None, follows: Item | None = None) -> Item:
        """The work item of a feed, on the request's sequence; a new one where it has none. It ``follows`` the request's
        item in flight, and feeds what that chooses."""
        request, output = feed.request, self._output(feed, last=run is not None)
        if request.sequence is None:
            request.sequence = self.new_sequence()
        if follows is not None:
            return request.sequence.item(output=output, run=run, follows=follows)
        fed = [*request.next_tokens(feed.count), *request.draft[: feed.drafted]]
        return request.sequence.item(fed, output, run=run)

    def _output(self, feed: PlannedFeed, *, last: bool) -> OutputSpec | Positions:
        """A token of what is known completely. Each request has a seed of its own, so that a text depends neither on
        its neighbours nor on whether it was preempted."""
        if not (feed.completes or last):
            return Positions.NONE
        kind = self._sampling
        if isinstance(kind, Sample) and kind.seed is not None:
            kind = replace(kind, seed=(kind.seed << 32 | feed.request.index) % 2**64)
        if feed.drafted:
            return OutputSpec(Positions.ALL, Accept(kind if isinstance(kind, Sample) else None))
        return OutputSpec(Positions.LAST, kind)

    async def send(self, items: list[Item], counts: RunCounts) -> BatchResults:
        """One call. Refused at the door, or unanswered, it is made again with the same items: their request ids make
        that safe."""
        while True:
            try:
                return await self._client.forward(items)
            except NOT_NOW as error:
                counts.waits += 1
                await self.patience.wait(error)
            except NO_ANSWER as error:
                counts.waits += 1
                with suppress(ExecutorError):
                    self._hung = (await self._client.status(timeout_s=STATUS_S)).state is ExecutorState.HUNG
                await self.patience.wait(HANGS if self._hung else error)
