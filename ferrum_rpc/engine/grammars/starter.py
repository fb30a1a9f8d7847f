"""The process that has loaded the tokenizer, as the engine sees it: it starts the processes of grammars."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from typing import Final

import structlog

from ferrum_rpc.engine.grammars.messages import READY

log = structlog.get_logger("ferrum_rpc.engine")

START_S: Final = 30.0
"""Seconds for which the start of the engine waits until the tokenizer is loaded."""

RESTART_S: Final = 1.0
"""Seconds between two starts of it."""


class NoGrammars(Exception):
    """The tokenizer cannot be loaded, or the grammar library."""


class GrammarStarter:
    """Runs `worker` with ``arguments``; started again when it has ended."""

    def __init__(self, *arguments: str) -> None:
        self._arguments = arguments
        self._control: socket.socket | None = None
        self._started = 0.0
        self.process: subprocess.Popen[bytes] | None = None
        self._start()

    def check(self) -> None:
        """Wait until the tokenizer is loaded. Raises `NoGrammars`."""
        assert self._control is not None  # noqa: S101 - it was just started
        self._control.settimeout(START_S)
        try:
            answer = self._control.recv(1024)
        except TimeoutError:
            raise NoGrammars(f"the tokenizer was not loaded in {START_S:g} s") from None
        if answer != READY:
            raise NoGrammars(answer.decode(errors="replace") or "the process that loads the tokenizer has ended")
        self._control.setblocking(False)

    def start(self, masks: int) -> socket.socket | None:
        """Start a process with the file ``masks``; our end of its socket. None: not now, try again."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                if self._control is None or self.process is None or self.process.poll() is not None:
                    raise BrokenPipeError
                socket.send_fds(self._control, [b"+"], [theirs.fileno(), masks])
            except OSError as error:
                ours.close()
                if not isinstance(error, BlockingIOError) and time.monotonic() - self._started > RESTART_S:
                    log.warning("grammar_process_ended", action="nothing: it is started again; if often, see memory")
                    self._start()
                return None
        ours.setblocking(False)
        return ours

    def close(self) -> None:
        """End it."""
        if self._control is not None:
            self._control.close()
            self._control = None
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def _start(self) -> None:
        self.close()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        command = [sys.executable, "-m", f"{__package__}.worker", str(theirs.fileno()), *self._arguments]
        with theirs:
            self.process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL)
        self._control, self._started = ours, time.monotonic()
