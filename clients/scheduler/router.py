"""Requests over several executors: a driver at each of them, and who gets which request.

Requests wait in one queue. One is placed when a driver has room for it, where the client's placement says. Executors
that are there for prompts hand over what they have computed, with its first token; so does one that drains. What is
handed over stays where it is until another executor has room for it and for what it grows by, and moves while both go
on with others. A move that finds no room, or is not answered, is made again later. Until all of a sequence has arrived,
its source keeps it. What a dead executor had, and what is lost on the way, is a prompt again, with its text so far.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as ListOf
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, Protocol

from clients.scheduler.driver import Driver
from clients.scheduler.refusals import NO_ANSWER, NO_ROOM, NOT_NOW, ExecutorGone, Patience
from clients.scheduler.report import RunCounts
from clients.scheduler.request import Request
from ferrum_rpc.client import CacheMode, Sequence, SequenceMisuseError
from ferrum_rpc.client.fleet import Member, Members
from ferrum_rpc.errors import ExecutorError, LayoutMismatch, NotSupported

MOVES_AT_ONCE: Final = 2
"""An executor takes part in 4 transfers by default (`max_transfers`), those of other schedulers among them."""

PATIENCE_OVER_S: Final = 0.01
"""So long after the end of a patience it is looked at."""

CANNOT: Final = (LayoutMismatch, NotSupported)


class Watcher(Protocol):
    """Who watches executors."""

    def executors(self, there: ListOf[tuple[str, str]]) -> None:
        """Who is there (target) and how (serving, draining, hung), each time that changes."""


@dataclass(eq=False, slots=True)
class Worker:
    """A driver at an executor, while that is there. ``first``: prompts only, what follows goes on elsewhere.
    ``coming``: requests on their way there."""

    member: Member
    driver: Driver
    first: bool
    coming: list[Request] = field(default_factory=list)


class Router:
    """Runs requests on the executors of one model: all of a text by those of ``decode``, or its prompt by those of
    ``prefill`` where there are any. ``make`` makes the driver for an executor, told whether it computes prompts."""

    def __init__(
        self,
        make: Callable[[Member, bool], Driver],
        decode: Members,
        prefill: Members | None = None,
        *,
        watcher: Watcher | None = None,
        patience_s: float = 30.0,
    ) -> None:
        self._make = make
        self._decode, self._prefill = decode, prefill
        self._watcher = watcher
        self._patience_s = patience_s
        self._patience = Patience(patience_s)
        self._run = RunCounts(())
        self._waiting: deque[Request] = deque()
        self._workers: list[Worker] = []
        self._placed = False
        self._moves: dict[Request, Worker] = {}
        self._targets: dict[Request, tuple[Worker, Sequence]] = {}
        self._awaited: dict[Request, float] = {}  # until when an executor with a longer context is waited for
        self._changed = asyncio.Event()

    async def run(self, requests: ListOf[Request]) -> RunCounts:
        """Every request to its end. Raises `ExecutorGone`, and `LayoutMismatch` or `NotSupported` where prompts cannot
        move; whatever happens, no sequence is left behind."""
        self._run, self._waiting, began = RunCounts(requests), deque(requests), time.monotonic()
        self._awaited.clear()
        for request in requests:
            request.arrived = began
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                watches = [tasks.create_task(self._watch(self._decode, first=False))]
                if self._prefill is not None:
                    watches.append(tasks.create_task(self._watch(self._prefill, first=True)))
                while self._run.left:
                    changed = self._changed
                    self._place()
                    self._begin_moves()
                    if self._run.left:
                        await changed.wait()
                for watch in watches:
                    watch.cancel()
                self._notify()
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            self._run.wall_seconds = time.monotonic() - began
        return self._run

    def _notify(self) -> None:
        """Everybody looks again."""
        self._changed.set()
        self._changed = asyncio.Event()

    # --- who is there -----------------------------------------------------------------------------------------------

    async def _watch(self, members: Members, *, first: bool) -> None:
        """A worker at each executor, as long as it is there."""
        known: set[Member] = set()
        nobody_since = time.monotonic()
        while True:
            since, there = members.changes, members.there
            for member in set(there) - known:
                self._tasks.create_task(self._run_worker(Worker(member, self._make(member, first), first), members))
            known = set(there)
            for worker in self._workers:
                worker.driver.leaving = worker.member.draining
            self._notify()
            if self._watcher is not None:
                every = [each for some in (self._prefill, self._decode) if some is not None for each in some.there]
                self._watcher.executors([(each.target, each.condition) for each in every])
            if there:
                nobody_since = time.monotonic()
            left_s = None if there else nobody_since + self._patience_s - time.monotonic()
            try:
                async with asyncio.timeout(left_s):
                    await members.changed(since)
            except TimeoutError:
                raise ExecutorGone(f"no executor at {', '.join(members.targets)} for {self._patience_s:g} s") from None

    async def _run_worker(self, worker: Worker, members: Members) -> None:
        """Drive until everything is done or the executor is gone."""
        worker.driver.patience = self._patience
        worker.driver.goes_on = self._goes_on
        self._patience.renew()
        driving = asyncio.create_task(self._drive(worker))
        gone = asyncio.create_task(worker.member.ended())
        try:
            await asyncio.wait({driving, gone}, return_when=asyncio.FIRST_COMPLETED)
            if driving.done() and isinstance(driving.exception(), ExecutorGone | ExecutorError):
                await members.look(worker.member)
        finally:
            for task in (driving, gone):
                task.cancel()
            await asyncio.wait({driving, gone})
        self._run.executors_lost += worker.member.gone
        error = None if driving.cancelled() else driving.exception()
        if error is not None and not worker.member.gone:
            raise error

    async def _drive(self, worker: Worker) -> None:
        driver = worker.driver
        async with driver.serving(self._run, deque(), self._waiting, hands_over=worker.first):
            board = driver.board
            self._workers.append(worker)
            self._notify()
            try:
                while self._run.left:
                    changed = self._changed
                    if worker.member.draining and not worker.member.hung:
                        self._leave(worker)
                    if await driver.step():
                        self._notify()
                    elif self._stuck(worker):
                        await driver.idle()
                        self._notify()
                    else:
                        await changed.wait()
            finally:
                self._workers.remove(worker)
                for request in [*board.running, *board.moving, *board.waiting]:
                    self._give_back(worker, request)
                self._notify()

    def _give_back(self, worker: Worker, request: Request) -> None:
        """It is computed anew, here or elsewhere."""
        self._run.rebuilds += request.cached > 0
        request.rebuilds += request.cached > 0
        worker.driver.board.requeue(request)

    def _leave(self, worker: Worker) -> None:
        """The executor drains: what has not begun waits for another one, and what has goes on elsewhere, few at a time;
        the others are served here meanwhile, and so is what has room nowhere else for all that it may become."""
        board = worker.driver.board
        if any(each.member.serving for each in self._workers if each.first == worker.first):
            for request in list(board.waiting):
                board.requeue(request)
        if not worker.first:
            room = MOVES_AT_ONCE - sum(each not in self._awaited for each in board.moving)
            going = [each for each in board.running if _with_room_for_all(self._takers(first=False), each)]
            for request in sorted(going, key=lambda each: each.index)[: max(0, room)]:
                if request.cached:
                    board.hand_over(request)
                else:
                    board.requeue(request)
            self._begin_moves()

    # --- who goes where ---------------------------------------------------------------------------------------------

    def _place(self) -> None:
        """Of those that wait, the oldest first, while there is room. The first ones when all have begun, so that not
        the first driver has them all."""
        first, members = self._prefill is not None, self._prefill or self._decode
        takers = self._takers(first=first)
        if not self._placed and len(takers) < len(members.serving):
            return
        self._placed = True
        for request in list(self._waiting) if takers else ():
            longest = max((each.driver for each in takers), key=lambda each: each.max_context)
            if self._awaits(members, takers, request):
                continue
            if not request.generated and not longest.admissible(request):
                self._waiting.remove(request)
                continue
            fit = self._fitting(takers, longest, request)
            free = [each for each in fit if each.driver.arrivals([request], each.driver.board.waiting)]
            if fit and not free:
                return
            if fit:
                self._waiting.remove(request)
                self._chosen(members, free, request).driver.board.waiting.append(request)

    def _takers(self, *, first: bool) -> list[Worker]:
        """Those that take sequences: prompts that are computed ``first``, or texts."""
        return [each for each in self._workers if each.first == first and each.member.serving]

    @staticmethod
    def _fit(workers: ListOf[Worker], request: Request) -> list[Worker]:
        """Those whose context and whole cache have room for all that it may become, or if there is none, those of the
        longest context that have room for what it is."""
        if fit := _with_room_for_all(workers, request):
            return fit
        fit = [each for each in workers if each.driver.holds(request.known)]
        longest = max((each.driver.max_context for each in fit), default=0)
        return [each for each in fit if each.driver.max_context == longest]

    def _goes_on(self, request: Request) -> bool:
        """Whether another executor has room for a request whose context is full, or may come back that has."""
        takers = self._takers(first=False)
        return bool(self._fit(takers, request)) or self._awaits(self._decode, takers, request)

    def _awaits(self, members: Members, takers: ListOf[Worker], request: Request) -> bool:
        """Whether no context holds a request, and one that is away may; for as long as the scheduler's patience."""
        longer = any(each.driver.max_context >= request.known for each in takers)
        if longer or not members.away(request.known, [each.member for each in takers]):
            self._awaited.pop(request, None)
            return False
        if request not in self._awaited:
            self._awaited[request] = time.monotonic() + self._patience_s
            asyncio.get_running_loop().call_later(self._patience_s + PATIENCE_OVER_S, self._notify)
        return time.monotonic() < self._awaited[request]

    def _fitting(self, workers: list[Worker], holder: Driver, request: Request) -> list[Worker]:
        """As `_fit`. Where there is none a request that moves goes on where it is, if it can; else it ends, at the
        driver that has it or would have had it."""
        fit = self._fit(workers, request)
        if fit or not workers:
            return fit
        if request in self._waiting:
            self._waiting.remove(request)
        elif request in holder.board.moving and holder.holds(request.known) and not holder.hands_over:
            holder.board.stay(request)
            if (begun := self._targets.pop(request, None)) is not None:
                self._tasks.create_task(_released(begun[1]))
            return []
        holder.give_up(request, max((each.driver.pool for each in workers), key=lambda each: each.total))
        return []

    @staticmethod
    def _chosen(members: Members, workers: list[Worker], request: Request) -> Worker:
        salt = None if workers[0].driver.cache_mode is CacheMode.BYPASS else b""
        chosen = members.choose([each.member for each in workers], [*request.prompt, *request.generated], salt)
        return next(each for each in workers if each.member is chosen)

    def _stuck(self, worker: Worker) -> bool:
        """Whether no other work of ours changes that nothing can be done there."""
        board, takes = worker.driver.board, worker.first == (self._prefill is not None)
        if board.waiting:
            return not board.moving
        if worker.member.hung and not board.running:
            return takes and bool(self._waiting) and not any(each.member.serving for each in self._workers)
        if board.running or board.moving or not worker.member.serving:
            return False
        moving = (request for each in self._workers for request in each.driver.board.moving)
        ready = not worker.first and not self._moves and any(each not in self._awaited for each in moving)
        return ready or (takes and any(each not in self._awaited for each in self._waiting))

    # --- moves ------------------------------------------------------------------------------------------------------

    def _begin_moves(self) -> None:
        """Those that there is room for, the oldest requests first."""
        takers = self._takers(first=False)
        for source in list(self._workers):
            board, under_way = source.driver.board, sum(each is source for each in self._moves.values())
            for request in sorted(board.moving, key=lambda each: each.index):
                stays = source.driver.holds(request.known) and not source.driver.hands_over
                if request in self._moves or (not stays and self._awaits(self._decode, takers, request)):
                    continue
                if not (fit := self._fitting(takers, source.driver, request)):
                    continue
                if (begun := self._targets.get(request)) is not None and begun[0] in fit:
                    fit = [begun[0]]  # the same move again goes on where this one stopped
                free = [
                    each
                    for each in fit
                    if len(each.coming) < MOVES_AT_ONCE
                    and each.driver.arrivals([request], [*each.coming, *each.driver.board.waiting])
                ]
                if under_way >= MOVES_AT_ONCE or not free:
                    break
                under_way += 1
                self._begin_move(request, source, self._chosen(self._decode, free, request))

    def _begin_move(self, request: Request, here: Worker, there: Worker) -> None:
        begun = self._targets.pop(request, None)
        target = begun[1] if begun is not None and begun[0] is there else there.driver.board.new_sequence()
        if begun is not None and begun[1] is not target:
            self._tasks.create_task(_released(begun[1]))
        self._moves[request] = here
        there.coming.append(request)
        source = here.driver.board.sequence(request)
        self._tasks.create_task(self._move(request, (here, source), (there, target)))

    async def _move(self, request: Request, come_from: tuple[Worker, Sequence], go_to: tuple[Worker, Sequence]) -> None:
        (here, source), (there, target), began = come_from, go_to, time.monotonic()
        board = here.driver.board
        try:
            await source.move_to(target)
        except (ExecutorError, SequenceMisuseError) as error:
            await self._not_moved(request, here, there, target, error)
        else:
            if request not in board.moving or there not in self._workers:  # one of the two is gone
                await _released(target)
                if request in board.moving:
                    self._give_back(here, request)
                return
            board.moved(request)
            there.driver.board.arrive(request, target)
            self._run.moved(request.cached, time.monotonic() - began)
            here.driver.resume()
            self._patience.renew()
        finally:
            del self._moves[request]
            there.coming.remove(request)
            self._notify()

    async def _not_moved(
        self,
        request: Request,
        here: Worker,
        there: Worker,
        target: Sequence,
        error: ExecutorError | SequenceMisuseError,
    ) -> None:
        if request not in here.driver.board.moving or there not in self._workers:  # one of the two is gone
            await _released(target)
        elif isinstance(error, NO_ROOM + NOT_NOW + NO_ANSWER):
            self._targets[request] = there, target
            there.driver.hold(error)
        elif isinstance(error, SequenceMisuseError) or (isinstance(error, CANNOT) and here.first):
            raise error
        else:
            if isinstance(error, CANNOT):
                self._give_back(here, request)
            else:
                here.driver.refused(request, error)
            await _released(target)


def _with_room_for_all(workers: ListOf[Worker], request: Request) -> list[Worker]:
    """Those that have room for all that it may become."""
    return [each for each in workers if each.driver.holds(len(request.prompt) + request.max_new_tokens)]


async def _released(sequence: Sequence) -> None:
    """Give up what has come of a sequence; what cannot be freed now is found by the executor's idle time-out."""
    with suppress(ExecutorError):
        await sequence.release()
