"""The package without extras is the contract and the client. What it imports: `test_floors`."""

from __future__ import annotations

import glob
import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2

from ferrum_rpc import client, errors
from ferrum_rpc.client.info import Capability, ExecutorState, Health
from ferrum_rpc.executor.v1 import info_pb2
from tests.unit.test_floors import FLOORS

ROOT = Path(__file__).parents[2]

CLIENT_FLOORS = {"client", "core", "errors", "executor", "prefix_hash", "wire"}


def test_what_the_client_imports_is_installed_with_it():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    installed = {re.split(r"[^\w-]", each)[0] for each in project["dependencies"]}
    provided = {file.parts[0] for each in installed for file in importlib.metadata.files(each) or ()}
    imported = {top for floor in CLIENT_FLOORS for top in FLOORS[f"ferrum_rpc.{floor}"].outside.split()}
    assert "grpc_health" in imported
    assert imported <= provided


def test_the_client_exports_its_errors():
    raised = {name for name, each in vars(errors).items() if isinstance(each, type) and issubclass(each, Exception)}
    assert len(raised) > 30
    assert raised <= set(client.__all__)
    assert all(getattr(client, name) is getattr(errors, name) for name in raised)


@pytest.mark.parametrize(
    ("enum", "prefix", "wire"),
    [
        (Capability, "CAPABILITY_", info_pb2.Capability),
        (ExecutorState, "EXECUTOR_STATE_", info_pb2.ExecutorState),
        (Health, "", health_pb2.HealthCheckResponse.ServingStatus),
    ],
)
def test_the_clients_enums_are_the_wires(enum, prefix, wire):
    known = {f"{prefix}{each.name}": each.value for each in enum if each.value}
    assert known == {name: number for name, number in wire.items() if number}


def test_a_state_of_a_later_executor_is_unknown():
    assert ExecutorState(99) is ExecutorState.UNKNOWN and Health(99) is Health.UNKNOWN


def test_the_protos_are_data_of_the_package():
    """In the wheel; and in the sdist, which takes a package's data along."""
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["ferrum_rpc"]
    found = {file for each in patterns for file in glob.glob(each, root_dir=ROOT / "ferrum_rpc", recursive=True)}
    protos = {f"protos/{path.relative_to(ROOT / 'protos')}" for path in (ROOT / "protos").rglob("*.proto")}
    assert protos and protos <= found
    assert "protos/landed.binpb" not in found
