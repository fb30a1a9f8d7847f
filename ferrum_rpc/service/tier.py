"""Reading the second tier of the prefix cache: before a step, and never in it.

A step that read a disk would hold up all that are in it. So what the tier has of a prompt is brought into the prefix
cache by operations of their own, a piece at a time, and other steps run between two pieces.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial

from ferrum_rpc.core import PrefixUse, TokenArray
from ferrum_rpc.engine.commands import Command, Operations, Result
from ferrum_rpc.errors import ExecutorError
from ferrum_rpc.service.asking import between_steps
from ferrum_rpc.service.records import Account
from ferrum_rpc.service.state import ServerState


async def fetch_prefix(  # noqa: PLR0917 - those of the runner's method, and whose they are
    state: ServerState,
    account: Account,
    goes_on: Callable[[], bool],
    sequence: int,
    start: int,
    prompt: TokenArray,
    prefix: PrefixUse | None,
) -> None:
    """Bring what the second tier has of ``prompt`` (int32 [n]) behind the first ``start`` tokens of a sequence into the
    prefix cache: see `Operations.fetch_prefix`. The engine reads one piece at a time for all calls, and callers take
    turns. ``goes_on()`` is called before each piece, and false ends it early. A tier that cannot be read has
    nothing."""
    size = state.engine.cache.block_size
    left = (start + len(prompt)) // size - start // size

    async def piece(operation: Callable[..., Result]) -> Result | None:
        command = Command(operation, sequence, start, prompt, prefix)
        return await between_steps(state.engine.submit, command) if goes_on() else None

    with suppress(ExecutorError):  # what was not read is computed, and a lost device refuses the call itself
        if left > 0 and state.model.states is not None:
            async with state.tier_reads.held(((account, 1),)):  # until it is there: one checkpoint comes at a time
                while await piece(Operations.fetch_states):
                    pass
        await _fetch(state, account, partial(piece, Operations.fetch_prefix), left)


async def fetch_window(
    state: ServerState, account: Account, goes_on: Callable[[], bool], sequence: int, start: int
) -> None:
    """As `fetch_prefix`, of the tokens of a sequence itself, which goes back behind its window, or a fork of it: see
    `Operations.fetch_window`."""
    window, size = state.device.window_tokens or 0, state.engine.cache.block_size

    async def piece() -> int | None:
        command = Command(Operations.fetch_window, sequence, start)
        return await between_steps(state.engine.submit, command) if goes_on() else None

    with suppress(ExecutorError):  # what was not read is computed, and a lost device refuses the call itself
        await _fetch(state, account, piece, window // size + 2)


async def _fetch(state: ServerState, account: Account, piece: Callable[[], Awaitable[int | None]], left: int) -> None:
    """Read pieces of up to ``left`` blocks in all."""
    while left > 0:
        async with state.tier_reads.held(((account, 1),)):
            fetched = await piece()
        if not fetched:
            return
        left -= fetched
