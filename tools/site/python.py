"""Pages of the public Python names, from their signatures and docstrings. Each name has its full path as its anchor."""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from functools import cache
from types import ModuleType
from typing import Any, Final

from tools.site.reference import rendered

MODULES: Final = {
    "ferrum_rpc.client": "python-client.md",
    "ferrum_rpc.client.fleet": "python-fleet.md",
    "ferrum_rpc.scheduler": "python-scheduler.md",
}
"""The public modules, each with its page."""
WITHOUT_ASYNCIO: Final = {
    "ferrum_rpc.client.sync": "ferrum_rpc.client",
    "ferrum_rpc.client.fleet.sync": "ferrum_rpc.client.fleet",
}
"""Modules whose classes have the methods of the asynchronous ones, which are on these modules' pages."""
WIDTH: Final = 100
MADE_BY_CALLS: Final = frozenset({"FleetSequence", "Item", "Member", "Sequence"})
"""Classes that programs do not construct: their constructors are not public."""


def pages() -> dict[str, str]:
    """The text of each page by its path on the site."""
    made = {f"reference/{name}": _module(module) for module, name in MODULES.items()}
    classes = {name: _exported(name) for name in WITHOUT_ASYNCIO}
    shared = {"members": _members, "signature": _signature}
    sync = rendered("python-sync", modules=WITHOUT_ASYNCIO, described=MODULES, classes=classes, **shared)
    return {**made, "reference/python-sync.md": sync}


def exported(module: ModuleType) -> list[str]:
    """The names of ``__all__``; without it, the classes that the module makes."""
    made = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
    return sorted(getattr(module, "__all__", [name for name in made if inspect.isclass(vars(module)[name])]))


def _exported(name: str) -> dict[str, Any]:
    module = importlib.import_module(name)
    return {each: getattr(module, each) for each in exported(module)}


def _module(name: str) -> str:
    values = _exported(name)
    classes = {each: value for each, value in values.items() if inspect.isclass(value)}
    functions = {each: value for each, value in values.items() if inspect.isfunction(value)}
    return rendered(
        "python",
        name=name,
        doc=importlib.import_module(name).__doc__,
        classes=classes,
        errors={each: value for each, value in classes.items() if issubclass(value, Exception)},
        functions=functions,
        others={each: _value(value) for each, value in values.items() if each not in classes.keys() | functions.keys()},
        is_enum=lambda of: issubclass(of, enum.Enum),
        made_by_calls=MADE_BY_CALLS,
        prose=_prose,
        code=_code,
        fields_of=_fields,
        notes_of=lambda of: {each: note for base in reversed(of.__mro__) for each, note in _notes(base).items()},
        members=_members,
    )


def _value(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(f"`{getattr(each, '__name__', each)}`" for each in value)
    return f"`{re.sub(r' at 0x[0-9a-f]+', '', repr(value))}`"


def _fields(of: type) -> dict[str, str]:
    """The annotated attributes of a class, as the source has their types."""
    fields = {each: kind for base in reversed(of.__mro__) for each, kind in inspect.get_annotations(base).items()}
    return {
        each: _shown(kind) for each, kind in fields.items() if not each.startswith("_") and "ClassVar" not in str(kind)
    }


def _members(of: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties, inherited ones too, those of builtins not."""
    for each in inspect.classify_class_attrs(of):
        if not each.name.startswith("_") and each.defining_class.__module__ not in {"builtins", "enum", "typing"}:
            yield each.name, getattr(of, each.name)


@cache
def _notes(of: type) -> dict[str, str]:
    """The strings below the fields of a class, on one line each."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(of))).body[0]
    except (OSError, TypeError):
        return {}
    assert isinstance(tree, ast.ClassDef)
    notes = {}
    for field, text in zip(tree.body, tree.body[1:], strict=False):
        match field, text:
            case (
                (ast.AnnAssign(target=ast.Name(name)) | ast.Assign(targets=[ast.Name(name)])),
                ast.Expr(ast.Constant(str(note))),
            ):
                notes[name] = " ".join(note.split())
    return notes


def _shown(kind: Any) -> str:
    """An annotation as the source has it."""
    return kind if isinstance(kind, str) else inspect.formatannotation(kind)


def _code(name: str, of: Any) -> str:
    """A signature, or the type of a property, in a block of code; nothing if it has none."""
    if isinstance(of, property):
        signature = f"{name}: {_shown(inspect.get_annotations(of.fget).get('return') if of.fget else None)}"
    else:
        signature = _signature(name, of)
    return f"```python\n{signature}\n```" if signature else ""


def _signature(name: str, of: Any) -> str:
    """As a program calls it; nothing if it has none."""
    try:
        signature = inspect.signature(of)
    except (TypeError, ValueError):
        return ""
    clean = [re.sub(r": '([^']+)'", r": \1", re.sub(r" at 0x[0-9a-f]+", "", str(each))) for each in _parts(signature)]
    returned = signature.return_annotation
    returns = "" if returned is signature.empty or inspect.isclass(of) else f" -> {_shown(returned)}"
    prefix = "async " if inspect.iscoroutinefunction(of) else ""
    line = f"{prefix}{name}({', '.join(clean)}){returns}"
    if len(line) > WIDTH:
        line = f"{prefix}{name}(\n" + "".join(f"    {each},\n" for each in clean) + f"){returns}"
    return line


def _parts(signature: inspect.Signature) -> Iterator[str]:
    """The parameters without ``self``, with the marks of what is positional or by keyword only."""
    positional = keyword = False
    for name, each in signature.parameters.items():
        if each.kind is each.POSITIONAL_ONLY:
            positional = True
        elif positional:
            yield "/"
            positional = False
        if each.kind is each.VAR_POSITIONAL:
            keyword = True
        elif each.kind is each.KEYWORD_ONLY and not keyword:
            yield "*"
            keyword = True
        if name != "self":
            yield str(each)


@cache
def _anchors() -> dict[str, str]:
    """The page and anchor of each class and method by the name that docstrings have for it."""
    found: dict[str, str] = {}
    for module, page in MODULES.items():
        loaded = importlib.import_module(module)
        for name in exported(loaded):
            value = getattr(loaded, name)
            found.setdefault(name, f"{page}#{module}.{name}")
            if inspect.isclass(value) and not issubclass(value, Exception):
                for each, _ in _members(value):
                    found.setdefault(f"{name}.{each}", f"{page}#{module}.{name}.{each}")
    return found


def _prose(text: str | None, path: str) -> str:
    """A docstring as Markdown whose names are links. Indented code keeps its form."""
    lines = []
    for line in inspect.cleandoc(text or "").splitlines():
        code = line.startswith("    ")
        lines.append(line if code else re.sub(r"(?<!`)`([\w.]+)`(?!`)", lambda found: _link(found[1], path), line))
    return "\n".join(lines)


def _link(name: str, path: str) -> str:
    target = _anchors().get(name)
    return f"[`{name}`]({target})" if target and not path.endswith(f".{name}") else f"`{name}`"
