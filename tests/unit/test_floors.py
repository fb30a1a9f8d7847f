"""A file imports only from floors below its own. The table here is the architecture; this test keeps the code to it.

Imports are read from the source, those inside of functions and under TYPE_CHECKING too: to name another module's type
is to depend on it. Cycles are looked for among all of them.
"""

from __future__ import annotations

import ast
import graphlib
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOT_PACKAGES = ("ferrum_rpc", "clients")


@dataclass(frozen=True)
class Floor:
    """A package or module, the floors that it may import besides itself, and the third-party packages that it may."""

    below: str = ""
    outside: str = ""


TABLE = {
    "ferrum_rpc": Floor(),
    "errors": Floor(),
    "core": Floor("errors", "numpy"),
    "prefix_hash": Floor("core", "numpy"),
    "private_files": Floor(),
    "device": Floor("errors", "torch"),
    "selection": Floor("device errors", "torch"),
    "terminal": Floor(),
    "console": Floor("terminal", "structlog"),
    "logs": Floor("console terminal", "structlog"),
    "failpoints": Floor("errors logs", "structlog"),
    "usage": Floor(),
    "install": Floor(),
    "config": Floor("core errors failpoints usage", "pydantic"),
    # the contract
    "executor": Floor("", "google grpc"),
    "wire": Floor("core errors executor", "google grpc numpy"),
    "native": Floor("usage", "torch triton"),
    "sampling.transfer": Floor("", "torch"),
    # each knows nothing of the others' insides
    "kv": Floor("core errors prefix_hash", "numpy"),
    "kv.store": Floor("core errors sampling.transfer", "numpy torch"),
    "kv.tiers": Floor("prefix_hash private_files", "structlog"),
    "distributed.group": Floor("", "torch"),
    "models.fields": Floor("errors"),
    "models.config_keys": Floor("errors models.fields"),
    "models.stored_integers": Floor("", "torch"),
    "models": Floor(
        "core errors install native selection distributed.group models.fields models.config_keys "
        "models.stored_integers sampling.transfer",
        "numpy torch transformers triton",
    ),
    "attention": Floor("core errors native selection", "numpy torch triton flashinfer"),
    "sampling": Floor("core errors native selection distributed.group sampling.transfer", "numpy torch triton"),
    "weights": Floor(
        "core errors install models.fields models.config_keys models.stored_integers", "gguf numpy torch safetensors"
    ),
    "distributed": Floor("core errors native distributed.group", "numpy torch"),
    # the thread and its queue know neither torch nor the floors below the runner: the service floor imports them
    "engine.liveness": Floor(),
    "engine.commands": Floor("core", "numpy"),
    "engine.api": Floor("core errors engine.commands"),
    "engine.overlap": Floor(),
    "engine.backlog": Floor("engine.api"),
    "engine.places": Floor("engine.api"),
    "engine.runs": Floor("core errors engine.api engine.places", "numpy"),
    "engine.chains": Floor("core engine.api engine.places", "numpy"),
    "engine.aside": Floor("engine.api"),
    "engine.behind": Floor("engine.api"),
    "engine.loop": Floor(
        "core errors engine.aside engine.backlog engine.behind engine.chains engine.overlap engine.places engine.runs "
        "engine.api"
    ),
    "engine.thread": Floor("core errors engine.liveness engine.api engine.loop"),
    "engine.channel": Floor("core", "numpy"),
    "engine.process": Floor(),
    "engine.process.ipc": Floor("core engine.api", "numpy"),
    "engine.process.parent": Floor("core errors engine.liveness engine.api engine.channel engine.process.ipc", "numpy"),
    "engine.process.child": Floor("core engine.api engine.channel engine.loop engine.process.ipc"),
    # its programs load the grammar library, the engine does not
    "engine.grammars": Floor("core errors engine.channel engine.liveness", "llguidance numpy structlog"),
    "engine.ranks.world": Floor("config errors"),  # read before torch is loaded
    # a step on the device, and as a transaction
    "engine": Floor(),
    "engine.memory": Floor("", "torch"),
    "engine.compute": Floor("core device models attention sampling sampling.transfer engine.memory", "numpy torch"),
    "engine.cuda": Floor(
        "core device errors models attention sampling sampling.transfer distributed.group engine.compute",
        "numpy torch structlog",
    ),
    "engine.state_images": Floor("core attention", "numpy torch"),
    "engine.states": Floor("core device errors kv attention engine.state_images", "structlog torch"),
    "engine.checkpoint_files": Floor("core errors kv.tiers engine.states", "torch"),
    "engine.feeding": Floor("core errors kv attention engine.compute engine.states", "numpy torch"),
    "engine.step": Floor(
        "core device errors kv kv.store kv.tiers attention sampling sampling.transfer engine.compute engine.grammars "
        "engine.states engine.checkpoint_files engine.feeding",
        "numpy torch structlog",
    ),
    # from settings to a runner: what every rank chooses, the ranks, and what puts the first one's together
    "engine.assembly": Floor(
        "config core device errors kv kv.store models models.fields models.config_keys models.stored_integers "
        "attention sampling sampling.transfer usage weights native engine.compute engine.ranks.world",
        "numpy torch structlog",
    ),
    "engine.adapters": Floor("core errors models weights engine.assembly", "torch"),
    "engine.operations": Floor(
        "core device errors kv kv.store kv.tiers models attention engine.compute engine.grammars engine.states "
        "engine.step engine.adapters",
        "numpy torch structlog",
    ),
    "engine.ranks": Floor(
        "config core errors kv.store models attention sampling sampling.transfer distributed "
        "distributed.group engine.memory engine.channel engine.compute engine.cuda engine.assembly engine.adapters "
        "engine.ranks.world engine.state_images",
        "numpy torch structlog",
    ),
    "engine.assembly.build": Floor(
        "config core errors failpoints install kv kv.store kv.tiers models attention sampling sampling.transfer native "
        "engine.memory engine.compute engine.cuda engine.grammars engine.state_images engine.states engine.step "
        "engine.assembly engine.adapters engine.operations engine.ranks engine.ranks.world weights",
        "torch",
    ),
    "engine.assembly.parity": Floor(
        "config core errors weights models engine.operations engine.assembly engine.assembly.build",
        "numpy torch transformers",
    ),
    # what any server of this package needs to open a port
    "service.trace_context": Floor("", "grpc"),
    "service.guard.watched_file": Floor("", "structlog"),
    "service.guard.auth": Floor(
        "core errors service.guard.watched_file service.trace_context", "grpc_health structlog"
    ),
    "service.guard.tls": Floor("service.guard.auth service.guard.watched_file", "grpc structlog"),
    "service.guard.bind": Floor("service.guard.auth service.guard.tls service.guard.watched_file", "grpc structlog"),
    "service.guard.slots": Floor(),
    "service.guard.bodies": Floor("core errors service.guard.slots service.trace_context", "grpc"),
    "service.guard.connections": Floor(),
    "service.health": Floor("wire", "grpc grpc_health"),
    "service.metrics_server": Floor("service.guard.bind", "prometheus_client"),
    "service": Floor(
        "ferrum_rpc core errors failpoints install prefix_hash private_files executor wire engine.liveness engine.api "
        "engine.commands engine.thread engine.process.parent service.guard.auth service.guard.bind "
        "service.guard.bodies service.guard.connections service.guard.slots service.guard.tls "
        "service.guard.watched_file service.health service.metrics_server service.trace_context",
        "crc32c google grpc grpc_health grpc_reflection nixl numpy opentelemetry prometheus_client structlog",
    ),
    "client": Floor("ferrum_rpc core errors executor prefix_hash wire", "google grpc grpc_health numpy"),
    # a library, which knows neither terminal nor command line
    "scheduler": Floor("client"),
    # programs
    "runtime": Floor("install usage", "uvloop"),
    "ask": Floor("ferrum_rpc core errors client terminal", "tokenizers"),
    "hub": Floor("errors terminal", "huggingface_hub structlog"),
    "building": Floor(
        "config errors failpoints usage terminal hub engine.api engine.memory engine.ranks.world engine.assembly "
        "engine.assembly.build",
        "structlog torch",
    ),
    "plan": Floor("errors config terminal engine.assembly building"),
    "doctor": Floor("errors config terminal engine.adapters engine.assembly engine.assembly.parity building"),
    "worker": Floor("failpoints engine.api engine.process.child building logs config runtime"),
    "rank": Floor("errors engine.channel engine.ranks engine.ranks.world runtime", "torch"),
    "serve": Floor(
        "ferrum_rpc core errors failpoints engine.liveness engine.process.parent engine.api engine.ranks.world "
        "service service.guard.auth service.guard.bind service.guard.watched_file service.metrics_server building logs "
        "config usage runtime",
        "structlog",
    ),
    # of `bench` the flags alone: `--help` loads no client
    "bench": Floor("ferrum_rpc core errors client ask terminal", "numpy"),
    "top": Floor("ferrum_rpc client ask terminal", "rich"),
    # a program on the scheduler, for routers; of its flags none needs a package: `--help` loads them
    "fronts.options": Floor(),
    "fronts": Floor(
        "ferrum_rpc client scheduler ask logs wire fronts.options service.guard.auth service.guard.bind "
        "service.guard.bodies service.guard.connections service.guard.tls service.guard.watched_file "
        "service.health service.metrics_server",
        "google grpc grpc_health numpy prometheus_client smg_grpc_proto structlog tokenizers",
    ),
    # of `fleet` the flags alone: `--help` loads no Ray
    "fleet": Floor(),
    "fleet.cluster": Floor("fleet", "ray"),
    "cli": Floor(
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
"""From the ground up. A name without a prefix is in `ferrum_rpc`."""


def full_name(floor: str) -> str:
    return floor if floor.partition(".")[0] in ROOT_PACKAGES else f"ferrum_rpc.{floor}"


FLOORS = {full_name(name): floor for name, floor in TABLE.items()}


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

    @cached_property
    def imports(self) -> list[Import]:
        return [each for module in self.files for each in self.imports_of(module)]

    @staticmethod
    def _files(folder: Path, packages: Sequence[str]) -> Iterator[tuple[str, Path]]:
        for package in packages:
            for path in (folder / package).rglob("*.py"):
                parts = path.relative_to(folder).with_suffix("").parts
                yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path

    def imports_of(self, module: str) -> Iterator[Import]:
        for node in ast.walk(ast.parse(self.files[module].read_text())):
            if isinstance(node, (ast.Import, ast.ImportFrom, ast.Call)):
                for target in self._targets(module, node):
                    yield Import(module, target, node.lineno)

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
        wrong = [each for each in self.imports if not self._allowed(each)]
        return homeless + [f"{each.module}:{each.line} imports {each.target}" for each in wrong]

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
    tree, found = Tree(folder, sorted(tops)), list[str]()
    for module, path in tree.files.items():
        homes = [name for name in BESIDE if f"{module}.".startswith(f"{name}.")]
        others = tops - {word for home in homes for word in BESIDE[home].split()}
        text = path.read_text()
        if re.search(rf"\b({'|'.join(others)})\b", text):  # parsing all tests takes seconds
            imports = [each for each in tree.imports_of(module) if each.target.partition(".")[0] in others]
            found += [f"{module}:{each.line} imports {each.target}" for each in imports]
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
    wire = [module for module in light if floor_of(module) == "ferrum_rpc.wire"]
    by_core, by_wire, by_all = loaded_by(["ferrum_rpc.core", "ferrum_rpc.errors"], wire, light)
    assert by_core & {"grpc", "google", "structlog"} == set()
    assert "structlog" not in by_wire
    assert by_all & {"torch", "transformers", "safetensors"} == set()


def loaded_by(*groups: list[str]) -> list[set[str]]:
    """Top-level packages in a fresh interpreter once it has imported each of the ``groups`` of modules."""
    program = f"import sys\nfor group in {groups!r}:\n    for name in group: __import__(name)\n    print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    return [{name.partition(".")[0] for name in line.split()} for line in done.stdout.splitlines()]


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


SERVER = "service/server.py"
TYPES = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n"
VIOLATIONS = {
    "a floor above": ("core.py", "import ferrum_rpc.kv.pool", 1, "ferrum_rpc.kv.pool"),
    "a third party's package": ("kv/pool.py", "import torch.nn", 1, "torch.nn"),
    "relative": ("kv/pool.py", "from . import store", 1, "ferrum_rpc.kv.store"),
    "by a package's own file": ("kv/__init__.py", "from ..models.base import x", 1, "ferrum_rpc.models.base"),
    "as another name": ("models/base.py", "import ferrum_rpc.kv.pool as p", 1, "ferrum_rpc.kv.pool"),
    "one of two": (SERVER, "import grpc\n\nfrom ferrum_rpc.engine import step, thread", 3, "ferrum_rpc.engine.step"),
    "inside of a function": (SERVER, "def run():\n    import torch", 2, "torch"),
    "for its types only": (SERVER, f"{TYPES}    from ferrum_rpc.engine.step import Step", 3, "ferrum_rpc.engine.step"),
    "by name": (SERVER, "import importlib\nimportlib.import_module('torch')", 2, "torch"),
    "by a computed name": (SERVER, "import importlib\nimportlib.import_module('to' + 'rch')", 2, "<computed>"),
    "tests are no floor": ("core.py", "from tests.support.serving import serve", 1, "tests.support.serving"),
}
"""The ways to write an import: the file, what it says, in which line, and of what. Which floor may import which, the
table says."""


@pytest.mark.parametrize("name", VIOLATIONS)
def test_a_violation_is_found(tmp_path, name):
    file, source, line, target = VIOLATIONS[name]
    module = ".".join(Path("ferrum_rpc", file).with_suffix("").parts).removesuffix(".__init__")
    found = tree_of(tmp_path, {f"ferrum_rpc/{file}": source}).violations()
    assert found == [f"{module}:{line} imports {target}"]


def test_a_package_that_is_on_no_floor_is_found(tmp_path):
    found = tree_of(tmp_path, {"ferrum_rpc/extra/thing.py": ""}).violations()
    assert found == ["ferrum_rpc.extra.thing is on no floor"]


def test_an_import_between_programs_and_tests_is_found(tmp_path: Path) -> None:
    files = {
        "tools/soak.py": "from tests.faults import sizes",
        "benchmarks/wire.py": "import tools.gpu\nimport benchmarks.echo",
        "tests/unit/test_one.py": "def late():\n    from tools import lock",
        "tests/tools/test_lock.py": "from tools import lock\nimport benchmarks\nimport tests.support.serving",
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
