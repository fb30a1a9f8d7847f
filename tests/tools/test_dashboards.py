"""The dashboards of `deploy/monitoring`: a real Prometheus over two executors answers every query with a number."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import re
import subprocess
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from ferrum_rpc.client import ExecutorClient
from ferrum_rpc.errors import KvBlocksExhausted
from tests.e2e.test_ranks import free_port
from tests.faults.process import serving
from tests.tools.test_alerts import FIRES_S, Prometheus, prometheus, tool
from tools.monitoring import FOLDER, files

RANGE = "4s"
"""What `$__rate_interval` becomes: some scrapes of the test's Prometheus."""


def queries(name: str) -> Iterator[tuple[str, str]]:
    """Panel and query of each target in a dashboard's file, its variables replaced as by Grafana for "All"."""
    for panel in json.loads((FOLDER / "dashboards" / f"{name}.json").read_text())["panels"]:
        for target in panel.get("targets", ()):
            query = target["expr"].replace("$__rate_interval", RANGE)
            query = re.sub(r"\$(job|instance)\b", ".*", query)
            assert not re.search(r"\$[a-z_{]", query), query
            yield panel["title"], query


def test_files_are_what_their_source_generates() -> None:
    assert {path: (FOLDER / path).read_text() for path in files()} == files()


@pytest.mark.parametrize("name", ["executors", "fleet"])
def test_panels_fill_the_width_and_never_overlap(name: str) -> None:
    board = json.loads((FOLDER / "dashboards" / f"{name}.json").read_text())
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        cells = set(
            itertools.product(range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"])),
        )
        assert not cells & taken and at["x"] + at["w"] <= 24, panel["title"]
        taken |= cells
    numbers = [panel["id"] for panel in board["panels"]]
    assert len(set(numbers)) == len(numbers)


def test_prometheus_takes_its_configuration_and_the_rules() -> None:
    command = [tool("promtool"), "check", "config", str(FOLDER / "prometheus.yml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "10 rules found" in done.stdout, done.stdout + done.stderr


async def test_every_query_is_answered_with_a_number(tmp_path: Path) -> None:
    tool("prometheus")
    wanted = {query: f"{name}: {panel}" for name in ("executors", "fleet") for panel, query in queries(name)}
    assert len(wanted) > 60
    async with AsyncExitStack() as stack:
        ports = [free_port(), free_port()]
        executors = [await stack.enter_async_context(serving(f"--metrics-port={port}", kv_blocks=12)) for port in ports]
        server = await stack.enter_async_context(prometheus(tmp_path, *(f"127.0.0.1:{port}" for port in ports)))
        enough = asyncio.Event()
        clients = [
            await stack.enter_async_context(ExecutorClient(each.target, session=session))
            for session in (True, False)
            for each in executors
        ]
        working = asyncio.create_task(work(clients, enough))
        try:
            async with asyncio.timeout(FIRES_S):
                while wanted and not working.done():
                    for query in list(wanted):
                        if await asyncio.to_thread(has_a_number, server, query):
                            del wanted[query]
        except TimeoutError:
            pass
        enough.set()
        await working
        assert not wanted


def has_a_number(server: Prometheus, query: str) -> bool:
    """Whether the answer has a sample that a graph can draw."""
    return any(math.isfinite(float(sample["value"][1])) for sample in server.query(query))


async def work(clients: list[ExecutorClient], enough: asyncio.Event) -> None:
    """What the panels show, again and again: prompts that are found and evicted, forks that are written to, drafts that
    are rolled back, transfers, refusals, handles of another executor."""
    for round_number in itertools.count():
        if enough.is_set():
            return
        for client, other in itertools.pairwise([*clients, clients[0]]):
            prompt = [round_number % 200 + 1] * 40
            for _ in range(2):
                async with client.sequence() as sequence:
                    await sequence.prefill(prompt)
                    await sequence.truncate(33)
                    [child] = await sequence.fork()
                    async with child:
                        await child.decode(7)
                        await sequence.decode(8)
            async with client.sequence() as sequence, other.sequence() as moved:
                await sequence.prefill(prompt)
                await sequence.move_to(moved)
            async with client.sequence() as sequence:
                with pytest.raises(KvBlocksExhausted):
                    await sequence.prefill([5] * 400)
