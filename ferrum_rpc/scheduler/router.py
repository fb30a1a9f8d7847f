"""Requests over several executors: a driver for each executor, and the assignment of requests to drivers.

Requests wait in one queue. A request is placed when a driver has room for it, at the executor that the client's
placement chooses. Executors for prompts hand requests over after their first token; so does an executor that drains. A
request that is handed over stays at its executor until another one has room for it and its growth, and moves while both
serve other requests. A move that finds no room or is not answered is repeated later. The source keeps the sequence
until all of it has arrived. A request that is lost with its executor, or on the way, is computed again as a prompt with
its text so far.
"""

from __future__ import annotations

import asyncio
import bisect
import time
from collections.abc import Callable
from collections.abc import Sequence as ListOf
from dataclasses import dataclass
from typing import Final

from ferrum_rpc.client import (
    NO_ANSWER,
    NO_CAPACITY,
    TRY_LATER,
    CacheMode,
    DeviceLost,
    ExecutorError,
    InstanceMismatch,
    LayoutMismatch,
    NotSupported,
    Sequence,
    SequenceMisuseError,
)
from ferrum_rpc.client.fleet import Member, Members
from ferrum_rpc.client.fleet.members import SILENT_S
from ferrum_rpc.scheduler.counts import RunCounts
from ferrum_rpc.scheduler.driver import Driver
from ferrum_rpc.scheduler.patience import ExecutorGone, Patience
from ferrum_rpc.scheduler.queues import IN_ORDER, Observer, end
from ferrum_rpc.scheduler.request import Request, RequestEnd

MOVES_AT_ONCE: Final = 2
"""Per executor, whose `max_transfers` is 4 by default and shared with other schedulers."""

PATIENCE_OVER_S: Final = 0.01
"""Delay of the timer behind the end of a wait, so that the wait is over when it fires."""

CANNOT_MOVE: Final = (LayoutMismatch, NotSupported)


@dataclass(eq=False, slots=True)
class Move:
    """The move of a request from ``here`` to the sequence ``target`` at ``there``. If it is not ``under_way`` it is to
    be repeated, and continues where it stopped."""

    here: Driver
    there: Driver
    target: Sequence
    under_way: bool = False


class Router:
    """Runs requests on the executors of one model: on those of ``decode``, or prompts on those of ``prefill`` if given.
    ``make`` makes the driver of an executor; its second argument is whether it computes prompts only."""

    def __init__(
        self,
        make: Callable[[Member, bool], Driver],
        decode: Members,
        prefill: Members | None = None,
        *,
        watcher: Observer | None = None,
        patience_s: float = 30.0,
    ) -> None:
        self._make = make
        self._decode, self._prefill = decode, prefill
        self._watcher = watcher or Observer()
        self._patience_s = patience_s
        self._patience = Patience(patience_s)
        self._run = RunCounts(())
        self._waiting: list[Request] = []
        self._drivers: dict[Driver, Member] = {}
        self._placed = self._closing = False
        self._moves: dict[Request, Move] = {}
        self._awaited: dict[Request, float] = {}  # until when each waits for an executor with a longer context
        self._changed = asyncio.Event()

    async def run(self, requests: ListOf[Request]) -> RunCounts:
        """Run every request to its end. Raises as `serve`."""
        self._run = RunCounts(requests)
        self.submit(*requests)
        self.close()
        await self.serve()
        return self._run

    def submit(self, *requests: Request) -> None:
        """Take requests, with their branches, at any time."""
        now = time.monotonic()
        if not self._run.left:
            self._patience.renew()  # it was idle
        for request in requests:
            for each in (request, *request.branches):
                each.arrived = now
            self._run.left += 1 + len(request.branches)
            bisect.insort(self._waiting, request, key=IN_ORDER)
        self._notify()

    def close(self) -> None:
        """Have `serve` return once all requests have ended."""
        self._closing = True
        self._notify()

    @property
    def counts(self) -> RunCounts:
        """What was done so far."""
        return self._run

    @property
    def waiting(self) -> int:
        """Requests that have not begun at an executor, or were preempted."""
        return len(self._waiting) + sum(len(each.queues.waiting) for each in self._drivers)

    @property
    def _going(self) -> bool:
        return not self._closing or self._run.left > 0

    async def serve(self) -> None:
        """Run what was submitted and what is submitted meanwhile, until `close` was called and all has ended. Raises
        `ExecutorGone`, and `LayoutMismatch` or `NotSupported` if prompts cannot move. All sequences are released in
        every case; after an error requests that have not ended are waiting again."""
        began = time.monotonic()
        self._awaited.clear()
        self._patience.renew()
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                watches = [tasks.create_task(self._watch(self._decode, first=False))]
                if self._prefill is not None:
                    watches.append(tasks.create_task(self._watch(self._prefill, first=True)))
                while self._going:
                    changed = self._changed
                    self._place()
                    self._begin_moves()
                    if self._going:
                        await changed.wait()
                for watch in watches:
                    watch.cancel()
                self._notify()
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            self._run.wall_seconds = time.monotonic() - began

    def cancel(self, request: Request, ending: RequestEnd) -> None:
        """End a request before its text is complete. Its sequence is released as soon as nothing of it is in flight."""
        if request.ending is not None:
            return
        if driver := next((each for each in self._drivers if request in each.queues.all), None):
            self._give_up_move(request)
            driver.cancel(request, ending)
        else:
            if request in self._waiting:
                self._waiting.remove(request)
            end(request, ending, None, self._run, self._watcher)
        self._notify()

    def fail(self, error: Exception) -> None:
        """End every request that waits, with an error."""
        while self._waiting:
            end(self._waiting.pop(0), RequestEnd.ERROR, error, self._run, self._watcher)

    def _notify(self) -> None:
        """Wake every task that waits for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    # --- who is there -----------------------------------------------------------------------------------------------

    async def _watch(self, members: Members, *, first: bool) -> None:
        """Keep a driver for each executor while it is known. ``first``: for prompts only."""
        known: set[Member] = set()
        while True:
            since, there = members.changes, members.there
            for member in set(there) - known:
                self._tasks.create_task(self._run_driver(self._make(member, first), member, members, first=first))
            known = set(there)
            for driver, member in self._drivers.items():
                driver.leaving = member.draining
            self._notify()
            every = [each for some in (self._prefill, self._decode) if some is not None for each in some.there]
            self._watcher.executors([(each.target, each.condition) for each in every])
            takes = any(not each.draining for each in there)
            try:
                async with asyncio.timeout(None if takes else max(PATIENCE_OVER_S, self._patience.left_s)):
                    await members.changed(since)
            except TimeoutError:
                if not self._run.left:
                    self._patience.renew()
                elif self._patience.left_s <= 0:
                    what = "every executor drains" if there else "no executor"
                    where, patience = ", ".join(members.targets), f"{self._patience_s:g} s"
                    raise ExecutorGone(f"{what} at {where} for {patience}") from None

    async def _run_driver(self, driver: Driver, member: Member, members: Members, *, first: bool) -> None:
        """Drive an executor until nothing more is to come, or it is gone."""
        driver.port.patience, driver.goes_on = self._patience, self._goes_on
        self._patience.renew()
        driving = asyncio.create_task(self._drive(driver, member, first=first))
        gone = asyncio.create_task(member.ended())
        try:
            await asyncio.wait({driving, gone}, return_when=asyncio.FIRST_COMPLETED)
            trouble = driving.exception() if driving.done() else None
            if isinstance(trouble, InstanceMismatch):  # a look, which may find nobody in time, would say the same
                await member.end(trouble)
            elif isinstance(trouble, ExecutorGone | ExecutorError):
                await members.look(member)
        finally:
            for task in (driving, gone):
                task.cancel()
            await asyncio.wait({driving, gone})
        self._run.executors_lost += member.gone
        error = None if driving.cancelled() else driving.exception()
        if error is not None and not member.gone:
            raise error

    async def _drive(self, driver: Driver, member: Member, *, first: bool) -> None:
        async with driver.serving(self._run, [], self._waiting, hands_over=first):
            self._drivers[driver] = member
            self._notify()
            try:
                while self._going:
                    changed = self._changed
                    if member.draining and not member.hung:
                        self._leave(driver)
                    if await driver.step():
                        self._notify()
                    elif self._stuck(driver, member):
                        await driver.idle()
                        self._notify()
                    else:
                        await changed.wait()
            finally:
                del self._drivers[driver]
                for request in driver.queues.all:
                    self._give_back(driver, request)
                self._notify()

    def _give_back(self, driver: Driver, request: Request) -> None:
        """Have a request computed again, here or at another executor."""
        self._run.rebuilds += request.cached > 0
        request.rebuilds += request.cached > 0
        self._give_up_move(request)
        driver.queues.requeue(request)

    def _leave(self, driver: Driver) -> None:
        """The executor drains: requests that have not begun wait for another executor; the others move away, a few at a
        time. Requests are served here meanwhile, and to their end if no other executor has room for all that they may
        become."""
        queues = driver.queues
        if self._takers(first=driver.hands_over):
            for request in list(queues.waiting):
                queues.requeue(request)
        if not driver.hands_over:
            room = MOVES_AT_ONCE - sum(each not in self._awaited for each in queues.moving)
            takers = self._takers(first=False)
            going = [each for each in queues.running if driver.rests(each) and _with_room_for_all(takers, each)]
            for request in _oldest(going)[: max(0, room)]:
                queues.hand_over(request)
            self._begin_moves()

    # --- who goes where ---------------------------------------------------------------------------------------------

    def _place(self) -> None:
        """Place waiting requests, the oldest first, while there is room. Placing starts once all executors have a
        driver, so that the first driver does not get all requests."""
        first, members = self._prefill is not None, self._prefill or self._decode
        takers = self._takers(first=first)
        if not self._placed and len(takers) < len(members.serving):
            return
        self._placed = True
        for request in list(self._waiting) if takers else ():
            longest = max(takers, key=lambda each: each.port.max_context)
            if self._awaits(members, takers, request) or not (request.generated or longest.admissible(request)):
                continue
            fit = self._fitting(takers, longest, request)
            free = [each for each in fit if each.has_room(request)]
            if fit and not free:
                return
            if fit:
                self._waiting.remove(request)
                self._chosen(members, free, request).take(request)

    def _takers(self, *, first: bool) -> list[Driver]:
        """The drivers whose executors accept sequences: for prompts (``first``), or for texts."""
        return [each for each, member in self._drivers.items() if each.hands_over == first and member.serving]

    def _goes_on(self, request: Request) -> bool:
        """Whether another executor has room for a request whose context is full, or one that is away may have."""
        takers = self._takers(first=False)
        return bool(_with_room(takers, request)) or self._awaits(self._decode, takers, request)

    def _awaits(self, members: Members, takers: ListOf[Driver], request: Request) -> bool:
        """Whether no context holds a request but that of an executor that is away may. False after the scheduler's
        patience."""
        longer = any(each.port.max_context >= request.known for each in takers)
        if longer or not members.away(request.known, [self._drivers[each] for each in takers]):
            self._awaited.pop(request, None)
            return False
        if request not in self._awaited:
            self._awaited[request] = time.monotonic() + self._patience_s
            asyncio.get_running_loop().call_later(self._patience_s + PATIENCE_OVER_S, self._notify)
        return time.monotonic() < self._awaited[request]

    def _fitting(self, takers: list[Driver], holder: Driver, request: Request) -> list[Driver]:
        """As `_with_room`. If there is none, a moving request continues at its ``holder`` if possible; otherwise it
        ends."""
        fit = _with_room(takers, request)
        if fit or not takers:
            return fit
        self._give_up_move(request)
        if request in holder.queues.moving and holder.port.holds(request.known) and not holder.hands_over:
            holder.queues.run([request])
        else:
            holder.give_up(request, max((each.port.pool for each in takers), key=lambda each: each.total))
        return []

    def _chosen(self, members: Members, drivers: list[Driver], request: Request) -> Driver:
        unknown = request.adapter or request.cache_mode is CacheMode.BYPASS  # the client's index has no such prefix
        salt = None if unknown else request.cache_salt
        chosen = members.choose([self._drivers[each] for each in drivers], request.tokens, salt)
        return next(each for each in drivers if self._drivers[each] is chosen)

    def _stuck(self, driver: Driver, member: Member) -> bool:
        """Whether no other work of this scheduler can give the driver something to do."""
        queues, takes = driver.queues, driver.hands_over == (self._prefill is not None)
        if queues.waiting:
            return not queues.moving
        if member.hung and not queues.running:
            return takes and bool(self._waiting) and not any(each.serving for each in self._drivers.values())
        if queues.running or queues.moving or not member.serving:
            return False
        moving = (request for each in self._drivers for request in each.queues.moving)
        under_way = any(each.under_way for each in self._moves.values())
        ready = not driver.hands_over and not under_way and any(each not in self._awaited for each in moving)
        return ready or (takes and any(each not in self._awaited for each in self._waiting))

    # --- moves ------------------------------------------------------------------------------------------------------

    def _begin_moves(self) -> None:
        """Begin the moves that there is room for, the oldest requests first."""
        takers = self._takers(first=False)
        for here in list(self._drivers):
            under_way = sum(each.under_way and each.here is here for each in self._moves.values())
            for request in _oldest(here.queues.moving):
                begun, stays = self._moves.get(request), here.port.holds(request.known) and not here.hands_over
                if begun is not None and begun.under_way:
                    continue
                if not stays and self._awaits(self._decode, takers, request):
                    continue
                if not (fit := self._fitting(takers, here, request)):
                    continue
                if begun is not None and begun.there in fit:
                    fit = [begun.there]  # repeated, it continues where it stopped
                free = [each for each in fit if len(each.queues.coming) < MOVES_AT_ONCE and each.has_room(request)]
                if under_way >= MOVES_AT_ONCE or not free:
                    break
                under_way += 1
                self._begin_move(request, here, self._chosen(self._decode, free, request))

    def _begin_move(self, request: Request, here: Driver, there: Driver) -> None:
        move = self._moves.get(request)
        if move is None or move.there is not there:
            self._give_up_move(request)
            move = self._moves[request] = Move(here, there, there.port.new_sequence(request))
        assert request.sequence is not None  # noqa: S101 - one that moves has been fed
        move.here, move.under_way = here, True
        there.queues.coming.append(request)
        self._tasks.create_task(self._move(request, request.sequence, move))

    async def _move(self, request: Request, source: Sequence, move: Move) -> None:
        here, there, began, again, arrived = move.here, move.there, time.monotonic(), False, False
        moving = here.queues.moving
        try:
            await source.move_to(move.target)
            if request in moving and there in self._drivers:
                arrived = True
                moving.remove(request)
                there.queues.arrive(request, move.target)
                self._run.moved(request.cached, time.monotonic() - began)
                here.refusal = None
                self._patience.renew()
            elif request in moving:
                self._give_back(here, request)
        except DeviceLost:  # of which of the two a look finds out: it is gone then, and its requests go on elsewhere
            await asyncio.gather(
                *(self._drivers[each].look(SILENT_S) for each in (here, there) if each in self._drivers)
            )
            if request in moving:
                self._give_back(here, request)
        except (ExecutorError, SequenceMisuseError) as error:
            again = request in moving and there in self._drivers and self._is_made_again(request, move, error)
        finally:
            move.under_way = False
            if not again:
                del self._moves[request]
            there.queues.coming.remove(request)
            if not (arrived or again):
                there.queues.leave(move.target)
            if request.ending is not None and not source.released:  # nobody could release it while it moved
                here.queues.leave(source)
            self._notify()

    def _give_up_move(self, request: Request) -> None:
        """Have what has arrived of a request released, unless its move is under way and ends by itself."""
        move = self._moves.get(request)
        if move is not None and not move.under_way:
            del self._moves[request]
            move.there.queues.leave(move.target)

    def _is_made_again(self, request: Request, move: Move, error: ExecutorError | SequenceMisuseError) -> bool:
        """Handle a move that failed while both executors are known. Raises errors that every further move would
        have."""
        here = move.here
        if isinstance(error, NO_CAPACITY + TRY_LATER + NO_ANSWER):
            move.there.refusal = error
            return True
        if isinstance(error, SequenceMisuseError) or (isinstance(error, CANNOT_MOVE) and here.hands_over):
            raise error
        if isinstance(error, CANNOT_MOVE):
            self._give_back(here, request)
        else:
            here.refused(request, error)
        return False


def _oldest(requests: ListOf[Request]) -> list[Request]:
    return sorted(requests, key=IN_ORDER)


def _with_room_for_all(drivers: ListOf[Driver], request: Request) -> list[Driver]:
    """The drivers with room for all that the request may become."""
    return [each for each in drivers if each.port.holds(request.becomes)]


def _with_room(drivers: ListOf[Driver], request: Request) -> list[Driver]:
    """The drivers whose context and cache have room for all that the request may become. If there is none, those with
    the longest context of all that have room for what it is now."""
    if fit := _with_room_for_all(drivers, request):
        return fit
    fit = [each for each in drivers if each.port.holds(request.known)]
    longest = max((each.port.max_context for each in fit), default=0)
    return [each for each in fit if each.port.max_context == longest]
