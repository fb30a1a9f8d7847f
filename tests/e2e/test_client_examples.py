"""The examples that people copy: README's and the client package's own, run as they stand against a server."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from ferrum_rpc import client
from tests.serving import serve_identity

ROOT = Path(__file__).parents[2]
README = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
FLEET = [
    each
    for each in re.findall(r"```python\n(.*?)```", (ROOT / "docs/fleet.md").read_text(), re.S)
    if "localhost:50052" in each
]
PACKAGE = textwrap.dedent((client.__doc__ or "").partition("\n\n")[2].partition("\n\nSequences belong")[0])


@pytest.mark.parametrize("example", [*README, PACKAGE], ids=[*(f"readme-{at}" for at in range(len(README))), "package"])
async def test_an_example_runs_as_it_stands(example: str) -> None:
    assert "localhost:50051" in example
    async with serve_identity() as served:
        program = example.replace("localhost:50051", served.target)
        done = await asyncio.to_thread(
            subprocess.run, [sys.executable, "-W", "error", "-c", program], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout
        assert "Traceback" not in done.stderr
        assert len(served.server.state.handles) == 0, "what an example made is released"


@pytest.mark.parametrize("example", FLEET, ids=["async", "threads"])
async def test_an_example_of_a_fleet_runs_as_it_stands(example: str) -> None:
    async with serve_identity() as first, serve_identity() as second:
        program = example.replace("localhost:50051", first.target).replace("localhost:50052", second.target)
        done = await asyncio.to_thread(
            subprocess.run, [sys.executable, "-W", "error", "-c", program], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0 and not done.stderr, done.stderr
        assert len(done.stdout.splitlines()) == 64


def test_there_is_an_example_of_each_way_to_use_it() -> None:
    assert any("client.sync" in each and "in sequence.generate" in each for each in README)
    assert any("asyncio.run" in each for each in README)
