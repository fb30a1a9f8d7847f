"""Who waits, who runs, and which sequence is whose. Moves requests between the two and lets go of sequences."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable
from typing import Protocol

from clients.scheduler.policy import PlannedFeed
from clients.scheduler.report import RunCounts
from clients.scheduler.request import Request, RequestEnd, Stage
from ferrum_rpc.client import CacheMode, ExecutorClient, Item, OutputSpec, Run, Sequence


class Observer(Protocol):
    """Who watches a run."""

    def token(self, request: Request, token: int) -> None:
        """A request got its next token."""

    def changed(self, request: Request) -> None:
        """A request was admitted, preempted, finished or failed."""


class RequestQueues:
    """The requests of one run that are with one executor. One in ``running`` has a sequence there, and its blocks; one
    in ``moving`` too, which is to go on elsewhere; one in ``waiting`` has none. A request that loses its sequence goes
    ``back`` to those that wait, here or where prompts are computed. ``arrived``: one has come from elsewhere since the
    last plan."""

    def __init__(
        self,
        client: ExecutorClient,
        run: RunCounts,
        observer: Observer,
        cache_mode: CacheMode,
        *,
        waiting: deque[Request],
        back: deque[Request],
    ) -> None:
        self.waiting, self._back = waiting, back
        self.running: list[Request] = []
        self.arrived = False
        self.moving: list[Request] = []
        self.run = run
        self._client, self._cache_mode = client, cache_mode
        self._observer = observer
        self._sequences: dict[int, Sequence] = {}
        self._leaving: list[Sequence] = []

    @property
    def joining(self) -> bool:
        """Whether there are requests that wait for a place here or have just got one, or may come back here."""
        return bool(self.waiting or self._back or self.arrived)

    @property
    def leaving(self) -> bool:
        """Whether sequences wait to be released."""
        return bool(self._leaving)

    def new_sequence(self) -> Sequence:
        """One that is empty."""
        return self._client.sequence(cache_mode=self._cache_mode)

    def item(self, feed: PlannedFeed, output: OutputSpec, run: Run | None = None, follows: Item | None = None) -> Item:
        """The work item of a feed, on the request's sequence; a new one where it has none. It ``follows`` the request's
        item in flight, and feeds what that chooses."""
        request = feed.request
        sequence = self._sequences.get(request.index)
        if sequence is None:
            sequence = self._sequences[request.index] = self.new_sequence()
        if follows is not None:
            return sequence.item(output=output, run=run, follows=follows)
        return sequence.item([*request.next_tokens(feed.count), *request.draft[: feed.drafted]], output, run=run)

    def admit(self, requests: Iterable[Request]) -> None:
        """From the queue into the next step."""
        for request in requests:
            self.waiting.remove(request)
            self.running.append(request)
            request.stage, request.executor = Stage.RUNNING, self._client.target
            self._observer.changed(request)

    def hand_over(self, request: Request) -> None:
        """It goes on elsewhere. Until it has moved, its sequence is here."""
        self.running.remove(request)
        self.moving.append(request)
        request.stage = Stage.MOVING
        self._observer.changed(request)

    def stay(self, request: Request) -> None:
        """It was to go on elsewhere, where nobody has room for it any more: it goes on here."""
        self.moving.remove(request)
        self.running.append(request)
        request.stage = Stage.RUNNING
        self._observer.changed(request)

    def sequence(self, request: Request) -> Sequence:
        """That of a request that moves."""
        return self._sequences[request.index]

    def moved(self, request: Request) -> None:
        """It has gone, and its sequence is free."""
        self.moving.remove(request)
        del self._sequences[request.index]

    def arrive(self, request: Request, sequence: Sequence) -> None:
        """It has come, with its sequence."""
        self.arrived = True
        self.running.append(request)
        self._sequences[request.index] = sequence
        request.stage, request.executor = Stage.RUNNING, self._client.target
        self._observer.changed(request)

    def token(self, request: Request, token: int) -> None:
        """A request got its next token."""
        request.generated.append(token)
        request.first_token = request.first_token or time.monotonic()
        self._observer.token(request, token)

    async def preempt(self, request: Request) -> None:
        """Take a request's blocks; it comes back as a longer prompt."""
        request.preemptions += 1
        self.run.preemptions += 1
        self.requeue(request)
        await self.let_go()

    def requeue(self, request: Request) -> None:
        """Back to the front of the queue, in the order of arrival among those that came back. Its sequence leaves."""
        self._leave(request)
        request.cached = 0
        request.stage = Stage.WAITING
        at = next((at for at, each in enumerate(self._back) if each.index > request.index), len(self._back))
        self._back.insert(at, request)
        self._observer.changed(request)

    def finish(self, request: Request, ending: RequestEnd) -> None:
        """The text is complete."""
        self._end(request, Stage.FINISHED, ending)

    def fail(self, request: Request, error: str) -> None:
        """The request cannot be served."""
        request.error = error
        self._end(request, Stage.FAILED, RequestEnd.ERROR)

    async def let_go(self) -> None:
        """Release what is leaving. What cannot be released now is found by the executor's idle time-out."""
        leaving, self._leaving = self._leaving, []
        await asyncio.gather(*(sequence.release() for sequence in leaving), return_exceptions=True)

    async def clear(self) -> None:
        """Release everything."""
        self._leaving.extend(self._sequences.values())
        self._sequences.clear()
        await self.let_go()

    def _end(self, request: Request, stage: Stage, ending: RequestEnd) -> None:
        self._leave(request)
        self.run.left -= 1
        request.stage, request.ending, request.finished = stage, ending, time.monotonic()
        self._observer.changed(request)

    def _leave(self, request: Request) -> None:
        for queue in (self.running, self.moving, self.waiting):
            if request in queue:
                queue.remove(request)
        if (sequence := self._sequences.pop(request.index, None)) is not None:
            self._leaving.append(sequence)
