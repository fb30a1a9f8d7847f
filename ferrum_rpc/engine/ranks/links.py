"""The connections of ranks: rank 0 starts the others on its own machine, or waits for those that a launcher starts.

These connections are private and not encrypted. They stay within the machine, or the operator must declare the network
as trusted. A key shared by the ranks of this run refuses others that can reach the port but not read the traffic.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Final

import structlog
from torch.distributed import FileStore, Store, TCPStore

from ferrum_rpc.config import ModelSettings
from ferrum_rpc.engine.channel import Channel
from ferrum_rpc.engine.ranks.leader import Ranks, RemoteRank, in_a_thread
from ferrum_rpc.engine.ranks.messages import END, JOIN_S
from ferrum_rpc.engine.ranks.placing import RankHost, choose_kind, cuda_devices, place
from ferrum_rpc.engine.ranks.setup import CUDA, Setup
from ferrum_rpc.engine.ranks.world import World, is_loopback
from ferrum_rpc.errors import InvalidRequest

log = structlog.get_logger("ferrum_rpc.ranks")

COMMAND: Final = (sys.executable, "-m", "ferrum_rpc.rank")
LOOK_S: Final = 0.2

CUT_S: Final = 10.0
"""The time that a rank without liveness checks may be unreachable."""

ANSWER_S: Final = 10.0
"""The time limit of a peer's hello."""

_PLACE: Final = "ferrum/rank0"


def gather(server: socket.socket, key: bytes, count: int) -> list[RemoteRank]:
    """Wait for so many others, and return them in rank order. Raises InvalidRequest unless all of them connect."""
    members, until = dict[int, RemoteRank](), time.monotonic() + JOIN_S
    while len(members) < count:
        server.settimeout(max(0.001, until - time.monotonic()))
        try:
            accepted, address = server.accept()
        except TimeoutError:
            missing = ", ".join(map(str, sorted(set(range(1, count + 1)) - set(members))))
            raise _missing(
                f"after {JOIN_S:.0f} s there is no rank {missing}; start it with its RANK and the same "
                "WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
            ) from None
        with contextlib.suppress(EOFError, OSError, AuthenticationError):  # not a rank of this run
            member = _greet(_authenticated(accepted, key, challenges=True), address[0].removeprefix("::ffff:"))
            if member.number in members or not 1 <= member.number <= count:
                action = "start each rank once, with RANK from 1 to WORLD_SIZE - 1"
                log.warning("rank_refused", rank=member.number, host=member.host, pid=member.pid, action=action)
                member.channel.send((0, (), END, (f"rank 0 has refused it: {action}",)))
                member.channel.close()
                continue
            members[member.number] = member
            _say_joined(member, count)
    return [members[number] for number in sorted(members)]


def _greet(channel: Channel, reached: str = "") -> RemoteRank:
    """The rank at the other end, at the address ``reached``."""
    _, number, host, pid, machine = channel.receive()
    return RemoteRank(number, channel, host, pid, machine, reached)


def _say_joined(member: RemoteRank, count: int) -> None:
    log.info("rank_joined", rank=member.number, host=member.host, pid=member.pid, ranks=count + 1)


def assemble(settings: ModelSettings) -> tuple[Ranks, Setup, Store]:
    """Rank 0: connect the other ranks, which then load. Also returns this rank's own setup and the store of the groups.
    Raises InvalidRequest if they do not connect."""
    world = World.of()
    if world is None or world.size == 1:
        return _start(settings)
    world.check(settings)
    log.info("waiting_for_ranks", ranks=world.size, seconds=JOIN_S)
    store, key = _meet(world), secrets.token_bytes(32)
    with _listen(world.address) as server:
        store.set(_PLACE, json.dumps({"port": server.getsockname()[1], "key": key.hex()}))
        members = gather(server, key, settings.ranks - 1)
    return set_up(settings, members, world.address, store)


def join(world: World) -> tuple[Channel, Store]:
    """Another rank: the channel to rank 0, both started by a launcher. Signals are handled during every wait."""
    store, until = _meet(world), time.monotonic() + JOIN_S
    while not store.check([_PLACE]):
        if time.monotonic() > until:
            where = f"{world.address}:{world.port}"
            raise InvalidRequest(f"no rank 0 is at {where} after {JOIN_S:.0f} s: start it", field="tensor_parallel")
        time.sleep(LOOK_S)
    place = json.loads(store.get(_PLACE))
    try:
        connected = socket.create_connection((world.address, place["port"]), timeout=JOIN_S)
        return _authenticated(connected, bytes.fromhex(place["key"]), challenges=False), store
    except (OSError, EOFError) as error:
        raise InvalidRequest(
            f"rank 0 at {world.address} takes no rank {world.rank} ({error or 'it closed the connection'}): it has all "
            "of its ranks, or has ended; start each rank once, and look at the log of rank 0",
            field="tensor_parallel",
        ) from None


def accept(descriptor: int, store: int) -> tuple[Channel, Store]:
    """Another rank: the channel to rank 0, which has started this process with these descriptors."""
    return Channel(socket.socket(fileno=descriptor)), _store_in(store)


def machine() -> str:
    """An id that is equal for processes that can share memory: those of one kernel that see each other. Containers of
    one machine do not."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()


def _meet(world: World) -> Store:
    """The store by which its ranks find each other."""
    is_master = world.rank == 0 and not world.store_is_there
    if not is_master:
        _wait(world)
    seconds = JOIN_S if is_master else ANSWER_S
    waits = timedelta(seconds=seconds)
    where = world.address, world.port
    try:  # torch's own limit does not hold for a listener that sends nothing
        meeting = in_a_thread(lambda: TCPStore(*where, world.size, is_master, waits, wait_for_workers=False))
        store = meeting.result(seconds + 1)
    except (RuntimeError, TimeoutError) as error:
        why = str(error).partition("\n")[0] or "the process that listens there is not rank 0"
        message = f"MASTER_ADDR {world.address}, MASTER_PORT {world.port}: {why}"
        raise InvalidRequest(message, field="tensor_parallel") from None
    store.set_timeout(timedelta(seconds=JOIN_S))
    return store


def _wait(world: World) -> None:
    """Wait until a process listens at the ranks' address. Raises InvalidRequest if none does."""
    where, until = (world.address, world.port), time.monotonic() + JOIN_S
    while True:
        try:
            socket.create_connection(where, timeout=LOOK_S).close()
        except OSError as error:
            if time.monotonic() > until:
                at = f"{world.address}:{world.port}"
                message = f"nothing listens at {at} after {JOIN_S:.0f} s ({error}): start rank 0"
                raise InvalidRequest(message, field="tensor_parallel") from None
            time.sleep(LOOK_S)
        else:
            return


def _listen(address: str) -> socket.socket:
    """A listener for the other ranks, at an ``address`` of either kind."""
    if is_loopback(address):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server(("::1" if ":" in address else "127.0.0.1", 0), family=family)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _start(settings: ModelSettings) -> tuple[Ranks, Setup, Store]:
    """Start the other ranks. Each gets an end of a pair of sockets, and a store without a name, so that nothing is left
    behind if a process is killed."""
    store = os.memfd_create("ferrum-rpc-ranks", os.MFD_CLOEXEC)  # never closed: see `_store_in`
    processes, channels = dict[int, subprocess.Popen[bytes]](), dict[int, Channel]()
    try:
        for number in range(1, settings.ranks):
            ours, theirs = socket.socketpair()
            channels[number] = Channel(ours)
            with theirs:
                inherited = theirs.fileno(), store
                command = (*COMMAND, *map(str, (number, *inherited)))
                processes[number] = subprocess.Popen(command, pass_fds=inherited, stdin=subprocess.DEVNULL)
        members, until = [], time.monotonic() + JOIN_S
        for number, process in processes.items():
            channels[number].set_timeout(max(0.001, until - time.monotonic()))
            try:
                members.append(_greet(channels[number]))
            except TimeoutError:
                raise _missing(f"after {JOIN_S:.0f} s rank {number} has not begun") from None
            except (EOFError, OSError):
                raise _missing(f"rank {number} ended with status {process.wait()}") from None
            channels[number].set_timeout(None)
            _say_joined(members[-1], len(processes))
    except BaseException:
        _end(processes, 0)
        raise
    return set_up(settings, members, "", _store_in(store), partial(_end, processes))


def _store_in(descriptor: int) -> Store:
    """A store in the memory of a descriptor. It reopens the descriptor for every use, the last time when it is freed,
    so the descriptor must stay open for the life of the process."""
    return FileStore(f"/proc/self/fd/{descriptor}")


def _end(processes: Mapping[int, subprocess.Popen[bytes]], patience_s: float) -> None:
    for process in processes.values():
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def set_up(
    settings: ModelSettings,
    members: Sequence[RemoteRank],
    address: str,
    store: Store,
    on_close: Callable[[float], object] = lambda seconds: None,
) -> tuple[Ranks, Setup, Store]:
    """Send each rank its setup. ``address``: rank 0's address for the others; empty if all are on its machine."""
    ranks = Ranks(members, on_close)
    try:
        devices: list[list[str]] = [[]] * settings.ranks
        if choose_kind(settings.device) == CUDA:
            devices = [cuda_devices(), *ranks.ask("devices")]
        places = [(machine(), address), *((each.machine, each.address) for each in members)]
        setup, *others = place(settings, [RankHost(*each, its) for each, its in zip(places, devices, strict=True)])
        ranks.collect([answer for each in others for answer in ranks.order("prepare", each, to=[each.number])])
    except BaseException:
        ranks.close()
        raise
    return ranks, setup, store


def _authenticated(connected: socket.socket, key: bytes, *, challenges: bool) -> Channel:
    """The channel of a connection, after both ends have proved that they have the key. One of them ``challenges``
    first."""
    connected.settimeout(None)
    _notice_a_cut(connected)
    _set_timeout(
        connected, ANSWER_S if challenges else JOIN_S
    )  # a silent connection does not keep a rank from connecting
    steps = (deliver_challenge, answer_challenge)
    with Connection(os.dup(connected.fileno())) as connection:
        for step in steps if challenges else reversed(steps):
            step(connection, key)
    _set_timeout(connected, 0.0)
    return Channel(connected)


def _notice_a_cut(connected: socket.socket) -> None:
    """Make both ends detect within `CUT_S` that the network or the other machine is gone, also while one of them loads
    and sends nothing: TCP's default is a quarter of an hour. The system answers for a stopped process."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if sys.platform == "linux":
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(CUT_S * 1e3))


def _set_timeout(connected: socket.socket, seconds: float) -> None:
    """Set the time limit of a read; 0: none."""
    connected.setsockopt(
        socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", *divmod(int(seconds * 1e6), 1_000_000))
    )


def _missing(why: str) -> InvalidRequest:
    return InvalidRequest(f"the ranks did not come together: {why}", field="tensor_parallel")
