"""The examples that people copy: those of README, docs/client.md and the client package, run as they stand."""

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
PAGES = {
    f"{Path(page).stem.lower()}-{at}": example
    for page in ("README.md", "docs/client.md")
    for at, example in enumerate(re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S))
}
FLEET = [
    each
    for each in re.findall(r"```python\n(.*?)```", (ROOT / "docs/fleet.md").read_text(), re.S)
    if "localhost:50052" in each
]
PACKAGE = textwrap.dedent((client.__doc__ or "").partition("\n\n")[2].partition("\n\nSequences are")[0])


@pytest.mark.parametrize("example", [*PAGES.values(), PACKAGE], ids=[*PAGES, "package"])
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
    assert {"readme-0", "client-0", "client-1"} <= PAGES.keys()
    assert any("client.sync" in each and "in sequence.generate" in each for each in PAGES.values())
    assert any("asyncio.run" in each for each in PAGES.values())
