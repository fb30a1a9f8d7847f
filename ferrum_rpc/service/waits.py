"""What a call waits for before it is submitted, where caches of its sequences are not in the engine: parked ones come
back from their files, and what the second tier has of their prompts goes into the prefix cache.

The sequences are claimed meanwhile. All of it is one wait, outside of steps and of the engine's queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from ferrum_rpc.core import Span
from ferrum_rpc.errors import ExecutorError
from ferrum_rpc.service.admission import Admitted
from ferrum_rpc.service.parking import unpark
from ferrum_rpc.service.records import Account, SequenceRecord
from ferrum_rpc.service.state import ServerState
from ferrum_rpc.service.tier import fetch_prefix, fetch_window
from ferrum_rpc.service.transaction import Failed


def tiered(
    state: ServerState, admitted: Sequence[Admitted], parents: Iterable[SequenceRecord]
) -> tuple[Sequence[Span], Sequence[Span]]:
    """What the second tier is asked for: the spans with prompts, and those that go back behind a window."""
    prompts, back = prompts_of(admitted, state.engine.cache.block_size), list[Span]()
    with suppress(ExecutorError):  # the executor has ended, and refuses the call later
        if state.device.window_tokens is not None:
            back = going_back(admitted, parents, state.device.free_truncation_tokens or 0)
    return prompts, back


def prompts_of(admitted: Iterable[Admitted], block_size: int) -> list[Span]:
    """The spans whose prompts are looked up in the prefix cache."""
    return [
        each.span
        for each in admitted
        if each.record.prefix is not None
        and len(each.span.tokens) > block_size
        and (each.span.create or each.span.start == each.record.length)
        and each.span.prompt is not None
    ]


def going_back(admitted: Sequence[Admitted], parents: Iterable[SequenceRecord], free: int) -> list[Span]:
    """The spans that begin behind the windows of their sequences, or of those that they fork: ``parents``, or others of
    the call. A way back of ``free`` tokens is within it."""
    reached = {record.sequence: record.reached for record in (*parents, *(each.record for each in admitted))}
    return [
        each.span
        for each in admitted
        if each.record.prefix is not None
        and each.span.start < reached[each.span.sequence if each.span.parent is None else each.span.parent] - free
    ]


async def bring_in(  # noqa: PLR0917 - what a call waits for
    state: ServerState,
    account: Account,
    goes_on: Callable[[], bool],
    parked: Sequence[SequenceRecord],
    prompts: Sequence[Span] = (),
    back: Sequence[Span] = (),
) -> Failed:
    """Bring ``parked`` sequences back into the engine, and then what the second tier has of ``prompts``, and of what
    spans that go ``back`` need, into the prefix cache: the latter until ``goes_on()`` is false. Returns the refusals of
    sequences that could not be brought back."""
    failed: Failed = {}

    async def unparked(record: SequenceRecord) -> None:
        number = record.sequence  # it has another one if it fails
        refusal = await unpark(state, record)
        if refusal is not None:
            failed[number] = refusal

    async def fetch(span: Span) -> None:
        behind = span.sequence if span.parent is None else span.parent
        if span.prompt is not None and behind not in failed:
            await fetch_prefix(state, account, goes_on, behind, span.start, span.prompt, span.prefix)

    async def fetch_behind(span: Span) -> None:
        behind = span.sequence if span.parent is None else span.parent
        if behind not in failed:
            await fetch_window(state, account, goes_on, behind, span.start)

    if parked:
        await asyncio.gather(*map(unparked, parked))
    if prompts or back:
        await asyncio.gather(*map(fetch, prompts), *map(fetch_behind, back))
    return failed
