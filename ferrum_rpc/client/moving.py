"""Sequences whose cache comes from another executor or from a file."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from pathlib import Path

from ferrum_rpc.client import transfer
from ferrum_rpc.client.outcomes import UnknownOutcome, new_request_id
from ferrum_rpc.client.owner import Owner
from ferrum_rpc.client.retry import LEASE_GONE, Deadline, fate_unknown
from ferrum_rpc.client.sender import Sender
from ferrum_rpc.errors import KvCorrupt
from ferrum_rpc.executor.v1 import forward_pb2, kv_transfer_pb2

log = logging.getLogger("ferrum_rpc.client")


async def export_file(source: Sender[Owner], path: Path, deadline: Deadline) -> None:
    """Write a sequence's cache to a file."""
    await transfer.check_offered(source.context, deadline)
    frames = transfer.exported(source.context, source.state.existing_handle(), 0, 0, deadline)
    await transfer.write_file(path, frames)


async def import_file(target: Sender[Owner], path: Path, deadline: Deadline) -> None:
    """Import a file that `export_file` wrote into the new sequence ``target``."""
    await transfer.check_offered(target.context, deadline)
    layout = await asyncio.to_thread(transfer.read_layout, path)
    await import_frames(target, layout, lambda first: transfer.file_frames(path, first), deadline)


async def import_frames(
    target: Sender[Owner], layout: kv_transfer_pb2.KvLayout, frames: transfer.Frames, deadline: Deadline
) -> bool:
    """Import ``frames`` into the new sequence ``target``. If K or V are not finite, prefill its tokens instead and
    return False. After a failure the request id is kept: the same call continues, and a release abandons the import."""
    tokens = list(layout.token_ids)
    await target.owner.find(deadline, tokens)
    state, connection = target.state, target.owner.connection
    context, leases = connection.context, connection.leases
    request_id = state.request_id(content := ("import", tokens))
    create = forward_pb2.CreateOptions()
    create.CopyFrom(state.create)
    owned = not create.lease_id
    if owned:
        known = state.lease_id if state.creation is not None else ""
        create.lease_id = state.lease_id = known or await leases.current(deadline)
    try:
        try:
            handle = await transfer.brought(context, layout, frames, create, request_id, deadline)
        except LEASE_GONE as error:
            if not owned or error.field != "lease_id":  # of the source, or the program's own
                raise
            leases.lost(create.lease_id, error)
            request_id, create.lease_id = new_request_id(), await leases.current(deadline)
            state.lease_id = create.lease_id
            handle = await transfer.brought(context, layout, frames, create, request_id, deadline)
    except BaseException as error:
        if isinstance(error, KvCorrupt) and error.not_finite:
            log.warning("a cache cannot be used, its %s tokens are computed again: %s", len(tokens), error)
            state.restart(tokens)
            state.creation = None
            state.create, shared = forward_pb2.CreateOptions(), state.create
            state.create.CopyFrom(shared)
            state.create.adapter = layout.adapter
            await target.feed_lost(deadline)
            return False
        give_up = partial(transfer.abandoned, context, request_id)
        state.creation = UnknownOutcome(content, request_id, give_up, unknown=fate_unknown(error))
        raise
    state.handle, state.creation = handle, None
    if state.tokens is not None:
        state.tokens = tokens
    state.pieces.fed(0, len(tokens), (await context.info(deadline)).limits.exact_span_tokens)
    connection.live.add(state)
    return True


async def move(owner: Owner, target: Sender[Owner], transport: transfer.Transport, deadline: Deadline) -> None:
    """Copy the cache of the sequence of ``owner`` into the ``target``. The source does not change."""
    context, state = owner.connection.context, owner.state
    there = target.owner.connection.context
    for each in (context, there):
        await transfer.check_offered(each, deadline, transport)
    handle = state.existing_handle()
    layout = await transfer.layout_of(context, handle, deadline)
    size = await transfer.chunk_tokens(there, layout, deadline)

    async def frames(first: int) -> AsyncGenerator[bytes, None]:
        async with aclosing(transfer.exported(context, handle, first, size, deadline, transport)) as every:
            async for frame in every:
                if not frame.startswith(transfer.LAYOUT):
                    yield frame

    if await import_frames(target, layout, frames, deadline):
        target.state.pieces = state.pieces.upto(handle.seq_len)
