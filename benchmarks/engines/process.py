"""Sides in processes of their own: a server that tells its address, and a peer that is driven by lines of JSON.

A peer lives in a Python environment of its own where it needs one and runs a program of `benchmarks.engines.peers`. Its
threads wait as ours do (see `ferrum_rpc.runtime`): libgomp's own default spins for milliseconds, and next to any other
busy process such a team takes seconds for a step that takes 0.1 s otherwise (measured: 4.2 s).
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from benchmarks.cases import LEAD_IN, PREFILL, Cell
from benchmarks.compare import Round, Unsupported
from benchmarks.machine import ROOT

REFERENCE: Final = "ours, gRPC session"
SCRIPTS: Final = "benchmarks.engines.peers"
START_S: Final = 120.0
STOP_S: Final = 20.0
LINE_BYTES: Final = 64 << 20
LISTENING: Final = "listening"


class ServerDied(RuntimeError):
    """The process ended, or said nothing, before it listened."""


class PeerFailed(Unsupported):
    """The peer's own error, or its last words."""


async def _start(
    command: tuple[str, ...], root: Path, more: dict[str, str], pipe: int | None = None
) -> asyncio.subprocess.Process:
    """``FERRUM_*`` variables are not passed on: all sides have the settings that the program wrote."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FERRUM_")}
    return await asyncio.create_subprocess_exec(
        *command,
        cwd=root,
        env=environment | more,
        stdin=pipe,
        stdout=pipe,
        stderr=asyncio.subprocess.PIPE,
        limit=LINE_BYTES,
    )


async def _ended(process: asyncio.subprocess.Process, reading: asyncio.Task[None]) -> None:
    try:
        await asyncio.wait_for(process.wait(), STOP_S)
    except TimeoutError:
        process.kill()
        await process.wait()
    await reading


async def _listen(
    process: asyncio.subprocess.Process, said: deque[str], target: asyncio.Future[str] | None = None
) -> None:
    """Keep the pipe empty and the last lines, which explain a failure; and find the address of a server."""
    assert process.stderr is not None
    async for line in process.stderr:
        if text := line.decode(errors="replace").strip():
            said.append(text)
        if target is None or target.done():
            continue
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and event.get("event") == LISTENING:
            target.set_result(event["target"])
    if target is not None and not target.done():
        target.set_exception(ServerDied("the process ended"))


@asynccontextmanager
async def served(*arguments: str, root: Path = ROOT) -> AsyncIterator[str]:
    """Run ``python ARGUMENTS`` in the checkout ``root`` and give the target that it names in a line of JSON on standard
    error: ``{"event": "listening", "target": "127.0.0.1:12345"}``."""
    process = await _start((sys.executable, *arguments), root, {})
    said: deque[str] = deque(maxlen=20)
    target: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    reading = asyncio.create_task(_listen(process, said, target))
    try:
        try:
            address = await asyncio.wait_for(target, START_S)
        except (TimeoutError, ServerDied) as error:
            raise ServerDied("\n".join([f"python {' '.join(arguments)} did not listen", *said])) from error
        yield address
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await _ended(process, reading)


@dataclass(frozen=True, slots=True)
class PeerKind:
    """A peer as it is started: its script and its options, the Python environment that it needs (none: ours has it),
    variables of its own, and which of ours it is compared with: the one whose weights have as many bits."""

    name: str
    script: str
    options: dict[str, Any] = field(default_factory=dict)
    environment: str = ""
    variables: dict[str, str] = field(default_factory=dict)
    rival: str = REFERENCE


class PeerProcess:
    """A peer that is up and has loaded the model."""

    def __init__(self, process: asyncio.subprocess.Process, vocab_size: int) -> None:
        self.facts: dict[str, Any] = {}
        self._process = process
        self._vocab_size = vocab_size
        self._said: deque[str] = deque(maxlen=8)
        self._listening = asyncio.create_task(_listen(process, self._said))

    @classmethod
    @asynccontextmanager
    async def open(
        cls, kind: PeerKind, model: str, threads: int, vocab_size: int, home: Path = ROOT
    ) -> AsyncIterator[PeerProcess]:
        """Start it with the Python of its environment, which is in ``home``, and let it load ``model``. Raises
        `PeerFailed`."""
        python = str(home / "bin" / "python") if kind.environment else sys.executable
        variables = {name: value.format(environment=home) for name, value in kind.variables.items()}
        command = (python, "-m", f"{SCRIPTS}.{kind.script}")
        process = await _start(command, ROOT, variables, asyncio.subprocess.PIPE)
        peer = cls(process, vocab_size)
        try:
            peer.facts = await peer._ask(do="open", model=model, threads=threads, options=kind.options)
            yield peer
        finally:
            assert process.stdin is not None
            process.stdin.close()
            await _ended(process, peer._listening)

    async def prepare(self, cell: Cell) -> None:
        """Prompts of the cell."""
        if cell.kind != PREFILL:
            await self._ask(do="prepare", prompts=cell.prompts(self._vocab_size).tolist(), room=LEAD_IN + cell.most)

    async def round(self, cell: Cell, number: int, steps: int) -> Round:
        """Tokens of the round."""
        if cell.kind == PREFILL:
            prompts = cell.fresh(self._vocab_size, number, steps).tolist()
            answer = await self._ask(do="prefill", prompts=prompts, lead_in=1)
        else:
            answer = await self._ask(do="decode", tokens=cell.fed(self._vocab_size, steps).tolist(), lead_in=LEAD_IN)
        if len(answer["step_s"]) != steps:
            raise PeerFailed(f"it timed {len(answer['step_s'])} of {steps} steps")
        return Round(step_s=answer["step_s"], last=answer["last"])

    async def _ask(self, **job: Any) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(job).encode() + b"\n")
            await self._process.stdin.drain()
            line = await self._process.stdout.readline()
        except ConnectionError:
            line = b""
        if not line:
            await asyncio.wait([self._listening], timeout=STOP_S)
            raise PeerFailed(f"it ended: {self._said[-1] if self._said else 'without a word'}")
        answer: dict[str, Any] = json.loads(line)
        if "unsupported" in answer:
            raise Unsupported(answer["unsupported"])
        if "error" in answer:
            raise PeerFailed(answer["error"])
        found: dict[str, Any] = answer["ok"]
        return found
