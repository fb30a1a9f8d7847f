"""Every public name of the client with its signature. What programs import and call is in `client_names.txt`; a name
that goes, or an argument that changes, is a difference.

    python -m tests.unit.test_client_names > tests/unit/client_names.txt
"""

from __future__ import annotations

import enum
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

RECORDED = Path(__file__).with_name("client_names.txt")
MODULES = ("ferrum_rpc.client", "ferrum_rpc.client.fleet", "ferrum_rpc.client.sync", "ferrum_rpc.client.fleet.sync")


MADE_BY_CALLS = {"FleetSequence", "Item", "Member", "Sequence"}
"""Classes that programs do not construct: their constructors are not public."""


def signature(of: Any) -> str:
    try:
        return re.sub(r"(: |-> )'([^']+)'", r"\1\2", re.sub(r" at 0x[0-9a-f]+", "", str(inspect.signature(of))))
    except (TypeError, ValueError):
        return ""


def members(of: type) -> Iterator[str]:
    """Public methods, properties, enum members and fields, inherited ones too, those of builtins not."""
    fields = {name: kind for each in reversed(of.__mro__) for name, kind in inspect.get_annotations(each).items()}
    for each in inspect.classify_class_attrs(of):
        if each.name.startswith("_") or each.defining_class.__module__ in {"builtins", "enum"} or each.name in fields:
            continue
        value, static = getattr(of, each.name), inspect.getattr_static(of, each.name)
        if isinstance(static, property):
            yield f".{each.name} -> {inspect.get_annotations(static.fget).get('return') if static.fget else None}"
        elif isinstance(value, enum.Enum):
            yield f".{each.name} = {value.value!r}"
        else:
            yield f".{each.name}{signature(value)}"
    yield from (f".{name}: {kind}" for name, kind in fields.items() if not name.startswith("_"))


def exported(module: ModuleType) -> list[str]:
    """The names of ``__all__``; without it, the classes that the module makes."""
    made = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
    return sorted(getattr(module, "__all__", [name for name in made if inspect.isclass(vars(module)[name])]))


def names() -> Iterator[str]:
    for module in map(importlib.import_module, MODULES):
        yield module.__name__
        for name in exported(module):
            value = getattr(module, name)
            called = inspect.isfunction(value) or (inspect.isclass(value) and not issubclass(value, enum.Enum))
            yield f"    {name}{signature(value) if called and name not in MADE_BY_CALLS else ''}"
            if inspect.isclass(value) and value.__module__.startswith("ferrum_rpc.client"):
                yield from (f"        {each}" for each in members(value))


def test_public_names_are_those_that_are_recorded() -> None:
    assert list(names()) == RECORDED.read_text().splitlines()


if __name__ == "__main__":
    print("\n".join(names()))
