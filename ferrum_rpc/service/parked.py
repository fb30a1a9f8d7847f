"""The files of parked sequences, in a folder of this process, and their total size.

The folder is accessible only to this user and is made inside the given one, which may have another owner (a mounted
volume). Files of an earlier process are deleted: its handles are invalid. A lock keeps two processes from sharing a
folder.

Each frame of a file has a digest with a secret key of this process, which also covers the file's name and the frame's
position. So frames that pass the check are as written, and need no other check.

Files are deleted outside the event loop, and no answer waits for that: a name is used once, and the next process
deletes remaining files, so only files of live sequences are read.
"""

from __future__ import annotations

import asyncio
import fcntl
import hmac
import os
import re
import stat
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final

import structlog

from ferrum_rpc.core import Limits
from ferrum_rpc.errors import InvalidRequest, SequencesExhausted
from ferrum_rpc.private_files import PrivateFolder
from ferrum_rpc.service.guard.slots import Slots
from ferrum_rpc.service.records import Account, Parked, Resource, SequenceRecord
from ferrum_rpc.wire.kv_stream import FrameFile

log = structlog.get_logger("ferrum_rpc.parking")

FOLDER: Final = "ferrum-parked"
PREFIX: Final = "ferrum-parked-"
NAME: Final = re.compile(rf"{PREFIX}\d+")
OLD_LOCK: Final = "ferrum-parked.lock"
"""The lock file of earlier versions, in the given folder."""

DIGEST_BYTES: Final = 32
CLOSE_S: Final = 5.0


class ParkedFiles:
    """The files in ``folder`` (None: no parking): ``bytes`` of ``sequences``. Files being written count with their
    maximum size."""

    def __init__(self, folder: Path | None, limits: Limits) -> None:
        self._given = folder
        self._limit = limits.kv_park_bytes
        self._count = 0
        self._folder: PrivateFolder | None = None
        self._mac = hmac.new(os.urandom(DIGEST_BYTES), digestmod="sha256")
        self._jobs = set[asyncio.Task[Any]]()
        self._slots = Slots(limits.max_transfers)
        self.bytes = self.sequences = 0

    def slot(self, account: Account) -> AbstractAsyncContextManager[None]:
        """A slot for parking or restoring a sequence; each caller has its share of the slots."""
        return self._slots.held(((account, account.most[Resource.TRANSFERS]),))

    @property
    def offered(self) -> bool:
        return self._given is not None

    def open(self) -> None:
        """Lock the folder for this process. Raises `InvalidRequest`."""
        given = self._given
        if given is None:
            return
        try:
            folder = PrivateFolder(given / FOLDER)
            try:
                if not (folder.lock() and _delete_old(given)):
                    raise InvalidRequest(
                        f"kv_park_dir {given} is another executor's; give each a folder of its own", field="kv_park_dir"
                    )
                self._delete_all(folder)
            except BaseException:
                folder.close()
                raise
        except OSError as error:
            raise InvalidRequest(f"kv_park_dir {given}: {error.strerror or error}", field="kv_park_dir") from None
        self._folder = folder

    async def close(self) -> None:
        """Delete all files. Jobs of an engine that hangs may remain."""
        if self._jobs:
            await asyncio.wait(self._jobs, timeout=CLOSE_S)
        if self._folder is not None:
            self._delete_all(self._folder)
            self._folder.close()
            self._folder = None

    def start(self, job: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run what moves a cache, whether or not anything waits for it."""
        task = asyncio.create_task(job, name="ferrum-park")
        self._jobs.add(task)
        task.add_done_callback(self._jobs.discard)
        return task

    def allocate(self, account: Account, size: int) -> Path:
        """Allocate a file of ``size`` bytes, and its path. Raises `SequencesExhausted` and `QuotaExceeded`."""
        if self.bytes + size > self._limit:
            raise SequencesExhausted(
                f"{self.bytes} bytes are parked, {size} more would be above {self._limit}; release some",
                metadata={"kv_park_bytes": self._limit, "parked_bytes": self.bytes, "needed_bytes": size},
            )
        account.allocate(Resource.PARKED_BYTES, size)
        self.bytes += size
        self._count += 1
        return self.folder.path / f"{PREFIX}{self._count}"

    def create(self, path: Path) -> ParkedFile:
        """A new file. Raises OSError."""
        return self._file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, "wb")

    def read(self, path: Path) -> ParkedFile:
        """A written file. Raises OSError, and `NotPrivateError` for a file that is not this process's."""
        return self._file(path, os.O_RDONLY, "rb")

    def _file(self, path: Path, flags: int, mode: str) -> ParkedFile:
        file: Any = os.fdopen(self.folder.open(path.name, flags), mode)
        mac = self._mac.copy()
        mac.update(path.name.encode() + b"\0")
        return ParkedFile(file, mac)

    def free(self, account: Account, size: int) -> None:
        """Free so many bytes."""
        account.free(Resource.PARKED_BYTES, size)
        self.bytes -= size

    def keep(self, record: SequenceRecord, parked: Parked, taken: int) -> None:
        """Note that the sequence is parked; ``taken`` is the size allocated for its file."""
        self.free(record.account, taken - parked.size)
        record.parked = parked
        self.sequences += 1

    def drop(self, record: SequenceRecord) -> None:
        """Drop the file of a sequence that was restored or has ended, if it was parked."""
        parked, record.parked = record.parked, None
        if parked is not None:
            self.sequences -= 1
            self.free(record.account, parked.size)
            self.delete(parked.path)

    def delete(self, path: Path) -> None:
        """Delete a file if it exists."""
        if self._folder is not None:  # else all were deleted
            self.start(asyncio.to_thread(_unlink, partial(self._folder.unlink, path.name), path))

    @property
    def folder(self) -> PrivateFolder:
        """Where the files are, while parking is offered and the server runs."""
        assert self._folder is not None  # noqa: S101 - it is offered
        return self._folder

    @staticmethod
    def _delete_all(folder: PrivateFolder) -> None:
        for name, _ in folder.files():
            if NAME.fullmatch(name):
                _unlink(partial(folder.unlink, name), folder.path / name)


class ParkedFile(FrameFile):
    """The file of a parked sequence. A frame's seal is a keyed digest of its content and its position."""

    SEAL_BYTES = DIGEST_BYTES

    def __init__(self, file: BinaryIO, mac: hmac.HMAC) -> None:
        super().__init__(file)
        self._mac = mac

    def _seal(self, at: int, frame: bytes) -> bytes:
        mac = self._mac.copy()
        mac.update(at.to_bytes(8, "little"))
        mac.update(frame)
        return mac.digest()


def _delete_old(given: Path) -> bool:
    """Delete files of an earlier version in the given folder itself. False: a process of that version uses it."""
    try:
        lock = os.open(given / OLD_LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # there is none, or it is not ours
        lock = None
    try:
        if lock is not None:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return False
        for path in given.iterdir():
            if (NAME.fullmatch(path.name) or path.name == OLD_LOCK) and stat.S_ISREG(path.lstat().st_mode):
                _unlink(path.unlink, path)
    finally:
        if lock is not None:
            os.close(lock)
    return True


def _unlink(unlink: Callable[[], object], path: Path) -> None:
    try:
        unlink()
    except OSError as error:
        action = "look at the disk of --kv-park-dir; the file is deleted when the executor ends or starts again"
        log.warning("park_file_not_deleted", path=str(path), error=error.strerror or str(error), action=action)
