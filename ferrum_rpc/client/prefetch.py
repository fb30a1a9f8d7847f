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
from typing import Any, Final, NamedTuple, Self

from ferrum_rpc.client.answer import Answer
from ferrum_rpc.client.connection import Connection
from ferrum_rpc.client.info import Capability, ExecutorInfo
from ferrum_rpc.client.owner import Owner
from ferrum_rpc.client.pace import FIRST_RUN
from ferrum_rpc.client.retry import Deadline, fate_unknown
from ferrum_rpc.client.state import Item
from ferrum_rpc.client.transport import DECODE
from ferrum_rpc.core import MAX_STOP_TOKENS, OutputSpec, Run
from ferrum_rpc.core.check import ANSWER_OVERHEAD
from ferrum_rpc.errors import ExecutorError, KvBlocksExhausted, NotSupported, QuotaExceeded

_PATIENCE: Final = 4
"""The deadline of a run is that of one step, plus this many times the time of its steps so far."""


class Wanted(NamedTuple):
    """The tokens of a stream from here on: ``most`` (None: no limit), and no stop token among the first ``least``."""

    most: int | None
    least: int = 0

    def after(self, tokens: int) -> Self:
        """What is left after so many."""
        return self._replace(most=None if self.most is None else self.most - tokens, least=max(0, self.least - tokens))


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """``output`` and ``stops``: of the runs of a stream; while no stop token may come, its runs have the output
    ``before`` and no stops. ``max_delay_s``: see `RunPace.tokens`. ``timeout_s``: of a step."""

    output: OutputSpec
    timeout_s: float | None = None
    max_delay_s: float | None = None
    stops: tuple[int, ...] = ()
    before: OutputSpec | None = None


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
        options: StreamOptions,
    ) -> None:
        self._owner = owner
        self._send = send
        self._lost = lost
        self._options = options
        self._most: int | None = None
        self.in_flight_runs: deque[SentRun] = deque()
        self.unknown = False
        self.failed = False

    def fill(self, tokens: list[int], at: int, wanted: Wanted, info: ExecutorInfo, *, begins: bool = False) -> None:
        """Send the runs that are missing: of ``tokens``, which are to be fed at length ``at``, and behind what is in
        flight. ``wanted``: the tokens that are wanted after ``tokens``. ``begins``: the first run feeds a prompt. If
        the context has no capacity for it, it is sent all the same, so that the executor refuses it."""
        connection, state, runs = self._owner.connection, self._owner.state, self.in_flight_runs
        if runs and runs[-1].connection is not connection:  # the run that it would follow is at another executor
            return
        most = self._longest_run(info)
        chains = (
            connection.transport.chains and Capability.FOLLOW in info.capabilities and info.limits.max_followers > 0
        )
        chains = chains and most > 0
        in_flight = sum(each.tokens for each in runs)
        capacity = info.model.max_context - at - (len(tokens) - 1)
        if wanted.most is not None:
            capacity = min(capacity, wanted.most)
        capacity = max(capacity, int(begins))
        while capacity > in_flight and len(runs) < 1 + chains:
            count, output, stops = 1, self._options.output, self._options.stops
            if most:
                count = connection.pace.tokens(most, chains=chains or begins, max_delay_s=self._options.max_delay_s)
                if begins and chains and not runs:  # the first token comes with the whole run
                    count = min(count, FIRST_RUN)
                count = min(count, capacity - in_flight)
            if wanted.least > in_flight:
                count, output, stops = min(count, wanted.least - in_flight), self._options.before or output, ()
            run, number = Run(count, stops) if most else None, next(connection.context.item_ids)
            if runs:
                item = state.item_behind(runs[-1].item, number, [], output, run=run, max_context=info.model.max_context)
            else:
                item = state.item(number, tokens, output, None, run)
            in_flight += count
            self._add(item, count, connection)
            if item.follows is None and item.start != at:  # it is rebuilt first: its handle is not known yet
                return

    def _longest_run(self, info: ExecutorInfo) -> int:
        """Tokens of a run that the executor accepts and can answer in one message. 0: it offers none."""
        limits, options = info.limits, self._options
        if Capability.RUN not in info.capabilities or len(options.stops) > (limits.max_stop_tokens or MAX_STOP_TOKENS):
            return 0
        most = limits.max_run_tokens if self._most is None else self._most
        session = self._owner.connection.transport.chains
        answer_bytes = limits.max_session_response_bytes if session else limits.max_response_bytes
        if most > 1 and answer_bytes:
            row_bytes = options.output.row_bytes(info.model.vocab_size, info.model.hidden_size)
            most = max(1, min(most, (answer_bytes - ANSWER_OVERHEAD) // row_bytes))
        return most

    def _add(self, item: Item, count: int, connection: Connection) -> None:
        deadline = connection.context.deadline(self._options.timeout_s)
        if deadline.at is not None and connection.pace.step_s is not None:
            tokens = count + sum(each.tokens for each in self.in_flight_runs)
            deadline = Deadline(deadline.at + _PATIENCE * tokens * connection.pace.step_s)
        task = asyncio.get_running_loop().create_task(self._answer(item, deadline, connection))
        task.add_done_callback(_retrieve)
        if item.handle is None and not connection.transport.ready:  # what follows it waits for the session
            item.unsent = True
            task.add_done_callback(lambda _: item.sent())
        self.in_flight_runs.append(SentRun(item, count, connection, task))

    async def _answer(self, item: Item, deadline: Deadline, connection: Connection) -> Answer:
        began = time.monotonic()
        if item.follows is None:
            answer = await self._send(item, deadline)
        else:
            await item.follows.until_sent()
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
            short = isinstance(error, KvBlocksExhausted | QuotaExceeded) and "needed_slots" not in error.metadata
            if short and run.tokens > 1:
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
    """Keep asyncio from reporting an outcome that no caller waits for any more."""
    if not task.cancelled():
        task.exception()
