"""Streams of tokens: by runs that are sent ahead of the program, or by single steps where the executor has no runs."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator
from contextlib import aclosing

from ferrum_rpc.client.info import Capability, ExecutorInfo
from ferrum_rpc.client.owner import Owner
from ferrum_rpc.client.prefetch import RunPrefetcher
from ferrum_rpc.client.retry import fate_unknown
from ferrum_rpc.client.sender import Sender
from ferrum_rpc.client.transport import DECODE
from ferrum_rpc.core import MAX_STOP_TOKENS, OutputSpec
from ferrum_rpc.errors import NotSupported


async def generated(
    sender: Sender[Owner],
    tokens: list[int],
    most: int | None,
    *,
    output: OutputSpec,
    stop: frozenset[int] | None,
    timeout_s: float | None,
) -> AsyncGenerator[int, None]:
    """See `Sequence.generate`."""
    state, owner = sender.state, sender.owner
    with state.claim("generate"):
        owner.expect(None if most is None else len(tokens) + most - 1)
        deadline = sender.deadline(timeout_s)
        await owner.find(deadline, tokens)
    info = await owner.info(deadline)
    most_stops = info.limits.max_stop_tokens or MAX_STOP_TOKENS
    if Capability.RUN in info.capabilities and len(stop or info.model.eos_token_ids) <= most_stops:
        try:
            stream = _in_runs(sender, tokens, most, info, output=output, stop=stop, timeout_s=timeout_s)
            async with aclosing(stream):
                async for token in stream:
                    tokens, most = [token], None if most is None else most - 1
                    yield token
            return
        except NotSupported as refusal:  # another executor, without runs, answers there now
            if refusal.field != "run":
                raise
    deadline = sender.deadline(timeout_s)
    with state.claim("prefill"):
        answer = await sender.prefill(tokens, output, None, deadline, None)
    info = await owner.info(sender.deadline(timeout_s))  # of the executor that has it now
    ends = frozenset(info.model.eos_token_ids) if stop is None else stop
    for count in itertools.count(1):
        token = answer.token
        if token in ends:
            return
        yield token
        if count == most:
            return
        if state.seen_length >= info.model.max_context:
            with state.claim("generate"):
                there = await owner.more_context(sender.deadline(timeout_s))
            if there is None:
                return
            info = there
        deadline = sender.deadline(timeout_s)
        with sender.claim("decode"):
            answer = await sender.feed(DECODE, [token], output, None, deadline)


async def _in_runs(
    sender: Sender[Owner],
    unfed: list[int],
    left: int | None,
    info: ExecutorInfo,
    *,
    output: OutputSpec,
    stop: frozenset[int] | None,
    timeout_s: float | None,
) -> AsyncGenerator[int, None]:
    """The tokens that follow ``unfed``, ``left`` at most. The first run feeds the last chunk of ``unfed``."""
    state, owner = sender.state, sender.owner

    def begin() -> RunPrefetcher:
        ends = info.model.eos_token_ids if stop is None else stop
        stops = tuple(sorted(each for each in ends if 0 <= each < info.model.vocab_size))
        return sender.prefetch(output=output, stops=stops, timeout_s=timeout_s)

    with state.claim("generate"):
        deadline = sender.deadline(timeout_s)
        await sender.settle(deadline)
        unfed = unfed[(await sender.feed_chunks(unfed, output, None, deadline)).fed :]
        ahead, at = begin(), state.seen_length
        ahead.fill(unfed, at, left, info, least=1)
    try:
        while ahead.in_flight_runs:
            with state.claim("generate"):
                while (answer := await ahead.next_run()) is None:
                    ahead.fill(unfed, at, left, owner.connection.context.known_info or info)
            sender.prompt, info = None, owner.connection.context.known_info or info  # of the executor that has it now
            ends = info.model.eos_token_ids if stop is None else stop
            tokens, at = answer.tokens.tolist(), answer.length
            unfed = tokens[-1:]
            if left is not None:
                left -= len(tokens)
            if unfed[0] not in ends:
                ahead.fill(unfed, at, left, info)
            for index, token in enumerate(tokens):
                state.seen = at - len(tokens) + 1 + index
                if token in ends:
                    await ahead.drain()
                    return
                yield token
                if sender.prefetcher is not ahead:  # another call was made meanwhile: go on from where it left it
                    left = None if left is None else left + len(tokens) - 1 - index
                    with state.claim("generate"):
                        ahead, at, unfed = begin(), state.seen_length, [token]
                        ahead.fill(unfed, at, left, info)
                    break
            if not ahead.in_flight_runs and left != 0 and unfed[0] not in ends:  # the context is full
                with state.claim("generate"):
                    there = await owner.more_context(sender.deadline(timeout_s))
                    if there is not None:
                        info, ahead = there, begin()
                        ahead.fill(unfed, at, left, info)
    except BaseException as error:
        ahead.failed = not isinstance(error, GeneratorExit) and fate_unknown(error)
        raise
    finally:
        if sender.prefetcher is ahead:
            ahead.cancel()
            if not ahead.unknown and state.lost is None and state.length == state.seen:
                sender.end_stream()
