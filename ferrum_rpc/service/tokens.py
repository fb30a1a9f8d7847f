"""Bearer tokens: a file of names, read anew when it changes, so that tokens rotate without a restart.

One ``name token [operator]`` a line, ``#`` begins a comment line. Several tokens may have one name: add the new one,
move the clients over, remove the old one. Only digests are kept, and a token is found by its digest, so that comparing
takes the same time whatever was sent.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

import structlog

from ferrum_rpc.core import Caller
from ferrum_rpc.service.security import SecurityError, warn_if_open

CHECK_EVERY_S: Final = 1.0
"""A removed token works about this long; a look at the file costs some microseconds of the event loop."""

OPERATOR: Final = "operator"

Stamp = tuple[int, int, int]
NO_FILE: Final[Stamp] = (0, 0, 0)

log = structlog.get_logger("ferrum_rpc.security")


class TokenFile:
    """The tokens of a file. Raises `SecurityError` when the file cannot be used at the start; a change that cannot be
    used is logged, what was known stays, and ``failed`` is called."""

    def __init__(self, path: Path, failed: Callable[[], object] = lambda: None) -> None:
        self._path = path
        self._failed = failed
        self._stamp, self._callers = self._read()

    def __len__(self) -> int:
        return len(self._callers)

    def caller(self, token: str) -> Caller | None:
        """Who a token stands for, or None."""
        return self._callers.get(_digest(token))

    def watch(self) -> TokenFile:
        """Look at the file every `CHECK_EVERY_S` seconds as long as somebody holds this object, so that whoever writes
        it is told at once what is wrong with it, and not when the next call comes."""
        _look(asyncio.get_running_loop(), weakref.ref(self))
        return self

    def refresh(self) -> None:
        """Read the file again if it has changed."""
        stamp = NO_FILE
        try:
            stamp = _stamp(os.stat(self._path))
            if stamp == self._stamp:
                return
            self._stamp, self._callers = self._read()
        except Exception as error:
            if stamp != self._stamp:  # once for each state of the file, not once a second
                self._stamp = stamp
                action = "correct the file; until then the tokens that were read before are accepted"
                log.error("tokens_rejected", path=str(self._path), error=str(error), action=action)
                self._failed()
            return
        log.info("tokens_loaded", path=str(self._path), tokens=len(self._callers))

    def _read(self) -> tuple[Stamp, dict[bytes, Caller]]:
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())  # before the content: a change between the two is then seen later
                text = file.read().decode()
        except OSError as error:
            raise SecurityError(f"tokens: {self._path}: {error.strerror}") from error
        except UnicodeDecodeError:
            raise SecurityError(f"tokens: {self._path} is no text") from None  # the error would show the bytes
        callers = parse(text, str(self._path))
        warn_if_open(self._path, status.st_mode, "tokens")
        return _stamp(status), callers


def parse(text: str, where: str) -> dict[bytes, Caller]:
    """Callers by the SHA-256 of their token; where more than one is no operator, those share. Raises `SecurityError`
    with the line's number, never with its content."""
    callers: dict[bytes, Caller] = {}
    for number, line in enumerate(text.splitlines(), 1):
        parts = line.split()
        if not parts or parts[0].startswith("#"):
            continue
        if len(parts) not in (2, 3) or parts[2:] not in ([], [OPERATOR]):
            raise SecurityError(f"tokens: {where}, line {number}: write `name token`, or `name token {OPERATOR}`")
        name, token = parts[:2]
        if not (token.isascii() and token.isprintable()):
            raise SecurityError(f"tokens: {where}, line {number}: a token is printable ASCII; it travels in a header")
        if _digest(token) in callers:
            raise SecurityError(f"tokens: {where}, line {number}: the token stands in an earlier line too")
        callers[_digest(token)] = Caller(name, operator=len(parts) == 3)
    if not callers:
        raise SecurityError(f"tokens: {where} holds no token; nobody could call")
    if len({each.name for each in callers.values() if not each.operator}) > 1:
        return {digest: replace(each, shares=not each.operator) for digest, each in callers.items()}
    return callers


def _look(loop: asyncio.AbstractEventLoop, watched: weakref.ref[TokenFile]) -> None:
    if (tokens := watched()) is not None:
        loop.call_later(CHECK_EVERY_S, _look, loop, watched)  # first: whatever goes wrong now, it looks again
        tokens.refresh()


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="surrogateescape")).digest()


def _stamp(status: os.stat_result) -> Stamp:
    return status.st_mtime_ns, status.st_size, status.st_ino
