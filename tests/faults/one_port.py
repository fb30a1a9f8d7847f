"""R18: one server per port. The second one says which port it could not have, and ends at once.

By default gRPC binds with SO_REUSEPORT, and two servers would share the port in silence. Run as a program, this file is
the second server: it imports all that it needs, prints the time, and then is `ferrum-rpc serve`. What is measured is
from there to the end of the process: the attempt to bind, the message, the exit, not the interpreter's start.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

import ferrum_rpc.serve  # noqa: F401 - all imports before the clock starts
from ferrum_rpc.cli import main
from tests.faults.figures import Figures, at_most, exactly
from tests.faults.process import ROOT, dial, environment, serving
from tests.faults.sizes import Size
from tests.wiring import prefill


async def r18_one_server_per_port(size: Size) -> Figures:
    """Try to start second servers on the port of a first one, which goes on."""
    took: list[float] = []
    named = shared = 0
    async with serving() as first, dial(first.target) as client:
        for _ in range(size.second_servers):
            command = (sys.executable, "-m", "tests.faults.one_port", str(first.port))
            pipe = asyncio.subprocess.PIPE
            second = await asyncio.create_subprocess_exec(
                *command, cwd=ROOT, env=environment(), stdout=pipe, stderr=pipe
            )
            out, log = await second.communicate()
            took.append(time.monotonic() - float(out))
            shared += second.returncode == 0
            last = json.loads(log.splitlines()[-1])
            named += last["event"] == "startup_failed" and str(first.port) in last["error"]
        served = (await prefill(client, [1, 2, 3])).seq_len
    return Figures(
        "R18",
        "One server per port",
        (
            at_most(
                "from the second server's attempt to bind to its end, worst", max(took), 1 if size.absolute else 10, "s"
            ),
            exactly("second servers that did not name the port", size.second_servers - named, 0),
            exactly("second servers that ended as if all were well", shared, 0),
            exactly("tokens that the first one served after", served, 3),
        ),
        {"attempts": size.second_servers},
    )


if __name__ == "__main__":
    print(time.monotonic(), flush=True)  # the clock of the whole machine
    main(["serve", "identity", "--port", sys.argv[1], "--log-format", "json"])
