"""Sequences whose cache comes from elsewhere: from another executor, or from a file."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial

from ferrum_rpc.client import transfer
from ferrum_rpc.client.feeding import Feeding
from ferrum_rpc.client.pieces import Pieces
from ferrum_rpc.client.recovery import Lost
from ferrum_rpc.client.retry import LEASE_GONE, Deadline, fate_unknown
from ferrum_rpc.client.state import SequenceMisuseError, SequenceState, UnknownOutcome, new_request_id
from ferrum_rpc.errors import KvCorrupt
from ferrum_rpc.executor.v1 import forward_pb2, kv_transfer_pb2

log = logging.getLogger("ferrum_rpc.client")


class Movable(Feeding):
    """The base of a sequence that may be made of what another one has in the cache."""

    def _claim_new(self, what: str) -> SequenceState:
        """Begin a call that only a sequence can make which nothing was fed to."""
        state = self._state.claim(what)
        if state.handle is not None or state.parent is not None or self._lost is not None:
            state.busy = ""
            raise SequenceMisuseError(f"{what}: this sequence has been fed already, make a new one")
        return state

    async def _import(self, layout: kv_transfer_pb2.KvLayout, frames: transfer.Frames, deadline: Deadline) -> bool:
        """Make this sequence of what comes; where K or V are not finite, of its tokens (False). Where that fails the
        request id is kept, for the same again, or for the release, which gives the import up."""
        tokens = list(layout.token_ids)
        await self._find_owner(deadline, tokens)
        state, context, leases = self._state, self._context, self._connection.leases
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
                await self._prefill_instead(layout, deadline)
                return False
            give_up = partial(transfer.abandoned, context, request_id)
            state.creation = UnknownOutcome(content, request_id, give_up, unknown=fate_unknown(error))
            raise
        state.handle, state.creation = handle, None
        if state.tokens is not None:
            state.tokens = tokens
        state.pieces.fed(0, len(tokens), (await context.info(deadline)).limits.exact_span_tokens)
        self._connection.live.add(state)
        return True

    async def _prefill_instead(self, layout: kv_transfer_pb2.KvLayout, deadline: Deadline) -> None:
        """Feed the tokens of a cache that cannot be imported."""
        state, tokens = self._state, list(layout.token_ids)
        state.restart()
        state.creation = None
        state.create, shared = forward_pb2.CreateOptions(), state.create
        state.create.CopyFrom(shared)
        state.create.adapter = layout.adapter
        self._lost = Lost(tokens, 0, Pieces())
        await self._feed_lost(deadline)

    async def _move(self, target: Movable, transport: transfer.Transport, deadline: Deadline) -> None:
        """Make ``target`` of this one, which stays as it is."""
        for each in (self._context, target._context):
            await transfer.check_offered(each, deadline, transport)
        context, handle = self._context, self._handle()
        layout = await transfer.layout_of(context, handle, deadline)
        size = await transfer.chunk_tokens(target._context, layout, deadline)

        async def frames(first: int) -> AsyncGenerator[bytes, None]:
            async with aclosing(transfer.exported(context, handle, first, size, deadline, transport)) as every:
                async for frame in every:
                    if not frame.startswith(transfer.LAYOUT):
                        yield frame

        if await target._import(layout, frames, deadline):
            target._state.pieces = self._state.pieces.upto(handle.seq_len)
