"""The package without extras is the contract and the client: importing it loads no server and no torch."""

from __future__ import annotations

import glob
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from ferrum_rpc import client, errors
from ferrum_rpc.client.info import Capability, ExecutorState, Health
from ferrum_rpc.executor.v1 import info_pb2
from tests.unit.test_floors import FLOORS

ROOT = Path(__file__).parents[2]

LOADED = """
import sys
import ferrum_rpc.client
print("\\n".join(sorted(sys.modules)))
"""

SERVER_ONLY = {"torch", "pydantic", "structlog", "safetensors", "psutil", "transformers"}
CLIENT_FLOORS = {"client", "core", "errors", "executor", "prefix_hash", "wire"}


def loaded_by(program: str) -> set[str]:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_the_client_loads_no_torch_and_no_server_module() -> None:
    modules = loaded_by(LOADED)
    top = {name.partition(".")[0] for name in modules}
    assert not top & (SERVER_ONLY | {"tokenizers", "rich", "clients"})
    assert "grpc_health.v1.health" not in modules, "the health service, of which the client needs the messages"
    floors = {name.split(".")[1] for name in modules if name.startswith("ferrum_rpc.")}
    assert floors <= CLIENT_FLOORS


def test_what_the_client_imports_is_installed_with_it() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    installed = {re.split(r"[^\w-]", each)[0] for each in project["dependencies"]}
    distributions = importlib.metadata.packages_distributions()
    imported = {top for floor in CLIENT_FLOORS for top in FLOORS[f"ferrum_rpc.{floor}"].outside.split()}
    assert "grpc_health" in imported
    assert [top for top in imported if not installed & set(distributions[top])] == []


def test_the_client_exports_its_errors() -> None:
    raised = {name for name, each in vars(errors).items() if isinstance(each, type) and issubclass(each, Exception)}
    assert len(raised) > 30
    assert raised <= set(client.__all__)
    assert all(getattr(client, name) is getattr(errors, name) for name in raised)


def test_the_clients_enums_are_the_wires() -> None:
    assert {f"CAPABILITY_{each.name}": each.value for each in Capability} == {
        name: number for name, number in info_pb2.Capability.items() if number
    }
    assert ExecutorState(99) is ExecutorState.UNKNOWN
    known = {f"EXECUTOR_STATE_{each.name}": each.value for each in ExecutorState if each.value}
    assert known == {name: number for name, number in info_pb2.ExecutorState.items() if number}


def test_the_health_enum_is_the_standard_one() -> None:
    from grpc_health.v1 import health_pb2

    assert Health(99) is Health.UNKNOWN
    assert {each.name: each.value for each in Health} == dict(health_pb2.HealthCheckResponse.ServingStatus.items())


def test_the_protos_are_data_of_the_package() -> None:
    """In the wheel; and in the sdist, which takes a package's data along."""
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["ferrum_rpc"]
    found = {file for each in patterns for file in glob.glob(each, root_dir=ROOT / "ferrum_rpc", recursive=True)}
    protos = {f"protos/{path.relative_to(ROOT / 'protos')}" for path in (ROOT / "protos").rglob("*.proto")}
    assert protos and protos <= found
    assert "protos/landed.binpb" not in found
