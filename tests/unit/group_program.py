"""Rank 1 of 2 in a process of its own: ``python -m tests.unit.group_program PORT KIND...``. Sums once in a group of
each kind, then waits to be killed."""

from __future__ import annotations

import sys
import time

import torch
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from ferrum_rpc.distributed import shared_memory
from ferrum_rpc.distributed.gloo import GlooGroup
from ferrum_rpc.distributed.group import Group


def join(kind: str, store: TCPStore) -> Group:
    ours = PrefixStore(kind, store)
    return shared_memory.join(ours, 1, 2) if kind == "shared memory" else GlooGroup(ours, 1, 2)


def main(port: int, *kinds: str) -> None:
    """Until killed."""
    store = TCPStore("127.0.0.1", port, is_master=False)
    groups = [join(kind, store) for kind in kinds]
    for group in groups:
        group.all_reduce(torch.full((1024,), 2.0))
    time.sleep(60)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
