"""A peer in a process and, where it needs one, a Python environment of its own, driven by `benchmarks.peer_scripts`.

Its threads wait as ours do (see `ferrum_rpc.openmp`): libgomp's own default spins for milliseconds, and next to any
other busy process such a team takes seconds for a step that takes 0.1 s otherwise (measured: 4.2 s).
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from benchmarks.cells import PREFILL, Cell
from benchmarks.environment import ROOT
from benchmarks.ours import REFERENCE, Unsupported
from benchmarks.sides import Round
from benchmarks.workload import LEAD_IN

SCRIPTS: Final = "benchmarks.peer_scripts"
LINE_BYTES: Final = 64 << 20
STOP_S: Final = 20.0


class PeerFailed(RuntimeError):
    """The peer's own error, or its last words."""


@dataclass(frozen=True, slots=True)
class PeerKind:
    """A peer as it is started: its script, what the script is told, environment variables of its own, and which of
    ours it is compared with: the one whose weights have as many bits."""

    name: str
    script: str
    options: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    rival: str = REFERENCE


EAGER: Final = PeerKind("transformers eager", "hf")


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
        cls, kind: PeerKind, model: str, threads: int, vocab_size: int, python: str | Path = sys.executable
    ) -> AsyncIterator[PeerProcess]:
        """Start it with ``python`` and let it load ``model``. Raises `PeerFailed`."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("FERRUM_")}
        process = await asyncio.create_subprocess_exec(
            str(python),
            "-m",
            f"{SCRIPTS}.{kind.script}",
            cwd=ROOT,
            env=environment | kind.environment,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=LINE_BYTES,
        )
        peer = cls(process, vocab_size)
        try:
            peer.facts = await peer._ask(do="open", model=model, threads=threads, options=kind.options)
            yield peer
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                await asyncio.wait_for(process.wait(), STOP_S)
            except TimeoutError:
                process.kill()
                await process.wait()
            await peer._listening

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
        return Round(step_s=answer["step_s"], tokens=answer["last"])

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


async def _listen(process: asyncio.subprocess.Process, said: deque[str]) -> None:
    """Keep the pipe empty, and the last lines for whoever must explain a failure."""
    assert process.stderr is not None
    async for line in process.stderr:
        if text := line.decode(errors="replace").strip():
            said.append(text)
