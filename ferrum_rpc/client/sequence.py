"""`Sequence`: the public interface of one sequence in the executor's cache. Its `Sender` makes the calls."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Self

from ferrum_rpc.client import transfer
from ferrum_rpc.client.answer import Answer
from ferrum_rpc.client.arguments import (
    GREEDY,
    MOST,
    NO_ROWS,
    Output,
    Tokens,
    as_number,
    as_optional,
    as_output,
    as_run,
    as_seconds,
    as_tokens,
)
from ferrum_rpc.client.executor_view import ExecutorView
from ferrum_rpc.client.masks import with_masks
from ferrum_rpc.client.moving import export_file, import_file, move
from ferrum_rpc.client.owner import Owner
from ferrum_rpc.client.prefetch import StreamOptions, Wanted
from ferrum_rpc.client.retry import Deadline
from ferrum_rpc.client.runs import StreamToken, streamed, token_ids
from ferrum_rpc.client.sender import Sender
from ferrum_rpc.client.state import Item, SequenceMisuseError, SequenceState
from ferrum_rpc.client.transport import DECODE, VERIFY
from ferrum_rpc.core import Accept, Greedy, HandleRef, NextToken, OutputSpec, Positions, Pressure, Run, Sample
from ferrum_rpc.errors import InvalidRequest, TruncateBeyondLength

log = logging.getLogger("ferrum_rpc.client")


class Sequence:
    """One sequence in the executor's KV cache. Made by `ExecutorClient.sequence`; starts empty.

    An async context manager: leaving it releases the sequence, also after errors and cancellation. One call at a time:
    a second one raises `SequenceMisuseError` before anything is sent, and an invalid argument `InvalidRequest` with its
    ``field``. Calls raise the `ExecutorError` of the executor's reason. After an error the sequence is as before the
    call, with two exceptions: a long `prefill` keeps its completed chunks, and after `TransportError`,
    `DeadlineExceeded` or cancellation the outcome is unknown. Then making the same call again is safe and settles it,
    because it has the same request id.
    """

    def __init__(self, sender: Sender[Owner]) -> None:
        self._sender = sender
        self._state = sender.state
        self._output: tuple[Output, OutputSpec] = (GREEDY, as_output(GREEDY, Positions.LAST))

    def __repr__(self) -> str:
        state = self._state
        known = "released" if state.released else "lost" if state.lost else "in doubt" if self.in_doubt else ""
        words = ", ".join(filter(None, [known, state.busy and f"{state.busy} in flight"]))
        return f"<Sequence length={self.length} version={self.version}{words and f': {words}'}>"

    # --- what is known of it ----------------------------------------------------------------------------------------

    @property
    def length(self) -> int:
        """L, the tokens in the cache. The last sampled token is not among them until it is fed."""
        return self._state.seen_length

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
        return self._state.held_tokens()[: self.length]

    @property
    def released(self) -> bool:
        """Whether it was released by this program."""
        return self._state.released

    @property
    def in_doubt(self) -> bool:
        """Whether a call failed with an unknown outcome. Making the same call again settles it."""
        return self._sender.in_doubt

    @property
    def owner(self) -> ExecutorView | None:
        """The executor that has it. None: nothing was fed yet."""
        return self._sender.owner.executor

    # --- forwards ---------------------------------------------------------------------------------------------------

    async def prefill(
        self,
        tokens: Tokens,
        output: Output = GREEDY,
        *,
        run: Run | None = None,
        chunk: int | None = None,
        timeout_s: float | None = None,
    ) -> Answer:
        """Feed a prompt, or the next part of one. L becomes L + n.

        A prompt longer than ``chunk`` tokens (default: the executor's maximum per call) is fed in several calls, of
        which the last returns rows; with positions ALL each of them does, and the answer has all n rows. Scores
        (`NextToken`) equal those of one call: each chunk includes the next one's first token.
        ``timeout_s`` limits the total time. If a chunk fails, the ones before it stay; calling again with the same
        tokens continues after them. ``run``: continue from there as in `decode`.

        Raises `KvBlocksExhausted`, `ContextLengthExceeded`, `QueueFull`, `InvalidRequest` and the other refusals.
        """
        listed, spec = as_tokens(tokens), self._spec(output)
        _check_fed(spec)
        if run is not None:
            run = as_run(run, spec)
        chunk = as_optional(chunk, "chunk", least=1)
        deadline = self._sender.deadline(timeout_s)
        with self._state.claim("prefill"):
            return await self._sender.prefill(listed, spec, chunk, deadline, run)

    async def decode(
        self,
        token: int,
        output: Output = GREEDY,
        *,
        truncate_to: int | None = None,
        run: Run | None = None,
        timeout_s: float | None = None,
    ) -> Answer:
        """Feed one token, after rolling back to ``truncate_to`` if given. L becomes L + 1.

        With a ``run`` the executor continues with each token that it chooses: the answer has all of them, and L grows
        by their number, because the last is not fed. An interrupted run is an answer too (`Answer.run_end`). Raises
        `NotSupported` if the executor has no runs."""
        listed, spec = as_tokens([token]), self._spec(output)
        truncate_to, deadline = as_optional(truncate_to, "truncate_to"), self._sender.deadline(timeout_s)
        if run is not None:
            run = as_run(run, spec)
        with self._sender.claim("decode"):
            return await self._sender.feed(DECODE, listed, spec, truncate_to, deadline, run=run)

    async def verify(
        self,
        tokens: Tokens,
        output: Output = GREEDY,
        *,
        truncate_to: int | None = None,
        timeout_s: float | None = None,
    ) -> Answer:
        """Feed m draft tokens in one step and return m rows: row i is the one at length L + i + 1. L becomes L + m;
        roll back rejected tokens with `truncate`, or with ``truncate_to`` of the next call, which costs no round trip.

        With `Accept` the executor rolls back itself: of [last, d0 … dN-1], where ``last`` is the token that was chosen
        last, it keeps the accepted ones. `Answer.tokens` are the emitted tokens, the accepted ones and one more, and L
        grows by their number: the last of them is not in the cache, and is the next call's ``last``."""
        listed, spec = as_tokens(tokens), as_output(output, Positions.ALL)
        truncate_to, deadline = as_optional(truncate_to, "truncate_to"), self._sender.deadline(timeout_s)
        with self._sender.claim("verify"):
            return await self._sender.feed(VERIFY, listed, spec, truncate_to, deadline)

    def stream(
        self,
        tokens: Tokens,
        *,
        max_tokens: int | None = None,
        min_tokens: int = 0,
        output: Greedy | Sample = GREEDY,
        stop: Tokens | None = None,
        max_delay_s: float | None = None,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[StreamToken, None]:
        """Feed ``tokens`` (a prompt, or a continuation), then every chosen token, and yield the chosen ones with what
        ``output`` asks for: ``async for each in sequence.stream(prompt, max_tokens=64, output=Greedy(logprob=True))``.

        It ends after ``max_tokens`` (None: no limit), with a token of ``stop`` (default: the model's end-of-sequence
        tokens; empty: none), or when the context is full: the last token's ``finish_reason`` says which. With a grammar
        the model's end-of-sequence tokens always end it. ``output``: how tokens are chosen. A sampled text depends on
        its seed and not on other requests. ``timeout_s``: of each step.

        Before ``min_tokens`` no stop token ends it, and the executor chooses none: its probability is 0, as if its
        logit were -inf, and the others' proportions do not change. Only where masks allow nothing else it is chosen,
        and fed as any other token; a text that is complete by its grammar ends. Log-probabilities are of the model's
        row all the same.

        If the executor offers runs, a round trip returns several tokens, enough to hide its latency, the first ones
        with the prompt; in a session the next run waits at the executor for the present one. ``max_delay_s``: the
        longest time that a token may wait there for the rest of its run, for a steadier stream (None: see `RunPace`;
        0: runs of one token). Shorter than 1.5 round trips it costs throughput.

        L counts all but the last yielded token, which is not fed yet, also if it is a stop token. So you may leave or
        close a stream (``aclose``) anywhere, and continue with `stream` from that token: calls in flight are cancelled,
        and the next call rolls back what was computed beyond. An error or a cancellation in a step has the effect that
        it has in the step's own call; if the outcome is unknown, continuing in this way settles it.
        """
        listed = as_tokens(tokens)
        most = as_optional(max_tokens, "max_tokens", least=1)
        least = as_number(min_tokens, "min_tokens", most=MOST if most is None else most)
        ends = None if stop is None else frozenset(as_tokens(stop, "stop", least=0))
        delay_s = None if max_delay_s is None else as_seconds(max_delay_s, "max_delay_s")
        spec = as_output(output, Positions.LAST)
        if not isinstance(spec.kind, Greedy | Sample) or spec.positions is not Positions.LAST:
            raise InvalidRequest(
                f"the output of a stream must be Greedy() or Sample(...), not {output!r}", field="output"
            )
        options = StreamOptions(spec, timeout_s, delay_s)
        return streamed(self._sender, listed, Wanted(most, least), stop=ends, options=options)

    def generate(
        self,
        tokens: Tokens,
        *,
        max_tokens: int | None = None,
        min_tokens: int = 0,
        output: Greedy | Sample = GREEDY,
        stop: Tokens | None = None,
        max_delay_s: float | None = None,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[int, None]:
        """The token ids of a `stream`, which describes the arguments: ``async for token in sequence.generate(prompt,
        max_tokens=64)``. A stop token ends it and is not yielded, so that L counts all tokens then."""
        stream = self.stream(
            tokens,
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            output=output,
            stop=stop,
            max_delay_s=max_delay_s,
            timeout_s=timeout_s,
        )
        return token_ids(stream)

    def item(
        self,
        tokens: Tokens = (),
        output: Output = GREEDY,
        *,
        truncate_to: int | None = None,
        run: Run | None = None,
        follows: Item | None = None,
        on_tokens: Callable[[int, list[int]], None] | None = None,
    ) -> Item:
        """A work item for `ExecutorClient.forward` and the other batch calls, on the sequence as it is now. Nothing is
        sent. A kind without positions means the last position. ``run``: as in `decode`.

        In a session one item may be sent while another of the same sequence is in flight: it ``follows`` that one and
        runs on the sequence after it; without ``tokens`` it feeds the token that that one chooses. The first one may be
        any item, also a prompt that makes the sequence or a child, or a chunk of a prompt. Begin its call first; the
        second is then sent behind it, in a fleet to the executor that it is placed at. If the first item ends
        differently than expected, or with a stop id, the second is refused with `ChainBroken`, with nothing
        changed.

        ``on_tokens(first, token_ids)`` is called in the event loop with tokens of the run as they are chosen, where the
        client asks for them (``tokens_ahead``): ``first`` of them came before. Only the answer counts: some or all may
        come with it alone, and a run that is lost may leave tokens that were reported."""
        sender = self._sender
        sender.check_settled("item")
        spec = self._spec(output)
        feeds_chosen = follows is not None and isinstance(tokens, tuple) and not tokens
        listed = [] if feeds_chosen else as_tokens(tokens)
        if run is not None:
            run = as_run(run, spec)
        if truncate_to is not None:
            truncate_to = as_number(truncate_to, "truncate_to")
        sender.prompt = None  # the next feed does not continue a prompt whose chunks failed
        context = sender.owner.connection.context
        number = next(context.item_ids)
        if follows is None:
            item = self._state.item(number, listed, spec, truncate_to, run)
        elif follows.state is not self._state or truncate_to is not None:
            raise SequenceMisuseError("item: it follows one of its own sequence, and rolls nothing back")
        else:
            info = context.known_info
            most = MOST if info is None else info.model.max_context
            item = self._state.item_behind(follows, number, listed, spec, run=run, max_context=most)
        if on_tokens is not None:
            item.on_tokens = on_tokens
        return item

    # --- other operations -------------------------------------------------------------------------------------------

    async def truncate(self, length: int, *, timeout_s: float | None = None) -> Pressure:
        """Roll back to ``length`` ≤ L tokens. Raises `TruncateBeyondLength` for a larger length."""
        length, deadline = as_number(length, "length"), self._sender.deadline(timeout_s)
        with self._sender.claim("truncate"):
            return await self._sender.send(lambda: self._sender.roll_back(length, deadline), deadline)

    async def fork(self, count: int = 1, at: int | None = None, *, timeout_s: float | None = None) -> list[Self]:
        """``count`` new sequences that share this one's cache up to length ``at`` (default: all of it) until they
        diverge. This one does not change. Release each child like any other sequence."""
        count, at = as_number(count, "count", least=1), as_optional(at, "at_length")
        deadline = self._sender.deadline(timeout_s)
        with self._sender.claim("fork", keeps_prompt=True):
            states = await self._sender.send(
                lambda: self._sender.owner.connection.fork(
                    self._state, self._state.existing_handle(), deadline, count=count, at=at
                ),
                deadline,
            )
        return [self._beside(state) for state in states]

    def child(self, at: int | None = None) -> Self:
        """A new sequence that begins with this one's cache up to length ``at`` (default: all of it), as of `fork`, but
        created in the step that first feeds it: nothing is sent before. Children that are first fed by items of one
        `ExecutorClient.forward` share a step, also with their parent.

        If this sequence has changed by then, the child's first call raises `SequenceVersionMismatch`. This one is busy
        for that step, and a child's own call waits while another one makes a child of it. Raises
        `TruncateBeyondLength`. If the executor does not support this, the child's first call raises `NotSupported`; use
        `fork` then."""
        at = as_optional(at, "at_length")
        self._sender.check_settled("child")
        length = self._state.existing_handle().seq_len
        if at is not None and at > length:
            raise TruncateBeyondLength(f"a child of {at} tokens, and its parent has {length}")
        state = self._state.child(length if at is None else at)
        return self._beside(state)

    async def reserve(self, tokens: int, *, timeout_s: float | None = None) -> Pressure:
        """Reserve blocks for ``tokens`` tokens beyond L. Idempotent. Raises `KvBlocksExhausted`."""
        tokens, deadline = as_number(tokens, "tokens"), self._sender.deadline(timeout_s)
        with self._sender.claim("reserve", keeps_prompt=True):
            return await self._sender.send(lambda: self._sender.reserve(tokens, deadline), deadline)

    async def park(self, *, timeout_s: float | None = None) -> int:
        """Move this sequence's cache to the executor's disk. The next call restores it; it is refused with
        `KvBlocksExhausted` if there are no blocks, and may be made again. Returns how many blocks were freed.
        Idempotent. Raises `SequencesExhausted` and `QuotaExceeded` if too much is parked, and `NotSupported` if the
        executor does not park."""
        deadline = self._sender.deadline(timeout_s)
        with self._sender.claim("park", keeps_prompt=True):
            return await self._sender.send(lambda: self._sender.park(deadline), deadline)

    # --- elsewhere --------------------------------------------------------------------------------------------------

    async def export_to(self, path: str | Path, *, timeout_s: float | None = None) -> None:
        """Write its cache to a file, for `import_from`. The sequence does not change. The file appears only once it is
        complete, and only this user can read it, because prompts could be derived from it. Raises `NotSupported` if the
        executor does not move sequences, `InvalidRequest` for the path."""
        deadline = self._sender.deadline(timeout_s)
        with self._sender.claim("export_to", keeps_prompt=True):
            await self._sender.send(lambda: export_file(self._sender, Path(path), deadline), deadline)

    async def import_from(self, path: str | Path, *, timeout_s: float | None = None) -> None:
        """Fill this new sequence from a file that `export_to` wrote: it then has those tokens, without computation; if
        values of the cache are not finite, the tokens are prefilled instead. A broken stream is continued; after an
        error, making the same call again continues it.

        Raises `LayoutMismatch` for the cache of another model, `KvCorrupt` for a file that was changed,
        `KvBlocksExhausted` and the other refusals of a prefill."""
        deadline = self._sender.deadline(timeout_s)
        with self._sender.claim_new("import_from"):
            await import_file(self._sender, Path(path), deadline)

    async def move_to(
        self, target: Sequence, *, transport: transfer.Transport = "grpc", timeout_s: float | None = None
    ) -> None:
        """Move this sequence to ``target``, a new sequence of another client, then release this one. A stream that
        breaks on either side is continued; after an error this sequence is unchanged, and making the same call again
        continues. Raises as `import_from`, and the refusals of the export.

        ``transport``: how the cache travels. With "nixl" the other executor reads it out of this one's memory, and this
        client passes only the checksums: both must offer it (`Capability.KV_TRANSPORT_NIXL`; `NotSupported`) and reach
        each other. Other values raise `InvalidRequest`.

        The client for threads does not have this method, because each client has its own event loop: use a file."""
        deadline = self._sender.deadline(timeout_s)
        with self._sender.claim("move_to", keeps_prompt=True), target._sender.claim_new("move_to"):
            await self._sender.send(lambda: move(self._sender.owner, target._sender, transport, deadline), deadline)
        await self.__aexit__()  # a release that fails changes nothing of the move

    # --- made anew --------------------------------------------------------------------------------------------------

    async def rebuild(
        self,
        tokens: Tokens | None = None,
        output: Output = NO_ROWS,
        *,
        timeout_s: float | None = None,
    ) -> Answer:
        """Rebuild it: feed ``tokens`` (default: the ones kept with ``keep_tokens``) to a new sequence and continue with
        that. Use it after `InstanceMismatch`, `HandleUnknown`, `HandleReleased` and `LeaseExpired`; decoding then
        continues with the same tokens. The rest of the old sequence is released.

        Pieces longer than ``limits.exact_span_tokens`` are fed as before, the rest in pieces of that many: on the same
        build with the same choices the cache is bitwise equal, if the sequence was made with `CacheMode.BYPASS`. If
        that limit is 0, it is equal within rounding, and everything is fed in the largest pieces that the executor
        allows."""
        listed, spec = self.tokens if tokens is None else as_tokens(tokens), as_output(output, Positions.LAST)
        if isinstance(spec.kind, NextToken):
            raise InvalidRequest("rebuild gives no scores: ask for them in prefill", field="output")
        _check_fed(spec)
        if with_masks(spec, ()) != spec:
            raise InvalidRequest("rebuild takes one mask for all rows", field="output.row_mask_ids")
        deadline = self._sender.deadline(timeout_s)
        sender, owner = self._sender, self._sender.owner
        connection = owner.connection
        with self._state.claim("rebuild"):
            sender.leave_stream()
            old = self._state.handle
            owner.restart(listed)
            if old is not None:
                await connection.release_handles([old], Deadline.after(connection.release_timeout_s))
            sender.prompt = None
            await owner.find(deadline, listed)
            return await sender.feed_lost(deadline, spec)

    # --- its end ----------------------------------------------------------------------------------------------------

    async def release(self) -> None:
        """Free it, at any version. A lost sequence (restarted executor, expired lease) counts as released. Idempotent,
        bounded by the client's ``release_timeout_s``, and completed even if the caller is cancelled. If it fails, call
        it again, or leave it: the next release of any sequence of the client tries this one too."""
        connection = self._sender.owner.connection
        if not self._state.released:
            self._state.check_idle("release")
        elif self._state not in connection.unreleased:
            return
        [refusal] = await connection.release([self._state], self._sender.leave_stream())
        if refusal is not None:
            raise refusal

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._state.released:
            return
        [refusal] = await self._sender.owner.connection.release([self._state], self._sender.leave_stream())
        if refusal is not None:
            # The next release tries again, or the executor's idle time-out frees it. The caller's own error matters
            # more.
            log.warning("a sequence could not be released: %s", refusal)

    def _spec(self, output: Output) -> OutputSpec:
        """`as_output` at the last position. The last one is kept: an output is a value, and most calls of a sequence
        pass the same object."""
        given, spec = self._output
        if output is not given:
            spec = as_output(output, Positions.LAST)
            self._output = output, spec
        return spec

    def _beside(self, state: SequenceState) -> Self:
        """A sequence that shares this one's cache."""
        return type(self)(Sender(state, self._sender.owner.of_sibling(state)))


def _check_fed(output: OutputSpec) -> None:
    """Refuse `Accept` for tokens that are not a draft."""
    if isinstance(output.kind, Accept):
        raise InvalidRequest("Accept() is of a draft: verify it, or make an item of it", field="output")


def sender_of(sequence: Sequence) -> Sender[Owner]:
    """The sender of a sequence, for calls for many sequences."""
    return sequence._sender
