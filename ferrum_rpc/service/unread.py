"""Answers on their way: how many bytes may wait for clients to read them, of one connection, one caller and in all.

A client that asks for large answers and does not read them holds them in the server's memory, twice their size: gRPC
takes as much from a handler as it gives, however little the client takes from gRPC. So room for a large answer is taken
when its call is admitted, and given back when gRPC has sent the answer or the call is over.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from ferrum_rpc.core import Limits
from ferrum_rpc.errors import QueueFull
from ferrum_rpc.service.records import Account, Resource

UNCOUNTED_BYTES: Final = 1 << 14
"""Smaller answers are not counted: a connection's streams bound them."""

RETRY_AFTER_S: Final = 0.05


class Unread:
    """The bytes that wait, by peer and in all. Bound to the running event loop."""

    def __init__(self, limits: Limits) -> None:
        largest = max(limits.max_response_bytes, limits.max_session_response_bytes)  # finds room where nothing waits
        self._most = max(limits.max_unread_bytes, largest)
        self._most_of_one = max(limits.max_unread_bytes // 2, largest)
        self._of: dict[str, int] = {}
        self.bytes = 0

    def take(self, peer: str, account: Account, size: int) -> Callable[[], None]:
        """Take room for an answer of up to ``size`` bytes, above `UNCOUNTED_BYTES`, to ``peer``; call what is returned
        once, when it has left. Raises `QueueFull`, having changed nothing."""
        mine = self._of.get(peer, 0)
        if mine + size > self._most_of_one:
            raise self._full(f"{mine} bytes of answers to this connection are not read yet")
        if account.held[Resource.UNREAD_BYTES] + size > account.most[Resource.UNREAD_BYTES]:
            raise self._full(f"{account.held[Resource.UNREAD_BYTES]} bytes of answers to you are not read yet")
        if self.bytes + size > self._most:
            raise self._full(f"{self.bytes} bytes of answers are not read yet")
        self.bytes += size
        self._of[peer] = mine + size
        account.take(Resource.UNREAD_BYTES, size)
        return partial(self._give, peer, account, size)

    def _give(self, peer: str, account: Account, size: int) -> None:
        self.bytes -= size
        left = self._of[peer] - size
        if left:
            self._of[peer] = left
        else:
            del self._of[peer]
        account.give(Resource.UNREAD_BYTES, size)

    def _full(self, what: str) -> QueueFull:
        return QueueFull(
            f"{what}; read them, or ask for less. Nothing was started",
            metadata={"max_unread_bytes": self._most, "unread_bytes": self.bytes},
            retry_after_s=RETRY_AFTER_S,
        )
