"""Agents as those of the nixl package are, within one process: what `Fabric.agent` makes reads the others' memory."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any


class RemoteDisconnectError(Exception):
    pass


@dataclass
class Fabric:
    """``agents`` by name. ``stuck``: reads do not end. ``held``: nor can they be given up. ``dead``: agents whose
    processes are gone. Of all ``reads`` the one numbered ``spoil_at`` brings not what is there."""

    agents: dict[str, Agent] = field(default_factory=dict)
    dead: set[str] = field(default_factory=set)
    stuck: bool = False
    held: bool = False
    spoil_at: int = 0
    reads: int = 0

    def agent(self, name: str) -> Agent:
        agent = self.agents[name] = Agent(self, name)
        return agent


@dataclass(eq=False)
class _Transfer:
    to: int
    source: int
    size: int
    peer: str
    notification: bytes


class Agent:
    def __init__(self, fabric: Fabric, name: str) -> None:
        self.fabric, self.name = fabric, name
        self.region = range(0)
        self.known: set[str] = set()
        self.under_way: set[_Transfer] = set()
        self.notifications: list[bytes] = []

    def register_memory(self, descriptors: Any, kind: str) -> None:
        [(address, size, _, _)] = descriptors
        self.region = range(address, address + size)

    def get_agent_metadata(self) -> bytes:
        return self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> bytes:
        name = metadata.decode()
        if name not in self.fabric.agents or name in self.fabric.dead:
            raise RuntimeError("connection refused")
        self.known.add(name)
        return metadata

    def remove_remote_agent(self, name: str) -> None:
        self.known.remove(name)

    def get_xfer_descs(self, descriptors: Any, kind: str) -> Any:
        [(address, size, _)] = descriptors
        return address, size

    def initialize_xfer(self, operation: str, here: Any, there: Any, peer: str, notification: bytes) -> _Transfer:
        assert operation == "READ" and here[1] == there[1] and peer in self.known
        for (address, size), agent in ((here, self), (there, self.fabric.agents[peer])):
            if address not in agent.region or address + size > agent.region.stop:
                raise LookupError("no such memory")
        transfer = _Transfer(here[0], there[0], here[1], peer, notification)
        self.under_way.add(transfer)
        return transfer

    def transfer(self, transfer: _Transfer) -> str:
        return "PROC"

    def check_xfer_state(self, transfer: _Transfer) -> str:
        if transfer.peer in self.fabric.dead:
            raise RemoteDisconnectError
        if self.fabric.stuck:
            return "PROC"
        self.fabric.reads += 1
        ctypes.memmove(transfer.to, transfer.source, transfer.size)
        if self.fabric.reads == self.fabric.spoil_at:
            ctypes.memset(transfer.to, 0x55, 1)
        self.fabric.agents[transfer.peer].notifications.append(transfer.notification)
        return "DONE"

    def release_xfer_handle(self, transfer: _Transfer) -> None:
        if self.fabric.held:
            raise RuntimeError("it is under way")
        self.under_way.remove(transfer)

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        came, self.notifications = self.notifications, []
        return {"peer": [*came, b"of another program"]} if came else {}
