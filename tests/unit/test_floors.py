"""A file imports only from floors below its own. The table here is the architecture; this test keeps the code to it.

Imports are read from the source, those inside of functions and under TYPE_CHECKING too: to name another module's type
is to depend on it. Cycles are looked for among all of them.
"""

from __future__ import annotations

import ast
import graphlib
import importlib.util
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOT_PACKAGES = ("ferrum_rpc", "clients")


@dataclass(frozen=True)
class Floor:
    """A package or module, the floors that it may import besides itself, and the third-party packages that it may."""

    below: str = ""
    outside: str = ""


FLOORS: dict[str, Floor] = {
    "ferrum_rpc": Floor(),
    "ferrum_rpc.errors": Floor(),
    "ferrum_rpc.core": Floor("errors", "numpy"),
    "ferrum_rpc.prefix_hash": Floor("core", "numpy"),
    "ferrum_rpc.private_files": Floor(),
    "ferrum_rpc.device": Floor("", "torch"),
    "ferrum_rpc.selection": Floor("device errors", "torch"),
    "ferrum_rpc.terminal": Floor(),
    "ferrum_rpc.console": Floor("terminal", "structlog"),
    "ferrum_rpc.logs": Floor("console terminal", "structlog"),
    "ferrum_rpc.failpoints": Floor("errors logs", "structlog"),
    "ferrum_rpc.usage": Floor(),
    "ferrum_rpc.install": Floor(),
    "ferrum_rpc.config": Floor("core errors failpoints usage", "pydantic"),
    # the contract
    "ferrum_rpc.executor": Floor("", "google grpc"),
    "ferrum_rpc.wire": Floor("core errors executor", "google grpc numpy"),
    "ferrum_rpc.native": Floor("", "torch triton"),
    "ferrum_rpc.sampling.transfer": Floor("", "torch"),
    # each knows nothing of the others' insides
    "ferrum_rpc.kv": Floor("core errors prefix_hash", "numpy"),
    "ferrum_rpc.kv.store": Floor("core errors sampling.transfer", "numpy torch"),
    "ferrum_rpc.kv.tiers": Floor("prefix_hash private_files", "structlog"),
    "ferrum_rpc.distributed.group": Floor("", "torch"),
    "ferrum_rpc.models.fields": Floor("errors"),
    "ferrum_rpc.models.config_keys": Floor("errors models.fields"),
    "ferrum_rpc.models": Floor(
        "core errors install native selection distributed.group models.fields models.config_keys sampling.transfer",
        "numpy torch transformers triton",
    ),
    "ferrum_rpc.attention": Floor("core errors native selection", "numpy torch triton flashinfer"),
    "ferrum_rpc.sampling": Floor(
        "core errors native selection distributed.group sampling.transfer", "numpy torch triton"
    ),
    "ferrum_rpc.weights": Floor("core errors install models.fields models.config_keys", "gguf numpy torch safetensors"),
    "ferrum_rpc.distributed": Floor("core errors native distributed.group", "numpy torch"),
    # the thread and its queue know neither torch nor the floors below the runner: the service floor imports them
    "ferrum_rpc.engine.liveness": Floor(),
    "ferrum_rpc.engine.commands": Floor("core", "numpy"),
    "ferrum_rpc.engine.api": Floor("core errors engine.commands"),
    "ferrum_rpc.engine.overlap": Floor(),
    "ferrum_rpc.engine.backlog": Floor("engine.api"),
    "ferrum_rpc.engine.places": Floor("engine.api"),
    "ferrum_rpc.engine.runs": Floor("core errors engine.api engine.places", "numpy"),
    "ferrum_rpc.engine.chains": Floor("core engine.api engine.places", "numpy"),
    "ferrum_rpc.engine.aside": Floor("engine.api"),
    "ferrum_rpc.engine.loop": Floor(
        "core errors engine.aside engine.backlog engine.chains engine.overlap engine.places engine.runs engine.api"
    ),
    "ferrum_rpc.engine.thread": Floor("core errors engine.liveness engine.api engine.loop"),
    "ferrum_rpc.engine.channel": Floor("core", "numpy"),
    "ferrum_rpc.engine.process": Floor(),
    "ferrum_rpc.engine.process.ipc": Floor("core engine.api", "numpy"),
    "ferrum_rpc.engine.process.parent": Floor(
        "core errors engine.liveness engine.api engine.channel engine.process.ipc", "numpy"
    ),
    "ferrum_rpc.engine.process.child": Floor("core engine.api engine.channel engine.loop engine.process.ipc"),
    # its programs load the grammar library, the engine does not
    "ferrum_rpc.engine.grammars": Floor("core errors engine.channel engine.liveness", "llguidance numpy structlog"),
    "ferrum_rpc.engine.ranks.world": Floor("config errors"),  # read before torch is loaded
    # a step on the device, and as a transaction
    "ferrum_rpc.engine": Floor(),
    "ferrum_rpc.engine.memory": Floor("", "torch"),
    "ferrum_rpc.engine.compute": Floor(
        "core device models attention sampling sampling.transfer engine.memory", "numpy torch"
    ),
    "ferrum_rpc.engine.cuda": Floor(
        "core device errors models attention sampling sampling.transfer distributed.group engine.compute",
        "numpy torch structlog",
    ),
    "ferrum_rpc.engine.step": Floor(
        "core errors kv kv.store kv.tiers attention sampling sampling.transfer engine.compute engine.grammars",
        "numpy torch structlog",
    ),
    # from settings to a runner: what every rank chooses, the ranks, and what puts the first one's together
    "ferrum_rpc.engine.assembly": Floor(
        "config core device errors kv.store models models.fields models.config_keys attention sampling "
        "sampling.transfer weights native engine.compute engine.ranks.world",
        "numpy torch structlog",
    ),
    "ferrum_rpc.engine.adapters": Floor("core errors models weights engine.assembly", "torch"),
    "ferrum_rpc.engine.operations": Floor(
        "core device errors kv kv.store kv.tiers models attention engine.compute engine.grammars engine.step "
        "engine.adapters",
        "numpy torch structlog",
    ),
    "ferrum_rpc.engine.ranks": Floor(
        "config core errors kv.store models attention sampling sampling.transfer distributed "
        "distributed.group engine.memory engine.channel engine.compute engine.cuda engine.assembly engine.adapters "
        "engine.ranks.world",
        "numpy torch structlog",
    ),
    "ferrum_rpc.engine.assembly.build": Floor(
        "config core errors failpoints install kv kv.store kv.tiers models attention sampling sampling.transfer native "
        "engine.memory engine.compute engine.cuda engine.grammars engine.step engine.assembly engine.adapters "
        "engine.operations engine.ranks engine.ranks.world weights",
        "torch",
    ),
    "ferrum_rpc.engine.assembly.parity": Floor(
        "config core errors weights models engine.operations engine.assembly engine.assembly.build",
        "numpy torch transformers",
    ),
    # what any server of this package needs to open a port
    "ferrum_rpc.service.trace_context": Floor("", "grpc"),
    "ferrum_rpc.service.guard.watched_file": Floor("", "structlog"),
    "ferrum_rpc.service.guard.auth": Floor(
        "core errors service.guard.watched_file service.trace_context", "grpc_health structlog"
    ),
    "ferrum_rpc.service.guard.tls": Floor("service.guard.auth service.guard.watched_file", "grpc structlog"),
    "ferrum_rpc.service.guard.bind": Floor(
        "service.guard.auth service.guard.tls service.guard.watched_file", "grpc structlog"
    ),
    "ferrum_rpc.service.guard.slots": Floor(),
    "ferrum_rpc.service.guard.bodies": Floor("core errors service.guard.slots service.trace_context", "grpc"),
    "ferrum_rpc.service.guard.connections": Floor(),
    "ferrum_rpc.service.health": Floor("wire", "grpc grpc_health"),
    "ferrum_rpc.service.metrics_server": Floor("service.guard.bind", "prometheus_client"),
    "ferrum_rpc.service": Floor(
        "ferrum_rpc core errors failpoints install prefix_hash private_files executor wire engine.liveness engine.api "
        "engine.commands engine.thread engine.process.parent service.guard.auth service.guard.bind "
        "service.guard.bodies service.guard.connections service.guard.slots service.guard.tls "
        "service.guard.watched_file service.health service.metrics_server service.trace_context",
        "crc32c google grpc grpc_health grpc_reflection nixl numpy opentelemetry prometheus_client structlog",
    ),
    "ferrum_rpc.client": Floor("ferrum_rpc core errors executor prefix_hash wire", "google grpc grpc_health numpy"),
    # a library, which knows neither terminal nor command line
    "ferrum_rpc.scheduler": Floor("client"),
    # programs
    "ferrum_rpc.runtime": Floor("install usage", "uvloop"),
    "ferrum_rpc.ask": Floor("ferrum_rpc core errors client terminal", "tokenizers"),
    "ferrum_rpc.hub": Floor("errors terminal", "huggingface_hub structlog"),
    "ferrum_rpc.building": Floor(
        "config errors failpoints usage terminal hub engine.api engine.memory engine.ranks.world engine.assembly "
        "engine.assembly.build",
        "structlog torch",
    ),
    "ferrum_rpc.plan": Floor("errors config terminal engine.assembly building"),
    "ferrum_rpc.doctor": Floor(
        "errors config terminal engine.adapters engine.assembly engine.assembly.parity building"
    ),
    "ferrum_rpc.worker": Floor("failpoints engine.api engine.process.child building logs config runtime"),
    "ferrum_rpc.rank": Floor("errors engine.channel engine.ranks engine.ranks.world runtime", "torch"),
    "ferrum_rpc.serve": Floor(
        "ferrum_rpc core errors failpoints engine.liveness engine.process.parent engine.api engine.ranks.world "
        "service service.guard.auth service.guard.bind service.guard.watched_file service.metrics_server building logs "
        "config usage runtime",
        "structlog",
    ),
    # of `bench` the flags alone: `--help` loads no client
    "ferrum_rpc.bench": Floor("ferrum_rpc core errors client ask terminal", "numpy"),
    "ferrum_rpc.top": Floor("ferrum_rpc client ask terminal", "rich"),
    # a program on the scheduler, for routers; of its flags none needs a package: `--help` loads them
    "ferrum_rpc.fronts.options": Floor(),
    "ferrum_rpc.fronts": Floor(
        "ferrum_rpc client scheduler ask logs wire fronts.options service.guard.auth service.guard.bind "
        "service.guard.bodies service.guard.connections service.guard.tls service.guard.watched_file "
        "service.health service.metrics_server",
        "google grpc grpc_health numpy prometheus_client smg_grpc_proto structlog tokenizers",
    ),
    # of `fleet` the flags alone: `--help` loads no Ray
    "ferrum_rpc.fleet": Floor(),
    "ferrum_rpc.fleet.cluster": Floor("fleet", "ray"),
    "ferrum_rpc.cli": Floor(
        "ferrum_rpc errors config install usage client ask bench top fronts fronts.options fleet fleet.cluster plan "
        "doctor rank serve runtime"
    ),
    "clients": Floor("core errors client scheduler", "jsonschema llguidance numpy rich tokenizers"),
    "clients.scheduler": Floor("client scheduler", "tokenizers"),
    "clients.scheduler.prompts": Floor(),
    "clients.scheduler.options": Floor("client clients.scheduler.prompts"),
    "clients.scheduler.display": Floor("scheduler clients.scheduler", "rich"),
    "clients.scheduler.program": Floor(
        "client scheduler clients.scheduler clients.scheduler.options clients.scheduler.display"
    ),
    "clients.scheduler.__main__": Floor("clients.scheduler.program"),
    "clients.structured": Floor("client scheduler", "jsonschema llguidance numpy"),
}
"""From the ground up. A name without a prefix under ``below`` is in `ferrum_rpc`."""


def full_name(floor: str) -> str:
    return floor if floor in FLOORS else f"ferrum_rpc.{floor}"


def floor_of(module: str) -> str | None:
    """The most specific floor that a module is on; the root package is a floor of its own."""
    fits = [name for name in FLOORS if module == name or (name != "ferrum_rpc" and module.startswith(f"{name}."))]
    return max(fits, key=len, default=None)


@dataclass(frozen=True)
class Import:
    """``module`` (a file) imports ``target`` (a module of the project, or a third party's name) in ``line``."""

    module: str
    target: str
    line: int


class Tree:
    """The modules under a folder, and who imports what."""

    def __init__(self, folder: Path, packages: Sequence[str] = ROOT_PACKAGES) -> None:
        self.files = dict(sorted(self._files(folder, packages)))
        self.imports = [each for module in self.files for each in self._imports(module)]

    @staticmethod
    def _files(folder: Path, packages: Sequence[str]) -> Iterator[tuple[str, Path]]:
        for package in packages:
            for path in (folder / package).rglob("*.py"):
                parts = path.relative_to(folder).with_suffix("").parts
                yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path

    def _imports(self, module: str) -> Iterator[Import]:
        source = ast.parse(self.files[module].read_text())
        for node in ast.walk(source):
            for target in self._targets(module, node):
                yield Import(module, target, getattr(node, "lineno", 0))

    def _targets(self, module: str, node: ast.AST) -> Iterator[str]:
        match node:
            case ast.Import(names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(name, names, level):
                base = self._absolute(module, name or "", level)
                # `from package import module` imports the module; `from module import word` the module that has it
                yield from {f"{base}.{each.name}" if f"{base}.{each.name}" in self.files else base for each in names}
            case ast.Call(ast.Name("__import__") | ast.Attribute(attr="import_module"), [argument, *_]):
                known = isinstance(argument, ast.Constant) and isinstance(argument.value, str)
                yield argument.value if known else "<computed>"

    def _absolute(self, module: str, name: str, level: int) -> str:
        if not level:
            return name
        is_package = self.files[module].name == "__init__.py"
        parts = module.split(".")
        parts = parts[: len(parts) - level + is_package]
        return ".".join([*parts, name] if name else parts)

    # --- what is wrong ----------------------------------------------------------------------------------------------

    def violations(self) -> list[str]:
        """One line for each import that the table does not allow, and for each file that is on no floor."""
        homeless = [f"{module} is on no floor" for module in self.files if floor_of(module) is None]
        return homeless + [
            f"{each.module}:{each.line} imports {each.target}" for each in self.imports if not self._allowed(each)
        ]

    @staticmethod
    def _allowed(each: Import) -> bool:
        home = floor_of(each.module)
        if home is None:
            return True  # said already
        floor = FLOORS[home]
        top = each.target.partition(".")[0]
        if top in ROOT_PACKAGES:
            target = floor_of(each.target)
            if target == home == "clients":  # programs do not know each other
                return each.target.split(".")[:2] == each.module.split(".")[:2]
            return target == home or target in {full_name(name) for name in floor.below.split()}
        return top in sys.stdlib_module_names or top in floor.outside.split()

    def cycle(self) -> list[str] | None:
        """Modules that import each other in a circle, or None."""
        graph: dict[str, set[str]] = {module: set() for module in self.files}
        for each in self.imports:
            if each.target in graph and each.target != each.module:
                graph[each.module].add(each.target)
        try:
            graphlib.TopologicalSorter(graph).prepare()
        except graphlib.CycleError as error:
            return list(error.args[1])
        return None


# --- this tree --------------------------------------------------------------------------------------------------------


@cache
def this_tree() -> Tree:
    """Read once for all tests."""
    return Tree(ROOT)


def test_the_floors_stand_on_each_other_from_the_ground_up() -> None:
    known: set[str] = set()
    for name, floor in FLOORS.items():
        assert {full_name(below) for below in floor.below.split()} <= known, name
        known.add(name)


def test_every_file_imports_only_from_floors_below_its_own() -> None:
    tree = this_tree()
    assert len(tree.files) > 80
    assert {floor_of(module) for module in tree.files} >= set(FLOORS)
    assert tree.violations() == []


def test_programs_import_the_public_modules_of_the_client_only() -> None:
    public = {"ferrum_rpc.client", "ferrum_rpc.client.fleet", "ferrum_rpc.scheduler"}
    inside = {each.target for each in this_tree().imports if each.module.startswith("clients.")}
    assert {each for each in inside if each.startswith("ferrum_rpc")} == public


BESIDE = {"tools": "tools", "benchmarks": "benchmarks", "tests": "tests", "tests.tools": "tools benchmarks"}
"""What stands beside the package, and what of that each may import. The tests of programs are a folder of their own."""


def beside_violations(folder: Path) -> list[str]:
    """One line for each import between programs, benchmarks and tests that `BESIDE` does not allow."""
    tops = {name for name in BESIDE if "." not in name}
    found = []
    for each in Tree(folder, sorted(tops)).imports:
        homes = [name for name in BESIDE if f"{each.module}.".startswith(f"{name}.")]
        allowed = {word for home in homes for word in BESIDE[home].split()}
        if each.target.partition(".")[0] in tops - allowed:
            found.append(f"{each.module}:{each.line} imports {each.target}")
    return found


def test_programs_benchmarks_and_tests_do_not_import_each_other() -> None:
    assert beside_violations(ROOT) == []


def test_no_files_import_each_other_in_a_circle() -> None:
    assert this_tree().cycle() is None


def test_what_may_not_import_torch_does_not_load_it_either() -> None:
    """The service floor, the wire, the client, the command line: all of them together."""
    extras = {"ray"} | {name for name in ("smg_grpc_proto",) if importlib.util.find_spec(name) is None}
    light = [
        module
        for module in this_tree().files
        if (home := floor_of(module)) is not None
        and ({"torch"} | extras).isdisjoint(FLOORS[home].outside.split())
        and not module.endswith("__main__")
    ]
    assert {"ferrum_rpc.service.server", "ferrum_rpc.client", "ferrum_rpc.cli", "ferrum_rpc.kv.manager"} <= set(light)
    assert loaded_by(light) & {"torch", "transformers", "safetensors"} == set()
    assert loaded_by(["ferrum_rpc.core", "ferrum_rpc.errors"]) & {"grpc", "google", "structlog"} == set()
    assert "structlog" not in loaded_by([module for module in light if floor_of(module) == "ferrum_rpc.wire"])


def loaded_by(modules: list[str]) -> set[str]:
    """Top-level packages in a fresh interpreter that imported ``modules``."""
    program = f"import importlib, sys\nfor name in {modules!r}: importlib.import_module(name)\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    return {name.partition(".")[0] for name in done.stdout.split()}


# --- the check itself -------------------------------------------------------------------------------------------------


def tree_of(folder: Path, files: dict[str, str]) -> Tree:
    """A tree with these files besides the least that the imports in them need."""
    least = {
        "ferrum_rpc/__init__.py": "",
        "ferrum_rpc/errors.py": "import enum",
        "ferrum_rpc/core.py": "import numpy\nfrom ferrum_rpc.errors import Reason",
        "ferrum_rpc/kv/__init__.py": "",
        "ferrum_rpc/kv/pool.py": "import numpy as np",
        "ferrum_rpc/kv/store.py": "import torch",
        "ferrum_rpc/models/__init__.py": "",
        "ferrum_rpc/models/base.py": "import torch\nfrom ferrum_rpc.core import AttentionSpec",
        "ferrum_rpc/engine/__init__.py": "",
        "ferrum_rpc/engine/thread.py": "from ferrum_rpc.core import Step",
        "ferrum_rpc/engine/step.py": "import torch\nfrom ferrum_rpc.kv import pool, store",
        "ferrum_rpc/service/__init__.py": "",
        "ferrum_rpc/service/server.py": "import grpc\nfrom ferrum_rpc.engine import thread",
        "ferrum_rpc/client/__init__.py": "",
        "clients/one/__init__.py": "",
        "clients/one/part.py": "",
    }
    for name, source in (least | files).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return Tree(folder)


VIOLATIONS = {
    "errors import core": ("errors.py", "from ferrum_rpc.core import Step", "errors:1 imports ferrum_rpc.core"),
    "core imports a floor above": ("core.py", "import ferrum_rpc.kv.pool", "core:1 imports ferrum_rpc.kv.pool"),
    "core imports torch": ("core.py", "import torch", "core:1 imports torch"),
    "kv imports models": (
        "kv/pool.py",
        "from ferrum_rpc.models import base",
        "kv.pool:1 imports ferrum_rpc.models.base",
    ),
    "kv's integers import its tensors": ("kv/pool.py", "from . import store", "kv.pool:1 imports ferrum_rpc.kv.store"),
    "kv's integers import torch": ("kv/pool.py", "import torch.nn", "kv.pool:1 imports torch.nn"),
    "a package's own file does": (
        "kv/__init__.py",
        "from ..models.base import x",
        "kv:1 imports ferrum_rpc.models.base",
    ),
    "models import the engine": (
        "models/base.py",
        "from ferrum_rpc.engine.api import State",
        "models.base:1 imports ferrum_rpc.engine.api",
    ),
    "models import attention, which they must not know": (
        "models/base.py",
        "import ferrum_rpc.attention.geometry as g",
        "models.base:1 imports ferrum_rpc.attention.geometry",
    ),
    "the thread imports what runs a step": (
        "engine/thread.py",
        "from ferrum_rpc.engine.step import StepRunner",
        "engine.thread:1 imports ferrum_rpc.engine.step",
    ),
    "the service imports the torch half of the engine": (
        "service/server.py",
        "import grpc\n\nfrom ferrum_rpc.engine import step, thread",
        "service.server:3 imports ferrum_rpc.engine.step",
    ),
    "the service imports torch": ("service/server.py", "import torch", "service.server:1 imports torch"),
    "the service imports the cache": (
        "service/server.py",
        "from ferrum_rpc.kv.pool import BlockPool",
        "service.server:1 imports ferrum_rpc.kv.pool",
    ),
    "inside of a function": (
        "service/server.py",
        "def run():\n    import torch",
        "service.server:2 imports torch",
    ),
    "for its types only": (
        "service/server.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ferrum_rpc.engine.step import StepRunner",
        "service.server:3 imports ferrum_rpc.engine.step",
    ),
    "by name": (
        "service/server.py",
        "import importlib\nimportlib.import_module('torch')",
        "service.server:2 imports torch",
    ),
    "by a computed name": (
        "service/server.py",
        "import importlib\nimportlib.import_module('to' + 'rch')",
        "service.server:2 imports <computed>",
    ),
    "wire logs": ("wire/items.py", "import structlog", "wire.items:1 imports structlog"),
    "the client imports the service": (
        "client/__init__.py",
        "from ferrum_rpc.service import server",
        "client:1 imports ferrum_rpc.service.server",
    ),
    "tests are no floor": ("core.py", "from tests.serving import serve", "core:1 imports tests.serving"),
    "a package that is on no floor": ("extra/thing.py", "", "extra.thing is on no floor"),
}


@pytest.mark.parametrize("name", VIOLATIONS)
def test_a_violation_is_found(tmp_path: Path, name: str) -> None:
    file, source, expected = VIOLATIONS[name]
    assert tree_of(tmp_path, {f"ferrum_rpc/{file}": source}).violations() == [f"ferrum_rpc.{expected}"]


def test_an_import_between_programs_and_tests_is_found(tmp_path: Path) -> None:
    files = {
        "tools/soak.py": "from tests.faults import sizes",
        "benchmarks/wire.py": "import tools.gpu\nimport benchmarks.echo",
        "tests/unit/test_one.py": "def late():\n    from tools import lock",
        "tests/tools/test_lock.py": "from tools import lock\nimport benchmarks\nimport tests.serving",
    }
    for name, source in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(source)
    assert sorted(beside_violations(tmp_path)) == [
        "benchmarks.wire:1 imports tools.gpu",
        "tests.unit.test_one:2 imports tools",
        "tools.soak:1 imports tests.faults",
    ]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from ferrum_rpc.service import server", ["imports ferrum_rpc.service.server"]),
        ("import ferrum_rpc.wire.rows", ["imports ferrum_rpc.wire.rows"]),
        ("import torch", ["imports torch"]),
        ("from clients.two import main", ["imports clients.two"]),
        ("from . import part\nfrom clients.one.part import word", []),
        ("from ferrum_rpc.client import ExecutorClient\nfrom ferrum_rpc.errors import QueueFull\nimport numpy", []),
    ],
)
def test_a_program_knows_the_client_and_the_public_words(tmp_path: Path, source: str, expected: list[str]) -> None:
    found = tree_of(tmp_path, {"clients/one/main.py": source}).violations()
    assert found == [f"clients.one.main:1 {each}" for each in expected]


def test_a_tree_without_violations_has_none(tmp_path: Path) -> None:
    tree = tree_of(tmp_path, {})
    assert tree.violations() == []
    assert tree.cycle() is None


def test_a_circle_is_found_however_it_is_written(tmp_path: Path) -> None:
    files = {
        "ferrum_rpc/kv/pool.py": "from ferrum_rpc.kv import table",
        "ferrum_rpc/kv/table.py": "def late():\n    from .sequence import word",
        "ferrum_rpc/kv/sequence.py": "import ferrum_rpc.kv.pool",
    }
    tree = tree_of(tmp_path, files)
    assert tree.violations() == []
    circle = tree.cycle()
    assert circle is not None
    assert set(circle) == {f"ferrum_rpc.kv.{name}" for name in ("pool", "table", "sequence")}


def test_types_alone_make_a_circle(tmp_path: Path) -> None:
    files = {
        "ferrum_rpc/kv/pool.py": "from ferrum_rpc.kv.table import word",
        "ferrum_rpc/kv/table.py": "import typing\nif typing.TYPE_CHECKING:\n    from ferrum_rpc.kv.pool import Pool",
    }
    assert set(tree_of(tmp_path, files).cycle() or ()) == {"ferrum_rpc.kv.pool", "ferrum_rpc.kv.table"}
