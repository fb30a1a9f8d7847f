"""Generate the clients for programs without asyncio from the async ones, or check them: ferrum_rpc/client/sync.py of
`ExecutorClient`, ferrum_rpc/client/fleet/sync.py of `FleetClient`.

Each public method of a class gets one of the same name and arguments that runs it in the background loop: in one line,
with the types of the original, where no batch of sequences goes in or comes out. They are files and not made at run
time, so that type checkers and editors see them.
"""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

from ferrum_rpc.client import ExecutorClient, Sequence
from ferrum_rpc.client.fleet import FleetClient, FleetSequence
from tools.commands import ROOT, write_or_check

CLIENT = "ferrum_rpc.client"
BY_HAND = {"close"}
ASYNC_ONLY = {"move_to"}
"""Methods that need two clients in one event loop."""
PARTS = ("ClientFacade", "Facade", "blocking", "constructor_of", "iterating", "making", "passing", "unwrapped")
"""What facades are made of, in `client.background`."""


class Facade(NamedTuple):
    """A class to generate, of the ``original``. ``under``: the generated class that it derives from. ``client``: it has
    a loop of its own."""

    original: type
    under: str = ""
    client: bool = False

    @property
    def name(self) -> str:
        """The name of both classes."""
        return self.original.__name__

    @property
    def alias(self) -> str:
        """What the generated source calls the module of the original."""
        return "async_" + self.original.__module__.removeprefix(f"{CLIENT}.").replace(".", "_")


FILES = {
    f"{CLIENT}.sync": (Facade(Sequence), Facade(ExecutorClient, client=True)),
    f"{CLIENT}.fleet.sync": (Facade(FleetSequence, under="Sequence"), Facade(FleetClient, client=True)),
}
MADE_IN = {each.name: module for module, facades in FILES.items() for each in facades}
SEQUENCES = {each.name for facades in FILES.values() for each in facades if not each.client}


def members(facade: Facade) -> dict[str, Any]:
    """The public methods and properties, inherited ones too, but not those of a class that has a facade."""
    found: dict[str, Any] = {}
    for each in facade.original.__mro__:
        if each is facade.original or (each.__module__.startswith(CLIENT) and each.__name__ not in MADE_IN):
            found |= {name: member for name, member in vars(each).items() if name not in found}
    return {name: found[name] for name in found if not name.startswith("_") and name not in BY_HAND | ASYNC_ONLY}


def made(facade: Facade, name: str, member: Any) -> tuple[list[str], set[str]]:
    """One method of the facade, in source, and the names that its annotations use."""
    function: Any = member.fget if isinstance(member, property) else member
    node: Any = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    returned, arguments = ast.unparse(node.returns), ast.unparse(node.args)
    used = {each.id for each in ast.walk(node.args) if isinstance(each, ast.Name)}
    used |= {each.id for each in ast.walk(node.returns) if isinstance(each, ast.Name)}
    original = f"{facade.alias}.{facade.name}.{name}"
    if returned in SEQUENCES:
        return [f"{name} = making({returned}, {original})"], set()
    if not (facade.under or isinstance(member, property) or (SEQUENCES | {"Self"}) & used):
        waits = "iterating" if returned.startswith("AsyncGenerator[") else "passing"
        return [f"{name} = {'blocking' if inspect.iscoroutinefunction(member) else waits}({original})"], set()
    passed = [*map(handed, node.args.args[1:]), *(f"{each.arg}={handed(each)}" for each in node.args.kwonlyargs)]
    call = f"self._async.{name}" + ("" if isinstance(member, property) else f"({', '.join(passed)})")
    if inspect.iscoroutinefunction(member):
        call = f"self._background.run({call})"
    if returned == "Self":
        call = f"type(self)({call}, self._background)"
    if returned == "list[Self]":
        call = f"[type(self)(each, self._background) for each in {call}]"
    lines = [
        "",
        *["@property"] * isinstance(member, property),
        f"def {name}({arguments}) -> {returned}:",
        *(f"    {line}" if line else "" for line in f'"""{inspect.getdoc(function)}"""'.splitlines()),
        f"    return {call}",
        "",
    ]
    return lines, {line for each in used - SEQUENCES if (line := imported(each, function.__globals__))}


def handed(arg: ast.arg) -> str:
    """An argument as the async method takes it: with its own sequences."""
    names = {each.id for each in ast.walk(arg) if isinstance(each, ast.Name)}
    return f"unwrapped({arg.arg})" if SEQUENCES & names else arg.arg


def imported(name: str, names: dict[str, Any]) -> str:
    """The import of something that a module has by this name; empty for what needs none."""
    if name not in names or name == "Self":
        return ""
    thing = names[name]
    return f"from {thing.__name__.rpartition('.')[0] if inspect.ismodule(thing) else thing.__module__} import {name}"


def body(facade: Facade) -> tuple[list[str], set[str]]:
    """A facade's class, in source, and its imports."""
    original, (package, _, module) = f"{facade.alias}.{facade.name}", facade.original.__module__.rpartition(".")
    base = facade.under or f"{'Client' * facade.client}Facade[{original}]"
    lines = ["", "", f"class {facade.name}({base}):", f"    __doc__ = {original}.__doc__", ""]
    imports = {f"from {package} import {module} as {facade.alias}"}
    if facade.under:
        lines += [f"    _async: {original}", ""]
        imports.add(f"from {MADE_IN[facade.under]} import {facade.under}")
    if facade.client:
        lines += [
            f"    @constructor_of({original})",
            "    def __init__(self, *args: Any, **kwargs: Any) -> None:",
            f"        super().__init__({original}(*args, **kwargs))",
            "",
        ]
    for name, member in members(facade).items():
        source, more = made(facade, name, member)
        lines += [f"    {line}" if line else "" for line in source]
        imports |= more
    return lines, imports


def path_of(module: str) -> Path:
    """A generated file."""
    return (ROOT / module.replace(".", "/")).with_suffix(".py")


def generate(module: str) -> str:
    """A file's source, with the docstring that it has."""
    imports, lines = set[str](), list[str]()
    for facade in FILES[module]:
        of_class, more = body(facade)
        imports, lines = imports | more, lines + of_class
    parts = [each for each in PARTS if re.search(rf"\b{each}\b", "\n".join(lines))]
    source = "\n".join(
        [
            f'"""{ast.get_docstring(ast.parse(path_of(module).read_text()), clean=False)}"""\n',
            "from __future__ import annotations\n",
            f"from typing import Any{', Self' * any('Self' in each for each in lines)}",
            f"from {CLIENT}.background import {', '.join(parts)}",
            *sorted(imports),
            *lines,
        ]
    )
    for command in (["check", "--select", "I", "--fix-only", "--quiet"], ["format"]):
        ruff = [str(Path(sys.executable).with_name("ruff")), *command, "--line-length", "120", "-"]
        source = subprocess.run(ruff, input=source, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    return source


if __name__ == "__main__":
    write_or_check(lambda: {path_of(module): generate(module).encode() for module in FILES})
