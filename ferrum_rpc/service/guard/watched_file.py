"""Files of the security settings, reloaded when they change: tokens and certificates rotate without a restart.

An invalid change is logged once and counted, and the previous content stays in use.
"""

from __future__ import annotations

import os
import stat
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

import structlog

log = structlog.get_logger("ferrum_rpc.security")

T = TypeVar("T")

Stamps = tuple[tuple[int, int, int], ...]


class SecurityError(RuntimeError):
    """A security setting, or a file that it names, is invalid; the server does not start. The message names it and
    never contains a secret."""


class WatchedFiles(ABC, Generic[T]):
    """``content``: the content of the files at ``paths``. Raises `SecurityError` if they are invalid at the start;
    ``failed`` is called if they are invalid later."""

    what: ClassVar[str]
    """The name of the files in log events and errors."""

    def __init__(self, *paths: Path, failed: Callable[[], object] = lambda: None) -> None:
        self.paths = paths
        self._failed = failed
        self._lock = threading.Lock()
        try:
            self._stamps = self._look()
            self.content = self._read()
        except OSError as error:
            raise SecurityError(f"{self.what}: {error.filename}: {error.strerror}") from error

    @abstractmethod
    def _read(self) -> T:
        """The content. Raises `SecurityError` or OSError if it is invalid."""

    def refresh(self) -> bool:
        """Reload the files if one has changed. True if the content is new. May be called by any thread; never
        raises."""
        with self._lock:
            stamps: Stamps = ()
            try:
                stamps = self._look()
                if stamps == self._stamps:
                    return False
                self.content = self._read()
            except Exception as error:
                if stamps != self._stamps:  # once for each state of the files
                    self._stamps = stamps
                    action = f"correct {self.paths[0]}; until then the {self.what} that were read before are used"
                    log.error(f"{self.what}_rejected", error=str(error), action=action)
                    self._failed()
                return False
            self._stamps = stamps
            return True

    def _look(self) -> Stamps:
        status = [os.stat(path) for path in self.paths]
        return tuple((each.st_mtime_ns, each.st_size, each.st_ino) for each in status)

    def _warn_if_open(self, path: Path) -> None:
        """Log a secret that other users of the machine can read or write. It is not refused, because a container may
        have no other users."""
        mode = path.stat().st_mode
        if mode & (stat.S_IRGRP | stat.S_IWGRP | stat.S_IROTH | stat.S_IWOTH):
            action = f"chmod go-rw {path}"
            log.warning(
                "secret_file_permissions",
                what=self.what,
                path=str(path),
                mode=f"{stat.S_IMODE(mode):04o}",
                action=action,
            )
