"""Rank 1 of 2 in a process of its own: ``python -m tests.unit.group_program KIND PORT``. Sums once, then waits to be
killed."""

from __future__ import annotations

import sys
import time

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ferrum_rpc.distributed import shared_memory
from ferrum_rpc.distributed.gloo import GlooGroup
from ferrum_rpc.distributed.group import Group


def main(kind: str, port: int) -> None:
    """Until killed."""
    store = TCPStore("127.0.0.1", port, is_master=False)
    group: Group = shared_memory.join(store, 1, 2) if kind == "shared memory" else GlooGroup(store, 1, 2)
    group.all_reduce(torch.full((1024,), 2.0))
    time.sleep(60)
    group.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
