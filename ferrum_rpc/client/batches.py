"""Calls to one executor for many sequences."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as ListOf
from contextlib import ExitStack

from ferrum_rpc.client.answer import Answer
from ferrum_rpc.client.connection import Connection
from ferrum_rpc.client.owner import Owner
from ferrum_rpc.client.retry import Deadline
from ferrum_rpc.client.sender import Sender
from ferrum_rpc.client.state import Item, SequenceState, followed_first
from ferrum_rpc.client.transport import Feed
from ferrum_rpc.core import HandleRef
from ferrum_rpc.errors import DeadlineExceeded, ExecutorError


async def forward_at(
    connection: Connection, feed: Feed, items: ListOf[Item], deadline: Deadline, *, all_or_nothing: bool = False
) -> list[Answer | ExecutorError]:
    """Items at one executor; ``results[i]`` answers ``items[i]``. Items that others of them follow are sent first."""
    claimed: list[Item] = []
    try:
        for item in items:
            item.state.claim_item(item, feed.name)
            claimed.append(item)
            item.state.check(item)
        if first := followed_first(items):
            await all_sent(first, deadline)
        return await connection.forward(feed, items, deadline, all_or_nothing=all_or_nothing) if items else []
    finally:
        for item in claimed:
            if item.unsent:
                item.sent()
            item.state.leave_item(item)


async def all_sent(items: ListOf[Item], deadline: Deadline) -> None:
    """Wait until the calls of other ``items`` have sent them, or have ended. Raises `DeadlineExceeded`, of known
    outcome."""
    try:
        async with asyncio.timeout(deadline.remaining()):
            for item in items:
                await item.until_sent()
    except TimeoutError:
        raise DeadlineExceeded("the item that this one follows was not sent in time; nothing was sent") from None


async def truncate_at(
    connection: Connection, pairs: ListOf[tuple[Sender[Owner], int]], deadline: Deadline
) -> list[ExecutorError | None]:
    """Roll back sequences at one executor, each to its length. None for each that was rolled back."""
    with ExitStack() as claims:
        rollbacks = list[tuple[SequenceState, HandleRef, int]]()
        for sender, length in pairs:
            claims.enter_context(sender.claim("truncate"))
            await sender.settle(deadline)
            sender.check_settled("truncate")
            rollbacks.append((sender.state, sender.state.existing_handle(), length))
        return await connection.truncate(rollbacks, deadline)


async def release_at(connection: Connection, senders: ListOf[Sender[Owner]]) -> list[ExecutorError | None]:
    """Free sequences at one executor. None for each that is free."""
    held = list(dict.fromkeys(each for each in senders if not each.state.released))
    for sender in held:
        sender.state.check_idle("release")
    ending = [task for sender in held for task in sender.leave_stream()]
    refusals = dict(zip(held, await connection.release([each.state for each in held], ending), strict=True))
    return [refusals.get(each) for each in senders]
