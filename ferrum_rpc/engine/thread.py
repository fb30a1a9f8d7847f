"""The engine in a thread of the server's own process: the queue in front of it, and its answers to the event loop.

The loop submits, the thread runs. Everything that a step finished goes back to the loop in one
``call_soon_threadsafe``. Both share one interpreter: where steps are many and short they take turns with it, and a
process of its own does better (`engine.process`).
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from ferrum_rpc.core import RankState, StepTiming
from ferrum_rpc.engine.api import LOOK_EVERY_S, Finished, Interrupt, Operation, Runner, Submission, WorkState, deliver
from ferrum_rpc.engine.liveness import Liveness, own_clock
from ferrum_rpc.engine.loop import EngineLoop, Work
from ferrum_rpc.errors import ExecutorError


class ModelThread(EngineLoop):
    """An `Engine`. ``build`` is called in the thread (loading does not block the loop); ``on_ready(runner)``,
    ``on_failed(error)`` and, after each step's answers, ``on_step(step, waits)`` with its timing and the seconds that
    each submission had waited, are called on the loop. ``limits``: see `EngineLoop`."""

    def __init__(
        self,
        build: Callable[[], Runner],
        *,
        loop: asyncio.AbstractEventLoop,
        on_ready: Callable[[Runner], None],
        on_failed: Callable[[BaseException], None],
        on_step: Callable[[StepTiming, Sequence[float]], None] = lambda step, waits: None,
        liveness: Liveness | None = None,
        **limits: int,
    ) -> None:
        self._arrived: SimpleQueue[Work] = SimpleQueue()
        super().__init__(
            build,
            inbox=self._arrived,
            lock=threading.Lock(),  # also guards the queue's sums and `_closed`
            on_ready=on_ready,
            on_failed=on_failed,
            **limits,
        )
        self._loop = loop
        self._liveness = liveness or Liveness()
        self._on_step = on_step
        self._closed = False
        self._thread = threading.Thread(target=self._main, name="ferrum-model", daemon=True)
        self.queued_items = 0
        self.queued_tokens = 0

    # --- the event loop's side --------------------------------------------------------------------------------------

    @property
    def ranks(self) -> Sequence[RankState]:
        found = list(self._find_ranks())
        if found and not self._thread.is_alive():
            found[0] = found[0]._replace(alive=False)
        return found

    def start(self) -> None:
        """Start the thread; it builds the runner first."""
        self._thread.start()

    def submit(self, work: Submission | Operation) -> None:
        with self._lock:
            if work.behind is None:
                self.queued_items += len(work.spans)
                self.queued_tokens += work.tokens
            self._arrived.put(work)
            closed = self._closed
        if closed:
            self._refuse_rest()

    def cancel(self, work: Submission | Operation) -> bool:
        with self._lock:
            if work.state is not WorkState.QUEUED:
                return False
            self._claimed(work, WorkState.CANCELLED)
            return True

    def interrupt(self, work: Submission, index: int | None, error: ExecutorError) -> None:
        self._arrived.put(Interrupt(work, index, error))

    def hang_reason(self, now: float) -> str | None:
        """Never waits."""
        if not self._thread.is_alive():
            return "it has ended"
        return self._liveness.hang_reason(now, self.busy_since, self.waiting_since)

    async def stop(self) -> bool:
        """A hung thread is abandoned (it is a daemon thread), and so is one that loads while nothing waits for it."""
        self._arrived.put(None)
        while self._thread.is_alive():
            if self._loading and not self.queued_items:
                return False
            await asyncio.to_thread(self._thread.join, LOOK_EVERY_S)
            if self._thread.is_alive() and self.hang_reason(time.monotonic()) is not None:
                return False
        return True

    # --- the model thread's side ------------------------------------------------------------------------------------

    def _main(self) -> None:
        self._liveness.cpu_clock, self._liveness.process = own_clock(), os.getpid()
        try:
            self._run()
        finally:
            with self._lock:
                self._closed = True
            self._refuse_rest()

    def _cancelled(self, work: Submission | Operation) -> bool:
        return work.state is WorkState.CANCELLED

    def _claimed(self, work: Submission | Operation, state: WorkState = WorkState.CLAIMED) -> None:
        work.state = state
        if work.behind is None:
            self.queued_items -= len(work.spans)
            self.queued_tokens -= work.tokens

    def _on_step_done(self, step: StepTiming, waits: Sequence[float]) -> None:
        self._loop.call_soon(self._on_step, step, waits)  # behind whatever the answers wake: callers do not wait for it

    def _deliver(self, finished: Finished) -> None:
        if finished and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(deliver, self._loop, finished)
