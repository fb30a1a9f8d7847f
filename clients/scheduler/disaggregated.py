"""Prompts on one executor, the texts that follow on another: two drivers, and the sequences that move between them.

The first driver computes a prompt and samples the first token. Its sequence then stays where it is until the second
executor has room for it and for what it grows by, and moves while both executors go on with others. What is preempted
at the second one is a prompt again, with its text so far.

A move that finds no room, or is not answered, is made again later. Until all of a sequence has arrived, its source
keeps it. What is lost on the way is computed anew.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as ListOf
from typing import Final

from clients.scheduler.driver import NO_ANSWER, NO_ROOM, NOT_NOW, Driver
from clients.scheduler.report import Run
from clients.scheduler.request import Request
from ferrum_rpc.client import Sequence
from ferrum_rpc.errors import ExecutorError, LayoutMismatch, NotSupported

MOVES_AT_ONCE: Final = 2
"""An executor takes part in 4 transfers by default (`max_transfers`), those of other schedulers among them."""


class Disaggregated:
    """Runs requests on two executors of one model: prompts by the ``prefill`` driver, what follows by ``decode``."""

    def __init__(self, prefill: Driver, decode: Driver) -> None:
        self._prefill, self._decode = prefill, decode
        self._run = Run(())
        self._moves: dict[Request, asyncio.Task[None]] = {}
        self._targets: dict[Request, Sequence] = {}
        self._changed = asyncio.Event()

    async def run(self, requests: ListOf[Request]) -> Run:
        """Every request to its end. Raises `ExecutorGone`, and `LayoutMismatch` or `NotSupported` where nothing can
        move; whatever happens, no sequence is left behind."""
        run, waiting = Run(requests), deque(requests)
        self._run = run
        async with (
            self._prefill.serving(run, waiting, waiting, hands_over=True),
            self._decode.serving(run, deque(), waiting),
        ):
            here = self._prefill.board
            try:
                async with asyncio.TaskGroup() as tasks:
                    self._tasks = tasks
                    tasks.create_task(self._drive(self._prefill, lambda: bool(here.waiting and not here.moving)))
                    tasks.create_task(self._drive(self._decode, lambda: bool(here.moving and not self._moves)))
            except BaseExceptionGroup as group:
                raise group.exceptions[0] from None
        return run

    async def _drive(self, driver: Driver, stuck: Callable[[], bool]) -> None:
        """Step while anything can be done there. ``stuck``: whether no other work of ours will change that."""
        while self._run.left:
            changed = self._changed
            stepped = await driver.step()
            self._begin_moves()
            if stepped:
                self._notify()
            elif stuck():
                await driver.idle()
            else:
                await changed.wait()
                driver.patience.renew()

    def _notify(self) -> None:
        """Both drivers look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _begin_moves(self) -> None:
        """Those that there is room for, the oldest requests first."""
        here, pool = self._prefill.board, self._decode.pool
        for request in [each for each in here.moving if pool.blocks(each.known) > pool.total]:
            self._prefill.give_up(request, pool)
        ready = sorted(here.moving, key=lambda each: each.index)
        ready = [each for each in ready if each not in self._moves]
        for request in self._decode.arrivals(ready, list(self._moves))[: MOVES_AT_ONCE - len(self._moves)]:
            self._moves[request] = self._tasks.create_task(self._move(request))

    async def _move(self, request: Request) -> None:
        here, there = self._prefill.board, self._decode.board
        source, target = here.sequence(request), self._targets.pop(request, None) or there.new_sequence()
        began = time.monotonic()
        try:
            await source.move_to(target)
        except (LayoutMismatch, NotSupported):
            raise
        except NO_ROOM + NOT_NOW + NO_ANSWER as error:
            self._targets[request] = target  # the same move again goes on where this one stopped
            self._decode.hold(error)
        except ExecutorError as error:
            await target.release()
            self._prefill.refused(request, error)
        else:
            here.moved(request)
            there.arrive(request, target)
            self._run.moved(request.cached, time.monotonic() - began)
            self._prefill.resume()
            self._decode.patience.renew()
        finally:
            del self._moves[request]
            self._notify()
