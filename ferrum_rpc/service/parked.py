"""The files of parked sequences: a folder that belongs to this process, and how much lies there.

What an earlier process left there is deleted: its handles are of another life. A lock keeps two processes from sharing
a folder.

A file is deleted beside the event loop, and no answer waits for it: a name is used once, and what is left when the
process ends is deleted by the next one, so no file is read that is no sequence's.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Final

import structlog

from ferrum_rpc.core import Limits
from ferrum_rpc.errors import InvalidRequest, SequencesExhausted
from ferrum_rpc.service.records import Account, Parked, Resource, SequenceRecord

log = structlog.get_logger("ferrum_rpc.parking")

PREFIX: Final = "ferrum-parked-"
NAME: Final = re.compile(rf"{PREFIX}\d+")
LOCK: Final = "ferrum-parked.lock"
CLOSE_S: Final = 5.0


class ParkedFiles:
    """The files in ``folder`` (None: no sequence is parked): ``bytes`` of ``sequences``. Those that are being written
    count by what they will have at most."""

    def __init__(self, folder: Path | None, limits: Limits) -> None:
        self._folder = folder
        self._most = limits.kv_park_bytes
        self._count = 0
        self._lock: int | None = None
        self._jobs = set[asyncio.Task[Any]]()
        self.slots = asyncio.Semaphore(limits.max_transfers)
        """Sequences that are parked or brought back at a time."""
        self.bytes = self.sequences = 0

    @property
    def offered(self) -> bool:
        return self._folder is not None

    def open(self) -> None:
        """Make the folder this process's. Raises `InvalidRequest`."""
        folder = self._folder
        if folder is None:
            return
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise InvalidRequest(f"kv_park_dir {folder}: {error.strerror or error}", field="kv_park_dir") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            raise InvalidRequest(
                f"kv_park_dir {folder} is another executor's; give each a folder of its own", field="kv_park_dir"
            ) from None
        self._lock = lock
        self._delete_all()

    async def close(self) -> None:
        """Nothing is parked any more. Of an engine that hangs jobs are left."""
        if self._jobs:
            await asyncio.wait(self._jobs, timeout=CLOSE_S)
        if self._lock is not None:
            self._delete_all()
            os.close(self._lock)
            self._lock = None

    def start(self, job: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run what moves a cache, whether or not anything waits for it."""
        task = asyncio.create_task(job, name="ferrum-park")
        self._jobs.add(task)
        task.add_done_callback(self._jobs.discard)
        return task

    def take(self, account: Account, size: int) -> Path:
        """Room for a file of ``size`` bytes, and its path. Raises `SequencesExhausted` and `QuotaExceeded`."""
        assert self._folder is not None  # noqa: S101 - it is offered
        if self.bytes + size > self._most:
            raise SequencesExhausted(
                f"{self.bytes} bytes are parked, {size} more would be above {self._most}; release some",
                metadata={"kv_park_bytes": self._most, "parked_bytes": self.bytes, "needed_bytes": size},
            )
        account.take(Resource.PARKED_BYTES, size)
        self.bytes += size
        self._count += 1
        return self._folder / f"{PREFIX}{self._count}"

    def give(self, account: Account, size: int) -> None:
        """So many bytes are free again."""
        account.give(Resource.PARKED_BYTES, size)
        self.bytes -= size

    def keep(self, record: SequenceRecord, parked: Parked, taken: int) -> None:
        """The sequence is parked; ``taken`` is what was taken for its file."""
        self.give(record.account, taken - parked.size)
        record.parked = parked
        self.sequences += 1

    def drop(self, record: SequenceRecord) -> None:
        """It is back or gone, if it was parked: its file is not needed."""
        parked, record.parked = record.parked, None
        if parked is not None:
            self.sequences -= 1
            self.give(record.account, parked.size)
            self.delete(parked.path)

    def delete(self, path: Path) -> None:
        """The file is not needed, if it is there."""
        self.start(_delete(path))

    def _delete_all(self) -> None:
        assert self._folder is not None  # noqa: S101 - it is open
        for path in self._folder.glob(f"{PREFIX}*"):
            if NAME.fullmatch(path.name):
                path.unlink(missing_ok=True)


async def _delete(path: Path) -> None:
    try:
        await asyncio.to_thread(path.unlink, missing_ok=True)
    except OSError as error:
        action = "look at the disk of --kv-park-dir; the file is deleted when the executor ends or starts again"
        log.warning("parked_file_left", path=str(path), error=error.strerror or str(error), action=action)
