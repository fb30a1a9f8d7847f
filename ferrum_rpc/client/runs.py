"""Streams of tokens, by runs that are sent ahead of the program."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from ferrum_rpc.client.owner import Owner
from ferrum_rpc.client.prefetch import RunPrefetcher
from ferrum_rpc.client.retry import fate_unknown
from ferrum_rpc.client.sender import Sender
from ferrum_rpc.core import OutputSpec


async def generated(
    sender: Sender[Owner],
    unfed: list[int],
    left: int | None,
    *,
    output: OutputSpec,
    stop: frozenset[int] | None,
    timeout_s: float | None,
) -> AsyncGenerator[int, None]:
    """See `Sequence.generate`: the tokens that follow ``unfed``, ``left`` at most. The first run feeds the last chunk
    of ``unfed``."""
    state, owner = sender.state, sender.owner

    def begin() -> RunPrefetcher:
        ends = info.model.eos_token_ids if stop is None else stop
        stops = tuple(sorted(each for each in ends if 0 <= each < info.model.vocab_size))
        return sender.prefetch(output=output, stops=stops, timeout_s=timeout_s)

    with state.claim("generate"):
        owner.expect(None if left is None else len(unfed) + left - 1)
        deadline = sender.deadline(timeout_s)
        await owner.find(deadline, unfed)
        await sender.settle(deadline)
        info = await owner.info(deadline)
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
            left = None if left is None else left - len(tokens)
            if unfed[0] not in ends:
                ahead.fill(unfed, at, left, info)
            for index, token in enumerate(tokens):
                state.seen = at - len(tokens) + 1 + index
                if token in ends:
                    await ahead.drain()
                    return
                yield token
                if sender.prefetcher is not ahead:  # another call was made meanwhile: continue after it
                    left = None if left is None else left + len(tokens) - 1 - index
                    with state.claim("generate"):
                        ahead, at, unfed = begin(), state.seen_length, [token]
                        ahead.fill(unfed, at, left, info)
                    break
            if not ahead.in_flight_runs and left != 0 and unfed[0] not in ends:  # the context is full
                with state.claim("generate"):
                    if (there := await owner.more_context(sender.deadline(timeout_s))) is not None:
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
