"""Checks of ranks before they start: the launcher's variables, and settings that cannot work.

A launcher on many machines (torchrun, Ray, LeaderWorkerSet) gives every process its ``RANK``, the number of ranks
``WORLD_SIZE``, and rank 0's address in ``MASTER_ADDR`` and ``MASTER_PORT``. Nothing else is needed. They are read
before torch is loaded, so that invalid settings are refused at once.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from typing import Final, NamedTuple

from ferrum_rpc.config import IDENTITY, ModelSettings
from ferrum_rpc.errors import InvalidRequest, NotSupported

MOST_PORTS: Final = 65_535


class World(NamedTuple):
    """``store_is_there``: the launcher, not rank 0, has the store by which the ranks find each other."""

    rank: int
    size: int
    address: str
    port: int
    store_is_there: bool

    @classmethod
    def of(cls, environment: Mapping[str, str] = os.environ) -> World | None:
        """The world of the launcher's variables. None: no launcher. Raises InvalidRequest if they are invalid."""
        given = [name for name in ("RANK", "WORLD_SIZE") if name in environment]
        if not given or (len(given) == 1 and "MASTER_ADDR" not in environment):
            return None
        numbers = {}
        for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
            if not environment.get(name, "").isdecimal():
                shown = repr(environment[name][:40]) if name in environment else "missing"
                raise InvalidRequest(f"{name} must be a number of at least 0, not {shown}", field="tensor_parallel")
            numbers[name] = int(environment[name])
        if not (address := environment.get("MASTER_ADDR", "")):
            raise InvalidRequest("MASTER_ADDR is missing: it must be the address of rank 0", field="tensor_parallel")
        rank, size, port = numbers.values()
        if not 0 < port <= MOST_PORTS:
            message = f"MASTER_PORT is {port}, and must be from 1 to {MOST_PORTS}"
            raise InvalidRequest(message, field="tensor_parallel")
        if rank >= size:
            raise InvalidRequest(f"RANK must be below WORLD_SIZE, {size}, not {rank}", field="tensor_parallel")
        return cls(rank, size, address, port, environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True")

    def check(self, settings: ModelSettings) -> None:
        """Raise InvalidRequest if the settings of rank 0 do not match."""
        if self.size != settings.ranks:
            raise InvalidRequest(
                f"WORLD_SIZE is {self.size}, and --tensor-parallel times --pipeline-parallel {settings.ranks}",
                field="tensor_parallel",
            )
        self.check_trust(settings.trust_rank_network)

    def check_trust(self, trusted: bool) -> None:
        """Raise InvalidRequest if ranks would communicate with other machines without permission."""
        if not trusted and not is_loopback(self.address):
            raise InvalidRequest(
                f"MASTER_ADDR {self.address} is another machine, or can be reached from others, and the traffic of "
                "ranks is not encrypted: set --trust-rank-network if only trusted machines share the network",
                field="trust_rank_network",
            )


def check_ranks(settings: ModelSettings) -> None:
    """Raise InvalidRequest or NotSupported if ranks cannot work, as far as known before torch is loaded."""
    if settings.ranks == 1:
        return
    world = World.of()
    if world is not None and world.size > 1:
        world.check(settings)
    elif not hasattr(os, "memfd_create"):
        raise InvalidRequest("one command starts all ranks on Linux only", field="tensor_parallel")
    if settings.path == IDENTITY:
        refuse_ranks(settings, "the identity model")
    if settings.model_backend == "hf":
        refuse_ranks(settings, "a model that transformers runs")


def refuse_ranks(settings: ModelSettings, what: str) -> None:
    """Raise NotSupported if there is more than one rank."""
    for field in ("tensor_parallel", "pipeline_parallel"):
        if (count := getattr(settings, field)) > 1:
            raise NotSupported(f"{field} {count}: {what} does not support ranks", field=field)


def ranks_here(settings: ModelSettings, environment: Mapping[str, str] = os.environ) -> int:
    """How many ranks will be on this machine, as far as known before they start."""
    world = World.of(environment)
    if world is None or world.size == 1:  # this process starts them
        return settings.ranks
    local = environment.get("LOCAL_WORLD_SIZE", "")
    return min(settings.ranks, max(1, int(local))) if local.isdecimal() else 1


def is_loopback(address: str) -> bool:
    """Whether it can be reached only from this machine."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
