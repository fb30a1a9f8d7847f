"""Sends every call of a sequence to its owner, after feeding tokens again that were lost with an executor, if the
program asked for that. Prompts that are longer than a call are fed in chunks.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Final, Generic, TypeVar

from ferrum_rpc.client.answer import Answer, joined
from ferrum_rpc.client.arguments import NO_ROWS
from ferrum_rpc.client.context import Context
from ferrum_rpc.client.masks import row_masks_of, with_masks
from ferrum_rpc.client.owner import FULL, Owner
from ferrum_rpc.client.prefetch import RunPrefetcher, StreamOptions
from ferrum_rpc.client.retry import Backoff, Deadline, fate_unknown
from ferrum_rpc.client.state import Item, SequenceMisuseError, SequenceState
from ferrum_rpc.client.transport import DECODE, PREFILL, Feed
from ferrum_rpc.core import HandleRef, NextToken, OutputSpec, Positions, Pressure, Run
from ferrum_rpc.errors import ExecutorError, SequenceBusy, SequenceVersionMismatch
from ferrum_rpc.executor.v1 import kv_transfer_pb2, model_executor_pb2
from ferrum_rpc.wire.items import handle_to_proto

Result = TypeVar("Result")
AnyOwner_co = TypeVar("AnyOwner_co", bound=Owner, covariant=True)

MESSAGE_OVERHEAD: Final = 64 << 10
"""Bytes of an answer without its rows: a generous bound for the messages of one item."""


@dataclass(slots=True)
class Prompt:
    """A prompt that is fed in chunks, and how much of it is in the cache if the rest fails."""

    tokens: list[int]
    output: OutputSpec
    fed: int = 0
    length: int = 0
    answers: list[Answer] = field(default_factory=list)


class Sender(Generic[AnyOwner_co]):
    """Sends the calls of one sequence, whose data is ``state``, to its ``owner``. ``prompt``: a prompt that is fed in
    part. ``prefetcher``: that of a stream which is being read, or was left early."""

    def __init__(self, state: SequenceState, owner: AnyOwner_co) -> None:
        self.state = state
        self.owner = owner
        self.prompt: Prompt | None = None
        self.prefetcher: RunPrefetcher | None = None
        self._left = False  # a call of unknown outcome may still hold it

    @property
    def context(self) -> Context:
        """The context of the client of its executor."""
        return self.owner.connection.context

    def deadline(self, timeout_s: float | None) -> Deadline:
        """``timeout_s`` from now, or the default of that client."""
        return self.owner.connection.context.deadline(timeout_s)

    @property
    def in_doubt(self) -> bool:
        """Whether a call failed with an unknown outcome."""
        return self.state.in_doubt if self.prefetcher is None else self.prefetcher.failed

    # --- one call at a time -----------------------------------------------------------------------------------------

    def claim(self, what: str, *, keeps_prompt: bool = False) -> SequenceState:
        """Begin a call that needs an existing sequence, or one that will exist: lost tokens are fed again first, and a
        child is made by the call that feeds it."""
        state = self.state.claim(what)
        made = state.parent is not None and what in {"decode", "verify"}
        if state.handle is None and state.lost is None and not made:
            state.busy = ""
            raise SequenceMisuseError(f"{what}: nothing was fed to this sequence yet, prefill it first")
        if not keeps_prompt:
            self.prompt = None
        return state

    def check_settled(self, what: str) -> None:
        """Raise if the present state of the sequence is not known."""
        state = self.state
        if state.released:
            raise SequenceMisuseError(f"{what}: this sequence was released")
        if state.lost is not None and not (what == "item" and state.rebuilds and self.owner.rebuilds_in_batches):
            raise SequenceMisuseError(f"{what}: this sequence was lost and is not rebuilt yet: await rebuild() first")
        if self.prefetcher is not None:
            raise SequenceMisuseError(
                f"{what}: a stream of this sequence was not read to its end: await truncate() first"
            )

    def claim_new(self, what: str) -> SequenceState:
        """Begin a call that needs an empty sequence."""
        state = self.state.claim(what)
        if state.handle is not None or state.parent is not None or state.lost is not None:
            state.busy = ""
            raise SequenceMisuseError(f"{what}: this sequence has been fed already, make a new one")
        return state

    def item(
        self, tokens: list[int], output: OutputSpec, truncate_to: int | None = None, run: Run | None = None
    ) -> Item:
        """A work item on the sequence as it is now."""
        self.check_settled("item")
        self.prompt = None  # the next feed does not continue a prompt whose chunks failed
        return self.state.item(next(self.context.item_ids), tokens, output, truncate_to, run)

    # --- calls ------------------------------------------------------------------------------------------------------

    def feed(
        self,
        feed: Feed,
        tokens: list[int],
        output: OutputSpec,
        truncate_to: int | None,
        deadline: Deadline,
        *,
        run: Run | None = None,
    ) -> Awaitable[Answer]:
        """Send one item by a call of its own."""
        forward = functools.partial(self._forward, feed, tokens, output, truncate_to, deadline, run=run)
        return self.send(forward, deadline, truncate_to)

    async def send(
        self,
        send: Callable[[], Awaitable[Result]],
        deadline: Deadline,
        truncate_to: int | None = None,
        *,
        settle: bool = True,
    ) -> Result:
        """Settle a stream that was left (unless ``settle`` is false), feed lost tokens again, then send. While an
        earlier call of unknown outcome may still run, the sequence may be busy: send again. If the sequence is gone and
        may be rebuilt, feed its tokens to a new one and send again, `Owner.rebuilds_of_a_call` times."""
        if settle and self.prefetcher is not None:
            await self.owner.find(deadline)
            await self.settle(deadline)
        state, owner = self.state, self.owner
        backoff: Backoff | None = None
        rebuilds = owner.rebuilds_of_a_call if state.rebuilds else 0
        try:
            while True:
                try:
                    await owner.find(deadline)
                    if state.lost is not None:
                        await self.feed_lost(deadline)
                    result = await send()
                    self._left = False
                    return result
                except SequenceBusy:
                    backoff = backoff or Backoff.while_busy(deadline)
                    made = (
                        state.handle is None and state.parent is not None
                    )  # another child of its parent is being made
                    may_run = self._left or (state.doubt is not None and state.doubt.unknown)
                    if not (made or may_run) or not await backoff.wait():
                        raise
                except BaseException as error:
                    if isinstance(error, FULL) and await owner.finds_capacity(error, deadline):
                        continue
                    if not rebuilds or not isinstance(error, ExecutorError) or not await owner.is_gone(error):
                        self._left = self._left or fate_unknown(error)
                        raise
                    rebuilds -= 1
                    owner.lose(truncate_to)
        except BaseException as error:
            owner.failed(error)
            raise

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
        state, connection = self.state, self.owner.connection
        if state.handle is None and state.parent is None:
            feed, truncate_to = PREFILL, None
        elif state.handle is not None and truncate_to == state.handle.seq_len:
            # The rebuilt sequence may have exactly that length.
            truncate_to = None
        item = state.item(next(connection.context.item_ids), tokens, output, truncate_to, run)
        [answer] = await connection.forward(feed, [item], deadline)
        if isinstance(answer, ExecutorError):
            raise answer
        return answer

    async def roll_back(self, length: int, deadline: Deadline) -> Pressure:
        """Roll back to ``length`` tokens."""
        connection = self.owner.connection
        [refusal] = await connection.truncate([(self.state, self.state.existing_handle(), length)], deadline)
        if refusal is not None:
            raise refusal
        assert connection.context.pressure is not None  # noqa: S101 - the answer had it
        return connection.context.pressure

    async def reserve(self, tokens: int, deadline: Deadline) -> Pressure:
        """Reserve blocks for ``tokens`` tokens beyond L. Idempotent, so it needs no request id."""
        context, handle = self.context, handle_to_proto(self.state.existing_handle())
        request = model_executor_pb2.ReserveKvRequest(handle=handle, tokens=tokens)
        return context.note_pressure((await context.call(context.executor.ReserveKv, request, deadline)).pressure)

    async def park(self, deadline: Deadline) -> int:
        """Move the cache to the executor's disk. Returns how many blocks were freed. Idempotent."""
        context, handle = self.context, handle_to_proto(self.state.existing_handle())
        answer = await context.call(context.transfer.ParkKv, kv_transfer_pb2.ParkKvRequest(handle=handle), deadline)
        context.note_pressure(answer.pressure)
        freed: int = answer.freed_blocks
        return freed

    async def feed_lost(self, deadline: Deadline, output: OutputSpec = NO_ROWS) -> Answer:
        """Feed the tokens of a lost sequence. The answer is the last piece's, with all requested rows."""
        state = self.state
        lost = state.lost
        assert lost is not None  # noqa: S101 - checked by the callers
        if lost.pieces is None:
            most = await self._max_tokens(output, len(lost.tokens), deadline)
            exact = (await self.owner.info(deadline)).limits.exact_span_tokens
            lost.pieces = lost.long.plan(len(lost.tokens), lost.known, exact, most)
        answers: list[Answer] = []
        last = len(lost.pieces) - 1
        for number in range(min(lost.done, last), last + 1):
            piece = lost.pieces[number]
            wanted = output.positions if number == last or output.positions is Positions.ALL else Positions.NONE
            filled = piece.filled and wanted is not Positions.NONE
            spec = replace(output, positions=Positions.ALL if filled else wanted)
            truncate_to = piece.start if state.length > piece.start else None
            answer = await self._forward(PREFILL, piece.tokens(lost.tokens), spec, truncate_to, deadline)
            lost.done = number + 1
            if filled and answer.rows is not None:
                answer = answer._replace(rows=piece.rows(answer.rows, wanted))
            answers.append(answer)
        if state.length > len(lost.tokens):
            await self.roll_back(len(lost.tokens), deadline)
        state.lost = None
        answer = joined(answers)  # there is at least one piece
        return answer._replace(handle=state.handle or answer.handle)

    # --- prompts ----------------------------------------------------------------------------------------------------

    async def prefill(
        self, tokens: list[int], output: OutputSpec, chunk: int | None, deadline: Deadline, run: Run | None
    ) -> Answer:
        """Feed a prompt, in chunks if it is longer than ``chunk`` tokens or the limit of a call."""
        prompt, spec = await self.feed_chunks(tokens, output, chunk, deadline), output
        if prompt.fed and (masks := row_masks_of(output, len(tokens))):
            spec = with_masks(output, masks[prompt.fed :])
        prompt.answers.append(await self.feed(PREFILL, tokens[prompt.fed :], spec, None, deadline, run=run))
        self.prompt = None
        return joined(prompt.answers)

    async def feed_chunks(self, tokens: list[int], output: OutputSpec, chunk: int | None, deadline: Deadline) -> Prompt:
        """Feed all of a prompt but its last chunk."""
        await self.owner.find(deadline, tokens)
        chunk, prompt = chunk or await self._max_tokens(output, len(tokens), deadline), self.prompt
        if prompt is None or (prompt.tokens, prompt.output, prompt.length) != (tokens, output, self.state.seen_length):
            prompt = self.prompt = Prompt(tokens, output)
        silent = with_masks(replace(output, positions=Positions.NONE), ())
        masks = row_masks_of(output, len(tokens))
        while len(tokens) - prompt.fed > chunk:
            part, following = tokens[prompt.fed : prompt.fed + chunk], tokens[prompt.fed + chunk]
            spec = output if output.positions is Positions.ALL else silent
            if isinstance(output.kind, NextToken):
                spec = replace(output, kind=replace(output.kind, following_token=following))
            if masks:
                spec = with_masks(output, masks[prompt.fed : prompt.fed + chunk])
            prompt.answers.append(await self.feed(PREFILL, part, spec, None, deadline))
            prompt.fed += chunk
            prompt.length = self.state.seen_length
        return prompt

    async def _max_tokens(self, output: OutputSpec, tokens: int, deadline: Deadline) -> int:
        """The maximum tokens of one call, which the executor accepts and can answer in one message."""
        info = await self.owner.info(deadline)
        most = info.limits.max_batch_tokens or tokens
        if output.positions is Positions.ALL and info.limits.max_response_bytes:
            capacity = info.limits.max_response_bytes - MESSAGE_OVERHEAD
            most = min(most, max(1, capacity // output.row_bytes(info.model.vocab_size, info.model.hidden_size)))
        return most

    # --- streams that run ahead -------------------------------------------------------------------------------------

    def prefetch(self, options: StreamOptions) -> RunPrefetcher:
        """Begin a stream of runs."""
        self.state.seen = self.state.seen_length
        self.prefetcher = RunPrefetcher(self.owner, self._send_run, self.lost_behind, options)
        return self.prefetcher

    async def settle(self, deadline: Deadline) -> None:
        """Roll back what a stream that was left has computed beyond the tokens that the program has seen. It does not
        matter whether a run of unknown outcome has run: the executor reports the length of the sequence."""
        prefetcher, state = self.prefetcher, self.state
        if prefetcher is None:
            return
        prefetcher.cancel()
        await prefetcher.drain()
        length, handle, backoff = state.seen_length, state.handle, Backoff.while_busy(deadline)
        while state.lost is None and handle is not None and (prefetcher.unknown or state.length != length):
            [refusal] = await self.owner.connection.truncate([(state, handle, length)], deadline)
            if refusal is None:
                break
            if isinstance(refusal, SequenceVersionMismatch) and refusal.version and refusal.seq_len is not None:
                handle = HandleRef(handle.id, refusal.seq_len, refusal.version)
            elif not await self.lost_behind(refusal) and (
                not isinstance(refusal, SequenceBusy) or not await backoff.wait()
            ):
                raise refusal
        if state.lost is not None:
            self.owner.restart(state.held_tokens()[:length])
        self.end_stream()

    def end_stream(self) -> None:
        """Note that the cache has exactly the tokens that the program has seen."""
        self.prefetcher = self.state.seen = None

    def leave_stream(self) -> list[asyncio.Task[Answer]]:
        """End a stream without rolling back, for a sequence that ends too. Returns the calls that are ending."""
        prefetcher = self.prefetcher
        self.end_stream()
        return [] if prefetcher is None else prefetcher.cancel()

    async def lost_behind(self, error: ExecutorError) -> bool:
        """Whether an item has failed because the executor is gone or hangs. The sequence is fed again then."""
        if self.owner.failed(error):
            return True
        if not self.state.rebuilds or not await self.owner.is_gone(error):
            return False
        self.owner.lose()
        return True

    async def _send_run(self, item: Item, deadline: Deadline) -> Answer:
        """Send a run of a stream, and again on the rebuilt sequence if the old one was lost."""
        feed = PREFILL if item.handle is None or len(item.tokens) > 1 else DECODE

        async def send() -> Answer:
            if item.handle != self.state.handle:
                return await self._forward(feed, item.tokens, item.output, None, deadline, run=item.run)
            [answer] = await self.owner.connection.forward(feed, [item], deadline)
            if isinstance(answer, ExecutorError):
                raise answer
            return answer

        return await self.send(send, deadline, settle=False)


async def nothing() -> None:
    """Send nothing: for a call that only needs the sequence to be with an owner."""
