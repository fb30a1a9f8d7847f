"""Prompts that go in chunks, and streams of tokens that are a run ahead of their program."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import ClassVar

from ferrum_rpc.client.ahead import Ahead
from ferrum_rpc.client.answer import Answer, joined
from ferrum_rpc.client.connection import Connection
from ferrum_rpc.client.info import ExecutorInfo
from ferrum_rpc.client.masks import row_masks_of, with_masks
from ferrum_rpc.client.recovery import Recovering, Result
from ferrum_rpc.client.retry import Backoff, Deadline, fate_unknown
from ferrum_rpc.client.state import Item, SequenceMisuseError, SequenceState
from ferrum_rpc.client.transport import DECODE, PREFILL, Feed
from ferrum_rpc.core import HandleRef, NextToken, OutputSpec, Positions, Run
from ferrum_rpc.errors import ExecutorError, SequenceBusy, SequenceVersionMismatch


@dataclass(slots=True)
class Prompt:
    """A prompt that goes in chunks: what is in the cache already, should the rest fail."""

    tokens: list[int]
    output: OutputSpec
    fed: int = 0
    length: int = 0
    answers: list[Answer] = field(default_factory=list)


class Feeding(Recovering):
    """The base of a sequence that is fed more than one call's worth, and may be left in the middle of it."""

    _rebuilt_in_batches: ClassVar = False
    """Whether what was lost is fed again before an item that was built on it goes out."""

    def __init__(self, connection: Connection, state: SequenceState, *, rebuild: bool) -> None:
        super().__init__(connection, state, rebuild=rebuild)
        self._prompt: Prompt | None = None
        self._ahead: Ahead | None = None

    def _length(self) -> int:
        """L as the program sees it."""
        if self._ahead is not None:
            return self._ahead.length
        return self._state.length if self._lost is None else len(self._lost.tokens)

    def _check_settled(self, what: str) -> None:
        """Refuse what is built on the sequence as it stands, where that is not known."""
        if self._state.released:
            raise SequenceMisuseError(f"{what}: this sequence was released")
        if self._lost is not None and not (self._rebuilds and self._rebuilt_in_batches and what == "item"):
            raise SequenceMisuseError(f"{what}: this sequence was lost and is not rebuilt yet: await rebuild() first")
        if self._ahead is not None:
            raise SequenceMisuseError(
                f"{what}: a stream of this sequence was not read to its end: await truncate() first"
            )

    def _claim(self, what: str, *, keeps_prompt: bool = False) -> SequenceState:
        """Begin a call that needs a sequence which exists, or will: when what was lost is fed again, or for a child
        that this call feeds."""
        state = self._state.claim(what)
        made = state.parent is not None and what in {"decode", "verify"}
        if state.handle is None and self._lost is None and not made:
            state.busy = ""
            raise SequenceMisuseError(f"{what}: nothing was fed to this sequence yet, prefill it first")
        if not keeps_prompt:
            self._prompt = None
        return state

    async def _prefill(
        self, tokens: list[int], output: OutputSpec, chunk: int | None, deadline: Deadline, run: Run | None
    ) -> Answer:
        prompt, spec = await self._feed_chunks(tokens, output, chunk, deadline), output
        if prompt.fed and (masks := row_masks_of(output, len(tokens))):
            spec = with_masks(output, masks[prompt.fed :])
        prompt.answers.append(await self._feed(PREFILL, tokens[prompt.fed :], spec, None, deadline, run=run))
        self._prompt = None
        return joined(prompt.answers)

    async def _feed_chunks(
        self, tokens: list[int], output: OutputSpec, chunk: int | None, deadline: Deadline
    ) -> Prompt:
        """Feed all of a prompt but its last chunk."""
        await self._find_owner(deadline, tokens)
        chunk, prompt = chunk or await self._max_tokens(output, len(tokens), deadline), self._prompt
        if prompt is None or (prompt.tokens, prompt.output, prompt.length) != (tokens, output, self._length()):
            prompt = self._prompt = Prompt(tokens, output)
        silent = with_masks(replace(output, positions=Positions.NONE), ())
        masks = row_masks_of(output, len(tokens))
        while len(tokens) - prompt.fed > chunk:
            part, following = tokens[prompt.fed : prompt.fed + chunk], tokens[prompt.fed + chunk]
            spec = output if output.positions is Positions.ALL else silent
            if isinstance(output.kind, NextToken):
                spec = replace(output, kind=replace(output.kind, following_token=following))
            if masks:
                spec = with_masks(output, masks[prompt.fed : prompt.fed + chunk])
            prompt.answers.append(await self._feed(PREFILL, part, spec, None, deadline))
            prompt.fed += chunk
            prompt.length = self._length()
        return prompt

    def _feed(
        self,
        feed: Feed,
        tokens: list[int],
        output: OutputSpec,
        truncate_to: int | None,
        deadline: Deadline,
        *,
        run: Run | None = None,
    ) -> Awaitable[Answer]:
        """One item through a call of its own."""
        send = functools.partial(self._forward, feed, tokens, output, truncate_to, deadline, run=run)
        return self._recovering(send, deadline, truncate_to)

    async def _recovering(
        self, send: Callable[[], Awaitable[Result]], deadline: Deadline, truncate_to: int | None = None
    ) -> Result:
        """As `_recover`, after settling a stream that was left."""
        if self._ahead is not None:
            await self._find_owner(deadline)
            await self._settle(deadline)
        return await self._recover(send, deadline, truncate_to)

    async def _settle(self, deadline: Deadline) -> None:
        """Roll back what a stream that was left has computed beyond what its program has seen. Whether a run of unknown
        fate has run does not matter: the executor says where the sequence stands."""
        ahead, state = self._ahead, self._state
        if ahead is None:
            return
        ahead.leave()
        await ahead.drain()
        length, handle, backoff = ahead.length, state.handle, Backoff.while_busy(deadline)
        while self._lost is None and handle is not None and (ahead.unknown or state.length != length):
            [refusal] = await self._connection.truncate([(state, handle, length)], deadline)
            if refusal is None:
                break
            if isinstance(refusal, SequenceVersionMismatch) and refusal.version and refusal.seq_len is not None:
                handle = HandleRef(handle.id, refusal.seq_len, refusal.version)
            elif not await self._lost_behind(refusal) and (
                not isinstance(refusal, SequenceBusy) or not await backoff.wait()
            ):
                raise refusal
        if self._lost is not None:
            self._restart(self._held_tokens()[:length])
        self._ahead = None

    def _leave_stream(self) -> list[asyncio.Task[Answer]]:
        """The sequence ends: what a stream has computed ahead ends with it. Returns the calls that are ending."""
        ahead, self._ahead = self._ahead, None
        return [] if ahead is None else ahead.leave()

    async def _in_runs(
        self,
        unfed: list[int],
        left: int | None,
        output: OutputSpec,
        stop: frozenset[int] | None,
        *,
        timeout_s: float | None,
        info: ExecutorInfo,
    ) -> AsyncGenerator[int, None]:
        """The tokens behind ``unfed``, ``left`` at most. What goes in one call is fed by the first run."""

        def begin() -> Ahead:
            ends = info.model.eos_token_ids if stop is None else stop
            stops = tuple(sorted(each for each in ends if 0 <= each < info.model.vocab_size))
            self._ahead = Ahead(
                lambda: self._connection,
                self._state,
                self._send_run,
                self._lost_behind,
                output=output,
                stops=stops,
                timeout_s=timeout_s,
                length=self._length(),
            )
            return self._ahead

        with self._state.claim("generate"):
            deadline = self._context.deadline(timeout_s)
            await self._settle(deadline)
            unfed = unfed[(await self._feed_chunks(unfed, output, None, deadline)).fed :]
            ahead, at = begin(), self._length()
            ahead.fill(unfed, at, left, info, least=1)
        try:
            while ahead.flights:
                with self._state.claim("generate"):
                    while (answer := await ahead.land()) is None:
                        ahead.fill(unfed, at, left, self._context.known_info or info)
                self._prompt, info = None, self._context.known_info or info  # of the executor that has it now
                ends = info.model.eos_token_ids if stop is None else stop
                tokens, at = answer.tokens.tolist(), answer.length
                unfed = tokens[-1:]
                if left is not None:
                    left -= len(tokens)
                if unfed[0] not in ends:
                    ahead.fill(unfed, at, left, info)
                for index, token in enumerate(tokens):
                    ahead.length = at - len(tokens) + 1 + index
                    if token in ends:
                        await ahead.drain()
                        return
                    yield token
                    if self._ahead is not ahead:  # another call was made meanwhile: go on from where it left it
                        left = None if left is None else left + len(tokens) - 1 - index
                        with self._state.claim("generate"):
                            ahead, at, unfed = begin(), self._length(), [token]
                            ahead.fill(unfed, at, left, info)
                        break
                if not ahead.flights and left != 0 and unfed[0] not in ends:  # the context is full
                    with self._state.claim("generate"):
                        there = await self._more_context(self._context.deadline(timeout_s))
                        if there is not None:
                            info, ahead = there, begin()
                            ahead.fill(unfed, at, left, info)
        except BaseException as error:
            ahead.failed = not isinstance(error, GeneratorExit) and fate_unknown(error)
            raise
        finally:
            if self._ahead is ahead:
                ahead.leave()
                if not ahead.unknown and self._lost is None and self._state.length == ahead.length:
                    self._ahead = None

    async def _lost_behind(self, error: ExecutorError) -> bool:
        """Whether what followed a run has failed because the executor is gone, and what it held is fed again."""
        if not self._rebuilds or not await self._is_gone(error):
            return False
        self._lose()
        return True

    async def _send_run(self, item: Item, deadline: Deadline) -> Answer:
        """Send a run of a stream, and where the sequence is lost and may be rebuilt again on the new one."""
        feed = PREFILL if item.handle is None or len(item.tokens) > 1 else DECODE

        async def send() -> Answer:
            if item.handle != self._state.handle:
                return await self._forward(feed, item.tokens, item.output, None, deadline, run=item.run)
            [answer] = await self._connection.forward(feed, [item], deadline)
            if isinstance(answer, ExecutorError):
                raise answer
            return answer

        return await self._recover(send, deadline)
