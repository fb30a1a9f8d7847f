"""Feeds one sequence: prompts in chunks, what was lost again, and the recovery of every call on it.

Between `Sequence`, which checks what a program asks for and claims the sequence, and the forwards of the client.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

from ferrum_rpc.client import operations
from ferrum_rpc.client.answer import Answer, joined_rows
from ferrum_rpc.client.arguments import GREEDY
from ferrum_rpc.client.connection import Connection
from ferrum_rpc.client.pieces import Piece, Pieces
from ferrum_rpc.client.retry import SEQUENCE_GONE, Backoff, Deadline
from ferrum_rpc.client.state import SequenceMisuseError, SequenceState
from ferrum_rpc.client.transport import PREFILL, Feed
from ferrum_rpc.core import HandleRef, OutputSpec, Positions, Pressure, Rows
from ferrum_rpc.errors import ExecutorError, SequenceBusy

Result = TypeVar("Result")

NO_ROWS: Final = OutputSpec(Positions.NONE, GREEDY)
_MESSAGE_OVERHEAD: Final = 64 << 10
"""Bytes of an answer beside its rows: generous, for one item's worth of messages."""


@dataclass(slots=True)
class _Prompt:
    """A prompt that goes in chunks: what is in the cache already, should the rest fail."""

    tokens: list[int]
    output: OutputSpec
    fed: int = 0
    length: int = 0
    cached_tokens: int = 0
    rows: list[Rows] = field(default_factory=list)


@dataclass(slots=True)
class _Lost:
    """What a lost sequence held, and is fed again: its ``tokens``, of which ``known`` were in the cache, the ``long``
    pieces that they were fed in, and the ``pieces`` that they are fed in now, ``done`` of which are there."""

    tokens: list[int]
    known: int
    long: Pieces
    pieces: list[Piece] | None = None
    done: int = 0


class Feeder:
    """Of one sequence, which its caller has claimed. ``lost``: what a lost sequence held and has not been fed again
    yet. ``rebuilds``: it feeds that by itself."""

    def __init__(self, connection: Connection, state: SequenceState, *, rebuilds: bool) -> None:
        self.rebuilds = rebuilds
        self.lost: _Lost | None = None
        self._connection = connection
        self._context = connection.context
        self._state = state
        self._prompt: _Prompt | None = None

    @property
    def length(self) -> int:
        """Tokens that are in the cache, or will be when what was lost is fed again."""
        return self._state.length if self.lost is None else len(self.lost.tokens)

    @property
    def tokens(self) -> list[int] | None:
        """Those tokens, where they are kept or lost."""
        return self._state.tokens if self.lost is None else self.lost.tokens

    def begin(self, what: str, *, keeps_prompt: bool = False) -> None:
        """Begin a call that needs a sequence which exists, or will when what was lost is fed again."""
        if self._state.handle is None and self.lost is None:
            raise SequenceMisuseError(f"{what}: nothing was fed to this sequence yet, prefill it first")
        if not keeps_prompt:
            self._prompt = None

    def forget_prompt(self) -> None:
        """What is fed next does not go on with a prompt of which some chunks failed."""
        self._prompt = None

    def handle(self) -> HandleRef:
        """The handle for an operation. What was lost may have been rebuilt to nothing at all."""
        if self._state.handle is None:
            raise SequenceMisuseError("nothing was fed to this sequence yet, prefill it first")
        return self._state.handle

    async def _most(self, output: OutputSpec, tokens: int, deadline: Deadline) -> int:
        """Tokens of one call: what the executor takes and can answer in one message."""
        info = await self._context.info(deadline)
        most = info.limits.max_batch_tokens or tokens
        if output.positions is Positions.ALL and info.limits.max_response_bytes:
            room = info.limits.max_response_bytes - _MESSAGE_OVERHEAD
            most = min(most, max(1, room // output.row_bytes(info.model.vocab_size)))
        return most

    async def prefill(self, tokens: list[int], output: OutputSpec, chunk: int | None, deadline: Deadline) -> Answer:
        """A prompt, in chunks."""
        chunk, prompt = chunk or await self._most(output, len(tokens), deadline), self._prompt
        if prompt is None or (prompt.tokens, prompt.output, prompt.length) != (tokens, output, self.length):
            prompt = self._prompt = _Prompt(tokens, output)
        silent = replace(output, positions=Positions.NONE)
        while True:
            part = tokens[prompt.fed : prompt.fed + chunk]
            last = prompt.fed + len(part) == len(tokens)
            spec = output if last or output.positions is Positions.ALL else silent
            answer = await self.feed(PREFILL, part, spec, None, deadline)
            if answer.rows is not None:
                prompt.rows.append(answer.rows)
            prompt.cached_tokens += answer.cached_tokens
            prompt.fed += len(part)
            prompt.length = self.length
            if last:
                self._prompt = None
                rows = joined_rows(prompt.rows) if prompt.rows else None
                return replace(answer, rows=rows, cached_tokens=prompt.cached_tokens)

    def feed(
        self, feed: Feed, tokens: list[int], output: OutputSpec, truncate_to: int | None, deadline: Deadline
    ) -> Awaitable[Answer]:
        """One item through a call of its own."""
        send = functools.partial(self._forward, feed, tokens, output, truncate_to, deadline)
        return self.surviving(send, deadline, truncate_to)

    async def _forward(
        self, feed: Feed, tokens: list[int], output: OutputSpec, truncate_to: int | None, deadline: Deadline
    ) -> Answer:
        state = self._state
        if state.handle is None:
            feed, truncate_to = PREFILL, None
        elif truncate_to == state.handle.seq_len:  # what was lost may have been rebuilt to exactly that
            truncate_to = None
        item = state.item(next(self._context.item_ids), tokens, output, truncate_to)
        [answer] = await self._connection.forwards.forward(feed, [item], deadline)
        if isinstance(answer, ExecutorError):
            raise answer
        return answer

    async def surviving(
        self, send: Callable[[], Awaitable[Result]], deadline: Deadline, truncate_to: int | None = None
    ) -> Result:
        """Send, after feeding again what was lost. While an earlier call of unknown fate may still run, a busy
        sequence is no mistake of the program: send again. If the sequence is gone and may be rebuilt, feed its tokens
        to a new one and send again, once."""
        backoff: Backoff | None = None
        rebuilt = False
        while True:
            try:
                if self.lost is not None:
                    await self._feed_lost(deadline)
                return await send()
            except SequenceBusy:
                doubt, backoff = self._state.doubt, backoff or Backoff.while_busy(deadline)
                if doubt is None or not doubt.unknown or not await backoff.wait():
                    raise
            except SEQUENCE_GONE:
                if rebuilt or not self.rebuilds or self._state.handle is None:
                    raise
                rebuilt = True
                self._restart((self.tokens or [])[:truncate_to])
                if not self.tokens:
                    self.lost = None

    async def rebuild(self, tokens: list[int], output: OutputSpec, deadline: Deadline) -> Answer:
        """Feed tokens to a new sequence, and release what is left of the old one."""
        old, releases = self._state.handle, self._connection.releases
        self._restart(tokens)
        if old is not None:
            await releases.handles([old], Deadline.after(releases.timeout_s))
        self._prompt = None
        return await self._feed_lost(deadline, output)

    def _restart(self, tokens: list[int]) -> None:
        lost = self.lost
        if lost is None:
            lost = _Lost(tokens, self._state.length, self._state.pieces)
        self.lost = _Lost(tokens, min(lost.known, len(tokens)), lost.long)
        self._state.restart()

    async def roll_back(self, length: int, deadline: Deadline) -> Pressure:
        """To ``length`` tokens."""
        rollback = (self._state, self.handle(), length)
        [refusal] = await operations.truncate(self._connection, [rollback], deadline)
        if refusal is not None:
            raise refusal
        assert self._context.pressure is not None  # noqa: S101 - the answer had it
        return self._context.pressure

    async def _feed_lost(self, deadline: Deadline, output: OutputSpec = NO_ROWS) -> Answer:
        """Feed what a lost sequence held. The answer is the last piece's, with the rows of all that were asked."""
        lost, state = self.lost, self._state
        assert lost is not None  # noqa: S101 - the callers looked
        if lost.pieces is None:
            most = await self._most(output, len(lost.tokens), deadline)
            exact = (await self._context.info(deadline)).limits.exact_span_tokens
            lost.pieces = lost.long.again(len(lost.tokens), lost.known, exact, most)
        answer: Answer | None = None
        rows: list[Rows] = []
        cached = 0
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
            cached += answer.cached_tokens
            if answer.rows is not None:
                rows.append(piece.rows(answer.rows, wanted) if filled else answer.rows)
        assert answer is not None  # noqa: S101 - there is at least one piece
        if state.length > len(lost.tokens):
            await self.roll_back(len(lost.tokens), deadline)
        self.lost = None
        return replace(
            answer, handle=state.handle or answer.handle, rows=joined_rows(rows) if rows else None, cached_tokens=cached
        )
