"""R7: what the client repeats by itself is safe, and bounded. Counted at the far end of the wire."""

from __future__ import annotations

from collections import Counter, deque
from typing import Final

import grpc

from ferrum_rpc.client import NEVER_RESEND, ExecutorClient
from ferrum_rpc.errors import ExecutorError
from tests.faults.figures import Figures, at_least, at_most, exactly
from tests.faults.sizes import Size
from tests.support.lossy import proxied
from tests.support.serving import serve_identity

MOST_ATTEMPTS: Final = 4
FOR_EVER: Final = 100
"""Attempts that fail: more than any call makes."""


async def r7_retries_are_safe(size: Size) -> Figures:
    """Let every code fail every attempt, count the attempts of one call; then fail a whole burst of calls."""
    attempts: Counter[str] = Counter()
    burst = 10 * size.retried_calls
    async with serve_identity() as served, proxied(served.target) as (far_end, target):
        for code in grpc.StatusCode:
            if code is grpc.StatusCode.OK:
                continue
            for _ in range(size.retried_calls):
                # A client of its own for each call: the throttle of an earlier failure must not flatter the count.
                async with ExecutorClient(target, resend=NEVER_RESEND, release_timeout_s=0.1) as client:
                    await client.info()
                    far_end.code, far_end.faults = code, deque(["refuse"] * FOR_EVER)
                    far_end.calls.clear()
                    try:
                        await client.sequence().prefill([1, 2, 3])
                        attempts["answered"] += 1
                    except ExecutorError:
                        attempts[code.name] = max(attempts[code.name], far_end.calls["Prefill"])
                    far_end.faults.clear()
        async with ExecutorClient(target, resend=NEVER_RESEND) as client:
            await client.info()
            far_end.code, far_end.faults = grpc.StatusCode.UNAVAILABLE, deque(["refuse"] * burst * FOR_EVER)
            for _ in range(burst):
                try:
                    await client.status()
                    attempts["answered"] += 1
                except ExecutorError:
                    pass
            throttled = far_end.calls["GetStatus"]
    others = max(count for name, count in attempts.items() if name != "UNAVAILABLE")
    return Figures(
        "Retries are safe by default",
        at_most("attempts of a call that fails UNAVAILABLE", attempts["UNAVAILABLE"], MOST_ATTEMPTS),
        at_least("attempts of it, so that there is a retry at all", attempts["UNAVAILABLE"], 2),
        exactly("attempts of a call that fails with another code", others, 1),
        exactly("calls answered by a server that answers none", attempts["answered"], 0),
        at_most("attempts per call in a long outage", throttled / burst, 2.0),
        facts={"attempts": dict(attempts), "calls in the outage": burst},
    )
