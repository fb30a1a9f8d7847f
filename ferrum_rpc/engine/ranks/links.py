"""How ranks come together: rank 0 starts the others on its own machine, or waits for those that somebody else starts.

Who starts a program on many machines (torchrun, Ray, LeaderWorkerSet) tells every process its ``RANK``, their number
``WORLD_SIZE``, and where rank 0 is: ``MASTER_ADDR`` and ``MASTER_PORT``. Nothing else is needed here.

What goes over these connections is neither encrypted nor meant for others: on one machine it stays within it, and
beyond it somebody must have said that the network is trusted. A key, which only ranks of this run know, keeps others
from speaking up where they can reach the port but not read along.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import pickle
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Final, NamedTuple

import structlog
from torch.distributed import FileStore, Store, TCPStore  # type: ignore[attr-defined]

from ferrum_rpc.config import ModelSettings
from ferrum_rpc.distributed import shared_memory
from ferrum_rpc.engine.ranks.leader import Member, Ranks
from ferrum_rpc.engine.ranks.messages import Line
from ferrum_rpc.engine.ranks.setup import GLOO, JOIN_S, SHARED_MEMORY, Setup
from ferrum_rpc.errors import InvalidRequest

log = structlog.get_logger("ferrum_rpc.ranks")

COMMAND: Final = (sys.executable, "-m", "ferrum_rpc.rank")
LOOK_S: Final = 0.2
_PLACE: Final = "ferrum/rank0"


class World(NamedTuple):
    """What somebody else who starts ranks tells each of them."""

    rank: int
    size: int
    address: str
    port: int
    store_is_there: bool

    @classmethod
    def of(cls, environment: Mapping[str, str] = os.environ) -> World | None:
        """None: nobody does. Raises InvalidRequest where the variables mean nothing."""
        if "WORLD_SIZE" not in environment or "RANK" not in environment:
            return None
        numbers = {}
        for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
            if not environment.get(name, "").isdecimal():
                shown = repr(environment[name][:40]) if name in environment else "missing"
                raise InvalidRequest(f"{name} is {shown}, and must be a number", field="tensor_parallel")
            numbers[name] = int(environment[name])
        if not (address := environment.get("MASTER_ADDR", "")):
            raise InvalidRequest("MASTER_ADDR is missing: where rank 0 is", field="tensor_parallel")
        rank, size, port = numbers.values()
        if rank >= size:
            raise InvalidRequest(f"RANK is {rank}, and must be below WORLD_SIZE, {size}", field="tensor_parallel")
        return cls(rank, size, address, port, environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True")

    def store(self) -> Store:
        """Where its ranks find each other."""
        is_master = self.rank == 0 and not self.store_is_there
        waits = timedelta(seconds=JOIN_S)
        if not is_master:
            self._wait()
        try:
            return TCPStore(self.address, self.port, self.size, is_master, waits, wait_for_workers=False)
        except RuntimeError as error:
            why = str(error).partition("\n")[0]
            raise InvalidRequest(f"MASTER_ADDR {self.address}, MASTER_PORT {self.port}: {why}", field="rank") from None

    def _wait(self) -> None:
        """Until rank 0 listens. Raises InvalidRequest where it does not."""
        until = time.monotonic() + JOIN_S
        while True:
            try:
                socket.create_connection((self.address, self.port), timeout=LOOK_S).close()
            except OSError as error:
                if time.monotonic() > until:
                    message = (
                        f"nothing listens at {self.address}:{self.port} after {JOIN_S:.0f} s ({error}): start rank 0"
                    )
                    raise InvalidRequest(message, field="rank") from None
                time.sleep(LOOK_S)
            else:
                return

    def check_trust(self, trusted: bool) -> None:
        """Raise InvalidRequest where ranks would talk to other machines without leave."""
        if not trusted and not _is_loopback(self.address):
            raise InvalidRequest(
                f"MASTER_ADDR {self.address} is another machine, or can be reached from others, and what ranks say is "
                "not encrypted: give --trust-rank-network where only trusted machines share the network",
                field="trust_rank_network",
            )


class Invitation(NamedTuple):
    """How a rank that rank 0 starts reaches it."""

    number: int
    address: str
    key: bytes
    store: str


@dataclass(slots=True, eq=False)
class Listener:
    """Where rank 0 waits for the others."""

    socket: socket.socket
    key: bytes

    def gather(self, count: int, started: Mapping[int, subprocess.Popen[bytes]]) -> list[Member]:
        """So many others, in their order. Raises InvalidRequest where one that was ``started`` has ended, or not all
        come."""
        members, until = dict[int, Member](), time.monotonic() + JOIN_S
        self.socket.settimeout(LOOK_S)
        log.info("waiting_for_ranks", ranks=count + 1, seconds=JOIN_S)
        while len(members) < count:
            try:
                accepted, address = self.socket.accept()
            except TimeoutError:
                for number, process in started.items():
                    if process.poll() is not None:
                        raise _missing(f"rank {number} ended with status {process.returncode}") from None
                if time.monotonic() > until:
                    missing = ", ".join(map(str, sorted(set(range(1, count + 1)) - set(members))))
                    raise _missing(
                        f"after {JOIN_S:.0f} s there is no rank {missing}; start it with its RANK and the same "
                        "WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
                    ) from None
                continue
            with contextlib.suppress(EOFError, OSError, AuthenticationError):  # none of ours
                line = _line(accepted, self.key, asked=True)
                _, number, host, pid, machine = line.receive()
                if number in members or not 1 <= number <= count:
                    action = "start each rank once, with RANK from 1 to below WORLD_SIZE"
                    log.warning("rank_refused", rank=number, host=host, pid=pid, action=action)
                    line.close()
                    continue
                reached = address[0] if isinstance(address, tuple) else ""
                members[number] = Member(number, line, host, pid, machine, reached)
                log.info("rank_joined", rank=number, host=host, pid=pid, ranks=count + 1)
        return [members[number] for number in sorted(members)]


def assemble(settings: ModelSettings) -> tuple[Ranks, Setup, Store]:
    """Rank 0: the others are there, and load. Also what this rank has to set up itself, and where groups are joined.
    Raises InvalidRequest where they do not come together."""
    world = World.of()
    if world is None or world.size == 1:
        return _start(settings)
    if world.size != settings.ranks:
        raise InvalidRequest(
            f"WORLD_SIZE is {world.size}, and --tensor-parallel times --pipeline-parallel {settings.ranks}",
            field="tensor_parallel",
        )
    world.check_trust(settings.trust_rank_network)
    store, key = world.store(), secrets.token_bytes(32)
    with socket.create_server(("127.0.0.1" if _is_loopback(world.address) else "", 0)) as server:
        store.set(_PLACE, json.dumps({"port": server.getsockname()[1], "key": key.hex()}))
        members = Listener(server, key).gather(settings.ranks - 1, {})
    return set_up(settings, members, world.address, store)


def join(world: World) -> tuple[Line, Store]:
    """Another rank: the line to rank 0, which somebody else has started too."""
    store = world.store()
    place = json.loads(store.get(_PLACE))
    connected = socket.create_connection((world.address, place["port"]), timeout=JOIN_S)
    return _line(connected, bytes.fromhex(place["key"]), asked=False), store


def accept(invitation: Invitation) -> tuple[Line, Store]:
    """Another rank: the line to rank 0, which has started this process."""
    connected = socket.socket(socket.AF_UNIX)
    connected.connect(invitation.address)
    return _line(connected, invitation.key, asked=False), FileStore(invitation.store)


def machine() -> str:
    """The same for all processes that may share memory: those of one kernel that see each other. Containers of one
    machine do not."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()


def _start(settings: ModelSettings) -> tuple[Ranks, Setup, Store]:
    folder, key = Path(tempfile.mkdtemp(prefix="ferrum-ranks-")), secrets.token_bytes(32)
    address, store = str(folder / "rank0"), str(folder / "store")
    processes: dict[int, subprocess.Popen[bytes]] = {}
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(address)
            server.listen()
            for number in range(1, settings.ranks):
                processes[number] = process = subprocess.Popen(COMMAND, stdin=subprocess.PIPE)
                assert process.stdin is not None  # noqa: S101 - a pipe
                with contextlib.suppress(BrokenPipeError), process.stdin as pipe:  # broken: it has died already
                    pipe.write(pickle.dumps(Invitation(number, address, key, store)))
            members = Listener(server, key).gather(settings.ranks - 1, processes)
    except BaseException:
        _end(processes, folder, 0)
        raise
    found = set_up(settings, members, "", FileStore(store), partial(_end, processes, folder))
    found[0].meeting_place = str(folder)
    return found


def _end(processes: Mapping[int, subprocess.Popen[bytes]], folder: Path, patience_s: float) -> None:
    for process in processes.values():
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    shutil.rmtree(folder, ignore_errors=True)


def set_up(
    settings: ModelSettings,
    members: Sequence[Member],
    address: str,
    store: Store,
    on_close: Callable[[float], object] = lambda seconds: None,
) -> tuple[Ranks, Setup, Store]:
    """Tell each rank what it is. ``address``: where the others find rank 0; empty where all are on its machine."""
    machines = Counter([machine(), *(each.machine for each in members)])
    transport = settings.rank_transport
    if transport == "auto":
        transport = SHARED_MEMORY if len(machines) == 1 and shared_memory.available() is None else GLOO
    ranks = Ranks(members, on_close)
    prepared = []
    for each in members:
        setup = Setup(settings, each.number, transport, each.address, machines[each.machine])
        prepared += ranks.order("prepare", setup, to=[each.number])
    try:
        ranks.collect(prepared)
    except BaseException:
        ranks.close()
        raise
    return ranks, Setup(settings, 0, transport, address, machines[machine()]), store


def _line(connected: socket.socket, key: bytes, *, asked: bool) -> Line:
    """Over a connection whose other end has shown that it knows the key, as this one has."""
    connected.settimeout(None)
    if connected.family != socket.AF_UNIX:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection = Connection(connected.detach())
    steps = (deliver_challenge, answer_challenge)
    for step in steps if asked else reversed(steps):
        step(connection, key)
    return Line(connection)


def _is_loopback(address: str) -> bool:
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _missing(why: str) -> InvalidRequest:
    return InvalidRequest(f"the ranks did not come together: {why}", field="tensor_parallel")
