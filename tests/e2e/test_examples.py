"""The commands of the how-to pages that run a program of `examples/`, as they are printed, against the demo model."""

from __future__ import annotations

import asyncio
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path

from ferrum_rpc.client import ExecutorClient
from tests.grammars import DEMO
from tests.serving import serve_model

ROOT = Path(__file__).parents[2]
COMMANDS = sorted(
    command
    for page in (ROOT / "docs" / "howto").glob("*.md")
    for command in re.findall(r"^\$ (python examples/.*)$", page.read_text("utf-8"), re.M)
)


async def run(command: str, target: str) -> str:
    """What a command prints; it must succeed, and say nothing on standard error."""
    _, *arguments = shlex.split(command.replace("localhost:50051", target))
    program = await asyncio.create_subprocess_exec(
        sys.executable,
        "-W",
        "error",
        *arguments,
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    printed, errors = await program.communicate()
    assert (program.returncode, errors) == (0, b""), errors.decode()
    return printed.decode()


def test_every_example_is_on_a_page_and_short() -> None:
    programs = {path.name: path.read_text("utf-8") for path in (ROOT / "examples").glob("*.py")}
    assert {shlex.split(each)[1].removeprefix("examples/") for each in COMMANDS} == programs.keys()
    assert {name: lines for name, text in programs.items() if not 20 <= (lines := len(text.splitlines())) <= 65} == {}


async def test_commands_run_as_they_are_printed() -> None:
    """And the scheduler's texts are the same where the cache is too small for them, so that it preempts."""
    [scheduler] = [each for each in COMMANDS if "examples/scheduler.py" in each]
    async with serve_model(DEMO) as served, serve_model(replace(DEMO, kv_blocks=9)) as small:  # 144 of 187 tokens
        runs = [run(scheduler, small.target), *(run(each, served.target) for each in COMMANDS)]
        preempted, *printed = await asyncio.gather(*runs)
        assert all(printed)
        assert [len(each.server.state.handles) for each in (served, small)] == [0, 0], "they release what they made"
        async with ExecutorClient(small.target) as client:
            assert (await client.status()).counters.kv_exhausted > 0
    assert preempted.splitlines()[:-1] == printed[COMMANDS.index(scheduler)].splitlines()[:-1]
