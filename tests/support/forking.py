"""Server processes that are forked from one that has imported everything: importing torch takes three seconds, which is
more than most tests do with a server. They are `ferrum-rpc serve` in all else: a process, its log, its exit status.

`python -m tests.support.forking FD` is the process that they are forked from. It reads arguments and environments from
a socket, with the ends of two pipes: the server's standard error, and one for its process id and its exit status. It
has one thread, and gRPC's core has not begun, which no fork would survive.
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import json
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
LIMIT: Final = 1 << 22
"""Characters of a log line, at most."""


class Forked:
    """As much of `asyncio.subprocess.Process` as a test of a server uses."""

    def __init__(self, pid: int, stderr: asyncio.StreamReader, status: asyncio.StreamReader) -> None:
        self.pid = pid
        self.stdin = None
        self.stderr = stderr
        self.returncode: int | None = None
        self._ending = asyncio.create_task(self._end(status))

    async def wait(self) -> int:
        return await asyncio.shield(self._ending)

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    async def _end(self, status: asyncio.StreamReader) -> int:
        self.returncode = int(await status.readline())
        return self.returncode


async def fork(arguments: list[str], environment: dict[str, str]) -> Forked:
    """`ferrum-rpc` with these arguments, or the module behind ``-m``, in the root of the checkout."""
    stderr, status = os.pipe(), os.pipe()
    message = json.dumps([arguments, environment]).encode()
    await asyncio.to_thread(socket.send_fds, _forks(), [message], [stderr[1], status[1]])
    for end in (stderr[1], status[1]):
        os.close(end)
    lines, said = await _reader(stderr[0]), await _reader(status[0])
    return Forked(int(await said.readline()), lines, said)


async def _reader(descriptor: int) -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=LIMIT)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb", buffering=0)
    )
    return reader


@cache
def _forks() -> socket.socket:
    """The socket of a process that forks, one for all tests of this process; it ends when the socket closes, which a
    process that a test forks may hold open."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = (sys.executable, "-m", __name__, str(its.fileno()))
    process = subprocess.Popen(command, cwd=ROOT, pass_fds=[its.fileno()])
    its.close()
    atexit.register(process.wait)
    atexit.register(process.terminate)
    return ours


def main() -> None:
    """Import what a server imports, then fork one for each message."""
    from ferrum_rpc.runtime import prepare

    prepare()
    import ferrum_rpc.engine.assembly.build
    import ferrum_rpc.serve  # noqa: F401 - what a server imports

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    requests = socket.socket(fileno=int(sys.argv[1]))
    gc.collect()
    gc.freeze()
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, LIMIT, 2)
        if not message:
            return
        if os.fork() == 0:
            requests.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _keep(*json.loads(message), *descriptors)
        for each in descriptors:
            os.close(each)


def _keep(arguments: list[str], environment: dict[str, str], stderr: int, status: int) -> None:
    """Fork the server, and wait for its end, which only a parent can."""
    pid = os.fork()
    if pid == 0:
        os.close(status)
        os.dup2(stderr, 2)
        os.close(stderr)
        os.environ.clear()
        os.environ.update(environment)
        random.seed()
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        from ferrum_rpc.cli import main as command

        command(arguments)
    os.close(stderr)
    os.write(status, f"{pid}\n".encode())
    os.write(status, f"{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}\n".encode())
    os._exit(0)


if __name__ == "__main__":
    main()
