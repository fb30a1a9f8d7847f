"""Tests go through public seams: how often they reach for a private name of the package does not grow."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST = 56
"""Lower it when you remove some. What nothing public shows is looked at in `tests.support.inside`, once a name."""
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
PRIVATE = re.compile(r"\b_[A-Za-z]\w*")
OTHERS = re.compile(r"(?<!\bself)(?<!\bcls)\.(_\w+)")
PUBLIC = {"_asdict", "_fields", "_make", "_replace", "_exit"}
"""Of a named tuple, and of `os`."""


def own_names(tree: ast.AST) -> set[str]:
    """What a file of tests defines itself."""
    found = {node.name for node in ast.walk(tree) if isinstance(node, DEFINITIONS)}
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name, ctx=ast.Store(), value=ast.Name(id="self")):
                found.add(name)
            case ast.AnnAssign(target=ast.Name(id=name)):
                found.add(name)
    return found


def reaches(tree: ast.AST, private: set[str]) -> Iterator[str]:
    """Each access to a private name of the package, but through ``self``."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in private]
    own = own_names(tree) if found else set()
    for node in found:
        mine = isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"}
        if not mine and node.attr not in own:
            yield f"{ast.unparse(node)}:{node.lineno}"


def private_names() -> set[str]:
    files = [each for each in ROOT.glob("ferrum_rpc/**/*.py") if "executor/v1" not in each.as_posix()]
    return {name for each in files for name in PRIVATE.findall(each.read_text(encoding="utf-8"))} - PUBLIC


def test_a_reach_is_found() -> None:
    tree = ast.parse("class Mine:\n    def __init__(self):\n        self._own = server._state\nMine()._own.x._slots")
    assert list(reaches(tree, {"_state", "_slots", "_own"})) == ["Mine()._own.x._slots:4", "server._state:3"]


def test_reaches_do_not_grow() -> None:
    private, counts = private_names(), Counter[str]()
    for file in sorted(ROOT.glob("tests/**/*.py")):
        text = file.read_text(encoding="utf-8")
        if not private.isdisjoint(OTHERS.findall(text)):  # parsing all tests takes seconds
            counts[file.relative_to(ROOT).as_posix()] += len(list(reaches(ast.parse(text), private)))
    assert sum(counts.values()) <= MOST, counts.most_common(12)
