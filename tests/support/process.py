"""A real `ferrum-rpc serve` process: started, watched from outside, signalled, and gone at the end of the test."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2_grpc

from ferrum_rpc.executor.v1 import executor_control_pb2_grpc, kv_transfer_pb2_grpc, model_executor_pb2_grpc
from tests.support.calls import Calls
from tests.support.forking import LIMIT, Forked, fork

ROOT: Final = Path(__file__).parents[2]
START_S: Final = 120.0
SAYS_S: Final = 600.0
"""For a word of a program: at full size it may say so when thousands of calls are under way."""
UNLIMITED: Final = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))


class ServerProcess:
    """The process, seen from outside: its log events, its memory, its descriptors, its end."""

    def __init__(self, process: asyncio.subprocess.Process | Forked) -> None:
        self._process = process
        self._heard = asyncio.Condition()
        self.target = ""
        self.events: list[dict[str, Any]] = []
        self.other_lines: list[str] = []
        self.reading = asyncio.create_task(self._read())

    @property
    def pid(self) -> int:
        return self._process.pid

    def children(self) -> list[int]:
        """The process ids of its children, of which an engine's process is one."""
        return [int(each) for each in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]

    def descendants(self) -> set[int]:
        """The process ids of its children and of theirs, whichever thread started them."""
        found, left = set[int](), [self.pid]
        while left:
            for each in Path(f"/proc/{left.pop()}/task").glob("*/children"):
                with suppress(OSError):  # it has ended
                    left += (new := [int(child) for child in each.read_text().split()])
                    found.update(new)
        return found

    @property
    def status(self) -> int | None:
        """How it ended, if it has."""
        return self._process.returncode

    @property
    def port(self) -> int:
        return int(self.target.rpartition(":")[2])

    async def event(self, name: str, timeout_s: float = START_S) -> dict[str, Any]:
        """The first log event of a name; waits for it. Raises AssertionError when the process ends without."""
        async with asyncio.timeout(timeout_s), self._heard:
            while True:
                for each in self.events:
                    if each.get("event") == name:
                        return each
                if self.reading.done():
                    raise AssertionError(f"no {name!r}: {self.events[-5:]} {self.other_lines[-10:]}")
                await self._heard.wait()

    def count(self, name: str) -> int:
        return Counter(each.get("event") for each in self.events)[name]

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    async def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        if self._process.returncode is None:
            self._process.kill()
        await self.ended()

    async def ended(self, timeout_s: float = 60.0) -> int:
        """Wait for the exit status."""
        async with asyncio.timeout(timeout_s):
            status = await self._process.wait()
            await asyncio.wait([self.reading])
        return status

    def stop_reading(self) -> None:
        """Close this end of its standard error."""
        reader: Any = self._process.stderr
        reader._transport.close()

    def rss_bytes(self) -> int:
        """Resident memory."""
        return self._memory("VmRSS")

    async def settled_rss_bytes(self) -> int:
        """Resident memory, once what was freed has gone back."""
        await asyncio.sleep(0.3)
        return self.rss_bytes()

    def peak_rss_bytes(self) -> int:
        """The most that it ever was. Resident memory itself swings by what the allocator keeps of what was freed."""
        return self._memory("VmHWM")

    def _memory(self, name: str) -> int:
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) << 10
        raise AssertionError("the process is gone")

    def cpu_s(self) -> float:
        """CPU time that it has used, of all threads."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def descriptors(self) -> int:
        """Open file descriptors."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    async def settled_descriptors(self, at_most: int, timeout_s: float) -> tuple[int, float]:
        """Wait until no more than so many are open; how many were when it last looked, and after how many seconds."""
        found, began = self.descriptors(), time.monotonic()
        while found > at_most and time.monotonic() < began + timeout_s:
            await asyncio.sleep(0.02)
            found = self.descriptors()
        return found, time.monotonic() - began

    async def _read(self) -> None:
        assert self._process.stderr is not None
        async for line in self._process.stderr:
            async with self._heard:
                try:
                    self.events.append(json.loads(line))
                except ValueError:
                    self.other_lines.append(line.decode(errors="replace").rstrip())
                self._heard.notify_all()
        async with self._heard:
            self._heard.notify_all()


def environment() -> dict[str, str]:
    """This process's, without settings: a test's server has the flags that the test wrote."""
    return {name: value for name, value in os.environ.items() if not name.startswith("FERRUM_")}


async def started(
    arguments: Sequence[str],
    *,
    prefix: Sequence[str] = (),
    root: Path = ROOT,
    fresh: bool = False,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> ServerProcess:
    """`ferrum-rpc` with these arguments. The rest as for `serving` and `running`."""
    given = environment() | variables
    if not (fresh or prefix or root != ROOT):
        return ServerProcess(await fork([*arguments], given))
    command = (*prefix, sys.executable, "-m", "ferrum_rpc.cli", *arguments)
    pipe = asyncio.subprocess.PIPE
    return ServerProcess(await asyncio.create_subprocess_exec(*command, cwd=root, env=given, stderr=pipe, limit=LIMIT))


@asynccontextmanager
async def running(*arguments: str, fresh: bool = False, **variables: str) -> AsyncIterator[ServerProcess]:
    """`ferrum-rpc` with these arguments, from its first moment; killed at the end. ``variables``: more environment."""
    process = await started(arguments, fresh=fresh, variables=variables)
    try:
        yield process
    finally:
        await process.kill()


@asynccontextmanager
async def serving(
    *flags: str,
    port: int = 0,
    model: str = "identity",
    kv_blocks: int = 4096,
    prefix: Sequence[str] = (),
    root: Path = ROOT,
    fresh: bool = False,
) -> AsyncIterator[ServerProcess]:
    """A server process that is ready. ``prefix``: a command before it, such as ``ip netns exec``. ``root``: the folder
    of its package. ``fresh``: it imports everything itself, so that all of its memory is its own; else it is forked
    (`tests.support.forking`)."""
    arguments = ["serve", model, "--port", str(port), "--log-format", "json", "--threads", "1"]
    arguments += ["--kv-blocks", str(kv_blocks), "--no-warmup", *flags]
    server = await started(arguments, prefix=prefix, root=root, fresh=fresh)
    try:
        server.target = (await server.event("ready"))["target"]
        yield server
    except Exception as error:
        await asyncio.sleep(0.1)  # its end is known a little after its connections'
        if (status := server.status) is not None:
            error.add_note(f"the server has ended with {status}: {server.events[-3:]} {server.other_lines[-40:]}")
        raise
    finally:
        await server.kill()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@asynccontextmanager
async def dialled(
    *flags: str, options: Sequence[tuple[str, Any]] = (), **server: Any
) -> AsyncIterator[tuple[ServerProcess, Dialled]]:
    """A server process as `serving` makes it, and a connection with these ``options``."""
    async with serving(*flags, **server) as process, dial(process.target, *options) as client:
        yield process, client


def runs(pid: int) -> bool:
    """Whether a process does. One that has ended may still have an entry."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


async def next_line(process: asyncio.subprocess.Process, start: str = "") -> str:
    """The next line that a program writes to its standard output and that begins so."""
    assert process.stdout is not None
    async with asyncio.timeout(SAYS_S):
        while line := (await process.stdout.readline()).decode():
            if line.startswith(start):
                return line.removesuffix("\n")
    raise AssertionError(f"the program never said {start!r}")


@asynccontextmanager
async def program(
    module: str, *arguments: object, stdin: bool = False, says: str = ""
) -> AsyncIterator[asyncio.subprocess.Process]:
    """``python -m MODULE``, its standard output as a pipe, and its input if asked for, once it ``says`` a word; killed
    at the end."""
    command = (sys.executable, "-m", module, *map(str, arguments))
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *command, cwd=ROOT, env=environment(), stdin=pipe if stdin else None, stdout=pipe
    )
    try:
        if says:
            await next_line(process, says)
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


class Dialled(Calls):
    """A channel and its stubs."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.executor: Any = model_executor_pb2_grpc.ModelExecutorStub(channel)
        self.control: Any = executor_control_pb2_grpc.ExecutorControlStub(channel)
        self.transfer: Any = kv_transfer_pb2_grpc.KvTransferStub(channel)
        self.health: Any = health_pb2_grpc.HealthStub(channel)

    async def held(self) -> tuple[int, int]:
        """Sequences that live; blocks, and slots of states, that are not free."""
        now = (await self.status()).pressure
        return now.sequences, now.total_blocks - now.free_blocks + now.total_slots - now.free_slots

    async def released(self, patience_s: float) -> tuple[int, int]:
        """Wait until nothing is held; what still is."""
        over = time.monotonic() + patience_s
        while any(held := await self.held()) and time.monotonic() < over:  # noqa: ASYNC110 - it must ask
            await asyncio.sleep(0.01)
        return held


@asynccontextmanager
async def dial(target: str, *options: tuple[str, Any]) -> AsyncIterator[Dialled]:
    """A connection of its own: without the option, grpc shares one among the channels of a process."""
    chosen = (*UNLIMITED, ("grpc.use_local_subchannel_pool", 1), *options)
    async with grpc.aio.insecure_channel(target, options=chosen) as channel:
        yield Dialled(channel)
