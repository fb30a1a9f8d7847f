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
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final, TypeVar
from unittest import mock

from benchmarks.cases import LEAD_IN, PREFILL, Cell
from benchmarks.compare import Round, Unsupported
from benchmarks.machine import ROOT

REFERENCE: Final = "ours, gRPC session"
SCRIPTS: Final = "benchmarks.engines.peers"
START_S: Final = 120.0
STOP_S: Final = 20.0
LINE_BYTES: Final = 64 << 20
LISTENING: Final = "listening"

T = TypeVar("T")


class ServerDied(RuntimeError):
    """The process ended, or said nothing, before it listened."""


class PeerFailed(Unsupported):
    """The peer's own error, or its last words."""


class Child:
    """A process: its last lines on standard error, which explain a failure, and the ``target`` that it listens on, if
    it has said one in a line of JSON: ``{"event": "listening", "target": "127.0.0.1:12345"}``."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.said: deque[str] = deque(maxlen=20)
        self.target = ""
        self.heard = asyncio.Event()
        self.reading = asyncio.create_task(self._read())

    @classmethod
    @asynccontextmanager
    async def run(
        cls, command: Sequence[str], root: Path, variables: Mapping[str, str] = {}, pipe: int | None = None
    ) -> AsyncIterator[Child]:
        """Run ``command``; in the end it is asked to stop. ``FERRUM_*`` variables are not passed on: all sides have the
        settings that the program wrote. With a ``pipe`` its input and output are there, and it ends with its input."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("FERRUM_")}
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=root,
            env={**environment, **variables},
            stdin=pipe,
            stdout=pipe,
            stderr=asyncio.subprocess.PIPE,
            limit=LINE_BYTES,
        )
        child = cls(process)
        try:
            yield child
        finally:
            if process.stdin is not None:
                process.stdin.close()
            elif process.returncode is None:
                process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(process.wait(), STOP_S)
            except TimeoutError:
                process.kill()
                await process.wait()
            await child.reading

    async def _read(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            if text := line.decode(errors="replace").strip():
                self.said.append(text)
            with suppress(ValueError, KeyError, TypeError):  # not a line of JSON, or of another kind
                event = json.loads(line)
                if event["event"] == LISTENING:
                    self.target = event["target"]
                    self.heard.set()
        self.heard.set()


@asynccontextmanager
async def served(*arguments: str, root: Path = ROOT) -> AsyncIterator[Child]:
    """Run ``python ARGUMENTS`` in the checkout ``root`` until it has said the ``target`` that it listens on."""
    async with Child.run((sys.executable, *arguments), root) as child:
        with suppress(TimeoutError):
            await asyncio.wait_for(child.heard.wait(), START_S)
        if not child.target:
            raise ServerDied("\n".join([f"python {' '.join(arguments)} did not listen", *child.said]))
        yield child


async def apart(function: Callable[..., T], *arguments: Any, variables: Mapping[str, str] = {}) -> T:
    """What ``function`` returns in a process of its own, which has loaded nothing else and has these ``variables``."""
    with mock.patch.dict(os.environ, variables), ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return await asyncio.get_running_loop().run_in_executor(pool, partial(function, *arguments))


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

    def __init__(self, child: Child, vocab_size: int) -> None:
        self.facts: dict[str, Any] = {}
        self._child = child
        self._vocab_size = vocab_size

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
        async with Child.run(command, ROOT, variables, asyncio.subprocess.PIPE) as child:
            peer = cls(child, vocab_size)
            peer.facts = await peer._ask(do="open", model=model, threads=threads, options=kind.options)
            yield peer

    async def prepare(self, cell: Cell) -> None:
        if cell.kind != PREFILL:
            await self._ask(do="prepare", prompts=cell.prompts(self._vocab_size).tolist(), room=LEAD_IN + cell.most)

    async def round(self, cell: Cell, number: int, steps: int) -> Round:
        if cell.kind == PREFILL:
            prompts = cell.fresh(self._vocab_size, number, steps).tolist()
            answer = await self._ask(do="prefill", prompts=prompts, lead_in=1)
        else:
            answer = await self._ask(do="decode", tokens=cell.fed(self._vocab_size, steps).tolist(), lead_in=LEAD_IN)
        if len(answer["step_s"]) != steps:
            raise PeerFailed(f"it timed {len(answer['step_s'])} of {steps} steps")
        return Round(step_s=answer["step_s"], last=answer["last"])

    async def _ask(self, **job: Any) -> dict[str, Any]:
        process = self._child.process
        assert process.stdin is not None and process.stdout is not None
        line = b""
        with suppress(ConnectionError):
            process.stdin.write(json.dumps(job).encode() + b"\n")
            await process.stdin.drain()
            line = await process.stdout.readline()
        if not line:
            await asyncio.wait([self._child.reading], timeout=STOP_S)
            said = self._child.said
            raise PeerFailed(f"it ended: {said[-1] if said else 'without a word'}")
        answer: dict[str, Any] = json.loads(line)
        if "unsupported" in answer:
            raise Unsupported(answer["unsupported"])
        if "error" in answer:
            raise PeerFailed(answer["error"])
        found: dict[str, Any] = answer["ok"]
        return found
