"""The program of a rank that is not the first: `ferrum-rpc serve` starts it, or `ferrum-rpc rank` is it.

It has no port and no settings but those that rank 0 tells it. It ends with rank 0, whatever that ended of.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import socket
import sys

from ferrum_rpc.engine.ranks.follower import Follower
from ferrum_rpc.engine.ranks.links import World, accept, join, machine
from ferrum_rpc.engine.ranks.messages import Line
from ferrum_rpc.errors import InvalidRequest
from ferrum_rpc.runtime import keep_freed_memory

_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


def follow(*, trusted: bool) -> int:
    """`ferrum-rpc rank`: the exit status."""
    world = World.of()
    if world is None:
        raise InvalidRequest(
            "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say where rank 0 is; torchrun and others set them",
            field="rank",
        )
    if not 0 < world.rank < world.size:
        raise InvalidRequest(f"RANK is {world.rank}: rank 0 is `ferrum-rpc serve`", field="rank")
    world.check_trust(trusted)
    line, store = join(world)
    return _serve(world.rank, line, Follower(line, store))


def _serve(number: int, line: Line, follower: Follower) -> int:
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # rank 0 handles them, and ends this one
        signal.signal(each, signal.SIG_IGN)
    keep_freed_memory()
    line.send("hello", number, socket.gethostname(), os.getpid(), machine())
    follower.run()
    return 0


def main() -> int:
    """Of a process that rank 0 has started."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    invitation = pickle.load(sys.stdin.buffer)  # noqa: S301 - by our own program
    line, store = accept(invitation)
    return _serve(invitation.number, line, Follower(line, store))


if __name__ == "__main__":
    sys.exit(main())
