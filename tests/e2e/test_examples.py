"""What people copy: the examples of README, docs and the client package, run as they stand, and the commands of the
documentation that run a program of `examples/`, as they are printed, against the demo model."""

from __future__ import annotations

import asyncio
import re
import shlex
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from ferrum_rpc import client
from ferrum_rpc.client import ExecutorClient
from tests.support.fleets import several
from tests.support.grammars import DEMO
from tests.support.serving import serve_identity, serve_model

ROOT = Path(__file__).parents[2]
PYTHON = (sys.executable, "-W", "error")


def written(page: str) -> list[str]:
    """The examples in Python of a page."""
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S)


PAGES = {
    f"{Path(page).stem.lower()}-{at}": example
    for page in ("README.md", "docs/client.md")
    for at, example in enumerate(written(page))
}
FLEET = [each for each in written("docs/fleet.md") if "localhost:50052" in each]
PACKAGE = textwrap.dedent((client.__doc__ or "").partition("\n\n")[2].partition("\n\nSequences are")[0])
COMMANDS = sorted(
    command
    for page in (ROOT / "docs").rglob("*.md")
    for command in re.findall(r"^\$ ((?:python|node) examples/.*)$", page.read_text("utf-8"), re.M)
)
HERE = [each for each in COMMANDS if each.startswith("python") or (ROOT / "examples" / "node_modules").is_dir()]
"""Those that can run: the one in JavaScript needs `npm install --prefix examples`."""


async def run(*command: str) -> str:
    """What a command prints; it must succeed, and say nothing on standard error."""
    pipe = asyncio.subprocess.PIPE
    program = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=pipe, stderr=pipe)
    printed, errors = await program.communicate()
    assert (program.returncode, errors) == (0, b""), errors.decode()
    return printed.decode()


@pytest.mark.parametrize("example", [*PAGES.values(), PACKAGE], ids=[*PAGES, "package"])
async def test_an_example_runs_as_it_stands(example: str) -> None:
    assert "localhost:50051" in example
    async with serve_identity() as served:
        assert await run(*PYTHON, "-c", example.replace("localhost:50051", served.target))
        assert len(served.server.state.handles) == 0, "what an example made is released"


@pytest.mark.parametrize("example", FLEET, ids=["async", "threads"])
async def test_an_example_of_a_fleet_runs_as_it_stands(example: str) -> None:
    async with several(2) as (first, second):
        program = example.replace("localhost:50051", first.target).replace("localhost:50052", second.target)
        assert len((await run(*PYTHON, "-c", program)).splitlines()) == 64


def test_there_is_an_example_of_each_way_to_use_it() -> None:
    assert {"readme-0", "client-0", "client-1"} <= PAGES.keys()
    assert any("client.sync" in each and "in sequence.generate" in each for each in PAGES.values())
    assert any("asyncio.run" in each for each in PAGES.values())


def words(command: str, target: str) -> list[str]:
    language, *arguments = shlex.split(command.replace("localhost:50051", target))
    return [*(PYTHON if language == "python" else (language,)), *arguments]


def test_every_example_is_on_a_page_and_short() -> None:
    programs = {path.name: path.read_text("utf-8") for path in (ROOT / "examples").glob("*.[pj][ys]")}
    assert {shlex.split(each)[1].removeprefix("examples/") for each in COMMANDS} == programs.keys()
    assert {name: lines for name, text in programs.items() if not 20 <= (lines := len(text.splitlines())) <= 65} == {}


async def test_commands_run_as_they_are_printed() -> None:
    """And the scheduler's texts are the same where the cache is too small for them, so that it preempts."""
    [scheduler] = [each for each in HERE if "examples/scheduler.py" in each]
    async with serve_model(DEMO) as served, serve_model(replace(DEMO, kv_blocks=9)) as small:  # 144 of 187 tokens
        runs = [run(*words(scheduler, small.target)), *(run(*words(each, served.target)) for each in HERE)]
        preempted, *printed = await asyncio.gather(*runs)
        assert all(printed)
        assert [len(each.server.state.handles) for each in (served, small)] == [0, 0], "they release what they made"
        async with ExecutorClient(small.target) as client:
            assert (await client.status()).counters.kv_exhausted > 0
    texts = printed[HERE.index(scheduler)].splitlines()[:-1]
    others = [text for each, text in zip(HERE, printed, strict=True) if "examples/scheduler.js" in each]
    assert all(each.splitlines()[:-1] == texts for each in (preempted, *others))
