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
from typing import TYPE_CHECKING

from ferrum_rpc.errors import InvalidRequest

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

    from ferrum_rpc.engine.ranks.messages import Line

_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


def follow(*, trusted: bool) -> int:
    """`ferrum-rpc rank`: the exit status."""
    from ferrum_rpc.engine.ranks.links import World, join

    world = World.of()
    if world is None:
        raise InvalidRequest(
            "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say where rank 0 is; torchrun and others set them",
            field="rank",
        )
    if world.rank == 0:
        raise InvalidRequest("RANK is 0: that is `ferrum-rpc serve`", field="rank")
    world.check_trust(trusted)
    sys.stderr.write(f"ferrum-rpc rank: rank {world.rank} goes to rank 0 at {world.address}:{world.port}\n")
    return _serve(world.rank, *join(world))


def _serve(number: int, line: Line, store: Store) -> int:
    from ferrum_rpc.engine.ranks.follower import Follower
    from ferrum_rpc.engine.ranks.links import machine
    from ferrum_rpc.runtime import keep_freed_memory

    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # rank 0 handles them, and ends this one
        signal.signal(each, signal.SIG_IGN)
    keep_freed_memory()
    follower = Follower(line, store)
    line.send("hello", number, socket.gethostname(), os.getpid(), machine())
    follower.run()
    return 0


def main() -> int:
    """Of a process that rank 0 has started."""
    if sys.platform == "linux":  # before anything that takes long
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    invitation = pickle.load(sys.stdin.buffer)  # noqa: S301 - by our own program
    from ferrum_rpc.engine.ranks.links import accept

    try:
        return _serve(invitation.number, *accept(invitation))
    except (OSError, EOFError):  # rank 0 is gone, and has said why
        return 1


if __name__ == "__main__":
    sys.exit(main())
