"""The second tier of the prefix cache: blocks on disk, under their hashes.

A block whose place is needed is written to a file of its own, beside the steps, and read again when a prompt asks for
it: that costs what a disk costs, and the tokens are not computed. The hash covers the model, the salt and all tokens
before, so a folder may be used again by the next process of the same model, and nobody finds more here than in memory.

It is a cache: a write that the disk is too slow for is dropped, and a file that is missing or wrong is a miss.

A folder is meant for one process at a time, which holds a lock on it. While processes overlap, as they do when one
takes the place of the other, the second one reads what is there and deletes what it wrote itself only. Where it needs
to delete more it asks for the lock again, and where the other has ended it goes on with all that lies there.
"""

from __future__ import annotations

import errno
import fcntl
import os
import queue
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from struct import Struct
from typing import Any, Final

import structlog

from ferrum_rpc.prefix_hash import HASH_BYTES

log = structlog.get_logger("ferrum_rpc.engine")

HEAD: Final = Struct("<8s16sQI")
"""What a file begins with: `MAGIC`, the hash, how many bytes follow, and their CRC-32."""

MAGIC: Final = b"ferrumkv"
LEFT_BEHIND_S: Final = 3600.0
"""A half-written file so old is of a process that was killed."""

PAUSE_S: Final = 0.001

WAITING_BYTES: Final = 64 << 20
"""Of blocks that wait to be written; above that, they are dropped."""

ACTIONS: Final = {
    errno.ENOENT: "put the folder of --kv-tier-dir back, or start again",
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "make room there, or lower --kv-tier-bytes"),
}
"""What helps where a write fails."""


class BlockFiles:
    """Blocks of ``block_bytes`` bytes in ``folder``, ``most_bytes`` in all: those that were not used for longest go
    first. What another process left there is there. ``on_gone`` is called with the hash of each that goes.

    Raises OSError where the folder cannot be made or listed, ValueError where it may not hold a block. One thread calls
    all of it.
    """

    def __init__(self, folder: Path, most_bytes: int, block_bytes: int) -> None:
        self._folder = folder
        self._most = most_bytes
        self._size = HEAD.size + block_bytes
        if self._size > most_bytes:
            raise ValueError(f"{most_bytes} bytes hold no block of {self._size}")
        self._there: OrderedDict[bytes, None] = OrderedDict()  # the last used last
        self._own = set[bytes]()  # written here, while another process has the folder
        self._waiting: dict[bytes, Any] = {}
        self._lock = threading.Lock()  # of `_waiting`
        self._jobs: queue.SimpleQueue[tuple[bytes, Any] | None] = queue.SimpleQueue()  # without content: remove it
        self.on_gone: Callable[[bytes], object] = lambda hashed: None
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._handle: int | None = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._alone = self._lock_folder()
        if not self._alone:
            action = "give each executor a --kv-tier-dir of its own, unless one takes the place of the other"
            log.warning("tier_shared", folder=str(folder), reason="another executor has it", action=action)
        self._list()
        self._trim()
        self._thread = threading.Thread(target=self._work, name="ferrum-tier", daemon=True)
        self._thread.start()

    def __contains__(self, hashed: bytes) -> bool:
        return hashed in self._there

    @property
    def held_bytes(self) -> int:
        """Of all files."""
        return len(self._there) * self._size

    def hashes(self) -> list[bytes]:
        """Of all blocks."""
        return list(self._there)

    def read(self, hashed: bytes) -> bytes | None:
        """The content of a block, or None where it is not there, or is not what was written."""
        if hashed not in self._there:
            return None
        with self._lock:
            waiting = self._waiting.get(hashed)
        if waiting is not None:
            self._there.move_to_end(hashed)
            return bytes(waiting)
        try:
            data = self._path(hashed).read_bytes()
        except OSError as error:
            self._lost(hashed, error.strerror or str(error))
            return None
        content = memoryview(data)[HEAD.size :]
        if len(data) != self._size or HEAD.unpack_from(data) != (MAGIC, hashed, len(content), zlib.crc32(content)):
            self._lost(hashed, "its content is not what was written")
            return None
        self._there.move_to_end(hashed)
        return bytes(content)

    def write(self, hashed: bytes, read: Callable[[], Any]) -> bool:
        """Have the block that ``read`` returns (a buffer that nobody changes any more) written soon, unless it is
        there. False: it is dropped, the disk is behind."""
        if hashed in self._there:
            self._there.move_to_end(hashed)
            return True
        with self._lock:
            if len(self._waiting) * self._size >= WAITING_BYTES:
                return False
            self._waiting[hashed] = content = read()
        if not self._alone and not self._path(hashed).exists():
            self._own.add(hashed)
        self._jobs.put((hashed, content))
        self._there[hashed] = None
        self._trim()
        return True

    def end(self, blocks: Iterable[tuple[bytes, Callable[[], Any]]], most_s: float) -> None:
        """Write these too, as far as ``most_s`` seconds reach, and wait until all is written. Nothing is after it."""
        last = time.monotonic() + most_s
        for hashed, read in blocks:
            while not self.write(hashed, read) and time.monotonic() < last:
                time.sleep(PAUSE_S)
        self._jobs.put(None)
        self._thread.join(max(0.0, last - time.monotonic()))
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def clear(self) -> None:
        """Forget all."""
        self._take_over()
        for hashed in self.hashes():
            self._drop(hashed)

    # --- inside -----------------------------------------------------------------------------------------------------

    def _path(self, hashed: bytes) -> Path:
        return self._folder / hashed.hex()

    def _lock_folder(self) -> bool:
        """Whether this process has the folder now. A file system without locks is taken to have one process."""
        assert self._handle is not None  # noqa: S101 - it has not ended
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno not in {errno.EWOULDBLOCK, errno.EACCES}
        return True

    def _take_over(self) -> None:
        """Have the folder, with all that lies there, if the process that had it has ended."""
        if not self._alone and self._handle is not None and self._lock_folder():
            self._alone = True
            self._own.clear()
            with suppress(OSError):  # it was moved away
                self._list()

    def _list(self) -> None:
        """Know what lies there and is not known: it was used before all that is."""
        found, others = list[tuple[float, bytes]](), list[tuple[float, bytes]]()
        for each in os.scandir(self._folder):
            with suppress(OSError, ValueError):
                if each.name.endswith(".partial") and time.time() - each.stat().st_mtime > LEFT_BEHIND_S:
                    os.unlink(each.path)
                elif len(hashed := bytes.fromhex(each.name)) == HASH_BYTES and hashed not in self._there:
                    whole = each.stat().st_size == self._size
                    (found if whole else others).append((each.stat().st_mtime, hashed))
        if others:
            log.warning(
                "cached_block_lost",
                folder=str(self._folder),
                blocks=len(others),
                reason="their files have another length than what was written",
                action="they are computed again",
            )
        for _, hashed in sorted(found, reverse=True):
            self._there[hashed] = None
            self._there.move_to_end(hashed, last=False)
        if self._alone:
            for _, hashed in others:
                self._path(hashed).unlink(missing_ok=True)

    def _lost(self, hashed: bytes, why: str) -> None:
        log.warning("cached_block_lost", file=str(self._path(hashed)), reason=why, action="it is computed again")
        self._drop(hashed)

    def _trim(self) -> None:
        while self.held_bytes > self._most:
            self._drop(next(iter(self._there)))

    def _drop(self, hashed: bytes) -> None:
        self._take_over()
        self._there.pop(hashed, None)
        if self._alone or hashed in self._own:
            self._own.discard(hashed)
            self._jobs.put((hashed, None))
        self.on_gone(hashed)

    def _work(self) -> None:
        """Write and remove files, in the order in which that was asked for."""
        failed = False
        while (job := self._jobs.get()) is not None:
            hashed, content = job
            path = self._path(hashed)
            try:
                if content is None:
                    path.unlink(missing_ok=True)
                else:
                    _write(path, hashed, memoryview(content).cast("B"))
                    failed = False
            except OSError as error:
                if not failed:  # once: a full disk fails every time
                    log.warning(
                        "tier_write_failed",
                        file=str(path),
                        error=error.strerror or str(error),
                        action=f"{ACTIONS.get(error.errno or 0, 'see why')}; the executor goes on without",
                    )
                failed = True
            finally:
                with self._lock:
                    if self._waiting.get(hashed) is content:
                        self._waiting.pop(hashed, None)


def _write(path: Path, hashed: bytes, content: memoryview) -> None:
    """Whole or not at all: a reader sees no half of it."""
    partial = path.with_suffix(f".{os.getpid()}.partial")
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(HEAD.pack(MAGIC, hashed, len(content), zlib.crc32(content)))
            file.write(content)
        partial.rename(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
