"""Runs of a stream of tokens, sent before the program has read the tokens of the previous run. An executor without runs
gets single steps, as runs of one token.

One run is in progress. If the executor supports followers, the next run waits there for its end, which hides round
trips that are shorter than a run. Tokens that were computed and not yet yielded are in the executor's cache. If a
stream is left early, the sequence's next call rolls back to the tokens that the program has seen.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final

from ferrum_rpc.client.answer import Answer
from ferrum_rpc.client.connection import Connection
from ferrum_rpc.client.info import Capability, ExecutorInfo
from ferrum_rpc.client.owner import Owner
from ferrum_rpc.client.retry import Deadline, fate_unknown
from ferrum_rpc.client.state import Item
from ferrum_rpc.client.transport import DECODE
from ferrum_rpc.core import MAX_STOP_TOKENS, OutputSpec, Run
from ferrum_rpc.errors import ExecutorError, KvBlocksExhausted, NotSupported, QuotaExceeded

_PATIENCE: Final = 4
"""The deadline of a run is that of one step, plus this many times the time of its steps so far."""


@dataclass(slots=True, eq=False)
class SentRun:
    """A run of ``tokens`` at most, in flight over a ``connection``."""

    item: Item
    tokens: int
    connection: Connection
    task: asyncio.Task[Answer]


class RunPrefetcher:
    """The runs of one stream. The program has seen the tokens in the cache up to `SequenceState.seen`, and one more
    that is not fed yet. ``send`` sends an item, after feeding lost tokens again; ``lost`` returns whether an error of a
    follower means that the sequence was lost. ``unknown``: the cache may have more tokens than the program has seen.
    ``failed``: the stream has raised an error that leaves that open."""

    def __init__(
        self,
        owner: Owner,
        send: Callable[[Item, Deadline], Coroutine[Any, Any, Answer]],
        lost: Callable[[ExecutorError], Coroutine[Any, Any, bool]],
        *,
        output: OutputSpec,
        stops: tuple[int, ...],
        timeout_s: float | None,
    ) -> None:
        self._owner = owner
        self._send = send
        self._lost = lost
        self._output = output
        self._stops = stops
        self._timeout_s = timeout_s
        self._most: int | None = None
        self.in_flight_runs: deque[SentRun] = deque()
        self.unknown = False
        self.failed = False

    def fill(self, tokens: list[int], at: int, left: int | None, info: ExecutorInfo, *, least: int = 0) -> None:
        """Send the runs that are missing: of ``tokens``, which are to be fed at length ``at``, and behind what is in
        flight. ``left``: tokens that are still wanted, None without a bound. ``least``: tokens to ask for where the
        context has no capacity for any, so that the executor refuses it."""
        connection, state, runs, limits = self._owner.connection, self._owner.state, self.in_flight_runs, info.limits
        if runs and runs[-1].connection is not connection:  # the run that it would follow is at another executor
            return
        offered = info.capabilities if len(self._stops) <= (limits.max_stop_tokens or MAX_STOP_TOKENS) else ()
        most = (limits.max_run_tokens if self._most is None else self._most) if Capability.RUN in offered else 0
        chains = connection.transport.chains and Capability.FOLLOW in offered and limits.max_followers > 0 < most
        in_flight = sum(each.tokens for each in runs)
        capacity = info.model.max_context - at - (len(tokens) - 1) - in_flight
        if left is not None:
            capacity = min(capacity, left - in_flight)
        capacity = max(capacity, least)
        while capacity > 0 and len(runs) < 1 + chains:
            # The first token comes with the whole run: behind a prompt, no longer a run than one that is followed.
            count = min(connection.pace.tokens(most, chains=chains or least > 0), capacity) if most else 1
            run, number = Run(count, self._stops) if most else None, next(connection.context.item_ids)
            if runs:
                item = state.item_behind(
                    runs[-1].item, number, [], self._output, run=run, max_context=info.model.max_context
                )
            else:
                item = state.item(number, tokens, self._output, None, run)
            capacity -= count
            self._add(item, count, connection)
            if item.follows is None and item.start != at:  # it is rebuilt first: its handle is not known yet
                return

    def _add(self, item: Item, count: int, connection: Connection) -> None:
        deadline = connection.context.deadline(self._timeout_s)
        if deadline.at is not None and connection.pace.step_s is not None:
            tokens = count + sum(each.tokens for each in self.in_flight_runs)
            deadline = Deadline(deadline.at + _PATIENCE * tokens * connection.pace.step_s)
        task = asyncio.get_running_loop().create_task(self._answer(item, deadline, connection))
        task.add_done_callback(_retrieve)
        self.in_flight_runs.append(SentRun(item, count, connection, task))

    async def _answer(self, item: Item, deadline: Deadline, connection: Connection) -> Answer:
        began = time.monotonic()
        if item.follows is None:
            answer = await self._send(item, deadline)
        else:
            [outcome] = await connection.forward(DECODE, [item], deadline)
            if isinstance(outcome, ExecutorError):
                raise outcome
            answer = outcome
        elapsed_s = time.monotonic() - began if item.follows is None else None
        connection.pace.note(elapsed_s, answer.timing, 0 if len(item.tokens) > 1 else len(answer.tokens))
        return answer

    async def next_run(self) -> Answer | None:
        """The answer of the first run in flight. None: `fill` again. Nothing in flight will be answered, because an
        earlier run was shorter than foreseen or the cache has no capacity for runs of this length. Raises the refusal
        of the run."""
        run = self.in_flight_runs[0]
        try:
            answer = await asyncio.shield(run.task)
        except ExecutorError as error:
            stays = run.connection is self._owner.connection  # else the sequence has moved since
            if stays and fate_unknown(error) and (run.item.follows is None or not await self._lost(error)):
                raise
            await self.drain()
            if isinstance(error, KvBlocksExhausted | QuotaExceeded) and run.tokens > 1:
                self._most = run.tokens // 2
            elif isinstance(error, NotSupported) and run.item.run is not None and error.field == "run":
                self._most = 0  # another executor, without runs, answers there now
            elif run.item.follows is None:
                raise
            return None
        self.in_flight_runs.popleft()
        return answer

    def cancel(self) -> list[asyncio.Task[Answer]]:
        """Cancel everything in flight: the executor drops runs that have not begun, and interrupts the others. Returns
        their tasks, which end soon."""
        self.unknown = self.unknown or bool(self.in_flight_runs)
        for each in self.in_flight_runs:
            each.task.cancel()
        return [each.task for each in self.in_flight_runs]

    async def drain(self) -> None:
        """Wait until nothing is in flight. Outcomes are ignored."""
        if self.in_flight_runs:
            await asyncio.wait([each.task for each in self.in_flight_runs])
        self.in_flight_runs.clear()


def _retrieve(task: asyncio.Task[Answer]) -> None:
    """Keep asyncio from reporting an outcome that nobody waits for any more."""
    if not task.cancelled():
        task.exception()
