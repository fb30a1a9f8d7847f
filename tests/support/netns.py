"""A network of its own: a namespace, a veth pair, packet loss by nftables. Needs root, `ip` and `nft`."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Final

TOOLS: Final = ("ip", "nft")


class NoNetwork(RuntimeError):
    """There can be no namespace here; the message says why."""


def missing(tools: Sequence[str] = TOOLS) -> str | None:
    """Why there can be no namespace here, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    absent = [tool for tool in tools if shutil.which(tool) is None]
    return f"not installed: {', '.join(absent)}" if absent else None


async def _run(*command: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    _, errors = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)}: {errors.decode().strip()}")


@dataclass(frozen=True)
class Network:
    """The namespace ``name``, where ``host`` is; everything from and to it crosses one wire, whose end here is
    ``here``."""

    name: str
    host: str
    here: str

    @property
    def prefix(self) -> tuple[str, ...]:
        """Before a command that shall run inside."""
        return ("ip", "netns", "exec", self.name)

    async def cut(self) -> None:
        """Take the wire away."""
        await _run("ip", "-n", self.name, "link", "set", "inside", "down")

    async def drop(self, percent: int) -> None:
        """Lose so many of 100 packets, each way. 100: the wire is cut; 0: it is whole."""
        nft = (*self.prefix, "nft")
        await _run(*nft, "flush ruleset")
        if not percent:
            return
        await _run(*nft, "add table inet faults")
        for hook, name in (("input", "iifname"), ("output", "oifname")):
            await _run(*nft, f"add chain inet faults {hook} {{ type filter hook {hook} priority 0; }}")
            await _run(*nft, f"add rule inet faults {hook} {name} != lo numgen random mod 100 < {percent} drop")


@asynccontextmanager
async def network() -> AsyncIterator[Network]:
    """A namespace that lives as long as the context. Raises RuntimeError where the kernel refuses."""
    number = os.getpid() % 4096
    name, outside = f"ferrum{number}", f"ferrum{number}o"
    subnet = f"10.213.{number >> 4 & 0xFF}.{(number & 0xF) << 4}".rpartition(".")
    base, last = subnet[0], int(subnet[2])
    net = Network(name, f"{base}.{last + 2}", f"{base}.{last + 1}")
    await _run("ip", "netns", "add", name)
    try:
        await _run("ip", "link", "add", outside, "type", "veth", "peer", "name", "inside", "netns", name)
        await _run("ip", "addr", "add", f"{net.here}/30", "dev", outside)
        await _run("ip", "link", "set", outside, "up")
        for command in (f"addr add {net.host}/30 dev inside", "link set inside up", "link set lo up"):
            await _run("ip", "-n", name, *command.split())
        yield net
    finally:
        with suppress(RuntimeError):
            await _run("ip", "link", "del", outside)
        await _run("ip", "netns", "del", name)
