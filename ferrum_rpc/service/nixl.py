"""Transfers by NIXL: an importer reads the data out of its exporter's memory, and the streams have the rest.

One buffer is registered with the agent, with a slot for each transfer in progress. An export puts its chunks into its
slot, where each stays until the importer notifies that it was read; an import reads into its own slot.

One thread makes all calls of NIXL and sleeps between two polls: without a thread of its own NIXL progresses only while
it is called, and a spinning thread would take a core from the model. While nothing is read it polls once a second, so
that connections of peers that have ended are closed.

Data of a peer may arrive late, after the read was abandoned. The buffer keeps its address for the life of the process,
so late data can overwrite only slots, where the checksums detect it.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import structlog

from ferrum_rpc.errors import Cancelled, ExecutorError, InvalidRequest, KvCorrupt, NotSupported, QueueFull
from ferrum_rpc.executor.v1 import kv_transfer_pb2 as pb
from ferrum_rpc.install import install
from ferrum_rpc.service.records import RETRY_AFTER_S

log = structlog.get_logger("ferrum_rpc.nixl")

CAPABILITY: Final = "KV_TRANSPORT_NIXL"
SLOT_BYTES: Final = 4 << 20
"""The size of a slot: some chunks in flight."""

POLL_S: Final = 0.001
IDLE_POLL_S: Final = 1.0
UNREAD_S: Final = 30.0
"""The time that an export waits for its importer to read a chunk."""

READ_S: Final = 10.0
"""The time limit of the read of one chunk."""

AGENT_BYTES: Final = 64 << 10
"""The limit of an agent's metadata in bytes, which has some hundreds."""

DONE, UNDER_WAY, FAILED = "DONE", "PROC", "ERR"
"""The states of a transfer in NIXL."""

PEERS: Final = 256
"""Maximum number of known agents of other executors. Their connections stay open, because NIXL closes only those of
peers that have ended."""


def make_agent(name: str) -> Any:
    """An agent of the nixl package. Raises `InvalidRequest` if that is not installed, or cannot start."""
    devices = os.environ.setdefault("UCX_NET_DEVICES", "lo")  # connected peers can read this memory
    try:
        api = importlib.import_module("nixl._api")
    except ImportError as error:
        raise InvalidRequest(
            f"kv_transport nixl needs the nixl package ({error}): {install('nixl')}", field="kv_transport"
        ) from None
    try:
        agent = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
        if "UCX" not in agent.backends:
            raise RuntimeError("UCX is missing")
    except Exception as error:
        message = f"NIXL does not start with UCX_NET_DEVICES={devices}: {error!r}"
        raise InvalidRequest(message, field="kv_transport") from None
    log.info("backend_selected", choice=f"NIXL agent {name}", reason=f"UCX_NET_DEVICES is {devices}")
    return agent


class Nixl:
    """The agent of one server, its buffer of ``slots``, and its thread. Bound to the event loop that calls `start`."""

    def __init__(self, slots: int, agent: Callable[[str], Any] = make_agent, unread_s: float = UNREAD_S) -> None:
        self.unread_s = unread_s
        self.metadata = b""
        self.buffer = np.zeros(0, np.uint8)
        self.waiting: dict[bytes, Callable[[], None]] = {}
        """The callbacks of expected notifications."""
        self._loop: asyncio.AbstractEventLoop
        self._slots = slots
        self._free: list[int] = []
        self._make = agent
        self._agent: Any = None
        self._peers: OrderedDict[bytes, str] = OrderedDict()
        self._reads: list[_Read] = []
        self._new: list[_Read] = []
        self._wake = threading.Condition()
        self._closing = False
        self._thread: threading.Thread | None = None

    async def start(self) -> None:
        """Make the agent. Raises `InvalidRequest`."""
        self._loop = asyncio.get_running_loop()
        started: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, args=(started,), name="ferrum-nixl", daemon=True)
        self._thread.start()
        await started

    async def stop(self) -> None:
        """End the thread, and with it the agent."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, READ_S)

    def allocate(self) -> int:
        """Allocate a slot; returns its offset in the buffer. Raises `QueueFull`."""
        if not self._free:
            raise QueueFull("the buffer of transfers by NIXL is full; nothing was started", retry_after_s=RETRY_AFTER_S)
        return self._free.pop()

    def free(self, slot: int) -> None:
        self._free.append(slot)

    def expect(self, notification: bytes, call: Callable[[], None]) -> None:
        """Call ``done`` when the notification comes, unless it was removed from ``waiting``."""
        with self._wake:
            self.waiting[notification] = call
            self._wake.notify()

    def read(self, read: _Read) -> None:
        """Begin a read; its ``done`` is called in the event loop."""
        with self._wake:
            self._new.append(read)
            self._wake.notify()

    # --- in the thread ----------------------------------------------------------------------------------------------

    def _run(self, started: asyncio.Future[None]) -> None:
        try:
            self._agent = self._make(f"ferrum-{secrets.token_hex(8)}")
            buffer = np.zeros(self._slots * SLOT_BYTES, np.uint8)
            self._agent.register_memory([(buffer.ctypes.data, buffer.nbytes, 0, "")], "DRAM")
            self.buffer, self.metadata = buffer, self._agent.get_agent_metadata()
            self._free = [*range(0, buffer.nbytes, SLOT_BYTES)]
        except ExecutorError as error:
            self._call_in_loop(started.set_exception, error)
            return
        except Exception as error:
            self._call_in_loop(started.set_exception, InvalidRequest(f"NIXL: {error!r}", field="kv_transport"))
            return
        self._call_in_loop(started.set_result, None)
        while not self._closing:
            with self._wake:
                if not self._new:
                    self._wake.wait(POLL_S if self._reads or self.waiting else IDLE_POLL_S)
                new, self._new = self._new, []
            for read in new:
                self._begin(read)
            self._reads = [read for read in (*self._reads, *new) if not self._finished(read)]
            self._collect()
        self._agent = None

    def _begin(self, read: _Read) -> None:
        agent, remote = self._agent, read.remote
        try:
            here = agent.get_xfer_descs([(self.buffer.ctypes.data + read.slot, remote.size, 0)], "DRAM")
            there = agent.get_xfer_descs([(remote.address, remote.size, 0)], "DRAM")
            read.handle = agent.initialize_xfer("READ", here, there, self._peer(read.peer), remote.notification)
        except Exception as error:  # the memory or the agent does not exist
            read.why = repr(error)
        else:
            self._ask(read, agent.transfer)

    def _ask(self, read: _Read, about: Callable[[Any], str]) -> None:
        try:
            read.state = about(read.handle)
        except Exception as error:
            read.state, read.why = FAILED, repr(error)
        if read.state == FAILED:
            self._forget(read.peer)

    def _finished(self, read: _Read) -> bool:
        """Whether it is over and NIXL has released it."""
        if read.state == UNDER_WAY:
            self._ask(read, self._agent.check_xfer_state)
        if read.state == UNDER_WAY:
            if not read.given_up and time.monotonic() < read.until:
                return False
            read.why = f"not within {READ_S:.0f} s"
        released = True
        try:
            if read.handle is not None:
                self._agent.release_xfer_handle(read.handle)
        except Exception:
            released = False  # retried at the next poll
        why = None if read.state == DONE else read.why or read.state
        if released or (why is not None and not read.reported):
            read.reported = True
            self._call_in_loop(read.done, why, released)
        return released

    def _peer(self, metadata: bytes) -> str:
        """The name of the agent with that metadata."""
        name = self._peers.get(metadata)
        if name is None:
            if len(self._peers) >= PEERS:
                self._forget(next(iter(self._peers)))
            name = self._peers[metadata] = _text(self._agent.add_remote_agent(metadata))
        self._peers.move_to_end(metadata)
        return name

    def _forget(self, metadata: bytes) -> None:
        """Remove the agent of a peer, so that the next read connects anew."""
        name = self._peers.pop(metadata, None)
        if name is not None and name not in self._peers.values():
            try:
                self._agent.remove_remote_agent(name)
            except Exception as error:
                log.debug("nixl_peer_not_removed", error=repr(error))

    def _collect(self) -> None:
        try:
            notifications = self._agent.get_new_notifs()
        except Exception as error:
            log.warning("nixl_failed", error=repr(error), action="restart the executor, if it stays")
            time.sleep(IDLE_POLL_S)
            return
        received = [each for by_peer in notifications.values() for each in by_peer]
        if received:
            self._call_in_loop(self._notified, received)

    def _call_in_loop(self, call: Callable[..., object], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(call, *args)
        except RuntimeError:  # the loop has ended
            self._closing = True

    def _notified(self, received: Sequence[bytes]) -> None:
        for each in received:
            call = self.waiting.pop(each, None)
            if call is not None:
                call()


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name


@dataclass(slots=True, eq=False)
class _Read:
    """The read of one chunk of a peer. ``done`` is called with None or the error, and with whether the slot is free;
    after a failure it may be called again once the slot is free."""

    peer: bytes
    remote: pb.KvRemote
    slot: int
    done: Callable[[str | None, bool], object]
    until: float = field(default_factory=lambda: time.monotonic() + READ_S)
    handle: Any = None
    state: str = FAILED
    why: str = ""
    reported: bool = False
    given_up: bool = False


# --- on both ends of a transfer ---------------------------------------------------------------------------------------


def offered(nixl: Nixl | None, transport: pb.KvTransport) -> Nixl:
    """The agent of this transport. Raises `NotSupported`."""
    if nixl is None or transport != pb.KV_TRANSPORT_NIXL:
        why = f"unknown transport {transport}"
        if transport in pb.KvTransport.values():
            name = pb.KvTransport.Name(transport)
            why = f"transport {name} is not offered (capability {CAPABILITY}): the executor has no --kv-transport nixl"
        raise NotSupported(
            why,
            field="transport",
            metadata={"capability": CAPABILITY},
        )
    return nixl


class StagedChunks:
    """The chunks of one export that were not read yet, of at most ``size`` bytes each. Raises `QueueFull`, and
    `NotSupported` if a chunk does not fit the slot."""

    def __init__(self, nixl: Nixl, size: int) -> None:
        if size > SLOT_BYTES:
            raise NotSupported(f"a chunk of {size} bytes does not fit into the {SLOT_BYTES} of a transfer by NIXL")
        self._nixl = nixl
        self._slot = nixl.allocate()
        self._free = [*range(self._slot, self._slot + SLOT_BYTES - size + 1, size)]
        self._unread: dict[bytes, int] = {}
        self._changed = asyncio.Event()
        self._ended: ExecutorError | None = None

    @property
    def source(self) -> pb.KvSource:
        """The source, which the importer needs first."""
        return pb.KvSource(transport=pb.KV_TRANSPORT_NIXL, agent=self._nixl.metadata)

    async def put(self, parts: Sequence[Any]) -> pb.KvRemote:
        """Put a chunk, uint8 [bytes] each, into the slot. Waits for space; raises `QueueFull` if the importer reads
        nothing, and the error with which `close` was called."""
        while not self._free:
            await self._something_read()
        if self._ended is not None:
            raise self._ended
        buffer, at, notification = self._nixl.buffer, self._free.pop(), secrets.token_bytes(16)
        end = at
        for part in parts:
            buffer[end : end + len(part)] = part
            end += len(part)
        self._unread[notification] = at
        self._nixl.expect(notification, lambda: self._was_read(notification))
        return pb.KvRemote(address=buffer.ctypes.data + at, size=end - at, notification=notification)

    async def emptied(self) -> None:
        """Wait until all chunks were read. Raises as `put` does."""
        while self._unread:
            await self._something_read()

    def close(self, error: ExecutorError | None = None) -> None:
        """Free the slot and everything else at the end of the stream."""
        if self._ended is not None:
            return
        self._ended = error or Cancelled("the export has ended")
        for notification in self._unread:
            del self._nixl.waiting[notification]
        self._nixl.free(self._slot)
        self._changed.set()

    def _was_read(self, notification: bytes) -> None:
        self._free.append(self._unread.pop(notification))
        self._changed.set()

    async def _something_read(self) -> None:
        if self._ended is not None:
            raise self._ended
        self._changed.clear()
        try:
            async with asyncio.timeout(self._nixl.unread_s):
                await self._changed.wait()
        except TimeoutError:
            raise QueueFull(
                f"the importer has read nothing for {self._nixl.unread_s:.0f} s, and {len(self._unread)} chunks wait",
                retry_after_s=RETRY_AFTER_S,
            ) from None
        if self._ended is not None:
            raise self._ended


class ChunkReader:
    """Reads the chunks of one import from its exporter. ``nixl``: None if that is not offered."""

    def __init__(self, nixl: Nixl | None) -> None:
        self._nixl = nixl
        self._peer = b""
        self._slot: int | None = None
        self._now: _Read | None = None
        self._closed = False

    def connect(self, source: pb.KvSource) -> None:
        """Set the source of the chunks. Raises `NotSupported`, `InvalidRequest` and `QueueFull`."""
        nixl = offered(self._nixl, source.transport)
        if self._peer or not 0 < len(source.agent) <= AGENT_BYTES:
            raise InvalidRequest(
                f"a stream has one source, with its agent's metadata of {AGENT_BYTES} bytes at most", field="source"
            )
        self._slot = nixl.allocate()
        self._peer = source.agent

    async def read(self, remote: pb.KvRemote, next_token: int) -> bytes:
        """The data of a chunk. Raises `InvalidRequest`, and `KvCorrupt` if it cannot be read."""
        nixl, slot = self._nixl, self._slot
        if nixl is None or slot is None:
            raise InvalidRequest("a chunk has no data, and its stream has no source", field="chunk.remote")
        if remote.size > SLOT_BYTES or remote.address + remote.size >= 1 << 64:
            raise InvalidRequest(
                f"a chunk of {remote.size} bytes at {remote.address:#x}: it may have {SLOT_BYTES} bytes",
                field="chunk.remote",
            )
        answered: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()

        def done(why: str | None, released: bool) -> None:
            if released:
                self._now = None
                if self._closed:
                    nixl.free(slot)
            if not answered.done():
                answered.set_result(why)

        self._now = _Read(self._peer, remote, slot, done)
        nixl.read(self._now)
        why = await answered
        if why is not None:
            raise KvCorrupt(
                f"a chunk could not be read from its exporter by NIXL ({why}); nothing of it was kept",
                metadata={"next_token": next_token},
                field="chunk.remote",
            )
        return nixl.buffer[slot : slot + remote.size].tobytes()

    def close(self) -> None:
        """End the stream. The slot is free once NIXL has released it."""
        self._closed = True
        if self._now is not None:
            self._now.given_up = True
        elif self._slot is not None and self._nixl is not None:
            self._nixl.free(self._slot)
