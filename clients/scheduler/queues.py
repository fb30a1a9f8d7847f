"""Who waits, who runs, and who moves. Moves requests from one queue to another, and releases their sequences."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as ListOf

from clients.scheduler.report import RunCounts
from clients.scheduler.request import Request, RequestEnd, Stage
from ferrum_rpc.client import Sequence


class Observer:
    """Who watches a run. Does nothing: a base for those who want to know of some of it."""

    def token(self, request: Request, token: int) -> None:
        """A request got its next token."""

    def changed(self, request: Request) -> None:
        """A request was admitted, preempted, moved, finished or failed."""

    def executors(self, there: ListOf[tuple[str, str]]) -> None:
        """Which executors are there (target) and how (serving, draining, hung), each time that changes."""


class RequestQueues:
    """The requests of one run that are with the executor at ``target``.

    One in ``running`` has a sequence there, and its blocks; one in ``moving`` too, which is to go on elsewhere; one in
    ``waiting`` has none. A request that loses its sequence goes ``back`` to those that wait, here or where prompts are
    computed. ``coming``: those on their way here; ``arrived``: one has come since the last plan.
    """

    def __init__(
        self,
        target: str,
        run: RunCounts,
        observer: Observer,
        *,
        waiting: deque[Request],
        back: deque[Request],
    ) -> None:
        self.waiting, self._back = waiting, back
        self.running: list[Request] = []
        self.moving: list[Request] = []
        self.coming: list[Request] = []
        self.arrived = False
        self._target, self._run, self._observer = target, run, observer
        self._leaving: list[Sequence] = []

    @property
    def all(self) -> list[Request]:
        """Those that are here in whatever queue."""
        return [*self.running, *self.moving, *self.waiting]

    @property
    def joining(self) -> bool:
        """Whether there are requests that wait for a place here or have just got one, or may come back here."""
        return bool(self.waiting or self._back or self.arrived)

    @property
    def leaving(self) -> bool:
        """Whether sequences wait to be released."""
        return bool(self._leaving)

    def run(self, requests: Iterable[Request]) -> None:
        """They run here from now on: from the queue, or because nobody else has room for them any more."""
        for request in requests:
            request.executor = self._target
            self._put(request, Stage.RUNNING)

    def hand_over(self, request: Request) -> None:
        """It goes on elsewhere. Until it has moved, its sequence is here."""
        self._put(request, Stage.MOVING)

    def arrive(self, request: Request, sequence: Sequence) -> None:
        """It has come, with its sequence."""
        self.arrived, request.sequence = True, sequence
        self.run([request])

    def token(self, request: Request, token: int) -> None:
        """A request got its next token."""
        request.generated.append(token)
        request.first_token = request.first_token or time.monotonic()
        self._observer.token(request, token)

    async def preempt(self, request: Request) -> None:
        """Take a request's blocks; it comes back as a longer prompt."""
        request.preemptions += 1
        self._run.preemptions += 1
        self.requeue(request)
        await self.release()

    def requeue(self, request: Request) -> None:
        """Back to the front of the queue, in the order of arrival among those that came back. Its sequence leaves."""
        request.cached = 0
        self._put(request, Stage.WAITING)

    def end(self, request: Request, ending: RequestEnd, error: str = "") -> None:
        """The text is complete, or with an ``error`` the request cannot be served."""
        self._run.left -= 1
        request.ending, request.error, request.finished = ending, error, time.monotonic()
        self._put(request, Stage.FAILED if ending is RequestEnd.ERROR else Stage.FINISHED)

    async def release(self) -> None:
        """Release what is leaving. What cannot be released now is found by the executor's idle time-out."""
        leaving, self._leaving = self._leaving, []
        await asyncio.gather(*(sequence.release() for sequence in leaving), return_exceptions=True)

    async def clear(self) -> None:
        """Release everything."""
        for request in [*self.running, *self.moving]:
            self._leave(request)
        await self.release()

    def _put(self, request: Request, stage: Stage) -> None:
        for queue in (self.running, self.moving, self.waiting, self._back):
            if request in queue:
                queue.remove(request)
        request.stage = stage
        if stage is Stage.RUNNING:
            self.running.append(request)
        elif stage is Stage.MOVING:
            self.moving.append(request)
        else:
            self._leave(request)
        if stage is Stage.WAITING:
            at = next((at for at, each in enumerate(self._back) if each.index > request.index), len(self._back))
            self._back.insert(at, request)
        self._observer.changed(request)

    def _leave(self, request: Request) -> None:
        if request.sequence is not None:
            self._leaving.append(request.sequence)
            request.sequence = None
