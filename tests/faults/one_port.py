"""R18: one server per port. The second one says which port it could not have, and ends at once.

By default gRPC binds with SO_REUSEPORT, and two servers would share the port in silence. The second server is forked
from a process that has imported everything: what is measured is the attempt to bind, the message and the exit, not the
interpreter's start.
"""

from __future__ import annotations

import time

from tests.faults.figures import Figures, at_most, exactly
from tests.faults.sizes import Size
from tests.support.process import dial, serving, started
from tests.support.wiring import prefill


async def r18_one_server_per_port(size: Size) -> Figures:
    """Try to start second servers on the port of a first one, which goes on."""
    took: list[float] = []
    named = shared = 0
    async with serving() as first, dial(first.target) as client:
        for _ in range(size.second_servers):
            began = time.monotonic()
            second = await started(["serve", "identity", "--port", str(first.port), "--log-format", "json"])
            shared += await second.ended() == 0
            took.append(time.monotonic() - began)
            last = second.events[-1]
            named += last["event"] == "startup_failed" and str(first.port) in last["error"]
        served = (await prefill(client, [1, 2, 3])).seq_len
    return Figures(
        "One server per port",
        at_most(
            "from the second server's attempt to bind to its end, worst", max(took), 1 if size.absolute else 10, "s"
        ),
        exactly("second servers that did not name the port", size.second_servers - named, 0),
        exactly("second servers that ended as if all were well", shared, 0),
        exactly("tokens that the first one served after", served, 3),
        facts={"attempts": size.second_servers},
    )
