"""A folder that only this user can change, and files in it.

An executor trusts its files on disk, so no other user may have written them. The folder is created with mode 0700; a
folder or file that belongs to another user, or that others can write, is refused. Files are opened relative to the
folder's descriptor, so that a user who can write above the folder cannot replace it. Only regular files are opened, and
links are not followed: opening a pipe would wait for its other end.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final

KEY_BYTES: Final = 32
WRITABLE: Final = stat.S_IWGRP | stat.S_IWOTH
ACCESSIBLE: Final = stat.S_IRWXG | stat.S_IRWXO


class NotPrivateError(PermissionError):
    """A refused folder or file; ``strerror`` names it and the reason."""


class PrivateFolder:
    """The folder at ``path``, created with its parents if missing. Raises `NotPrivateError` if it is refused, and
    OSError if it cannot be created or opened."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except NotADirectoryError as error:  # a link to a folder too
            raise NotPrivateError(error.errno, f"{path} is not a folder") from None
        try:
            _check(os.fstat(self._descriptor), path, WRITABLE)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Close the folder and release the lock."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def lock(self) -> bool:
        """Lock the folder. Whether this process has it now, and no other one. On a file system without locks every
        process gets it."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno not in {errno.EWOULDBLOCK, errno.EACCES}
        return True

    def open(self, name: str, flags: int, refused: int = WRITABLE) -> int:
        """A descriptor of a regular file, created with mode 0600 if the flags say so. Raises `NotPrivateError` if
        others have one of the ``refused`` permissions, and OSError."""
        safe = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            file = os.open(name, flags | safe, 0o600, dir_fd=self._descriptor)
        except OSError as error:
            if error.errno not in {
                errno.ELOOP,
                errno.ENXIO,
                errno.EISDIR,
            }:  # a link, a pipe, a folder
                raise
            raise NotPrivateError(error.errno, f"{self.path / name} is not a regular file") from None
        try:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode):
                raise NotPrivateError(errno.EINVAL, f"{self.path / name} is not a regular file")
            _check(status, self.path / name, refused)
        except OSError:
            os.close(file)
            raise
        return file

    def key(self, name: str = "key") -> bytes:
        """The secret of this folder, `KEY_BYTES` random bytes, created if missing. Several processes that start at the
        same moment get the same one: each checks while it holds the file's lock."""
        file = self.open(name, os.O_RDWR | os.O_CREAT, ACCESSIBLE)
        try:
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
            key = os.read(file, KEY_BYTES + 1)
            if len(key) != KEY_BYTES:  # new, or damaged: what it was used for is of no use any more
                key = os.urandom(KEY_BYTES)
                os.ftruncate(file, 0)
                os.pwrite(file, key, 0)
        finally:
            os.close(file)
        return key

    def files(self) -> list[tuple[str, os.stat_result]]:
        """The names of the regular files in the folder."""
        found = list[tuple[str, os.stat_result]]()
        with os.scandir(self._descriptor) as entries:
            for each in entries:
                with suppress(FileNotFoundError):
                    if stat.S_ISREG((status := each.stat(follow_symlinks=False)).st_mode):
                        found.append((each.name, status))
        return found

    def has(self, name: str) -> bool:
        """Whether the folder has an entry of this name."""
        try:
            os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def rename(self, name: str, new: str) -> None:
        """Rename a file, and replace the target if it exists."""
        os.rename(name, new, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)

    def unlink(self, name: str) -> None:
        """Delete a file if it exists."""
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._descriptor)


def _check(status: os.stat_result, path: Path, refused: int) -> None:
    if status.st_uid != (user := os.geteuid()):
        raise NotPrivateError(errno.EPERM, f"{path} belongs to user {status.st_uid}, and this process is user {user}")
    if status.st_mode & refused:
        mode = f"{stat.S_IMODE(status.st_mode):04o}"
        verb = "write" if refused == WRITABLE else "read or write"
        raise NotPrivateError(errno.EPERM, f"others can {verb} {path}, whose mode is {mode}: chmod go= {path}")
