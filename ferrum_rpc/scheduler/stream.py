"""What a caller of the scheduler gets: the tokens of one text, as they are computed."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import replace
from types import TracebackType
from typing import Any, Final, Self

from ferrum_rpc.client import FinishReason, StreamToken
from ferrum_rpc.scheduler.request import Request, RequestEnd
from ferrum_rpc.scheduler.text import Detokenizer, TextStream

REASONS: Final = {
    RequestEnd.STOP: FinishReason.STOP,
    RequestEnd.LENGTH: FinishReason.LENGTH,
    RequestEnd.CONTEXT: FinishReason.CONTEXT,
    RequestEnd.POOL: FinishReason.CONTEXT,
}
"""The reason on the last token of a stream. A stream that was cancelled, or is late, has none."""


class TextMatcher:
    """The text of a stream, up to the first of ``stops`` that occurs in it; ``stopped`` is the stop, once it is
    there. Without ``stops`` tokens are decoded when the text is read: a caller that reads token ids alone pays for no
    text."""

    def __init__(self, tokenizer: Detokenizer, stops: tuple[str, ...] = ()) -> None:
        self._decoded = TextStream(tokenizer)
        self._stops = stops
        self._longest = max(map(len, stops), default=0)
        self._text = ""
        self._ended = self._finished = False
        self._undecoded: deque[int] = deque()
        self.stopped: str | None = None

    @property
    def text(self) -> str:
        """What is certain so far: complete characters, without the stop, and without an end that may be the beginning
        of one. Raises the tokenizer's error if there are no stops."""
        self._decode()
        if self._ended:
            return self._text
        for held in range(min(self._longest - 1, len(self._text)), 0, -1):
            if any(stop.startswith(self._text[-held:]) for stop in self._stops):
                return self._text[:-held]
        return self._text

    def push(self, token: int) -> bool:
        """Append a token. Returns whether the text ends with it."""
        if not self._stops:
            self._undecoded.append(token)
            return False
        start = max(0, len(self._text) - self._longest + 1)
        self._text += self._decoded.push(token)
        found = [(at, stop) for stop in self._stops if (at := self._text.find(stop, start)) >= 0]
        if found:
            at, self.stopped = min(found)
            self._text, self._ended = self._text[:at], True
        return bool(found)

    def finish(self) -> None:
        """Append what was held back as incomplete."""
        self._finished = True
        if self._stops:
            self._decode()

    def _decode(self) -> None:
        """Decode what was not needed until now."""
        while self._undecoded:
            self._text += self._decoded.push(self._undecoded.popleft())
        if self._finished and not self._ended:
            self._ended = True
            self._text += self._decoded.finish()


class TokenStream(AsyncIterator[StreamToken], AbstractAsyncContextManager[Any]):
    """The tokens of one text, in the form of `Sequence.stream`: the last one has the ``finish_reason``, and may be a
    stop token. Made by `Scheduler.submit`.

    Iteration ends when the text does. It raises the error if the request failed: an `ExecutorError`, or `ExecutorGone`
    if no executor could be reached. Tokens wait here until they are read, so a slow reader delays no other stream.
    Leave a stream with `cancel`, or use it as an async context manager, which cancels what is not complete; a stream
    that is only dropped is computed to its end.

    """

    def __init__(self, request: Request, cancel: Callable[[Request], None], matcher: TextMatcher | None) -> None:
        self._request = request
        self._cancel = cancel
        self._matcher = matcher
        self._tokens: deque[StreamToken] = deque()
        self._changed = asyncio.Event()
        self._reading = False
        self._origin: TracebackType | None = None  # of the failure

    # --- what is known of it ----------------------------------------------------------------------------------------

    @property
    def end(self) -> RequestEnd | None:
        """Why the text ended; None while it is being computed."""
        return self._request.ending

    @property
    def text(self) -> str:
        """The text of all tokens that have come, read or not; empty without a tokenizer. It only grows: characters that
        are incomplete, or with which a stop string may begin, are held back. ``stream.text[len(sent):]`` is what to
        send next. Without stop strings it is decoded when it is read, and raises an error of the tokenizer here."""
        return "" if self._matcher is None else self._matcher.text

    @property
    def stop(self) -> int | str | None:
        """The stop token or the stop string that ended the text."""
        matched = None if self._matcher is None else self._matcher.stopped
        return self._request.stop_token if matched is None else matched

    @property
    def executor(self) -> str:
        """The target at which it runs, or ran last."""
        return self._request.executor

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that were found in the prefix cache. It is known with the answer of the first run, so it
        may be 0 until the text has ended; the first token has it only if it came with that answer."""
        return self._request.cached_tokens or 0

    @property
    def token_ids(self) -> list[int]:
        """All tokens of the text so far, read or not, without a stop token. The tokens of a stop string are among
        them."""
        return list(self._request.generated)

    # --- for the reader ---------------------------------------------------------------------------------------------

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StreamToken:
        if not await self._come():
            raise StopAsyncIteration
        return self._next()

    async def arrived(self) -> list[StreamToken]:
        """The tokens that have come since the last ones were read, once there is one; an empty list at the end of the
        text. Raises as iteration does."""
        there = await self._come()
        return [self._next() for _ in range(there)]

    async def _come(self) -> int:
        """Wait for tokens. How many there are; 0: the text is complete."""
        if self._reading:
            raise RuntimeError("another task reads this stream")
        while not self._tokens:
            if (end := self.end) is not None:
                failure = self._request.failure
                if end is RequestEnd.ERROR and failure is not None:
                    raise failure.with_traceback(self._origin)  # other streams may have raised it too
                break
            self._changed.clear()
            self._reading = True
            try:
                await self._changed.wait()
            finally:
                self._reading = False
        return len(self._tokens)

    def _next(self) -> StreamToken:
        token = self._tokens.popleft()
        if self._tokens:
            return token if token.more else replace(token, more=True)
        if self.end is not None:
            return replace(token, more=False, finish_reason=REASONS.get(self.end))
        return token

    async def all(self) -> list[StreamToken]:
        """The tokens that were not read yet, once the text is complete."""
        return [token async for token in self]

    def cancel(self) -> None:
        """End the text here. Its run is interrupted after the present step. Tokens that have come can still be read."""
        self._cancel(self._request)

    async def __aexit__(self, *_: object) -> None:
        self.cancel()

    # --- for the scheduler ------------------------------------------------------------------------------------------

    def add(self, tokens: list[StreamToken], count: int) -> bool:
        """Append tokens: ``count`` of the text, and a stop token behind them if there is one more. Returns whether a
        stop string ends the text, and then drops what is behind it."""
        request = self._request
        before = len(request.generated) - count
        self._changed.set()
        for index, token in enumerate(tokens):
            cached = request.cached_tokens if before + index == 0 else 0
            self._tokens.append(replace(token, cached_tokens=cached) if cached else token)
            if index < count and self._matcher is not None and self._matcher.push(token.token):
                del request.generated[before + index + 1 :]
                return True
        return False

    def ended(self) -> None:
        """The request has ended."""
        failure = self._request.failure
        self._origin = None if failure is None else failure.__traceback__
        self._changed.set()
        if self._matcher is not None:
            with suppress(Exception):  # of the tokenizer: what was held back stays away
                self._matcher.finish()
