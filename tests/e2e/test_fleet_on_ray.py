"""`ferrum-rpc fleet` on a Ray cluster of two nodes on this machine, where Ray is installed; some 40 s."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ferrum_rpc.client.sync import ExecutorClient

cluster_utils = pytest.importorskip("ray.cluster_utils", reason="pip install '.[ray]'")

ROOT = Path(__file__).parents[2]
EXECUTOR = ("identity", "--insecure", "--kv-blocks", "64", "--no-warmup")


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, list[Any]]]:
    """A cluster, and two nodes of it with room for two executors each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", str(ROOT))
        cluster = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
        try:
            yield cluster, [cluster.add_node(num_cpus=2) for _ in range(2)]
        finally:
            cluster.shutdown()


def fleet(cluster: Any, action: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "ferrum_rpc.cli", "fleet", action, *arguments, "--address", cluster.address]


def status(cluster: Any) -> dict[str, dict[str, str]]:
    done = subprocess.run(fleet(cluster, "status", "--json"), capture_output=True, text=True, check=False)
    return {each["name"]: each for each in json.loads(done.stdout)}


def lines_within(file: Path, seconds: float, count: int, without: frozenset[str] = frozenset()) -> set[str]:
    """The targets of a file as soon as it has so many, and none of ``without``."""
    end = time.monotonic() + seconds
    while True:
        found = set(file.read_text().splitlines()) if file.exists() else set()
        if len(found) == count and not found & without:
            return found
        assert time.monotonic() < end, found
        time.sleep(0.05)


def test_an_executor_of_a_killed_node_starts_on_another_as_another_instance(nodes, tmp_path) -> None:
    cluster, [doomed, _] = nodes
    up = subprocess.run(
        fleet(cluster, "up", "--executors", "2", *EXECUTOR), capture_output=True, text=True, check=False
    )
    assert up.returncode == 0, up.stderr
    before = status(cluster)
    assert {each["state"] for each in before.values()} == {"serving"}
    file = tmp_path / "targets"
    command = fleet(cluster, "targets", str(file))
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as keeping:
        try:
            both = lines_within(file, 20, 2)
            assert both == {each["target"] for each in before.values()}
            cluster.remove_node(doomed, allow_graceful=False)
            [left] = lines_within(file, 10, 1)
            lost = both - {left}
            now = lines_within(file, 60, 2, frozenset(lost))
            after = status(cluster)
            changed = {name for name in before if before[name]["instance_id"] != after[name]["instance_id"]}
            assert len(changed) == 1
            [name] = changed
            with ExecutorClient(after[name]["target"]) as client:
                assert client.info().instance_id == after[name]["instance_id"]
            assert {each["target"] for each in after.values()} == now
            assert subprocess.run(fleet(cluster, "down"), check=False).returncode == 0
            lines_within(file, 10, 0)
            assert status(cluster) == {}
        finally:
            keeping.terminate()
            said = keeping.communicate(timeout=30)[1]
    assert (keeping.returncode, said) == (0, ""), "a native stack looks like a crash"


def test_what_cannot_serve_is_told_and_leaves_no_actor(nodes: tuple[Any, list[Any]]) -> None:
    cluster, _ = nodes
    up = subprocess.run(fleet(cluster, "up", "/nowhere"), capture_output=True, text=True, check=False)
    assert up.returncode == 1
    assert "executor-0: ferrum_rpc.fleet.process.DidNotServeError: model folder /nowhere" in up.stderr
    assert status(cluster) == {}
