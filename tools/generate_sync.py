"""Generate ferrum_rpc/client/sync.py, the client for programs without asyncio, from the async one, or check it.

Each public method of `ExecutorClient` and `Sequence` gets one of the same name and arguments that runs it in the
background loop: in one line, with the types of the original, where no batch of sequences goes in or comes out. It is
a file and not made at run time, so that type checkers and editors see it.

    python tools/generate_sync.py            write it
    python tools/generate_sync.py --check    exit 1 where it differs
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CLIENT = ROOT / "ferrum_rpc/client"
OUT = CLIENT / "sync.py"
CLASSES = {"Sequence": ("sequence", "Facade[async_sequence.Sequence]"), "ExecutorClient": ("client", "ClientFacade")}
BY_HAND = {"close"}
ASYNC_ONLY = {"move_to"}
"""Methods that need two clients in one event loop."""

HEADER = '''"""The client for programs without asyncio. tools/generate_sync.py makes it of the async one: do not edit.

    from ferrum_rpc.client.sync import ExecutorClient

    with ExecutorClient("localhost:50051") as client, client.sequence() as sequence:
        for token in sequence.generate(b"In the beginning", max_tokens=64):
            print(token)

Same methods, arguments, answers and errors, described there. An open client has an event loop in a thread of its own:
threads may share it, each waits for its own calls, and on one sequence there is one call at a time.
``on_lease_trouble`` is called in that thread. Ctrl-C cancels the call that waits, and leaving the ``with`` releases
what is left.
"""

from __future__ import annotations

'''


def methods(node: ast.ClassDef) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """The public methods and properties."""
    for each in node.body:
        if not isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) or each.name in BY_HAND | ASYNC_ONLY:
            continue
        if not each.name.startswith("_"):
            yield each


def method(each: ast.FunctionDef | ast.AsyncFunctionDef, original: str) -> list[str]:
    """One method of the facade, in source. ``original``: the async class."""
    is_property = any(isinstance(mark, ast.Name) and mark.id == "property" for mark in each.decorator_list)
    returned = "None" if each.returns is None else ast.unparse(each.returns)
    arguments = ast.unparse(each.args)
    if returned == "Sequence" and not original.endswith(".Sequence"):  # within its own class it has no name yet
        return [f"{each.name} = making(Sequence, {original}.{each.name})"]
    if "Sequence" not in names(returned) | names(arguments):
        if isinstance(each, ast.AsyncFunctionDef):
            return [f"{each.name} = blocking({original}.{each.name})"]
        if returned.startswith("AsyncGenerator["):
            return [f"{each.name} = iterating({original}.{each.name})"]
    passed = ", ".join(
        [handed(arg) for arg in each.args.args[1:]] + [f"{arg.arg}={handed(arg)}" for arg in each.args.kwonlyargs]
    )
    call = f"self._async.{each.name}" + ("" if is_property else f"({passed})")
    if isinstance(each, ast.AsyncFunctionDef):
        call = f"self._background.run({call})"
    if returned == "Sequence":
        call = f"Sequence({call}, self._background)"
    if returned == "list[Sequence]":
        call = f"[Sequence(each, self._background) for each in {call}]"
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
    return f"unwrapped({arg.arg})" if "Sequence" in names(annotation) else arg.arg


def names(source: str) -> set[str]:
    """The names in a piece of source, those of arguments' types included."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        tree = ast.parse(f"def arguments({source}): pass")
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def imports(trees: dict[str, ast.Module], used: set[str]) -> list[str]:
    """Where the facade's names come from: where the async modules have them from, or those modules themselves."""
    found: dict[str, set[str]] = {}
    for module, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ImportFrom) and node.module and node.module != "__future__":
                for alias in node.names:
                    if (alias.asname or alias.name) in used:
                        found.setdefault(node.module, set()).add(ast.unparse(alias))
            elif isinstance(node, ast.ClassDef | ast.Assign):
                made = {node.name} if isinstance(node, ast.ClassDef) else set(map(ast.unparse, node.targets))
                found.setdefault(f"ferrum_rpc.client.{module}", set()).update(made & used)
    return [f"from {module} import {', '.join(sorted(words))}" for module, words in sorted(found.items()) if words]


def generate() -> str:
    """The facade's source."""
    trees = {module: ast.parse((CLIENT / f"{module}.py").read_text()) for module, _ in CLASSES.values()}
    lines: list[str] = []
    for name, (module, base) in CLASSES.items():
        node = next(each for each in trees[module].body if isinstance(each, ast.ClassDef) and each.name == name)
        original = f"async_{module}.{name}"
        lines += ["", "", f"class {name}({base}):", f"    __doc__ = {original}.__doc__", ""]
        for each in methods(node):
            lines += [f"    {line}" if line else "" for line in method(each, original)]
    used = names("\n".join(lines)) - set(CLASSES)
    by_hand = ", ".join(sorted({"ClientFacade", "Facade", "blocking", "iterating", "making", "unwrapped"} & used))
    source = HEADER + "\n".join(
        [
            "from ferrum_rpc.client import client as async_client",
            "from ferrum_rpc.client import sequence as async_sequence",
            f"from ferrum_rpc.client.background import {by_hand}",
            *imports(trees, used),
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
    parser.add_argument("--check", action="store_true", help="compare with the committed file, write nothing")
    source = generate()
    if not parser.parse_args().check:
        OUT.write_text(source)
    elif OUT.read_text() != source:
        sys.exit(f"{OUT.relative_to(ROOT)} is not what the async client says, run `make stubs`")


if __name__ == "__main__":
    main()
