"""What every call of a sequence goes through: it is sent, and what was lost with an executor is fed again where the
program wants that.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Final, TypeVar

from ferrum_rpc.client.answer import Answer, joined
from ferrum_rpc.client.arguments import NO_ROWS
from ferrum_rpc.client.connection import Connection
from ferrum_rpc.client.info import ExecutorInfo
from ferrum_rpc.client.pieces import Piece, Pieces
from ferrum_rpc.client.retry import SEQUENCE_GONE, Backoff, Deadline, fate_unknown
from ferrum_rpc.client.state import SequenceMisuseError, SequenceState
from ferrum_rpc.client.transport import PREFILL, Feed
from ferrum_rpc.core import HandleRef, OutputSpec, Positions, Pressure, Run
from ferrum_rpc.errors import (
    ContextLengthExceeded,
    ExecutorError,
    QuotaExceeded,
    SequenceBusy,
    SequencesExhausted,
)

Result = TypeVar("Result")

MESSAGE_OVERHEAD: Final = 64 << 10
"""Bytes of an answer beside its rows: generous, for one item's worth of messages."""


FULL: Final = (ContextLengthExceeded, SequencesExhausted, QuotaExceeded)
"""Refusals for want of room that another executor may have."""


@dataclass(slots=True)
class Lost:
    """What a lost sequence held, and is fed again: its ``tokens``, of which ``known`` were in the cache, the ``long``
    pieces that they were fed in, and the ``pieces`` that they are fed in now, ``done`` of which are there."""

    tokens: list[int]
    known: int
    long: Pieces
    pieces: list[Piece] | None = None
    done: int = 0


class Recovering:
    """The base of a sequence that may be lost and rebuilt."""

    _rebuilds_of_a_call: ClassVar = 1

    def __init__(self, connection: Connection, state: SequenceState, *, rebuild: bool) -> None:
        self._be_at(connection)
        self._state = state
        self._rebuilds = rebuild
        self._lost: Lost | None = None
        self._left = False  # a call whose fate is unknown may still hold it

    def _be_at(self, connection: Connection) -> None:
        """Its calls go there from now on."""
        self._connection, self._context = connection, connection.context

    async def _recover(
        self, send: Callable[[], Awaitable[Result]], deadline: Deadline, truncate_to: int | None = None
    ) -> Result:
        """Send, after feeding again what was lost. While an earlier call of unknown fate may still run, a busy
        sequence is no mistake of the program: send again. If the sequence is gone and may be rebuilt, feed its tokens
        to a new one and send again, `_rebuilds_of_a_call` times."""
        backoff: Backoff | None = None
        rebuilds = self._rebuilds_of_a_call if self._rebuilds else 0
        while True:
            try:
                await self._find_owner(deadline)
                if self._lost is not None:
                    await self._feed_lost(deadline)
                result = await send()
                self._left = False
                return result
            except SequenceBusy:
                state, backoff = self._state, backoff or Backoff.while_busy(deadline)
                made = state.handle is None and state.parent is not None  # another child of its parent is being made
                may_run = self._left or (state.doubt is not None and state.doubt.unknown)
                if not (made or may_run) or not await backoff.wait():
                    raise
            except BaseException as error:
                if isinstance(error, FULL) and await self._finds_room(error, deadline):
                    continue
                if not rebuilds or not isinstance(error, ExecutorError) or not await self._is_gone(error):
                    self._left = self._left or fate_unknown(error)
                    raise
                rebuilds -= 1
                self._lose(truncate_to)

    @property
    def _unplaced(self) -> bool:
        """Whether no executor has anything of it."""
        state = self._state
        in_doubt = state.creation is not None and state.creation.unknown
        return state.handle is None and state.parent is None and not in_doubt

    async def _find_owner(self, deadline: Deadline, tokens: list[int] | None = None) -> None:
        """Before a call, which feeds ``tokens`` if that is known: be where the sequence is, or is to be. There is one
        executor here; a fleet has several."""

    def _expect(self, tokens: int | None) -> None:
        """So many tokens at most are fed from here on; None: any number."""

    async def _finds_room(self, error: ExecutorError, deadline: Deadline) -> bool:
        """Whether another executor may have the room for which a call was refused, and the sequence is there, or is
        placed there with the call made again."""
        return False

    async def _more_context(self, deadline: Deadline) -> ExecutorInfo | None:
        """The context is full: go where there is a longer one. Returns what the executor there is; None: nowhere."""
        return None

    async def _info(self, deadline: Deadline) -> ExecutorInfo:
        """What the executor is that has it."""
        return await self._context.info(deadline)

    async def _is_gone(self, error: ExecutorError) -> bool:
        """Whether an error says that the executor has the sequence no more."""
        made = self._state.handle is not None or self._state.parent is not None
        return made and isinstance(error, SEQUENCE_GONE)

    async def _forward(
        self,
        feed: Feed,
        tokens: list[int],
        output: OutputSpec,
        truncate_to: int | None,
        deadline: Deadline,
        *,
        run: Run | None = None,
    ) -> Answer:
        state = self._state
        if state.handle is None and state.parent is None:
            feed, truncate_to = PREFILL, None
        elif state.handle is not None and truncate_to == state.handle.seq_len:
            # What was lost may have been rebuilt to exactly that.
            truncate_to = None
        item = state.item(next(self._context.item_ids), tokens, output, truncate_to, run)
        [answer] = await self._connection.forward(feed, [item], deadline)
        if isinstance(answer, ExecutorError):
            raise answer
        return answer

    def _lose(self, length: int | None = None) -> None:
        """The executor has it no more: its first ``length`` tokens (default: all) are fed again before what is next."""
        self._restart(self._held_tokens()[:length])
        if self._lost is not None and not self._lost.tokens:
            self._lost = None

    def _restart(self, tokens: list[int]) -> None:
        lost = self._lost
        if lost is None:
            lost = Lost(tokens, self._state.length, self._state.pieces)
        self._lost = Lost(tokens, min(lost.known, len(tokens)), lost.long)
        self._state.restart()

    async def _feed_lost(self, deadline: Deadline, output: OutputSpec = NO_ROWS) -> Answer:
        """Feed what a lost sequence held. The answer is the last piece's, with all requested rows."""
        lost, state = self._lost, self._state
        assert lost is not None  # noqa: S101 - checked by the callers
        if lost.pieces is None:
            most = await self._max_tokens(output, len(lost.tokens), deadline)
            exact = (await self._info(deadline)).limits.exact_span_tokens
            lost.pieces = lost.long.plan(len(lost.tokens), lost.known, exact, most)
        answers: list[Answer] = []
        last = len(lost.pieces) - 1
        for number in range(min(lost.done, last), last + 1):
            piece = lost.pieces[number]
            wanted = output.positions if number == last or output.positions is Positions.ALL else Positions.NONE
            filled = piece.filled and wanted is not Positions.NONE
            spec = replace(output, positions=Positions.ALL if filled else wanted)
            truncate_to = piece.start if state.length > piece.start else None
            tokens = piece.tokens(lost.tokens)
            answer = await self._forward(PREFILL, tokens, spec, truncate_to, deadline)
            lost.done = number + 1
            if filled and answer.rows is not None:
                answer = replace(answer, rows=piece.rows(answer.rows, wanted))
            answers.append(answer)
        if state.length > len(lost.tokens):
            await self._roll_back(len(lost.tokens), deadline)
        self._lost = None
        answer = joined(answers)  # there is at least one piece
        return replace(answer, handle=state.handle or answer.handle)

    def _held_tokens(self) -> list[int]:
        """The tokens in the cache, those included that a stream is ahead of its program."""
        tokens = self._state.tokens if self._lost is None else self._lost.tokens
        if tokens is None:
            raise SequenceMisuseError("this sequence does not keep its tokens: make it with keep_tokens=True")
        return list(tokens)

    def _handle(self) -> HandleRef:
        """The handle for an operation. What was lost may have been rebuilt to nothing at all."""
        if self._state.handle is None:
            raise SequenceMisuseError("nothing was fed to this sequence yet, prefill it first")
        return self._state.handle

    async def _max_tokens(self, output: OutputSpec, tokens: int, deadline: Deadline) -> int:
        """Tokens of one call: what the executor takes and can answer in one message."""
        info = await self._info(deadline)
        most = info.limits.max_batch_tokens or tokens
        if output.positions is Positions.ALL and info.limits.max_response_bytes:
            room = info.limits.max_response_bytes - MESSAGE_OVERHEAD
            most = min(most, max(1, room // output.row_bytes(info.model.vocab_size, info.model.hidden_size)))
        return most

    async def _roll_back(self, length: int, deadline: Deadline) -> Pressure:
        rollback = (self._state, self._handle(), length)
        [refusal] = await self._connection.truncate([rollback], deadline)
        if refusal is not None:
            raise refusal
        assert self._context.pressure is not None  # noqa: S101 - the answer had it
        return self._context.pressure
