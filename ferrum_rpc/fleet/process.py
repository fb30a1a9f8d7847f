"""`ferrum-rpc serve` as a child process: it ends with its parent, whatever ended that, and its log reports when it
serves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Final

BOUND: Final = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, which outlives an exec
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.executable, [sys.executable, "-P", "-m", "ferrum_rpc.cli", *sys.argv[2:]])
"""
"""Run in the child, not between fork and exec: an actor has threads."""


class DidNotServeError(RuntimeError):
    """The executor ended before it served; the message is its last error."""


class ServeProcess:
    """A child that serves. To be made in a thread that lives as long as this process: the kernel takes the end of the
    thread for that of the parent. Paths in ``arguments`` begin in ``folder``, where there is such a one. ``ended`` is
    called where it ends without `stop`, in a thread."""

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        ended: Callable[[], None],
        *,
        folder: str = ".",
    ) -> None:
        self.target = ""
        self.instance_id = ""
        self._said = "it said nothing"
        self._ended = ended
        self._stopping = False
        self._decided = threading.Event()
        command = [sys.executable, "-P", "-c", BOUND, str(os.getpid()), "serve", *arguments, "--log-format", "json"]
        there = folder if os.path.isdir(folder) else "/"
        variables = {**os.environ, **environment}
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, env=variables, text=True, cwd=there)
        threading.Thread(target=self._read, name="ferrum-log", daemon=True).start()

    def wait_until_it_serves(self) -> None:
        """Raises `DidNotServeError`."""
        self._decided.wait()
        if not self.target:
            raise DidNotServeError(self._said)

    def stop(self) -> int:
        """Drain it; returns its exit status when it has ended."""
        self._stopping = True
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait()

    def _read(self) -> None:
        for line in self._process.stderr or ():
            sys.stderr.write(line)
            if not self._decided.is_set():
                self._look(line)
        self._process.wait()
        served = self._decided.is_set()
        self._decided.set()
        if served and not self._stopping:
            self._ended()

    def _look(self, line: str) -> None:
        try:
            said = json.loads(line)
        except ValueError:
            self._said = line.strip() or self._said
            return
        match said.get("event"):
            case "ready":
                self.target, self.instance_id = said["target"], said["instance_id"]
                self._decided.set()
            case "startup_failed":
                self._said = said["error"]
