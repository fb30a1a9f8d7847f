"""Generate the clients for programs without asyncio from the async ones, or check them: ferrum_rpc/client/sync.py of
`ExecutorClient`, ferrum_rpc/client/fleet/sync.py of `FleetClient`.

Each public method of a class gets one of the same name and arguments that runs it in the background loop: in one line,
with the types of the original, where no batch of sequences goes in or comes out. They are files and not made at run
time, so that type checkers and editors see them.

    python tools/generate_sync.py            write them
    python tools/generate_sync.py --check    exit 1 where one differs
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
CLIENT = "ferrum_rpc.client"
BY_HAND = {"close"}
ASYNC_ONLY = {"move_to"}
"""Methods that need two clients in one event loop."""
PARTS = ("ClientFacade", "Facade", "blocking", "constructor_of", "iterating", "making", "unwrapped")
"""What facades are made of, in `client.background`."""


class Facade(NamedTuple):
    """A class to generate, of the one of that name in ``module``. ``under``: the generated class that it derives from.
    ``client``: it has a loop of its own."""

    name: str
    module: str
    under: str = ""
    client: bool = False

    @property
    def original(self) -> str:
        """The async class, as the generated source says it."""
        return f"{alias(self.module)}.{self.name}"


class File(NamedTuple):
    """A module to generate, with what its docstring says."""

    module: str
    heading: str
    facades: tuple[Facade, ...]


FILES = (
    File(
        f"{CLIENT}.sync",
        """The client for programs without asyncio. tools/generate_sync.py makes it of the async one: do not edit.

    from ferrum_rpc.client.sync import ExecutorClient

    with ExecutorClient("localhost:50051") as client, client.sequence() as sequence:
        for token in sequence.generate(b"In the beginning", max_tokens=64):
            print(token)

Same methods, arguments, answers and errors, described there. An open client has an event loop in a thread of its own:
threads may share it, each waits for its own calls, and on one sequence there is one call at a time.
``on_lease_trouble`` is called in that thread. Ctrl-C cancels the call that waits, and leaving the ``with`` releases
what is left.
""",
        (
            Facade("Sequence", f"{CLIENT}.sequence"),
            Facade("ExecutorClient", f"{CLIENT}.client", client=True),
        ),
    ),
    File(
        f"{CLIENT}.fleet.sync",
        """A fleet for programs without asyncio. tools/generate_sync.py makes it of the async one: do not edit.

    from ferrum_rpc.client import ExecutorClient
    from ferrum_rpc.client.fleet.sync import FleetClient

    with FleetClient(targets, connect=partial(ExecutorClient, session=True)) as fleet, fleet.sequence() as sequence:
        for token in sequence.generate(b"In the beginning", max_tokens=64):
            print(token, sequence.owner)

As `client.sync` is of one executor. ``connect`` makes async clients: all executors of a fleet live in its one event
loop, and there its ``placement`` is asked. What `FleetClient.members` and a `Member` tell may be read in any thread;
their methods are of that loop.
""",
        (
            Facade("FleetSequence", f"{CLIENT}.fleet.sequence", under="Sequence"),
            Facade("FleetClient", f"{CLIENT}.fleet.client", client=True),
        ),
    ),
)
MADE_IN = {each.name: file.module for file in FILES for each in file.facades}
SEQUENCES = {each.name for file in FILES for each in file.facades if not each.client}


def alias(module: str) -> str:
    """What the generated source calls a module."""
    return "async_" + module.removeprefix(f"{CLIENT}.").replace(".", "_")


def imported(module: str) -> str:
    """The import of a module by that name."""
    package, _, name = module.rpartition(".")
    return f"from {package} import {name} as {alias(module)}"


@cache
def tree_of(module: str) -> ast.Module:
    """The source of a module of the client."""
    return ast.parse((ROOT / module.replace(".", "/")).with_suffix(".py").read_text())


def classes(module: str, name: str) -> Iterator[tuple[str, ast.ClassDef]]:
    """A class, and those that it derives from in the client, with their modules; not those that are facades too."""
    tree = tree_of(module)
    node = next(each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == name)
    yield module, node
    bases = {ast.unparse(each) for each in node.bases} - set(MADE_IN)
    for each in tree.body:
        if isinstance(each, ast.ImportFrom) and each.module and each.module.startswith(CLIENT):
            for base in bases & {alias.name for alias in each.names}:
                yield from classes(each.module, base)


def methods(facade: Facade) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """The public methods and properties."""
    seen = BY_HAND | ASYNC_ONLY
    for _, node in classes(facade.module, facade.name):
        for each in node.body:
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and not each.name.startswith("_"):
                if each.name not in seen:
                    yield each
                seen = seen | {each.name}


def method(each: ast.FunctionDef | ast.AsyncFunctionDef, facade: Facade) -> list[str]:
    """One method of the facade, in source."""
    is_property = any(isinstance(mark, ast.Name) and mark.id == "property" for mark in each.decorator_list)
    returned = "None" if each.returns is None else ast.unparse(each.returns)
    arguments = ast.unparse(each.args)
    if returned in SEQUENCES:
        return [f"{each.name} = making({returned}, {facade.original}.{each.name})"]
    if not facade.under and not (SEQUENCES | {"Self"}) & (names(returned) | names(arguments)):
        if isinstance(each, ast.AsyncFunctionDef):
            return [f"{each.name} = blocking({facade.original}.{each.name})"]
        if returned.startswith("AsyncGenerator["):
            return [f"{each.name} = iterating({facade.original}.{each.name})"]
    passed = ", ".join(
        [handed(arg) for arg in each.args.args[1:]] + [f"{arg.arg}={handed(arg)}" for arg in each.args.kwonlyargs]
    )
    call = f"self._async.{each.name}" + ("" if is_property else f"({passed})")
    if isinstance(each, ast.AsyncFunctionDef):
        call = f"self._background.run({call})"
    if returned == "Self":
        call = f"type(self)({call}, self._background)"
    if returned == "list[Self]":
        call = f"[type(self)(each, self._background) for each in {call}]"
    return [
        *(["", "@property"] if is_property else [""]),
        f"def {each.name}({arguments}) -> {returned}:",
        *(f"    {line}" if line else "" for line in f'"""{ast.get_docstring(each)}"""'.splitlines()),
        f"    return {call}",
        "",
    ]


def handed(arg: ast.arg) -> str:
    """An argument as the async method takes it: with its own sequences."""
    annotation = "" if arg.annotation is None else ast.unparse(arg.annotation)
    return f"unwrapped({arg.arg})" if SEQUENCES & names(annotation) else arg.arg


def names(source: str) -> set[str]:
    """The names that a piece of source uses, those of arguments' types included."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        tree = ast.parse(f"def arguments({source}): pass")
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def imports(modules: set[str], used: set[str]) -> list[str]:
    """Where the facades' names come from: where the async modules have them from, or those modules themselves."""
    found: dict[str, set[str]] = {}
    for module in modules:
        for node in tree_of(module).body:
            if isinstance(node, ast.ImportFrom) and node.module and node.module != "__future__":
                for alias in node.names:
                    if (alias.asname or alias.name) in used:
                        found.setdefault(node.module, set()).add(ast.unparse(alias))
            elif isinstance(node, ast.ClassDef | ast.Assign):
                made = {node.name} if isinstance(node, ast.ClassDef) else set(map(ast.unparse, node.targets))
                found.setdefault(module, set()).update(made & used)
    return [f"from {module} import {', '.join(sorted(words))}" for module, words in sorted(found.items()) if words]


def body(facade: Facade) -> list[str]:
    """A facade's class, in source."""
    base = facade.under or f"{'Client' * facade.client}Facade[{facade.original}]"
    lines = ["", "", f"class {facade.name}({base}):", f"    __doc__ = {facade.original}.__doc__", ""]
    if facade.under:
        lines += [f"    _async: {facade.original}", ""]
    if facade.client:
        lines += [
            f"    @constructor_of({facade.original})",
            "    def __init__(self, *args: Any, **kwargs: Any) -> None:",
            f"        super().__init__({facade.original}(*args, **kwargs))",
            "",
        ]
    for each in methods(facade):
        lines += [f"    {line}" if line else "" for line in method(each, facade)]
    return lines


def generate(file: File) -> str:
    """A file's source."""
    lines = [line for facade in file.facades for line in body(facade)]
    used = names("\n".join(lines))
    modules = {module for facade in file.facades for module, _ in classes(facade.module, facade.name)}
    here = {facade.name for facade in file.facades}
    source = "\n".join(
        [
            f'"""{file.heading}"""\n\nfrom __future__ import annotations\n',
            "from typing import Any",
            *(imported(facade.module) for facade in file.facades),
            f"from {CLIENT}.background import {', '.join(each for each in PARTS if each in used)}",
            *(f"from {MADE_IN[each]} import {each}" for each in sorted(used & SEQUENCES - here)),
            *imports(modules, used - set(MADE_IN) - {"Any"}),
            *lines,
        ]
    )
    for command in (["check", "--select", "I", "--fix-only", "--quiet"], ["format"]):
        ruff = [str(Path(sys.executable).with_name("ruff")), *command, "--line-length", "120", "-"]
        source = subprocess.run(ruff, input=source, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    return source


def main() -> None:
    """Write or check."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare with the committed files, write nothing")
    only_check = parser.parse_args().check
    for file in FILES:
        path = (ROOT / file.module.replace(".", "/")).with_suffix(".py")
        source = generate(file)
        if not only_check:
            path.write_text(source)
        elif path.read_text() != source:
            sys.exit(f"{path.relative_to(ROOT)} is not what the async client says, run `make stubs`")


if __name__ == "__main__":
    main()
