"""The second tier of the prefix cache: blocks on disk, under their keys (`prefix`), and checkpoints of states.

An evicted block is written to a file of its own, concurrently with the steps, and read again when a prompt needs it:
its tokens are read from disk instead of computed. The hash covers the model, the salt and all earlier tokens, and the
key of imported content has the caller's digest, so the next process of the same model may use the folder again, and a
caller finds no more here than in memory.

It is a cache: a write for which the disk is too slow is dropped, and a missing or invalid file is a miss. A file has a
digest with a key in the folder (HMAC-SHA-256, which with the processor's instructions is as fast as CRC-32): a file
written by others is a miss too.

If the model keeps states, those behind a block are a file of their own, under the block's key with `STATES` before it.

A folder is for one process at a time, which holds a lock on it. While two processes overlap, as when one replaces the
other, the second one reads all files but deletes only its own. If it needs to delete more, it tries the lock again, and
takes over all files once the other process has ended.
"""

from __future__ import annotations

import errno
import hmac
import os
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from io import BytesIO
from pathlib import Path
from struct import Struct
from typing import Any, BinaryIO, Final

import structlog

from ferrum_rpc.prefix_hash import HASH_BYTES
from ferrum_rpc.private_files import PrivateFolder

Content = Callable[[], Any]
"""Returns the content of a block, a buffer that must not change any more. It may wait: the writing thread calls it."""

KEY_BYTES: Final = (HASH_BYTES, 2 * HASH_BYTES)
"""Of a key: for everybody, and for one caller."""

STATES: Final = b"s"
"""What the key of states begins with; that of their block follows."""

log = structlog.get_logger("ferrum_rpc.engine")

ABOUT: Final = Struct("<8s32sQ")
"""What a file begins with: `MAGIC`, the key (a hash, then the caller's digest or zeros), and how many bytes of content
it has."""

HEAD_BYTES: Final = ABOUT.size + 32
"""Behind that follows the keyed digest of it and of the content, and the content."""

MAGIC: Final = b"ferrumk2"
MAGIC_OF_STATES: Final = b"ferrums1"
LEFT_BEHIND_S: Final = 3600.0
"""Seconds after which a half-written file is that of a killed process."""

PAUSE_S: Final = 0.001

WAITING_BYTES: Final = 64 << 20
"""Maximum bytes of blocks that wait to be written; further ones are dropped."""

ACTIONS: Final = {
    errno.ENOENT: "start the executor again: the folder of --kv-tier-dir was deleted",
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "make room there, or lower --kv-tier-bytes"),
}
"""What to do if a write fails."""


class FileReader:
    """The content of a file of the tier, in pieces, which may be used once `end` has said that all of it is what was
    written. ``left``: bytes that were not read yet. ``lose(why)`` is called if they cannot be. ``mac``: the digest of
    what comes before, and at last ``digest``; None: it is not checked."""

    def __init__(
        self, file: BinaryIO, left: int, mac: hmac.HMAC | None, digest: bytes, lose: Callable[[str], object]
    ) -> None:
        self.left = left
        self._file, self._mac, self._digest, self._lose = file, mac, digest, lose
        self._why = "its content is not what was written"

    def read(self, size: int) -> bytes:
        """The next bytes; fewer if there are no more, or if they cannot be read."""
        try:
            found = self._file.read(min(size, self.left))
        except OSError as error:
            self._why, found = error.strerror or str(error), b""
        self.left -= len(found)
        if self._mac is not None:
            self._mac.update(found)
        return found

    def end(self) -> bool:
        """Whether all was read, and is what was written. Otherwise the file is lost. Closes it."""
        right = not self.left and not self._file.read(1)
        if self._mac is not None:
            right = right and hmac.compare_digest(self._mac.digest(), self._digest)
        if right:
            self.close()
        else:
            self.lose()
        return right

    def lose(self, why: str = "") -> None:
        """The content cannot be used. Closes the file."""
        self.close()
        self._lose(why or self._why)

    def close(self) -> None:
        """It is not read any more."""
        self._file.close()


class BlockFiles:
    """Blocks of ``block_bytes`` bytes in ``folder``, and states of up to ``state_bytes``, at most ``max_bytes`` in
    all: the least recently used are evicted. Those of an earlier process are included. ``on_change`` is called with the
    key of each block that comes or goes, and whether it is ``there``. ``hashed`` is a block's key, or that of states.

    Raises OSError if the folder cannot be made or listed, or is accessible to other users, and ValueError if
    ``max_bytes`` is less than a block, or than states. Call it from one thread.
    """

    def __init__(self, folder: Path, max_bytes: int, block_bytes: int, state_bytes: int = 0) -> None:
        self._max_bytes = max_bytes
        self._size, self._state_size = HEAD_BYTES + block_bytes, HEAD_BYTES + state_bytes
        if (size := max(self._size, self._state_size)) > max_bytes:
            raise ValueError(f"{max_bytes} bytes hold no block of {size}")
        self._there: OrderedDict[bytes, int] = OrderedDict()  # bytes of each file; the last used last
        self.held_bytes = 0
        self._own = set[bytes]()  # written here, while another process has the folder
        self._waiting: dict[bytes, Content] = {}
        self._lock = threading.Lock()  # of `_waiting`
        self._jobs: queue.SimpleQueue[tuple[bytes, Content | None] | None] = queue.SimpleQueue()  # None: remove it
        self.on_change: Callable[..., object] = lambda hashed, there: None
        self._folder = PrivateFolder(folder)
        self._ended = False
        try:
            self._mac = hmac.new(self._folder.key(), digestmod="sha256")
            self._alone = self._folder.lock()
            self._list()
        except OSError:
            self._folder.close()
            raise
        if not self._alone:
            action = "give each executor a --kv-tier-dir of its own, unless one takes the place of the other"
            log.warning("kv_tier_locked", folder=str(folder), reason="another executor has it", action=action)
        self._trim()
        self._thread = threading.Thread(target=self._work, name="ferrum-tier", daemon=True)
        self._thread.start()

    def __contains__(self, hashed: bytes) -> bool:
        return hashed in self._there

    def hashes(self) -> list[bytes]:
        """Of all blocks."""
        return [each for each in self._there if len(each) in KEY_BYTES]

    def read(self, hashed: bytes) -> bytes | None:
        """The content of a block, or of states, or None if it is not there, or not what was written."""
        file = self.reader(hashed)
        if file is None:
            return None
        content = file.read(file.left)
        return content if file.end() else None

    def reader(self, hashed: bytes) -> FileReader | None:
        """What reads the content of a block, or of states, in pieces, or None if it is not there. Close it."""
        size = self._there.get(hashed)
        if size is None:
            return None
        self._there.move_to_end(hashed)
        with self._lock:
            waiting = self._waiting.get(hashed)
        lose = partial(self._lost, hashed)
        if waiting is not None:
            content = bytes(waiting())
            return FileReader(BytesIO(content), len(content), None, b"", lose)
        try:
            file = os.fdopen(self._folder.open(hashed.hex(), os.O_RDONLY), "rb")
        except OSError as error:
            lose(error.strerror or str(error))
            return None
        about, mac = self._about(hashed, size - HEAD_BYTES)
        found = FileReader(file, HEAD_BYTES, None, b"", lose)
        head = found.read(HEAD_BYTES)
        if head[: ABOUT.size] != about:
            found.lose()
            return None
        return FileReader(file, size - HEAD_BYTES, mac, head[ABOUT.size :], lose)

    def write(self, blocks: Sequence[tuple[int, bytes]], read: Callable[[Sequence[int]], Sequence[Content]]) -> None:
        """Queue ``blocks`` (each with its key) for writing, unless they are there. Those for which the disk is too slow
        are dropped. ``read`` is called once, with the others."""
        with self._lock:
            capacity = -(-WAITING_BYTES // self._size) - len(self._waiting)
        new: dict[bytes, int] = {}
        for block, hashed in blocks:
            if hashed in self._there:
                self._there.move_to_end(hashed)
            elif len(new) < capacity:
                new[hashed] = block
        for hashed, content in zip(new, read(list(new.values())) if new else (), strict=True):
            self._queue(hashed, content, self._size)

    def write_states(self, hashed: bytes, read: Callable[[], bytes | None]) -> bool:
        """Queue states, unless they are there. ``read`` is called if they are not; None: there is nothing to write.
        False: they are dropped, because the disk is too slow."""
        if hashed in self._there:
            self._there.move_to_end(hashed)
            return True
        with self._lock:
            waiting = sum(map(self._there.__getitem__, self._waiting.keys() & self._there.keys()))
        if waiting and waiting + self._state_size > WAITING_BYTES:
            return False
        content = read()
        if content is not None:
            self._queue(hashed, lambda: content, HEAD_BYTES + len(content))
        return True

    def end(
        self,
        blocks: Iterable[tuple[int, bytes]],
        read: Callable[[Sequence[int]], Sequence[Content]],
        max_s: float,
        states: Iterable[tuple[bytes, Callable[[], bytes | None]]] = (),
    ) -> None:
        """Write these too, within ``max_s`` seconds, and wait until all is written. Must be the last call. Of
        ``states`` the keys, and what reads them: they come first, for without them their blocks are not found."""
        last = time.monotonic() + max_s
        for hashed, content in states:
            while time.monotonic() < last and not self.write_states(hashed, content):
                time.sleep(PAUSE_S)
        for block, hashed in blocks:
            while time.monotonic() < last:
                self.write([(block, hashed)], read)
                if hashed in self._there:
                    break
                time.sleep(PAUSE_S)
        self._jobs.put(None)
        self._thread.join(max(0.0, last - time.monotonic()))
        self._ended = True

    def clear(self) -> None:
        """Drop all blocks, and all states."""
        self._take_over()
        for hashed in list(self._there):
            self._drop(hashed)

    # --- inside -----------------------------------------------------------------------------------------------------

    def _queue(self, hashed: bytes, content: Content, size: int) -> None:
        with self._lock:
            self._waiting[hashed] = content
        if not self._alone and not self._folder.has(hashed.hex()):
            self._own.add(hashed)
        self._jobs.put((hashed, content))
        self._there[hashed] = size
        self.held_bytes += size
        self._tell(hashed, there=True)
        self._trim()

    def _head(self, hashed: bytes, content: Any) -> bytes:
        """The header of a file with this content."""
        about, mac = self._about(hashed, len(content))
        mac.update(content)
        return about + mac.digest()

    def _about(self, hashed: bytes, size: int) -> tuple[bytes, hmac.HMAC]:
        """What a header of so many bytes begins with, and the digest until then."""
        key, magic = hashed, MAGIC
        if len(hashed) not in KEY_BYTES:
            key, magic = hashed.removeprefix(STATES), MAGIC_OF_STATES
        about, mac = ABOUT.pack(magic, key, size), self._mac.copy()
        mac.update(about)
        return about, mac

    def _take_over(self) -> None:
        """Take over the folder with all its files if the process that locked it has ended."""
        if not self._alone and not self._ended and self._folder.lock():
            self._alone = True
            self._own.clear()
            with suppress(OSError):  # it was moved away
                self._list()

    def _list(self) -> None:
        """Add unknown files of the folder, as less recently used than all known ones."""
        found, others = list[tuple[float, bytes, int]](), list[tuple[float, bytes, int]]()
        for name, status in self._folder.files():
            if name.endswith(".partial") and time.time() - status.st_mtime > LEFT_BEHIND_S:
                self._folder.unlink(name)
                continue
            with suppress(ValueError):
                key = bytes.fromhex(name)
                of_states = key.startswith(STATES) and len(key) - 1 in KEY_BYTES
                if (of_states or len(key) in KEY_BYTES) and key not in self._there:
                    size = status.st_size
                    right = HEAD_BYTES < size <= self._state_size if of_states else size == self._size
                    (found if right else others).append((status.st_mtime, key, size))
        if others:
            log.warning(
                "cached_block_lost",
                folder=str(self._folder.path),
                blocks=len(others),
                reason="their files are of an earlier version, or have another length than what was written",
                action="they are computed again",
            )
        for _, hashed, size in sorted(found, reverse=True):
            self._there[hashed] = size
            self.held_bytes += size
            self._there.move_to_end(hashed, last=False)
            self._tell(hashed, there=True)
        if self._alone:
            for _, hashed, _ in others:
                self._folder.unlink(hashed.hex())

    def _lost(self, hashed: bytes, why: str) -> None:
        log.warning(
            "cached_block_lost", file=str(self._folder.path / hashed.hex()), reason=why, action="it is computed again"
        )
        self._drop(hashed)

    def _trim(self) -> None:
        while self.held_bytes > self._max_bytes:
            self._drop(next(iter(self._there)))

    def _drop(self, hashed: bytes) -> None:
        self._take_over()
        self.held_bytes -= self._there.pop(hashed, 0)
        if self._alone or hashed in self._own:
            self._own.discard(hashed)
            self._jobs.put((hashed, None))
        self._tell(hashed, there=False)

    def _tell(self, hashed: bytes, *, there: bool) -> None:
        if len(hashed) in KEY_BYTES:
            self.on_change(hashed, there=there)

    def _work(self) -> None:
        """Write and remove files, in the order of the requests."""
        failed = False
        while (job := self._jobs.get()) is not None:
            hashed, content = job
            try:
                if content is None:
                    self._folder.unlink(hashed.hex())
                else:
                    data = memoryview(content()).cast("B")
                    _write(self._folder, hashed.hex(), self._head(hashed, data), data)
                    failed = False
            except (OSError, RuntimeError) as error:  # RuntimeError: the device that has the block is lost
                if not failed:  # once: a full disk fails every time
                    number = error.errno if isinstance(error, OSError) else None
                    log.warning(
                        "kv_tier_write_failed",
                        file=str(self._folder.path / hashed.hex()),
                        error=getattr(error, "strerror", None) or str(error),
                        action=f"{ACTIONS.get(number or 0, 'see why')}; the executor goes on without",
                    )
                failed = True
            finally:
                with self._lock:
                    if self._waiting.get(hashed) is content:
                        self._waiting.pop(hashed, None)
        self._folder.close()


def _write(folder: PrivateFolder, name: str, head: bytes, content: memoryview) -> None:
    """Write a file atomically: a reader never sees a part of it."""
    unfinished = f"{name}.{os.getpid()}.partial"
    try:
        with open(folder.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
            file.write(head)
            file.write(content)
        folder.rename(unfinished, name)
    except OSError:
        with suppress(OSError):
            folder.unlink(unfinished)
        raise
