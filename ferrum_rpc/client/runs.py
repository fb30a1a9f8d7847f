"""Streams of tokens, by runs that are sent ahead of the program."""

from __future__ import annotations

import enum
from collections.abc import AsyncGenerator, Collection, Iterator
from contextlib import aclosing
from dataclasses import dataclass, fields, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from ferrum_rpc.client.answer import Answer, NoSuchRowsError, TopLogprobs
from ferrum_rpc.client.info import Capability, ExecutorInfo
from ferrum_rpc.client.owner import Owner
from ferrum_rpc.client.prefetch import RunPrefetcher, StreamOptions, Wanted
from ferrum_rpc.client.retry import fate_unknown
from ferrum_rpc.client.sender import Sender
from ferrum_rpc.core import Greedy, OutputSpec, RowKind, RunEnd, Sample
from ferrum_rpc.core.check import check_limit
from ferrum_rpc.errors import ExecutorError

_FORBIDDEN: Final = float(np.finfo(np.float32).min)
"""The bias of a token that must not be chosen: its probability is exactly 0 where there is any other allowed token."""


class FinishReason(enum.StrEnum):
    """Why a stream ended."""

    STOP = "stop"
    """Its last token is a stop token."""
    LENGTH = "length"
    """It has ``max_tokens`` tokens."""
    CONTEXT = "context"
    """The context is full."""


@dataclass(frozen=True, slots=True, eq=False)
class StreamToken:
    """A chosen token of `Sequence.stream`, and what its output asked for.

    ``logprob``: its log-probability (``logprob=True``). ``top_logprobs``: the best tokens and theirs, ``token_ids``
    uint32 [k] and ``logprobs`` float32 [k] (``logprobs=RowLogprobs(k)``). ``selected_logprobs``: float32 [n], of
    ``logprobs=RowLogprobs(token_ids=(id, ...))``. None if the output did not ask for it. All are of the model's row,
    before masks and sampling. Arrays are read-only.
    ``cached_tokens``: of the prompt, on the first token; 0 on the others.
    ``more``: the next token has come with the same answer, so reading it does not wait.
    ``finish_reason``: set on the last token of the stream. With `FinishReason.STOP` this is the stop token.
    """

    token: int
    logprob: float | None = None
    top_logprobs: TopLogprobs | None = None
    selected_logprobs: npt.NDArray[np.float32] | None = None
    cached_tokens: int = 0
    more: bool = False
    finish_reason: FinishReason | None = None


async def streamed(
    sender: Sender[Owner], unfed: list[int], wanted: Wanted, *, stop: frozenset[int] | None, options: StreamOptions
) -> AsyncGenerator[StreamToken, None]:
    """See `Sequence.stream`: the tokens that follow ``unfed``. The first run feeds the last chunk of ``unfed``."""
    reader = RunReader(sender, unfed, wanted, stop, options)
    await reader.open()
    try:
        while reader.ahead.in_flight_runs:
            answer = await reader.next_answer()
            for each in stream_tokens(answer):
                token, reason = each, None
                if reader.advance(each):
                    reason = await reader.end()
                if reason is not None or reader.cached:
                    token = replace(each, cached_tokens=reader.cached, finish_reason=reason)
                reader.cached = 0
                yield token
                if reason is not None:
                    return
                if reader.goes_on_after_another_call(each):
                    break
    except BaseException as error:
        reader.ahead.failed = not isinstance(error, GeneratorExit) and fate_unknown(error)
        raise
    finally:
        reader.leave()


class RunReader:
    """Reads the runs of a stream token by token. ``unfed`` is to be fed at length ``at``, and ``wanted`` follows it.
    ``ahead``: the runs in flight. ``cached``: tokens of the prompt from the prefix cache, until they are reported."""

    def __init__(
        self,
        sender: Sender[Owner],
        unfed: list[int],
        wanted: Wanted,
        stop: frozenset[int] | None,
        options: StreamOptions,
    ) -> None:
        self._sender = sender
        self._unfed = unfed
        self._wanted = self._wanted_before = wanted  # after the present answer, and before it
        self._stop = stop
        self._options = options
        self._at = 0
        self._count = 0  # tokens of the present answer
        self._unread = 0
        self._stops = False  # its last token is a stop token
        self._error: ExecutorError | None = None  # to be raised after the last token
        self._info: ExecutorInfo
        self.ahead: RunPrefetcher
        self.cached = 0

    async def open(self) -> None:
        """Feed all of the prompt but its last chunk, and send the first runs."""
        sender, wanted = self._sender, self._wanted
        state, owner = sender.state, sender.owner
        with state.claim("stream"):
            owner.expect(None if wanted.most is None else len(self._unfed) + wanted.most - 1)
            deadline = sender.deadline(self._options.timeout_s)
            await owner.find(deadline, self._unfed)
            await sender.settle(deadline)
            self._info = await owner.info(deadline)
            prompt = await sender.feed_chunks(self._unfed, self._options.output, None, deadline)
            self.cached = sum(each.cached_tokens for each in prompt.answers)
            self._unfed = self._unfed[prompt.fed :]
            self._at = state.seen_length
            self._begin()
            self._fill(begins=True)

    @property
    def _ends(self) -> Collection[int]:
        own = self._info.model.eos_token_ids
        if self._stop is None:
            return own
        # nothing but these follows the end of a grammar
        return self._stop if self._options.output.constrained is None else self._stop.union(own)

    def _begin(self) -> None:
        vocabulary, options = self._info.model.vocab_size, self._options
        stops = tuple(sorted(each for each in self._ends if 0 <= each < vocabulary))
        before = forbidding(options.output, stops, self._info) if self._wanted.least else options.output
        self.ahead = self._sender.prefetch(replace(options, stops=stops, before=before))

    def _fill(self, *, begins: bool = False) -> None:
        self.ahead.fill(self._unfed, self._at, self._wanted, self._info, begins=begins)

    def _update_info(self) -> None:
        """Note the description of the executor that has the sequence now."""
        self._info = self._sender.owner.connection.context.known_info or self._info

    async def next_answer(self) -> Answer:
        """The next run that was answered; the ones behind it are sent."""
        sender = self._sender
        with sender.state.claim("stream"):
            while (answer := await self.ahead.next_run()) is None or _incomplete(answer, self._options.output):
                self._update_info()
                if answer is not None:  # the program has not seen it: run it again
                    await sender.settle(sender.deadline(self._options.timeout_s))
                    self._begin()
                self._fill()
        sender.prompt = None
        self._update_info()
        tokens = answer.tokens.tolist()
        self._at, self._count, self._unread = answer.length, len(tokens), len(tokens)
        ends: Collection[int] = ()
        if self._wanted.least < len(tokens):
            ends = self._ends
        elif self._options.output.constrained is not None:  # chosen only where the grammar allows nothing else
            ends = self._info.model.eos_token_ids
        self._stops = answer.run_end is RunEnd.STOP_ID or tokens[-1] in ends
        self._unfed, self._wanted_before, self._wanted = tokens[-1:], self._wanted, self._wanted.after(len(tokens))
        self.cached += answer.cached_tokens
        if not self._stops:
            self._fill()
        return answer

    def advance(self, token: StreamToken) -> bool:
        """The program gets this token next. Returns whether it is the last one of its answer."""
        if not token.more:
            return True
        self._unread -= 1
        self._sender.state.seen = self._at - self._unread
        return False

    async def end(self) -> FinishReason | None:
        """The program gets the last token of an answer next. Returns the reason if the stream ends with it."""
        reason = None
        if self._stops:
            await self.ahead.drain()
            reason = FinishReason.STOP
        elif self._wanted.most == 0:
            reason = FinishReason.LENGTH
        elif not self.ahead.in_flight_runs and not await self._finds_context():
            reason = FinishReason.CONTEXT
        self._unread, self._sender.state.seen = 0, self._at
        return reason

    async def _finds_context(self) -> bool:
        """The context is full: whether the stream goes on where there is more, or ends with an error."""
        sender = self._sender
        state, seen = sender.state, sender.state.seen
        state.seen = self._at
        try:
            with state.claim("stream"):
                there = await sender.owner.more_context(sender.deadline(self._options.timeout_s))
                if there is None:
                    return False
                self._info = there
                self._begin()
                self._fill()
        except ExecutorError as error:
            self._error = error
        except BaseException:
            state.seen = seen
            raise
        return self._error is not None or bool(self.ahead.in_flight_runs)

    def goes_on_after_another_call(self, token: StreamToken) -> bool:
        """Whether the program has made another call on the sequence after this token. The stream continues there.
        Raises the error with which it ends after the last token of an answer."""
        state = self._sender.state
        if self._sender.prefetcher is self.ahead:
            if self._error is not None:
                raise self._error
            return False
        self._error, self._unfed = None, [token.token]
        self._wanted = self._wanted_before.after(self._count - self._unread)
        with state.claim("stream"):
            self._begin()
            self._at = state.seen_length
            self._fill()
        return True

    def leave(self) -> None:
        """Cancel what is in flight. The next call on the sequence rolls back what the program has not seen."""
        sender, state, ahead = self._sender, self._sender.state, self.ahead
        if sender.prefetcher is ahead:
            ahead.cancel()
            if not ahead.unknown and state.lost is None and state.length == state.seen:
                sender.end_stream()


async def token_ids(stream: AsyncGenerator[StreamToken, None]) -> AsyncGenerator[int, None]:
    """See `Sequence.generate`: the tokens of a stream, without the one that stopped it."""
    async with aclosing(stream):
        async for each in stream:
            if each.finish_reason is not FinishReason.STOP:
                yield each.token


def forbidding(output: OutputSpec, stops: tuple[int, ...], info: ExecutorInfo) -> OutputSpec:
    """An output that chooses none of ``stops``, for a text that must not end yet. By a bias and not by a mask: it needs
    no words for the whole vocabulary to be registered, and applies together with the masks that the output has. The
    output itself if the executor cannot sample. Raises `InvalidRequest` if the executor allows fewer biases."""
    kind = output.kind
    if not stops or Capability.OUTPUT_SAMPLE not in info.capabilities or not isinstance(kind, Greedy | Sample):
        return output
    if isinstance(kind, Greedy):
        kind = Sample(temperature=0.0, **{each.name: getattr(kind, each.name) for each in fields(kind)})
    bias = tuple((token, added) for token, added in kind.bias if token not in stops)
    bias += tuple((token, _FORBIDDEN) for token in stops)
    check_limit(info.limits, "max_biases", len(bias), "biases (one for each stop id)", "min_tokens")
    return replace(output, kind=replace(kind, bias=bias))


def _incomplete(answer: Answer, output: OutputSpec) -> bool:
    """Whether a replayed answer has lost its log-probabilities: the executor keeps the tokens for longer."""
    kind = output.kind
    asked = isinstance(kind, Greedy | Sample) and (kind.logprob or kind.logprobs is not None)
    return answer.replayed and asked and answer.rows is not None and len(answer.rows.block.columns) == 1


def stream_tokens(answer: Answer) -> Iterator[StreamToken]:
    """The chosen tokens of an answer with their log-probabilities, as a stream has them. Raises `NoSuchRowsError` for
    an answer without tokens."""
    if answer.rows is None or answer.rows.block.kind is not RowKind.TOKENS:
        raise NoSuchRowsError("the answer has no tokens")
    columns = answer.rows.block.between(answer.rows.first, answer.rows.first + answer.rows.count).columns
    tokens = columns["token_ids"].tolist()
    chosen, top = columns.get("logprobs"), columns.get("top_token_ids")
    selected = columns.get("selected_logprobs")
    for index, token in enumerate(tokens):
        yield StreamToken(
            token,
            None if chosen is None else float(chosen[index]),
            None if top is None else TopLogprobs(top[index], columns["top_logprobs"][index]),
            None if selected is None else selected[index],
            more=index < len(tokens) - 1,
        )
