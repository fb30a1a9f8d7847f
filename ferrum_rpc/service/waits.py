"""What a call waits for before it is submitted, where caches of its sequences are not in the engine: parked ones come
back from their files, and what the second tier has of their prompts goes into the prefix cache.

The sequences are claimed meanwhile. All of it is one wait, outside of steps and of the engine's queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

from ferrum_rpc.core import Span
from ferrum_rpc.service.admission import Admitted
from ferrum_rpc.service.parking import unpark
from ferrum_rpc.service.records import Account, SequenceRecord
from ferrum_rpc.service.state import ServerState
from ferrum_rpc.service.tier import fetch_prefix
from ferrum_rpc.service.transaction import Failed


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


async def bring_in(
    state: ServerState,
    account: Account,
    goes_on: Callable[[], bool],
    parked: Sequence[SequenceRecord],
    prompts: Sequence[Span] = (),
) -> Failed:
    """Bring ``parked`` sequences back into the engine, and then what the second tier has of ``prompts`` into the prefix
    cache: the latter until ``goes_on()`` is false. Returns the refusals of sequences that could not be brought back."""
    failed: Failed = {}

    async def back(record: SequenceRecord) -> None:
        number = record.sequence  # it has another one if it fails
        refusal = await unpark(state, record)
        if refusal is not None:
            failed[number] = refusal

    async def fetch(span: Span) -> None:
        behind = span.sequence if span.parent is None else span.parent
        if span.prompt is not None and behind not in failed:
            await fetch_prefix(state, account, goes_on, behind, span.start, span.prompt, span.prefix)

    if parked:
        await asyncio.gather(*map(back, parked))
    if prompts:
        await asyncio.gather(*map(fetch, prompts))
    return failed
