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
    made = {f"reference/{name}": "\n".join(_module(module)) for module, name in MODULES.items()}
    return {**made, "reference/python-sync.md": "\n".join(_without_asyncio())}


def exported(module: ModuleType) -> list[str]:
    """The names of ``__all__``; without it, the classes that the module makes."""
    made = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
    return sorted(getattr(module, "__all__", [name for name in made if inspect.isclass(vars(module)[name])]))


def _module(name: str) -> Iterator[str]:
    module = importlib.import_module(name)
    yield from (f"# {name} {{ #{name} }}", "", "*Generated from signatures and docstrings.*", "")
    yield from (*_prose(module.__doc__, name), "")
    values = {each: getattr(module, each) for each in exported(module)}
    classes = {each: value for each, value in values.items() if inspect.isclass(value)}
    errors = {each: value for each, value in classes.items() if issubclass(value, Exception)}
    functions = {each: value for each, value in values.items() if inspect.isfunction(value)}
    for each, value in classes.items():
        if each not in errors:
            yield from _class(f"{name}.{each}", each, value)
    for each, function in functions.items():
        yield from (f"## {each} {{ #{name}.{each} }}", "", *_code(each, function), *_prose(function.__doc__, name), "")
    if errors:
        yield from ("## Errors", "", "Reasons, codes and what to do: [errors](errors.md).", "")
        yield from ("| class | |", "|---|---|")
        for each, value in errors.items():
            yield f"| `{each}`{{ #{name}.{each} }} | {_cell(' '.join(_prose(value.__doc__, name)))} |"
        yield ""
    others = [each for each in values if each not in classes and each not in functions]
    if others:
        yield from ("## Constants and types", "", "| name | value |", "|---|---|")
        for each in others:
            yield f"| `{each}`{{ #{name}.{each} }} | {_value(values[each])} |"


def _cell(text: str) -> str:
    """Text for a cell of a table."""
    return text.replace("|", "\\|")


def _value(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(f"`{getattr(each, '__name__', each)}`" for each in value)
    return f"`{re.sub(r' at 0x[0-9a-f]+', '', repr(value))}`"


def _class(path: str, name: str, of: type) -> Iterator[str]:
    yield from (f"## {name} {{ #{path} }}", "")
    if not issubclass(of, enum.Enum) and name not in MADE_BY_CALLS:
        yield from _code(name, of)
    yield from (*_prose(of.__doc__, path), "")
    if issubclass(of, enum.Enum):
        notes = _notes(of)
        yield from ("| member | value | |", "|---|---|---|")
        for member in of:
            yield f"| `{member.name}`{{ #{path}.{member.name} }} | `{member.value!r}` | {notes.get(member.name, '')} |"
        yield ""
        return
    fields = {each: kind for base in reversed(of.__mro__) for each, kind in inspect.get_annotations(base).items()}
    fields = {each: kind for each, kind in fields.items() if not each.startswith("_") and "ClassVar" not in str(kind)}
    if fields:
        notes = {each: note for base in reversed(of.__mro__) for each, note in _notes(base).items()}
        yield from ("| field | type | |", "|---|---|---|")
        for each, kind in fields.items():
            yield f"| `{each}`{{ #{path}.{each} }} | `{_cell(_shown(kind))}` | {notes.get(each, '')} |"
        yield ""
    for each, static in _members(of):
        if each in fields:
            continue
        yield from (f"### {name}.{each} {{ #{path}.{each} }}", "")
        if isinstance(static, property):
            returns = inspect.get_annotations(static.fget).get("return") if static.fget else None
            yield from ("```python", f"{each}: {_shown(returns)}", "```", "", *_prose(static.__doc__, path), "")
        else:
            value = getattr(of, each)
            yield from (*_code(each, value), *_prose(getattr(value, "__doc__", ""), path), "")


def _members(of: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties, inherited ones too, those of builtins not."""
    for each in inspect.classify_class_attrs(of):
        if not each.name.startswith("_") and each.defining_class.__module__ not in {"builtins", "enum", "typing"}:
            yield each.name, inspect.getattr_static(of, each.name)


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
                notes[name] = _cell(" ".join(note.split()))
    return notes


def _shown(kind: Any) -> str:
    """An annotation as the source has it."""
    return kind if isinstance(kind, str) else inspect.formatannotation(kind)


def _code(name: str, of: Any) -> list[str]:
    """A signature in a block of code; nothing if it has none."""
    try:
        signature = inspect.signature(of)
    except (TypeError, ValueError):
        return []
    clean = [re.sub(r": '([^']+)'", r": \1", re.sub(r" at 0x[0-9a-f]+", "", str(each))) for each in _parts(signature)]
    returned = signature.return_annotation
    returns = "" if returned is signature.empty or inspect.isclass(of) else f" -> {_shown(returned)}"
    prefix = "async " if inspect.iscoroutinefunction(of) else ""
    line = f"{prefix}{name}({', '.join(clean)}){returns}"
    if len(line) > WIDTH:
        line = f"{prefix}{name}(\n" + "".join(f"    {each},\n" for each in clean) + f"){returns}"
    return ["```python", line, "```", ""]


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


def _prose(text: str | None, path: str) -> list[str]:
    """A docstring as Markdown whose names are links. Indented code keeps its form."""
    lines = []
    for line in inspect.cleandoc(text or "").splitlines():
        code = line.startswith("    ")
        lines.append(line if code else re.sub(r"(?<!`)`([\w.]+)`(?!`)", lambda found: _link(found[1], path), line))
    return lines


def _link(name: str, path: str) -> str:
    target = _anchors().get(name)
    return f"[`{name}`]({target})" if target and not path.endswith(f".{name}") else f"`{name}`"


def _without_asyncio() -> Iterator[str]:
    yield from ("---", "search:", "  exclude: true", "---", "", "# Without asyncio", "")
    yield from ("*Generated from signatures.*", "")
    yield (
        "The classes of these modules have the methods of the asynchronous ones, with the same arguments, answers and "
        "errors. Methods block, and threads may share a client."
    )
    for name, of in WITHOUT_ASYNCIO.items():
        module, described = importlib.import_module(name), MODULES[of]
        yield from ("", f"## {name} {{ #{name} }}", "", f"Described under [{of}]({described}).")
        for each in exported(module):
            value = getattr(module, each)
            yield from ("", f"### {each} {{ #{name}.{each} }}", "")
            yield from ("| method or property | |", "|---|---|")
            for member, static in _members(value):
                shown = _code(member, getattr(value, member))
                line = " ".join(shown[1].split()) if shown and not isinstance(static, property) else member
                yield f"| `{member}`{{ #{name}.{each}.{member} }} | `{_cell(line)}` |"
