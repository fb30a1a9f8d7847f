"""A name that is searched for has one meaning: each class of the package and of the programs has a name of its own."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]

TWINS = {"ExecutorClient", "FleetClient", "FleetSequence", "Sequence"}
"""Public classes of the async client. Each has a generated twin of the same name for programs without asyncio
(`client.sync`, `client.fleet.sync`): a program changes its import and nothing else."""


def test_a_class_name_occurs_once() -> None:
    places: dict[str, list[str]] = {}
    for path in sorted(each for folder in ("ferrum_rpc", "clients") for each in (ROOT / folder).rglob("*.py")):
        if "executor/v1" in path.as_posix():  # generated from the protos
            continue
        for name in re.findall(r"^ *class (\w+)", path.read_text("utf-8"), re.MULTILINE):
            places.setdefault(name, []).append(str(path.relative_to(ROOT)))
    assert len(places) > 400
    assert {name: found for name, found in places.items() if len(found) > 1 and name not in TWINS} == {}
    twins = {name: [path.endswith("sync.py") for path in places[name]] for name in TWINS}
    assert all(found == [False, True] for found in twins.values())
