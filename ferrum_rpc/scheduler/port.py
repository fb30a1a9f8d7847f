"""One executor as its driver uses it: its free blocks and slots, work items of requests, and calls that are repeated
until they are answered.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Final

from ferrum_rpc.client import (
    CALLER_ERROR,
    NO_ANSWER,
    TRY_LATER,
    Accept,
    BatchResults,
    Draining,
    ExecutorError,
    ExecutorState,
    ExecutorView,
    Greedy,
    Item,
    ModelClient,
    OutputSpec,
    Positions,
    Pressure,
    Run,
    Sample,
    Sequence,
    forbidding,
)
from ferrum_rpc.scheduler.counts import RunCounts
from ferrum_rpc.scheduler.patience import Patience
from ferrum_rpc.scheduler.policy import NO_STATES, PlannedFeed, Pool
from ferrum_rpc.scheduler.request import Request

HANGS: Final = "the executor's device makes no progress"
FULL: Final = "the cache is full of other schedulers' sequences"
GREEDY: Final = Greedy()
Ahead = Callable[[int, list[int]], None]
"""The ``on_tokens`` of `Sequence.item`."""

STATUS_S: Final = 1.0
"""Time for the status call that explains why an executor does not answer."""


class ExecutorPort:
    """The IO of one driver with its ``executor``, the only one of ``client``. ``patience``: how long calls that the
    executor does not accept are repeated. A `Router` shares one among its drivers."""

    def __init__(self, client: ModelClient, executor: ExecutorView, *, patience_s: float) -> None:
        self._client, self.executor = client, executor
        self.max_context = executor.info.model.max_context
        self.patience = Patience(patience_s)
        self._most_blocks = executor.info.limits.max_blocks_per_caller
        self._hung = False  # as of the last look

    @property
    def pool(self) -> Pool:
        """The executor's blocks and slots, as of its last answer."""
        pressure = self._pressure
        total = min(pressure.total_blocks, self._most_blocks or pressure.total_blocks)
        slots = pressure.free_slots if pressure.total_slots else NO_STATES
        return Pool(min(pressure.free_blocks, total), total, pressure.block_size, slots)

    @property
    def most_sequences(self) -> int:
        """How many sequences the executor has slots for."""
        return self._pressure.total_slots or NO_STATES

    @property
    def _pressure(self) -> Pressure:
        pressure = self._client.pressure
        assert pressure is not None  # noqa: S101 - `look` came first
        return pressure

    def holds(self, tokens: int) -> bool:
        """Whether the context and the whole cache could hold a sequence of so many tokens."""
        return tokens <= self.max_context and self.pool.blocks(tokens) <= self.pool.total

    def new_sequence(self, request: Request) -> Sequence:
        """A new, empty sequence for a request."""
        return self._client.sequence(
            adapter=request.adapter, cache_salt=request.cache_salt, cache_mode=request.cache_mode
        )

    async def look(self) -> None:
        """Ask for the status, which updates `pool`, until the executor answers."""
        while True:
            try:
                self._hung = (await self._client.status()).state is ExecutorState.HUNG
            except TRY_LATER + NO_ANSWER as error:
                await self.patience.wait(error)
            else:
                return

    async def idle(self, refusal: ExecutorError | None) -> None:
        """Wait: until other schedulers release blocks, before a ``refusal`` is tried again, or until a hung device
        recovers. Raises `ExecutorGone`."""
        await self.patience.wait(HANGS if self._hung else refusal or FULL)
        await self.look()

    def item(self, feed: PlannedFeed, tokens: int = 0, ahead: Ahead | None = None) -> Item:
        """The work item of a feed, on the request's sequence. ``tokens``: of its run, 0 for a single step. One token is
        chosen if the feed completes the request, else there are no rows. ``ahead`` gets tokens of the run ahead of its
        answer."""
        request, output = feed.request, OutputSpec(Positions.NONE, GREEDY)
        assert request.sequence is not None  # noqa: S101 - made before
        if feed.completes and not request.branches:
            output = self._output(request, request.known)
        if feed.drafted:
            kind = request.output
            output = OutputSpec(Positions.ALL, Accept(kind if isinstance(kind, Sample) else None))
        fed = [*request.next_tokens(feed.count), *request.draft[: feed.drafted]]
        return request.sequence.item(fed, output, run=self._run(request, request.known, tokens), on_tokens=ahead)

    def follower(self, request: Request, behind: Item, known: int, tokens: int, ahead: Ahead | None) -> Item:
        """The work item behind a request's item in flight: it feeds the token that this one chooses, with which
        ``known`` tokens are known, and chooses ``tokens``."""
        assert request.sequence is not None  # noqa: S101 - it has an item in flight
        run = self._run(request, known, tokens)
        return request.sequence.item(output=self._output(request, known), run=run, follows=behind, on_tokens=ahead)

    def _output(self, request: Request, known: int) -> OutputSpec:
        """How the token behind ``known`` tokens is chosen."""
        if request.may_stop(known):
            return OutputSpec(Positions.LAST, request.output)
        if request.early_output is None:
            output = OutputSpec(Positions.LAST, request.output)
            request.early_output = forbidding(output, request.stops, self.executor.info)
        return request.early_output

    def _run(self, request: Request, known: int, tokens: int) -> Run | None:
        return Run(tokens, request.stops if request.may_stop(known) else ()) if tokens else None

    async def send(self, items: list[Item], counts: RunCounts) -> BatchResults:
        """One forward call. It is repeated with the same items while the executor refuses the call or does not answer;
        the request ids of the items make that safe. An executor that drains and refuses the call refuses each item:
        another one may take it. If the client or the executor finds a fault in one of them that refuses the whole call,
        each is sent alone. Raises `ExecutorGone`."""
        while True:
            try:
                return await self._client.forward(items)
            except CALLER_ERROR as error:
                if len(items) == 1:
                    return BatchResults([error])
                return BatchResults([each for item in items for each in await self.send([item], counts)])
            except Draining as error:
                return BatchResults([error for _ in items])
            except TRY_LATER as error:
                counts.waits += 1
                await self.patience.wait(error)
            except NO_ANSWER as error:
                counts.waits += 1
                with suppress(ExecutorError):
                    self._hung = (await self._client.status(timeout_s=STATUS_S)).state is ExecutorState.HUNG
                await self.patience.wait(HANGS if self._hung else error)
