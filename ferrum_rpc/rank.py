"""The program of a rank other than the first: `ferrum-rpc serve` starts it, or `ferrum-rpc rank` runs it.

It has no port and no settings but those that rank 0 sends. It ends with rank 0, for whatever reason that ends.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from typing import TYPE_CHECKING, NoReturn

from ferrum_rpc.errors import InvalidRequest

if TYPE_CHECKING:
    from torch.distributed import Store

    from ferrum_rpc.engine.channel import Channel


def follow(*, trusted: bool) -> int:
    """`ferrum-rpc rank`: the exit status."""
    from ferrum_rpc.engine.ranks.world import World

    world = World.of()
    if world is None:
        raise InvalidRequest(
            "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT must be set; torchrun and others set them",
            field="rank",
        )
    if world.rank == 0:
        raise InvalidRequest("RANK must not be 0: start rank 0 with `ferrum-rpc serve`", field="rank")
    world.check_trust(trusted)
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, _stop_waiting)
    sys.stderr.write(f"ferrum-rpc rank: rank {world.rank} goes to rank 0 at {world.address}:{world.port}\n")
    from ferrum_rpc.engine.ranks.links import join

    why = _serve(world.rank, *join(world))
    if why:
        sys.stderr.write(f"ferrum-rpc rank: rank {world.rank} ends: {why}\n")
    return 1 if why else 0


def _stop_waiting(number: int, frame: object) -> NoReturn:
    """End on a signal while there is no rank 0 that would end this one. The first process of a container ignores
    signals that it does not handle."""
    sys.stderr.write("ferrum-rpc rank: stopped before rank 0 was there\n")
    sys.stderr.flush()
    os._exit(128 + number)  # `sys.exit` may abort: a thread waits in the store of torch, which the interpreter leaves


def _serve(number: int, channel: Channel, store: Store) -> str:
    """The result of `Follower.run`."""
    from ferrum_rpc.engine.channel import leave_signals
    from ferrum_rpc.engine.ranks.follower import Follower
    from ferrum_rpc.engine.ranks.links import machine
    from ferrum_rpc.runtime import keep_freed_memory

    leave_signals()
    keep_freed_memory()
    follower = Follower(channel, number, store)
    channel.send(("hello", number, socket.gethostname(), os.getpid(), machine()))
    return follower.run()


def main() -> int:
    """The program of a process that rank 0 has started, with its number and two descriptors."""
    from ferrum_rpc.engine.channel import end_with_parent

    end_with_parent()  # before anything that takes long
    number, *inherited = map(int, sys.argv[1:])
    from ferrum_rpc.engine.ranks.links import accept

    try:
        return 1 if _serve(number, *accept(*inherited)) else 0  # rank 0 says why
    except (OSError, EOFError):  # it is gone
        return 1


if __name__ == "__main__":
    sys.exit(main())
