"""Which transport a request takes: the session where one is wanted and offered, else unary calls."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Sequence

from ferrum_rpc.client.context import Context
from ferrum_rpc.client.info import Capability
from ferrum_rpc.client.policy import Deadline
from ferrum_rpc.client.session import SessionTransport
from ferrum_rpc.client.transport import Operation, Transport
from ferrum_rpc.core import HandleRef
from ferrum_rpc.errors import ExecutorError

log = logging.getLogger("ferrum_rpc.client")


class Dispatcher:
    """A client's transports. ``session`` is None where the client wants none."""

    def __init__(self, context: Context, unary: Transport, session: SessionTransport | None) -> None:
        self.session = session
        self._context = context
        self._unary = unary
        self._fell_back = False

    @property
    def ready(self) -> Transport | None:
        """The transport; None where that is a session which is not open, or not yet known to be offered."""
        session = self.session
        return self._unary if session is None else session if session.is_open else None

    async def transport(self, deadline: Deadline) -> Transport:
        """The session where one is wanted and offered, else unary calls."""
        session, ready = self.session, self.ready
        if session is None or ready is not None:
            return ready or self._unary
        if Capability.SESSION in (await self._context.info(deadline)).capabilities:
            return session
        if not self._fell_back:
            self._fell_back = True
            log.warning("the executor offers no sessions (capability SESSION): requests go as unary calls")
        return self._unary

    async def operate(
        self, operations: Sequence[Operation], deadline: Deadline
    ) -> list[list[HandleRef] | ExecutorError]:
        """The handles that each of them left, or its refusal, sent in messages of as many as the executor takes. The
        refusal of a whole message is that of each in it."""

        async def sent(part: Sequence[Operation]) -> Sequence[list[HandleRef] | ExecutorError]:
            try:
                operated = await (await self.transport(deadline)).operate(part, deadline)
            except ExecutorError as error:
                return [error] * len(part)
            if operated.pressure is not None:
                self._context.note_pressure(operated.pressure)
            return operated.outcomes

        info = self._context.known_info
        most = max(1, len(operations)) if info is None else info.limits.max_batch_items
        parts = [sent(operations[first : first + most]) for first in range(0, len(operations), most)]
        outcomes = [await parts[0]] if len(parts) == 1 else await asyncio.gather(*parts)  # a task for each
        return list(itertools.chain(*outcomes))

    async def close(self, deadline: Deadline) -> None:
        """End the session; requests go as unary calls from now on. Does not raise."""
        session, self.session = self.session, None
        if session is not None:
            await session.close(deadline)
