"""The queues of requests at one executor. Requests move between queues, and their sequences are released, here."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as ListOf

from ferrum_rpc.client import Sequence
from ferrum_rpc.scheduler.counts import RunCounts
from ferrum_rpc.scheduler.request import Request, RequestEnd, Stage


class Observer:
    """Receives the events of a run. The base class ignores them."""

    def token(self, request: Request, token: int) -> None:
        """A request got its next token."""

    def changed(self, request: Request) -> None:
        """A request was admitted, preempted, moved, finished or failed."""

    def executors(self, there: ListOf[tuple[str, str]]) -> None:
        """The known executors as (target, condition), each time that changes: serving, draining, hung."""


class RequestQueues:
    """The requests of one run that are assigned to the executor at ``target``.

    Requests in ``running`` and ``moving`` have a sequence there, with its blocks; those in ``moving`` are to continue
    at another executor. Requests in ``waiting`` have none. A request that loses its sequence goes to ``back``, the
    queue that requests are placed from. ``coming``: requests that are being moved here. ``arrived``: whether one has
    arrived since the last plan.
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
        """The requests of all queues."""
        return [*self.running, *self.moving, *self.waiting]

    @property
    def joining(self) -> bool:
        """Whether requests wait to be admitted, or one has just arrived. Runs are kept short then."""
        return bool(self.waiting or self._back or self.arrived)

    @property
    def leaving(self) -> bool:
        """Whether sequences wait to be released."""
        return bool(self._leaving)

    def run(self, requests: Iterable[Request]) -> None:
        """Requests are admitted, or stay here because no other executor has room for them any more."""
        for request in requests:
            request.executor = self._target
            self._put(request, Stage.RUNNING)

    def hand_over(self, request: Request) -> None:
        """A request is to continue at another executor. Until it has moved, its sequence stays here."""
        self._put(request, Stage.MOVING)

    def arrive(self, request: Request, sequence: Sequence) -> None:
        """A request has been moved here, with its sequence."""
        self.arrived, request.sequence = True, sequence
        self.run([request])

    def token(self, request: Request, token: int) -> None:
        """A request got its next token."""
        request.generated.append(token)
        request.first_token = request.first_token or time.monotonic()
        self._observer.token(request, token)

    async def preempt(self, request: Request) -> None:
        """Release a request's blocks. It is admitted again as a longer prompt."""
        request.preemptions += 1
        self._run.preemptions += 1
        self.requeue(request)
        await self.release()

    def requeue(self, request: Request) -> None:
        """Put a request back to the front of the queue, ordered by index among those that were put back, and let its
        sequence be released."""
        request.cached = 0
        self._put(request, Stage.WAITING)

    def end(self, request: Request, ending: RequestEnd, error: str = "") -> None:
        """The text is complete, or the request failed with an ``error``."""
        self._run.left -= 1
        request.ending, request.error, request.finished = ending, error, time.monotonic()
        self._put(request, Stage.FAILED if ending is RequestEnd.ERROR else Stage.FINISHED)

    def leave(self, sequence: Sequence | None) -> None:
        """No request has this sequence any more: it is released with the next step."""
        if sequence is not None:
            self._leaving.append(sequence)

    async def release(self) -> None:
        """Release the sequences that no request has any more. The executor's idle time-out frees what cannot be
        released now."""
        leaving, self._leaving = self._leaving, []
        await asyncio.gather(*(sequence.release() for sequence in leaving), return_exceptions=True)

    async def clear(self) -> None:
        """Release all sequences."""
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
        self.leave(request.sequence)
        request.sequence = None
