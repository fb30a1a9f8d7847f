"""Fair shares between tenants: start-time fair queueing (Goyal, Vin and Cheng, 1996), in tokens.

Each request gets a turn, a point of virtual time, when it arrives. A tenant's next turn comes after the cost of its
requests before; a tenant without requests begins at the present virtual time, so that it neither saves up time nor
waits behind a queue of others. Requests are served in the order of their turns. So tenants that all have requests
waiting get tokens in proportion to their weights, however many requests each has sent.
"""

from __future__ import annotations

from typing import Final

TENANTS_KEPT: Final = 4096
"""Tenants that are remembered before those without a debt are forgotten."""


class FairShares:
    """The virtual time, and the next turn of each tenant."""

    def __init__(self) -> None:
        self._now = 0.0
        self._next: dict[str, float] = {}

    def turn(self, tenant: str, tokens: int, weight: float = 1.0) -> float:
        """The turn of a request of at most ``tokens``, prompt included. A tenant of twice the ``weight`` gets twice the
        tokens."""
        if len(self._next) >= TENANTS_KEPT:
            self._next = {each: turn for each, turn in self._next.items() if turn > self._now}
        turn = max(self._now, self._next.get(tenant, 0.0))
        self._next[tenant] = turn + tokens / weight
        return turn

    def began(self, turn: float) -> None:
        """A request with this turn is being served."""
        self._now = max(self._now, turn)

    def unused(self, tenant: str, tokens: int, weight: float = 1.0) -> None:
        """A request has ended and left so many of its tokens: the tenant's next request comes earlier by them."""
        if tenant in self._next:
            self._next[tenant] -= tokens / weight
