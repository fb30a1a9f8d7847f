"""A server in a process of its own: started, waited for until it tells its address, and stopped at the end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from benchmarks.environment import ROOT

START_S = 120.0
STOP_S = 20.0
LISTENING = "listening"


class ServerDied(RuntimeError):
    """The process ended, or said nothing, before it listened."""


@asynccontextmanager
async def served(*arguments: str) -> AsyncIterator[str]:
    """Run ``python ARGUMENTS`` and give the target that it names in a line of JSON on standard error:
    ``{"event": "listening", "target": "127.0.0.1:12345"}``. ``FERRUM_*`` variables are not passed on: both sides have
    the settings that the program wrote.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FERRUM_")}
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, cwd=ROOT, env=environment, stderr=asyncio.subprocess.PIPE
    )
    lines: deque[str] = deque(maxlen=20)
    target: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    reading = asyncio.create_task(_read(process, lines, target))
    try:
        try:
            address = await asyncio.wait_for(target, START_S)
        except (TimeoutError, ServerDied) as error:
            raise ServerDied("\n".join([f"python {' '.join(arguments)} did not listen", *lines])) from error
        yield address
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), STOP_S)
        except TimeoutError:
            process.kill()
            await process.wait()
        await reading


async def _read(process: asyncio.subprocess.Process, lines: deque[str], target: asyncio.Future[str]) -> None:
    """Keep the pipe empty, and the last lines for whoever must explain a failure."""
    assert process.stderr is not None
    async for line in process.stderr:
        lines.append(line.decode(errors="replace").rstrip())
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and event.get("event") == LISTENING and not target.done():
            target.set_result(event["target"])
    if not target.done():
        target.set_exception(ServerDied("the process ended"))
