"""`Sequence`: one sequence in the executor's cache, as a program uses it."""

from __future__ import annotations

import itertools
import logging
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Final

from ferrum_rpc.client import operations
from ferrum_rpc.client.answer import Answer
from ferrum_rpc.client.arguments import GREEDY, Output, Tokens, as_list, as_number, as_optional, as_output, as_tokens
from ferrum_rpc.client.connection import Connection
from ferrum_rpc.client.feeder import NO_ROWS, Feeder
from ferrum_rpc.client.sampling import Sampler, Sampling
from ferrum_rpc.client.state import Item, SequenceMisuseError, SequenceState
from ferrum_rpc.client.transport import DECODE, VERIFY
from ferrum_rpc.core import HandleRef, Positions, Pressure

_GREEDILY: Final = Sampling(temperature=0)

log = logging.getLogger("ferrum_rpc.client")


class Sequence:
    """One sequence in the executor's KV cache. Made by `ExecutorClient.sequence`; starts empty.

    An async context manager: leaving it releases the sequence, on errors and cancellation too. One call at a time;
    a second one raises `SequenceMisuseError` before anything is sent, and so does an argument that cannot be meant,
    with `InvalidRequest` and its ``field``. Calls raise the `ExecutorError` of the executor's reason; after any error
    the sequence is as it was before the call, except that a long `prefill` keeps the chunks that went through, and
    except where the fate is unknown (`TransportError`, `DeadlineExceeded`, cancellation): then making the same call
    again is safe and settles it, because it carries the same request id.
    """

    def __init__(self, connection: Connection, state: SequenceState, *, rebuild: bool) -> None:
        self._connection = connection
        self._context = connection.context
        self._state = state
        self._feeder = Feeder(connection, state, rebuilds=rebuild)

    def __repr__(self) -> str:
        state, lost = self._state, self._feeder.lost is not None
        known = "released" if state.released else "lost" if lost else "in doubt" if self.in_doubt else ""
        words = ", ".join(filter(None, [known, state.busy and f"{state.busy} in flight"]))
        return f"<Sequence length={self.length} version={self.version}{words and f': {words}'}>"

    # --- what is known of it ----------------------------------------------------------------------------------------

    @property
    def length(self) -> int:
        """L, the tokens in the cache. The last sampled token is not among them until it is fed."""
        return self._feeder.length

    @property
    def version(self) -> int:
        """The version of the last answer; 0 before the first."""
        return 0 if self._state.handle is None else self._state.handle.version

    @property
    def handle(self) -> HandleRef | None:
        """The handle of the last answer; None before the first."""
        return self._state.handle

    @property
    def tokens(self) -> list[int]:
        """The tokens in the cache, for a sequence made with ``keep_tokens``. A copy."""
        tokens = self._feeder.tokens
        if tokens is None:
            raise SequenceMisuseError("this sequence does not keep its tokens: make it with keep_tokens=True")
        return list(tokens)

    @property
    def released(self) -> bool:
        """Whether it was released by this program."""
        return self._state.released

    @property
    def in_doubt(self) -> bool:
        """Whether a call failed and may have run. The same call made again settles it."""
        return self._state.in_doubt

    # --- forwards ---------------------------------------------------------------------------------------------------

    async def prefill(
        self,
        tokens: Tokens,
        output: Output = GREEDY,
        *,
        chunk: int | None = None,
        timeout_s: float | None = None,
    ) -> Answer:
        """Feed a prompt, or the next part of one. L becomes L + n.

        A prompt longer than ``chunk`` tokens (default: what the executor takes in one call) goes in several calls that
        ask for no rows but in the last; with positions ALL every chunk is asked, and the answer holds all n rows.
        ``timeout_s`` bounds the whole. If a chunk fails, the ones before it stay; calling again with the same tokens
        goes on where it stopped.

        Raises `KvBlocksExhausted`, `ContextLengthExceeded`, `QueueFull`, `InvalidRequest` and the other refusals.
        """
        listed, spec = as_tokens(tokens), as_output(output, Positions.LAST)
        chunk = as_optional(chunk, "chunk", least=1)
        deadline = self._context.deadline(timeout_s)
        with self._state.claim("prefill"):
            return await self._feeder.prefill(listed, spec, chunk, deadline)

    async def decode(
        self,
        token: int,
        output: Output = GREEDY,
        *,
        truncate_to: int | None = None,
        timeout_s: float | None = None,
    ) -> Answer:
        """Feed one token, after rolling back to ``truncate_to`` where given. L becomes L + 1."""
        listed, spec, truncate_to = (
            as_tokens([token]),
            as_output(output, Positions.LAST),
            as_optional(truncate_to, "truncate_to"),
        )
        deadline = self._context.deadline(timeout_s)
        with self._state.claim("decode"):
            self._feeder.begin("decode")
            return await self._feeder.feed(DECODE, listed, spec, truncate_to, deadline)

    async def verify(
        self,
        tokens: Tokens,
        output: Output = GREEDY,
        *,
        truncate_to: int | None = None,
        timeout_s: float | None = None,
    ) -> Answer:
        """Feed m draft tokens in one step and return m rows: row i stands at length L + i + 1. L becomes L + m; roll
        back what is rejected with `truncate`, or with ``truncate_to`` of the next call, which costs no round trip."""
        listed, spec, truncate_to = (
            as_tokens(tokens),
            as_output(output, Positions.ALL),
            as_optional(truncate_to, "truncate_to"),
        )
        deadline = self._context.deadline(timeout_s)
        with self._state.claim("verify"):
            self._feeder.begin("verify")
            return await self._feeder.feed(VERIFY, listed, spec, truncate_to, deadline)

    def generate(
        self,
        tokens: Tokens,
        *,
        max_tokens: int | None = None,
        sampling: Sampling | None = None,
        stop: Iterable[int] | None = None,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[int, None]:
        """Feed ``tokens`` (a prompt, or what goes on from here), then every token that is chosen, and yield those:
        ``async for token in sequence.generate(prompt, max_tokens=64)``.

        It ends after ``max_tokens`` (None: no bound), before a token of ``stop`` (default: the model's end-of-sequence
        tokens), which is not yielded, or where the context is full. ``sampling``: how tokens are chosen; None takes the
        best one. A sampled text depends on its seed and on nothing that runs beside it. ``timeout_s``: of each step.

        L counts all but the last token that was yielded, which is not fed yet. So a stream may be left or closed
        (``aclose``) anywhere, and `generate` from that token goes on. An error or a cancellation in a step leaves what
        the step's own call would; where its fate is unknown, going on in this way settles it.
        """
        listed = as_tokens(tokens)
        most = as_optional(max_tokens, "max_tokens", least=1)
        ends = None if stop is None else frozenset(as_list(stop, "stop"))
        return self._generated(listed, most, sampling or _GREEDILY, ends, timeout_s)

    def item(self, tokens: Tokens, output: Output = GREEDY, *, truncate_to: int | None = None) -> Item:
        """A work item for `ExecutorClient.forward` and the other batch calls, on the sequence as it is now. Nothing is
        sent. A kind alone stands for the last position."""
        if self._state.released:
            raise SequenceMisuseError("item: this sequence was released")
        if self._feeder.lost is not None:
            raise SequenceMisuseError("item: this sequence was lost and is not rebuilt yet: await rebuild() first")
        listed, spec, truncate_to = (
            as_tokens(tokens),
            as_output(output, Positions.LAST),
            as_optional(truncate_to, "truncate_to"),
        )
        self._feeder.forget_prompt()
        return self._state.item(next(self._context.item_ids), listed, spec, truncate_to)

    # --- other operations -------------------------------------------------------------------------------------------

    async def truncate(self, length: int, *, timeout_s: float | None = None) -> Pressure:
        """Roll back to ``length`` ≤ L tokens. Raises `TruncateBeyondLength` where that would grow it."""
        length, deadline = as_number(length, "length"), self._context.deadline(timeout_s)
        with self._state.claim("truncate"):
            self._feeder.begin("truncate")
            return await self._feeder.surviving(lambda: self._feeder.roll_back(length, deadline), deadline)

    async def fork(self, count: int = 1, at: int | None = None, *, timeout_s: float | None = None) -> list[Sequence]:
        """``count`` new sequences that share this one's cache up to length ``at`` (default: all of it) until they
        diverge. This one does not change. Each child is released like any other sequence."""
        count, at = as_number(count, "count", least=1), as_optional(at, "at_length")
        deadline = self._context.deadline(timeout_s)
        with self._state.claim("fork"):
            self._feeder.begin("fork", keeps_prompt=True)
            states = await self._feeder.surviving(
                lambda: operations.fork(
                    self._connection, self._state, self._feeder.handle(), deadline, count=count, at=at
                ),
                deadline,
            )
        return [Sequence(self._connection, state, rebuild=self._feeder.rebuilds) for state in states]

    async def reserve(self, tokens: int, *, timeout_s: float | None = None) -> Pressure:
        """Hold blocks for ``tokens`` tokens beyond L, so that they cannot fail for lack of them. Raises
        `KvBlocksExhausted`. Doing it twice is doing it once."""
        tokens, deadline = as_number(tokens, "tokens"), self._context.deadline(timeout_s)
        with self._state.claim("reserve"):
            self._feeder.begin("reserve", keeps_prompt=True)
            return await self._feeder.surviving(
                lambda: operations.reserve(self._connection, self._feeder.handle(), tokens, deadline), deadline
            )

    async def rebuild(
        self,
        tokens: Tokens | None = None,
        output: Output = NO_ROWS,
        *,
        timeout_s: float | None = None,
    ) -> Answer:
        """Make it anew: feed ``tokens`` (default: the ones kept with ``keep_tokens``) to a new sequence and go on with
        that. The cure for `InstanceMismatch`, `HandleUnknown`, `HandleReleased` and `LeaseExpired`; decoding then
        goes on with the same tokens. Whatever is left of the old sequence is released.

        Pieces longer than ``limits.exact_span_tokens`` are fed as they were, the rest in pieces of that many: on the
        same build with the same choices the cache is the same to the last bit. Where that limit is 0 it is so within
        rounding, and everything goes in pieces as large as the executor takes."""
        listed, spec = self.tokens if tokens is None else as_tokens(tokens), as_output(output, Positions.LAST)
        deadline = self._context.deadline(timeout_s)
        with self._state.claim("rebuild"):
            return await self._feeder.rebuild(listed, spec, deadline)

    # --- its end ----------------------------------------------------------------------------------------------------

    async def release(self) -> None:
        """Free it, at whatever version it stands. What is gone already (restarted executor, expired lease, released)
        counts as released. Doing it twice is doing it once. Bounded by the client's ``release_timeout_s``, and carried
        through when the caller is cancelled meanwhile."""
        if not self._state.released:
            self._state.must_rest("release")
            [refusal] = await self._connection.releases.release(self._state)
            if refusal is not None:
                raise refusal

    async def __aenter__(self) -> Sequence:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._state.released:
            return
        [refusal] = await self._connection.releases.release(self._state)
        if refusal is not None:
            # Nothing is lost that the executor's idle time-out does not find, and the caller's own error matters more.
            log.warning("a sequence could not be released: %s", refusal)

    # --- inside -----------------------------------------------------------------------------------------------------

    @contextmanager
    def _rolled_back(self) -> Iterator[tuple[SequenceState, HandleRef]]:
        """For a batch: the sequence claimed, and the handle that it stands at."""
        with self._state.claim("truncate"):
            self._feeder.begin("truncate")
            if self._feeder.lost is not None or self._state.handle is None:
                raise SequenceMisuseError(
                    "truncate: this sequence was lost and is not rebuilt yet: await rebuild() first"
                )
            yield self._state, self._state.handle

    async def _generated(
        self,
        tokens: list[int],
        most: int | None,
        sampling: Sampling,
        ends: frozenset[int] | None,
        timeout_s: float | None,
    ) -> AsyncGenerator[int, None]:
        info = await self._context.info(self._context.deadline(timeout_s))
        sampler = Sampler(sampling, info)
        if ends is None:
            ends = frozenset(info.model.eos_token_ids)
        answer = await self.prefill(tokens, sampler.output, timeout_s=timeout_s)
        for count in itertools.count(1):
            token = sampler.pick(answer, request=0, position=answer.length)
            if token in ends:
                return
            yield token
            if count == most or self.length >= info.model.max_context:
                return
            answer = await self.decode(token, sampler.output, timeout_s=timeout_s)
