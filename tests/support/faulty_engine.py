"""Engine processes that fail, or die, when they are told to, and that start in milliseconds.

To import torch takes seconds. So one process does it once, and an engine is a fork of it, in place of the process that
the server would start: `Forge.popen` stands in for `subprocess.Popen`. As a program this file is that one process.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

STAGES = ("plan", "forward", "select", "commit")
FAIL, LOSE, HOLD, HELD = 1, 2, 3, 4


class Fault:
    """A stage hook that fails once, in memory that an engine's process shares: at the ``at``-th of such stages from now
    on. `LOSE`: the device is lost, or the process ``kills`` itself. `HOLD`: it waits there, `HELD`, until `arm(0)`."""

    def __init__(self, path: Path, *, kills: bool) -> None:
        if not path.exists():
            path.write_bytes(bytes(32))
        self._words = np.memmap(path, np.int64, "r+", shape=(4,))
        self._kills = kills

    @property
    def armed(self) -> bool:
        return bool(self._words[0])

    @property
    def held(self) -> bool:
        return bool(self._words[0] == HELD and self._words[3])

    def arm(self, how: int, at: int = 0, stage: str = "select") -> None:
        """0: not at all."""
        self._words[1:] = at, STAGES.index(stage), how == HOLD
        self._words[0] = how

    def __call__(self, stage: str) -> None:
        how, at, index, _ = self._words.tolist()
        if not how or stage != STAGES[index]:
            return
        self._words[1] = at - 1
        if at:
            return
        self._words[0] = HELD if how == HOLD else 0
        while self.held:
            os.sched_yield()
        if how == FAIL:
            raise RuntimeError("as asked")
        if how == LOSE and self._kills:
            os.kill(os.getpid(), signal.SIGKILL)
        if how == LOSE:
            from ferrum_rpc.errors import DeviceLost

            raise DeviceLost("as asked")


def audit(runner: Any, lengths: dict[int, int]) -> str:
    """What is wrong with a runner's books, of sequences that have these lengths."""
    try:
        runner.kv.check()
        assert {number: runner.kv.length(number) for number in lengths} == lengths
        assert runner.kv.state().sequences == len(lengths)
    except Exception as error:
        return repr(error)
    return ""


def build(setup: tuple[Any, Path]) -> Any:
    """The runner of an engine process, which has `audit` as a method."""
    from ferrum_rpc.engine.assembly.build import build_runner

    settings, path = setup
    runner: Any = build_runner(settings, stage=Fault(path, kills=True))
    runner.audit = partial(audit, runner)
    return runner


class Forge:
    """The process that engines are forks of."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        with theirs:
            command = [sys.executable, "-m", "tests.support.faulty_engine", str(theirs.fileno())]
            subprocess.Popen(command, pass_fds=[theirs.fileno()], cwd=Path(__file__).parents[2])
        self._socket.recv(1)  # it is ready

    def ask(self, what: object, *fds: int) -> int:
        """A number of the answer."""
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(what).encode()], list(fds))
            answer = json.loads(self._socket.recv(1 << 10))
        assert isinstance(answer, int)
        return answer

    def popen(self, command: list[str], pass_fds: tuple[int, ...], stdin: int) -> Forked:
        """The ``last`` one is kept."""
        self.last = Forked(self, command[-1], pass_fds)
        return self.last


class Forked:
    """What a server uses of a `subprocess.Popen`."""

    def __init__(self, forge: Forge, slots: str, fds: tuple[int, ...]) -> None:
        reading, writing = os.pipe()
        self.stdin: Any = os.fdopen(writing, "wb")
        self._forge = forge
        self._status: int | None = None
        self.pid = forge.ask(slots, reading, *fds)
        os.close(reading)

    def kill(self) -> None:
        if self._status is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """Waits however long it takes: it is called for what is about to end."""
        if self._status is None:
            self._status = self._forge.ask(self.pid)
        return self._status


def main() -> None:
    """Fork and wait, as asked, until the test is gone."""
    import structlog
    import torch

    import ferrum_rpc.engine.assembly.build
    import ferrum_rpc.models.identity  # noqa: F401 - what an engine imports
    from ferrum_rpc.engine.process.child import work

    torch.set_num_threads(1)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        connection.send(b"!")
        while True:
            data, fds, *_ = socket.recv_fds(connection, 1 << 10, 4)
            if not data:
                return
            what = json.loads(data)
            if isinstance(what, int):
                answer = os.waitstatus_to_exitcode(os.waitpid(what, 0)[1])
            elif (answer := os.fork()) == 0:
                connection.close()
                stdin, *rest = fds
                sys.stdin = os.fdopen(stdin)
                os._exit(work(build, [*map(str, rest), what]))
            for fd in fds:
                os.close(fd)
            connection.send(json.dumps(answer).encode())


if __name__ == "__main__":
    main()
