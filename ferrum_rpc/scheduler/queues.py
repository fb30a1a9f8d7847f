"""The queues of requests at one executor. Requests move between queues, and their sequences are released, here."""

from __future__ import annotations

import asyncio
import bisect
import operator
import time
from collections.abc import Iterable
from collections.abc import Sequence as ListOf
from typing import Final

from ferrum_rpc.client import Sequence, StreamToken
from ferrum_rpc.scheduler.counts import RunCounts
from ferrum_rpc.scheduler.request import Request, RequestEnd, Stage
from ferrum_rpc.scheduler.runs import InFlight

IN_ORDER: Final = operator.attrgetter("order")


class Observer:
    """Receives the events of a run. The base class ignores them."""

    def token(self, request: Request, token: int) -> None:
        """A request got its next token."""

    def changed(self, request: Request) -> None:
        """A request was admitted, preempted, moved, finished or failed."""

    def executors(self, there: ListOf[tuple[str, str]]) -> None:
        """The known executors as (target, condition), each time that changes: serving, draining, hung."""


def end(request: Request, ending: RequestEnd, failure: Exception | None, run: RunCounts, observer: Observer) -> None:
    """Note the end of a request that no queue has, and, if it failed or was cancelled, of its branches."""
    run.left -= 1
    request.ending, request.failure, request.finished = ending, failure, time.monotonic()
    request.stage = Stage.FAILED if ending is RequestEnd.ERROR else Stage.FINISHED
    observer.changed(request)
    for branch in request.branches if ending is not RequestEnd.LENGTH else ():
        if branch.ending is None:
            end(branch, ending, failure, run, observer)


class RequestQueues:
    """The requests of one run that are assigned to the executor at ``target``.

    Requests in ``running`` and ``moving`` have a sequence there, with its blocks; those in ``moving`` are to continue
    at another executor. Requests in ``waiting`` have none. A request that loses its sequence goes to ``back``, the
    queue that requests are placed from. Both are sorted by `Request.order`. ``coming``: requests that are being moved
    here. ``in_flight``: the sequences that cannot be released yet. ``arrived``: whether a request has arrived since the
    last plan. ``changed`` is set whenever there may be something to plan.
    """

    def __init__(
        self,
        target: str,
        run: RunCounts,
        observer: Observer,
        *,
        waiting: list[Request],
        back: list[Request],
    ) -> None:
        self.waiting, self._back = waiting, back
        self.in_flight = InFlight()
        self.changed = asyncio.Event()
        self.running: list[Request] = []
        self.moving: list[Request] = []
        self.coming: list[Request] = []
        self.arrived = False
        self._target, self._run, self._observer = target, run, observer
        self._leaving: list[Sequence] = []
        self._parents: dict[Sequence, ListOf[Request]] = {}

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
        """Whether sequences can be released."""
        self._leave_parents()
        return any(each not in self.in_flight for each in self._leaving)

    def place(self, request: Request) -> None:
        """A request is assigned to this executor."""
        bisect.insort(self.waiting, request, key=IN_ORDER)
        self.changed.set()

    def run(self, requests: Iterable[Request]) -> None:
        """Requests are admitted, or stay here because no other executor has room for them any more."""
        for request in requests:
            request.executor = self._target
            self._put(request, Stage.RUNNING)

    def hand_over(self, request: Request) -> None:
        """A request is to continue at another executor. Until it has moved, its sequence stays here. If no call has
        made a sequence yet, such as that of a child, nothing can move: the request is computed there."""
        if request.sequence is not None and request.sequence.handle is not None:
            self._put(request, Stage.MOVING)
        else:
            self.requeue(request)

    def arrive(self, request: Request, sequence: Sequence) -> None:
        """A request has been moved here, with its sequence."""
        self.arrived, request.sequence = True, sequence
        self.run([request])
        self.changed.set()

    def tokens(self, request: Request, tokens: ListOf[StreamToken], count: int) -> bool:
        """A request got its next tokens, of which ``count`` belong to its text. Returns whether this ends with them."""
        before = len(request.generated)
        request.generated += [each.token for each in tokens[:count]]
        request.first_token = request.first_token or time.monotonic()
        ends = request.chosen is not None and request.chosen(list(tokens), count)
        for token in request.generated[before:]:
            self._observer.token(request, token)
        return ends

    async def preempt(self, request: Request) -> None:
        """Release a request's blocks. It is admitted again as a longer prompt, unless it has ended."""
        if request.ending is not None:
            return
        request.preemptions += 1
        self._run.preemptions += 1
        self.requeue(request)
        await self.release()

    def requeue(self, request: Request) -> None:
        """Put a request back into the queue, and let its sequence be released."""
        request.cached = 0
        self._put(request, Stage.WAITING)

    def end(self, request: Request, ending: RequestEnd, failure: Exception | None = None) -> None:
        """The text is complete, or the request failed."""
        self._take(request)
        self._leave(request)
        end(request, ending, failure, self._run, self._observer)

    def leave(self, sequence: Sequence | None) -> None:
        """No request has this sequence any more: it is released once it has no items in flight."""
        if sequence is not None:
            self._leaving.append(sequence)

    def share(self, parent: Sequence, children: ListOf[Request]) -> None:
        """The sequences of ``children`` begin with the cache of ``parent``, which stays until they have been fed."""
        self._parents[parent] = children

    async def release(self) -> None:
        """Release the sequences that no request has any more. The executor's idle time-out frees what cannot be
        released now."""
        self._leave_parents()
        leaving = [each for each in self._leaving if each not in self.in_flight]
        self._leaving = [each for each in self._leaving if each in self.in_flight]
        await asyncio.gather(*(sequence.release() for sequence in leaving), return_exceptions=True)

    async def clear(self) -> None:
        """Release all sequences."""
        self._leaving += self._parents
        self._parents.clear()
        for request in [*self.running, *self.moving]:
            self._leave(request)
        await self.release()

    def _leave_parents(self) -> None:
        for parent, children in list(self._parents.items()):
            if not any(each.sequence is not None and each.sequence.handle is None for each in children):
                del self._parents[parent]
                self._leaving.append(parent)

    def _put(self, request: Request, stage: Stage) -> None:
        self._take(request)
        request.stage = stage
        if stage is Stage.RUNNING:
            self.running.append(request)
        elif stage is Stage.MOVING:
            self.moving.append(request)
        else:
            self._leave(request)
            bisect.insort(self._back, request, key=IN_ORDER)
        self._observer.changed(request)

    def _take(self, request: Request) -> None:
        for queue in (self.running, self.moving, self.waiting, self._back):
            if request in queue:
                queue.remove(request)

    def _leave(self, request: Request) -> None:
        self.leave(request.sequence)
        request.sequence = None
